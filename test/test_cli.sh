#!/bin/sh
# test_cli: the program as a user calls it — reference ids, conversions, exit codes, and what bad input prints and leaves.
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary. Needs no network and no demo.
set -u
shoal=${SHOAL:-build/shoal}
shared=${SHOAL_SHARED:-../shared}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
# says NAME CODE TEXT COMMAND…: the command exits with CODE and its stderr holds TEXT.
says() {
    name=$1 code=$2 text=$3
    shift 3
    "$@" >"$tmp/out" 2>"$tmp/err"
    got=$?
    if [ $got != "$code" ]; then bad "$name" "exit $got, not $code: $(head -c 300 "$tmp/err")"
    elif [ -n "$text" ] && ! grep -qF -- "$text" "$tmp/err"; then bad "$name" "no '$text' in: $(head -c 300 "$tmp/err")"
    else ok "$name"; fi
}
same() { if [ -s "$2" ] && cmp -s "$2" "$3"; then ok "$1"; else bad "$1" "'$2' and '$3' differ"; fi; }
absent() { if [ -e "$2" ]; then bad "$1" "'$2' was left behind"; else ok "$1"; fi; }

# ---- the command line
for c in demo run train pretrain debate evolve eval resume convert adapter model bench doctor pull; do
    if "$shoal" $c --help 2>/dev/null | grep -q "^usage: shoal $c"; then ok "$c --help"; else bad "$c --help" "no usage"; fi
    says "$c refuses an unknown flag" 2 "unknown flag '--nonsense'" "$shoal" $c --nonsense
done
says "no command" 2 "usage: shoal COMMAND" "$shoal"
says "unknown command" 2 "no command 'fly'" "$shoal" fly
if "$shoal" doctor --json | grep -q '"level"'; then ok "doctor --json"; else bad "doctor --json" "no level"; fi

# ---- model files
"$shoal" model new --shape tiny-qwen3 --seed 3 "$tmp/a.gguf" 2>"$tmp/err" || bad "model new" "$(cat "$tmp/err")"
"$shoal" model new --shape tiny-qwen3 --seed 3 "$tmp/b.gguf" 2>/dev/null
same "the same seed gives the same file" "$tmp/a.gguf" "$tmp/b.gguf"
"$shoal" convert "$tmp/a.gguf" -o "$tmp/hf" 2>/dev/null && "$shoal" convert "$tmp/hf" -o "$tmp/c.gguf" 2>/dev/null
"$shoal" run "$tmp/a.gguf" -p "x" -n 12 --temp 0 --ids >"$tmp/ids_gguf" 2>/dev/null
"$shoal" run "$tmp/hf" -p "x" -n 12 --temp 0 --ids >"$tmp/ids_hf" 2>/dev/null
same "GGUF and Hugging Face directory generate alike" "$tmp/ids_gguf" "$tmp/ids_hf"
"$shoal" run "$tmp/c.gguf" -p "x" -n 12 --temp 0 --ids >"$tmp/ids_back" 2>/dev/null
same "and so does the way back" "$tmp/ids_gguf" "$tmp/ids_back"
for q in q8_0 q4_0 bf16; do
    "$shoal" model new --shape tiny-llama --quant $q "$tmp/$q.gguf" 2>/dev/null
    for t in 1 2 3; do "$shoal" run "$tmp/$q.gguf" -p "ab" -n 8 --temp 0.8 --seed 5 --ids --exact --threads $t >"$tmp/$q.$t" 2>/dev/null; done
    same "$q: 1 and 2 threads" "$tmp/$q.1" "$tmp/$q.2"
    same "$q: 1 and 3 threads" "$tmp/$q.1" "$tmp/$q.3"
    SHOAL_CPU=scalar "$shoal" run "$tmp/$q.gguf" -p "ab" -n 8 --temp 0.8 --seed 5 --ids --exact >"$tmp/$q.s" 2>/dev/null
    same "$q: scalar and best level" "$tmp/$q.1" "$tmp/$q.s"
done
for s in tiny-llama tiny-qwen2 tiny-gemma3 tiny-gpt-neo; do
    says "bench $s, a context of 64" 0 "" "$shoal" bench --shape $s --tokens 32 --reps 1 --members 8 --what prefill,decode,serve,noise
done

# ---- bad input
head -c 5000 "$tmp/a.gguf" >"$tmp/cut.gguf"
says "a truncated GGUF" 1 "cut.gguf" "$shoal" model info "$tmp/cut.gguf"
cp -r "$tmp/hf" "$tmp/lie"
printf '\377\377\377\377\377\377\377\177' | dd of="$tmp/lie/model.safetensors" bs=1 conv=notrunc 2>/dev/null
says "a lying safetensors header" 1 "model.safetensors" "$shoal" model info "$tmp/lie"
says "a missing model" 1 "nowhere" "$shoal" model info "$tmp/nowhere"
SHOAL_CACHE="$tmp/cache" says "a model that is not pulled" 1 "run 'shoal pull hf:a/b@v1'" "$shoal" run hf:a/b@v1 -p x
says "no name of a repository" 2 "expected hf:OWNER/REPO" "$shoal" pull somewhere
HF_ENDPOINT=http://127.0.0.1:1 says "no hub there" 1 "is this machine online" "$shoal" pull hf:a/b --to "$tmp/pulled"
absent "and no folder for it" "$tmp/pulled"
mkdir "$tmp/full"
says "a full disk" 1 "full/m.gguf" sh -c "ulimit -f 8; exec '$shoal' convert '$tmp/a.gguf' -o '$tmp/full/m.gguf'"
if [ -z "$(ls -A "$tmp/full")" ]; then ok "a full disk leaves nothing"; else bad "a full disk leaves nothing" "$(ls "$tmp/full")"; fi
printf 'model: models/fry\nseed: 1\nsede: 2\n' >"$tmp/r.yaml"
says "an unknown recipe key" 2 "r.yaml', line 3" "$shoal" evolve "$tmp/r.yaml" --runs "$tmp/runs"
absent "a bad recipe starts no run" "$tmp/runs"
says "resume of nothing" 1 "no run" "$shoal" resume none --runs "$tmp"

# ---- the starter model
if [ -e models/fry/config.json ]; then
    "$shoal" run models/fry --chat 'sort: k b x' --temp 0 -n 12 >"$tmp/out" 2>/dev/null
    if grep -q 'b k x' "$tmp/out"; then ok "the starter model sorts"; else bad "the starter model sorts" "$(cat "$tmp/out")"; fi
    "$shoal" eval models/fry --tasks copy,sort --n 200 --json >"$tmp/out" 2>/dev/null
    if awk -F'"acc":' '{split($2, v, ","); if (v[1] < 0.95) bad = 1} END {exit bad || NR != 2}' "$tmp/out"; then
        ok "eval --json"; else bad "eval --json" "$(cat "$tmp/out")"; fi
    printf '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n{"messages": [oops\n' >"$tmp/d.jsonl"
    says "a broken line of conversations" 1 "line 2" "$shoal" train models/fry --data "$tmp/d.jsonl" --out "$tmp/t"
    head -n 16 data/personas/critic.jsonl >"$tmp/few.jsonl"
    "$shoal" train models/fry --data "$tmp/few.jsonl" --out "$tmp/t1" --r 4 --threads 1 --quiet >/dev/null 2>"$tmp/err" &&
        "$shoal" train models/fry --data "$tmp/few.jsonl" --out "$tmp/t2" --r 4 --threads 2 --quiet >/dev/null 2>"$tmp/err"
    same "training gives the same adapter with 1 and 2 threads" "$tmp/t1/adapter_model.safetensors" "$tmp/t2/adapter_model.safetensors"
    "$shoal" adapter convert "$tmp/t1" "$tmp/t1.gguf" >/dev/null 2>"$tmp/err" && "$shoal" adapter convert "$tmp/t1.gguf" "$tmp/t3" >/dev/null 2>>"$tmp/err"
    same "PEFT to GGUF and back" "$tmp/t1/adapter_model.safetensors" "$tmp/t3/adapter_model.safetensors"
    same "PEFT's config to GGUF and back" "$tmp/t1/adapter_config.json" "$tmp/t3/adapter_config.json"
    "$shoal" run models/fry --chat 'sort: k b x' --temp 0 -n 12 --ids --exact --adapter "$tmp/t1" >"$tmp/ids_peft" 2>/dev/null
    "$shoal" run models/fry --chat 'sort: k b x' --temp 0 -n 12 --ids --exact --adapter "$tmp/t1.gguf" >"$tmp/ids_lora" 2>/dev/null
    same "the GGUF adapter generates alike" "$tmp/ids_peft" "$tmp/ids_lora"
    if "$shoal" adapter inspect "$tmp/t1" 2>/dev/null | grep -q "effect on the base: KL mean"; then ok "adapter inspect"; else bad "adapter inspect" "no effect shown"; fi
    "$shoal" adapter merge models/fry "$tmp/t1" "$tmp/t2" --weights 0.5 0.5 --out "$tmp/merged.gguf" --type f32 --exact --json >"$tmp/out" 2>"$tmp/err"
    if grep -q '"merged_vs_adapter":{[^}]*"same_top":1' "$tmp/out"; then ok "adapter merge"; else bad "adapter merge" "$(cat "$tmp/out" "$tmp/err")"; fi
    "$shoal" run "$tmp/merged.gguf" --chat 'sort: k b x' --temp 0 -n 12 --ids --exact >"$tmp/ids_merged" 2>/dev/null
    same "the merged model generates alike" "$tmp/ids_peft" "$tmp/ids_merged"
    "$shoal" convert models/fry -o "$tmp/fry.gguf" 2>/dev/null
    says "an adapter trained on other bytes of the base" 0 "was trained on a base with sha-256" "$shoal" run "$tmp/fry.gguf" -p x -n 1 --adapter "$tmp/t1"
    says "weights and adapters that do not match" 2 "1 weights for 2 adapters" "$shoal" adapter merge models/fry "$tmp/t1" "$tmp/t2" --weights 1 --out "$tmp/no.gguf"
    says "an adapter for another model" 1 "adapter" "$shoal" run "$tmp/a.gguf" -p x --adapter "$tmp/t1"
    says "debate with no rounds" 0 "" "$shoal" debate models/fry --agents base base base --topic t --choices a b --rounds 0
else
    echo "skip the starter model: models/fry is not there"
fi

# ---- files that nobody here wrote
if [ -d "$shared/data" ]; then
    s=$shared/data/stories260K
    "$shoal" convert "$s/stories260K.bin" --tokenizer "$s/tok512.bin" -o "$tmp/s.gguf" 2>/dev/null
    "$shoal" convert "$tmp/s.gguf" -o "$tmp/s_hf" 2>/dev/null
    sed -n 's/^greedy ids: //p' "$s/REFERENCE.txt" >"$tmp/want"
    for level in scalar avx2 avx512 amx; do
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
    if [ -e models/fry/config.json ] && [ -s "$tmp/seed.jsonl" ]; then
        if "$shoal" train models/fry --data "$tmp/seed.jsonl" --out "$tmp/seed" --quiet >"$tmp/out" 2>&1; then
            ok "the predecessor's conversations train unedited"; else bad "the predecessor's conversations train unedited" "$(cat "$tmp/out")"; fi
    fi
else
    echo "skip files that nobody here wrote: no '$shared/data'"
fi
