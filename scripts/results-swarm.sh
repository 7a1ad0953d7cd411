#!/bin/sh
# results-swarm: writes docs/RESULTS.md's part on debates, from models/fry and this file only.
#
# Trains three personas, a critic and a talker (minutes), then runs N (10000) questions of every family. Calls are
# stored in $WORK/calls.db, so that an interrupted run continues. In the exact class the same commands give the same
# digits on every processor. N, WORK (build/results-swarm) and SHOAL may be set.
set -eu
cd "$(dirname "$0")/.."
export SHOAL_TRAIN_KV_CACHE_DTYPE=f32 SHOAL_DEBATE_KV_CACHE_DTYPE=f32 # as in the recorded figures
shoal="${SHOAL:-$PWD/build/shoal}" n="${N:-10000}" work="${WORK:-build/results-swarm}"
families=arithmetic,pick,order,route,deduction
mkdir -p "$work"

# train NAME DATA STEPS: rank 8, with some data of all families against catastrophic forgetting.
train() {
    [ -f "$work/$1/adapter_model.safetensors" ] && return
    cat "$2" "$work/rest.jsonl" >"$work/$1.jsonl"
    "$shoal" train models/fry --exact --data "$work/$1.jsonl" --out "$work/$1" --r 8 --lr 3e-3 --bsz 16 \
        --grad-accum 1 --max-steps "$3" --lora-dropout 0 --runs "$work/runs" >&2
}

"$shoal" model data --n 3000 "$work/personas"
"$shoal" model data --tasks fry --n 3000 --seed 2 "$work/rest.jsonl"
"$shoal" model data --tasks pick,order,arithmetic --critic --n 6000 --seed 3 "$work/verify.jsonl"
for kind in largest earliest; do "$shoal" model data --tasks $kind --n 9000 "$work/$kind.jsonl"; done
cat "$work/largest.jsonl" "$work/earliest.jsonl" >"$work/shares.jsonl"
for persona in critic practitioner explorer; do train $persona "$work/personas/$persona.jsonl" 400; done
train verifier "$work/verify.jsonl" 500
train talker "$work/shares.jsonl" 1100

debate() {
    echo
    echo "    shoal debate models/fry --exact $*" | sed "s|$work/||g"
    echo
    "$shoal" debate models/fry --exact --quiet --store "$work/calls.db" "$@" | sed "s|^|    |"
}
{
    cat <<END
## Debates (\`make results-swarm\`)

Three personas and a verifier (a critic trained to weigh first answers on pick, order and arithmetic) on the starter model, rank 8 each; $n questions of the test
split per family. Answers are selected among the choices by exact probabilities, never parsed from text. Intervals are 95 % intervals, differences are paired on the same questions,
p is from McNemar's test with Holm's correction. Self-consistency uses the agent with the best single accuracy on the same questions, which favours self-consistency.

### The personas
END
    p="$work/critic $work/practitioner $work/explorer"
    debate --agents $p --tasks $families --n "$n"
    echo
    echo "### The personas and the verifier"
    debate --agents $p "$work/verifier" --tasks $families --n "$n" --samples 0
    echo
    echo "### Split evidence"
    echo
    echo "Every agent sees a third of the facts. A vote without communication cannot determine the answer; a debate can."
    debate --agents "$work/talker" "$work/talker" "$work/talker" --tasks largest,earliest --n "$n" --chain-of-thought=false
} >"$work/part.md"
sh scripts/results-part.sh "Debates" <"$work/part.md"
