#!/bin/sh
# test_max_memory: commands that train or convert, under --max-memory: the peak of their memory stays below the limit,
# their results are those of a run without a limit, and a limit that is too small is refused with one that will do.
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
command -v python3 >/dev/null || { echo "skip --max-memory: python3 is not installed"; exit 0; }
model=test/models/fry-1

# run NAME ARGUMENTS…: runs shoal; its output is in $tmp/NAME.out, its peak in MB in $peak.
run() {
    name=$1
    shift
    python3 test/peak.py "$tmp/peak" "$shoal" "$@" >"$tmp/$name.out" 2>&1
    code=$?
    peak=$(cat "$tmp/peak")
    return $code
}

# hash FILES…: one hash of all.
hash() {
    cat "$@" 2>/dev/null | sha256sum | cut -d' ' -f1
}

# within NAME LIMIT HASH-COMMAND ARGUMENTS…: the peak is below the limit in MB, and the result is $expected.
within() {
    what=$1 limit=$2 result=$3
    shift 3
    if ! run limited "$@" --max-memory "${limit}M"; then
        bad "$what within $limit MB" "$(tail -c 300 "$tmp/limited.out")"
    elif [ "$peak" -gt "$limit" ]; then bad "$what within $limit MB" "its peak is $peak MB"
    elif [ "$($result)" != "$expected" ]; then bad "$what within $limit MB" "another result"
    elif ! grep -q 'memory: .* MB of' "$tmp/limited.out"; then bad "$what within $limit MB" "no plan is printed"
    else ok "$what within $limit MB, not $free_peak, same result"; fi
}

# limits NAME TIGHT RESULT ARGUMENTS…: without a limit, within TIGHT MB (0: not), and within the limit of a refusal.
limits() {
    what=$1 tight=$2 result=$3
    shift 3
    run free "$@" || { bad "$what without a limit" "$(tail -c 300 "$tmp/free.out")"; return; }
    expected=$($result) free_peak=$peak
    [ "$free_peak" -gt "$tight" ] || bad "$what" "its peak without a limit is $free_peak MB: the test shows nothing"
    [ "$tight" -eq 0 ] || within "$what" "$tight" "$result" "$@"
    run refused "$@" --max-memory 5M
    code=$?
    least=$(sed -n 's/.*raise --max-memory to \([0-9]*\)M.*/\1/p' "$tmp/refused.out")
    if [ $code -ne 1 ] || [ -z "$least" ]; then bad "$what: 5 MB are refused" "exit $code: $(cat "$tmp/refused.out")"
    else within "$what" "$least" "$result" "$@"; fi
}

# train

adapter() { hash "$tmp/a/adapter_model.safetensors"; rm -rf "$tmp/a"; }
train() {
    what=$1 tight=$2
    shift 2
    limits "$what" "$tight" adapter train $model "$@" --out "$tmp/a" --runs "$tmp/runs"
}
train "train" 44 --data data/personas/critic.jsonl --max-steps 2 --bsz 32 --grad-accum 2 --r 16 --lora-dropout 0.1
for i in $(seq 24); do
    printf '{"prompt":"say %s and no more","chosen":"it is %s, and that is all","rejected":"no, not that"}\n' $i $i
done >"$tmp/pairs.jsonl"
train "train --method dpo" 46 --method dpo --data "$tmp/pairs.jsonl" --max-steps 1 --bsz 24 --grad-accum 1 --r 8
train "train --method es" 0 --method es --data data/personas/critic.jsonl --max-steps 1 --r 8 --population 4
train "train --method rloo" 60 --method rloo --data fry:pick --prefix answer: --max-steps 1 --bsz 2 --grad-accum 2 --r 8 \
    --max-new-tokens 8

# A pass keeps the activations that fit into --activation-memory and computes the others again: the same result.
once() {
    run "$1" train $model --data data/personas/critic.jsonl --max-steps 1 --bsz 32 --grad-accum 1 --r 8 --out "$tmp/a" \
        --runs "$tmp/runs" --activation-memory "$2"
}
once all all && expected=$(adapter) most=$peak
if once little 8M && [ "$(adapter)" = "$expected" ] && [ $((peak * 2)) -lt "$most" ] &&
    grep -q '^memory: .* with gradient checkpointing' "$tmp/little.out"; then ok "activations in 8 MB, not $most, same result"
else bad "--activation-memory" "peaks $most and $peak: $(tail -c 300 "$tmp/little.out")"; fi
once wrong 8
[ $? -eq 2 ] && ok "--activation-memory without a unit is a usage error" || bad "--activation-memory 8" "$(cat "$tmp/wrong.out")"

# Between the estimate from the headers and the plan with the data: the refusal names an option that helps.
awk 'BEGIN { printf "{\"text\":\""; for (i = 0; i < 900; i++) printf "a b c "; print "\"}" }' >"$tmp/long.jsonl"
long() {
    name=$1
    shift
    run "$name" train $model --data "$tmp/long.jsonl" --out "$tmp/a" --runs "$tmp/runs" --max-steps 1 --r 64 --max-memory "$@"
}
helps() {
    what=$1 limit=$2
    shift 2
    long refused "${limit}M"
    code=$?
    least=$(sed -n "s/.*$*, with which \([0-9]*\)M will do.*/\1/p" "$tmp/refused.out")
    if [ $code -ne 1 ] || [ -z "$least" ]; then bad "the refusal names $what" "$(cat "$tmp/refused.out")"
    elif long limited "${least}M" "$@" && [ "$peak" -le "$least" ]; then ok "$what fit into $least MB"
    else bad "$what fit into $least MB" "peak $peak: $(tail -c 300 "$tmp/limited.out")"; fi
}
helps "8-bit states" 86 --optim adamw_8bit
helps "samples of 64 tokens" 78 --max-length 64

# The plan without a run, as JSON; a recipe has the limit as an option.
printf 'model: %s\ndata: data/personas/critic.jsonl\nmax_memory: 90M\ntrain:\n  max_steps: 2\n' "$model" >"$tmp/recipe.yaml"
run plan train --dry-run "$tmp/recipe.yaml" --json
if grep -q '"memory": *{[^}]*"limit": *94371840' "$tmp/plan.out"; then ok "--dry-run has the plan of a recipe's limit"
else bad "--dry-run has the plan of a recipe's limit" "$(head -c 400 "$tmp/plan.out")"; fi
run wrong train $model --data data/personas/critic.jsonl --out "$tmp/a" --max-memory 12
[ $? -eq 2 ] && ok "a limit that is no size is a usage error" || bad "a limit that is no size" "$(cat "$tmp/wrong.out")"

# pretrain, also stopped and continued

cat >"$tmp/tiny.yaml" <<'END'
shape: fry-1
vocab: 420
tokenizer_items: 100
mix: [copy=1, sums=1]
steps: 2
rows: 3072
eval_every: 2
eval_items: 10
END
weights() { hash "$tmp/p/model.safetensors"; rm -rf "$tmp/p"; }
limits "pretrain" 0 weights pretrain "$tmp/tiny.yaml" --out "$tmp/p"
run limited pretrain "$tmp/tiny.yaml" --out "$tmp/p" --stop-at 1 --max-memory "${least:-1}M"
within "pretrain, continued" "${least:-1}" weights pretrain "$tmp/tiny.yaml" --out "$tmp/p"
run plan pretrain "$tmp/tiny.yaml" --dry-run --max-memory "${least:-1}M"
grep -q 'memory, the least' "$tmp/plan.out" && ok "pretrain --dry-run" || bad "pretrain --dry-run" "$(cat "$tmp/plan.out")"

# quantize

copy() { hash "$tmp/q.gguf"; rm -f "$tmp/q.gguf"; }
limits "quantize" 0 copy quantize $model "$tmp/q.gguf" --type q8_0 --tokens 256

# The plan of a dry run is no less than the peak, which is that of one model.
for type in q8_0 bf16; do
    run plan quantize models/fry "$tmp/q.gguf" --type $type --tokens 512 --dry-run --json
    total=$(sed -n 's/.*"memory":{[^}]*"total":\([0-9]*\).*/\1/p' "$tmp/plan.out")
    run free quantize models/fry "$tmp/q.gguf" --type $type --tokens 512
    if [ -n "$total" ] && [ $((peak << 20)) -le "$total" ]; then ok "quantize to $type keeps its plan"
    else bad "quantize to $type keeps its plan" "peak $peak MB, plan ${total:-none}: $(cat "$tmp/plan.out")"; fi
    [ "$peak" -le 22 ] && ok "quantize holds one model at a time" || bad "quantize holds one model at a time" "$peak MB"
done

# merge, to a base that is larger than the adapter
run made adapter new --model models/fry --rank 8 --seed 1 "$tmp/added"
for type in q8_0 bf16; do
    run plan adapter merge models/fry "$tmp/added" --out "$tmp/m.gguf" --type $type --dry-run --json
    total=$(sed -n 's/.*"memory":{[^}]*"total":\([0-9]*\).*/\1/p' "$tmp/plan.out")
    run free adapter merge models/fry "$tmp/added" --out "$tmp/m.gguf" --type $type
    if [ -n "$total" ] && [ $((peak << 20)) -le "$total" ]; then ok "merge to $type keeps its plan"
    else bad "merge to $type keeps its plan" "peak $peak MB, plan ${total:-none}: $(cat "$tmp/plan.out")"; fi
    [ "$peak" -le 24 ] && ok "merge holds one model at a time" || bad "merge holds one model at a time" "$peak MB"
done

# evolve; demo is evolve with another recipe

cat >"$tmp/evolve.yaml" <<'END'
model: test/models/fry-1
personas:
  - critic=data/personas/critic.jsonl
  - explorer=data/personas/explorer.jsonl
tasks: [pick]
rounds: 1
max_tokens: 12
test_items: 10
train:
  r: 8
  max_steps: 1
  bsz: 32
  grad_accum: 2
evolve:
  generations: 1
  population: 3
  elites: 1
fitness:
  items: 10
END
generations() { hash "$tmp/e/x/evolution.jsonl" "$tmp"/e/x/adapters/*/*/adapter_model.safetensors; rm -rf "$tmp/e"; }
limits "evolve" 0 generations evolve "$tmp/evolve.yaml" --runs "$tmp/e" --id x

# Adapters are in the run's folder, and few of them in memory: the least memory does not grow with their number, and with
# it children are fine-tuned, and candidates evaluated, a few at a time.
cat >"$tmp/many.yaml" <<'END'
model: test/models/fry-1
personas: [critic=data/personas/critic.jsonl, explorer=data/personas/explorer.jsonl]
tasks: [pick]
rounds: 1
max_tokens: 4
test_items: 6
train: {r: 48, max_steps: 1, bsz: 4, grad_accum: 1}
evolve: {generations: 1, population: 8, elites: 1, rank: 48, crossovers: [layer], mutations: [noise],
  finetune_steps: 1, finetune_data: data/personas/explorer.jsonl}
finetune: {bsz: 4, grad_accum: 1}
fitness: {items: 6}
END
sed 's/population: 8/population: 64/' "$tmp/many.yaml" >"$tmp/more.yaml"
sed 's/population: 8/population: 3, search: coefficients/; s/, crossovers.*/,/; s/48/8/g' "$tmp/many.yaml" >"$tmp/mix.yaml"

# figure KEY ARGUMENTS…: a number of bytes of a dry run, in MB rounded up.
figure() {
    key=$1
    shift
    "$shoal" evolve --dry-run --json "$@" 2>/dev/null | sed -n "s/.*\"$key\":\([0-9]*\).*/\1/p" | awk '{ print int(($1 + 1048575) / 1048576) }'
}
evolve() {
    what=$1 recipe=$2
    shift 2
    run free evolve "$recipe" --runs "$tmp/e" --id x || { bad "$what" "$(tail -c 300 "$tmp/free.out")"; return; }
    expected=$(generations) free_peak=$peak
    most=$(figure memory "$recipe")
    if [ "$free_peak" -le "${most:-0}" ]; then ok "$what: the peak is within the plan"
    else bad "$what: the peak is within the plan" "$free_peak MB of '$most'"; fi
    least=$(figure "memory, the least" "$recipe")
    if run refused evolve "$recipe" --runs "$tmp/e" --id x --max-memory "$((${least:-0} - 2))M"; then bad "$what in less" "not refused"
    elif [ -e "$tmp/e/x" ]; then bad "$what in less" "a folder is made"
    else ok "$what in less than $least MB is refused"; fi
    least=$(sed -n 's/.*raise --max-memory to \([0-9]*\)M.*/\1/p' "$tmp/refused.out")
    within "$what" "${least:-1}" generations evolve "$recipe" --runs "$tmp/e" --id x
    most=$(figure memory "$recipe" --max-memory "${least:-1}M")
    if [ "$peak" -le "${most:-0}" ] && [ "$most" -le "$least" ]; then ok "$what: the peak is within the plan of the limit"
    else bad "$what: the peak is within the plan of the limit" "$peak MB of '$most' of $least"; fi
}
evolve "evolve with many adapters" "$tmp/many.yaml"
evolve "evolve with mixed founders" "$tmp/mix.yaml"
few=$(figure "memory, the least" "$tmp/many.yaml") many=$(figure "memory, the least" "$tmp/more.yaml")
if [ -n "$few" ] && [ "$many" -le $((few + 1)) ]; then ok "evolve: $few MB for 8 candidates, $many MB for 64"
else bad "evolve: the same memory for 8 and for 64 candidates" "'$few' and '$many' MB"; fi

run refused demo --runs "$tmp/e" --max-memory 20M
code=$?
least=$(sed -n 's/.*raise --max-memory to \([0-9]*\)M.*/\1/p' "$tmp/refused.out")
if [ $code -eq 1 ] && run plan demo --runs "$tmp/e" --max-memory "${least:-1}M" --dry-run; then ok "demo has a limit"
else bad "demo has a limit" "$(cat "$tmp/refused.out" "$tmp/plan.out")"; fi

# world
policies() { hash "$tmp"/w/minds/*/adapter_model.safetensors; rm -rf "$tmp/w"; }
limits "world" 0 policies world $model --out "$tmp/w" --runs "$tmp" --agents 12 --num-adapters 3 --steps 60 --generations 1 --eval-maps 1

# The plan of its dry run, in bytes under "memory", is an upper bound of the peak, also within a limit.
planned() {
    what=$1
    shift
    set -- world $model --runs "$tmp" --out "$tmp/w" --agents 20 --steps 20 --generations 1 --eval-maps 1 "$@"
    run plan "$@" --dry-run --json
    plan=$(python3 -c 'import json, sys
memory = json.load(sys.stdin)["dry_run"]["memory"]
print(sum(memory[part] for part in ("used", "passes", "engine", "other")) >> 20)' <"$tmp/plan.out")
    if [ -e "$tmp/w" ] || [ -z "$plan" ]; then bad "the plan of $what" "$(head -c 300 "$tmp/plan.out")"
    elif ! run planned "$@"; then bad "the plan of $what" "$(tail -c 300 "$tmp/planned.out")"
    elif [ "$peak" -gt "$plan" ] || [ $((peak * 6)) -lt "$plan" ] || [ "$plan" -gt "${limit:-9999}" ]; then bad "the plan of $what" "$plan MB, the peak $peak"
    else ok "the plan of $what: $plan MB, the peak $peak"; fi
    rm -rf "$tmp/w"
}
limit=
planned "world"
planned "world with an adapter for each agent" --num-adapters 0
planned "world in groups" --num-adapters 0 --update-group-size 4
planned "world in little memory" --num-adapters 0 --low-memory
planned "world that does not learn" --learn none
planned "world by evolution strategies" --num-adapters 0 --learn es --perturbation-ticks 5
limit=76
planned "world within a limit" --max-memory "${limit}M"
