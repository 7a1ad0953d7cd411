#!/bin/sh
# test_fry_tools: models/fry-tools, the adapter that calls tools, answers questions that the model alone cannot: its accuracy on
# questions about people and towns that it has not seen, its calls, a question on the command line and through the API, whole
# and streamed. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip fry-tools: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export SHOAL_CONFIG='' HOME="$tmp"
SHOAL=${SHOAL:-build/shoal} TMP_DIR=$tmp python3 - <<'END'
import json, os, subprocess, sys

sys.path.insert(0, "test/api")
import server
from server import check, failed, run

tmp, model, adapter = server.TMP, "models/fry", "models/fry-tools"
tools = ["--tools", "calculator,knowledge", "--knowledge", f"{tmp}/facts.db"]
agent = ["agent", model, "--exact", "--quiet", "--json", "--adapter", adapter, *tools]

run("model", "data", "--quiet", "--tasks", "residents", "--split", "test", "--seed", "77", "--n", "200", f"{tmp}/town")
run("knowledge", "add", f"{tmp}/facts.db", f"{tmp}/town/documents.jsonl", "--quiet")


def rows(text):
    return [json.loads(line) for line in text.splitlines()]


def measure(*options):
    return rows(run("agent", model, "--exact", "--quiet", "--json", "--tasks", f"{tmp}/town/questions.jsonl", "--knowledge", f"{tmp}/facts.db",
                    "--max-tokens", "64", *options))[0]


alone = measure("--tools", "")
trained = measure("--adapter", adapter, "--tools", "calculator,knowledge")
check("the model alone answers few of the questions", alone["accuracy"]["value"] < 0.3, alone["accuracy"])
check("with its tools the adapter answers most", trained["accuracy"]["value"] > 0.85, trained["accuracy"])
check("by the right calls", trained["right_calls"]["value"] > 0.85, trained["right_calls"])
check("and none where none is needed", trained["unneeded"]["value"] < 0.05, trained["unneeded"])

question = next(q for q in map(json.loads, open(f"{tmp}/town/questions.jsonl")) if q["kind"] == "arithmetic")
reply = rows(run(*agent, question["question"]))[0]
check("a question on the command line", reply["steps"][0]["tool"] == "calculator" and str(question["answer"]) in reply["answer"], reply)

r = subprocess.run([os.path.abspath(server.SHOAL), "agent", model, "--exact", "--quiet", "--adapter", adapter, question["question"]], cwd=tmp,
                   capture_output=True, text=True)
check("model and adapter are found from another folder", r.stdout.strip() == reply["answer"], r)

with open(f"{tmp}/clerk.yaml", "w") as f:
    f.write(f"adapter: {os.getcwd()}/{adapter}\ntools: [calculator, knowledge]\nknowledge: {tmp}/facts.db\n")
s = server.Server("tools", model, "--exact", "--agent", f"clerk={tmp}/clerk.yaml")
ask = {"model": "agent:clerk", "messages": [{"role": "user", "content": question["question"]}]}
status, v = s.call("/v1/chat/completions", ask)
check("the same through the API", status == 200 and v["choices"][0]["message"]["content"] == reply["answer"], v)
_, events = s.stream("/v1/chat/completions", ask)
text = "".join(c["delta"].get("content") or "" for _, v in events if v != "[DONE]" for c in v["choices"])
check("and in a stream", text == reply["answer"], text)
s.p.terminate()
check("the server ends", s.p.wait(timeout=60) == 0)
sys.exit(bool(failed))
END
