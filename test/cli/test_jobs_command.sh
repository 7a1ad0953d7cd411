#!/bin/sh
# test_jobs_command: 'shoal jobs' with a running server: submit, list, follow, results, pause, resume, cancel, delete; retries and
# dead letters; keys; refused arguments. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip jobs: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export SHOAL_CONFIG='' HOME="$tmp"
SHOAL=${SHOAL:-build/shoal} TMP_DIR=$tmp python3 - <<'END'
import json, subprocess, sys, time

sys.path.insert(0, "test/api")
import server
from server import check, failed

tmp, model = server.TMP, "test/models/fry-1"
s = server.Server("main", model, "--runs", f"{tmp}/runs", "--no-jobs-idle")
at = ["--server", f"http://{s.address}/", "--state", f"{tmp}/main"]


def jobs(*args):
    r = subprocess.run([server.SHOAL, "jobs", *args, *at], capture_output=True, text=True)
    return r.returncode, r.stdout, r.stderr


def submit(**request):
    with open(f"{tmp}/request.json", "w") as f:
        json.dump(request, f)
    code, out, err = jobs("submit", f"{tmp}/request.json", "--json")
    assert code == 0, err
    return json.loads(out)


def wait(job, *states):
    for _ in range(1200):
        v = json.loads(jobs("show", job, "--json")[1])
        if v["state"] in states:
            return v
        time.sleep(0.05)
    raise AssertionError(v)


code, out, err = jobs()
check("an empty list", (code, out) == (0, "") and "no jobs" in err, (code, out, err))
world = submit(kind="world", options={"policy": "rule", "steps": 5}, priority=7)
check("submit prints the job", world["priority"] == 7 and world["state"] in ("queued", "running"), world)
code, out, err = jobs("follow", world["id"])
check("follow ends with the job", code == 0 and "done" in out.splitlines()[-1], (code, out, err))
code, out, _ = jobs("follow", world["id"], "--json")
events = [json.loads(line) for line in out.splitlines()]
check("its events as JSON", code == 0 and events[-1]["state"] == "done", out)
check("results", jobs("results", world["id"])[1].strip().startswith("{"))
check("log", jobs("log", world["id"])[0] == 0)
code, out, _ = jobs("list")
check("a line of the list", code == 0 and world["id"] in out and "done" in out and out.splitlines()[0].startswith("id"), out)

wrong = submit(kind="train", args=[model], options={"data": "README.md", "out": "none"})
v = wait(wrong["id"], "failed")
check("a failed job has its reason", v["attempts"] == 1 and v["note"], v)
check("follow of a failed job is a failure", jobs("follow", wrong["id"])[0] == 1)
rows = [json.loads(line) for line in jobs("--job-state", "failed", "--json")[1].splitlines()]
check("the dead letters", [r["id"] for r in rows] == [wrong["id"]], rows)
check("resume tries it again", json.loads(jobs("resume", wrong["id"], "--json")[1])["state"] in ("queued", "running", "failed"))
check("with the same result", wait(wrong["id"], "failed")["attempts"] == 2)
check("delete", jobs("delete", wrong["id"])[0] == 0 and jobs("show", wrong["id"])[0] == 1)

long = submit(kind="world", options={"policy": "rule", "steps": 1000000}, deadline=600)
wait(long["id"], "running")
check("pause", json.loads(jobs("pause", long["id"], "--json")[1])["state"] == "paused")
check("resume", json.loads(jobs("resume", long["id"], "--json")[1])["state"] in ("queued", "running"))
check("cancel", jobs("cancel", long["id"])[0] == 0 and wait(long["id"], "cancelled"))

for name, args, text in (("an unknown verb", ["guess"], "there are list"), ("no id", ["show"], "the id of a job"), ("an id too many", ["list", "x"], "no argument"),
                         ("what is no id", ["show", "../keys"], "no id of a job"), ("an unknown job", ["show", "job-00000000"], "there is no job"),
                         ("an unknown state", ["--job-state", "dead"], "queued, running"), ("a missing file", ["submit", f"{tmp}/none"], "none")):
    code, out, err = jobs(*args)
    check(f"refused: {name}", code in (1, 2) and text in err and not out, (code, out, err))
code, _, err = jobs("submit", "README.md")
check("refused: a file that is not JSON", code == 1 and "README.md" in err, err)
with open(f"{tmp}/key", "w") as f:
    f.write("wrong\n")
code, _, err = jobs("--api-key-file", f"{tmp}/key")
check("refused: a wrong key", code == 1 and "401" in err, err)
r = subprocess.run([server.SHOAL, "jobs", "--state", f"{tmp}/nowhere"], capture_output=True, text=True)
check("no server with that state", r.returncode == 1 and "--api-key-file" in r.stderr, r.stderr)
s.p.terminate()
check("the server ends", s.p.wait(timeout=60) == 0)
sys.exit(bool(failed))
END
