#!/bin/sh
# test_grow: `shoal grow` on the small model: labels from a check, files of questions, resume after kill -9, the same
# hash with one and two threads, refusals. Prints "ok NAME" and "not ok NAME: why" lines; SHOAL is the binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
model=test/models/fry-1
export SHOAL_CACHE="$tmp/cache"

# grow NAME OPTIONS…: runs with --out $tmp/NAME and the run named NAME.
grow() {
    name=$1
    shift
    "$shoal" grow $model --exact --quiet --runs "$tmp/runs" --id "$name" --out "$tmp/$name" --r 4 --lr 4e-3 --bsz 8 \
        --grad-accum 1 --lora-dropout 0 --max-steps 20 --samples 4 --temperature 1 --max-tokens 16 "$@" \
        >"$tmp/out" 2>"$tmp/err"
}
weights() { cksum <"$tmp/$1/adapter_model.safetensors"; }
field() { python3 -c 'import json, sys; v = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }

# Answers that the base gives to a question with one more condition are no labels: the check decides.
grow one --prompts arithmetic,pick --n 60 --rounds 2 --threads 1 --held-out 0
code=$?
if [ $code -eq 0 ] && [ -s "$tmp/one/adapter_model.safetensors" ]; then ok "a run publishes its adapter"
else bad "a run publishes its adapter" "$code $(tail -c 400 "$tmp/err")"; fi
if grep -q 'with an answer that passes' "$tmp/out" && grep -q 'known answer are right' "$tmp/out"
then ok "coverage and right labels are reported"; else bad "coverage and right labels are reported" "$(cat "$tmp/out")"; fi
result="$tmp/runs/one/result.json"
if [ -s "$tmp/runs/one/report.html" ] && [ "$(field "$result" 'v["rounds"][0]["right"]["right"] >= 0.9 * v["rounds"][0]["right"]["of"]')" = True ]
then ok "nine of ten kept answers are right"; else bad "nine of ten kept answers are right" "$(field "$result" 'v["rounds"][0]')"; fi
if head -n 1 "$tmp/runs/one/round-1/kept.jsonl" | grep -q '"source":{"agent":"base","round":1,"sample":[0-3],"kind":"'
then ok "a kept line names its source"; else bad "a kept line names its source" "$(head -n 1 "$tmp/runs/one/round-1/kept.jsonl")"; fi

grow two --prompts arithmetic,pick --n 60 --rounds 2 --threads 2 --held-out 0
if [ "$(weights one)" = "$(weights two)" ]; then ok "one and two threads: the same adapter"
else bad "one and two threads: the same adapter" "$(tail -c 300 "$tmp/err")"; fi

# Killed at several moments, then continued.
for delay in 0.3 0.8 1.5 2.5; do
    grow killed --prompts arithmetic,pick --n 60 --rounds 2 --held-out 0 &
    victim=$!
    sleep $delay
    pkill -9 -f -- "--id killed --out $tmp/killed" 2>/dev/null
    wait $victim 2>/dev/null
done
grow killed --prompts arithmetic,pick --n 60 --rounds 2 --held-out 0
if [ "$(weights one)" = "$(weights killed)" ]; then ok "killed four times and continued: the same adapter"
else bad "killed four times and continued: the same adapter" "$(tail -c 300 "$tmp/err")"; fi
before=$(weights killed)
grow killed --prompts arithmetic,pick --n 60 --rounds 2 --held-out 0
if [ $? -eq 0 ] && [ "$before" = "$(weights killed)" ]; then ok "a complete run again: nothing changes"
else bad "a complete run again: nothing changes" "$(tail -c 300 "$tmp/err")"; fi

# A name belongs to one run; without a name other agents or questions are another run.
grow one --prompts arithmetic --n 60 --rounds 2 --held-out 0
if [ $? -eq 1 ] && grep -q "run 'one' was made from another model, agents, questions or options" "$tmp/err"
then ok "the name of another run"; else bad "the name of another run" "$(tail -c 300 "$tmp/err")"; fi
"$shoal" adapter new --model $model --rank 2 --seed 1 "$tmp/agent" >/dev/null 2>&1
for agents in base "base $tmp/agent"; do
    # shellcheck disable=SC2086
    "$shoal" grow $model --exact --quiet --runs "$tmp/named" --out "$tmp/unnamed" --agents $agents --prompts pick --n 20 --rounds 1 \
        --samples 2 --max-tokens 8 --r 2 --max-steps 1 --bsz 2 --grad-accum 1 --held-out 0 --min-coverage 0 >"$tmp/out" 2>"$tmp/err"
done
if [ "$(ls -d "$tmp"/named/grow-unnamed-* | wc -l)" = 2 ]; then ok "other agents are another run"
else bad "other agents are another run" "$(ls "$tmp/named") $(tail -c 300 "$tmp/err")"; fi

# Held-out questions of the gate are never asked.
grow gate --prompts arithmetic,pick --n 100 --rounds 2 --held-out 0.3 --gate-alpha 1
if python3 - "$tmp/runs/gate" <<'END'
import json, sys, pathlib
at = pathlib.Path(sys.argv[1])
held = {json.loads(x)["question"] for x in open(at / "held_out.jsonl")}
asked = {json.loads(x)["messages"][0]["content"] for p in at.glob("round-*/kept.jsonl") for x in open(p)}
sys.exit(not held or not asked or bool(held & asked))
END
then ok "held-out questions are in no training data"; else bad "held-out questions are in no training data" ""; fi
if grep -q 'held-out questions: .* pass, of the baseline' "$tmp/out"; then ok "the gate is reported"
else bad "the gate is reported" "$(cat "$tmp/out")"; fi
cp "$tmp/out" "$tmp/first"
before=$(weights gate)
grow gate --prompts arithmetic,pick --n 100 --rounds 2 --held-out 0.3 --gate-alpha 1
if cmp -s "$tmp/out" "$tmp/first" && [ "$before" = "$(weights gate)" ]; then ok "a complete run again: the same report"
else bad "a complete run again: the same report" "$(diff "$tmp/first" "$tmp/out")"; fi

# Every agent learns. An agent without an adapter trains a new one (rank 4), the other continues its own (rank 2); the
# second round's questions are new ones, which the adapters of the first round answer in place of the agents.
each() {
    name=$1
    shift
    grow "$name" --learn each --agents base "$tmp/agent" --prompts arithmetic,pick --n 30 --questions-per-round 30 --rounds 2 \
        --held-out 0 --max-steps 8 "$@"
}
each_weights() { for agent in base agent; do weights "$1/$agent"; done; }
each each --threads 1 --test pick --test-n 10
if [ $? -eq 0 ] && python3 - "$tmp/runs/each" "$tmp/each" <<'END'
import json, sys, pathlib
at, out = map(pathlib.Path, sys.argv[1:])
result = json.load(open(at / "result.json"))
learners = {l["name"]: l for l in result["learners"]}
assert list(learners) == ["base", "agent"] and all(l["published"] and l["dir"] == f"{out}/{n}" for n, l in learners.items())
ranks = [json.load(open(out / n / "adapter_config.json"))["r"] for n in learners]
assert ranks == [4, 2], ranks
hashes = [(out / n / "training_data.hashes").read_bytes() for n in learners]
assert hashes[0] == hashes[1] and learners["base"]["hash"] != learners["agent"]["hash"]
first, second = result["rounds"]
assert [a["name"] for a in second["agents"]] == ["base", "agent"]
grown = {l["name"]: l["adapter"]["hash"] for l in first["learners"]}
later = [s for s in (json.loads(x)["source"] for x in open(at / "round-2" / "kept.jsonl")) if s["round"] == 2]
assert later and all(s["adapter"] == grown[s["agent"]] for s in later), later
rows = {r["name"] for r in result["test"]["rows"]}
assert rows > {"grown, base", "grown, agent", "grown team@4, votes", "grown team@4, checked", "team@4, checked"}, rows
END
then ok "every agent learns and proposes"; else bad "every agent learns and proposes" "$(tail -c 600 "$tmp/err")"; fi
if [ "$(grep -c '^  \(base\|agent\) learned from .* lines: accepted$' "$tmp/out")" = 4 ] && grep -q "^published '$tmp/each/agent', the adapter of round 2$" "$tmp/out"
then ok "the report names the learners"; else bad "the report names the learners" "$(cat "$tmp/out")"; fi
each each2 --threads 2
if [ "$(each_weights each)" = "$(each_weights each2)" ]; then ok "every agent learns, one and two threads: the same adapters"
else bad "every agent learns, one and two threads: the same adapters" "$(tail -c 300 "$tmp/err")"; fi
for delay in 0.4 0.9 1.6; do
    each each3 &
    victim=$!
    sleep $delay
    pkill -9 -P $victim 2>/dev/null
    wait $victim 2>/dev/null
done
each each3
each each3
if [ $? -eq 0 ] && [ "$(each_weights each)" = "$(each_weights each3)" ] && [ "$(ls "$tmp/each3/agent/.versions")" = "$(ls "$tmp/each/agent/.versions")" ]
then ok "every agent learns, killed three times and continued: the same adapters"
else bad "every agent learns, killed three times and continued: the same adapters" "$(tail -c 300 "$tmp/err")"; fi
grow gates --learn each --agents base "$tmp/agent" --prompts arithmetic,pick --n 40 --rounds 1 --held-out 0.3 --gate-alpha 1 --max-steps 8
if python3 - "$tmp/runs/gates" <<'END'
import json, sys, pathlib
at = pathlib.Path(sys.argv[1])
result = json.load(open(at / "result.json"))
baselines = [json.load(open(at / n / "baseline.json"))["adapter"] for n in ("base", "agent")]
assert baselines == ["base", result["agents"][1]["adapter"]], baselines
for l in result["learners"]:
    assert l["gate"]["n"] > 5 and l["published"] == (l["gate"]["change"] > 0), l
assert all(l["gate"]["n"] > 5 for l in result["rounds"][0]["learners"])
assert result["published"] == any(l["published"] for l in result["learners"])
END
then ok "each learner has its gate"; else bad "each learner has its gate" "$(tail -c 600 "$tmp/err")"; fi

# Files of questions, in all forms, Japanese and Chinese; a regular expression as the check.
cat >"$tmp/q.jsonl" <<'END'
{"question": "which is larger, 42 or 17?", "answer": "42", "kind": "compare", "pattern": "42"}
{"prompt": "42と17のどちらが大きいですか?", "pattern": "4", "solution": "never shown"}
{"messages": [{"role": "user", "content": "42和17哪个大?"}, {"role": "assistant", "content": "42"}], "pattern": "."}
END
grow files --prompts "$tmp/q.jsonl" --check regex --rounds 1 --held-out 0 --min-coverage 0
if [ $? -eq 0 ] && grep -q '42和17' "$tmp/runs/files/round-1/kept.jsonl"; then ok "questions of a file"
else bad "questions of a file" "$(tail -c 300 "$tmp/err")"; fi
if grep -rq 'never shown' "$tmp/runs/files"; then bad "the answers of a file are not read as questions" "in the run's folder"
else ok "the answers of a file are not read as questions"; fi

# The team's votes on questions of other tasks are learned too, once each; they are in the run's name and hash.
grow rehearse --prompts arithmetic --rehearse pick --rehearse-n 20 --n 60 --rounds 2 --held-out 0 --test arithmetic --test-n 20 \
    --test-retained pick
if [ $? -eq 0 ] && python3 - "$tmp/runs/rehearse" <<'END'
import json, sys, pathlib
at = pathlib.Path(sys.argv[1])
result = json.load(open(at / "result.json"))
for path in at.glob("round-*/kept.jsonl"):
    sources = [json.loads(x)["source"] for x in open(path)]
    rehearsed = [s for s in sources if s["kind"].startswith("pick")]
    assert len(rehearsed) == result["rehearsed"] > 10 and all(s["round"] == 0 for s in rehearsed), rehearsed
rows = {r["name"]: r for r in result["test"]["rows"]}
assert 0 <= rows["grown"]["retained"] <= 1 and "retained" in rows["base"] and "retained" not in rows["base@4, votes"]
END
then ok "rehearsal"; else bad "rehearsal" "$(tail -c 300 "$tmp/err")"; fi
if grep -q '^  grown .*, other tasks [0-9.]* %$' "$tmp/out"; then ok "the accuracy on other tasks"
else bad "the accuracy on other tasks" "$(cat "$tmp/out")"; fi

# A condition of the training that rejects the adapter of the first round.
for i in 1 2 3 4; do printf '{"messages": [{"role": "user", "content": "q%d"}, {"role": "assistant", "content": "zebra %d x"}]}\n' $i $i
done >"$tmp/kept.jsonl"
grow rejected --prompts arithmetic --n 60 --rounds 2 --held-out 0 --retain-data "$tmp/kept.jsonl" --retain-tolerance 0
if [ $? -eq 1 ] && grep -q 'learned from .* lines: rejected' "$tmp/out" && grep -q 'nothing is published' "$tmp/err" && [ ! -e "$tmp/rejected" ]
then ok "a rejected first round"; else bad "a rejected first round" "$(cat "$tmp/out" "$tmp/err")"; fi

# refused CODE TEXT OPTIONS…
number=0
refused() {
    code=$1 text=$2
    shift 2
    number=$((number + 1))
    grow "refused$number" "$@"
    if [ $? -eq "$code" ] && grep -q "$text" "$tmp/err" && [ ! -e "$tmp/refused$number" ]; then ok "refused: $text"
    else bad "refused: $text" "$(tail -c 300 "$tmp/err")"; fi
}
refused 1 'an answer that no agent finds cannot be learned' --prompts arithmetic --n 20 --check 'regex:^never$' --rounds 1
refused 2 'prompts LIST' --rounds 1
refused 2 'is unknown; labels are' --prompts pick --labels teacher
refused 2 'compare needs --max-steps' --prompts pick --test pick --compare votes --max-steps 0
refused 2 'compare and --references need --test' --prompts pick --compare votes
refused 2 'test-retained needs --test' --prompts pick --test-retained pick
refused 2 'cannot select among samples\|needs the right answer' --prompts pick --n 20 --check exact
refused 2 'learn takes one or each' --prompts pick --learn all
refused 2 'init-adapter is for --learn one' --prompts pick --learn each --init-adapter "$tmp/agent"
refused 2 'compare is for --learn one' --prompts pick --learn each --test pick --compare votes --max-steps 5
cp -r "$tmp/agent" "$tmp/a=b"
refused 2 "name 'a=b' cannot be a folder" --prompts pick --learn each --agents base "$tmp/a=b"
[ ! -e "$tmp/runs/refused$number" ] || bad "refused before the run is recorded" "$(ls "$tmp/runs/refused$number")"
printf '{"text": "no question"}\n' >"$tmp/wrong.jsonl"
refused 1 "line 1: expected" --prompts "$tmp/wrong.jsonl"
printf '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}\n' >"$tmp/turns.jsonl"
refused 1 "line 1: 'messages' must be one question" --prompts "$tmp/turns.jsonl"
printf '{"question": "2 + 2 ="}\n' >"$tmp/bare.jsonl"
refused 1 "'pattern' is missing" --prompts "$tmp/bare.jsonl" --check regex
refused 1 "no question has an 'answer'" --prompts "$tmp/bare.jsonl" --labels gold

# A dry run prints the plan and writes nothing.
"$shoal" grow $model --prompts pick --n 30 --out "$tmp/plan" --runs "$tmp/plan-runs" --dry-run --json >"$tmp/out" 2>"$tmp/err"
if [ "$(field "$tmp/out" 'v["dry_run"]["questions"], v["dry_run"]["max_calls"]')" = "(30, 540)" ] && [ ! -e "$tmp/plan" ] && [ ! -e "$tmp/plan-runs" ]
then ok "a dry run"; else bad "a dry run" "$(cat "$tmp/out" "$tmp/err")"; fi

plan() { "$shoal" grow $model --prompts pick --n 30 --out "$tmp/plan" --agents base base base "$@" --dry-run --json 2>"$tmp/err"; }
plan --learn one >"$tmp/out" && plan --learn each >"$tmp/each.json"
if [ "$(field "$tmp/out" 'v["dry_run"]["trainings"]') $(field "$tmp/each.json" 'v["dry_run"]["trainings"]')" = "3 9" ] &&
    [ "$(field "$tmp/each.json" 'v["dry_run"]["memory"]["training"]')" -gt "$(field "$tmp/out" 'v["dry_run"]["memory"]["training"]')" ]
then ok "a dry run counts every training"; else bad "a dry run counts every training" "$(cat "$tmp/out" "$tmp/each.json" "$tmp/err")"; fi

# The measurements of --test, and adapters to compare with.
grow compare --prompts pick,arithmetic --n 60 --rounds 1 --held-out 0 --test pick,arithmetic --test-n 40 --compare one votes gold
if grep -q '^  grown, gold ' "$tmp/out" && grep -q '^  team@4, checked ' "$tmp/out" && grep -q 'grown against grown, one: ' "$tmp/out"
then ok "rows of a comparison"; else bad "rows of a comparison" "$(tail -c 400 "$tmp/err") $(cat "$tmp/out")"; fi
