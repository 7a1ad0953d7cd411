#!/bin/sh
# results-grow: writes docs/results/grow.md and a part of docs/RESULTS.md: what a grown adapter gains over its teachers, by seeds.
#
# Trains three personas for each of SEEDS (10) seeds, and grows an adapter from unlabelled questions: by the team with the
# check, by the best agent with the check, from votes, and from the right answers, with as many updates; questions of
# another family are rehearsed. N (1000) questions of each family, TEST_N (500) test questions, SAMPLES (18) at most. Runs
# JOBS (2) seeds at once, each with one thread. Runs are kept in WORK (build/results-grow), so that an interrupted command
# continues. In the exact class the same commands give the same digits on every processor.
set -eu
script=$(basename "$0")
cd "$(dirname "$0")/.."
shoal="${SHOAL:-$PWD/build/shoal}" seeds="${SEEDS:-10}" n="${N:-1000}" test_n="${TEST_N:-500}" work="${WORK:-build/results-grow}"
families="${FAMILIES:-arithmetic,order,route,pick}" other="${OTHER:-deduction}" samples="${SAMPLES:-18}" rounds="${ROUNDS:-3}"

if [ "${1:-}" = --seed ]; then
    seed=$2 at="$work/$2"
    [ ! -s "$at/result.json" ] || exit 0
    SHOAL="$shoal" sh scripts/results-personas.sh "$at" "$seed"
    "$shoal" grow models/fry --exact --quiet --json --threads 1 --agents "$at/critic" "$at/practitioner" "$at/explorer" \
        --prompts "$families" --n "$n" --rehearse "$other" --check question --rounds "$rounds" --samples "$samples" --r 8 --lr 4e-3 \
        --max-steps 400 --bsz 16 --grad-accum 1 --lora-dropout 0 --seed "$seed" --runs "$at/runs" --id grow --out "$at/grown" \
        --test "$families" --test-n "$test_n" --test-retained "$other" --compare one votes gold >"$at/result.tmp"
    mv "$at/result.tmp" "$at/result.json"
    exit
fi
mkdir -p "$work" docs/results
seq 1 "$seeds" | xargs -P "${JOBS:-2}" -n 1 sh "scripts/$script" --seed
python3 scripts/results_grow.py "$work" "$families" "$n" "$test_n" "$other" >"$work/part.md"
sh scripts/results-part.sh "Growing" <"$work/part.md"
