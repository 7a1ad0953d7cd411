#!/bin/sh
# test_team_fit: shoal team fit: two adapters for one family each, their router, and the teams that use it in debate, eval
# and serve. Prints "ok NAME" and "not ok NAME: why" lines; SHOAL is the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
root=$PWD
tmp=$(mktemp -d) || exit 1
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
export SHOAL_CONFIG='' SHOAL_ALL_EXACT=1

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
# check NAME COMMAND…: the command succeeds.
check() {
    name=$1
    shift
    if "$@"; then ok "$name"; else bad "$name" "$(head -c 600 out log 2>/dev/null)"; fi
}
# says NAME CODE TEXT COMMAND…
says() {
    name=$1 code=$2 text=$3
    shift 3
    "$@" >out 2>log
    got=$?
    if [ $got != "$code" ]; then bad "$name" "exit $got: $(head -c 300 log)"
    elif ! cat out log | grep -qF -- "$text"; then bad "$name" "no '$text' in: $(head -c 600 out log)"
    else ok "$name"; fi
}
number() { tr ',{}' '\n' <"$2" | sed -n "s/^\"$1\"://p" | head -1; }
model=$root/test/models/fry-1
for family in pick order; do
    "$shoal" model data --tasks $family --n 400 --seed 3 $family.jsonl --quiet
done
"$shoal" train "$model" --data pick=pick.jsonl order=order.jsonl --out adapters --r 4 --max-steps 60 --bsz 8 --grad-accum 1 --lr 0.01 \
    --lora-dropout 0 --quiet >out 2>log || bad "training" "$(cat log)"
printf 'about: two specialists\nchain-of-thought: false\nagents:\n  - adapter: adapters/pick\n  - {adapter: adapters/order, system: ""}\n' >team.yaml
fit() { "$shoal" team fit team.yaml --model "$model" --tasks pick,order --n 60 "$@"; }

# ---- the fit
says "a dry run" 0 "requests           240" fit --dry-run --out new.yaml
check "a dry run writes nothing" [ -z "$(ls -d new.* runs/calls.db 2>/dev/null)" ]
says "a fit" 0 "router against" fit --out routed.yaml --threads 1
fit --json --out again.yaml --threads 2 >again.json 2>log
check "a fit as JSON" grep -q '"better":{"router":true' again.json
fit >out 2>log
check "a second fit calls no model" grep -qF '240 of 240 calls were in the store' log
check "the same bits" cmp -s routed.router.json again.router.json
mkdir there
fit --quiet --out there/moved.yaml >out 2>log
check "paths of a file in another folder" grep -q "adapter: \[\?\"$tmp/adapters/pick" there/moved.yaml

# ---- what is refused
says "no gain" 1 "gains nothing in the cross-validation" "$shoal" team fit team.yaml --model "$model" --tasks pick --n 60 --out none.yaml
check "a refused team is not written" [ ! -e none.yaml ]
says "--accept" 0 "wrote 'none.yaml'" "$shoal" team fit team.yaml --model "$model" --tasks pick --n 60 --out none.yaml --accept
says "no tasks" 2 "--tasks is missing" "$shoal" team fit team.yaml
says "another decision" 2 "there are router, weighted and subteam" fit --decide majority
says "another verb" 2 "there is fit" "$shoal" team train team.yaml
says "too few questions" 2 "50 to 20000 questions" "$shoal" team fit team.yaml --model "$model" --tasks pick --n 20
printf 'protocol: panel\nagents: [{}, {}]\n' >panel.yaml
says "a protocol with roles" 2 "in protocol 'panel'" "$shoal" team fit panel.yaml --model "$model" --tasks pick --n 60
head -c 5000 routed.router.json >cut.router.json
sed 's/routed.router/cut.router/' routed.yaml >cut.yaml
says "a router that is cut off" 1 "'cut.yaml', line " "$shoal" debate "$model" --team cut.yaml --topic x --choices a b
says "more rounds" 2 "has one round, not 3" "$shoal" debate "$model" --team routed.yaml --topic x --choices a b --rounds 3

# ---- teams that use it
"$shoal" debate "$model" --team routed.yaml --topic 'pick the smaller of 120 and 350' --choices 120 350 --json >out 2>log
check "one agent answers a topic" [ "$(grep -o '"name":' out | wc -l)" = 1 ]
"$shoal" debate "$model" --team routed.yaml --tasks pick,order --n 60 --samples 0 --credit none --json >out 2>log
check "the debate has a row of the router" grep -q '"name":"router","kind":"router"' out
says "the weighted vote" 0 "first answers to 120" fit --decide weighted --accept --out weighted.yaml
check "its file" grep -q '^vote: "weighted"' weighted.yaml
sed '$a\  - {name: wrong, adapter: adapters/order, system: "zzz zzz zzz zzz"}' team.yaml >three.yaml
"$shoal" team fit three.yaml --model "$model" --tasks pick,order --n 60 --decide subteam --accept --out small.yaml --json >out 2>log
check "every sub-team is tried" python3 - out <<'END'
import json, sys
r = json.load(open(sys.argv[1]))
rows = {row["kind"]: row for row in r["rows"]}
size = sum(a["subteam"] for a in r["agents"])
assert 1 <= size <= 3 and rows["subteam"]["calls"] == size, (size, rows)
assert open("small.yaml").read().count("adapter:") == size
assert r["better"]["subteam"] == (rows["subteam"]["acc"] > max(x["acc"] for x in r["rows"] if x["kind"] in ("solo", "vote")))
END
# What the adapters add: the base model, and the same team without adapters if it has system prompts.
base() { "$shoal" debate "$model" --team "$1" --tasks pick --n 20 --samples 0 --credit none --json ${2:-} >out 2>log; grep -o '"kind":"[a-z]*"' out | sort | tr -d '\n'; }
check "a debate has a row of the base model" [ "$(base team.yaml)" = '"kind":"base""kind":"debate""kind":"oracle""kind":"solo""kind":"solo""kind":"vote"' ]
base three.yaml >rows
check "and one of the prompted base model" grep -q '"kind":"base".*"kind":"prompted"' rows
base three.yaml --no-base >rows
check "--no-base" [ -z "$(grep -e base -e prompted rows)" ]
says "a sub-team debates" 0 "first-round vote" "$shoal" debate "$model" --team small.yaml --tasks pick --n 20 --samples 0 --credit none
"$shoal" eval "$model" --tasks pick,order --n 60 --team routed.yaml weighted.yaml --json >out 2>log
check "the fitted teams are candidates of eval" [ "$(grep -c '"kind":"team"' out)" = 4 ]
grep '"task":"pick","adapter":"routed"' out >row
check "the router calls one agent per question" [ "$(number calls row)" = 60 ]

command -v curl >/dev/null || { echo "skip the server: there is no curl"; exit 0; }
"$shoal" serve "$model" --team panel=routed.yaml --port 0 --state state >server.log 2>&1 &
server=$!
for _ in $(seq 100); do grep -q 'http://' server.log && break; sleep 0.1; done
url=$(grep -o 'http://[0-9.:]*' server.log | head -1)
body='{"model": "team:panel", "messages": [{"role": "user", "content": "pick the smaller of 120 and 350"}], "choices": ["120", "350"], "include_reasoning": true}'
curl -s "$url/v1/chat/completions" -d "$body" >out 2>log
check "a served team" grep -qE '"content":"(120|350)"' out
curl -s "$url/v1/debate" -d '{"team": "panel", "question": "pick the smaller of 120 and 350", "choices": ["120", "350"]}' >out 2>log
check "one agent answers a served debate" [ "$(grep -o '"name":' out | wc -l)" = 1 ]
curl -s -o out -w '%{http_code}' "$url/v1/debate" -d '{"team": "panel", "question": "x", "rounds": 2}' >code
check "a served debate refuses more rounds" [ "$(cat code)" = 400 ]
