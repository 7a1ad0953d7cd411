#!/bin/sh
# results-agent: writes docs/results/agent.md and a part of docs/RESULTS.md: what tools, demonstrations and rewards gain.
#
# Generates tables of invented people and towns with questions about them: one table and N (5000) questions of the test
# split, TABLES (80) tables with QUESTIONS (640) questions each of the train split. Measures the starter model without
# tools and with them; then an adapter that learned FIRST (3000) updates from demonstrated calls; the same adapter after
# UPDATES (4000) more updates from demonstrations of other tables; and after as many from rewards: in each of ROUNDS (4)
# rounds it answers the questions of its tables, SAMPLES (4) runs each with sampled calls, and learns from the runs whose
# answer is right. Results are in docs/results/agent/NAME.json, and one that exists is not computed again (FOUND names
# another folder, for other sizes; CLASS the numeric class, --exact); training is kept in WORK (build/results-agent), so that an interrupted command continues.
set -eu
cd "$(dirname "$0")/.."
shoal="${SHOAL:-$PWD/build/shoal}" seed="${SEED:-1}" n="${N:-5000}" tables="${TABLES:-80}" questions="${QUESTIONS:-640}"
first="${FIRST:-3000}" updates="${UPDATES:-4000}" rounds="${ROUNDS:-4}" samples="${SAMPLES:-4}"
work="${WORK:-build/results-agent}" found="${FOUND:-docs/results/agent}" class="${CLASS:---exact}"
tools="--tools calculator,knowledge"

# table NAME SPLIT SEED N: a folder with questions.jsonl and the knowledge base facts.db.
table() {
    at="$work/$1"
    [ ! -s "$at/facts.db" ] || return 0
    "$shoal" model data --quiet --tasks residents --split "$2" --seed "$3" --n "$4" "$at" >&2
    rm -f "$at/new.db"
    "$shoal" knowledge add "$at/new.db" "$at/documents.jsonl" --quiet >&2
    mv "$at/new.db" "$at/facts.db"
}

# demonstrations NAME FROM TO: training data of the tables FROM to TO.
demonstrations() {
    [ ! -s "$work/$1" ] || return 0
    for i in $(seq "$2" "$3"); do
        # shellcheck disable=SC2086
        "$shoal" agent models/fry $tools --quiet --knowledge "$work/train-$i/facts.db" --tasks "$work/train-$i/questions.jsonl" \
            --demonstrations "$work/$1.part" >&2
        cat "$work/$1.part"
    done >"$work/$1.tmp"
    mv "$work/$1.tmp" "$work/$1"
}

# train NAME DATA UPDATES OPTION...
train() {
    to="$work/$1" data="$work/$2" steps=$3
    shift 3
    [ -s "$to/adapter_model.safetensors" ] ||
        "$shoal" train models/fry "$class" --quiet --data "$data" --out "$to" --runs "$work/runs" --seed "$seed" --bsz 16 --grad-accum 1 \
            --lr 2e-3 --lora-dropout 0 --max-steps "$steps" "$@" >&2
}

# measure NAME OPTION...
measure() {
    name=$1
    shift
    [ ! -s "$found/$name.json" ] || return 0
    "$shoal" agent models/fry "$class" --quiet --json --knowledge "$work/test/facts.db" --tasks "$work/test/questions.jsonl" \
        --max-tokens 64 "$@" >"$work/$name.tmp"
    head -n 1 "$work/$name.tmp" >"$found/$name.json" # the other line is the peak of memory
}

mkdir -p "$work" "$found"
table test test "$seed" "$n"
for i in $(seq 1 "$tables"); do table "train-$i" train "$((100 * seed + i))" "$questions"; done
half=$((tables / 2))
measure without --tools ''
measure untrained --tools calculator,knowledge

demonstrations first.jsonl 1 "$half"
train first first.jsonl "$first" --r 32
measure first --adapter "$work/first" --tools calculator,knowledge

demonstrations more.jsonl "$((half + 1))" "$tables"
train demonstrated more.jsonl "$updates" --init-adapter "$work/first"
measure demonstrated --adapter "$work/demonstrated" --tools calculator,knowledge

adapter="$work/first"
for round in $(seq 1 "$rounds"); do
    [ -s "$work/traces-$round.jsonl" ] || {
        i=$((half + 1 + (round - 1) % (tables - half)))
        # shellcheck disable=SC2086
        "$shoal" agent models/fry "$class" $tools --quiet --json --adapter "$adapter" --knowledge "$work/train-$i/facts.db" \
            --tasks "$work/train-$i/questions.jsonl" --samples "$samples" --temperature 1 --sample-calls --seed "$round" \
            --max-tokens 64 --traces "$work/traces.tmp" >"$work/sampled-$round.json"
        mv "$work/traces.tmp" "$work/traces-$round.jsonl"
    }
    train "rewarded-$round" "traces-$round.jsonl" "$((updates / rounds))" --init-adapter "$adapter"
    adapter="$work/rewarded-$round"
done
measure rewarded --adapter "$adapter" --tools calculator,knowledge
python3 scripts/results_agent.py "$found" "$n" "${class#--}" "$first" "$updates" "$rounds" "$samples" >"$work/part.md"
sh scripts/results-part.sh "An agent with tools" <"$work/part.md"
