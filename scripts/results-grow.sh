#!/bin/sh
# results-grow: writes docs/results/grow.md and a part of docs/RESULTS.md: what a grown adapter gains over its teachers, by seeds.
#
# Trains three personas for each of SEEDS (10) seeds, and grows an adapter from unlabelled questions: by the team with the
# check, by the best agent with the check, from votes, and from the right answers, with as many updates; questions of
# another family are rehearsed. N (1000) questions of each family, TEST_N (500) test questions, SAMPLES (18) at most. Runs
# JOBS (2) seeds at once, each with one thread. Runs are kept in WORK (build/results-grow), so that an interrupted command
# continues; a seed's result is docs/results/grow/SEED.json, and a seed that has one is not run again (FOUND names another
# folder, for other sizes). In the exact class the same commands give the same digits on every processor, so the seeds may
# come from different machines.
set -eu
script=$(basename "$0")
cd "$(dirname "$0")/.."
shoal="${SHOAL:-$PWD/build/shoal}" seeds="${SEEDS:-10}" n="${N:-1000}" test_n="${TEST_N:-500}" work="${WORK:-build/results-grow}" found="${FOUND:-docs/results/grow}"
families="${FAMILIES:-arithmetic,order,route,pick}" other="${OTHER:-deduction}" samples="${SAMPLES:-18}" rounds="${ROUNDS:-3}"

if [ "${1:-}" = --seed ]; then
    seed=$2 at="$work/$2"
    [ ! -s "$found/$seed.json" ] || exit 0
    SHOAL="$shoal" sh scripts/results-personas.sh "$at" "$seed"
    "$shoal" grow models/fry --exact --quiet --json --threads 1 --agents "$at/critic" "$at/practitioner" "$at/explorer" \
        --prompts "$families" --n "$n" --rehearse "$other" --check question --rounds "$rounds" --samples "$samples" --r 8 --lr 4e-3 \
        --max-steps 400 --bsz 16 --grad-accum 1 --lora-dropout 0 --seed "$seed" --runs "$at/runs" --id grow --out "$at/grown" \
        --test "$families" --test-n "$test_n" --test-retained "$other" --compare one votes gold >"$at/result.tmp"
    head -n 1 "$at/result.tmp" >"$found/$seed.json" # the other line is the peak of memory
    exit
fi
mkdir -p "$work" "$found"
seq 1 "$seeds" | xargs -P "${JOBS:-2}" -n 1 sh "scripts/$script" --seed
parameters=$("$shoal" model info models/fry --json | sed 's/.*"parameters":\([0-9]*\).*/\1/')
python3 scripts/results_grow.py "$found" "$families" "$n" "$test_n" "$other" "$parameters" >"$work/part.md"
sh scripts/results-part.sh "Growing" <"$work/part.md"
