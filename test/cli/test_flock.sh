#!/bin/sh
# test_flock: shoal debate --protocol flock with adapters of different rank, with DoRA, with the base model: the same report
# with 1 and 2 threads, the rules' options, counted tokens, refusals. Prints "ok NAME" and "not ok NAME: why" lines; SHOAL is
# the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
root=$PWD
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
export SHOAL_CONFIG='' SHOAL_ALL_EXACT=1

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
same() { if [ -s "$2" ] && cmp -s "$2" "$3"; then ok "$1"; else bad "$1" "$(diff "$2" "$3" | head -n 8) $(head -c 300 log)"; fi; }
differ() { if [ -s "$2" ] && [ -s "$3" ] && ! cmp -s "$2" "$3"; then ok "$1"; else bad "$1" "equal, or empty: $(head -c 300 log)"; fi; }
says() { # NAME CODE TEXT COMMAND…
    name=$1 code=$2 text=$3
    shift 3
    "$@" >out 2>log
    got=$?
    if [ $got = "$code" ] && cat out log | grep -qF -- "$text"; then ok "$name"; else bad "$name" "exit $got: $(head -c 400 log)"; fi
}
model=$root/test/models/fry-1
train() { # NAME FAMILY OPTIONS…: a few steps on one family
    name=$1 family=$2
    shift 2
    "$shoal" model data --tasks "$family" --n 200 --seed 3 "$family.jsonl" --quiet
    "$shoal" train "$model" --data "$family.jsonl" --out "$name" --max-steps 40 --bsz 8 --grad-accum 1 --lr 0.01 --lora-dropout 0 --quiet "$@" >out 2>log ||
        bad "training" "$(cat log)"
}
train a pick --r 4
train b order --r 8
train d sort --r 4 --use-dora
train v pick --r 4 --modules-to-save lm_head
debate() { "$shoal" debate "$model" --tasks order --n 24 --samples 0 --no-base --credit none --no-cache --quiet "$@" 2>log; }
flock() { debate --agents a b base --protocol flock "$@"; }

flock --threads 1 >one
flock --threads 2 >two
same "1 and 2 threads give the same report" one two
if grep -q '^order: 24 questions, protocol flock, 3 rounds at most' one; then ok "three rounds"; else bad "three rounds" "$(cat one)"; fi
debate --agents a b d --protocol flock --threads 1 >one
debate --agents a b d --protocol flock --threads 2 >two
same "1 and 2 threads give the same report with DoRA" one two

# The answers after a round, by which runs are compared.
answers() { flock "$@" --json >json; python3 -c "
import json
r = json.loads(open('json').readline())
print(r['by_round'], [[u['round'], u['name'], u['answer'], u['confidence']] for t in r['talks'] for u in t['said']])"; }
answers --separation 1 --alignment 0 --cohesion 0 >separation
answers --separation 0 --alignment 0 --cohesion 0 >none
answers --separation 0 --alignment 0 --cohesion 0.5 >cohesion
answers --separation 0 --alignment 0.5 --cohesion 0 >alignment
answers >defaults
answers --separation 0.25 --alignment 0.25 --cohesion 0.25 >named
same "unit vectors do not move by separation alone" separation none
differ "cohesion changes the answers" cohesion none
differ "alignment changes the answers" alignment none
same "the coefficients of the protocol are the defaults" defaults named
# Without a rule every later answer is the first one, and its prompt has the same tokens; those of the embeddings come in addition.
flock --separation 0 --alignment 0 --cohesion 0 --json >json
if python3 - <<'END' >why 2>&1
import json
r = json.loads(open('json').readline())
rows = {x['name']: x for x in r['rows']}
first, all_rounds = rows['first-round vote'], rows['debate']
assert r['by_round'][0]['voted'] == r['by_round'][2]['voted'] and r['by_round'][2]['flips_good'] == 0
assert all_rounds['calls'] == 3 * first['calls'] == 3 * 3 * 24, all_rounds
assert all_rounds['generated'] == 3 * first['generated']
assert all_rounds['prefilled'] > 3 * first['prefilled'], 'no tokens of embeddings'
END
then ok "calls and tokens are counted"; else bad "calls and tokens are counted" "$(cat why)"; fi

says "an estimate of the work" 0 "requests" debate --agents a b base --protocol flock --dry-run
says "coefficients without a flock" 2 "are for protocols with 'flock'" debate --agents a b --protocol brief --cohesion 1
says "a negative coefficient" 2 "must be -1 to 100" debate --agents a b --protocol flock --cohesion -2
says "an adapter that cannot be mixed" 1 "mixing" debate --agents a v --protocol flock
says "second turns" 2 "there are no embeddings here" "$shoal" debate "$model" --agents a b --tasks order --split train --n 4 --protocol flock --second-turns turns
