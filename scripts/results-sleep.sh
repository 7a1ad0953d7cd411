#!/bin/sh
# results-sleep: writes docs/results/sleep.md and a part of docs/RESULTS.md: what a sleep does with invented facts.
#
# Invents USERS (20) users with ten facts each. Each user starts with an adapter that changes nothing, so that the old
# hash exists, and sleeps once with the families FAMILIES beside. Measures recall without retrieval in two sets of
# wordings that are never trained: those by which the sleep measures itself, and others of scripts/results_sleep.py; the
# same questions to the base model and to `shoal memory search`; the accuracy on the families before and after. Then a
# rollback, after which the adapter's file must have the old hash. Results are in docs/results/sleep/NAME.json, and one
# that exists is not computed again (FOUND names another folder); adapters are in WORK (build/results-sleep), so that an
# interrupted command continues.
set -eu
cd "$(dirname "$0")/.."
shoal="${SHOAL:-$PWD/build/shoal}" seed="${SEED:-1}" users="${USERS:-20}"
work="${WORK:-build/results-sleep}" found="${FOUND:-docs/results/sleep}" class="${CLASS:---exact}"
families="${FAMILIES:-copy,sort,compare,sequence,voice,retrieval,about}"

hash() { sha256sum "$1/adapter_model.safetensors" | cut -c 1-64; }

# answers QUESTIONS FILE OPTION…: the greedy answers to the questions of a file, one JSON line each.
answers() {
    questions=$1 file=$2
    shift 2
    "$shoal" run models/fry "$class" --quiet --json --temperature 0 --max-tokens 32 --file "$questions" "$@" >"$file"
}

mkdir -p "$work" "$found"
python3 scripts/results_sleep.py make "$work" "$users" "$seed"
for memories in "$work"/user??.jsonl; do
    user=$(basename "$memories" .jsonl)
    [ ! -s "$found/$user.json" ] || continue
    at="$work/$user"
    rm -rf "$at.db" "$at-start" "$at"
    "$shoal" memory import "$memories" --store "$at.db" --user "$user" --quiet >&2
    "$shoal" adapter new --model models/fry --rank 32 --seed "$seed" "$at-start" --quiet >&2
    "$shoal" sleep models/fry "$class" --quiet --json --memory "$at.db" --user "$user" --out "$at" --init-adapter "$at-start" \
        --rehearse "$families" --retain-n 100 --seed "$seed" >"$at-sleep.json" || [ -s "$at-sleep.json" ]
    if [ -e "$at/adapter_config.json" ]; then
        answers "$at-questions.jsonl" "$at-after.jsonl" --adapter "$at"
        "$shoal" adapter rollback "$at" --model models/fry --quiet >&2
        hash "$at" >"$at-undone"
    else
        answers "$at-questions.jsonl" "$at-after.jsonl" --adapter "$at-start" # refused: nothing was published
        echo none >"$at-undone"
    fi
    answers "$at-questions.jsonl" "$at-before.jsonl"
    hash "$at-start" >"$at-old"
    python3 scripts/results_sleep.py user "$shoal" "$work" "$user" >"$work/user.tmp"
    mv "$work/user.tmp" "$found/$user.json"
done
python3 scripts/results_sleep.py report "$found" "${class#--}" >"$work/part.md"
sh scripts/results-part.sh "Memories as weights" <"$work/part.md"
