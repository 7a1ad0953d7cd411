/*
 * about: the first messages to the model: greetings, questions about Shoal and about the model, and
 * questions of general knowledge, which it declines. The answer is one of a few fixed replies.
 *
 * A message is an opening, a wording of the intent and a closing. A wording that begins with '!' is
 * a request, one that begins with '?' a bare word, which takes no opening: "hello, shoal" greets.
 * The wordings differ between the languages, so the language is a part of the key. A message has
 * one key in all languages and intents (test_about checks it), so no bare word of English occurs in
 * the other languages, nor one that Japanese and Chinese share.
 */
#define _GNU_SOURCE
#include "families/internal.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum { REMARK, QUESTION, REQUEST, KINDS };
enum { WORDINGS = 14, OPENINGS = 12, REQUEST_OPENINGS = 6, CLOSINGS = 8 };
enum { PLACES = 8, SUBJECTS = 16, PLACE_WORDINGS = 6 };

struct intent {
    bool remark;
    const char *replies[3], *wordings[3][WORDINGS];
};

/* [language]; requests take the first REQUEST_OPENINGS of the questions. */
static const char *const openings[2][3][OPENINGS] = {
    [REMARK] = {{"", "oh, ", "ok, ", "well, ", "hey, ", "so, ", "ah, ", "alright, ", "yes, ",
                 "great, ", "right, ", "good, "},
                {"", "あ、", "ああ、", "はい、", "では、", "えっと、", "うん、", "おお、", "よし、",
                 "さて、", "まあ、", "どうも、"},
                {"", "啊，", "哦，", "嗯，", "好，", "好的，", "那，", "那么，", "嘿，", "哈，",
                 "行，", "哎，"}},
    [QUESTION] = {{"", "hello, ", "hi, ", "hi there, ", "hey, ", "ok, ", "so, ", "well, ",
                   "excuse me, ", "please, ", "one question: ", "i have a question: "},
                  {"", "こんにちは、", "こんにちは。", "すみません、", "あの、", "ねえ、", "では、",
                   "ところで、", "質問です。", "質問があります。", "はじめまして。", "さて、"},
                  {"", "你好，", "你好！", "您好，", "嗨，", "对了，", "请问", "请问，", "问一下，",
                   "我想问，", "想请教一下，", "那么，"}},
};
static const char *const closings[KINDS][3][CLOSINGS] = {
    [REMARK] = {{"", "!", ".", "?", " :)", " shoal", ", shoal!", "!!"},
                {"", "！", "。", "!", "、shoal", "、shoal！", "！！", "…"},
                {"", "！", "。", "!", "，shoal", "，shoal！", "！！", "~"}},
    [QUESTION] = {{"", "?", " ?", "??", " please", "? please", ", please?", "? thanks"},
                  {"", "？", "?", "。", "？教えて", "？教えてください", "。教えてください。",
                   "？お願いします"},
                  {"", "？", "?", "？谢谢", "？请告诉我", "？谢谢！", "，请告诉我", "？？"}},
    [REQUEST] = {{"", ".", " please", ", please", "!", " now", ", thanks", " please."},
                 {"", "。", "！", "ください", "ください。", "くれますか", "くれますか？",
                  "もらえますか？"},
                 {"", "。", "！", "吧", "，谢谢", "，好吗", "，可以吗？", "，谢谢！"}},
};

/* What general knowledge is asked about: first PLACES places, which fit every wording. */
static const char *const subjects[3][SUBJECTS] = {
    {"france", "japan", "brazil", "india", "egypt", "china", "mexico", "canada", "music",
     "football", "the moon", "the sea", "love", "winter", "cats", "coffee"},
    {"フランス", "日本", "ブラジル", "インド", "エジプト", "中国", "メキシコ", "カナダ", "音楽",
     "サッカー", "月", "海", "愛", "冬", "猫", "コーヒー"},
    {"法国", "日本", "巴西", "印度", "埃及", "中国", "墨西哥", "加拿大", "音乐", "足球", "月亮",
     "大海", "爱情", "冬天", "猫", "咖啡"},
};

static const struct intent intents[] = {
    {true,
     {"hello! ask me what shoal is or what i can do, or give me a small task.",
      "こんにちは。Shoalのことや私にできることを聞いてください。小さな課題を出しても構いません。",
      "你好！可以问我Shoal是什么、我会做什么，也可以给我一个小任务。"},
     {{"hello", "hi", "hey", "hi there", "hello there", "good morning", "good afternoon",
       "good evening", "greetings", "nice to meet you", "how are you"},
      {"こんにちは", "やあ", "おはよう", "おはようございます", "こんばんは", "はじめまして",
       "ハロー", "よろしく", "よろしくお願いします", "お元気ですか"},
      {"你好", "您好", "嗨", "大家好", "早上好", "下午好", "晚上好", "早", "哈喽", "很高兴认识你",
       "在吗"}}},
    {false,
     {"shoal is a program that trains, serves, debates and evolves lora agents on one small "
      "language model, on an ordinary cpu.",
      "Shoalは、一つの小さな言語モデルの上で多数のLoRAエージェントを学習、提供、討論、進化させる"
      "プログラムです。普通のCPUで動きます。",
      "Shoal是一个程序，在一个小型语言模型上训练和运行大量LoRA智能体，并让它们辩论和进化，"
      "普通CPU就能运行。"},
     {{"?shoal", "what is shoal", "what's shoal", "what does shoal do", "what is this",
       "what is this program", "what does this program do", "what is shoal for",
       "what kind of program is shoal", "what can i do with shoal", "!tell me about shoal",
       "!explain shoal"},
      {"shoalとは", "shoalとは何ですか", "shoalって何", "shoalは何ですか",
       "shoalは何をするものですか", "shoalで何ができますか", "これは何ですか",
       "このプログラムは何ですか", "shoalはどんなプログラムですか", "!shoalについて教えて",
       "!shoalを説明して"},
      {"shoal是什么", "什么是shoal", "shoal是做什么的", "shoal有什么用", "shoal能做什么",
       "这是什么", "这个程序是什么", "这个程序是做什么的", "shoal是什么程序", "!介绍一下shoal",
       "!说说shoal"}}},
    {false,
     {"i am the small language model that comes with shoal. i have 4.7 million parameters and "
      "learned generated tasks only.",
      "私はShoalに付属する小さな言語モデルです。パラメーターは470万で、"
      "生成された課題だけを学びました。",
      "我是Shoal自带的小型语言模型，有470万个参数，只学过自动生成的任务。"},
     {{"who are you", "what are you", "what is your name", "are you a human", "are you a robot",
       "what model are you", "which model is this", "who am i talking to",
       "how many parameters do you have", "what were you trained on", "!introduce yourself",
       "!tell me about yourself"},
      {"あなたは誰ですか", "あなたは何ですか", "名前は何ですか", "お名前は", "あなたは人間ですか",
       "君は誰", "どんなモデルですか", "パラメーターはいくつですか", "何を学びましたか",
       "!自己紹介して", "!あなたのことを教えて"},
      {"你是谁", "你是什么", "你叫什么名字", "你叫什么", "你是人吗", "你是机器人吗", "你是什么模型",
       "你有多少参数", "你学过什么", "!介绍一下你自己", "!自我介绍一下"}}},
    {false,
     {"i can sort letters, compare numbers, add, follow a route, remember the facts of a talk and "
      "answer questions about shoal.",
      "文字の並べ替え、数の比較、足し算、道順の問題ができます。会話に出た事実やShoalについての質問"
      "に"
      "も答えます。",
      "我会给字母排序、比较数字、做加法、推算路线，也能记住对话中的事实，回答关于Shoal的问题。"},
     {{"what can you do", "what can i ask you", "what do you know", "how can you help me",
       "can you help me", "what are you good at", "which tasks can you do", "what are your skills",
       "what can i do here", "!help", "!help me", "!show me what you can do"},
      {"何ができますか", "あなたは何ができますか", "何を聞けますか", "何を知っていますか",
       "得意なことは何ですか", "どんな課題ができますか", "何をしてくれますか", "!助けて",
       "!手伝って", "!できることを教えて"},
      {"你能做什么", "你会什么", "你会做什么", "我可以问你什么", "你知道什么", "你能帮我吗",
       "你擅长什么", "你会哪些任务", "!帮帮我", "!帮我一下"}}},
    {false,
     {"write conversations to a jsonl file, then run: shoal train models/fry --data file.jsonl "
      "--out adapter. it takes seconds to minutes.",
      "会話をJSONLファイルに書き、shoal train models/fry --data file.jsonl --out adapter"
      "を実行してください。数秒から数分で終わります。",
      "把对话写进JSONL文件，然后运行shoal train models/fry --data file.jsonl --out "
      "adapter，几秒到几分钟就能完成。"},
     {{"how do i train an adapter", "how do i train", "how can i train an adapter",
       "how to train an adapter", "how do i fine-tune the model", "how do i train on my own data",
       "how do i make my own agent", "how can i teach you something",
       "which command trains an adapter", "!show me how to train an adapter",
       "!i want to train an adapter"},
      {"アダプターはどう学習させますか", "アダプターの学習方法は", "アダプターを学習させるには",
       "微調整するには", "微調整はどうやりますか", "自分のデータで学習させるには",
       "どうやって学習させますか", "学習のコマンドは何ですか", "自分のエージェントを作るには",
       "!学習のやり方を教えて", "!アダプターの作り方を教えて"},
      {"怎么训练适配器", "如何训练适配器", "怎样训练一个适配器", "怎么训练", "怎么微调模型",
       "怎么用自己的数据训练", "怎么做自己的智能体", "用什么命令训练", "!教我训练适配器",
       "!告诉我怎么训练"}}},
    {false,
     {"a lora adapter is a small low-rank change of a model's weights. the base model stays "
      "frozen, and many adapters share it.",
      "LoRAアダプターは、モデルの重みに加える低ランクの小さな変更です。ベースモデルは変わらず、"
      "多くのアダプターがそれを共有します。",
      "LoRA适配器是对模型权重的低秩小改动。基座模型保持不变，由许多适配器共用。"},
     {{"?lora", "what is a lora adapter", "what is lora", "what's lora", "what is an adapter",
       "what does an adapter do", "what are adapters", "how does lora work", "what does lora mean",
       "!explain lora", "!tell me about adapters"},
      {"loraとは", "loraアダプターとは何ですか", "loraとは何ですか", "loraって何",
       "アダプターとは何ですか", "アダプターって何", "アダプターは何をしますか", "loraの仕組みは",
       "!loraについて教えて", "!アダプターを説明して"},
      {"什么是lora适配器", "lora适配器是什么", "lora是什么", "什么是lora", "什么是适配器",
       "适配器是什么", "适配器有什么用", "lora是什么意思", "!解释一下lora", "!介绍一下适配器"}}},
    {false,
     {"in a debate, several agents answer, read the answers of the others and answer again. then "
      "they vote.",
      "討論では、複数のエージェントが答え、互いの答えを読んでからもう一度答えます。"
      "最後に投票します。",
      "辩论时，几个智能体先各自回答，看过彼此的答案后再答一次，最后投票。"},
     {{"?debate", "what is a debate", "what's a debate", "how does a debate work",
       "how do agents debate", "what happens in a debate", "what are debates",
       "what does debate mean here", "!explain the debate", "!tell me about debates"},
      {"討論とは", "討論とは何ですか", "討論って何", "討論はどう進みますか", "討論の仕組みは",
       "討論では何をしますか", "エージェントはどう討論しますか", "!討論について教えて",
       "!討論を説明して"},
      {"什么是辩论", "辩论是什么", "辩论怎么进行", "辩论是怎么回事", "智能体怎么辩论",
       "辩论时会发生什么", "辩论是什么意思", "!解释一下辩论", "!介绍一下辩论"}}},
    {false,
     {"evolution measures adapters, selects good ones as parents, and merges or mutates them to "
      "make the next generation.",
      "進化では、アダプターを測定し、よいものを親に選び、マージや突然変異で次の世代を作ります。",
      "进化会测量适配器，选出好的作为父代，再通过合并和变异产生下一代。"},
     {{"?evolution", "what is evolution", "what's evolution", "how does evolution work",
       "how do agents evolve", "how do adapters evolve", "what does evolve mean",
       "what does shoal evolve do", "how are new adapters made", "!explain evolution",
       "!tell me about evolution"},
      {"進化とは", "進化とは何ですか", "進化って何", "進化の仕組みは", "進化では何をしますか",
       "エージェントはどう進化しますか", "アダプターはどう進化しますか",
       "次の世代はどう作られますか", "!進化について教えて", "!進化を説明して"},
      {"什么是进化", "进化是什么", "进化怎么进行", "智能体怎么进化", "适配器怎么进化",
       "进化是怎么回事", "进化是什么意思", "下一代是怎么产生的", "!解释一下进化",
       "!介绍一下进化"}}},
    {false,
     {"fitness is the score that selection maximises, for example accuracy. a generation is one "
      "round of selection and new adapters.",
      "適応度は選択の基準になる点数で、たとえば正解率です。世代は、"
      "選択して新しいアダプターを作る一回分です。",
      "适应度是选择所依据的分数，例如准确率。一代就是做一次选择并产生新的适配器。"},
     {{"?fitness", "what is fitness", "what is a generation", "what does fitness mean",
       "what does generation mean", "how is fitness measured", "what is the fitness of an adapter",
       "what are fitness and generation", "!explain fitness", "!explain what a generation is"},
      {"適応度とは", "適応度とは何ですか", "適応度って何", "適応度はどう測りますか",
       "世代とは何ですか", "世代って何", "世代とは", "適応度と世代は何ですか",
       "!適応度について教えて", "!世代を説明して"},
      {"什么是适应度", "适应度是什么", "适应度是什么意思", "适应度怎么测量", "什么是一代",
       "一代是什么意思", "适应度和一代是什么", "!解释一下适应度", "!介绍一下适应度"}}},
    {false,
     {"the world is a grid in which agents look for food. with a model, each policy is an adapter "
      "that learns meanwhile.",
      "ワールドは、エージェントが食料を探す格子の世界です。モデルを指定すると、方策はアダプターに"
      "なり、活動しながら学習します。",
      "在网格世界里，智能体四处寻找食物。指定模型后，每个策略都是一个适配器，边行动边学习。"},
     {{"?world simulation", "what is the world", "what is the world simulation",
       "what happens in the world", "how does the world work", "what is the simulation",
       "what do agents do in the world", "what does shoal world do", "!explain the world",
       "!tell me about the world"},
      {"ワールドとは", "ワールドとは何ですか", "ワールドって何", "ワールドでは何が起きますか",
       "ワールドの仕組みは", "シミュレーションとは何ですか", "エージェントはワールドで何をしますか",
       "!ワールドについて教えて", "!ワールドを説明して"},
      {"什么是网格世界", "网格世界是什么", "网格世界里有什么", "网格世界里会发生什么",
       "世界模拟是什么", "什么是世界模拟", "智能体在世界里做什么", "!解释一下网格世界",
       "!介绍一下网格世界"}}},
    {false,
     {"shoal runs on your own machine and needs no internet. only commands that name a remote "
      "side, such as shoal pull, connect.",
      "Shoalは手元のマシンだけで動き、データは外に出ません。ネットに接続するのは、shoal pullなど"
      "接続先を指定したコマンドだけです。",
      "Shoal在你自己的机器上运行，不需要联网，数据也不会外传。只有shoal pull这类指定远端的命令才会"
      "联网。"},
     {{"does it need the internet", "do i need the internet", "does shoal need the internet",
       "does it work offline", "can i use it offline", "can i use shoal without internet",
       "does my data leave the machine", "is my data sent anywhere", "is it private",
       "do you use the cloud", "where does my data go"},
      {"インターネットは必要ですか", "ネットは必要ですか", "ネット接続は要りますか",
       "オフラインで使えますか", "ネットなしで動きますか", "データは外に送られますか",
       "データはどこに行きますか", "クラウドを使いますか", "shoalはネットにつながりますか"},
      {"需要联网吗", "需要网络吗", "要上网吗", "没有网络能用吗", "可以离线使用吗", "能离线运行吗",
       "我的数据会外传吗", "数据会发到哪里", "shoal需要联网吗", "shoal会联网吗"}}},
    {false,
     {"shoal runs on linux on x86-64. two processor cores are enough, and it does not use a gpu.",
      "Shoalはx86-64のLinuxで動きます。CPUコアが二つあれば十分で、GPUは使いません。",
      "Shoal在x86-64的Linux上运行，两个CPU核心就够了，不使用GPU。"},
     {{"what machines does it run on", "which computers does it run on", "what machine do i need",
       "do i need a gpu", "does it use a gpu", "does it run on linux", "does it run on windows",
       "what hardware do i need", "how many cores do i need", "what are the requirements",
       "can my laptop run shoal"},
      {"どんなマシンで動きますか", "どんなパソコンで動きますか", "gpuは必要ですか",
       "gpuを使いますか", "windowsで動きますか", "linuxで動きますか", "必要な環境は",
       "コアはいくつ必要ですか", "ノートパソコンで動きますか"},
      {"能在什么机器上运行", "需要什么机器", "需要什么电脑", "需要gpu吗", "用gpu吗",
       "能在windows上运行吗", "能在linux上运行吗", "需要几个核心", "对硬件有什么要求",
       "我的笔记本能运行吗"}}},
    {false,
     {"that depends on the machine. this small model replies in less than a second, and a small "
      "adapter trains in seconds.",
      "速さはマシンによります。この小さなモデルなら返事は一秒もかからず、小さなアダプターの学習は"
      "数秒で終わります。",
      "速度取决于机器。这个小模型不到一秒就能回答，小适配器几秒就能训练好。"},
     {{"?speed", "how fast is it", "how fast is shoal", "how fast are you", "is it fast",
       "is shoal fast", "is it slow", "how long does training take", "how long does a reply take",
       "how quick is it", "how much time does it take"},
      {"どのくらい速いですか", "速いですか", "shoalは速いですか", "速さはどのくらいですか",
       "学習は何分かかりますか", "学習にどのくらいかかりますか", "返事は速いですか", "遅いですか",
       "速度は"},
      {"有多快", "快吗", "shoal有多快", "shoal快吗", "速度怎么样", "速度如何", "慢吗", "训练要多久",
       "回答要多久", "你有多快"}}},
    {false,
     {"the same model, adapter, prompt, settings and seed always give the same reply, whatever "
      "other requests or threads run.",
      "モデル、アダプター、プロンプト、設定、シードが同じなら、ほかのリクエストやスレッド数に"
      "関係なく、返事は必ず同じです。",
      "只要模型、适配器、提示词、设置和随机种子相同，回答就一定相同，与其他请求和线程数无关。"},
     {{"are results reproducible", "are the results reproducible", "is it reproducible",
       "is it deterministic", "is shoal deterministic", "do i get the same result twice",
       "are the replies always the same", "are results random", "can i repeat a run",
       "will i get the same answer again", "does the number of threads change the result"},
      {"結果は再現できますか", "再現性はありますか", "結果は毎回同じですか", "同じ結果になりますか",
       "結果はランダムですか", "返事は毎回同じですか", "決定的ですか",
       "もう一度実行しても同じですか", "スレッド数で結果は変わりますか"},
      {"结果可以复现吗", "结果能重现吗", "每次结果都一样吗", "结果是随机的吗", "结果是确定的吗",
       "回答每次都一样吗", "种子相同结果就相同吗", "再运行一次结果一样吗", "线程数会影响结果吗"}}},
    {false,
     {"start with the readme and the folder docs. the tutorial is the first half hour, and every "
      "command has --help.",
      "READMEとdocsフォルダーを見てください。最初はチュートリアルがおすすめです。どのコマンドにも"
      "--helpがあります。",
      "请看README和docs文件夹，建议先读入门教程。每个命令都有--help。"},
     {{"?docs", "where is the documentation", "where are the docs", "where can i read more",
       "is there a manual", "is there a tutorial", "where do i start", "how do i start",
       "where do i find help", "what should i read first", "!show me the documentation"},
      {"ドキュメントはどこですか", "文書はどこにありますか", "説明書はありますか",
       "マニュアルはありますか", "チュートリアルはありますか", "どこから始めればいいですか",
       "何を読めばいいですか", "使い方はどこに書いてありますか", "!ドキュメントを見せて"},
      {"文档在哪里", "文档在哪儿", "有文档吗", "有说明书吗", "有教程吗", "有手册吗", "从哪里开始",
       "应该先读什么", "在哪里可以了解更多", "!给我看看文档"}}},
    {true,
     {"you are welcome! ask me more about shoal, or give me a small task.",
      "どういたしまして。Shoalのことをまた聞いたり、小さな課題を出したりしてください。",
      "不客气！可以继续问我关于Shoal的问题，或者给我一个小任务。"},
     {{"thanks", "thank you", "thank you very much", "many thanks", "thanks a lot", "thx",
       "that helps", "that was helpful", "thanks for your help"},
      {"ありがとう", "ありがとうございます", "どうもありがとう", "どうもありがとうございます",
       "感謝します", "助かりました", "サンキュー", "分かりました。ありがとう"},
      {"谢谢", "谢谢你", "多谢", "非常感谢", "感谢", "十分感谢", "谢谢你的帮助", "谢谢了",
       "明白了，谢谢"}}},
    {true,
     {"goodbye! come back when you want to train or evolve agents.",
      "さようなら。学習や進化を試したくなったら、また来てください。",
      "再见！想训练或进化智能体的时候再来。"},
     {{"bye", "goodbye", "bye bye", "see you", "see you later", "see you soon", "good night",
       "that is all", "i have to go", "take care"},
      {"さようなら", "バイバイ", "またね", "また明日", "おやすみ", "おやすみなさい", "じゃあね",
       "失礼します", "それではまた"},
      {"再见", "拜拜", "回头见", "明天见", "晚安", "下次见", "我走了", "下次再聊", "后会有期"}}},
    {false,
     {"i cannot answer that, because i learned no general knowledge. i do small tasks and answer "
      "questions about shoal.",
      "それには答えられません。一般的な知識は学んでいないからです。小さな課題を解き、"
      "Shoalについての質問に答えることはできます。",
      "这个我答不了，因为我没有学过常识。我能做小任务，也能回答关于Shoal的问题。"},
     {{"what is the capital of %s", "how many people live in %s", "what is the weather in %s",
       "which language do people speak in %s", "how far away is %s", "who rules %s",
       "what is the history of %s", "what do you think about %s", "why do people like %s",
       "!write a poem about %s", "!write a song about %s", "!tell me a story about %s",
       "!tell me a joke about %s"},
      {"%sの首都はどこですか", "%sの人口は何人ですか", "%sの天気はどうですか",
       "%sでは何語を話しますか", "%sはどこにありますか", "%sの面積はどのくらいですか", "%sの歴史は",
       "%sをどう思いますか", "%sはなぜ人気がありますか", "!%sの詩を書いて", "!%sの歌を作って",
       "!%sの物語を聞かせて", "!%sについての冗談を言って"},
      {"%s的首都是哪里", "%s有多少人口", "%s的天气怎么样", "%s的人说什么语言", "%s在哪里",
       "%s的面积有多大", "%s的历史是什么", "你怎么看%s", "为什么大家喜欢%s", "!写一首关于%s的诗",
       "!写一首关于%s的歌", "!讲一个关于%s的故事", "!讲一个关于%s的笑话"}}},
};

/* As people write: a capital at the start, in names and in "I". */
static void capitalize(char *text) {
    static const char *const names[][2] = {
        {"shoal", "Shoal"}, {"lora", "LoRA"},   {"gpu", "GPU"},       {"linux", "Linux"},
        {" i ", " I "},     {"japan", "Japan"}, {"france", "France"}, {"china", "China"},
        {"india", "India"}, {"egypt", "Egypt"}, {"brazil", "Brazil"}, {"mexico", "Mexico"},
    };
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        char *at = strstr(text, names[i][0]);
        if (at) memcpy(at, names[i][1], strlen(names[i][1]));
    }
    if (isascii((unsigned char)*text)) *text = (char)toupper((unsigned char)*text);
}

/* Half of the messages have no opening, and half of them one of the first two closings. */
static int sample_opening(struct rng *r, const char *wording) {
    int n = *wording == '?' ? 1 : *wording == '!' ? REQUEST_OPENINGS : OPENINGS;
    return rng_below(r, 2) ? 0 : rng_between(r, 0, n - 1);
}

static int sample_closing(struct rng *r) {
    return rng_between(r, 0, rng_below(r, 2) ? 1 : CLOSINGS - 1);
}

/* Sets the question and the key of `it`. */
static void message_make(struct rng *r, int lang, int k, struct task_item *it) {
    const struct intent *intent = &intents[k];
    int n = 0;
    while (n < WORDINGS && intent->wordings[lang][n]) n++;
    int w = rng_between(r, 0, n - 1), closing = sample_closing(r);
    int subject = rng_between(r, 0, w < PLACE_WORDINGS ? PLACES - 1 : SUBJECTS - 1);
    const char *wording = intent->wordings[lang][w];
    int opening = sample_opening(r, wording);
    int kind = intent->remark ? REMARK : *wording == '!' ? REQUEST : QUESTION;
    const char *slot = strstr(wording, "%s");
    wording += *wording == '!' || *wording == '?';
    int before = (int)(slot ? slot - wording : (ptrdiff_t)strlen(wording));
    it->question = xasprintf("%s%.*s%s%s%s", openings[MIN(kind, QUESTION)][lang][opening], before,
                             wording, slot ? subjects[lang][subject] : "", slot ? slot + 2 : "",
                             closings[kind][lang][closing]);
    it->key =
        xasprintf("about %d %d %d %d %d %d", lang, k, w, opening, closing, slot ? subject : 0);
    if (rng_below(r, 3) == 0) capitalize(it->question);
}

static void generate(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    int lang = item_language(r), k = rng_between(r, 0, (int)ARRAY_LEN(intents) - 1);
    message_make(r, lang, k, it);
    it->lang = family_languages[lang];
    it->work = xstrdup("");
    it->whole_replies = true;
    item_add_choice(it, intents[k].replies[lang]);
    while (it->n_choices < 4)
        item_add_choice(it, intents[rng_below(r, ARRAY_LEN(intents))].replies[lang]);
}

const struct task_family about_family = {
    "about", true, 0, "talk about Shoal and about the model", generate, .conversations = true};
