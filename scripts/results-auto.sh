#!/bin/sh
# results-auto: writes a part of docs/RESULTS.md: how well the model "auto" of `shoal serve` chooses an adapter for a prompt.
#
# For adapters that learn answers only, as `shoal train` does with conversations, and for adapters that learn the whole text of
# the same conversations: trains one per family (LINES_EACH conversations of it), stores their profiles, and fits a router on
# ROUTER_N (200) questions per family of the split dev. The base and all adapters answer N (400) questions per family of the
# split test (`shoal eval`); a server per method then chooses an adapter for each of these questions, whose answer counts.
# FAMILIES, SEED, CLASS (--fast), WORK (build/results-auto) and SHOAL may be set. Results in WORK are not computed again.
set -eu
cd "$(dirname "$0")/.."
shoal="${SHOAL:-$PWD/build/shoal}" work="${WORK:-build/results-auto}" n="${N:-400}" router_n="${ROUTER_N:-200}" seed="${SEED:-1}"
families="${FAMILIES:-arithmetic order route pick deduction}" lines="${LINES_EACH:-400}" class="${CLASS:---fast}"
case $work in /*) ;; *) work="$PWD/$work" ;; esac
tasks=$(echo "$families" | tr ' ' ',')

# adapter FAMILY: an adapter in $at, and its profile.
adapter() {
    [ ! -s "$at/$1/prompt_profile.json" ] || return 0
    [ -s "$at/$1.jsonl" ] || "$shoal" model data --quiet --tasks "$1" --n "$lines" --seed "$seed" "$at/$1.jsonl" >&2
    [ "$set" = answers ] || python3 scripts/results_auto.py --text "$at/$1.jsonl" "$at/$1.text.jsonl"
    data="$at/$1.jsonl"
    [ "$set" = answers ] || data="$at/$1.text.jsonl"
    "$shoal" train models/fry "$class" --quiet --data "$data" --out "$at/$1" --runs "$at/runs" --r 8 --lr 4e-3 --bsz 8 --grad-accum 1 \
        --epochs 2 --lora-dropout 0 --seed "$seed" >&2
    "$shoal" adapter profile "$at/$1" "$at/$1.jsonl" >&2
}

router() {
    [ ! -s "$at/routed.router.json" ] || return 0
    {
        echo "chain-of-thought: false"
        echo "agents:"
        echo "  - {name: fry, adapter: base}"
        for family in $families; do echo "  - {name: $family, adapter: $at/$family}"; done
    } >"$at/team.yaml"
    "$shoal" team fit "$at/team.yaml" "$class" --quiet --tasks "$tasks" --n "$router_n" --seed "$seed" --out "$at/routed.yaml" --accept \
        --store "$at/calls.db" >&2
}

answers() {
    # shellcheck disable=SC2046
    [ -s "$at/samples.jsonl" ] ||
        "$shoal" eval models/fry "$class" --quiet --tasks "$tasks" --n "$n" --seed "$seed" --adapter $(for f in $families; do echo "$at/$f"; done) \
            --log-samples "$at/samples.jsonl" >&2
}

for set in answers text; do
    at="$work/$set"
    mkdir -p "$at"
    for family in $families; do adapter "$family"; done
    router
    answers
done
SHOAL="$shoal" CLASS="$class" python3 scripts/results_auto.py "$work" "$families" "$lines" "$router_n" >"$work/part.md"
sh scripts/results-part.sh "Choosing an adapter" <"$work/part.md"
