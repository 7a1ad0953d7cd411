#!/bin/sh
# test_energy: the joules in reports, from a folder of counters ($SHOAL_POWERCAP) that a loop advances by 1 J as fast as
# it can; without readable counters reports have no joules. SHOAL is the binary. Prints "ok NAME" and "not ok NAME: why"
# lines.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
cd "$(dirname "$0")/../.." || exit 1
model=$PWD/test/models/fry-1
tmp=$(mktemp -d) || exit 1
mkdir -p "$tmp/powercap/intel-rapl:0" "$tmp/none" && cd "$tmp" || exit 1
domain="$tmp/powercap/intel-rapl:0"
echo package-0 >"$domain/name"
echo 262143328850 >"$domain/max_energy_range_uj"
echo 0 >"$domain/energy_uj"
(
    joules=0
    while [ -d "$domain" ]; do
        joules=$((joules + 1))
        echo "${joules}000000" >"$domain/next" && mv "$domain/next" "$domain/energy_uj"
    done
) 2>/dev/null &
trap 'kill $!; wait 2>/dev/null; rm -rf "$tmp"' EXIT

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
# matches NAME PATTERN FILE: the file has a match of the extended regular expression.
matches() { if grep -qE -- "$2" "$3"; then ok "$1"; else bad "$1" "$(head -c 400 "$3")"; fi; }
lacks() { if grep -qE -- "$2" "$3"; then bad "$1" "$(grep -E -- "$2" "$3" | head -c 400)"; else ok "$1"; fi; }
positive='[0-9.]*[1-9][0-9.e-]*'

for i in $(seq 400); do # half a second: the loop runs many times meanwhile
    printf '{"question": "Which is the largest of %d?", "choices": ["a mouse", "a whale"], "answer": 1}\n' $i
done >q.jsonl
export SHOAL_POWERCAP="$tmp/powercap"
"$shoal" eval "$model" --tasks q.jsonl --json >json 2>err || bad "eval --json" "$(cat err)"
matches "eval --json has joules" "\"joules\":$positive,\"joules_per_token\":$positive,\"joules_per_answer\":$positive" json
"$shoal" eval "$model" --tasks q.jsonl >text 2>err || bad "eval" "$(cat err)"
matches "eval prints joules" "^ +$positive J, $positive J per answer, $positive J per token" text
"$shoal" world --policy rule --maps 2 --steps 50 >text 2>err || bad "world" "$(cat err)"
matches "world prints joules" "energy: [0-9.]+ J of the processor packages" err
"$shoal" bench --shape fry-1 --what decode --reps 1 --json >json 2>err || bad "bench" "$(cat err)"
matches "bench --json has joules" "\"what\":\"decode\".*\"joules_per_token\":" json
for i in 1 2 3 4; do echo "{\"prompt\": \"$i + 1 = \", \"response\": \"$((i + 1))\"}"; done >train.data.jsonl
"$shoal" train "$model" --data train.data.jsonl --out adapter --epochs 1 >text 2>err || bad "train" "$(cat err)"
matches "train.jsonl has joules" "\"seconds\":[0-9.]+,.*\"joules\":$positive" runs/train-adapter-*/train.jsonl

export SHOAL_POWERCAP="$tmp/none"
"$shoal" eval "$model" --tasks q.jsonl --json >json 2>err || bad "eval without counters" "$(cat err)"
lacks "no counters, no joules" joules json
"$shoal" eval "$model" --tasks q.jsonl >text 2>err || bad "eval without counters" "$(cat err)"
lacks "no counters, no joules in the table" " J per " text
