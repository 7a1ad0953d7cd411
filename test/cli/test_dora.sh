#!/bin/sh
# test_dora: DoRA adapters in a mix, a blend, a merge, and the commands that the refusal of a GGUF file names. Prints
# "ok NAME" and "not ok NAME: why" lines; SHOAL is the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
root=$PWD
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
export SHOAL_CONFIG='' SHOAL_ALL_EXACT=1

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
model=$root/test/models/fry-1
"$shoal" model data --tasks pick --n 40 --seed 3 40.jsonl --quiet
for seed in 1 2; do
    "$shoal" train "$model" --data 40.jsonl --out d$seed --use-dora --r 4 --max-steps 30 --bsz 4 --lr 0.01 --seed $seed --quiet >/dev/null 2>log ||
        bad "training" "$(cat log)"
done
ids() { "$shoal" run "$model" --chat 'pick: k b x' --temp 0 -n 12 --ids "$@" 2>log; }
mixed=$(ids --adapter d1=0.6,d2=0.4)
"$shoal" adapter blend --model "$model" --parents d1 d2 --alpha 0.4 --mut 0 --out blend >out 2>&1 || bad "blend" "$(cat out)"
"$shoal" adapter merge "$model" d1 d2 --weights 0.6 0.4 --out merged.gguf --type f32 >out 2>&1 || bad "merge" "$(cat out)"
if [ -n "$mixed" ] && [ "$mixed" = "$(ids --adapter blend)" ]; then ok "a mix and a blend agree"; else bad "a mix and a blend agree" "$mixed $(cat log)"; fi
if [ "$mixed" = "$("$shoal" run merged.gguf --chat 'pick: k b x' --temp 0 -n 12 --ids 2>log)" ]; then ok "a mix and a merge agree"; else bad "a mix and a merge agree" "$(cat log)"; fi
says() { # NAME TEXT COMMAND…
    name=$1 text=$2
    shift 2
    if "$@" >out 2>&1; then bad "$name" "accepted"; elif grep -qF -- "$text" out; then ok "$name"; else bad "$name" "$(cat out)"; fi
}
says "a mutated blend" "add --mut 0" "$shoal" adapter blend --model "$model" --parents d1 d2 --out refused
says "a rank" "leave --rank out" "$shoal" adapter blend --model "$model" --parents d1 d2 --rank 4 --mut 0 --out refused
says "an operator" "is for plain LoRA only" "$shoal" adapter blend --model "$model" --parents d1 d2 --operator delta_ties --out refused
says "GGUF" "which GGUF adapters do not support" "$shoal" adapter convert --model "$model" d1 d1.gguf

# The two commands of that message, with MODEL and ADAPTER replaced.
tr '\n' ' ' <out | grep -o "'shoal adapter [^']*'" | tr -d "'" | sed "s|^shoal|$shoal|; s|MODEL|$model|; s|ADAPTER|d1|; s|merged.gguf|one.gguf|" >commands
if [ "$(wc -l <commands)" = 2 ] && sh -e commands >out 2>&1 && grep -q "lora.gguf: .* relative error of ΔW [0-9]" out; then
    ok "the commands of the message"
else
    bad "the commands of the message" "$(cat commands out)"
fi
if [ "$(ids --adapter d1)" = "$("$shoal" run one.gguf --chat 'pick: k b x' --temp 0 -n 12 --ids 2>log)" ]; then ok "the merged model"; else bad "the merged model" "$(cat log)"; fi
if [ -n "$(ids --adapter lora.gguf)" ]; then ok "the extracted adapter"; else bad "the extracted adapter" "$(cat log)"; fi
