#!/bin/sh
# results-evolve: writes docs/RESULTS.md's part on evolution, from models/fry and this file only.
#
# For every family and seed: eight founders trained on one language each, then every method from the same founders with
# the same FLOPs, each as a separate run METHOD-FAMILY-sSEED below $WORK/runs. Finished runs are skipped, interrupted
# ones are continued. In the exact class the same commands give the same digits everywhere. Learning rates and updates
# of gradient and hybrid were chosen for each family on seed 100, which is not reported, from the same six pairs
# (docs/EVOLUTION.md).
# SEEDS, FAMILIES, METHODS, N (test questions), WORK (build/results-evolve), THREADS and SHOAL may be set.
set -eu
cd "$(dirname "$0")/.."
export SHOAL_EVOLVE_KV_CACHE_DTYPE=f32 # as in the recorded figures
shoal="${SHOAL:-$PWD/build/shoal}" work="${WORK:-build/results-evolve}" n="${N:-5000}"
seeds="${SEEDS:-1 2 3 4 5}" families="${FAMILIES:-arithmetic order pick route}"
methods="${METHODS-hybrid founder soup ties dare cma pso ga gradient es}"
flops=${FLOPS:-2e12} hard="arithmetic pick order route deduction" easy="copy sort compare sequence voice"
founders="en1 en2 en3 en4 ja1 ja2 zh1 zh2"
own=${OWN:-100} rest=${REST:-50} learn=${LEARN:-150} # number of conversations: founder's family, each other family, common data of learning methods
runs="$work/runs" recipes="$work/recipes" base="$work/fry-q8_0.gguf"
mkdir -p "$runs" "$recipes"
[ -f "$base" ] || "$shoal" quantize --quiet models/fry "$base" --type q8_0 >/dev/null # a third of f32's time

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
    case $1 in founder | gradient | es) items=200 ;; esac # methods that evaluate founders only can afford more
    echo "model: $base"
    echo "seed: $seed"
    echo "personas:"
    if [ "$1" = founder ]; then personas .jsonl "$data"; else personas "" "$runs/founder-$family-s$seed/adapters/gen_0"; fi
    cat <<END
tasks: [$family]
retain: [$(without "$family" "$hard")]
rounds: 0
chain_of_thought: false
curve: false
test_items: $n
retain_items: ${RETAIN:-500}
save: best
train: {r: 8, lr: 0.003, bsz: 12, grad_accum: 1, max_steps: 150, lora_dropout: 0}
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
    founder) echo "evolve: {search: none}" ;;
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

# run METHOD, unless it is finished.
run() {
    id="$1-$family-s$seed"
    [ -f "$runs/$id/result.json" ] && return
    recipe "$1" >"$recipes/$id.yaml"
    echo "$id" >&2
    "$shoal" resume "$id" --runs "$runs" --exact --quiet --threads "${THREADS:-0}" >/dev/null 2>&1 ||
        "$shoal" evolve "$recipes/$id.yaml" --runs "$runs" --id "$id" --exact --quiet --threads "${THREADS:-0}" >/dev/null
}

for seed in $seeds; do
    for family in $families; do
        data
        run founder
        for method in $methods; do run "$method"; done
    done
done

# A group is a method on a family; its runs are the seeds.
{
    cat <<END
## Evolution (\`make results-evolve\`)

Methods that make a better adapter from the same founders ($(echo "$founders" | wc -w) of rank 8, each of which learned $own conversations of the family in one language and $rest of others) on
the starter model in q8_0, each with at most $flops FLOPs (ties and dare make few candidates, since making a candidate costs more than evaluating it); gradient, es and hybrid learn from the same
$learn further conversations. $n test questions per seed, $(echo "$seeds" | wc -w) seeds. Intervals are 95 % intervals over the seeds, differences are paired by seed. Retention: points lost or gained on the other
hard families, relative to the best founder.
END
    for family in $families; do
        groups=""
        for method in $methods; do groups="$groups $method-$family"; done
        echo
        echo "### $family"
        echo
        "$shoal" runs --runs "$runs" --compare $groups --base "founder-$family" | sed 's/^/    /'
    done
} >"$work/part.md"
sh scripts/results-part.sh "Evolution" <"$work/part.md"
