#!/bin/sh
# results-specialists: writes docs/results/specialists.md and a part of docs/RESULTS.md: whether adapters of one family each can
# be bred, without data, into one adapter for all families.
#
# For each of SEEDS (10) seeds: one founder per family (LINES_EACH conversations of it, rank 8, one start), then every method
# from the same founders with at most FLOPS floating-point operations, each as a run METHOD-sSEED in WORK/runs; an adapter
# grown from the founders' checked answers, at about the same cost; a router, which keeps all founders; and one adapter
# trained on all their data, as the reference. Interrupted runs are continued. A seed's result is
# docs/results/specialists/SEED.json, and a seed that has one is not run again (FOUND names another folder, for other sizes).
# In the exact class the same commands give the same digits on every processor, so the seeds may come from different machines.
# FAMILIES, METHODS, N (test questions, 2000), JOBS (2 seeds at once, one thread each), WORK and SHOAL may be set.
set -eu
script=$(basename "$0")
cd "$(dirname "$0")/.."
shoal="${SHOAL:-$PWD/build/shoal}" work="${WORK:-build/results-specialists}" n="${N:-2000}" seeds="${SEEDS:-10}"
families="${FAMILIES:-arithmetic order route pick deduction}" methods="${METHODS-breed cma soup ties}"
lines="${LINES_EACH:-400}" flops="${FLOPS:-3e12}" found="${FOUND:-docs/results/specialists}"
checked="${CHECKED:-arithmetic order route pick}" rehearsed="${REHEARSED:-deduction}" grow_n="${GROW_N:-250}" grow_steps="${GROW_STEPS:-100}"
case $work in /*) ;; *) work="$PWD/$work" ;; esac
runs="$work/runs"

list() { echo "$1" | tr ' ' ','; }

# recipe METHOD: the founders are trained in the run "founder", and opened from it in the others.
recipe() {
    echo "model: models/fry"
    echo "seed: $seed"
    echo "personas:"
    case $1 in
    joint | grown) echo "  - $1=$at/$1" && echo "  - zero=$at/zero" ;; # a recipe has at least two
    founder) for family in $families; do echo "  - $family=$at/$family.jsonl"; done ;;
    *) for family in $families; do echo "  - $family=$runs/founder-s$seed/adapters/gen_0/$family"; done ;;
    esac
    cat <<END
tasks: [$(list "$families")]
rounds: 0
chain_of_thought: false
curve: false
test_items: $n
save: best
kv_cache_dtype: f32
train: {r: 8, lr: 0.004, bsz: 8, grad_accum: 1, epochs: 2, lora_dropout: 0}
fitness: {items: 400, metric: probability, performance: 1, cooperation: 0, novelty: 0}
END
    limit="max_flops: $flops, generations: 1000"
    case $1 in
    founder | joint | grown) echo "evolve: {search: none}" ;;
    soup) echo "evolve: {search: merge, merge_operator: delta}" ;;
    ties) echo "evolve: {search: merge, merge_operator: delta_ties}" ;;
    cma) echo "evolve: {search: coefficients, $limit}" && echo "search: {searcher: cma, sigma: 0.1}" ;;
    breed) echo "evolve: {search: breed, $limit, population: 10, elites: 1, rank: 16, crossovers: [delta, delta_ties, delta_dare]}" ;;
    esac
}

run() { # METHOD
    id="$1-s$seed"
    [ ! -f "$runs/$id/result.json" ] || return 0
    recipe "$1" >"$at/$1.yaml"
    echo "$id" >&2
    "$shoal" resume "$id" --runs "$runs" --exact --quiet --threads 1 >/dev/null 2>&1 ||
        "$shoal" evolve "$at/$1.yaml" --runs "$runs" --id "$id" --exact --quiet --threads 1 >/dev/null
}

# One adapter trained on the data of all founders, with as many updates as they have together.
joint() {
    for family in $families; do cat "$at/$family.jsonl"; done >"$at/joint.jsonl"
    [ -s "$at/joint/adapter_model.safetensors" ] ||
        "$shoal" train models/fry --exact --quiet --threads 1 --data "$at/joint.jsonl" --out "$at/joint" --r 8 --lr 4e-3 --bsz 8 \
            --grad-accum 1 --epochs 2 --lora-dropout 0 --seed "$seed" --runs "$at/train-joint" >/dev/null
    run joint
}

# One adapter that learned the founders' answers which a check accepted; families without a check are rehearsed. If the gate
# rejects it, the result is the best founder.
grown() {
    agents=
    for family in $families; do agents="$agents $runs/founder-s$seed/adapters/gen_0/$family"; done
    # shellcheck disable=SC2086
    [ -s "$at/grown/adapter_model.safetensors" ] ||
        "$shoal" grow models/fry --exact --quiet --threads 1 --agents $agents --prompts "$(list "$checked")" --n "$grow_n" \
            --rehearse "$(list "$rehearsed")" --check question --rounds 1 --samples 10 --r 8 --lr 4e-3 --max-steps "$grow_steps" --bsz 16 \
            --grad-accum 1 --lora-dropout 0 --seed "$seed" --runs "$at/train-grown" --out "$at/grown" >/dev/null ||
        [ $? = 1 ]
    [ -s "$at/grown/adapter_model.safetensors" ] || cp -r "$(python3 scripts/results_seeds.py --best "$runs/founder-s$seed")" "$at/grown"
    run grown
}

# A router of the founders, fitted on other questions.
router() {
    {
        echo "chain-of-thought: false"
        echo "agents:"
        for family in $families; do echo "  - {name: $family, adapter: $runs/founder-s$seed/adapters/gen_0/$family}"; done
    } >"$at/team.yaml"
    "$shoal" team fit "$at/team.yaml" --exact --quiet --threads 1 --tasks "$(list "$families")" --n 400 --seed "$seed" --out "$at/routed.yaml" \
        --store "$at/calls.db" >/dev/null
    "$shoal" eval models/fry --exact --quiet --threads 1 --json --tasks "$(list "$families")" --n $((n / $(echo "$families" | wc -w))) \
        --seed "$seed" --team "$at/routed.yaml" --store "$at/calls.db" >"$at/router.json"
}

if [ "${1:-}" = --seed ]; then
    seed=$2 at="$work/$2"
    [ ! -s "$found/$seed.json" ] || exit 0
    mkdir -p "$at" "$runs"
    for family in $families; do
        [ -s "$at/$family.jsonl" ] ||
            "$shoal" model data --quiet --tasks "$family" --n "$lines" --seed "$seed" "$at/$family.jsonl"
    done
    [ -d "$at/zero" ] || "$shoal" adapter new --quiet --model models/fry --rank 8 --seed 1 "$at/zero" >/dev/null # the base model
    run founder
    for method in $methods; do run "$method"; done
    joint
    grown
    router
    # shellcheck disable=SC2086
    python3 scripts/results_seeds.py "$runs" "s$seed" "$at/result.json" founder $methods joint="$at/train-joint" grown="$at/train-grown"
    python3 scripts/results_specialists.py --router "$at/result.json" "$at/router.json"
    cp "$at/result.json" "$found/$seed.json"
    exit
fi
mkdir -p "$work" "$found"
seq 1 "$seeds" | xargs -P "${JOBS:-2}" -n 1 sh "scripts/$script" --seed
python3 scripts/results_specialists.py "$found" "$families" "$lines" "$flops" >"$work/part.md"
sh scripts/results-part.sh "Specialists" <"$work/part.md"
