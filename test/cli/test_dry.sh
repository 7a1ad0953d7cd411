#!/bin/sh
# test_dry: a dry run prints its plan and changes no file: none created, modified, touched or removed. Prints "ok NAME",
# "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
root=$PWD
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
here=$tmp/here
mkdir "$here" && cd "$here" || exit 1
export SHOAL_CONFIG='' SHOAL_CACHE="$here/cache"
model=$root/test/models/fry-1

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
listing() { find "$here" -printf '%P %y %s %T@\n' | sort; }
# dry NAME TEXT COMMAND…: the command prints TEXT and the folder does not change.
dry() {
    name=$1 text=$2
    shift 2
    listing >"$tmp/before"
    "$shoal" "$@" --dry-run >"$tmp/out" 2>&1 </dev/null
    got=$?
    listing >"$tmp/after"
    if [ $got != 0 ]; then bad "$name" "exit $got: $(tail -c 300 "$tmp/out")"
    elif ! grep -qF -- "$text" "$tmp/out"; then bad "$name" "no '$text' in: $(head -c 300 "$tmp/out")"
    elif ! cmp -s "$tmp/before" "$tmp/after"; then bad "$name" "it changed $(diff "$tmp/before" "$tmp/after" | head -3 | tr '\n' ' ')"
    else ok "$name"; fi
}

printf '%s\n' '{"messages": [{"role": "user", "content": "12 + 30 = ?"}, {"role": "assistant", "content": "answer: 42"}]}' >d.jsonl
printf '{"prompt": "12 + 30 = ?"}\n' >p.jsonl
printf 'one line of notes\n' >notes.txt
"$shoal" adapter new --model "$model" --rank 2 --seed 1 a >"$tmp/out" 2>&1 && "$shoal" adapter new --model "$model" --rank 2 --seed 2 b >>"$tmp/out" 2>&1 &&
    "$shoal" model new --shape tiny-llama tiny.gguf >>"$tmp/out" 2>&1 && "$shoal" model new --shape tiny-llama --seed 2 tuned.gguf >>"$tmp/out" 2>&1 &&
    "$shoal" adapter extract tiny.gguf tuned.gguf --rank 2 --out c >>"$tmp/out" 2>&1 && "$shoal" knowledge add kept.db notes.txt >>"$tmp/out" 2>&1 ||
    { bad "the input files exist" "$(cat "$tmp/out")"; exit 1; }
printf 'shape: tiny-llama\nsteps: 7\nrows: 64\n' >small.yaml
sed "s|models/fry|$model|" "$root/examples/demo.yaml" >evolve.yaml
printf 'model: %s\npersonas: [one=a, two=b]\ntasks: [copy]\nrounds: 0\ntest_items: 4\nevolve: {generations: 1, population: 2, rank: 2}\nfitness: {items: 4}\n' "$model" >zero.yaml
"$shoal" evolve zero.yaml --zero-adapters --id e1 --quiet >"$tmp/out" 2>&1 && "$shoal" backup backups --state none --quiet >>"$tmp/out" 2>&1 ||
    { bad "a run and a backup" "$(cat "$tmp/out")"; exit 1; }

dry "resume" "recorded generations 2" resume e1
dry "fork" "shared generations 1" fork e1 --at 1 --id e2
dry "restore" "writes             $here/new/runs" restore backups --state new/state --runs new/runs
dry "restore, in the place of a folder" "replaces           yes" restore backups --state none --replace
dry "model new" "bytes of weights" model new --shape tiny-llama new.gguf
dry "train" "time: about" train "$model" --data d.jsonl --out new --runs runs --r 2
dry "pretrain" "updates            7" pretrain small.yaml --out new
dry "evolve" "items a generation" evolve evolve.yaml
dry "demo" "generations" demo
dry "world" "decisions, at most 20" world "$model" --agents 2 --steps 5 --generations 2 --runs runs
dry "the memory of world" "for passes of up to 512 tokens" world "$model" --agents 2 --steps 5 --runs runs
dry "adapters of several worlds" "minds              2" world "$model" --num-envs 3 --agents 2 --num-adapters 0 --runs runs
dry "world, in a folder" "writes             new" world "$model" --agents 2 --steps 5 --generations 2 --out new
dry "quantize" "bytes of weights" quantize tiny.gguf new.gguf --type q8_0
dry "quantize, over a file" "replaces           yes" quantize tiny.gguf tuned.gguf --type q8_0
dry "convert" "bytes of weights" convert tiny.gguf -o new
dry "adapter new" "writes             new" adapter new --model "$model" new
dry "adapter blend" "writes             new" adapter blend --model "$model" --parents a b --child new
dry "adapter convert" "writes             new.gguf" adapter convert --model "$model" a new.gguf
dry "adapter merge" "bytes of weights" adapter merge "$model" a --out new.gguf
dry "adapter extract" "dry run, nothing is written" adapter extract tiny.gguf tuned.gguf --rank 2 --out new
dry "adapter resize" "dry run, nothing is written" adapter resize --model tiny.gguf c --rank 1 --out new
dry "knowledge add" "reads              notes.txt" knowledge add new.db notes.txt
dry "knowledge add, with embeddings" "reads              notes.txt" knowledge add kept.db notes.txt --model "$model"
dry "knowledge remove" "forgets            notes.txt" knowledge remove kept.db notes.txt
dry "run" "total" run "$model" -p x --record --session new.session
dry "chat" "total" chat "$model"
dry "ask" "total" ask "$model" "12 + 30 = ?"
dry "debate" "total" debate "$model" --topic "12 + 30 = ?" --choices 41 42 --agents a b
dry "debate with its time" "  time               " debate "$model" --tasks pick --n 4 --agents a b
printf 'agents: [{adapter: a}, {adapter: b}]\n' >team.yaml
dry "team fit" "requests           100" team fit team.yaml --model "$model" --tasks pick --n 50 --out new.yaml
dry "eval with its time" "  time               about " eval "$model" --tasks pick --n 5 --record
dry "evolve with its time" "  time               " evolve zero.yaml
dry "resume with its time" "  time               " resume e1
dry "eval" "total" eval "$model" --tasks pick --n 5 --log-samples new.jsonl --record
dry "embed" "total" embed "$model" x
dry "synth" "total" synth "$model" --prompts p.jsonl --out new.jsonl --then-train new
dry "serve" "total" serve "$model" --port 0
dry "serve, within a limit" "total" serve "$model" --port 0 --max-memory 500M

# The dry run refuses what the run refuses.
refused() {
    name=$1 text=$2
    shift 2
    if "$shoal" "$@" --dry-run >"$tmp/out" 2>&1; then bad "$name" "it was not refused"
    elif grep -qF -- "$text" "$tmp/out"; then ok "$name"; else bad "$name" "no '$text' in: $(head -c 300 "$tmp/out")"; fi
}
sed "s|persona|&|; s|data/personas/critic.jsonl|none.jsonl|" evolve.yaml >missing.yaml
refused "evolve without a founder's file" "there is no 'none.jsonl'" evolve missing.yaml
printf 'mix: [nothing=1]\n' >mixed.yaml
refused "pretrain on no family" "no task family" pretrain mixed.yaml
refused "knowledge of a missing file" "there is no 'none.txt'" knowledge add new.db none.txt
refused "a mixture outside GGUF" "does not end in .gguf" quantize tiny.gguf new --type q4_k_m
refused "a resume of no run" "no run 'none'" resume none
refused "a fork of no run" "no run 'none'" fork none
refused "a fork into a run" "'runs/e1' already exists" fork e1 --id e1
refused "a restore into a folder with files" "holds something" restore backups --state none
refused "model data" "is an option of new" model data new
refused "a rollback" "rollback has no --dry-run" adapter rollback --model "$model" a
"$shoal" quantize tiny.gguf new.gguf --type q8_0 --dry-run --json >"$tmp/out" 2>/dev/null
if grep -q '^{"dry_run":{"writes":"new.gguf"' "$tmp/out"; then ok "as JSON"; else bad "as JSON" "$(head -c 200 "$tmp/out")"; fi

# The work of a dry run is that of the run. number KEY: the first value of a key in $tmp/out.
number() { tr ',{}' '\n' <"$tmp/out" | sed -n "s/^\"$1\"://p" | head -1; }
# sums KEY: the sum of its values.
sums() { tr ',{}' '\n' <"$tmp/out" | sed -n "s/^\"$1\"://p" | awk '{ n += $1 } END { print n + 0 }'; }
positive() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a > 0 && b >= a) }'; }
# estimate NAME COMMAND…: a dry run with --json has plausible numbers, in $requests, $prompt and $generated.
estimate() {
    name=$1
    shift
    "$shoal" "$@" --dry-run --json >"$tmp/out" 2>"$tmp/err" || bad "$name" "$(cat "$tmp/err")"
    requests=$(number requests) prompt=$(number prompt_tokens) generated=$(number max_generated_tokens)
    [ "$(number weights)" ] && requests=$(sed 's/.*"work"//' "$tmp/out" | tr ',{}' '\n' | sed -n 's/^"requests"://p')
    if [ "$(wc -l <"$tmp/out")" != 1 ]; then bad "$name" "no single line: $(head -c 300 "$tmp/out")"
    elif ! positive "$(number seconds)" "$(number max_seconds)"; then bad "$name" "'$(number seconds)' seconds, at most '$(number max_seconds)'"
    elif ! positive "$(number measured_prompt_seconds)" 600; then bad "$name" "no measurement: $(head -c 900 "$tmp/out")"
    else ok "$name"; fi
}
same() { if [ "$2" = "$3" ]; then ok "$1"; else bad "$1" "planned $2, run $3"; fi; }
most() { if [ "$3" -le "$2" ]; then ok "$1"; else bad "$1" "planned at most $2, run $3"; fi; }

estimate "the estimate of eval" eval "$model" --tasks pick,order --n 30 --adapter a
"$shoal" eval "$model" --tasks pick,order --n 30 --adapter a --json >"$tmp/out" 2>"$tmp/err"
same "requests of eval" "$requests" "$(sums calls)"
same "prompt tokens of eval" "$prompt" "$(sums prefilled)"
same "generated tokens of eval" "$generated" "$(sums generated)"
estimate "the estimate of eval that generates" eval "$model" --tasks pick --n 30 --chain-of-thought
"$shoal" eval "$model" --tasks pick --n 30 --chain-of-thought --json >"$tmp/out" 2>"$tmp/err"
same "prompt tokens of eval that generates" "$prompt" "$(sums prefilled)"
most "generated tokens of eval" "$generated" "$(sums generated)"
estimate "the estimate of debate with its base model" debate "$model" --tasks pick --n 20 --agents a b --samples 0 --credit none
same "requests of debate with its base model" "$requests" 100
estimate "the estimate of debate" debate "$model" --tasks pick --n 20 --agents a b --samples 0 --credit none --no-base
"$shoal" debate "$model" --tasks pick --n 20 --agents a b --samples 0 --credit none --no-base --json --store "$tmp/calls.db" 2>"$tmp/err" |
    sed 's/.*"cost":{\([^}]*\)}.*/\1/' >"$tmp/out"
same "requests of debate" "$requests" "$(sums calls)"
most "prompt tokens of debate" "$prompt" "$(sums prefilled)"
most "generated tokens of debate" "$generated" "$(sums generated)"
estimate "the estimate of evolve" evolve evolve.yaml
same "trainings of evolve" 1 "$(number trainings)"
same "evaluations of evolve" $((3 + 3 * 6)) "$(number evaluations)"
estimate "the estimate of a fork" fork e1 --at 0 --id e2
same "evaluations of a fork" 2 "$(number evaluations)"
estimate "the estimate of a run without training" evolve zero.yaml
same "trainings of adapters" 0 "$(number trainings)"
cd "$root" || exit 1
