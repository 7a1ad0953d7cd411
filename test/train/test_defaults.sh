#!/bin/sh
# test_defaults: `shoal train` without options learns forty lines, says what it chose, shows losses and replies before
# and after on the same samples and the next command; a training that makes the loss larger ends with a warning. Prints
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
has() { # NAME PATTERN FILE
    if grep -qE "$2" "$3"; then ok "$1"; else bad "$1" "$(cat "$3")"; fi
}
model=$root/test/models/fry-1

"$shoal" model data --tasks pick --n 40 --seed 3 40.jsonl --quiet
"$shoal" train "$model" --data 40.jsonl --out learned >out 2>log && ok "forty lines" || bad "forty lines" "$(cat log)"
has "the chosen values are printed" '^100 updates of 4 samples, learning rate 0.0031; --epochs' log
has "the losses are of the same samples" '^adapter: loss [2-9]\.[0-9]* to 0\.0[0-9]* on 40 of its samples' out
has "the next command is printed" "^next: shoal chat $model --adapter learned\$" out
if [ "$(grep -c '^  prompt ' out)" = 5 ] && [ "$(grep -c '^  before ' out)" = 5 ] && [ "$(grep -c '^  after ' out)" = 5 ] && ! grep -q '^  data ' out; then
    ok "five prompts are answered before and after, as in the data"
else
    bad "five prompts are answered before and after, as in the data" "$(cat out)"
fi
if grep -q warning log; then bad "no warning" "$(cat log)"; else ok "no warning"; fi
"$shoal" model data --tasks pick --n 400 --seed 4 held.jsonl --quiet
"$shoal" train "$model" --data 40.jsonl --out json --eval-data held.jsonl --json --quiet >out 2>log
python3 - <<'END' && ok "--json has the effect on held-out samples" || bad "--json has the effect on held-out samples" "$(cat out log)"
import json
row = json.loads(open("out").read().splitlines()[-1])
effect = row["effect"]
assert 1 <= effect["samples"] <= 64 and effect["after"] < effect["before"] and len(effect["replies"]) == 5, effect
reply = effect["replies"][0]
assert reply["prompt"] and reply["answer"].startswith("answer: ") and reply["before"] and reply["after"], reply
END

"$shoal" train "$model" --data 40.jsonl --out worse --lr 3 --max-steps 2 --max-grad-norm 0 >out 2>log
has "a loss that rose is a warning" "^warning: 'adapter' became worse: its loss on 40 of its own samples rose from [0-9.]* to [0-9.]*; try a lower --lr" log
"$shoal" train "$model" --data 40.jsonl --out dry --dry-run >out 2>log
has "a dry run has the same plan" '^updates: 100, of 4 samples' out
"$shoal" train "$model" --data 40.jsonl --out given --epochs 1 --bsz 2 --grad-accum 5 --lr 0.001 >out 2>log
if grep -q 'learning rate' log; then bad "given values are kept" "$(cat log)"; else ok "given values are kept"; fi
