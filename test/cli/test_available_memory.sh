#!/bin/sh
# test_available_memory: commands without --max-memory, in an address space (ulimit -v) just below and just above what
# they need: they are refused with a figure, by --dry-run as well and before a folder is made, and with that figure they
# give the result of a run without a limit. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is
# the binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
model=test/models/fry-1
export SHOAL_CACHE="$tmp/cache"
if ! (ulimit -v 200000 && "$shoal" --version) >/dev/null 2>&1; then
    echo "skip available memory: the program does not start in 200 MB of address space"
    exit 0
fi

# in_space KB ARGUMENTS…: runs shoal in this address space, with one thread and the input of $tmp/in.
in_space() {
    space=$1
    shift
    (ulimit -v "$space" && exec "$shoal" "$@" --threads 1 <"$tmp/in") >"$tmp/out" 2>"$tmp/err"
}

# The figures of a refusal in MB: "AVAILABLE NEEDED".
figures() {
    sed -n "s/.* '*\([0-9.]*\) MB'* of memory are available, but .* needs \([0-9.]*\) MB.*/\1 \2/p" "$tmp/err" | tail -n 1
}

# space_find: the largest address space, in steps of 8 MB, in which the dry run is refused; sets $few and $enough. The
# figure is what must be available: a sixteenth of the rest of the space is left to other programs. If nothing is
# available, up to a step may be missing besides.
space_find() {
    few=300000
    while in_space $few "$@" --dry-run; do
        few=$((few - 8192))
        [ $few -gt 120000 ] || return 1
    done
    set -- $(figures)
    [ $# -eq 2 ] || return 1
    enough=$(awk -v few="$few" -v a="$1" -v need="$2" 'BEGIN { print int(few + ((need - a) * 17 / 16 + (a > 0 ? 2 : 10)) * 1024) }')
}

# limits NAME RESULT ARGUMENTS…: RESULT prints the command's result, which is the same in just enough memory.
limits() {
    what=$1 result=$2
    shift 2
    "$shoal" "$@" --threads 1 <"$tmp/in" >"$tmp/out" 2>"$tmp/err" || { bad "$what" "$(tail -c 300 "$tmp/err")"; return; }
    expected=$($result)
    rm -rf "$tmp"/made*
    if ! space_find "$@"; then
        bad "$what: --dry-run refuses too little memory, with figures" "at $few KB: $(tail -c 300 "$tmp/err")"
        return
    fi
    refusal=$(tail -n 1 "$tmp/err")
    if in_space "$few" "$@"; then bad "$what: what --dry-run refuses" "the run does not"
    elif ! figures | grep -q .; then bad "$what: what --dry-run refuses" "$(tail -c 300 "$tmp/err")"
    elif ls "$tmp"/made* >/dev/null 2>&1; then bad "$what: a refusal makes no folder" "it is made: $refusal"
    else ok "$what: a run is refused as its dry run, before anything is written"; fi
    if ! in_space "$enough" "$@"; then bad "$what with the figure of the refusal" "$refusal; then $(tail -c 300 "$tmp/err")"
    elif [ "$($result)" != "$expected" ]; then bad "$what with the figure of the refusal" "another result"
    else ok "$what with the figure of the refusal, same result"; fi
    rm -rf "$tmp"/made*
}
output() { cat "$tmp/out"; }
file() { cat "$tmp"/made*; }
weights() { find "$tmp/made" -name '*.safetensors' | sort | xargs cat | cksum; }
generations() { cat "$tmp/made/x/evolution.jsonl"; }

printf 'sort: k b x\n' >"$tmp/in"
limits run output run $model -p 'sort: k b x' --temperature 0 --max-tokens 400 --ids
limits embed output embed $model 'sort: k b x'
limits eval file eval $model --tasks sort --n 3 --log-samples "$tmp/made"
limits debate output debate $model --agents base base --topic 'pick 4 or 9' --choices 4 9 --rounds 1 --max-tokens 8
limits chat output chat $model --temperature 0 --json
limits ask output ask $model --agents 2 --iterations 1 --max-tokens 4 --json
printf '{"prompt":"sort: k b x"}\n{"prompt":"sort: d c a"}\n' >"$tmp/prompts.jsonl"
limits synth file synth $model --prompts "$tmp/prompts.jsonl" --out "$tmp/made" --temperature 0 --max-tokens 8 --store "$tmp/calls.db"
limits quantize file quantize $model "$tmp/made.gguf" --type q8_0 --tokens 256
"$shoal" adapter new --model $model --rank 8 --seed 1 "$tmp/added" >/dev/null 2>&1
limits "adapter merge" file adapter merge $model "$tmp/added" --out "$tmp/made.gguf" --type q8_0
limits train weights train $model --data data/personas/critic.jsonl --max-steps 1 --bsz 4 --r 8 --out "$tmp/made" --runs "$tmp/r"
limits grow weights grow $model --prompts pick --n 20 --rounds 1 --held-out 0 --max-steps 1 --bsz 4 --r 8 --out "$tmp/made" --runs "$tmp/r"
cat >"$tmp/tiny.yaml" <<'END'
shape: fry-1
vocab: 420
tokenizer_items: 100
mix: [copy=1]
steps: 1
rows: 1024
eval_every: 1
eval_items: 4
END
limits pretrain weights pretrain "$tmp/tiny.yaml" --out "$tmp/made"
cat >"$tmp/evolve.yaml" <<'END'
model: test/models/fry-1
personas:
  - critic=data/personas/critic.jsonl
  - explorer=data/personas/explorer.jsonl
tasks: [pick]
rounds: 1
max_tokens: 12
test_items: 4
train: {r: 8, max_steps: 1, bsz: 8}
evolve: {generations: 1, population: 2, elites: 1}
fitness: {items: 4}
END
limits evolve generations evolve "$tmp/evolve.yaml" --runs "$tmp/made" --id x
limits world weights world $model --out "$tmp/made" --runs "$tmp" --agents 4 --num-adapters 2 --steps 30 --generations 1 --eval-maps 1

# bench has no dry run.
bench() { in_space "$1" bench --what decode,serve --shape fry-1 --tokens 64 --reps 1 --json; }
bench 170000
set -- $(figures)
if [ $# -eq 2 ] && bench "$(awk -v a="$1" -v n="$2" 'BEGIN { print int(170000 + ((n - a) * 17 / 16 + 2) * 1024) }')"
then ok "bench with the figure of the refusal"
else bad "bench with the figure of the refusal" "$(tail -c 300 "$tmp/err")"; fi

# The default context is what memory allows of the model's; a named one is kept, or refused if the model has less.
"$shoal" chat models/fry --max-memory 56M --dry-run --threads 1 >"$tmp/out" 2>"$tmp/err"
if grep -q 'context: [1-3][0-9]* of the model.s 4096 tokens; --max-model-len' "$tmp/err"; then ok "a context that memory limits is reported"
else bad "a context that memory limits is reported" "$(cat "$tmp/out" "$tmp/err")"; fi
if "$shoal" serve $model --max-num-seqs 3 --max-model-len 100 --dry-run --json 2>"$tmp/err" | grep -q '"max_seqs":3,"max_len":100'
then ok "--max-num-seqs and --max-model-len"; else bad "--max-num-seqs and --max-model-len" "$(cat "$tmp/err")"; fi
"$shoal" chat $model --max-model-len 513 --dry-run >"$tmp/out" 2>"$tmp/err"
if [ $? -eq 2 ] && grep -q "'513' is more than the 512 tokens of the model's context" "$tmp/err"; then ok "a context beyond the model's"
else bad "a context beyond the model's" "$(cat "$tmp/err")"; fi

# --max-num-seqs and --max-model-len of commands whose engine is one part of their work. No result depends on the number
# of sequences; a context beyond the model's, or too short for the work, is refused with the tokens that are needed.
# sized NAME RESULT NEED ARGUMENTS…: with NEED tokens it works, with one less it does not; NEED is in the refusal.
sized() {
    what=$1 result=$2 need=$3
    shift 3
    "$shoal" "$@" --threads 2 <"$tmp/in" >"$tmp/out" 2>"$tmp/err" || bad "$what" "$(tail -c 300 "$tmp/err")"
    expected=$($result)
    rm -rf "$tmp"/made*
    "$shoal" "$@" --threads 2 --max-num-seqs 1 --max-model-len "$need" <"$tmp/in" >"$tmp/out" 2>"$tmp/err"
    if [ "$($result)" = "$expected" ] && [ -n "$expected" ]; then ok "$what: one sequence of $need tokens, same result"
    else bad "$what: one sequence of $need tokens, same result" "$(tail -c 300 "$tmp/err")"; fi
    rm -rf "$tmp"/made*
    "$shoal" "$@" --max-model-len $((need - 1)) <"$tmp/in" >"$tmp/out" 2>"$tmp/err"
    if [ $? -eq 2 ] && grep -q "'$((need - 1))' is too short: .* needs $need tokens" "$tmp/err" && ! ls "$tmp"/made*/*.safetensors >/dev/null 2>&1
    then ok "$what: a context that is too short"; else bad "$what: a context that is too short" "$(tail -c 300 "$tmp/err")"; fi
    rm -rf "$tmp"/made*
    "$shoal" "$@" --max-model-len 2000000 <"$tmp/in" >"$tmp/out" 2>"$tmp/err"
    if [ $? -eq 2 ] && grep -q "'2000000' is more than the [0-9]* tokens of the model's context" "$tmp/err" && ! ls "$tmp"/made* >/dev/null 2>&1
    then ok "$what: a context beyond the model's"; else bad "$what: a context beyond the model's" "$(tail -c 300 "$tmp/err")"; fi
}
retained() { grep -o '"retain_families":.*"manifest"' "$tmp/out"; }
measured() { sed -n 's/.*"what":"\([a-z]*\)".*"batch":\([0-9]*\).*/\1 \2/p' "$tmp/out"; }
sized "world" weights 13 world $model --out "$tmp/made" --runs "$tmp" --agents 4 --num-adapters 2 --steps 8 --generations 1 --eval-maps 1
sized "train --method rloo" weights 31 train $model --method rloo --data fry:pick --prefix answer: --max-steps 1 --bsz 2 --r 8 --max-tokens 8 \
    --out "$tmp/made" --runs "$tmp/r"
sized "train --retain" retained 256 train $model --data data/personas/critic.jsonl --max-steps 1 --bsz 2 --r 8 --retain sort,pick --retain-n 8 --json \
    --out "$tmp/made" --runs "$tmp/r"
sized "pretrain" weights 256 pretrain "$tmp/tiny.yaml" --out "$tmp/made"
sized "bench" measured 128 bench --what serve,population --shape fry-1 --reps 1 --json

# engine NAME ARGUMENTS…: the engine of one sequence is smaller, by the "engine" bytes of the output.
engine() {
    what=$1
    shift
    all=$("$shoal" "$@" --json 2>"$tmp/err" | sed -n 's/.*"engine": *\([0-9]*\).*/\1/p')
    one=$("$shoal" "$@" --json --max-num-seqs 1 2>"$tmp/err" | sed -n 's/.*"engine": *\([0-9]*\).*/\1/p')
    if [ "${one:-0}" -gt 0 ] && [ "$one" -lt "$all" ]; then ok "$what: an engine of one sequence has less memory"
    else bad "$what: an engine of one sequence has less memory" "'$one', '$all': $(tail -c 300 "$tmp/err")"; fi
}
engine "train --method rloo" train $model --method rloo --data fry:pick --prefix answer: --bsz 2 --r 8 --max-tokens 8 --dry-run
engine "bench" bench --what memory --shape fry-1
"$shoal" bench --what decode --shape fry-1 --max-num-seqs 2 >"$tmp/out" 2>"$tmp/err"
if [ $? -eq 2 ] && grep -q 'apply to the measurements serve' "$tmp/err"; then ok "bench without an engine"
else bad "bench without an engine" "$(tail -c 300 "$tmp/err")"; fi
"$shoal" world --policy rule --maps 1 --max-num-seqs 2 >"$tmp/out" 2>"$tmp/err"
if [ $? -eq 2 ] && grep -q 'require a model' "$tmp/err"; then ok "world without a model"; else bad "world without a model" "$(cat "$tmp/err")"; fi

# Two servers: each plans with the available memory when it starts.

# start NAME KB: a server in this address space; its address is in $url, its process in $pids.
pids=
trap 'for pid in $pids; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; done; rm -rf "$tmp"' EXIT
start() {
    (ulimit -v "$2" && exec "$shoal" serve $model --port 0 --json --threads 1 --state "$tmp/$1" >"$tmp/$1.out" 2>"$tmp/$1.err") &
    pids="$pids $!"
    for _ in $(seq 300); do
        url=$(sed -n 's/.*"listening":"\([^"]*\)".*/\1/p' "$tmp/$1.out" 2>/dev/null)
        [ -n "$url" ] && return 0
        kill -0 $! 2>/dev/null || return 1
        sleep 0.1
    done
    return 1
}
if space_find serve $model --port 0 --state "$tmp/made"; then
    for name in first second; do
        if start $name "$enough"; then ok "serve with the figure of the refusal, the $name server"
        else bad "serve with the figure of the refusal, the $name server" "$(tail -c 300 "$tmp/$name.err")"; fi
    done
else bad "serve: --dry-run refuses too little memory, with figures" "at $few KB: $(tail -c 300 "$tmp/err")"; fi
