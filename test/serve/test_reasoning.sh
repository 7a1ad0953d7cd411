#!/bin/sh
# test_reasoning: the reasoning of a model in the APIs of a running server. The model is a copy of fry in which two
# tokens are <think> and </think>, with a template like Qwen3's and an adapter that has learned one conversation by heart.
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
servers=
trap 'for pid in $servers; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; done; rm -rf "$tmp"' EXIT
command -v python3 >/dev/null || { echo "skip reasoning: python3 is not installed"; exit 0; }

# Copies of fry: in "thinker" the model writes <think>, in "opened" the template does; in "special" the tags are special
# tokens, [THINK] and [/THINK], with the same ids.
cat >"$tmp/make.py" <<'END'
import json, sys
folder, opened, special = sys.argv[1], sys.argv[2] == 'opened', sys.argv[2] == 'special'
OPEN, CLOSE = ('[THINK]', '[/THINK]') if special else ('<think>', '</think>')
path = folder + '/tokenizer.json'
t = json.load(open(path))
vocab, merges = t['model']['vocab'], t['model']['merges']
TAGS = {'Ġcritic': OPEN, 'Ġexplorer': CLOSE} # no other token contains these
for old, new in TAGS.items():
    vocab[new] = vocab.pop(old)
    t['added_tokens'].append({'id': vocab[new], 'content': new, 'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': special})
t['model']['merges'] = [m for m in merges if ''.join(m.split(' ') if isinstance(m, str) else m) not in TAGS]
json.dump(t, open(path, 'w'))
path = folder + '/tokenizer_config.json'
c = json.load(open(path))
c['chat_template'] = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
    "{% elif " + ('true' if opened else 'reasoning_effort == "high"') + " %}{{ '<think>\n' }}{% endif %}{% endif %}")
c['chat_template'] = c['chat_template'].replace('<think>', OPEN).replace('</think>', CLOSE)
json.dump(c, open(path, 'w'))
END
for i in thinker opened special; do
    cp -r test/models/fry-1 "$tmp/$i" && python3 "$tmp/make.py" "$tmp/$i" $i || { echo "not ok reasoning: no copy of the model"; exit 0; }
done
printf '%s\n' '{"messages": [{"role": "user", "content": "12 + 30 = ?"}, {"role": "assistant", "content": "<think>\n12 and 30\n</think>\n\nanswer: 42"}]}' >"$tmp/d.jsonl"
"$shoal" train "$tmp/thinker" --runs "$tmp/runs" --data "$tmp/d.jsonl" --out "$tmp/adder" --r 16 --lr 4e-3 --epochs 400 --kv-cache-dtype f32 --quiet >/dev/null 2>"$tmp/err" ||
    { echo "not ok reasoning: the adapter is trained: $(head -c 300 "$tmp/err")"; exit 0; }

# up NAME PARSER: starts a server with the copy NAME; its address is in $url.
up() {
    : >"$tmp/listening"
    "$shoal" serve "$tmp/$1" --adapter "adder=$tmp/adder" --state "$tmp/state-$1-$2" --reasoning-parser "$2" --kv-cache-dtype f32 --port 0 --json --drain-seconds 2 >"$tmp/listening" 2>"$tmp/err" &
    servers="$servers $!"
    for _ in $(seq 600); do
        url=$(sed -n 's/.*"listening":"\([^"]*\)".*/\1/p' "$tmp/listening")
        [ -n "$url" ] && return 0
        sleep 0.1
    done
    echo "not ok reasoning: the server starts: $(head -c 300 "$tmp/err")"
    exit 0
}
up thinker auto
THINKER=$url
up thinker none
NONE=$url
up special auto
SPECIAL=$url
up opened auto
"$shoal" serve "$tmp/thinker" --reasoning-format harmony 2>&1 | grep -q "no 'harmony'; there are auto, none, think, mistral" &&
    echo "ok reasoning: an unknown parser is refused" || echo "not ok reasoning: an unknown parser is refused"

cat >"$tmp/client.py" <<'END'
import json, os, urllib.error, urllib.request
thinker, opened, special, none = (os.environ[n] for n in ('THINKER', 'OPENED', 'SPECIAL', 'NONE'))
ASK = [{'role': 'user', 'content': '12 + 30 = ?'}]
WHOLE = '<think>\n12 and 30\n</think>\n\nanswer: 42'

TOKEN = open(os.environ['TOKEN_FILE']).read().strip() # allows /api/create on the server thinker

def call(path, body, at):
    headers = {'Content-Type': 'application/json', **({'Authorization': 'Bearer ' + TOKEN} if at == thinker else {})}
    q = urllib.request.Request(at + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(q, timeout=120) as r:
            return r.status, r.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()

def post(path, at=thinker, **body):
    status, text = call(path, body, at)
    assert status == 200, (status, text[:300])
    return json.loads(text)

def refused(path, words, **body):
    status, text = call(path, body, thinker)
    assert status == 400 and words in text, (status, text[:300])

def same(have, want):
    assert have == want, 'have %r, want %r' % (have, want)

def body(**fields):
    return {'model': 'adder', 'temperature': 0, 'max_tokens': 40, 'messages': ASK, **fields}

def chat(at=thinker, **fields):
    return post('/v1/chat/completions', at, **body(**fields))

def parts(at=thinker, **fields):
    """(reasoning, content) of a reply"""
    m = chat(at, **fields)['choices'][0]['message']
    return m.get('reasoning_content'), m['content']

def deltas(at=thinker, **fields):
    status, text = call('/v1/chat/completions', body(stream=True, **fields), at)
    assert status == 200, text[:300]
    return [json.loads(e[6:]) for e in text.split('\n\n') if e.startswith('data: {')]

def joined(chunks, key):
    return ''.join(c['choices'][0]['delta'].get(key) or '' for c in chunks if c['choices'])

def ollama(path, at=thinker, **fields):
    ask = {'messages': ASK} if path == '/api/chat' else {'prompt': ASK[0]['content']}
    return post(path, at, **{'model': 'adder', 'stream': False, 'options': {'temperature': 0, 'num_predict': 40}, **ask, **fields})

def lines(path, **fields):
    ask = {'messages': ASK} if path == '/api/chat' else {'prompt': ASK[0]['content']}
    return [json.loads(l) for l in call(path, {'model': 'adder', 'options': {'temperature': 0, 'num_predict': 40}, **ask, **fields}, thinker)[1].splitlines()]

def raw(prompt):
    return post('/v1/completions', model='adder', prompt=prompt, temperature=0, max_tokens=40)['choices'][0]['text']

PROMPT = '<|im_start|>user\n12 + 30 = ?<|im_end|>\n<|im_start|>assistant\n'
DIRECT = raw(PROMPT + '<think>\n\n</think>\n\n') # the reply without reasoning

tests = []
def test(f):
    tests.append(f)

@test
def _():
    "OpenAI: a reply, its usage, and log-probabilities of every token"
    v = chat(logprobs=True)
    c, u = v['choices'][0], v['usage']
    same((c['message']['reasoning_content'], c['message']['content'], c['finish_reason']), ('12 and 30', 'answer: 42', 'stop'))
    tokens = [t['token'] for t in c['logprobs']['content']]
    same(''.join(tokens), WHOLE)
    same(u['completion_tokens_details'], {'reasoning_tokens': tokens.index('</think>') + 1})
    same(u['completion_tokens'], len(tokens) + 1) # and the end of the turn
    same(chat(messages=ASK, model='')['usage']['completion_tokens_details'], {'reasoning_tokens': 0}) # the base does not reason

@test
def _():
    "OpenAI: a stream has the same parts, log-probabilities and usage"
    v = chat(logprobs=True)
    for more in ({}, {'logprobs': True}):
        s = deltas(stream_options={'include_usage': True}, **more)
        same((joined(s, 'reasoning_content'), joined(s, 'content')), ('12 and 30', 'answer: 42'))
        same(s[-1]['usage']['completion_tokens_details'], v['usage']['completion_tokens_details'])
        order = [k for c in s if c['choices'] for k in c['choices'][0]['delta'] if k in ('reasoning_content', 'content') and c['choices'][0]['delta'][k]]
        same(order, sorted(order, reverse=True))
    same([t['token'] for c in s if c['choices'] for t in (c['choices'][0]['logprobs'] or {'content': []})['content']],
         [t['token'] for t in v['choices'][0]['logprobs']['content']])

@test
def _():
    "OpenAI: several completions"
    same([(c['message']['reasoning_content'], c['message']['content']) for c in chat(n=3)['choices']], [('12 and 30', 'answer: 42')] * 3)
    s = deltas(n=2)
    for i in (0, 1):
        own = [c for c in s if c['choices'] and c['choices'][0]['index'] == i]
        same((joined(own, 'reasoning_content'), joined(own, 'content')), ('12 and 30', 'answer: 42'))

@test
def _():
    "OpenAI: a reply that ends within the reasoning"
    v = chat(max_tokens=4)
    c = v['choices'][0]
    same((c['message']['content'], c['finish_reason'], v['usage']['completion_tokens_details']), ('', 'length', {'reasoning_tokens': 4}))
    assert '12 and 30'.startswith(c['message']['reasoning_content']) and c['message']['reasoning_content'], c
    same(parts(stop=['and']), ('12 ', ''))
    same(parts(stop=['</think>']), ('12 and 30', ''))
    same(parts(stop=['42']), ('12 and 30', 'answer: '))

@test
def _():
    "OpenAI: include_reasoning and reasoning_format"
    same(parts(include_reasoning=False), (None, 'answer: 42'))
    same(joined(deltas(include_reasoning=False), 'reasoning_content'), '')
    for f in ('auto', 'deepseek', None):
        same(parts(reasoning_format=f), ('12 and 30', 'answer: 42'))
    same(parts(reasoning_format='none'), (None, WHOLE))
    same(joined(deltas(reasoning_format='none'), 'content'), WHOLE)
    refused('/v1/chat/completions', "'reasoning_format'", **body(reasoning_format='deepseek-legacy'))

@test
def _():
    "OpenAI: no reasoning with a grammar"
    same(parts(guided_regex='<think>a</think>b'), (None, '<think>a</think>b'))
    v = chat(response_format={'type': 'json_object'})
    assert 'reasoning_content' not in v['choices'][0]['message'] and 'completion_tokens_details' not in v['usage'], v
    same(parts(opened, guided_regex='a</think>b'), (None, 'a</think>b'))

@test
def _():
    "OpenAI: the assistant's turn is continued"
    def continued(text):
        return parts(messages=ASK + [{'role': 'assistant', 'content': text}], continue_final_message=True)
    same(continued('<think>\n12'), (' and 30', 'answer: 42'))
    same(continued('<think>\n12 and 30\n</think>\n\nanswer:'), (None, ' 42'))

@test
def _():
    "OpenAI: the template begins the reasoning, or turns it off"
    same(parts(opened), ('12 and 30', 'answer: 42'))
    s = deltas(opened)
    same((joined(s, 'reasoning_content'), joined(s, 'content')), ('12 and 30', 'answer: 42'))
    for at in (thinker, opened):
        same(parts(at, chat_template_kwargs={'enable_thinking': False}), (None, DIRECT))
        same(parts(at, reasoning_effort='none'), (None, DIRECT))
        same(parts(at, reasoning_effort='none', chat_template_kwargs={'enable_thinking': True}), ('12 and 30', 'answer: 42'))
    refused('/v1/chat/completions', "'reasoning_effort'", **body(reasoning_effort='low'))

@test
def _():
    "tags that are special tokens"
    same(parts(special), ('12 and 30', 'answer: 42'))
    s = deltas(special)
    same((joined(s, 'reasoning_content'), joined(s, 'content')), ('12 and 30', 'answer: 42'))
    same(chat(special)['usage']['completion_tokens_details'], chat()['usage']['completion_tokens_details'])
    m = ollama('/api/chat', special, think=True)['message']
    same((m['thinking'], m['content']), ('12 and 30', 'answer: 42'))
    same(parts(special, reasoning_effort='none'), (None, DIRECT))
    same(parts(special, reasoning_format='none'), (None, WHOLE.replace('<think>', '').replace('</think>', '')))

@test
def _():
    "--reasoning-parser none"
    for more in ({}, {'reasoning_format': 'auto'}):
        v = chat(none, **more)
        same((v['choices'][0]['message'].get('reasoning_content'), v['choices'][0]['message']['content']), (None, WHOLE))
        assert 'completion_tokens_details' not in v['usage'], v
    status, text = call('/api/chat', {'model': 'adder', 'messages': ASK, 'think': True}, none)
    assert status == 400 and "does not support thinking" in text, text
    same(parts(none, chat_template_kwargs={'enable_thinking': False}), (None, DIRECT))
    assert 'thinking' not in post('/api/show', none, model='adder')['capabilities']

@test
def _():
    "tools: reasoning, then content"
    tools = [{'type': 'function', 'function': {'name': 'f', 'parameters': {'type': 'object', 'properties': {}}}}]
    m = chat(tools=tools, tool_choice='none')['choices'][0]['message']
    same((m['reasoning_content'], m['content'], m.get('tool_calls')), ('12 and 30', 'answer: 42', None))
    m = chat(opened, tools=tools, tool_choice='required')['choices'][0]['message']
    same((m['tool_calls'][0]['function']['name'], m.get('reasoning_content')), ('f', None))

@test
def _():
    "history: reasoning reaches the template"
    def tokens(turn):
        return post('/tokenize', messages=ASK + [turn] + ASK)['tokens']
    whole = tokens({'role': 'assistant', 'content': WHOLE})
    same(tokens({'role': 'assistant', 'content': 'answer: 42', 'reasoning_content': '12 and 30'}), whole)
    assert tokens({'role': 'assistant', 'content': 'answer: 42'}) != whole
    v = ollama('/api/chat', messages=ASK + [{'role': 'assistant', 'content': 'answer: 42', 'thinking': '12 and 30'}] + ASK)
    same(v['prompt_eval_count'], len(whole))

@test
def _():
    "history: reasoning reaches a Go template"
    post('/api/create', model='go', **{'from': 'adder'}, stream=False, template='{{ range .Messages }}{{ .Thinking }}|{{ .Content }}\n{{ end }}')
    turn = {'role': 'assistant', 'content': 'x'}
    n = [ollama('/api/chat', model='go', messages=[{**turn, **more}])['prompt_eval_count'] for more in ({}, {'thinking': '1234'})]
    same(n[1], n[0] + 4)

@test
def _():
    "raw completions keep the tags"
    same(raw(PROMPT), WHOLE)
    same(post('/completion', model='adder', prompt=PROMPT, temperature=0, n_predict=40)['content'], WHOLE)
    v = ollama('/api/generate', prompt=PROMPT, raw=True)
    same((v['thinking'], v['response']), ('12 and 30', 'answer: 42'))
    v = ollama('/api/generate', prompt=PROMPT + '<think>\n', raw=True)
    same((v['thinking'], v['response']), ('12 and 30', 'answer: 42'))

@test
def _():
    "Ollama: chats, texts and streams"
    for at in (thinker, opened):
        for more in ({}, {'think': True}, {'think': 'high'}):
            m = ollama('/api/chat', at, **more)['message']
            same((m['thinking'], m['content']), ('12 and 30', 'answer: 42'))
        v = ollama('/api/generate', at)
        same((v['thinking'], v['response']), ('12 and 30', 'answer: 42'))
        m = ollama('/api/chat', at, think=False)['message']
        same((m.get('thinking'), m['content']), (None, DIRECT))
        v = ollama('/api/generate', at, think=False)
        same((v.get('thinking'), v['response']), (None, DIRECT))
    s = [l['message'] for l in lines('/api/chat')]
    same((''.join(m.get('thinking', '') for m in s), ''.join(m['content'] for m in s)), ('12 and 30', 'answer: 42'))
    s = lines('/api/generate')
    same((''.join(m.get('thinking', '') for m in s), ''.join(m['response'] for m in s)), ('12 and 30', 'answer: 42'))

@test
def _():
    "Ollama: levels, log-probabilities, capabilities"
    counts = {t: ollama('/api/chat', think=t)['prompt_eval_count'] for t in (True, 'low', 'medium', 'high')}
    same((counts['low'], counts['medium']), (counts[True], counts[True]))
    same(counts['high'], counts[True] + 2) # the template writes <think> and a newline
    refused('/api/chat', "'think'", model='adder', messages=ASK, think='most')
    all_tokens = [t['token'] for t in ollama('/api/chat', logprobs=True)['logprobs']]
    same(''.join(all_tokens), WHOLE)
    same([t['token'] for l in lines('/api/chat', logprobs=True) for t in l.get('logprobs', [])], all_tokens)
    assert 'thinking' in post('/api/show', model='adder')['capabilities']

for f in tests:
    try:
        f()
        print('ok reasoning:', f.__doc__)
    except Exception as e:
        print('not ok reasoning: %s: %s: %s' % (f.__doc__, type(e).__name__, str(e).replace('\n', ' ')[:600]))
END
THINKER=$THINKER SPECIAL=$SPECIAL NONE=$NONE TOKEN_FILE=$tmp/state-thinker-auto/token OPENED=$url PYTHONDONTWRITEBYTECODE=1 python3 "$tmp/client.py"
