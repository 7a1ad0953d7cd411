#!/bin/sh
# test_cli: the program as a user calls it: reference ids, conversions, exit codes, and messages and files after bad
# input. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary. Needs no network and no
# demo.
set -u
shoal=${SHOAL:-build/shoal}
shared=${SHOAL_SHARED:-../shared}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export SHOAL_ADAPTER_MODEL=test/models/fry-1 # the default is the starter model

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
# says NAME CODE TEXT COMMAND…: the command exits with CODE and its stderr contains TEXT.
says() {
    name=$1 code=$2 text=$3
    shift 3
    "$@" >"$tmp/out" 2>"$tmp/err"
    got=$?
    if [ $got != "$code" ]; then bad "$name" "exit $got, not $code: $(head -c 300 "$tmp/err")"
    elif [ -n "$text" ] && ! grep -qF -- "$text" "$tmp/err"; then bad "$name" "no '$text' in: $(head -c 300 "$tmp/err")"
    else ok "$name"; fi
}
# prints NAME TEXT COMMAND…: succeeds with TEXT on stdout.
prints() {
    name=$1 text=$2
    shift 2
    if "$@" >"$tmp/out" 2>"$tmp/err" && grep -qF -- "$text" "$tmp/out"; then ok "$name"
    else bad "$name" "no '$text' in: $(head -c 300 "$tmp/out" "$tmp/err")"; fi
}
same() { if [ -s "$2" ] && cmp -s "$2" "$3"; then ok "$1"; else bad "$1" "'$2' and '$3' differ"; fi; }
absent() { if [ -e "$2" ]; then bad "$1" "'$2' was left behind"; else ok "$1"; fi; }

# ---- the command line
for c in demo run train pretrain debate evolve eval resume fork lineage runs convert adapter model bench doctor pull quantize embed replay synth knowledge ask chat world serve key metrics config backup restore salvage completion team; do
    if "$shoal" $c --help 2>/dev/null | grep -q "^usage: shoal $c"; then ok "$c --help"; else bad "$c --help" "no usage"; fi
    lines=$("$shoal" $c --help 2>/dev/null | wc -l)
    if [ "$lines" -le 55 ]; then ok "$c --help fits one screen"; else bad "$c --help fits one screen" "$lines lines"; fi
    if "$shoal" $c --help-all 2>/dev/null | grep -q "^  --help-all "; then ok "$c --help-all"; else bad "$c --help-all" "no options"; fi
    says "$c refuses an unknown flag" 2 "unknown flag '--nonsense'" "$shoal" $c --nonsense
done
says "no command" 2 "usage: shoal COMMAND" "$shoal"
says "unknown command" 2 "no command 'fly'" "$shoal" fly
if "$shoal" doctor --json | grep -q '"level"'; then ok "doctor --json"; else bad "doctor --json" "no level"; fi
says "serve plans its adapters" 1 "nothing" "$shoal" serve test/models/fry-1 --adapter x=nothing --dry-run
if "$shoal" serve test/models/fry-1 --max-memory 120M --dry-run --json | grep -q '"limit":125829120'; then ok "serve --max-memory plans"; else bad "serve --max-memory plans" "no plan"; fi

# ---- salvage
: >"$tmp/none.jsonl"
"$shoal" conversation import me "$tmp/none.jsonl" --store "$tmp/store.db" 2>/dev/null
prints "salvage copies a store" '"damaged":0' "$shoal" salvage "$tmp/store.db" "$tmp/copy.db" --json
says "salvage replaces no file" 2 "exists" "$shoal" salvage "$tmp/store.db" "$tmp/copy.db"
says "salvage of a missing file" 1 "no store" "$shoal" salvage "$tmp/missing.db" "$tmp/copy2.db"
dd if=/dev/zero of="$tmp/store.db" bs=1 seek=100 count=3000 conv=notrunc 2>/dev/null
says "a damaged store names salvage" 1 "'shoal salvage FILE NEW'" "$shoal" conversation list --store "$tmp/store.db"
says "nothing can be read" 1 "no row of" "$shoal" salvage "$tmp/store.db" "$tmp/copy2.db"
absent "no copy without rows" "$tmp/copy2.db"

# ---- model files
"$shoal" model new --shape tiny-qwen3 --seed 3 "$tmp/a.gguf" 2>"$tmp/err" || bad "model new" "$(cat "$tmp/err")"
"$shoal" model new --shape tiny-qwen3 --seed 3 "$tmp/b.gguf" 2>/dev/null
same "the same seed gives the same file" "$tmp/a.gguf" "$tmp/b.gguf"
says "a tokenizer that is larger than the shape" 1 "tokens, shape 'tiny-qwen3' only" "$shoal" model new --shape tiny-qwen3 --tokenizer models/fry "$tmp/big.gguf"
says "--tokenizer is an option of new" 2 "is an option of new" "$shoal" model data --tokenizer models/fry "$tmp/big.jsonl"
"$shoal" model new --shape stories15m --type q4_0 --tokenizer models/fry "$tmp/fry_tokens.gguf" 2>/dev/null
for model in models/fry "$tmp/fry_tokens.gguf"; do
    "$shoal" run "$model" "12 + 30 =" -n 1 --json 2>/dev/null | grep -o '"prompt_ids":[^]]*' >"$tmp/prompt_$(basename "$model" .gguf)"
done
same "another model's tokenizer and chat template" "$tmp/prompt_fry" "$tmp/prompt_fry_tokens"
"$shoal" convert "$tmp/a.gguf" -o "$tmp/hf" 2>/dev/null && "$shoal" convert "$tmp/hf" -o "$tmp/c.gguf" 2>/dev/null
"$shoal" run "$tmp/a.gguf" -p "x" -n 12 --temp 0 --ids >"$tmp/ids_gguf" 2>/dev/null
"$shoal" run "$tmp/hf" -p "x" -n 12 --temp 0 --ids >"$tmp/ids_hf" 2>/dev/null
same "GGUF and Hugging Face directory generate the same ids" "$tmp/ids_gguf" "$tmp/ids_hf"
"$shoal" run "$tmp/c.gguf" -p "x" -n 12 --temp 0 --ids >"$tmp/ids_back" 2>/dev/null
same "converting back to GGUF keeps the ids" "$tmp/ids_gguf" "$tmp/ids_back"
for q in q8_0 q4_0 bf16; do
    "$shoal" model new --shape tiny-llama --quant $q "$tmp/$q.gguf" 2>/dev/null
    for t in 1 2 3; do "$shoal" run "$tmp/$q.gguf" -p "ab" -n 8 --temp 0.8 --seed 5 --ids --exact --threads $t >"$tmp/$q.$t" 2>/dev/null; done
    same "$q: 1 and 2 threads" "$tmp/$q.1" "$tmp/$q.2"
    same "$q: 1 and 3 threads" "$tmp/$q.1" "$tmp/$q.3"
    SHOAL_CPU=scalar "$shoal" run "$tmp/$q.gguf" -p "ab" -n 8 --temp 0.8 --seed 5 --ids --exact >"$tmp/$q.s" 2>/dev/null
    same "$q: scalar and best level" "$tmp/$q.1" "$tmp/$q.s"
done
for t in 1 3; do "$shoal" run "$tmp/bf16.gguf" -p "ab" -n 8 --temp 0.8 --seed 5 --ids --fast --threads $t >"$tmp/fast.$t" 2>/dev/null; done
same "bf16, fast class: 1 and 3 threads" "$tmp/fast.1" "$tmp/fast.3"
says "--exact and --fast together" 2 "exclude each other" "$shoal" doctor --exact --fast
for s in tiny-llama tiny-qwen2 tiny-gemma3 tiny-gpt-neo; do
    says "bench $s, a context of 64" 0 "" "$shoal" bench --shape $s --tokens 32 --reps 1 --members 8 --what prefill,decode,serve,noise
done
says "bench with a type of long blocks" 0 "" "$shoal" bench --shape smollm-135m --type q4_k --tokens 32 --reps 1 --what prefill

# ---- help and errors of the command line
for flag in -h --help help; do
    if "$shoal" $flag | grep -q "^generate:"; then ok "$flag lists the commands in groups"; else bad "$flag lists the commands in groups" "$("$shoal" $flag 2>&1 | head -n 3)"; fi
done
if [ "$("$shoal" -V)" = "$("$shoal" --version)" ]; then ok "-V"; else bad "-V" "$("$shoal" -V 2>&1)"; fi
"$shoal" help train >"$tmp/help" && "$shoal" train -h >"$tmp/help2" && same "help COMMAND is COMMAND -h" "$tmp/help" "$tmp/help2"
says "an unknown command" 2 "no command 'trian', did you mean 'train'?" "$shoal" trian
says "an unknown option" 2 "did you mean '--temp" "$shoal" run "$tmp/a.gguf" hello --temperatur 1
says "a missing argument is named" 2 "argument 'MODEL' is missing" "$shoal" run
says "the second argument is missing" 2 "argument 'OUT' is missing" "$shoal" quantize "$tmp/a.gguf"
says "an unexpected argument is named" 2 "unexpected argument 'more'" "$shoal" run "$tmp/a.gguf" hello more
says "two messages" 2 "two messages are given" "$shoal" run "$tmp/a.gguf" hello --chat more
"$shoal" run test/models/fry-1 'sort: k b x' -n 6 --temp 0 --ids >"$tmp/ids_argument" 2>/dev/null
"$shoal" run test/models/fry-1 --chat 'sort: k b x' -n 6 --temp 0 --ids >"$tmp/ids_chat" 2>/dev/null
same "a message as an argument is --chat" "$tmp/ids_argument" "$tmp/ids_chat"

# ---- quantising
for q in nf4 q4_k_m q5_1; do
    "$shoal" quantize "$tmp/a.gguf" "$tmp/quant.gguf" --type $q --tokens 300 --json --quiet >"$tmp/$q.json" 2>"$tmp/err"
    if grep -q "\"type\":\"$q\".*\"kl_mean\":[0-9]" "$tmp/$q.json"; then ok "quantize to $q"; else bad "quantize to $q" "$(cat "$tmp/err" "$tmp/$q.json")"; fi
done
"$shoal" quantize "$tmp/a.gguf" "$tmp/quant1.gguf" --type q5_1 --tokens 2 --threads 1 --quiet >/dev/null 2>&1
same "quantize writes the same bytes with other threads" "$tmp/quant1.gguf" "$tmp/quant.gguf"
"$shoal" quantize "$tmp/a.gguf" "$tmp/quant2.gguf" --type q5_1 --no-compare --json >"$tmp/out" 2>"$tmp/err"
same "quantize --no-compare writes the same bytes" "$tmp/quant1.gguf" "$tmp/quant2.gguf"
if grep -q "\"bytes\":$(wc -c <"$tmp/quant2.gguf")" "$tmp/out" && ! grep -q kl_mean "$tmp/out"; then ok "quantize --no-compare measures nothing"
else bad "quantize --no-compare measures nothing" "$(cat "$tmp/out" "$tmp/err")"; fi
says "requantising prints a warning" 0 "quantised already (q5_1)" "$shoal" quantize "$tmp/quant.gguf" "$tmp/twice.gguf" --type nf4 --tokens 2
"$shoal" quantize "$tmp/a.gguf" --kv-cache-dtype f32 i8 --tokens 300 --json --quiet >"$tmp/kv.json" 2>"$tmp/err"
if [ "$(grep -c '"kv_cache_dtype":"f32".*"kl_mean":0.0,' "$tmp/kv.json")" = 1 ] && [ "$(grep -c '"kv_cache_dtype":"i8".*"kl_mean":[0-9.]*[1-9]' "$tmp/kv.json")" = 1 ]
then ok "quantize measures types of keys and values"; else bad "quantize measures types of keys and values" "$(cat "$tmp/err" "$tmp/kv.json")"; fi
says "quantize measures or writes" 2 "leave OUT and --type out" "$shoal" quantize "$tmp/a.gguf" "$tmp/no.gguf" --kv-cache-dtype i8
for c in "evolve examples/demo.yaml" "pretrain models/fry/recipe.yaml" "world test/models/fry-1" "train test/models/fry-1 --data data/personas/critic.jsonl --out $tmp/no" \
    "eval test/models/fry-1"; do
    says "an unknown type of keys and values: ${c%% *}" 2 "no element 'q9'" "$shoal" $c --kv-cache-dtype q9 --dry-run
done
says "quantising a model onto its own file" 2 "is the model itself" "$shoal" quantize "$tmp/a.gguf" "$tmp/a.gguf" --type nf4
says "an unknown weight type" 2 "no weight type 'q3_k'" "$shoal" quantize "$tmp/a.gguf" "$tmp/no.gguf" --type q3_k
says "a block type in a Hugging Face directory" 2 "write a GGUF file" "$shoal" quantize "$tmp/a.gguf" "$tmp/no" --type nf4
says "quantize with an empty text" 1 "empty.txt" sh -c ": >'$tmp/empty.txt'; exec '$shoal' quantize '$tmp/a.gguf' '$tmp/no.gguf' --type nf4 --text '$tmp/empty.txt'"
# ---- options of run
m=$tmp/a.gguf
run() { "$shoal" run "$m" -n 8 --quiet "$@" 2>"$tmp/err"; }
field() { sed "s/.*\"$1\":\(\[[^]]*\]\|\"[^\"]*\"\|[^,}]*\).*/\1/"; } # of a JSON line
sha() { sha256sum "$1" | cut -d' ' -f1; }
# has_manifest NAME FILE TEXT…: each line of FILE has a manifest of this program, and FILE has each TEXT.
has_manifest() {
    name=$1 file=$2
    shift 2
    if [ -s "$file" ] && [ "$(grep -cF "\"manifest\":{\"program\":\"$(sha "$shoal")\"," "$file")" = "$(wc -l <"$file")" ]; then ok "$name"; else bad "$name" "$(head -c 600 "$file")"; fi
    for text; do holds "$name has $text" "$text" "$file"; done
}
holds() { if grep -qF -- "$2" "$3"; then ok "$1"; else bad "$1" "no '$2' in: $(head -c 300 "$3") $(head -c 200 "$tmp/err")"; fi; }
run -p ab --temp 0 --ids --logit-bias 77=1000 >"$tmp/out"
holds "a large logit bias determines the token" "77 77 77 77 77 77 77 77" "$tmp/out"
run -p ab --temp 0 --ids >"$tmp/free"
first=$(cut -d' ' -f1 "$tmp/free")
run -p ab --temp 0 --ids --logit-bias "$first=-inf,3=0.5" >"$tmp/out"
if [ -s "$tmp/out" ] && ! tr ' ' '\n' <"$tmp/out" | grep -qx "$first"; then ok "a logit bias of -inf forbids a token"; else bad "a logit bias of -inf forbids a token" "$(cat "$tmp/out")"; fi
says "an invalid logit bias" 2 "'7' is not a logit bias" "$shoal" run "$m" -p x --logit-bias 7
says "a bias outside the vocabulary" 2 "outside the vocabulary" "$shoal" run "$m" -p x --logit-bias 99999999=1
says "--logprobs requires --json" 2 "'--logprobs' is printed with --json only" "$shoal" run "$m" -p x --logprobs 3
says "-p and --file together" 2 "give one prompt" "$shoal" run "$m" -p x --file y
run -p ab --temp 0 --loop-tokens 6 --logit-bias 77=1000 --json >"$tmp/out"
holds "--loop-tokens detects a loop" '"finish":"loop"' "$tmp/out"
run -p ab --temp 0 --json --logprobs 2 --prompt-logprobs --echo >"$tmp/out"
for f in '"prompt":"ab"' '"top":[[[' '"prompt_top":[[[' '"call":"' '"model_hash":"' '"class":"' '"prefilled":2' '"finish":"length"'; do
    holds "--json prints $f" "$f" "$tmp/out"; done
letter=$(printf A | od -An -tu1 | tr -d ' ')
run -p ab --temp 0 --logit-bias $((letter + 3))=1000 >"$tmp/out"
piece=$(head -c 1 "$tmp/out")
run -p ab --temp 0 --logit-bias $((letter + 3))=1000 --stop nothing "$piece$piece$piece" --json >"$tmp/out"
holds "text ends before a stop text" '"text":""' "$tmp/out"
holds "a stop text is the finish reason" '"finish":"stop"' "$tmp/out"
run -p ab --temp 0.9 --typical-p 0.8 --repeat-penalty 1.3 --presence-penalty 0.5 --frequency-penalty 0.2 --ids >"$tmp/out"
if [ -s "$tmp/out" ] && ! cmp -s "$tmp/out" "$tmp/free"; then ok "penalties change the sampled tokens"; else bad "penalties change the sampled tokens" "$(cat "$tmp/err")"; fi

# ---- batches: the same bits as single prompts
printf '春は\r\n\n夏は夜、秋は夕暮れ\nab\n' >"$tmp/lines.txt"
printf '{"prompt":"春は"}\n{"prompt":"夏は夜、秋は夕暮れ"}\n{"prompt": "ab"}\n' >"$tmp/lines.jsonl"
run --file "$tmp/lines.txt" --samples 2 --seed 4 --ids >"$tmp/batch"
for p in 春は 夏は夜、秋は夕暮れ ab; do for s in 4 5; do run -p $p --seed $s --ids; done; done >"$tmp/single"
same "a batch equals its prompts one by one" "$tmp/batch" "$tmp/single"
run --file "$tmp/lines.jsonl" --samples 2 --seed 4 --ids >"$tmp/out"
same "a batch of JSON Lines equals a batch of text lines" "$tmp/batch" "$tmp/out"
printf '{"prompt":"a"}\n{"promt":"b"}\n' >"$tmp/wrong.jsonl"
says "an unknown key of a prompt" 1 "line 2: unknown key 'promt'" "$shoal" run "$m" --file "$tmp/wrong.jsonl"
says "a line without a prompt" 1 "line 1: 'chat' is missing" sh -c "printf '{\"prompt\":\"a\",\"system\":\"b\"}' >'$tmp/w'; exec '$shoal' run '$m' --file '$tmp/w'"
run --chat 春は --system 短く --seed 4 --ids >"$tmp/single"
printf '{"messages":[{"role":"system","content":"短く"},{"role":"user","content":"春は"}],"chat_template_kwargs":{"x":1}}\n' >"$tmp/talk.jsonl"
run --file "$tmp/talk.jsonl" --seed 4 --ids >"$tmp/out"
same "a conversation in a file equals --chat and --system" "$tmp/out" "$tmp/single"
run --chat 春は --system 短く --seed 4 --ids --chat-template-kwargs '{"enable_thinking": false}' >"$tmp/out"
same "a template ignores unknown variables" "$tmp/out" "$tmp/single"
says "chat template kwargs that are not an object" 2 "must be a JSON object" "$shoal" run "$m" --chat a --chat-template-kwargs '[1]'
says "chat template kwargs with text that is not UTF-8" 2 "must be UTF-8" "$shoal" run "$m" --chat "$(printf 'a\377')" --chat-template-kwargs '{}'
says "chat template kwargs that are not JSON" 1 "chat-template-kwargs" "$shoal" run "$m" --chat a --chat-template-kwargs '{'
says "chat template kwargs without --chat" 2 "goes with --chat" "$shoal" run "$m" -p a --chat-template-kwargs '{}'
says "messages together with a prompt" 1 "line 1: 'chat' does not go with 'messages'" sh -c "printf '{\"messages\":[],\"chat\":\"b\"}' >'$tmp/w'; exec '$shoal' run '$m' --file '$tmp/w'"

# ---- training data of the task families
"$shoal" model data --tasks machine,copy --n 4 --chain-of-thought "$tmp/derived.jsonl"
for n in 1 2 3 4; do sed -n ${n}p "$tmp/derived.jsonl" | grep -c 'work: .*answer: '; done | tr -d '\n' >"$tmp/n"
printf 0101 >"$tmp/want"
same "derivations of the families that have one" "$tmp/want" "$tmp/n"
says "data with derivations of personas" 2 "--chain-of-thought needs --tasks" "$shoal" model data --chain-of-thought "$tmp/p"
says "critiques of personas" 2 "--critic needs --tasks" "$shoal" model data --critic "$tmp/p"
says "preferences with tools" 2 "'tools' has calls of tools" "$shoal" model data --tasks tools --preferences "$tmp/p"
"$shoal" model data --tasks pick,dialogue --preferences --n 8 "$tmp/pairs.jsonl" --quiet
"$shoal" train test/models/fry-1 --method dpo --data "$tmp/pairs.jsonl" --out "$tmp/pairs" --dry-run >"$tmp/out" 2>&1
holds "model data --preferences" "8 pairs" "$tmp/out"
says "critiques of questions for teams" 2 "choose one of --critic" "$shoal" model data --tasks largest --critic "$tmp/p"

# ---- memory without --max-memory: an engine that fits, or a refusal
echo a >"$tmp/in"
chat_within() { (ulimit -v "$1" && exec "$shoal" chat models/fry --max-tokens 2 <"$tmp/in" >"$tmp/out" 2>"$tmp/err"); }
if ! (ulimit -v 200000 && "$shoal" --version >/dev/null 2>&1); then
    echo "skip memory without --max-memory: the program does not start in 200 MB of address space"
else
    if chat_within 400000 && grep -q 'memory: of .* MB, .* sequences of at most 4096 tokens' "$tmp/err"; then ok "chat in little memory"
    else bad "chat in little memory" "$(tail -n 3 "$tmp/err")"; fi
    chat_within 200000
    if grep -q 'of memory are available, but one sequence' "$tmp/err"; then ok "chat in too little memory"
    else bad "chat in too little memory" "$(tail -n 3 "$tmp/err")"; fi
fi

# ---- sessions
run -p '夏は夜、秋は夕暮れ、冬はつとめて' --temp 0 --ids >"$tmp/plain"
run -p '夏は夜、秋は夕暮れ、冬はつとめて' --temp 0 --ids --session "$tmp/s.kv" >"$tmp/saved"
same "saving a session changes nothing" "$tmp/plain" "$tmp/saved"
run -p '夏は夜、秋は夕暮れ、冬はつとめて' --temp 0 --ids --session "$tmp/s.kv" >"$tmp/loaded"
same "a session continues with the same bits" "$tmp/plain" "$tmp/loaded"
for n in 5 4 3; do
    run -p "$([ $n != 5 ] || echo 夏は夜)" --temp 0 --ids -n $n --logit-bias 2=-inf --session "$tmp/parts.kv"
done | tr '\n' ' ' | sed 's/ $//' >"$tmp/parts"
run -p '夏は夜' --temp 0 --ids -n 12 --logit-bias 2=-inf | tr -d '\n' >"$tmp/whole"
same "an empty prompt continues a session" "$tmp/whole" "$tmp/parts"
printf X | dd of="$tmp/s.kv" bs=1 seek=200 conv=notrunc 2>/dev/null
says "a damaged session" 1 "session '$tmp/s.kv' is damaged" "$shoal" run "$m" -p x --session "$tmp/s.kv"
says "a session with several samples" 2 "'--session' takes one prompt" "$shoal" run "$m" -p x --samples 2 --session "$tmp/s.kv"

# ---- embeddings
"$shoal" embed "$m" --normalize '春は' ab >"$tmp/out" 2>"$tmp/err"
if sed 's/.*"embedding":\[//; s/\].*//' "$tmp/out" | awk -F, '{for (i = s = 0; i++ < NF;) s += $i * $i; if (s < 0.99999 || s > 1.00001) bad = 1} END {exit bad || NR != 2}'; then
    ok "embed --normalize"; else bad "embed --normalize" "$(head -c 300 "$tmp/out" "$tmp/err")"; fi
"$shoal" embed "$m" --similarity '猫' cat '猫' >"$tmp/out" 2>/dev/null
if awk '$1 == 1 && ($2 != "1.000" || $4 != "1.000" || $5 != "猫") {bad = 1} END {exit bad || NR != 3}' "$tmp/out"; then
    ok "embed --similarity"; else bad "embed --similarity" "$(cat "$tmp/out")"; fi
says "embed without texts" 2 "give texts, or --file" "$shoal" embed "$m"

# ---- a memory limit: the system's counters stay below it
says "an invalid size" 2 "'12' is not a size" "$shoal" run "$m" -p x --max-memory 12
"$shoal" run "$m" -p x --dry-run --json >"$tmp/out" 2>/dev/null
if grep -q '^{"plan":' "$tmp/out" && [ "$(wc -l <"$tmp/out")" = 1 ]; then ok "--dry-run prints only the plan"; else bad "--dry-run prints only the plan" "$(cat "$tmp/out")"; fi
for q in f32 bf16 q8_0 q4_0; do
    "$shoal" model new --shape stories15m --quant $q "$tmp/big.gguf" 2>/dev/null
    says "$q: too small a limit is refused" 1 "'1.0 MB' is too small" "$shoal" run "$tmp/big.gguf" -p x --max-memory 1M
    limit=$(sed -n 's/.*raise --max-memory to \([0-9]*M\),.*/\1/p' "$tmp/err")
    "$shoal" run "$tmp/big.gguf" --file "$tmp/lines.txt" --samples 20 -n 10 --temp 0 --max-memory "$((${limit%M} + 4))M" --record --store "$tmp/big.db" --json >"$tmp/out" 2>"$tmp/err"
    code=$?
    peak=$(sed -n 's/^{"peak":\([0-9]*\),.*/\1/p' "$tmp/out")
    if [ $code = 0 ] && [ -n "$peak" ] && [ "$peak" -gt 1000000 ] && [ "$peak" -le $(((${limit%M} + 4) << 20)) ] &&
        [ "$(grep -c '"ids"' "$tmp/out")" = 60 ]; then
        ok "$q: 60 requests in ${limit%M} + 4 MB, peak $((peak >> 20)) MB"
    else bad "$q: 60 requests in $limit + 4 MB" "exit $code, peak '$peak' $(head -c 300 "$tmp/err")"; fi
done
"$shoal" run "$m" --file "$tmp/lines.txt" --samples 40 --seed 4 --ids --quiet >"$tmp/wide" 2>/dev/null
"$shoal" run "$m" --file "$tmp/lines.txt" --samples 40 --seed 4 --ids --quiet --max-memory 10M >"$tmp/narrow" 2>"$tmp/err"
"$shoal" run "$m" --file "$tmp/lines.txt" --samples 40 --dry-run --max-memory 10M --json >"$tmp/out" 2>/dev/null
if [ "$(field pages <"$tmp/out")" -lt "$(field pages_wanted <"$tmp/out")" ]; then ok "a small memory limit plans fewer KV pages"; else bad "a small memory limit plans fewer KV pages" "$(cat "$tmp/out")"; fi
if [ "$(wc -l <"$tmp/wide")" = 120 ]; then same "a small memory limit gives the same bits" "$tmp/wide" "$tmp/narrow"; else bad "a small memory limit" "$(cat "$tmp/err")"; fi

# ---- recorded calls
db=$tmp/rec/calls.db
cp "$m" "$tmp/rec.gguf"
"$shoal" run "$tmp/rec.gguf" --chat '春は' -n 9 --samples 3 --exact --record --store "$db" --json --kv-cache-dtype i8 --logprobs 3 >"$tmp/out" 2>/dev/null
key=$(head -n 1 "$tmp/out" | field call | tr -d '"')
says "replay: the same bits" 0 "" "$shoal" replay "$(echo "$key" | cut -c1-12)" --store "$db"
holds "replay reports the same bits" "same bits: call" "$tmp/out"
SHOAL_CPU=scalar says "replay at the scalar level" 0 "" "$shoal" replay "$key" --store "$db" --threads 1
if [ "$("$shoal" replay --list --store "$db" | wc -l)" = 3 ]; then ok "replay --list"; else bad "replay --list" "$("$shoal" replay --list --store "$db")"; fi
"$shoal" run "$tmp/rec.gguf" -p '答え: ' -n 12 --regex '(はい|いいえ|[0-9]{2})' --temp 1 --record --store "$tmp/rec/grammar.db" --json >"$tmp/out" 2>/dev/null
key2=$(field call <"$tmp/out" | tr -d '"')
says "replay under a grammar" 0 "" "$shoal" replay "$key2" --store "$tmp/rec/grammar.db"
holds "a replay under a grammar or of a sample gives the same bits" "same bits: call" "$tmp/out"
says "replay of a missing call" 1 "no recorded call 'zz'" "$shoal" replay zz --store "$db"
says "replay without a store" 1 "--record keeps them" "$shoal" replay zz --store "$tmp/none.db"
"$shoal" model new --shape tiny-qwen3 --seed 4 "$tmp/rec.gguf" 2>/dev/null
says "replay under another model" 1 "is not the same" "$shoal" replay "$key" --store "$db"
holds "replay prints both hashes of the model" "changed: was $(sha256sum <"$m" | cut -d' ' -f1), is $(sha256sum <"$tmp/rec.gguf" | cut -d' ' -f1)" "$tmp/out"
rm "$tmp/rec.gguf"
says "replay without the model" 1 "is not the same" "$shoal" replay "$key" --store "$db"
holds "replay reports a missing model" "model: cannot be opened" "$tmp/out"
says "a store that cannot be created" 1 "/proc/none" "$shoal" run "$m" -p x --record --store /proc/none/calls.db

# ---- a knowledge base
mkdir -p "$tmp/kb/sub"
printf '富士山は日本で一番高い山で、標高は3776メートルです。\n' >"$tmp/kb/fuji.txt"
printf '<title>北京</title><p>北京是中国的首都。<script>no</script>\n' >"$tmp/kb/sub/beijing.html"
printf '{"title": "Tides", "content": "The moon pulls the sea."}\n' >"$tmp/kb/qa.jsonl"
says "knowledge add" 0 "" "$shoal" knowledge add "$tmp/kb.db" "$tmp/kb"
if grep -q '3 added.*3 documents' "$tmp/out"; then ok "knowledge add counts"; else bad "knowledge add counts" "$(cat "$tmp/out")"; fi
for q in '富士山の高さは？=fuji' '首都=北京' 'What pulls the sea?=Tides'; do
    got=$("$shoal" knowledge search "$tmp/kb.db" "${q%=*}" --json | head -n 1)
    case $got in *"\"title\":\"${q#*=}\""*) ok "knowledge finds ${q#*=}" ;; *) bad "knowledge finds ${q#*=}" "$got" ;; esac
done
rm "$tmp/kb/qa.jsonl"
"$shoal" knowledge add "$tmp/kb.db" "$tmp/kb" --model "$tmp/a.gguf" >"$tmp/out" 2>/dev/null
if grep -q '2 unchanged, 1 removed' "$tmp/out"; then ok "knowledge removes deleted files"; else bad "knowledge removes deleted files" "$(cat "$tmp/out")"; fi
for t in 1 2; do "$shoal" knowledge search "$tmp/kb.db" 山 --model "$tmp/a.gguf" --threshold 0 --threads $t --exact --json >"$tmp/kb.$t" 2>/dev/null; done
same "knowledge with embeddings: 1 and 2 threads" "$tmp/kb.1" "$tmp/kb.2"
if grep -q '"cosine"' "$tmp/kb.1"; then ok "knowledge with embeddings"; else bad "knowledge with embeddings" "no cosine"; fi
says "knowledge remove" 0 "" "$shoal" knowledge remove "$tmp/kb.db" "$tmp/kb/sub"
if [ "$("$shoal" knowledge list "$tmp/kb.db" | wc -l)" = 1 ]; then ok "knowledge list"; else bad "knowledge list" "not one line"; fi

# ---- ask
ask() { "$shoal" ask test/models/fry-1 "$@" --max-tokens 8 --store "$tmp/team.db" --json --quiet; }
ask "why is 57 larger than 12?" --threads 1 >"$tmp/ask.1" 2>"$tmp/err"
ask "why is 57 larger than 12?" --threads 2 --store "$tmp/team2.db" >"$tmp/ask.2" 2>>"$tmp/err"
same "a team's answer with 1 and 2 threads" "$tmp/ask.1" "$tmp/ask.2"
n=$(grep -o '"round"' "$tmp/ask.1" | wc -l)
if [ "$n" = 9 ]; then ok "3 agents and a summary, twice, then an answer: 9 turns"; else bad "3 agents and a summary, twice, then an answer: 9 turns" "$n turns $(cat "$tmp/err")"; fi
n=$(ask "賛成ですか" --agents 2 --iterations 3 --no-summary --board | tee "$tmp/out" | grep -o '"round"' | wc -l)
if [ "$n" = 7 ]; then ok "--no-summary makes no summaries"; else bad "--no-summary makes no summaries" "$n turns"; fi
holds "roles depend on the question and its language" '2 批判的思考AI' "$tmp/out"
holds "keys of the blackboard" '"agent_1_output"' "$tmp/out"
printf '私の名前は？\nwhich is larger, 3 or 9?\n' | "$shoal" ask test/models/fry-1 --max-tokens 8 --store "$tmp/team.db" --conversation me --agents 1 --iterations 1 --quiet >"$tmp/out" 2>"$tmp/err"
if [ "$(grep -c . "$tmp/out")" -ge 2 ]; then ok "questions from stdin"; else bad "questions from stdin" "$(cat "$tmp/out" "$tmp/err")"; fi
"$shoal" ask test/models/fry-1 "and now?" --max-tokens 8 --store "$tmp/team.db" --conversation me --agents 1 --iterations 1 --board --json --quiet >"$tmp/out" 2>"$tmp/err"
holds "a conversation is remembered" '3 or 9' "$tmp/out"
for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo "question $i"; done |
    "$shoal" ask test/models/fry-1 --max-tokens 8 --store "$tmp/team.db" --conversation long --agents 1 --iterations 1 --quiet >/dev/null 2>"$tmp/err"
"$shoal" ask test/models/fry-1 "more?" --max-tokens 8 --store "$tmp/team.db" --conversation long --agents 1 --iterations 1 --board --json --quiet >"$tmp/out" 2>>"$tmp/err"
holds "a long conversation has a summary" 'Summary so far' "$tmp/out"
if grep -q 'question 2[^0-9]' "$tmp/out"; then bad "the beginning of a long conversation is removed" "it is still there"; else ok "the beginning of a long conversation is removed"; fi
says "ask: unknown roles" 2 "no roles of type 'clown'" "$shoal" ask test/models/fry-1 x --role-type clown --store "$tmp/team.db"
says "ask: unknown language" 2 "no language 'xx'" "$shoal" ask test/models/fry-1 x --language xx --store "$tmp/team.db"
holds "ask --json prints the source of the answer" '"source":"output"' "$tmp/ask.1"
team() { "$shoal" ask test/models/fry-1 "$@" --max-tokens 8 --store "$tmp/team.db"; }
team "私の名前は太郎です。寿司が好きです。3と9、大きいのは？" --conversation taro --agents 1 --iterations 1 --quiet >/dev/null 2>"$tmp/err"
team "私の名前は何ですか？" --conversation taro >"$tmp/out" 2>>"$tmp/err"
holds "key facts answer a question directly" 'あなたのお名前は太郎です。' "$tmp/out"
says "ask --forget removes facts" 0 "facts forgotten: 1" team --conversation taro --forget 寿司
says "forgetting without a conversation" 2 "needs --conversation" team --forget 寿司
team "what do I like?" --conversation taro --agents 1 --iterations 1 --json --quiet >"$tmp/out" 2>"$tmp/err"
holds "the team answers after a fact is forgotten" '"source":"output"' "$tmp/out"
says "legacy flags of ask" 0 "--parallel: the agents of an iteration always run as one batch" "$shoal" ask --model-type llama --model-path test/models/fry-1 \
    --internal-model test/models/fry-1 --output-model "$PWD/test/models/fry-1" --internal-temp 0.8 --output-temp 0.6 --summary-temp 0.5 --internal-tokens 6 \
    --output-tokens 7 --summary-tokens 5 --agents 2 --iter 1 --parallel --no-local-files --debug --log --store "$tmp/team.db" "2と3は？"
holds "--debug is an alias of --board" '"agent_1_output"' "$tmp/out"
says "a legacy flag without an equivalent" 2 "no ZIM archive is read" team x --rag-mode zim --zim-path y
says "an invalid --rag-mode" 2 "no mode 'cloud'" team x --rag-mode cloud
says "ask without a model" 2 "no model: name the base model of the team" "$shoal" ask
team "good or bad?" --slots --iterations 1 --board --json --quiet >"$tmp/out" 2>"$tmp/err"
holds "--slots" '"slots":{"reformulator":1,"critic":1,"supporter":1,"synthesizer":1,"output":1}' "$tmp/out"
picked() { team "12 + 30 = ?" --agents 1 --iterations 1 "$@" >"$tmp/out" 2>"$tmp/err"; }
generated() { sed -n 's/.*"generated":\([0-9]*\).*/\1/p' "$tmp/out"; }
picked --samples 3 --check 'regex:.' && holds "ask --check reports the passed samples and the tokens" "3 of 3 samples passed check 'regex'; " "$tmp/err"
picked --output-temperature 0.01 --samples 1 --check 'regex:.' --json --quiet; one=$(generated)
picked --output-temperature 0.01 --samples 3 --check 'regex:\Anever\z' --json --quiet
if [ "$(generated)" = $((3 * one)) ]; then ok "ask --check counts all samples"; else bad "ask --check counts all samples" "one has $one: $(cat "$tmp/out" "$tmp/err")"; fi
holds "ask --check: an answer if no sample passes" '"samples":3,"passed":0}' "$tmp/out"
says "ask: samples without a check" 2 "needs '--check', which selects among them" team x --samples 3
says "ask: a check that needs fields" 1 "'check.question' is missing" team x --check question
team "which?" --output-model "$tmp/a.gguf" --max-memory 130M --agents 2 --iterations 1 --quiet --json >"$tmp/out" 2>"$tmp/err"
holds "two models answer within one memory limit" '"said":[{"name":"1' "$tmp/out"
peak=$(sed -n 's/.*"peak":\([0-9]*\).*/\1/p' "$tmp/out")
if [ "${peak:-999999999}" -lt $((130 << 20)) ]; then ok "two models stay within the limit"; else bad "two models stay within the limit" "peak '$peak'"; fi
says "two models in too small a limit" 1 "2 models need" team "which?" --output-model "$tmp/a.gguf" --max-memory 30M

# ---- chat
chat() { "$shoal" chat test/models/fry-1 --temp 0 -n 12 --store "$tmp/team.db" "$@"; }
"$shoal" run test/models/fry-1 --chat 'sort: k b x' --temp 0 -n 12 >"$tmp/one" 2>/dev/null
printf 'sort: k b x\n' | chat >"$tmp/out" 2>"$tmp/err"
same "the first reply of chat equals run" "$tmp/one" "$tmp/out"
lines='3と9、大きいのは？\nI live in Osaka. sort: b a\n/facts\n春は？\n'
for t in 1 2; do printf "$lines" | chat --threads $t --json --exact >"$tmp/chat.$t" 2>"$tmp/err"; done
same "chat with 1 and 2 threads" "$tmp/chat.1" "$tmp/chat.2"
holds "chat extracts key facts" '"その他の情報":["residence: Osaka' "$tmp/chat.1"
printf '/nothing\n/adapter %s\nmy name is Ann.\n/save %s\n/quit\nnever said\n' "$tmp/none" "$tmp/talk.save" | chat --system 短く --conversation ann >"$tmp/out" 2>"$tmp/err"
if [ $? = 0 ]; then ok "an invalid line does not end the chat"; else bad "an invalid line does not end the chat" "$(cat "$tmp/err")"; fi
holds "chat: an unknown command" "no command '/nothing'; /help lists them" "$tmp/err"
holds "/save writes messages" '{"messages":[{"role":"system","content":"短く"},{"role":"user","content":"my name is Ann."},{"role":"assistant"' "$tmp/talk.save"
printf '/facts\n/forget all\n/facts\n' | chat --conversation ann >"$tmp/out" 2>"$tmp/err"
holds "a conversation continues" 'name: Ann' "$tmp/out"
holds "/forget all removes the facts" 'nothing is known yet' "$tmp/err"
i=0; while [ $i -lt 30 ]; do echo "which is larger, $i or 17? and once more, which of them, please?"; i=$((i + 1)); done | chat -n 64 >"$tmp/out" 2>"$tmp/err"
if [ -s "$tmp/err" ]; then bad "a chat longer than the context" "$(head -3 "$tmp/err")"; elif [ "$(grep -c . "$tmp/out")" -ge 30 ]; then ok "a chat longer than the context"; else bad "a chat longer than the context" "$(wc -l <"$tmp/out") lines"; fi
printf 'which is larger, 3 or 9?\n/board\n' | "$shoal" chat test/models/fry-1 --team --agents 2 --iterations 1 --max-tokens 8 --store "$tmp/team.db" >"$tmp/out" 2>"$tmp/err"
holds "a team shows its steps" '[1] 2 agents think' "$tmp/err"
holds "/board prints the blackboard" '"final_response"' "$tmp/out"
says "a team's flag without a team" 2 "'--agents' has no effect without --team" "$shoal" chat test/models/fry-1 --agents 2
says "a flag of chat without --team, with --team" 2 "'--top-k' has no effect with --team" "$shoal" chat test/models/fry-1 --team --top-k 3
says "knowledge without files" 1 "'shoal knowledge add' makes one" "$shoal" knowledge search "$tmp/none.db" x
says "knowledge: an unknown subcommand" 2 "is not a subcommand: use add, search, list or remove" "$shoal" knowledge fly "$tmp/kb.db"
says "knowledge: a file that is a store" 1 "is not a knowledge base" "$shoal" knowledge list "$db"

# ---- bad input
head -c 5000 "$tmp/a.gguf" >"$tmp/cut.gguf"
says "a truncated GGUF" 1 "cut.gguf" "$shoal" model info "$tmp/cut.gguf"
cp -r "$tmp/hf" "$tmp/lie"
printf '\377\377\377\377\377\377\377\177' | dd of="$tmp/lie/model.safetensors" bs=1 conv=notrunc 2>/dev/null
says "a safetensors header with a wrong length" 1 "model.safetensors" "$shoal" model info "$tmp/lie"
says "a missing model" 1 "nowhere" "$shoal" model info "$tmp/nowhere"
SHOAL_CACHE="$tmp/cache" says "a model that is not pulled" 1 "run 'shoal pull hf:a/b@v1'" "$shoal" run hf:a/b@v1 -p x
says "an invalid repository name" 2 "expected hf:OWNER/REPO" "$shoal" pull somewhere
HF_ENDPOINT=http://127.0.0.1:1 says "an unreachable hub" 1 "is this machine online" "$shoal" pull hf:a/b --to "$tmp/pulled"
absent "a failed download creates no folder" "$tmp/pulled"
mkdir "$tmp/full"
says "a full disk" 1 "full/m.gguf" sh -c "ulimit -f 8; exec '$shoal' convert '$tmp/a.gguf' -o '$tmp/full/m.gguf'"
if [ -z "$(ls -A "$tmp/full")" ]; then ok "a full disk leaves no file"; else bad "a full disk leaves no file" "$(ls "$tmp/full")"; fi
printf 'model: test/models/fry-1\nseed: 1\nsede: 2\n' >"$tmp/r.yaml"
says "an unknown recipe key" 2 "r.yaml', line 3" "$shoal" evolve "$tmp/r.yaml" --runs "$tmp/runs"
absent "a bad recipe starts no run" "$tmp/runs"
says "resume of a missing run" 1 "no run" "$shoal" resume none --runs "$tmp"
says "fork of a missing run" 1 "no run" "$shoal" fork none --at 1 --runs "$tmp"
says "lineage of a missing run" 1 "none" "$shoal" lineage none --runs "$tmp"
# A small evolution from existing adapters, its fork, its replay and its tree.
for i in 1 2; do "$shoal" adapter new --model test/models/fry-1 --rank 2 --seed $i "$tmp/born$i" --quiet 2>/dev/null; done
"$shoal" adapter blend --operator noise_absolute --parents "$tmp/born1" --child "$tmp/founder1" --step 0.05 --seed 1 >/dev/null 2>&1
"$shoal" adapter blend --operator noise_absolute --parents "$tmp/born2" --child "$tmp/founder2" --step 0.05 --seed 2 >/dev/null 2>&1
cat >"$tmp/evolve.yaml" <<YAML
model: test/models/fry-1
personas: ["一=$tmp/founder1", "two=$tmp/founder2"]
tasks: [copy]
YAML
says "an invalid name of a persona" 2 "cannot name a persona" "$shoal" evolve "$tmp/evolve.yaml" --runs "$tmp/runs"
cat >"$tmp/evolve.yaml" <<YAML
model: test/models/fry-1
personas: [one=$tmp/founder1, two=$tmp/founder2]
tasks: [copy]
rounds: 0
chain_of_thought: false
test_items: 20
evolve: {generations: 2, population: 4, rank: 2}
fitness: {items: 10}
YAML
if "$shoal" evolve "$tmp/evolve.yaml" --runs "$tmp/runs" --id e1 --exact --quiet --json >"$tmp/e1.json" 2>"$tmp/err"; then ok "evolve from adapters"
else bad "evolve from adapters" "$(cat "$tmp/err")"; fi
"$shoal" resume e1 --runs "$tmp/runs" --quiet --json >"$tmp/e1-again.json" 2>/dev/null
same "a finished run prints the same result" "$tmp/e1.json" "$tmp/e1-again.json"
"$shoal" fork e1 --at 1 --id e2 --runs "$tmp/runs" --quiet >/dev/null 2>&1
same "a fork without a change is the run" "$tmp/runs/e1/evolution.jsonl" "$tmp/runs/e2/evolution.jsonl"
if "$shoal" replay --run e1 --generation 2 --runs "$tmp/runs" --quiet 2>/dev/null | grep -q "same bits"; then ok "a generation replayed"
else bad "a generation replayed" "no 'same bits'"; fi
if "$shoal" lineage e1 --runs "$tmp/runs" | grep -q "^ancestry of"; then ok "lineage"; else bad "lineage" "no ancestry"; fi
# Groups of runs: their results are hand-written.
cat >"$tmp/seed.yaml" <<YAML
model: test/models/fry-1
personas: [one=$tmp/founder1, two=$tmp/founder2]
tasks: [copy]
rounds: 0
chain_of_thought: false
test_items: 1
evolve: {search: none}
fitness: {items: 1}
YAML
write_result() { # ID ACCURACY RETAINED_ACCURACY CHANGE
    "$shoal" evolve "$tmp/seed.yaml" --runs "$tmp/runs" --id "$1" --quiet >/dev/null 2>"$tmp/err" || bad "run $1" "$(cat "$tmp/err")"
    printf '{"table":[{"acc":0,"n":1},{"acc":%s,"n":50}],"spent":{"flops":1e9},"retention":[{"evolved":{"acc":%s},"diff":{"value":%s}}]}' \
        "$2" "$3" "$4" >"$tmp/runs/$1/result.json"
}
write_result x-s1 0.5 0.8 -0.01; write_result x-s2 0.6 0.8 0.01; write_result x-s3 0.7 0.8 0.03
write_result y-s2 0.58 0.7 0; write_result y-s1 0.45 0.6 0; write_result y-s3 0.61 0.8 0; write_result y-s4 0.9 0.8 0
"$shoal" runs --runs "$tmp/runs" --compare x y >"$tmp/out" 2>"$tmp/err"
holds "the mean of three seeds" "60.00 (35.16 … 84.84)" "$tmp/out"
holds "and their retention" "+1.00 (-3.97 … +5.97)" "$tmp/out"
holds "groups are paired by seed" "+5.33 (-3.39 … +14.06)" "$tmp/out"
holds "p of three pairs by sign flips" "0.25, 0.25" "$tmp/out"
"$shoal" runs --runs "$tmp/runs" --compare x y --base y >"$tmp/out" 2>"$tmp/err"
holds "retention relative to another group" "+10.00 (-14.84 … +34.84)" "$tmp/out"
says "a group without runs" 1 "no finished run is named 'z-" "$shoal" runs --runs "$tmp/runs" --compare x z
says "no folder of runs" 1 "no runs in" "$shoal" runs --runs "$tmp/nowhere"
"$shoal" runs --runs "$tmp/runs" >"$tmp/out"
holds "runs are listed" "y-s4" "$tmp/out"

# ---- a trained model
if [ -e test/models/fry-1/config.json ]; then
    "$shoal" run test/models/fry-1 --chat 'sort: k b x' --temp 0 -n 12 >"$tmp/out" 2>/dev/null
    if grep -q 'b k x' "$tmp/out"; then ok "the model sorts"; else bad "the model sorts" "$(cat "$tmp/out")"; fi
    "$shoal" eval test/models/fry-1 --tasks copy,sort --n 200 --json >"$tmp/out" 2>/dev/null
    if awk -F'"acc":' '{split($2, v, ","); if (v[1] < 0.95) bad = 1} END {exit bad || NR != 2}' "$tmp/out"; then
        ok "eval --json"; else bad "eval --json" "$(cat "$tmp/out")"; fi
    printf '{"question":"sort: k b x","choices":["b k x","x k b"],"answer":0}\n{"question":"どれ？","choices":["赤","青"],"answer":"青"}\n' >"$tmp/own.jsonl"
    "$shoal" eval test/models/fry-1 --tasks "$tmp/own.jsonl" --log-samples "$tmp/items" --json >"$tmp/out" 2>/dev/null
    holds "eval on a JSONL file" '"task":"own","adapter":"base","n":2,' "$tmp/out"
    has_manifest "the manifest of eval" "$tmp/out" '"adapters":{},"data":{"own":"' "\"$tmp/own.jsonl\":\"$(sha "$tmp/own.jsonl")\"}" '"seed":1000003}}'
    before=$(field own <"$tmp/out")
    sed 's/赤/黄/' "$tmp/own.jsonl" >"$tmp/own" && mkdir -p "$tmp/changed" && mv "$tmp/own" "$tmp/changed/own.jsonl"
    "$shoal" eval test/models/fry-1 --tasks "$tmp/changed/own.jsonl" --json --quiet >"$tmp/out" 2>"$tmp/err"
    if [ "$(field own <"$tmp/out")" != "$before" ]; then ok "another choice, another hash of the questions"; else bad "another choice, another hash of the questions" "$before"; fi
    cp "$tmp/own.jsonl" "$tmp/changed/own.jsonl"
    "$shoal" eval test/models/fry-1 --tasks "$tmp/changed/own.jsonl" --json --quiet >"$tmp/out" 2>"$tmp/err"
    if [ "$(field own <"$tmp/out")" = "$before" ]; then ok "equal questions, equal hashes"; else bad "equal questions, equal hashes" "$before"; fi
    holds "--log-samples writes each answer" '"line":2,' "$tmp/items"
    # ---- pre-registration: seal, run, and runs that differ from the plan
    planned() { "$shoal" eval test/models/fry-1 --tasks "$tmp/changed/own.jsonl,copy" --n 9 --quiet "$@"; }
    says "a plan is sealed" 0 "" planned --freeze "$tmp/plan.json"
    holds "its hash is printed" "SHA-256 $(sha "$tmp/plan.json"): publish it" "$tmp/out"
    if grep -q 'calls' "$tmp/out"; then bad "no question is asked" "$(cat "$tmp/out")"; else ok "no question is asked"; fi
    for f in '"program": "'"$(sha "$shoal")" "\"$tmp/changed/own.jsonl\": \"$(sha "$tmp/own.jsonl")\"" '"copy": 9' '"seed": 1000003' '"sealed": "20'; do holds "the plan has $f" "$f" "$tmp/plan.json"; done
    says "a sealed plan is not replaced" 1 "is not replaced; name a new file" planned --freeze "$tmp/plan.json"
    says "the evaluation of a plan" 0 "" planned --frozen "$tmp/plan.json"
    holds "every item is kept" "SHA-256 $(sha "$tmp/plan.json"): the evaluation kept all " "$tmp/out"
    planned --frozen "$tmp/plan.json" --json >"$tmp/out" 2>"$tmp/err"
    holds "and with --json" '","kept":true,"items":[{"item":"program","kept":true,' "$tmp/out"
    sed 's/赤/黄/' "$tmp/own.jsonl" >"$tmp/changed/own.jsonl"
    says "another question is a deviation" 0 "deviates from the plan" planned --frozen "$tmp/plan.json"
    for f in "deviates from it in 2 of" "  data $tmp/changed/own.jsonl: planned " "  questions own: planned "; do holds "the report has '$f'" "$f" "$tmp/out"; done
    planned --frozen "$tmp/plan.json" --json >"$tmp/out" 2>"$tmp/err"
    holds "and with --json as well" '{"item":"questions own","kept":false,"planned":"' "$tmp/out"
    cp "$tmp/own.jsonl" "$tmp/changed/own.jsonl"
    says "other n and seed" 0 "" planned --frozen "$tmp/plan.json" --n 1 --seed 5 --chain-of-thought --tasks copy
    for f in "n copy: planned 9, found 1" "seed: planned 1000003, found 5" "settings chain-of-thought: planned false, found true" "questions own: planned " "n own: planned 2, not found"; do holds "the report has '$f'" "  $f" "$tmp/out"; done
    "$shoal" quantize test/models/fry-1 "$tmp/other.gguf" --type q8_0 --quiet >/dev/null 2>&1
    "$shoal" eval "$tmp/other.gguf" --tasks "$tmp/changed/own.jsonl,copy" --n 9 --frozen "$tmp/plan.json" >"$tmp/out" 2>"$tmp/err"
    for f in "deviates from it in 1 of" "  model: planned "; do holds "another model: $f" "$f" "$tmp/out"; done
    says "a file that is no plan" 1 "is no plan; 'shoal eval --freeze FILE' writes one" planned --frozen test/models/fry-1/config.json
    says "both at once" 2 "give one of both" planned --frozen "$tmp/plan.json" --freeze "$tmp/plan2.json"
    printf '{"question":"x","choices":["a"],"answer":0}\n' >"$tmp/one.jsonl"
    says "a question with one choice" 1 "one.jsonl', line 1: field 'choices' has fewer than 2 choices" "$shoal" eval test/models/fry-1 --tasks "$tmp/one.jsonl"
    says "an unknown task" 2 "no task 'nosuch'" "$shoal" eval test/models/fry-1 --tasks nosuch
    says "a task without its data" 2 "name one with --data" "$shoal" eval test/models/fry-1 --tasks arc_easy
    says "missing examples" 1 "there are no examples for --shots" "$shoal" eval test/models/fry-1 --tasks "$tmp/own.jsonl" --shots 2
    printf '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n{"messages": [oops\n' >"$tmp/d.jsonl"
    says "a broken line of conversations" 1 "line 2" "$shoal" train test/models/fry-1 --runs "$tmp/runs" --data "$tmp/d.jsonl" --out "$tmp/t"
    head -n 16 data/personas/critic.jsonl >"$tmp/few.jsonl"
    "$shoal" train test/models/fry-1 --runs "$tmp/runs" --data "$tmp/few.jsonl" --out "$tmp/t1" --r 4 --epochs 1 --threads 1 --quiet >/dev/null 2>"$tmp/err" &&
        "$shoal" train test/models/fry-1 --runs "$tmp/runs" --data "$tmp/few.jsonl" --out "$tmp/t2" --r 4 --epochs 1 --threads 2 --quiet >/dev/null 2>"$tmp/err"
    same "training gives the same adapter with 1 and 2 threads" "$tmp/t1/adapter_model.safetensors" "$tmp/t2/adapter_model.safetensors"
    cat >"$tmp/train.yaml" <<END
model: test/models/fry-1
data: $tmp/few.jsonl
out: $tmp/t4
train: {r: 8, num_train_epochs: 1, target: [q_proj, v_proj]}
END
    "$shoal" train "$tmp/train.yaml" --r 4 --target all-linear --quiet >/dev/null 2>"$tmp/err"
    same "a training recipe equals its flags, and flags override it" "$tmp/t1/adapter_model.safetensors" "$tmp/t4/adapter_model.safetensors"
    printf 'model: test/models/fry-1\ntrain:\n  lr: 1\n  rang: 4\n' >"$tmp/r.yaml"
    says "an unknown key of a training recipe" 2 "r.yaml', line 4: unknown key 'rang'" "$shoal" train "$tmp/r.yaml"
    says "training without a base" 2 "the base is missing" "$shoal" train --data "$tmp/few.jsonl" --out "$tmp/t"
    says "an unknown training method" 2 "there are sft, es" "$shoal" train test/models/fry-1 --data "$tmp/few.jsonl" --out "$tmp/t" --method cma
    says "an odd population" 2 "population 3 is odd" "$shoal" train test/models/fry-1 --data "$tmp/few.jsonl" --out "$tmp/t" --method es --population 3
    for n in 1 2; do
        "$shoal" train test/models/fry-1 --data "$tmp/few.jsonl" --out "$tmp/es$n" --method es --population 4 --r 2 --threads $n --quiet >/dev/null 2>"$tmp/err"
    done
    same "evolution strategies give the same adapter with 1 and 2 threads" "$tmp/es1/adapter_model.safetensors" "$tmp/es2/adapter_model.safetensors"
    says "an unknown optimizer" 2 "there are adamw, adamw_8bit, sgd" "$shoal" train test/models/fry-1 --data "$tmp/few.jsonl" --out "$tmp/t" --optim lion
    printf '{"prompt":"空は?","completion":"青い。"}\n{"prompt":"空は？","completion":"青い。"}\n' >"$tmp/ja.jsonl"
    "$shoal" train --base_model test/models/fry-1 --data "$tmp/ja.jsonl" --eval_data "$tmp/ja.jsonl" --dry_run >"$tmp/out" 2>"$tmp/err"
    holds "a dry run shows the targets" "空は?⟦青い。" "$tmp/out"
    holds "a dry run reports duplicates" "1 of 2 samples repeats an earlier one except for case, width or white space (the first: line 2, as in line 1)" "$tmp/out"
    holds "a dry run reports overlap with the evaluation data" "2 of 2 evaluation samples are in the data" "$tmp/out"
    "$shoal" train test/models/fry-1 --data "$tmp/few.jsonl" --out "$tmp/dry" --dry-run --json --r 4 --epochs 1 --bsz 2 --grad-accum 4 >"$tmp/out" 2>"$tmp/err"
    holds "dry run, --json" '"updates":2,"samples_per_update":8,"samples":16,' "$tmp/out"
    if command -v python3 >/dev/null && ! python3 -c 'import json,sys; json.load(open(sys.argv[1]))' "$tmp/out"; then bad "dry run is JSON" "$(head -c 300 "$tmp/out")"; fi
    absent "a dry run writes no file" "$tmp/dry"
    printf '{"prompt":"空は?","chosen":"青い。","rejected":"赤い。"}\n{"prompt":"one","chosen":"yes","rejected":"no"}\n' >"$tmp/pairs.jsonl"
    dpo() { "$shoal" train test/models/fry-1 --method dpo --data "$tmp/pairs.jsonl" --out "$tmp/dry" --r 4 --bsz 2 --grad-accum 1 "$@" 2>"$tmp/err"; }
    dpo --dry-run >"$tmp/out"
    for f in '空は?⟦赤い。' '2 pairs: prompts 2 to ' 'updates: 1, of 2 pairs; in all 2 pairs' 'the reference '; do holds "a dry run of dpo shows '$f'" "$f" "$tmp/out"; done
    rloo() { "$shoal" train test/models/fry-1 --method rloo --data fry:pick:12 --prefix answer: --max-new-tokens 8 --out "$tmp/dry" --r 4 --bsz 4 --grad-accum 1 --max-steps 2 --num-generations 4 "$@" 2>"$tmp/err"; }
    rloo --dry-run >"$tmp/out"
    for f in 'answer:⟦ ' 'its first 16 completions: reward ' 'steps: 2, of 4 prompts with 4 completions of at most 8 tokens' 'of it the engine'; do holds "a dry run of rloo shows '$f'" "$f" "$tmp/out"; done
    rloo --dry-run --json >"$tmp/out"
    if command -v python3 >/dev/null && ! python3 -c 'import json,sys; json.load(open(sys.argv[1]))["data"][0]["completions"]["entropy"]' "$tmp/out"; then bad "dry run of rloo is JSON" "$(head -c 300 "$tmp/out")"; fi
    rloo --out "$tmp/rewarded" --runs "$tmp/runs_rl" --reward regex:qqqq >"$tmp/out"
    holds "rloo prints rewards, not a loss" "adapter: mean reward 0.0000 in the first step, 0.0000 in the last, wrote '" "$tmp/out"
    holds "equal rewards print a warning" "in every group all completions had the same reward; try a higher --temperature" "$tmp/err"
    rloo --out "$tmp/rewarded" --runs "$tmp/runs_rl" --reward 'regex:[a-m]' --json >"$tmp/out"
    holds "rloo prints rewards as JSON" '"last_reward":' "$tmp/out"
    "$shoal" train test/models/fry-1 --method es --population 4 --data "$tmp/few.jsonl" --dry-run >"$tmp/out" 2>"$tmp/err"
    holds "a dry run of es" "updates: 1, of 16 samples that 4 members read" "$tmp/out"
    says "a dry run with a reward that its data lack" 1 "'answer' is missing" "$shoal" train test/models/fry-1 --method rloo --data "$tmp/ja.jsonl" --dry-run
    absent "dry runs of other methods write no file" "$tmp/dry"
    dpo --out "$tmp/dpo" --runs "$tmp/runs_dpo" --quiet >"$tmp/out"
    holds "dpo prints the share of pairs ranked right" "% of the last step's pairs ranked right, wrote '" "$tmp/out"
    for f in '<h2>Margin: ' '<h2>Contents of the data' '<th>beta</th>'; do holds "the page of dpo has $f" "$f" "$tmp"/runs_dpo/train-dpo-*/report.html; done
    "$shoal" adapter convert "$tmp/t1" "$tmp/t1.gguf" >/dev/null 2>"$tmp/err" && "$shoal" adapter convert "$tmp/t1.gguf" "$tmp/t3" >/dev/null 2>>"$tmp/err"
    same "PEFT to GGUF and back" "$tmp/t1/adapter_model.safetensors" "$tmp/t3/adapter_model.safetensors"
    same "PEFT's config to GGUF and back" "$tmp/t1/adapter_config.json" "$tmp/t3/adapter_config.json"
    "$shoal" run test/models/fry-1 --chat 'sort: k b x' --temp 0 -n 12 --ids --exact --adapter "$tmp/t1" >"$tmp/ids_peft" 2>/dev/null
    "$shoal" run test/models/fry-1 --chat 'sort: k b x' --temp 0 -n 12 --ids --exact --adapter "$tmp/t1.gguf" >"$tmp/ids_lora" 2>/dev/null
    same "the GGUF adapter generates the same ids" "$tmp/ids_peft" "$tmp/ids_lora"
    if "$shoal" adapter inspect "$tmp/t1" 2>/dev/null | grep -q "effect on the base: KL mean"; then ok "adapter inspect"; else bad "adapter inspect" "no effect shown"; fi
    "$shoal" adapter merge test/models/fry-1 "$tmp/t1" "$tmp/t2" --weights 0.5 0.5 --out "$tmp/merged.gguf" --type f32 --exact --json >"$tmp/out" 2>"$tmp/err"
    if grep -q '"merged_vs_adapter":{[^}]*"same_top":1' "$tmp/out"; then ok "adapter merge"; else bad "adapter merge" "$(cat "$tmp/out" "$tmp/err")"; fi
    "$shoal" quantize test/models/fry-1 "$tmp/small.gguf" --type q8_0 --no-compare --quiet >/dev/null 2>"$tmp/err"
    "$shoal" adapter merge "$tmp/small.gguf" "$tmp/t1" --out "$tmp/b.gguf" >"$tmp/out" 2>&1
    if grep -q "MB of weights in bf16" "$tmp/out" && grep -q "merged, bf16" "$tmp/out"; then ok "a quantised base is merged to bf16"; else bad "a quantised base is merged to bf16" "$(cat "$tmp/out" "$tmp/err")"; fi
    "$shoal" run "$tmp/merged.gguf" --chat 'sort: k b x' --temp 0 -n 12 --ids --exact >"$tmp/ids_merged" 2>/dev/null
    same "the merged model generates the same ids" "$tmp/ids_peft" "$tmp/ids_merged"
    "$shoal" convert test/models/fry-1 -o "$tmp/fry.gguf" 2>/dev/null
    "$shoal" quantize test/models/fry-1 "$tmp/fry8.gguf" --type q8_0 --tokens 2 --quiet >/dev/null 2>"$tmp/err"
    "$shoal" train "$tmp/fry8.gguf" --runs "$tmp/runs" --data "$tmp/few.jsonl" --out "$tmp/qlora" --r 2 --max-steps 1 --quiet >/dev/null 2>"$tmp/err"
    for pair in fry.gguf:t1 fry8.gguf:t1 fry.gguf:qlora fry8.gguf:qlora; do
        "$shoal" run "$tmp/${pair%:*}" -p x -n 1 --adapter "$tmp/${pair#*:}" >"$tmp/out" 2>"$tmp/err"
        if [ $? = 0 ] && ! grep -q "was trained on a base" "$tmp/err"; then ok "a model and its copies are one base: $pair"; else bad "a model and its copies are one base: $pair" "$(cat "$tmp/err")"; fi
    done
    "$shoal" run test/models/fry-1 -p x -n 1 --adapter "$tmp/qlora" >"$tmp/out" 2>"$tmp/err"
    if [ $? = 0 ] && ! grep -q "was trained on a base" "$tmp/err"; then ok "QLoRA's adapter on the source"; else bad "QLoRA's adapter on the source" "$(cat "$tmp/err")"; fi
    "$shoal" model new --shape fry-1 --seed 9 "$tmp/random.gguf" 2>/dev/null
    for a in t1 qlora; do says "an adapter of another base: $a" 0 "was trained on a base with sha-256" "$shoal" run "$tmp/random.gguf" -p x -n 1 --adapter "$tmp/$a"; done
    "$shoal" adapter new --model test/models/fry-1 --rank 2 "$tmp/begun" >/dev/null 2>"$tmp/err"
    says "run with an adapter without effect" 0 "begun' has no effect, because its B or its scale is 0" "$shoal" run test/models/fry-1 -p x -n 1 --adapter "$tmp/begun"
    says "eval with an adapter without effect" 0 "begun' has no effect" "$shoal" eval test/models/fry-1 --tasks pick --n 2 --adapter "$tmp/begun"
    says "debate with an adapter without effect" 0 "begun' has no effect" "$shoal" debate test/models/fry-1 --agents base "$tmp/begun" --topic x --choices a b --rounds 1
    "$shoal" run test/models/fry-1 -p x -n 1 --adapter "$tmp/t1" >/dev/null 2>"$tmp/err"
    if grep -q "no effect" "$tmp/err"; then bad "an adapter with effect" "$(cat "$tmp/err")"; else ok "an adapter with effect"; fi
    for n in 1 2; do
        "$shoal" adapter extract test/models/fry-1 "$tmp/merged.gguf" --rank 4 --threads $n --out "$tmp/ex$n" --json >"$tmp/out" 2>"$tmp/err"
    done
    same "extracting gives the same adapter with 1 and 2 threads" "$tmp/ex1/adapter_model.safetensors" "$tmp/ex2/adapter_model.safetensors"
    holds "extract finds the rank in every layer" '"down_proj":{"layers":6,"rank_min":4,"rank_max":4,' "$tmp/out"
    # near NAME LIMIT A B: adapter B equals A within LIMIT of A's norm.
    near() {
        "$shoal" adapter blend --operator delta --parents "$3" "$4" --weights 1 -1 --rank 8 --child "$tmp/far" >/dev/null 2>"$tmp/err"
        "$shoal" adapter info "$3" "$tmp/far" --json 2>>"$tmp/err" | field norm >"$tmp/norms"
        if awk -v limit="$2" 'NR == 1 {size = $1} END {exit NR != 2 || !(size > 0 && $1 < limit * size)}' "$tmp/norms"; then ok "$1"
        else bad "$1" "$(tr '\n' ' ' <"$tmp/norms"; cat "$tmp/err")"; fi
    }
    near "extracting a merged adapter restores it up to rounding" 1e-4 "$tmp/t1" "$tmp/ex1"
    "$shoal" adapter resize "$tmp/t1" --rank 2 --out "$tmp/small" >"$tmp/out" 2>"$tmp/err"
    holds "adapter resize" "q_proj    6 of 6 layers, rank 2, error 0." "$tmp/out"
    "$shoal" adapter extract test/models/fry-1 "$tmp/merged.gguf" --rank 2 --out "$tmp/small2" --quiet >/dev/null 2>"$tmp/err"
    near "extracting at a rank equals resizing to it" 1e-4 "$tmp/small" "$tmp/small2"
    "$shoal" adapter resize "$tmp/t1" --energy 0.9 --out "$tmp/small.gguf" --fold --json >"$tmp/out" 2>"$tmp/err"
    error=$(sed 's/"modules".*//' "$tmp/out" | field error)
    if awk -v e="$error" 'BEGIN {exit !(e > 0 && e * e <= 0.1)}' && grep -q '"rank_min":[123],' "$tmp/out"; then ok "resize --energy selects ranks"; else bad "resize --energy selects ranks" "$(cat "$tmp/out" "$tmp/err")"; fi
    says "resize without --rank and --energy" 2 "--rank R or --energy E is missing" "$shoal" adapter resize "$tmp/t1" --out "$tmp/no"
    says "nothing to extract" 1 "no projection is changed" "$shoal" adapter extract test/models/fry-1 test/models/fry-1 --rank 2 --out "$tmp/no"
    says "a fine-tuned model of another base" 1 "'a' (qwen3, 2 layers of 32) was not made from 'fry-1'" "$shoal" adapter extract test/models/fry-1 "$tmp/a.gguf" --rank 2 --out "$tmp/no"
    cp "$tmp/merged.gguf" "$tmp/nan.gguf"
    printf '\377\377\377\177' | dd of="$tmp/nan.gguf" bs=4 seek=$(($(wc -c <"$tmp/nan.gguf") / 8)) conv=notrunc 2>/dev/null
    says "weights that are NaN" 1 "a projection has weights that are not numbers" "$shoal" adapter extract test/models/fry-1 "$tmp/nan.gguf" --rank 2 --out "$tmp/no"
    absent "refused extracts write no file" "$tmp/no"
    "$shoal" model new --shape tiny-qwen3 --seed 4 "$tmp/other.gguf" 2>/dev/null
    says "an error names weights that an adapter cannot represent" 0 "'a' and 'other' differ in the embedding, the head, as well" "$shoal" adapter extract "$tmp/a.gguf" "$tmp/other.gguf" --energy 0.5 --rank 20 --out "$tmp/ex_other"
    says "weights and adapters that do not match" 2 "1 weights for 2 adapters" "$shoal" adapter merge test/models/fry-1 "$tmp/t1" "$tmp/t2" --weights 1 --out "$tmp/no.gguf"
    "$shoal" adapter operators >"$tmp/out" 2>"$tmp/err" && "$shoal" adapter operators --json >"$tmp/rows" 2>>"$tmp/err"
    for o in delta slerp delta_ties cat noise; do
        if grep -q "^$o  *[^ ]" "$tmp/out"; then ok "adapter operators lists $o"; else bad "adapter operators lists $o" "$(cat "$tmp/out" "$tmp/err")"; fi; done
    holds "and with --json its bounds" '"operator":"extrapolate","kind":"crossover",' "$tmp/rows"
    if [ "$(wc -l <"$tmp/rows")" = "$(wc -l <"$tmp/out")" ]; then ok "one line per operator"; else bad "one line per operator" "$(wc -l "$tmp/rows" "$tmp/out")"; fi
    blend() { "$shoal" adapter blend --parents "$tmp/t1" "$tmp/es1" "$@"; }
    blend --operator slerp --child "$tmp/child1" --threads 1 --json >"$tmp/one" 2>"$tmp/err"
    SHOAL_CPU=scalar blend --operator slerp --child "$tmp/child2" --threads 2 --json >"$tmp/out" 2>>"$tmp/err"
    same "an operator's child with 1 and 2 threads, scalar and best level" "$tmp/child1/adapter_model.safetensors" "$tmp/child2/adapter_model.safetensors"
    key=$(field hash <"$tmp/one")
    if [ ${#key} = 66 ] && [ "$(field hash <"$tmp/out")" = "$key" ]; then ok "a blended child has the same hash with any threads and level"; else bad "a blended child has the same hash with any threads and level" "$(cat "$tmp/one" "$tmp/out" "$tmp/err")"; fi
    blend --operator slerp --weights 3 1 --child "$tmp/child3" --json >"$tmp/out" 2>"$tmp/err"
    if [ -s "$tmp/out" ] && [ "$(field hash <"$tmp/out")" != "$key" ]; then ok "other weights give another hash"; else bad "other weights give another hash" "$(cat "$tmp/out" "$tmp/err")"; fi
    "$shoal" adapter inspect "$tmp/child3" --json >"$tmp/out" 2>"$tmp/err"
    holds "a child's lineage names the operator" '"operator":"slerp"' "$tmp/out"
    holds "a child's lineage names the weights" '"weights":"3 1"' "$tmp/out"
    a=$("$shoal" adapter inspect "$tmp/t1" --json 2>/dev/null | field hash) b=$("$shoal" adapter inspect "$tmp/es1" --json 2>/dev/null | field hash)
    holds "a child's lineage names its parents" "\"parents\":\"$(echo "$a $b" | tr -d '\"')\"" "$tmp/out"
    cp -r "$tmp/t1" "$tmp/replaced"
    "$shoal" adapter blend --parents "$tmp/replaced" "$tmp/es1" --out "$tmp/replaced" --mut 0 >/dev/null 2>"$tmp/err"
    "$shoal" adapter inspect "$tmp/replaced" --json >"$tmp/out" 2>"$tmp/err"
    holds "a child that replaces its parent names the parent" "\"parents\":\"$(echo "$a $b" | tr -d '\"')\"" "$tmp/out"
    holds "and the names that the parents had" 'parent_names":"[\"'"$tmp/replaced" "$tmp/out"
    holds "a child has the base of its parents" '"base_sha256":"' "$tmp/out"
    "$shoal" adapter blend --parents "$tmp/t1" "$tmp/es1" --out "$tmp/mutated" --mut 1 >/dev/null 2>"$tmp/err"
    "$shoal" adapter inspect "$tmp/mutated" --json >"$tmp/out" 2>"$tmp/err"
    holds "the blend before a mutation is no parent" "\"parents\":\"$(echo "$a $b" | tr -d '\"')\"" "$tmp/out"
    holds "the mutation of a blend" '"mutation":"mutate-relative"' "$tmp/out"
    says "an unknown operator" 2 "no operator 'splice'; there are delta, factor_blend, ratio, extrapolate, slerp," blend --operator splice --child "$tmp/no"
    says "too many parents" 2 "operator 'slerp' takes 2 parents, not 3" "$shoal" adapter blend --operator slerp --parents "$tmp/t1" "$tmp/t2" "$tmp/es1" --child "$tmp/no"
    says "weights and parents that do not match" 2 "1 weights for 2 adapters" blend --operator slerp --weights 1 --child "$tmp/no"
    says "a step for an operator without one" 2 "operator 'slerp' has no option 'step'; it has weights, rank" blend --operator slerp --step 1 --child "$tmp/no"
    says "--alpha of an operator" 2 "operator 'slerp' has no option 'alpha'; it has weights, rank" blend --operator slerp --alpha 0.1 --child "$tmp/no"
    says "--mut of an operator" 2 "operator 'delta_ties' has no option 'mut'; it has weights, rank, step" blend --operator delta_ties --mut 0.1 --child "$tmp/no"
    says "a seed without random numbers" 2 "operator 'slerp' has no option 'seed'" blend --operator slerp --seed 1 --child "$tmp/no"
    says "the weights of a mutation" 2 "operator 'noise' has no option 'weights'; it has seed, step" "$shoal" adapter blend --operator noise --parents "$tmp/t1" --weights 1 --child "$tmp/no"
    says "a step without an operator" 2 "'--step' is an option of operators" blend --step 1 --child "$tmp/no"
    absent "a refused blend leaves no child" "$tmp/no"
    fry() { "$shoal" run test/models/fry-1 --chat 'sort: k b x' --quiet "$@" 2>>"$tmp/err"; }
    fry --adapter "$tmp/t1" --seed 3 --ids >"$tmp/one"
    fry --adapter "$tmp/t1=1.0" --seed 3 --ids >"$tmp/out"
    same "a mix of one adapter with weight 1 equals the adapter" "$tmp/one" "$tmp/out"
    fry --seed 3 --ids >"$tmp/one"
    fry --adapter "$tmp/t1=0,$tmp/t2=0" --seed 3 --ids >"$tmp/out"
    same "a mix with weights 0 equals the base" "$tmp/one" "$tmp/out"
    "$shoal" train test/models/fry-1 --runs "$tmp/runs" --data "$tmp/few.jsonl" --out "$tmp/t3" --r 2 --quiet >/dev/null 2>"$tmp/err"
    fry --adapter "$tmp/t1=0.7,$tmp/t3=-0.3" --lora-dtype f16 --record --store "$tmp/mix.db" --json >"$tmp/out"
    key=$(field call <"$tmp/out" | tr -d '"')
    says "replay of a mix" 0 "" "$shoal" replay "$key" --store "$tmp/mix.db"
    rm -r "$tmp/t3"
    says "replay with a missing adapter fails" 1 "" "$shoal" replay "$key" --store "$tmp/mix.db"
    holds "replay names the missing adapter" "t3' is missing" "$tmp/out"
    "$shoal" eval test/models/fry-1 --tasks copy --n 12 --adapters "$tmp/t1" --record --store "$tmp/eval.db" --max-memory 80M >"$tmp/out" 2>"$tmp/err"
    holds "the detectable difference is printed first" "is found four times in five" "$tmp/err"
    "$shoal" debate test/models/fry-1 --agents base "$tmp/t1" --tasks sort --n 3 --samples 0 --record --store "$tmp/eval.db" --max-memory 120M >>"$tmp/out" 2>>"$tmp/err"
    "$shoal" replay --list --store "$tmp/eval.db" --json >"$tmp/keys" 2>>"$tmp/err"
    if [ "$(wc -l <"$tmp/keys")" = 36 ]; then ok "eval and debate record every call"; else bad "eval and debate record every call" "$(wc -l <"$tmp/keys") calls $(head -c 300 "$tmp/err")"; fi
    for at in 1 20 36; do
        says "replay of recorded call $at" 0 "" "$shoal" replay "$(sed -n ${at}p "$tmp/keys" | field key | tr -d '"')" --store "$tmp/eval.db"; done

    # ---- a training run: its record, the gate, versions and rollback
    head -n 48 data/personas/critic.jsonl >"$tmp/learn.jsonl"
    tail -n 24 data/personas/critic.jsonl >"$tmp/held.jsonl"
    learn() { "$shoal" train test/models/fry-1 --data "$tmp/learn.jsonl" --out "$tmp/agent" --r 4 --bsz 8 --grad-accum 1 --runs "$tmp/runs" --quiet "$@" 2>"$tmp/err"; }
    if learn --lr 4e-3 --epochs 4 --eval-data "$tmp/held.jsonl" --tags 良い --tensorboard --json >"$tmp/out"; then ok "a better version is published"; else bad "a better version is published" "$(cat "$tmp/out" "$tmp/err")"; fi
    for f in '"published":true' '"eval":{"n":24,' '"retain":null'; do holds "--json says $f" "$f" "$tmp/out"; done
    has_manifest "the manifest of train" "$tmp/out" '"adapters":{"start":"' "\"$tmp/learn.jsonl\":\"$(sha "$tmp/learn.jsonl")\",\"$tmp/held.jsonl\":\"$(sha "$tmp/held.jsonl")\"}"
    run=$(ls "$tmp/runs" | grep '^train-agent-')
    if [ "$(wc -l <"$tmp/runs/$run/train.jsonl")" = 24 ]; then ok "one line of train.jsonl per update"; else bad "one line of train.jsonl per update" "$(ls -R "$tmp/runs")"; fi
    if n=$(python3 test/train/event_files.py "$tmp/runs/$run" "$tmp/runs/$run/train.jsonl" 2>&1) && [ "$n" -ge 240 ]; then ok "event files have the figures of train.jsonl"; else bad "event files have the figures of train.jsonl" "$n"; fi
    for f in '<svg' '<td>held out, nats a token</td>' "$run"; do holds "the page has $f" "$f" "$tmp/runs/$run/report.html"; done
    first=$(field hash <"$tmp/out" | tr -d '"')
    says "a version that is not better is not published" 1 "is not published: it is not better" "$shoal" train test/models/fry-1 --data "$tmp/learn.jsonl" --out "$tmp/agent" --r 4 --lr 1e-9 --bsz 8 --epochs 1 --runs "$tmp/runs" --eval-data "$tmp/held.jsonl"
    says "held-out samples that are in the training data" 1 "24 of 24 evaluation samples are in the data of 'adapter' (line 1 is line 1 of" "$shoal" train test/models/fry-1 --data "$tmp/held.jsonl" --out "$tmp/t9" --runs "$tmp/runs" --eval-data "$tmp/held.jsonl"
    set -- "$tmp"/agent/rejected-*
    if [ -e "$1/adapter_model.safetensors" ] && [ -e "$1/version.json" ]; then ok "a rejected version is kept"; else bad "a rejected version is kept" "$(ls "$tmp/agent")"; fi
    if learn --lr 1e-3 --seed 9 --retain copy --retain-n 40 >"$tmp/out"; then ok "a second version is published"; else bad "a second version is published" "$(cat "$tmp/err")"; fi
    holds "retention is printed" "copy           n = 40, " "$tmp/out"
    "$shoal" adapter list "$tmp/agent" >"$tmp/out" 2>"$tmp/err"
    holds "adapter list" "2 versions" "$tmp/out"
    holds "with score and tags" "良い" "$tmp/out"
    says "adapter rollback" 0 "" "$shoal" adapter rollback "$tmp/agent" --quiet
    holds "to the version before" "$(echo "$first" | cut -c1-12)" "$tmp/out"
    says "rollback without a previous version" 1 "no previous version" "$shoal" adapter rollback "$tmp/agent"
    says "prune without a condition" 2 "requires --keep" "$shoal" adapter prune "$tmp/agent"
    says "prune with an age without a unit" 2 "'30' is not a number with a unit" "$shoal" adapter prune "$tmp/agent" --older-than 30
    mkdir -p "$tmp/no-adapters"
    says "prune where there is no adapter" 1 "has neither adapters nor runs" "$shoal" adapter prune "$tmp/no-adapters" --keep 0
    says "prune lists what it would delete" 0 "nothing was deleted; --yes" "$shoal" adapter prune "$tmp/agent" --keep 0 --yes --dry-run
    holds "the versions but the current one" "agent: 1 would be deleted" "$tmp/out"
    says "prune deletes with --yes" 0 "" "$shoal" adapter prune "$tmp/agent" --keep 0 --yes --json
    holds "as JSON" '"deleted":true,"pruned":' "$tmp/out"
    "$shoal" adapter list "$tmp/agent" >"$tmp/out" 2>"$tmp/err"
    holds "one version is left" "1 version" "$tmp/out"
    says "an adapter of another model in the way" 1 "choose another --out" "$shoal" train "$tmp/a.gguf" --data "$tmp/learn.jsonl" --out "$tmp/agent" --runs "$tmp/runs"
    says "runs that cannot be recorded" 1 "name a folder with --runs" "$shoal" train test/models/fry-1 --data "$tmp/few.jsonl" --out "$tmp/t9" --runs /proc/none
    says "missing held-out data" 1 "eval data of 'adapter'" "$shoal" train test/models/fry-1 --data "$tmp/few.jsonl" --out "$tmp/t9" --runs "$tmp/runs" --eval-data "$tmp/nowhere.jsonl"
    says "an adapter for another model" 1 "adapter" "$shoal" run "$tmp/a.gguf" -p x --adapter "$tmp/t1"
    hash=$("$shoal" adapter inspect "$tmp/t1" --json 2>/dev/null | field hash)
    "$shoal" debate test/models/fry-1 --agents base "$tmp/t1" --tasks sort --n 2 --samples 0 --store "$tmp/man.db" --json --quiet >"$tmp/out" 2>"$tmp/err"
    has_manifest "the manifest of debate" "$tmp/out" "\"adapters\":{\"$tmp/t1\":$hash}" '"data":{"sort":"' '"protocol brief":"'
    "$shoal" debate test/models/fry-1 --agents base base --topic t --choices a b --store "$tmp/man.db" --json --quiet >"$tmp/out" 2>"$tmp/err"
    has_manifest "the manifest of a topic" "$tmp/out" '"data":{"topic":"'
    "$shoal" world test/models/fry-1 --adapter "$tmp/t1" --agents 2 --size 9 --steps 3 --generations 1 --eval-maps 2 --runs "$tmp/lives" --json --quiet >"$tmp/out" 2>"$tmp/err"
    has_manifest "the manifest of a simulation" "$tmp/out" "\"adapters\":{\"$tmp/t1\":$hash},\"data\":{\"rules\":\""
    says "debate with no rounds" 0 "" "$shoal" debate test/models/fry-1 --agents base base base --topic t --choices a b --rounds 0
    # ---- workflow files: a copy, and the same graph written differently, equal the built-in protocol, call by call
    for f in du revise-on-error-tail mad legacy; do
        "$shoal" debate --show-protocol $f >"$tmp/mine.yaml"
        for p in $f "$tmp/mine.yaml"; do
            "$shoal" debate test/models/fry-1 --agents base "$tmp/t1" base --personas a b c --tasks sort --n 3 --samples 0 --no-base --protocol "$p" --store "$tmp/flow.db" >"$tmp/out.${p##*/}" 2>"$tmp/err"
        done
        same "a copy of $f debates as it does" "$tmp/out.$f" "$tmp/out.mine.yaml"
    done
    "$shoal" debate test/models/fry-1 --agents base "$tmp/t1" base --personas a b c --tasks sort --n 3 --samples 0 --no-base --protocol test/cases/graph-du.yaml --store "$tmp/flow.db" >"$tmp/out" 2>"$tmp/err"
    same "another graph for du debates as it does" "$tmp/out.du" "$tmp/out"
    holds "equal workflows make equal calls" "27 of 27 calls were in the store" "$tmp/err"
    # ---- teams
    printf 'name: 二人\nrounds: 2\nagents:\n  - {name: 花, adapter: t1, system: よく考えて。}\n  - {name: mixed, adapter: [t1=0.5]}\n  - {adapter: base}\n' >"$tmp/team.yaml"
    printf '{"question":"How much is 2 + 3?","answer":"5"}\n{"question":"1たす1は？","answer":"2"}\n' >"$tmp/sums.jsonl"
    printf 'file: sums.jsonl\ngrader: number\nmax_tokens: 12\n' >"$tmp/sums.yaml"
    mkdir -p "$tmp/evo/adapters/gen_0" && cp -r "$tmp/t1" "$tmp/evo/adapters/gen_0/first"
    "$shoal" eval test/models/fry-1 --tasks "sort,largest,$tmp/own.jsonl,$tmp/sums.yaml" --n 4 --run "$tmp/evo" --team "$tmp/team.yaml" --json >"$tmp/out" 2>"$tmp/err"
    for f in sort largest own sums; do holds "eval evaluates a team on $f" "\"task\":\"$f\",\"adapter\":\"二人\"," "$tmp/out"; done
    holds "and is compared with the base" '"calls":24,' "$tmp/out"
    holds "eval --run prints a line per generation" '"task":"sort","generation":0,"adapters":1,' "$tmp/out"
    "$shoal" debate test/models/fry-1 --team "$tmp/team.yaml" --tasks "$tmp/own.jsonl,$tmp/sums.yaml" --samples 2 --store "$tmp/team.db" >"$tmp/out" 2>"$tmp/err"
    for f in own sums; do holds "debate takes $f as eval does" "$f: 2 questions, protocol brief" "$tmp/out"; done
    holds "debate prints each agent's contribution" "worth in the first-round vote" "$tmp/out"
    says "a repeated debate uses stored calls" 0 "calls were in the store" "$shoal" debate test/models/fry-1 --team "$tmp/team.yaml" --tasks "$tmp/sums.yaml" --samples 2 --store "$tmp/team.db"
    says "examples/team.yaml" 0 "" "$shoal" eval test/models/fry-1 --tasks sort --n 2 --team examples/team.yaml
    for p in brief panel revise; do
        says "calls in the progress of a debate: $p" 0 "" "$shoal" debate test/models/fry-1 --agents base base base --tasks sort --n 4 --samples 3 --credit debate --protocol $p --store "$tmp/team.db"
        if grep -o 'sort [0-9]*/[0-9]*' "$tmp/err" | tail -n 1 | awk -F'[ /]' '$2 == $3 { found = 1 } END { exit !found }'
        then ok "all calls are in the total: $p"; else bad "all calls are in the total: $p" "$(cat "$tmp/err")"; fi
    done
    "$shoal" debate test/models/fry-1 --agents base "$tmp/t1" base --tasks pick,sort --n 12 --samples 6 --store "$tmp/team.db" --json --report "$tmp/pareto.html" >"$tmp/out" 2>"$tmp/err"
    if python3 - "$tmp/out" "$tmp/pareto.html" >"$tmp/n" 2>&1 <<'END'
import json, sys
reports = [json.loads(line) for line in open(sys.argv[1])]
reports = [r for r in reports if 'rows' in r]
for r in reports:
    rows = [x for x in r['rows'] if x['kind'] != 'oracle']
    cost = lambda x: x['prefilled'] + x['generated']
    for x in rows:
        beaten = any((y['acc'], -cost(y)) != (x['acc'], -cost(x)) and y['acc'] >= x['acc'] and cost(y) <= cost(x) for y in rows)
        assert x['pareto'] == (not beaten), x
    assert {x['pareto'] for x in rows} == {True, False} and not any(x['pareto'] for x in r['rows'] if x['kind'] == 'oracle')
page = open(sys.argv[2]).read()
assert len(reports) == 2 and page.count('Pareto front') == 2 and page.count('<circle') == sum(len(r['rows']) - 1 for r in reports), page.count('<circle')
END
    then ok "Pareto front of a debate"; else bad "Pareto front of a debate" "$(cat "$tmp/n" "$tmp/err")"; fi
    says "a team and agents" 2 "leave out --agents" "$shoal" debate test/models/fry-1 --team "$tmp/team.yaml" --agents base --tasks sort
    says "unknown credit method" 2 "there are vote, debate and none" "$shoal" debate test/models/fry-1 --agents base --tasks sort --credit all
    says "an unknown vote" 2 "there are majority, confidence" "$shoal" debate test/models/fry-1 --agents base --tasks sort --vote loud
    says "a grader of tasks" 2 "tasks have their own" "$shoal" debate test/models/fry-1 --agents base --tasks sort --grader math
    says "data without tasks" 2 "--data is for --tasks" "$shoal" debate test/models/fry-1 --agents base --topic t --data .
    # ---- second turns as training data, and the temperature of samples
    says "second turns of the test split" 2 "add --split train" "$shoal" debate test/models/fry-1 --agents base "$tmp/t1" --tasks sort --second-turns "$tmp/turns"
    says "second turns of a topic" 2 "--second-turns is for --tasks" "$shoal" debate test/models/fry-1 --agents base --topic t --second-turns "$tmp/turns"
    says "second turns of a file" 2 "'own' has others" "$shoal" debate test/models/fry-1 --agents base --tasks "$tmp/own.jsonl" --split train --second-turns "$tmp/turns"
    if [ -e "$tmp/turns" ]; then bad "a refused request writes nothing" "$(ls "$tmp/turns")"; else ok "a refused request writes nothing"; fi
    prints "second turns" "6 conversations of 6 questions" "$shoal" debate test/models/fry-1 --agents base "$tmp/t1" --tasks sort,pick --split train --n 3 --no-chain-of-thought --second-turns "$tmp/turns" --store "$tmp/team.db"
    if [ "$(cat "$tmp"/turns/second/*.jsonl | grep -c '"content":"answer: [^"]*","weight":0},{"role":"user","content":"others say ')" = 12 ] &&
        [ "$(cat "$tmp"/turns/second/*.jsonl | sed 's/.*"content":/"content":/')" = "$(cat "$tmp"/turns/direct/*.jsonl | sed 's/.*"content":/"content":/')" ]
    then ok "second turns and their control have the same targets"; else bad "second turns and their control have the same targets" "$(cat "$tmp"/turns/*/*.jsonl)"; fi
    for f in second direct; do
        "$shoal" train test/models/fry-1 --data "$tmp/turns/$f/t1.jsonl" --out "$tmp/t10" --dry-run --json 2>"$tmp/err" | grep -o '"targets":[0-9]*' >"$tmp/out.$f"
    done
    same "and as many tokens to learn from" "$tmp/out.second" "$tmp/out.direct"
    prints "the tuned temperature of samples" "right majorities of 8 samples of base on 3 development questions" "$shoal" debate test/models/fry-1 --agents base --tasks pick --n 3 --rounds 1 --samples 2 --sample-temperature auto --store "$tmp/team.db"
    says "no questions to tune on" 2 "name other questions with --tune-data" "$shoal" debate test/models/fry-1 --agents base --tasks "$tmp/own.jsonl" --sample-temperature auto --store "$tmp/team.db"
    printf 'agents:\n  - {adapter: nowhere}\n' >"$tmp/lost.yaml"
    says "a team without its adapter" 1 "lost.yaml', line 2: there is no adapter 'nowhere'" "$shoal" eval test/models/fry-1 --tasks sort --team "$tmp/lost.yaml"
    says "a folder that is not a run" 1 "no generations in" "$shoal" eval test/models/fry-1 --tasks sort --run "$tmp"
    # ---- generated data
    printf '{"prompt":"sort: k b x"}\n{"prompt":"升序：m u j p"}\n{"prompt":"81,37からEへ進む。どこ？"}\n{"prompt":"sort: k b x"}\n' >"$tmp/p.jsonl"
    synth() { "$shoal" synth test/models/fry-1 --prompts "$tmp/p.jsonl" --samples 4 --n 24 --temp 1.2 --store "$tmp/synth.db" "$@"; }
    synth --out "$tmp/s1.jsonl" --require answer: --min-agreement 0.5 --max-perplexity 90% --judge "$tmp/t1" --json >"$tmp/out" 2>"$tmp/err"
    if [ -s "$tmp/s1.jsonl" ] && grep -q '"prompts":4,"answers":16,"kept":[1-9]' "$tmp/out" && grep -q '"filter":"duplicate","dropped":[1-9]' "$tmp/out"; then
        ok "synth keeps and drops"; else bad "synth keeps and drops" "$(cat "$tmp/err" "$tmp/out")"; fi
    synth --no-record --out "$tmp/s2.jsonl" --require answer: --min-agreement 0.5 --max-perplexity 90% --judge "$tmp/t1" --threads 1 --quiet >/dev/null 2>"$tmp/err"
    same "synth writes the same bytes again, with one thread" "$tmp/s1.jsonl" "$tmp/s2.jsonl"
    key=$(head -n 1 "$tmp/s1.jsonl" | field call | tr -d '"')
    says "replay of a sample's call" 0 "" "$shoal" replay "$key" --store "$tmp/synth.db"
    holds "a replay under a grammar or of a sample gives the same bits" "same bits: call" "$tmp/out"
    says "synth continues from recorded calls" 0 "16 of 16 answers were recorded before" synth --out "$tmp/s2.jsonl"
    says "synth that keeps no sample" 1 "no answer passed the filters" synth --out "$tmp/s3.jsonl" --language ko
    absent "a synth without kept samples writes no file" "$tmp/s3.jsonl"
    says "synth with an unknown option of train" 2 "unknown flag '--nonsense'" synth --out "$tmp/s3.jsonl" --then-train "$tmp/st" -- --nonsense 3
    absent "an invalid option of train is found before synth writes" "$tmp/s3.jsonl"
    cat >"$tmp/synth.yaml" <<END
model: test/models/fry-1
prompts: $tmp/p.jsonl
out: $tmp/s4.jsonl
store: $tmp/synth.db
then_train: $tmp/st
synth: {samples: 4, n: 24, temp: 1.2}
train: {r: 4, epochs: 2}
END
    sed '/^then_train/d' "$tmp/synth.yaml" >"$tmp/r.yaml"
    says "a section train that would be ignored" 2 "need --then-train DIR" "$shoal" synth "$tmp/r.yaml"
    says "a recipe writes, filters and trains" 0 "" "$shoal" synth "$tmp/synth.yaml" --quiet -- --epochs 1
    same "the recipe's samples are its flags'" "$tmp/s2.jsonl" "$tmp/s4.jsonl"
    "$shoal" train test/models/fry-1 --data "$tmp/s2.jsonl" --out "$tmp/st2" --r 4 --epochs 1 --quiet >/dev/null 2>"$tmp/err"
    same "its adapter is that of shoal train" "$tmp/st/adapter_model.safetensors" "$tmp/st2/adapter_model.safetensors"
else
    echo "skip a trained model: test/models/fry-1 is not there"
fi

# ---- the world
"$shoal" world --policy rule random --maps 6 --steps 200 --json >"$tmp/out" 2>"$tmp/err"
"$shoal" world --policy rule random --maps 6 --steps 200 --json --quiet >"$tmp/again" 2>/dev/null
same "policies measured twice give the same lines" "$tmp/out" "$tmp/again"
head -n 2 "$tmp/out" >"$tmp/lines"
has_manifest "the manifest of world" "$tmp/lines" '"model":null,"adapters":{},"data":{"rules":"'
holds "each policy has a line" '{"policy":"random","world":"repaired","maps":6,"seed":1,"agents":20,"steps":200,"delivered":{"value":' "$tmp/out"
if sed -n 's/^{"difference":\["rule","random"\],"delivered":{"value":[^,]*,"lo":\([^,]*\),.*"p_delivered":\([^}]*\)}$/\1 \2/p' "$tmp/out" |
    awk '{n++; if ($1 <= 0 || $2 > 0.05) bad = 1} END {exit bad || n != 1}'; then
    ok "policy rule delivers more than random"; else bad "policy rule delivers more than random" "$(cat "$tmp/out")"; fi
"$shoal" world --policy reflex random --maps 6 --steps 200 --json --quiet >"$tmp/out" 2>/dev/null
if grep -q '^{"policy":"reflex".*"blocked":{"value":0.0,"lo":0.0,"hi":0.0}' "$tmp/out" &&
    grep -q '^{"difference":\["reflex","random"\],"delivered":{"value":[1-9].*"p_delivered":0.0[0-4]' "$tmp/out"; then
    ok "policy reflex delivers more than random and is never blocked"; else bad "policy reflex delivers more than random and is never blocked" "$(cat "$tmp/out")"; fi
"$shoal" world --policy mock --maps 3 --steps 50 --world legacy >"$tmp/out" 2>"$tmp/err"
holds "the table" "world 'legacy'" "$tmp/out"
if grep -q '^mock  *0\.00 \[0\.00, 0\.00\]  *0\.00 \[' "$tmp/out"; then ok "the mock policy collects nothing"; else bad "the mock policy collects nothing" "$(cat "$tmp/out")"; fi
holds "the speed is printed on stderr" "ticks a second" "$tmp/err"
"$shoal" world --food-energy 0 --maps 2 --json --quiet >"$tmp/out" 2>/dev/null
holds "a flag overrides the rules of --world, even with its default value" '"survival":{"value":0.0,' "$tmp/out"
life="$shoal world --seed 4 --agents 5 --steps 250 --vocabulary 2"
$life --record "$tmp/life.jsonl" --json >"$tmp/out" 2>"$tmp/err"
says "replay" 0 "" "$shoal" world --replay "$tmp/life.jsonl" --json
cp "$tmp/out" "$tmp/again"
$life --record "$tmp/life2.jsonl" --json >"$tmp/out" 2>"$tmp/err"
same "a replay ends at the simulation's end" "$tmp/out" "$tmp/again"
same "the same simulation gives the same trace" "$tmp/life.jsonl" "$tmp/life2.jsonl"
"$shoal" world --replay "$tmp/life.jsonl" --at 120 --json >"$tmp/out" 2>"$tmp/err"
holds "--at loads a tick" '{"tick":120,"steps":250,"seed":4,"policy":"rule","hash":"' "$tmp/out"
holds "with every agent" '{"agent":4,"alive":true,"cell":[' "$tmp/out"
for policy in rule random; do
    "$shoal" world --replay "$tmp/life.jsonl" --at 120 --continue --policy $policy --record "$tmp/$policy.jsonl" --quiet >/dev/null 2>"$tmp/err"
    sed '1d' "$tmp/$policy.jsonl" >"$tmp/fork.$policy"; done
sed '1d' "$tmp/life.jsonl" >"$tmp/whole"
same "a fork with the same policy is the same simulation" "$tmp/whole" "$tmp/fork.rule"
head -n 120 "$tmp/whole" >"$tmp/before"
head -n 120 "$tmp/fork.random" >"$tmp/out"
same "a fork keeps the ticks before it" "$tmp/before" "$tmp/out"
if cmp -s "$tmp/whole" "$tmp/fork.random"; then bad "another policy differs" "the same"; else ok "another policy differs"; fi
holds "and reports the tick of the fork" '"fork":120' "$tmp/random.jsonl"
says "a fork can be replayed" 0 "" "$shoal" world --replay "$tmp/random.jsonl"
head -c 9000 "$tmp/life.jsonl" >"$tmp/cut.jsonl"
says "a truncated trace" 0 "has no end" "$shoal" world --replay "$tmp/cut.jsonl"
sed 's/^\({"tick":50,"actions":\[\)[0-9]*/\10/' "$tmp/life.jsonl" >"$tmp/other.jsonl"
cmp -s "$tmp/life.jsonl" "$tmp/other.jsonl" && sed 's/^\({"tick":50,"actions":\[\)[0-9]*/\11/' "$tmp/life.jsonl" >"$tmp/other.jsonl"
says "a trace whose actions do not match its hashes" 1 "at tick 100 the world is not the one that was recorded" "$shoal" world --replay "$tmp/other.jsonl"
mkfifo "$tmp/never"
acts='{"actions":{"agent_0":1,"agent_1":2,"agent_2":3,"agent_3":0,"agent_4":4}}'
$life --policy-pipe "i=0; while [ \$i -lt 30 ] && read l; do i=\$((i + 1)); echo '$acts'; done; cat '$tmp/never'" --record "$tmp/killed.jsonl" >/dev/null 2>&1 &
killed=$!
for i in $(seq 100); do [ "$(cat "$tmp/killed.jsonl" 2>/dev/null | wc -l)" -ge 31 ] && break; sleep 0.3; done
kill -9 $killed 2>/dev/null
wait $killed 2>/dev/null
says "a killed simulation" 0 "was stopped after tick 30" "$shoal" world --replay "$tmp/killed.jsonl"
: >"$tmp/never" & # ends the policy
"$shoal" world --watch --steps 30 --world worlds/maze.yaml >"$tmp/out" 2>"$tmp/err"
holds "--watch without a terminal prints the last frame" "tick 30 of 30" "$tmp/out"
if grep -q "$(printf '\033')" "$tmp/out"; then bad "no escapes outside a terminal" "there are"; else ok "no escapes outside a terminal"; fi
says "trained agents" 0 "have the adapter 'worlds/forager'" "$shoal" world models/fry --watch --agents 2 --steps 3
"$shoal" world models/fry --watch --agents 2 --steps 3 --adapter none >"$tmp/none" 2>"$tmp/err"
if ! grep -q forager "$tmp/err" && [ -s "$tmp/none" ] && ! cmp -s "$tmp/out" "$tmp/none"; then ok "untrained agents"; else bad "untrained agents" "$(cat "$tmp/err")"; fi
"$shoal" world test/models/fry-1 --watch --agents 2 --steps 3 >"$tmp/out" 2>"$tmp/err"
if grep -q forager "$tmp/err"; then bad "agents of another model" "$(cat "$tmp/err")"; else ok "agents of another model"; fi
says "an unknown world" 2 "no world 'none'" "$shoal" world --world none
says "an unknown policy" 2 "no policy 'none'" "$shoal" world --policy none
says "--rules is refused" 2 "here it is --world legacy" "$shoal" world --rules seed
says "a map determines its size" 2 "the map says size, walls and homes itself" "$shoal" world --world worlds/maze.yaml --size 30
says "a trace contains its rules" 2 "a trace has its own rules" "$shoal" world --replay "$tmp/life.jsonl" --food 3
says "a trace contains its agents" 2 "a trace has its own agents" "$shoal" world --replay "$tmp/life.jsonl" --agents 3
says "a policy goes with --continue" 2 "go with --continue" "$shoal" world --replay "$tmp/life.jsonl" --policy random
says "--at after the end" 1 "ends with tick" "$shoal" world --replay "$tmp/life.jsonl" --at 251
says "recording several worlds" 2 "take one world and one policy" "$shoal" world --record "$tmp/x" --maps 2
says "a trace that cannot be written" 1 "/proc/none" "$shoal" world --record /proc/none
says "a full disk" 1 "cannot write the trace" "$shoal" world --record /dev/full
says "no trace" 1 "no trace of a world" "$shoal" world --replay "$tmp/lines.jsonl"
printf '{"reset":{"seed":7}}\nnonsense\n\0\377\n{"agents":{}}\n{"close":{}}\n{"agents":{}}\n' | "$shoal" world --pipe --agents 2 >"$tmp/out" 2>"$tmp/err"
if [ "$(wc -l <"$tmp/out")" = 5 ] && [ "$(grep -c '^{"error":' "$tmp/out")" = 2 ] && tail -n 2 "$tmp/out" | grep -q '^{"agents":\["agent_0","agent_1"\]}$'; then
    ok "world --pipe"; else bad "world --pipe" "$(head -c 600 "$tmp/out" "$tmp/err")"; fi
for brief in true false; do
    printf '{"reset":{"seed":7}}\n' | "$shoal" world --pipe --agents 1 --compact-observations=$brief >"$tmp/out" 2>&1
    cp "$tmp/out" "$tmp/$brief"; done
printf '{"reset":{"seed":7}}\n' | "$shoal" world --pipe --agents 1 >"$tmp/out" 2>&1
same "compact observations are the default" "$tmp/true" "$tmp/out"
holds "a compact observation" '"prompt":"u u u u o - - - + - -:"' "$tmp/true"
holds "an observation in words" '"prompt":"At (16,2), E200, unexplored area. Action:"' "$tmp/false"
says "a policy that ends" 1 "the policy 'exit 3', tick 0: it ended with exit code 3" "$shoal" world --policy-pipe 'exit 3'
says "a policy that is silent" 1 "it was silent for 0.3 seconds (--timeout)" "$shoal" world --policy-pipe 'exec sleep 30' --timeout 0.3
if "$(dirname "$shoal")/world" >"$tmp/out" 2>"$tmp/err"; then
    holds "examples/world.c" "the second half, run again: same state" "$tmp/out"; else bad "examples/world.c" "$(cat "$tmp/err")"; fi
if command -v python3 >/dev/null; then
    if python3 examples/world_env.py "$shoal" --size=12 >"$tmp/out" 2>"$tmp/err"; then
        holds "examples/world_env.py" "after the end: no agent is left to act" "$tmp/out"; else bad "examples/world_env.py" "$(cat "$tmp/err")"; fi
    "$shoal" world --policy random --policy-pipe "python3 examples/world_policy.py" --maps 2 --steps 100 --json >"$tmp/out" 2>"$tmp/err"
    if grep -q '"policy":"pipe".*"delivered":{"value":[0-9.]*[1-9]' "$tmp/out"; then ok "examples/world_policy.py"; else bad "examples/world_policy.py" "$(cat "$tmp/out" "$tmp/err")"; fi
    for how in q TERM SEGV BUS hangup; do
        if python3 test/cli/watch_pty.py "$shoal" $how >"$tmp/out" 2>&1; then ok "the terminal comes back: $how"; else bad "the terminal comes back: $how" "$(cat "$tmp/out")"; fi
    done
else
    echo "skip examples/world_env.py, examples/world_policy.py and the terminal: no python3"
fi

# ---- policies in another program's environment
says "--env-pipe without a model" 2 "name one" "$shoal" world --env-pipe 'exit 3'
says "--env-pipe and a policy" 2 "env-pipe is for simulations" "$shoal" world "$m" --env-pipe 'exit 3' --policy random
says "--env-pipe and a world" 2 "its own agents and rules" "$shoal" world "$m" --env-pipe 'exit 3' --world legacy
says "--env-pipe and a rule" 2 "its own agents and rules" "$shoal" world "$m" --env-pipe 'exit 3' --food 3
says "--env-pipe and agents" 2 "its own agents and rules" "$shoal" world "$m" --env-pipe 'exit 3' --agents 3
says "an environment that ends" 1 "the environment 'exit 3', spaces: it ended with exit code 3" "$shoal" world "$m" --env-pipe 'exit 3'
says "an environment that is silent" 1 "it was silent for 0.3 seconds (--timeout)" "$shoal" world "$m" --env-pipe 'exec sleep 30' --timeout 0.3
if [ -e test/models/fry-1/config.json ]; then
    # simulate NAME FLAG…: runs one policy, because the order of several could differ with fitness.
    simulate() {
        name=$1
        shift
        "$shoal" world test/models/fry-1 --num-adapters 1 --num-envs 2 --steps 12 --seed 5 --held-out 2 --update-interval 4 --curriculum 0 --runs "$tmp/lives" --out "$tmp/$name" --json --quiet "$@" >"$tmp/$name.out" 2>"$tmp/err" ||
            bad "a simulation: $name" "$(head -c 300 "$tmp/err")"
        grep -o '"hash":"[0-9a-f]*"' "$tmp/$name/state.json" >"$tmp/$name.minds"
        grep -ho '"tick":[0-9]*,"actions":[^]]*' "$tmp/$name"/trace-*.jsonl >"$tmp/$name.done"
        grep -o '"reward":{"value":[^,]*' "$tmp/$name.out" | tail -n "+$from" >"$tmp/$name.paid"
    }
    pipe="'$shoal' world --pipe --agents 3 --steps 12"
    from=2 # the rule's reward comes first
    simulate here --generations 2 --agents 3
    from=1
    simulate there --generations 2 --env-pipe "$pipe"
    simulate halved --generations 1 --env-pipe "$pipe"
    simulate halved --generations 2 --env-pipe "$pipe"
    same "a policy through the pipe equals one without it" "$tmp/there.minds" "$tmp/here.minds"
    same "it takes the same actions" "$tmp/there.done" "$tmp/here.done"
    same "it and the random baseline get the same rewards" "$tmp/there.paid" "$tmp/here.paid"
    same "a simulation in an external environment continues" "$tmp/halved.minds" "$tmp/there.minds"
    if [ "$(wc -l <"$tmp/there.done")" = 24 ] && [ -s "$tmp/there.minds" ]; then ok "both simulations are complete"; else bad "both simulations are complete" "$(cat "$tmp/there.done")"; fi
    says "--learn clone in an environment without a teacher" 1 "names no 'teacher'" "$shoal" world test/models/fry-1 --learn clone --env-pipe "$pipe" --runs "$tmp/lives" --quiet
    if command -v python3 >/dev/null; then
        simulate corridor --generations 1 --env-pipe "python3 examples/corridor_env.py"
        holds "examples/corridor_env.py" '"generation":1,"decisions":96,' "$tmp/corridor.out"
    else
        echo "skip examples/corridor_env.py: no python3"
    fi
else
    echo "skip simulations in an external environment: test/models/fry-1 is not there"
fi

# ---- simulations
says "flags of simulations without a model" 2 "require a model" "$shoal" world --generations 3
says "--best elsewhere" 2 "of 'shoal world export RUN'" "$shoal" world --best
says "missing groups" 1 "has no run of a world 'both-" "$shoal" world compare both --runs "$tmp"
says "--at-decisions elsewhere" 2 "of 'shoal world compare" "$shoal" world --at-decisions 9
for run in slow-s1:200:4 fast-s1:100:5; do # name, decisions of a generation, deliveries that it adds
    mkdir "$tmp/${run%%:*}"
    echo "$run" | awk -F: '{ print "{\"policy\":\"rule\",\"held_out\":{\"delivered\":{\"value\":20}}}"
        for (i = 0; i < 3; i++) printf "{\"generation\":%d,\"decisions\":%d,\"held_out\":{\"delivered\":{\"value\":%d}}}\n", i, i * $2, i * $3 }' >"$tmp/${run%%:*}/curve.jsonl"
done
prints "groups at their ends" "at the end; rule 20.00" "$shoal" world compare slow fast --runs "$tmp"
prints "deliveries between two generations" "slow                1        400    3.00 [" "$shoal" world compare slow fast --runs "$tmp" --at-decisions 150
holds "of every group" "fast                1        200    7.50 [" "$tmp/out"
holds "which the header names" "after 150 decisions of each run" "$tmp/out"
prints "and in JSON" '"at_decisions":150' "$shoal" world compare slow fast --runs "$tmp" --at-decisions 150 --json
says "decisions that a run has not made" 2 "'fast-s1' ends after 200 decisions" "$shoal" world compare slow fast --runs "$tmp" --at-decisions 201
if [ -e test/models/fry-1/config.json ]; then
    lives="$shoal world test/models/fry-1 --steps 20 --agents 4 --held-out 2 --update-interval 5 --batch-size 2 --runs $tmp/lruns --quiet"
    $lives --generations 1 --out "$tmp/lone" >"$tmp/one" 2>"$tmp/err" || bad "a simulation" "$(cat "$tmp/err")"
    holds "the table of simulations" "generation  decisions" "$tmp/one"
    if [ "$(sed -n 's/^\(rule\|random\|0\|1\)  .*/\1/p' "$tmp/one" | tr '\n' ' ')" = "rule random 0 1 " ]; then
        ok "baselines and generations have rows"; else bad "baselines and generations have rows" "$(cat "$tmp/one")"; fi
    $lives --generations 1 --learn none --out "$tmp/lnone" >"$tmp/out" 2>"$tmp/err"
    if grep -q '^1  *80 .*  [01]\.[0-9]*[1-9]' "$tmp/out"; then ok "a policy that does not learn has decisions and entropy"; else bad "a policy that does not learn has decisions and entropy" "$(cat "$tmp/out")"; fi
    if grep -q '^1  *80 .*  [01]\.[0-9]*[1-9]' "$tmp/one"; then ok "a generation's decisions and entropy"; else bad "a generation's decisions and entropy" "$(cat "$tmp/one")"; fi
    for f in state.json curve.jsonl report.html trace-1.jsonl critics-1.bin minds; do
        if [ -e "$tmp/lone/$f" ]; then ok "a run leaves $f"; else bad "a run leaves $f" "it is not there"; fi
    done
    says "the trace of a generation" 0 "" "$shoal" world --replay "$tmp/lone/trace-1.jsonl"
    says "runs are listed" 0 "" "$shoal" runs --runs "$tmp/lruns"
    holds "runs of worlds are listed" "world-" "$tmp/out"
    $lives --generations 2 --out "$tmp/lone" >"$tmp/two" 2>"$tmp/err"
    sed '$d' "$tmp/two" >"$tmp/out"
    same "more generations continue the run" "$tmp/one" "$tmp/out"
    holds "the continued run has another row" "2  " "$tmp/two"
    cp "$tmp/lone/state.json" "$tmp/state"
    $lives --generations 2 --out "$tmp/ltwo" --threads 2 >"$tmp/out" 2>"$tmp/err"
    same "two parallel simulations with two threads are equal" "$tmp/two" "$tmp/out"
    same "and the same state" "$tmp/lone/state.json" "$tmp/ltwo/state.json"
    same "and the same lineage" "$tmp/lone/lineage.jsonl" "$tmp/ltwo/lineage.jsonl"
    $lives --generations 2 --out "$tmp/lone" >"$tmp/out" 2>"$tmp/err"
    same "a finished simulation is shown again" "$tmp/two" "$tmp/out"
    head -c 900 "$tmp/ltwo/lineage.jsonl" >"$tmp/lone/lineage.jsonl" # as after a kill in the second line
    $lives --generations 2 --out "$tmp/lone" >"$tmp/out" 2>"$tmp/err"
    same "the missing line of a lineage is written again" "$tmp/lone/lineage.jsonl" "$tmp/ltwo/lineage.jsonl"
    says "lineage of a world" 0 "" "$shoal" lineage ltwo --runs "$tmp"
    "$shoal" lineage ltwo --runs "$tmp" >"$tmp/out" 2>"$tmp/err"
    holds "a policy of the second generation" "└── g0m" "$tmp/out"
    if grep -q '% alive  [0-9a-f]\{8\}  founder$' "$tmp/out" && grep -q '^ancestry of g[01]m[0-3]' "$tmp/out"; then ok "founders and ancestry"; else bad "founders and ancestry" "$(cat "$tmp/out")"; fi
    rm "$tmp/ltwo/lineage.jsonl"
    says "a world of an earlier version has no lineage" 1 "did not record its generations" "$shoal" lineage ltwo --runs "$tmp"
    says "other options in the same folder" 1 "holds a run of other options; name another folder with --out" $lives --generations 3 --lr 2e-3 --out "$tmp/lone"
    same "which do not change it" "$tmp/state" "$tmp/lone/state.json"
    $lives --generations 1 --lr 5e-3 --curriculum 0 --out "$tmp/lkept" >"$tmp/out" 2>"$tmp/err"
    says "a run keeps its options" 0 "continues with the options of its run: lr 0.005" \
        "$shoal" world test/models/fry-1 --steps 20 --agents 4 --held-out 2 --update-interval 5 --batch-size 2 --runs "$tmp/lruns" --generations 2 --out "$tmp/lkept"
    $lives --generations 2 --lr 5e-3 --curriculum 0 --out "$tmp/lwhole" >"$tmp/out" 2>"$tmp/err"
    same "as if they had been given" "$tmp/lwhole/state.json" "$tmp/lkept/state.json"
    $lives --generations 2 --out "$tmp/lone" --json >"$tmp/out" 2>"$tmp/err"
    sed '1,2d' "$tmp/out" >"$tmp/rows"
    if [ "$(wc -l <"$tmp/out")" = "$(wc -l <"$tmp/lone/curve.jsonl")" ]; then ok "--json gives the curve's lines"; else bad "--json gives the curve's lines" "$(cat "$tmp/out")"; fi
    holds "and the baselines'" '{"policy":"rule","held_out":{"delivered":{"value":' "$tmp/out"
    holds "a row" '"generation":2,"held_out":' "$tmp/rows"

    "$shoal" world export "$tmp/lone" --best --out "$tmp/best" >"$tmp/out" 2>"$tmp/err" || bad "export" "$(cat "$tmp/err")"
    says "an exported policy runs" 0 "" "$shoal" run test/models/fry-1 --adapter "$tmp/best" -p "two plus two" -n 3
    says "adapter info of an exported policy" 0 "" "$shoal" adapter info "$tmp/best"
    "$shoal" adapter inspect "$tmp/best" --model test/models/fry-1 --json >"$tmp/out" 2>"$tmp/err"
    holds "an exported policy names its base" "\"base_sha256\":\"$(sed -n 's/.*"model_sha256":"\([0-9a-f]*\)".*/\1/p' "$tmp/lone/state.json")\"" "$tmp/out"
    for key in environment_sha256 environment_seed fitness; do holds "and its $key" "\"$key\":\"" "$tmp/out"; done
    id=$(sed -n 's/^\(world-[0-9a-f]*\):.*/\1/p' "$tmp/one")
    $lives --generations 1 >"$tmp/out" 2>"$tmp/err"
    says "export by a run's name" 0 "" "$shoal" world export "$id" --adapter-name g0m0 --runs "$tmp/lruns" --out "$tmp/g0m1"
    holds "reports its identity" "g0m0: fitness" "$tmp/out"
    says "a missing policy" 1 "has no policy 'g7m7'" "$shoal" world export "$tmp/lone" --adapter-name g7m7 --out "$tmp/x"
    says "export of a folder that is not a run" 1 "is not a run of a world" "$shoal" world export "$tmp/none" --out "$tmp/x"
    says "export without --out" 2 "--out DIR is missing" "$shoal" world export "$tmp/lone"
    says "export without a run" 2 "of which run?" "$shoal" world export
    says "the best one and another one" 2 "exclude each other" "$shoal" world export "$tmp/lone" --best --adapter-name g0m0 --out "$tmp/x"
    sed "s/\"hash\":\"[0-9a-f]*\"/\"hash\":\"..\/..\/best\"/" "$tmp/lone/state.json" >"$tmp/other" && mkdir -p "$tmp/forged" && cp "$tmp/other" "$tmp/forged/state.json"
    says "export of a policy outside the run" 1 "is no hash" "$shoal" world export "$tmp/forged" --out "$tmp/x"
    absent "which leaves no file" "$tmp/x"

    "$shoal" world test/models/fry-1 --adapter "$tmp/lone" --watch --steps 4 --agents 3 --quiet >"$tmp/out" 2>"$tmp/err"
    holds "a policy's decision is shown" "chose:  north 0." "$tmp/out"
    "$shoal" world test/models/fry-1 --adapter "$tmp/best" --record "$tmp/minds.jsonl" --steps 12 --agents 3 --quiet --seed 3 >"$tmp/out" 2>"$tmp/err"
    says "a recorded model" 0 "" "$shoal" world --replay "$tmp/minds.jsonl"
    fork="$shoal world test/models/fry-1 --replay $tmp/minds.jsonl --at 5 --continue --quiet"
    $fork --adapter "$tmp/best" --learn none --record "$tmp/f1.jsonl" >"$tmp/out" 2>"$tmp/err" || bad "a fork by a model" "$(cat "$tmp/err")"
    $fork --adapter "$tmp/best" --learn none --record "$tmp/f2.jsonl" >"$tmp/out" 2>"$tmp/err"
    same "a fork by a model, twice" "$tmp/f1.jsonl" "$tmp/f2.jsonl"
    sed '1d' "$tmp/minds.jsonl" >"$tmp/whole"
    sed '1d' "$tmp/f1.jsonl" >"$tmp/out"
    same "the same policy continues identically" "$tmp/whole" "$tmp/out"
    $fork --adapter "$tmp/g0m1" --temperature 50 --record "$tmp/f3.jsonl" >"$tmp/out" 2>"$tmp/err"
    if cmp -s "$tmp/f1.jsonl" "$tmp/f3.jsonl"; then bad "another policy continues differently" "the same"; else ok "another policy continues differently"; fi
    "$shoal" world test/models/fry-1 --adapter "$tmp/best" --policy model random --maps 2 --steps 10 --agents 3 --quiet >"$tmp/out" 2>"$tmp/err"
    holds "a model together with a policy" "model - random, map by map" "$tmp/out"

    says "unknown --learn" 2 "no way to learn 'rote'" "$shoal" world test/models/fry-1 --learn rote
    says "unknown --decode" 2 "no decoding 'loud'" "$shoal" world test/models/fry-1 --decode loud
    says "--decode text with learning" 2 "requires --learn none" "$shoal" world test/models/fry-1 --decode text
    says "unknown --teacher" 2 "no policy 'nobody'" "$shoal" world test/models/fry-1 --teacher nobody
    says "unknown --crossover" 2 "nothing" "$shoal" world test/models/fry-1 --crossover nothing
    says "unknown --optim" 2 "lion" "$shoal" world test/models/fry-1 --optim lion
    says "a buffer too small" 2 "must be at least twice" "$shoal" world test/models/fry-1 --buffer-size 10 --batch-size 6
    says "the environment needs no model" 2 "--pipe is without a model" "$shoal" world test/models/fry-1 --pipe
    says "two models" 2 "one model at most" "$shoal" world test/models/fry-1 test/models/fry-1
    says "a rate out of range" 2 "--lr" "$shoal" world test/models/fry-1 --lr -1
    says "a missing adapter" 1 "none" "$shoal" world test/models/fry-1 --adapter "$tmp/none" --runs "$tmp/lruns"
    "$shoal" model new --shape tiny-llama --seed 3 "$tmp/bytes.gguf" 2>/dev/null
    # a token per byte: all actions begin with the token of a space
    bytes="$shoal world $tmp/bytes.gguf --agents 4 --steps 12 --eval-maps 1 --update-interval 2 --batch-size 2 --quiet"
    $bytes --generations 2 --out "$tmp/bytes" --json >"$tmp/out" 2>"$tmp/err"
    holds "actions that share their first token" '"generation":2,"decisions":96' "$tmp/out"
    $bytes --generations 1 --out "$tmp/bytes2" >/dev/null 2>"$tmp/err"
    $bytes --generations 2 --out "$tmp/bytes2" >/dev/null 2>"$tmp/err"
    same "a resumed run with them" "$tmp/bytes/curve.jsonl" "$tmp/bytes2/curve.jsonl"
    "$shoal" world --replay "$tmp/bytes/trace-2.jsonl" --at 12 --json >"$tmp/out" 2>"$tmp/err"
    holds "its trace is replayed" '"tick":12' "$tmp/out"
else
    echo "skip simulations: test/models/fry-1 is not there"
fi

# ---- files that other processes write, lock or read
if [ -d test/models/fry-1 ] && command -v python3 >/dev/null; then
    cat >"$tmp/holds.py" <<'END'
"""holds FILE COMMAND...: runs the command while this process locks FILE, like another shoal."""
import fcntl, os, subprocess, sys
os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True)
with open(sys.argv[1], "w") as f:
    fcntl.flock(f, fcntl.LOCK_EX)
    f.write("%d\n" % os.getpid())
    f.flush()
    sys.exit(subprocess.run(sys.argv[2:], stdin=subprocess.DEVNULL).returncode)
END
    says "two trainings into one folder" 1 "is in use by another process (" python3 "$tmp/holds.py" "$tmp/held/lock" \
        "$shoal" train test/models/fry-1 --runs "$tmp/hruns" --data data/personas/critic.jsonl --out "$tmp/held" --r 2 --max-steps 1
    [ -d "$tmp/runs/e1" ] && says "two resumes of one run" 1 "runs/e1' is in use by another process (" python3 "$tmp/holds.py" \
        "$tmp/runs/e1/lock" "$shoal" resume e1 --runs "$tmp/runs"
    (umask 000; "$shoal" run test/models/fry-1 -p "2+2=" -n 2 --store "$tmp/open/calls.db" --record >"$tmp/out" 2>"$tmp/err")
    mode=$(stat -c %a "$tmp/open/calls.db" 2>/dev/null)
    if [ "$mode" = 600 ]; then ok "recorded calls are private with umask 000"; else bad "recorded calls are private with umask 000" "mode $mode: $(cat "$tmp/err")"; fi

    mkfifo "$tmp/pipe"
    says "a pipe as an adapter" 1 "" timeout 20 "$shoal" run test/models/fry-1 -p x --adapter "$tmp/pipe"
    says "a device as data" 1 "it is a device, not a regular file" timeout 20 "$shoal" train test/models/fry-1 --runs "$tmp/hruns" --data /dev/zero --out "$tmp/zero" --max-steps 1
    cat >"$tmp/closed.py" <<'END'
import os, subprocess, sys
r, w = os.pipe()
os.close(r)
done = subprocess.run([sys.argv[1], "world", "--help"], stdout=w, stderr=subprocess.PIPE)
sys.exit(0 if done.returncode == -13 and not done.stderr else f"{done}")
END
    if python3 "$tmp/closed.py" "$shoal" 2>"$tmp/err"; then ok "a closed pipe on stdout"; else bad "a closed pipe on stdout" "$(cat "$tmp/err")"; fi
    says "a full disk on stdout" 1 "cannot write the result" sh -c "exec '$shoal' world --help >/dev/full"
    cat >"$tmp/terminal.py" <<'END'
import os, pty, sys
out = b""
os.environ["NO_COLOR"] = "1"
def keep(fd):
    global out
    piece = os.read(fd, 4096)
    out += piece
    return piece
pty.spawn([sys.argv[1], "run", "\033]0;title\a\033[2Jmodel", "-p", "x"], keep, lambda fd: b"")
sys.exit(0 if b"title" in out and b"\033" not in out and b"\a" not in out else repr(out))
END
    if timeout 30 python3 "$tmp/terminal.py" "$shoal" </dev/null >/dev/null 2>"$tmp/err"; then ok "a model name cannot control the terminal"; else bad "a model name cannot control the terminal" "$(cat "$tmp/err")"; fi
else
    echo "skip files that others hold: test/models/fry-1 or python3 is not there"
fi
mkdir -p "$tmp/ro"
if unshare -rm sh -c "mount -t tmpfs -o ro none '$tmp/ro'" 2>/dev/null; then
    says "a folder that cannot be written" 1 "$tmp/ro/out': Read-only file system" unshare -rm sh -c \
        "mount -t tmpfs -o ro none '$tmp/ro' && exec '$shoal' train test/models/fry-1 --runs '$tmp/hruns' --data data/personas/critic.jsonl --out '$tmp/ro/out' --max-steps 1"
else
    echo "skip a folder that cannot be written: no namespaces"
fi

# ---- files of other programs
if [ -d "$shared/data" ]; then
    s=$shared/data/stories260K
    "$shoal" convert "$s/stories260K.bin" --tokenizer "$s/tok512.bin" -o "$tmp/s.gguf" 2>/dev/null
    "$shoal" run "$tmp/s.gguf" Once -n 6 --temp 0 --ids >"$tmp/ids_argument" 2>/dev/null
    "$shoal" run "$tmp/s.gguf" -p Once --max-tokens 6 --temperature 0 --ids >"$tmp/ids_p" 2>/dev/null
    same "a model that knows no chats continues the message" "$tmp/ids_argument" "$tmp/ids_p"
    "$shoal" convert "$tmp/s.gguf" -o "$tmp/s_hf" 2>/dev/null
    sed -n 's/^greedy ids: //p' "$s/REFERENCE.txt" >"$tmp/want"
    for level in scalar avx2 avxvnni avx512 avx512bf16 amx; do
        SHOAL_CPU=$level "$shoal" doctor >/dev/null 2>&1 || { echo "skip stories260K at $level: this machine lacks it"; continue; }
        for m in s.gguf s_hf; do
            SHOAL_CPU=$level "$shoal" run "$tmp/$m" -p "" -n 60 --temp 0 --ids >"$tmp/got" 2>/dev/null
            same "stories260K at $level from $m" "$tmp/got" "$tmp/want"
        done
    done
    if "$shoal" run "$shared/data/gguf/llama-2-tiny-random.gguf" -p Hello -n 8 --temp 0 >"$tmp/out" 2>&1 && [ -s "$tmp/out" ]; then
        ok "llama-2-tiny-random generates"; else bad "llama-2-tiny-random generates" "$(cat "$tmp/out")"; fi
    says "an adapter of GPT-2" 1 "c_attn" "$shoal" run "$tmp/s.gguf" -p x --adapter "$shared/data/adapters/peft-gpt2-tiny-synthetic"
    seed=$(ls "$shared"/seeds/001* 2>/dev/null)
    sed -n '/^```jsonl/,/^```$/p' "$seed" | sed '/^```/d' >"$tmp/seed.jsonl"
    if [ -e test/models/fry-1/config.json ] && [ -s "$tmp/seed.jsonl" ]; then
        if "$shoal" train test/models/fry-1 --runs "$tmp/runs" --data "$tmp/seed.jsonl" --out "$tmp/seed" --quiet >"$tmp/out" 2>&1; then
            ok "concatenated JSON conversations train unedited"; else bad "concatenated JSON conversations train unedited" "$(cat "$tmp/out")"; fi
    fi
else
    echo "skip files of other programs: no '$shared/data'"
fi
