#!/bin/sh
# results-evolve: writes docs/results/evolution.md and a part of docs/RESULTS.md: methods that make one adapter from founders.
#
# For every family and each of SEEDS (10) seeds: eight founders trained on one language each, then every method from the
# same founders with the same FLOPs, each as a separate run METHOD-FAMILY-sSEED below $WORK/runs; rloo and grpo train the
# best founder on right and wrong answers to as many questions as the FLOPs allow; the reference "pooled" is one adapter
# trained on the data of all founders, with as many updates as they have together. Runs JOBS (2) seeds at once, each with
# one thread. Interrupted runs are continued. The results of a family and seed are docs/results/evolution/FAMILY/SEED.json,
# and what has this file is not run again (FOUND names another folder, for other sizes). In the exact class the same
# commands give the same digits everywhere, so seeds may come from different machines. Learning rates and updates of gradient
# and hybrid were chosen for each family on seed 100, which is not reported, from the same six pairs (docs/EVOLUTION.md);
# those of rloo and grpo (RL_LR, RL_STEPS, RL_TEMPERATURE) have not been tuned.
# UPDATES (150, of a founder), FAMILIES, METHODS, N (test questions, 2000), WORK (build/results-evolve) and SHOAL may be set.
set -eu
script=$(basename "$0")
cd "$(dirname "$0")/.."
export SHOAL_EVOLVE_KV_CACHE_DTYPE=f32 # as in the recorded figures
shoal="${SHOAL:-$PWD/build/shoal}" work="${WORK:-build/results-evolve}" n="${N:-2000}"
seeds="${SEEDS:-10}" families="${FAMILIES:-arithmetic order pick route}"
methods="${METHODS-hybrid soup ties dare cma pso ga gradient es rloo grpo pooled}" found="${FOUND:-docs/results/evolution}"
flops=${FLOPS:-2e12} hard="arithmetic pick order route deduction" easy="copy sort compare sequence voice"
founders="en1 en2 en3 en4 ja1 ja2 zh1 zh2"
# conversations: of a founder's family, of each other family, common data of learning methods
own=${OWN:-100} rest=${REST:-50} learn=${LEARN:-150}
founder_updates="${UPDATES:-150}"
rl_steps="${RL_STEPS:-28}" rl_lr="${RL_LR:-1e-3}" rl_temperature="${RL_TEMPERATURE:-2}"
runs="$work/runs" recipes="$work/recipes" base="$work/fry-q8_0.gguf"
mkdir -p "$runs" "$recipes"

# without NAME LIST: the other items, joined by commas.
without() { echo "$2" | tr ' ' '\n' | grep -vx "$1" | paste -sd, -; }
lines() { sed -n "$1,$(($1 + $2 - 1))p"; } # FIRST COUNT

# Conversations in one language, by their letters.
en() { LC_ALL=C grep -v '[^ -~]'; }
ja() { LC_ALL=C grep -P '\xe3[\x81-\x83]|昇順|降順'; }
zh() { LC_ALL=C grep '[^ -~]' | LC_ALL=C grep -vP '\xe3[\x81-\x83]|昇順|降順'; }

# data: the training data of each founder and of all learning methods; no line twice.
data() {
    data="$work/data/$family-s$seed"
    [ -f "$data/learn.jsonl" ] && return
    mkdir -p "$data"
    "$shoal" model data --quiet --tasks "$family" --n $((own * 16)) --seed "$seed" "$data/all"
    "$shoal" model data --quiet --tasks "$(without "$family" "$easy $hard")" --n $((rest * 8)) --seed "$seed" "$data/rest"
    sed "1,${learn}d" "$data/all" >"$data/own"
    k=0
    for who in $founders; do
        language=${who%[0-9]} nth=${who#??}
        { $language <"$data/own" | lines $(((nth - 1) * own + 1)) $own; lines $((k * rest + 1)) $rest <"$data/rest"; } >"$data/$who.jsonl"
        k=$((k + 1))
    done
    lines 1 $learn <"$data/all" >"$data/learn.jsonl"
    rm "$data/all" "$data/own" "$data/rest"
}

# personas SUFFIX FOLDER: all of them in the format of a recipe.
personas() {
    for name in $founders; do echo "  - $name=$2/$name$1"; done
}

# recipe METHOD: the keys common to all, and those of the method.
recipe() {
    items=60
    case $1 in founder | pooled | gradient | es) items=200 ;; esac # methods that evaluate founders only can afford more
    echo "model: $base"
    echo "seed: $seed"
    echo "personas:"
    case $1 in
    founder) personas .jsonl "$data" ;;
    pooled | rloo | grpo) for name in $1 zero; do echo "  - $name=$data/$name"; done ;; # a recipe has at least two
    *) personas "" "$runs/founder-$family-s$seed/adapters/gen_0" ;;
    esac
    cat <<END
tasks: [$family]
retain: [$(without "$family" "$hard")]
rounds: 0
chain_of_thought: false
curve: false
test_items: $n
retain_items: ${RETAIN:-500}
save: best
train: {r: 8, lr: 0.003, bsz: 12, grad_accum: 1, max_steps: $founder_updates, lora_dropout: 0}
fitness: {items: $items, metric: probability, performance: 1, cooperation: 0, novelty: 0}
END
    lr=0.003 updates=120
    case $1-$family in
    gradient-arithmetic | hybrid-pick) lr=0.001 updates=60 ;;
    gradient-pick | gradient-route) updates=240 ;;
    hybrid-route) updates=200 ;;
    es-*) updates=0 ;;
    esac
    coefficients="evolve: {search: coefficients, max_flops: $flops, generations: 1000"
    # these methods need many SVDs, which cost more than the questions: the budget limits their number
    made="evolve: {search: coefficients, max_flops: $flops, generations: 6"
    cma="search: {searcher: cma, sigma: 0.1}"
    learner="max_flops: $flops, finetune_data: $data/learn.jsonl"
    case $1 in
    founder | pooled | rloo | grpo) echo "evolve: {search: none}" ;;
    soup) echo "evolve: {search: merge, merge_operator: delta}" ;;
    ties) echo "$made, merge_operator: delta_ties}" && echo "$cma" ;;
    dare) echo "$made, merge_operator: delta_dare_ties}" && echo "$cma" ;;
    cma) echo "$coefficients}" && echo "$cma" ;;
    pso) echo "$coefficients}" && echo "search: {searcher: pso}" ;;
    ga) cat <<END ;;
evolve:
  {search: breed, max_flops: $flops, generations: 1000, population: 10, elites: 1, selection: roulette, mutation_rate: 0.3,
   crossovers: [delta, delta_ties, delta_dare, delta_dare_ties], mutations: [noise]}
END
    gradient) echo "evolve: {search: gradient, $learner}" ;;
    es) echo "evolve: {search: es, $learner}" && echo "es: {population: 16, sigma: 0.01}" ;;
    hybrid) echo "$coefficients, rank: 16, finetune_steps: $updates, finetune_data: $data/learn.jsonl}" && echo "$cma" ;;
    esac
    echo "finetune: {lr: $lr, max_steps: $updates, bsz: 16, grad_accum: 1, lora_dropout: 0}"
}

# train METHOD FLAGS…
train() {
    name=$1
    shift
    "$shoal" train "$base" --exact --quiet --threads 1 --out "$data/$name" --seed "$seed" --r 8 --lora-dropout 0 --grad-accum 1 \
        --runs "$data/train-$name" "$@" >/dev/null
}

# trained METHOD: the adapter of pooled, rloo or grpo.
trained() {
    case $1 in
    pooled | rloo | grpo) ;;
    *) return ;;
    esac
    [ ! -s "$data/$1/adapter_model.safetensors" ] || return 0
    [ -d "$data/zero" ] || "$shoal" adapter new --quiet --model "$base" --rank 8 --seed 1 "$data/zero" >/dev/null # the base model
    if [ "$1" = pooled ]; then
        for who in $founders; do cat "$data/$who.jsonl"; done >"$data/pooled.jsonl"
        train pooled --data "$data/pooled.jsonl" --lr 0.003 --bsz 12 --max-steps $((founder_updates * $(echo "$founders" | wc -w)))
    else
        train "$1" --method "$1" --init-adapter "$(python3 scripts/results_seeds.py --best "$runs/founder-$family-s$seed")" \
            --data "fry:$family:8000" --prefix answer: --temperature "$rl_temperature" --num-generations 8 --max-new-tokens 16 \
            --lr "$rl_lr" --bsz 8 --max-steps "$rl_steps"
    fi
}

# run METHOD, unless it is finished.
run() {
    id="$1-$family-s$seed"
    [ -f "$runs/$id/result.json" ] && return
    recipe "$1" >"$recipes/$id.yaml"
    echo "$id" >&2
    "$shoal" resume "$id" --runs "$runs" --exact --quiet --threads 1 >/dev/null 2>&1 ||
        "$shoal" evolve "$recipes/$id.yaml" --runs "$runs" --id "$id" --exact --quiet --threads 1 >/dev/null
}

if [ "${1:-}" = --seed ]; then
    seed=$2
    for family in $families; do
        [ ! -s "$found/$family/$seed.json" ] || continue
        data
        run founder
        outcomes=founder
        for method in $methods; do
            trained "$method"
            run "$method"
            outcomes="$outcomes $method"
            [ ! -d "$data/train-$method" ] || outcomes="$outcomes=$data/train-$method"
        done
        # shellcheck disable=SC2086
        python3 scripts/results_seeds.py "$runs" "$family-s$seed" "$found/$family/$seed.json" $outcomes
    done
    exit
fi
[ -f "$base" ] || "$shoal" quantize --quiet models/fry "$base" --type q8_0 >/dev/null # a third of f32's time
mkdir -p docs/results
seq 1 "$seeds" | xargs -P "${JOBS:-2}" -n 1 sh "scripts/$script" --seed

python3 scripts/results_evolve.py "$found" "$families" "$flops" "$own" "$rest" "$learn" >"$work/part.md"
sh scripts/results-part.sh "Evolution" <"$work/part.md"
