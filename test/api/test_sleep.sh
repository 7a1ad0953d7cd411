#!/bin/sh
# test_sleep: memories become weights over HTTP: a job of each key, the model `sleep` of its caller only, the report,
# rollback, forgetting, deletion, the schedule, refusals. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why"
# lines; SHOAL is the binary.
# levels: once
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip sleep: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
SHOAL=${SHOAL:-build/shoal} TMP_DIR=$tmp python3 - <<'END'
import datetime, json, os, signal, subprocess, sys, time, traceback

sys.path.insert(0, "test/api")
import server
from server import check, failed, run

shoal, tmp, model = server.SHOAL, server.TMP, "models/fry"
SETTINGS = {"r": 8, "lr": 2.5e-3, "bsz": 8, "grad-accum": 1, "lora-dropout": 0, "max-steps": 90, "rehearse": "copy", "rehearse-n": 90, "retain-n": 20, "retain-points": 20}


class Server(server.Server):
    def learn(self, user, *texts):
        for text in texts:
            run("memory", "learn", text, "--store", f"{tmp}/me.db", "--user", user, "--quiet")

    def report(self, key):
        status, v = self.call("/v1/sleep", key=key)
        assert status == 200, v
        return v

    def sleep(self, key, **more):
        """Runs a sleep to its end; returns the report."""
        status, v = self.call("/v1/sleep", {"options": {**SETTINGS, **more}}, key)
        assert status == 201 and v["kind"] == "sleep", (status, v)
        return self.wait(key)

    def wait(self, key):
        for _ in range(1200):
            v = self.report(key)
            if v["job"] and v["job"]["state"] not in ("queued", "running"):
                return v
            time.sleep(0.1)
        raise AssertionError(v["job"])

    def ask(self, key, question, name="sleep"):
        body = {"model": name, "messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0}
        status, v = self.call("/v1/chat/completions", body, key)
        return status, v["choices"][0]["message"]["content"] if status == 200 else v["error"]["message"]

    def models(self, key):
        return [m["id"] for m in self.call("/v1/models", key=key)[1]["data"]]

    def until(self, condition):
        for _ in range(200):
            if condition():
                return True
            time.sleep(0.05)
        return False

    def stop(self):
        self.p.send_signal(signal.SIGTERM)
        check(f"the server {self.name} ends on SIGTERM", self.p.wait(60) == 0, open(f"{tmp}/{self.name}.err").read())


def test_learning(s):
    v = s.report("sk-one")
    check("a report before the first sleep", v["model"] is None and v["versions"] == [] and v["job"] is None and v["unlearned"] == [1, 2], v)
    check("without a version there is no model", s.ask("sk-one", "Hello")[0] == 404 and "sleep" not in s.models("sk-one"))
    v = s.sleep("sk-one")
    version = v["versions"][0]
    check("the memories of the key are learned", v["job"]["state"] == "done" and v["result"]["published"] and version["current"]
          and version["recall"]["n"] == 4 and version["recall"]["after"]["value"] > version["recall"]["before"]["value"] == 0, v)
    first = version["learned"][0]
    check("the report names the facts with their source", (first["id"], first["attribute"], first["value"], first["text"], first["new"])
          == (1, "name", "Zorvan", "My name is Zorvan.", True) and first["source"]["speaker"] == "user" and first["after"] > 0, first)
    check("the report has the retention of each family", [r["name"] for r in version["retention"]["sets"]] == ["copy"], version)
    check("the model sleep answers", s.until(lambda: "Zorvan" in s.ask("sk-one", "Do you know my name?")[1]), s.ask("sk-one", "Do you know my name?"))
    check("the model is listed for its key", "sleep" in s.models("sk-one"))
    check("no export stays", s.until(lambda: not os.path.exists(f"{tmp}/state/sleep/cli-1/memories.jsonl")), os.listdir(f"{tmp}/state/sleep/cli-1"))
    return version["hash"]


def test_isolation(s, job):
    check("another key has no such model", s.ask("sk-two", "Do you know my name?")[0] == 404 and "sleep" not in s.models("sk-two"))
    for name in ("sleep/cli-1", "sleep/cli-1*1", "cli-1", "fry:sleep/cli-1", f"{tmp}/state/sleep/cli-1/adapter"):
        status, text = s.ask("sk-two", "Do you know my name?", name)
        check(f"another key cannot name it: {name.replace(tmp, '')}", status in (400, 404), (status, text))
    v = s.report("sk-two")
    check("another key sees nothing", v["versions"] == [] and v["job"] is None and "Zorvan" not in json.dumps(v), v)
    c = s.open(f"/v1/jobs/{job}/results", key="sk-two")
    text = c.getresponse().read().decode()
    log = s.open(f"/v1/jobs/{job}/log", key="sk-two").getresponse().read().decode()
    check("the job's output has no text of a memory", "published" in text and "Zorvan" not in text + log, text)
    for option in ("user", "memory", "out", "dry-run", "status"):
        for path, body in (("/v1/sleep", {"options": {option: True if option in ("dry-run", "status") else "cli-1"}}),
                           ("/v1/jobs", {"kind": "sleep", "args": [model], "options": {option: True if option in ("dry-run", "status") else "cli-1"}})):
            status, v = s.call(path, body, "sk-two")
            check(f"POST {path} refuses {option}", status == 400 and v["error"]["param"] == option, (status, v))
    where = f"{tmp}/state/sleep/cli-1/adapter"
    status, v = s.call("/v1/jobs", {"kind": "train", "args": [model], "options": {"data": "fry:copy:10", "out": "x", "init-adapter": where}}, "sk-two")
    check("no other job reads the adapter", status == 400, (status, v))
    s.learn("cli-2", "My name is Elsbeth.")
    v = s.sleep("sk-two")
    check("another key learns its own memories", v["result"]["published"] and s.until(lambda: "Elsbeth" in s.ask("sk-two", "Do you know my name?")[1]), v)
    check("both adapters answer their users", "Zorvan" in s.ask("sk-one", "Do you know my name?")[1])


def test_versions(s, first):
    s.learn("cli-1", "I have a dog called Rex.")
    v = s.sleep("sk-one", **{"max-steps": 180})
    second = v["versions"][0]
    check("the next version starts from the first", v["result"]["start"] == first and [m["new"] for m in second["learned"]] == [False, False, True], (v["result"]["why"], second))
    status, v = s.call("/v1/sleep/rollback", {}, "sk-one")
    check("a rollback restores the hash", (status, v) == (200, {"hash": first}) and s.report("sk-one")["versions"][1]["current"], v)
    status, v = s.call("/v1/sleep/rollback", {"to": second["hash"][:12]}, "sk-one")
    check("a rollback to a named version", (status, v) == (200, {"hash": second["hash"]}), v)
    status, v = s.call("/v1/sleep/rollback", {"to": "0123456789ab"}, "sk-one")
    check("an unknown version is refused", status == 404, (status, v))


def test_forgetting(s):
    s.call("/v1/memories/1", key="sk-one", method="DELETE")
    v = s.report("sk-one")
    check("versions that know a deleted memory are named", [x["forgotten"] for x in v["versions"]] == [[1], [1]] and "Zorvan" not in json.dumps(v), v)
    v = s.sleep("sk-one")
    check("the next sleep does not know it", v["result"]["published"] and v["result"]["start"] == "" and v["versions"][0]["forgotten"] == [], v["result"])
    check("and its model does not", s.until(lambda: "Zorvan" not in s.ask("sk-one", "Do you know my name?")[1]), s.ask("sk-one", "Do you know my name?"))
    v = s.sleep("sk-one", **{"max-steps": 1, "lr": 1e-7, "seed": 3})
    check("nothing new: nothing is done", v["job"]["state"] == "done" and v["result"]["up_to_date"], v["result"])
    s.learn("cli-1", "My hobby is archery.")
    v = s.sleep("sk-one", **{"max-steps": 1, "lr": 1e-7})
    check("the gate's refusal is reported", v["job"]["state"] == "failed" and not v["result"]["published"] and "recall did not improve" in v["result"]["why"], v["result"])
    status, v = s.call("/v1/sleep", key="sk-one", method="DELETE")
    check("the adapter is deleted", (status, v) == (200, {"deleted": True}) and s.report("sk-one")["versions"] == [] and s.ask("sk-one", "Hello")[0] == 404, v)
    check("with all of its files", not os.path.exists(f"{tmp}/state/sleep/cli-1"))
    check("deleting again", s.call("/v1/sleep", key="sk-one", method="DELETE")[1] == {"deleted": False})
    check("a rollback without a version is refused", s.call("/v1/sleep/rollback", {}, "sk-one")[0] == 404)


def test_refusals(s):
    for body in ({"rehearse": "copy"}, {"options": []}, {"options": "x"}, {"options": {"no-such": 1}}, {"options": {"rehearse": "../secret"}}, []):
        status, v = s.call("/v1/sleep", body, "sk-one")
        check(f"POST /v1/sleep {json.dumps(body)} is refused", status == 400 and "message" in v["error"], (status, v))
    for body in ({"to": 1}, {"version": "x"}, []):
        status, v = s.call("/v1/sleep/rollback", body, "sk-one")
        check(f"POST /v1/sleep/rollback {json.dumps(body)} is refused", status == 400, (status, v))
    s.call("/v1/sleep", {"options": SETTINGS}, "sk-one")
    check("one sleep of a key at a time", s.call("/v1/sleep", {"options": SETTINGS}, "sk-one")[0] == 409
          and s.call("/v1/sleep", key="sk-one", method="DELETE")[0] == 409 and s.call("/v1/sleep/rollback", {}, "sk-one")[0] == 409)
    s.wait("sk-one")
    status, v = s.call("/v1/sleep", key="sk-wrong")
    check("a wrong key is refused", status == 401, (status, v))


def test_restart(s):
    s.p.kill()
    s.p.wait()
    open(f"{tmp}/state/sleep/cli-2/memories.jsonl", "w").write("left by a killed server")
    s = Server("state", model, *OPTIONS)
    check("the model sleep after a restart", "Elsbeth" in s.ask("sk-two", "Do you know my name?")[1], s.ask("sk-two", "Do you know my name?"))
    check("the export of a killed server is deleted", not os.path.exists(f"{tmp}/state/sleep/cli-2/memories.jsonl"))
    return s


def test_schedule():
    at = datetime.datetime.now() + datetime.timedelta(seconds=62 if datetime.datetime.now().second > 50 else 60)
    for user in ("me", "cli-1", "cli-2"):
        run("memory", "learn", "My name is Zorvan.", "--store", f"{tmp}/night.db", "--user", user, "--quiet")
    s = Server("night", model, "--memory", f"{tmp}/night.db", "--api-key", "sk-one", "--api-key", "sk-two", "--sleep-at", at.strftime("%H:%M"), "--sleep-rehearse", "copy")
    check("the report has the time", s.report("sk-one")["at"] == at.strftime("%H:%M"))
    jobs = []
    for _ in range(900):
        jobs = [j for j in s.call("/v1/jobs", key="sk-one")[1]["jobs"] if j["kind"] == "sleep"]
        if len(jobs) == 3:
            break
        time.sleep(0.1)
    check("at night one job for every user with new memories", len(jobs) == 3 and all(j["options"] == {"rehearse": "copy"} for j in jobs), jobs)
    for j in jobs:
        s.call(f"/v1/jobs/{j['id']}/cancel", {}, "sk-one")
    s.stop()
    for text in ("3:30", "24:00", "12:60", "noon", " 3:30"):
        r = subprocess.run([shoal, "serve", model, "--port", "0", "--state", f"{tmp}/none", "--memory", f"{tmp}/night.db", "--sleep-at", text], capture_output=True, text=True)
        check(f"--sleep-at {text} is refused", r.returncode == 2 and "is not a time of day" in r.stderr, r.stderr)
    r = subprocess.run([shoal, "serve", model, "--port", "0", "--state", f"{tmp}/none", "--sleep-at", "03:30"], capture_output=True, text=True)
    check("--sleep-at without --memory is refused", r.returncode == 2 and "requires --memory" in r.stderr, r.stderr)


OPTIONS = ["--memory", f"{tmp}/me.db", "--api-key", "sk-one", "--api-key", "sk-two"]
try:
    s = Server("state", model, *OPTIONS)
    s.learn("cli-1", "My name is Zorvan.", "I live in Osaka.")
    first = test_learning(s)
    test_isolation(s, s.report("sk-one")["job"]["id"])
    test_versions(s, first)
    test_forgetting(s)
    test_refusals(s)
    s = test_restart(s)
    s.stop()
    plain = Server("plain", model, "--api-key", "sk-one")
    for method, path in (("GET", "/v1/sleep"), ("POST", "/v1/sleep"), ("DELETE", "/v1/sleep"), ("POST", "/v1/sleep/rollback")):
        status, v = plain.call(path, {} if method == "POST" else None, "sk-one", method)
        check(f"{method} {path} without --memory", status == 404 and v["error"]["code"] == "no_memory", (status, v))
    plain.stop()
    test_schedule()
except Exception:
    traceback.print_exc()
    check("the test runs to its end", False, traceback.format_exc())
sys.exit(1 if failed else 0)
END
