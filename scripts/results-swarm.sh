#!/bin/sh
# results-swarm: writes docs/results/debates.md and a part of docs/RESULTS.md: what votes, debates, samples and checks of a team gain.
#
# For each of SEEDS (10) seeds: three personas, then N (500) test questions of every family, generated answers: each agent, votes,
# debate, self-consistency with a tuned temperature, samples with a check; then agents that learned second turns of debates, and
# agents that learned the same labels directly; then split evidence. Runs JOBS (2) seeds at once, each with one thread. Calls are
# stored in WORK (build/results-swarm), so that an interrupted command continues; a seed's reports are in docs/results/debates/SEED,
# and a seed that has them is not run again (FOUND names another folder, for other sizes). In the exact class the same commands give
# the same digits on every processor, so the seeds may come from different machines. LEARN (1200) questions of each family and
# UPDATES (200) are for the second turns.
set -eu
script=$(basename "$0")
cd "$(dirname "$0")/.."
shoal="${SHOAL:-$PWD/build/shoal}" seeds="${SEEDS:-10}" n="${N:-500}" work="${WORK:-build/results-swarm}" found="${FOUND:-docs/results/debates}"
families="${FAMILIES:-arithmetic,order,route,pick}" learn="${LEARN:-1200}" updates="${UPDATES:-200}"
names="critic practitioner explorer"

# train NAME DATA OPTION...
train() {
    to="$at/$1" data=$2
    shift 2
    [ -s "$to/adapter_model.safetensors" ] ||
        "$shoal" train models/fry --exact --quiet --threads 1 --data "$data" --out "$to" --seed "$seed" --runs "$at/runs" \
            --grad-accum 1 --lora-dropout 0 "$@" >&2
}

folders() { for name in $1; do echo "$at/$name"; done; } # NAMES: their folders

# debate FILE AGENTS OPTION...
debate() {
    file="$at/$1.jsonl" agents=$(folders "$2")
    shift 2
    [ -s "$file" ] && return
    # shellcheck disable=SC2086
    "$shoal" debate models/fry --exact --quiet --json --threads 1 --agents $agents --n "$n" --seed "$seed" --credit none \
        --store "$at/calls.db" "$@" >"$file.tmp"
    mv "$file.tmp" "$file"
}

if [ "${1:-}" = --seed ]; then
    seed=$2 at="$work/$2"
    [ ! -d "$found/$seed" ] || exit 0
    mkdir -p "$at"
    SHOAL="$shoal" sh scripts/results-personas.sh "$at" "$seed"
    debate free "$names" --tasks "$families" --free-answers --no-chain-of-thought --check question --sample-temperature auto

    # Second turns, and the same labels directly.
    [ -d "$at/turns" ] || {
        # shellcheck disable=SC2046
        "$shoal" debate models/fry --exact --quiet --threads 1 --agents $(folders "$names") --tasks "$families" --n "$learn" --split train \
            --no-chain-of-thought --seed $((seed + 1000)) --store "$at/calls.db" --second-turns "$at/turns.tmp" >&2
        mv "$at/turns.tmp" "$at/turns"
    }
    debate choices "$names" --tasks "$families" --no-chain-of-thought --samples 0
    for kind in second direct; do
        learned=
        for name in $names; do
            train "$name-$kind" "$at/turns/$kind/$name.jsonl" --init-adapter "$at/$name" --lr 2e-3 --bsz 16 --max-steps "$updates"
            learned="$learned $name-$kind"
        done
        debate "$kind" "$learned" --tasks "$families" --no-chain-of-thought --samples 0
    done

    # Split evidence: every agent sees a third of the facts.
    for kind in largest earliest; do
        "$shoal" model data --quiet --tasks $kind --n 9000 --seed "$seed" "$at/$kind.jsonl" >&2
        cat "$at/$kind.jsonl"
    done >"$at/shares.jsonl"
    "$shoal" model data --quiet --tasks fry --n 3000 --seed "$seed" "$at/rest.jsonl" >&2
    cat "$at/rest.jsonl" >>"$at/shares.jsonl"
    train talker "$at/shares.jsonl" --r 8 --lr 3e-3 --bsz 16 --max-steps 1100
    debate split "talker talker talker" --tasks largest,earliest --no-chain-of-thought --samples 0
    mkdir -p "$found/$seed.tmp"
    for report in free choices second direct split; do cp "$at/$report.jsonl" "$found/$seed.tmp"; done
    mv "$found/$seed.tmp" "$found/$seed"
    exit
fi
mkdir -p "$work" "$found"
seq 1 "$seeds" | xargs -P "${JOBS:-2}" -n 1 sh "scripts/$script" --seed
python3 scripts/results_swarm.py "$found" "$families" "$n" >"$work/part.md"
sh scripts/results-part.sh "Debates" <"$work/part.md"
