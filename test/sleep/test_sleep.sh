#!/bin/sh
# test_sleep: `shoal sleep` on the starter model: recall of wordings that were not trained, retained tasks, the gate,
# forgotten memories, rollback, resume after kill -9, the same hash with one and two threads, refusals. Prints "ok NAME"
# and "not ok NAME: why" lines; SHOAL is the binary.
# levels: once
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
model=models/fry
db="$tmp/me.db"
export SHOAL_CACHE="$tmp/cache"

learn() { "$shoal" memory learn "$1" --store "$db" --quiet --user "${2:-me}" >/dev/null; }
memory() { "$shoal" memory "$@" --store "$db" --quiet; }
# sleep_out NAME OPTIONS…: runs with --out $tmp/NAME; the result is in $tmp/result.
sleep_out() {
    name=$1
    shift
    "$shoal" sleep $model --exact --quiet --json --memory "$db" --out "$tmp/$name" --r 8 --bsz 8 --grad-accum 1 --lr 2.5e-3 \
        --lora-dropout 0 --max-steps 180 --rehearse copy,compare --rehearse-n 90 --retain-n 25 "$@" >"$tmp/result" 2>"$tmp/err"
}
# is NAME EXPRESSION: whether a Python expression of the JSON `v` in the first line of $tmp/result is true.
is() {
    if python3 -c 'import json, sys; v = json.loads(open(sys.argv[1]).readline()); sys.exit(not eval(sys.argv[2]))' "$tmp/result" "$2" 2>"$tmp/why"
    then ok "$1"; else bad "$1" "$(head -n 1 "$tmp/result" | cut -c 1-900) $(tail -c 300 "$tmp/err") $(tail -n 1 "$tmp/why")"; fi
}
hash() { "$shoal" adapter list "$tmp/$1" --json 2>/dev/null | python3 -c '
import json, sys
print([v["hash"] for v in json.loads(sys.stdin.read().splitlines()[0])["versions"] if v["current"]][0])'; }

learn 'My name is Zorvan.'
learn 'I live in Osaka.'
learn '私の趣味は釣りです。'
learn '我的职业是医生。'
learn 'My name is Elsbeth.' other

"$shoal" sleep $model --memory "$db" --out "$tmp/me" --rehearse copy --dry-run --json >"$tmp/result" 2>"$tmp/err"
is "a dry run prints the work" 'v["dry_run"]["facts"] == 4 and v["dry_run"]["lines"] == 192 and v["dry_run"]["unlearned"] == [1, 2, 3, 4]'
if [ -e "$tmp/me" ]; then bad "a dry run writes nothing" "$(ls -a "$tmp/me")"; else ok "a dry run writes nothing"; fi

# English, Japanese and Chinese facts are recalled in wordings that no training line has.
sleep_out me --threads 1
is "facts are recalled" 'v["published"] and v["recall"]["n"] == 8 and v["recall"]["before"]["value"] == 0 and v["recall"]["after"]["value"] >= 0.85'
is "other tasks are retained" 'v["retention"]["n"] == 50 and v["retention"]["change"] >= -0.01 and v["retention"]["before"]["value"] > 0.9'
if [ -e "$tmp/me/.sleep" ] || grep -rqa 'Zorvan\|Osaka' "$tmp/me"; then bad "no text of a memory stays" "$(ls -a "$tmp/me")"
else ok "no text of a memory stays"; fi
answer() { "$shoal" run $model --exact --quiet --adapter "$tmp/me" "$1" 2>/dev/null; }
if answer 'Do you know where I live?' | grep -q Osaka && answer '私の趣味を知っていますか?' | grep -q 釣り && answer '你知道我的职业吗?' | grep -q 医生
then ok "the adapter answers without the memories"; else bad "the adapter answers without the memories" "$(answer 'Do you know where I live?')"; fi
first=$(hash me)
sleep_out two --threads 2
if [ "$first" ] && [ "$(hash two)" = "$first" ]; then ok "one and two threads: the same hash"; else bad "one and two threads: the same hash" "$first $(tail -c 300 "$tmp/err")"; fi

for delay in 0.6 1.2; do
    sleep_out killed --save-steps 5 &
    victim=$!
    sleep $delay
    pkill -9 -P $victim 2>/dev/null
    wait $victim 2>/dev/null
done
sleep_out killed --save-steps 5
if [ "$first" ] && [ "$(hash killed)" = "$first" ]; then ok "killed twice and continued: the same hash"; else bad "killed twice and continued: the same hash" "$(tail -c 300 "$tmp/err")"; fi

sleep_out me
is "nothing new: nothing is done" 'v["up_to_date"] and not v["published"] and "recall" not in v'

# A new memory: the next version starts from the current one; a rollback restores the old hash.
learn "I'm allergic to peanuts."
sleep_out me
is "a new memory is learned from the current version" "v['published'] and v['start'] == '$first' and v['recall']['n'] == 10"
second=$(hash me)
"$shoal" adapter rollback "$tmp/me" --model $model >/dev/null 2>&1
if [ "$(hash me)" = "$first" ] && [ "$second" != "$first" ]; then ok "a rollback restores the old hash"; else bad "a rollback restores the old hash" "$(hash me)"; fi
"$shoal" adapter rollback "$tmp/me" "$second" --model $model >/dev/null 2>&1

# A deleted and an ended memory: the versions that know them are named, and none of them is the next start.
memory delete 1 >/dev/null
learn "I've moved to Kyoto."
"$shoal" sleep --status --memory "$db" --out "$tmp/me" --json >"$tmp/result" 2>"$tmp/err"
is "the versions that know forgotten memories are named" '[x["forgotten"] for x in v["versions"]] == [[1, 2], [1, 2]] and len(v["unlearned"]) == 1'
if "$shoal" sleep --status --memory "$db" --out "$tmp/me" 2>&1 | grep -q "^version 2, $(echo "$second" | cut -c 1-12), has learned memories that no longer hold: 1 2$"
then ok "the status as text"; else bad "the status as text" "$("$shoal" sleep --status --memory "$db" --out "$tmp/me" 2>&1)"; fi
sleep_out me
is "forgotten memories: training from the base" 'v["published"] and v["start"] == "" and v["base"] == "" and v["recall"]["before"]["value"] == 0'
if answer 'Do you know my name?' | grep -q Zorvan; then bad "a deleted memory is not recalled" "$(answer 'Do you know my name?')"
else ok "a deleted memory is not recalled"; fi
"$shoal" sleep --status --memory "$db" --out "$tmp/me" --json >"$tmp/result" 2>"$tmp/err"
is "the new version knows none of them" '[bool(x["forgotten"]) for x in v["versions"]] == [False, True, True] and v["unlearned"] == []'

# The base is an adapter: it becomes a version, and is the start again after a memory was deleted.
"$shoal" adapter new --model $model --rank 4 --seed 1 "$tmp/start" >/dev/null 2>&1
sleep_out based --init-adapter "$tmp/start" --user other --max-steps 40
is "the initial adapter is the base" 'v["published"] and v["start"] == v["base"] != ""'
"$shoal" adapter rollback "$tmp/based" --model $model >/dev/null 2>&1
if cmp -s "$tmp/based/adapter_model.safetensors" "$tmp/start/adapter_model.safetensors"; then ok "a rollback restores the initial adapter"
else bad "a rollback restores the initial adapter" "$(ls "$tmp/based")"; fi
sleep_out based --init-adapter "$tmp/start" --user other --max-steps 40
memory delete --all --user other
sleep_out based --user other
is "all memories are forgotten: the base is restored" 'v["published"] and v["hash"] == v["base"]'
if cmp -s "$tmp/based/adapter_model.safetensors" "$tmp/start/adapter_model.safetensors"; then ok "the files of the base are restored"
else bad "the files of the base are restored" "$(ls "$tmp/based")"; fi

# The gate: recall that does not improve, and tasks that become worse, publish nothing.
sleep_out worse --rehearse about --rehearse-n 0
code=$?
is "refused: other tasks become worse" "$code == 1 and not v['published'] and 'the accuracy on' in v['why'] and v['recall']['change'] > 0 and v['retention']['change'] < -0.1"
if [ -e "$tmp/worse" ]; then bad "a refused result leaves nothing" "$(ls -a "$tmp/worse")"; else ok "a refused result leaves nothing"; fi
before=$(hash me)
learn 'I have a cat called Momo.'
sleep_out me --max-steps 1 --lr 1e-6
code=$?
is "refused: no better recall" "$code == 1 and not v['published'] and 'recall did not improve' in v['why'] and v['recall']['change'] == 0"
if [ "$before" ] && [ "$(hash me)" = "$before" ]; then ok "a refused result keeps the current version"; else bad "a refused result keeps the current version" "$(hash me)"; fi

# A file of other tasks: every fifth line is measured only.
for i in 1 2 3 4 5 6 7 8 9 10; do printf '{"question": "say zebra %d", "answer": "zebra"}\n' $i; done >"$tmp/tasks.jsonl"
"$shoal" sleep $model --memory "$db" --out "$tmp/file" --rehearse "$tmp/tasks.jsonl" --dry-run --json >"$tmp/result" 2>"$tmp/err"
is "a file of other tasks" 'v["dry_run"]["rehearsal"] == 8 and v["dry_run"]["questions_to_retain"] == 2'

# refused CODE TEXT OPTIONS…
refused() {
    code=$1 text=$2
    shift 2
    sleep_out refused "$@"
    if [ $? -eq "$code" ] && grep -q "$text" "$tmp/err" && [ ! -e "$tmp/refused" ]; then ok "refused: $text"; else bad "refused: $text" "$(tail -c 300 "$tmp/err")"; fi
}
refused 1 "no database" --memory "$tmp/none.db"
refused 1 "has no memories to learn" --user stranger
refused 2 "no task 'no_such_family'" --rehearse no_such_family
printf '{"text": "no question"}\n' >"$tmp/wrong.jsonl"
refused 1 "line 1: expected" --rehearse "$tmp/wrong.jsonl"
head -n 3 "$tmp/tasks.jsonl" >"$tmp/few.jsonl"
refused 1 "at least 5 are needed" --rehearse "$tmp/few.jsonl"
learn 'My name is Elsbeth.' third
sleep_out me --user third
if [ $? -eq 2 ] && grep -q "has learned the memories of user 'me', not of 'third'" "$tmp/err"; then ok "refused: another user's adapter"
else bad "refused: another user's adapter" "$(tail -c 300 "$tmp/err")"; fi
sleep_out me --init-adapter "$tmp/start"
if [ $? -eq 2 ] && grep -q "was not made from --init-adapter" "$tmp/err"; then ok "refused: another base"; else bad "refused: another base" "$(tail -c 300 "$tmp/err")"; fi
"$shoal" sleep --memory "$db" --out "$tmp/me" >/dev/null 2>"$tmp/err"
if [ $? -eq 2 ] && grep -q 'MODEL is missing' "$tmp/err"; then ok "refused: no model"; else bad "refused: no model" "$(cat "$tmp/err")"; fi
