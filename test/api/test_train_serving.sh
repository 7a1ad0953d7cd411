#!/bin/sh
# test_train_serving: trainings in the process of the server ('in_process' of a job) while clients stream: the adapter of
# the command, versions that replies never mix, pause, cancellation, restarts, memory, refused requests. Prints "ok NAME",
# "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip train_serving: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
SHOAL=${SHOAL:-build/shoal} TMP_DIR=$tmp PYTHONPATH=test/api python3 - <<'END'
import json, os, signal, sys, threading, time, traceback

from server import TMP, Server, check, failed, run

MODEL, DATA = "test/models/fry-1", "data/personas/critic.jsonl"
OPTIONS = {"data": DATA, "r": 4, "lr": 4e-3, "max-steps": 24, "bsz": 4, "grad-accum": 1, "save-steps": 6}
ENDED = ("done", "failed", "cancelled")


class Trainer(Server):
    """A server whose process trains."""

    def __init__(self, name, *args):
        super().__init__(name, MODEL, "--train-share", "0.4", *args)
        self.token = open(f"{TMP}/{name}/token").read().strip()

    def api(self, path, body=None, method=None):
        return self.call(path, body, self.token, method)

    def train(self, out, publish_steps=None, in_process=True, args=(MODEL,), kind="train", **options):
        body = {"kind": kind, "args": list(args), "options": {**OPTIONS, "out": out, **{k.replace("_", "-"): v for k, v in options.items()}}}
        if in_process is not None:
            body["in_process"] = in_process
        if publish_steps is not None:
            body["publish_steps"] = publish_steps
        return self.api("/v1/jobs", body)

    def job(self, id):
        return self.api(f"/v1/jobs/{id}")[1]

    def waits(self, id, what, seconds=240):
        """The job once what(job) is true."""
        end = time.time() + seconds
        while time.time() < end:
            job = self.job(id)
            if what(job):
                return job
            time.sleep(0.02)
        raise AssertionError(f"job {id}: {job}")

    def ends(self, id):
        return self.waits(id, lambda job: job["state"] in ENDED)

    def results(self, id):
        c = self.open(f"/v1/jobs/{id}/results", key=self.token)
        lines = c.getresponse().read().decode().splitlines()
        c.close()
        return [json.loads(x) for x in lines]

    def hash(self, id):
        return self.results(id)[-1]["hash"]

    def versions(self, id):
        return [x for x in self.results(id) if "version_of" in x]

    def models(self):
        return [m["id"] for m in self.call("/v1/models")[1]["data"]]

    def memory(self, name):
        for line in open(f"/proc/{self.p.pid}/status"):
            if line.startswith(name + ":"):
                return int(line.split()[1]) << 10

    def stops(self):
        """SIGTERM; returns the exit status and the seconds until it."""
        began = time.time()
        self.p.send_signal(signal.SIGTERM)
        return self.p.wait(60), time.time() - began


class Clients:
    """Clients that stream replies of a model one after another until `stop`; each reply is (fingerprints, text)."""

    def __init__(self, server, model, n=2):
        self.server, self.model, self.over, self.replies, self.wrong = server, model, False, [], []
        self.threads = [threading.Thread(target=self.run) for _ in range(n)]
        for t in self.threads:
            t.start()

    def reply(self):
        body = {"model": self.model, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
                "messages": [{"role": "user", "content": "what is 3 plus 4?"}]}
        c, events = self.server.stream("/v1/chat/completions", body)
        prints, text = set(), ""
        for _, v in events:
            if v == "[DONE]":
                break
            prints.add(v["system_fingerprint"])
            for choice in v["choices"]:
                text += choice["delta"].get("content") or ""
        c.close()
        return prints, text

    def run(self):
        while not self.over:
            try:
                self.replies.append(self.reply())
            except AssertionError as e:  # the model has no version yet
                if "404" not in str(e):
                    self.wrong.append(e)
                time.sleep(0.005)
            except Exception as e:
                self.wrong.append(e)

    def stop(self):
        self.over = True
        for t in self.threads:
            t.join()
        return self.replies


def trained(name, *args):
    """The hash of the adapter that the command trains with the same options."""
    words = [w for k, v in OPTIONS.items() if f"--{k}" not in args for w in (f"--{k}", str(v))]
    text = run("train", MODEL, *words, "--out", f"{TMP}/{name}", "--runs", f"{TMP}/{name}-runs", "--json", "--quiet", *args)
    return json.loads(text.splitlines()[-1])["hash"]


def test_versions():
    s = Trainer("versions", "--exact", "--runs", f"{TMP}/v-runs")
    base = Clients(s, "fry-1", 1)
    clients = Clients(s, "live")
    status, job = s.train("live", publish_steps=4)
    check("submitted", status == 201 and job["in_process"] is True and job["publish_steps"] == 4, job)
    job = s.ends(job["id"])
    check("done under load", job["state"] == "done" and "pid" not in job, job)
    last = clients.reply()
    replies, others = clients.stop(), base.stop()
    versions = s.versions(job["id"])
    check("versions at the chosen steps", [v["step"] for v in versions] == [4, 8, 12, 16, 20] and len({v["hash"] for v in versions}) == 5, versions)
    check("the adapter of the command", s.hash(job["id"]) == EXACT, s.results(job["id"])[-1])
    check("no failed request", not clients.wrong and not base.wrong, clients.wrong + base.wrong)
    check("one version per reply", all(len(prints) == 1 for prints, _ in replies), replies[:3])
    texts = {}
    for prints, text in replies + [last]:
        texts.setdefault(min(prints), set()).add(text)
    check("equal versions give equal replies", all(len(t) == 1 for t in texts.values()), texts)
    check("clients saw several versions", len(texts) >= 3, texts)
    check("the base did not change", len({(min(p), t) for p, t in others}) == 1, others[:3])
    check("the result is served", "live" in s.models() and last[1] == clients.reply()[1], last)
    progress = job.get("progress", {})
    check("progress and figures", progress.get("total") == 24 and "train_loss" in job.get("figures", {}), job)
    before = s.call("/v1/chat/completions", {"model": "live", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]})[1]["system_fingerprint"]
    status, again = s.train("live", publish_steps=4, seed=7)
    s.waits(again["id"], lambda _: s.versions(again["id"]))
    s.api(f"/v1/jobs/{again['id']}/cancel", {})
    check("cancelled", s.ends(again["id"])["state"] == "cancelled")
    after = s.call("/v1/chat/completions", {"model": "live", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]})[1]["system_fingerprint"]
    check("the earlier adapter is served again", before == after, (before, after))
    status, other = s.train("other", publish_steps=2, seed=7)
    s.waits(other["id"], lambda _: "other" in s.models())
    s.api(f"/v1/jobs/{other['id']}/cancel", {})
    s.ends(other["id"])
    check("a name without an earlier adapter is free again", "other" not in s.models(), s.models())
    check("stopped", s.stops()[0] == 0)


def test_classes():
    for name, want in (("exact", EXACT), ("fast", FAST)):
        s = Trainer(name, f"--{name}", "--runs", f"{TMP}/{name}-r")
        clients = Clients(s, "fry-1")
        for threads in (1, 2):
            job = s.ends(s.train(f"t{threads}", threads=threads)[1]["id"])
            check(f"{name}, {threads} threads: the adapter of the command", job["state"] == "done" and s.hash(job["id"]) == want, job)
        clients.stop()
        check(f"{name}: no failed request", not clients.wrong, clients.wrong)
        s.stops()


def test_dpo():
    s = Trainer("dpo", "--exact", "--runs", f"{TMP}/d-runs")
    with open(f"{TMP}/d-runs/pairs.jsonl", "w") as f:
        for i in range(8):
            f.write(json.dumps({"prompt": f"what is {i} plus 4?", "chosen": f"answer: {i + 4}", "rejected": "I do not know"}) + "\n")
    more = {"data": f"{TMP}/d-runs/pairs.jsonl", "method": "dpo", "max-steps": 5}
    want = trained("offline-dpo", "--exact", *[w for k, v in more.items() for w in (f"--{k}", str(v))])
    id = s.train("pairs", publish_steps=2, **more)[1]["id"]
    job = s.ends(id)
    check("dpo: the adapter of the command", job["state"] == "done" and s.hash(id) == want, job)
    check("dpo: versions", [v["step"] for v in s.versions(id)] == [2, 4], s.versions(id))
    s.stops()


def test_pause():
    s = Trainer("pause", "--exact", "--runs", f"{TMP}/p-runs", "--max-jobs", "2")
    id = s.train("paused")[1]["id"]
    s.waits(id, lambda job: job.get("progress", {}).get("done", 0) >= 2)
    s.api(f"/v1/jobs/{id}/pause", {})
    check("paused", s.job(id)["state"] == "paused", s.job(id))
    second = s.train("second")[1]["id"]
    world = s.train("w", in_process=None, kind="world", args=())  # its options are wrong: it must be refused
    check("a job with the options of another kind", world[0] == 400, world)
    check("one training at a time", s.job(second)["state"] == "queued", s.job(second))
    at = s.job(id)["progress"]["done"]
    check("a paused job makes no progress", s.job(id)["progress"]["done"] - at <= 1, s.job(id))
    s.api(f"/v1/jobs/{id}/resume", {})
    check("resumed: the adapter of the command", s.ends(id)["state"] == "done" and s.hash(id) == EXACT, s.job(id))
    check("the second one after it", s.ends(second)["state"] == "done" and s.hash(second) == EXACT, s.job(second))
    s.stops()


def test_restart():
    s = Trainer("restart", "--exact", "--runs", f"{TMP}/r-runs")
    id = s.train("kept", publish_steps=6)[1]["id"]
    s.waits(id, lambda job: job.get("progress", {}).get("done", 0) >= 8)
    s.p.kill()
    s.p.wait()
    s = Trainer("restart", "--exact", "--runs", f"{TMP}/r-runs")
    s.waits(id, lambda job: job.get("progress", {}).get("done", 0) >= 14)
    status, seconds = s.stops()
    check("SIGTERM ends the training, too", status == 0 and seconds < 10, (status, seconds))
    s = Trainer("restart", "--exact", "--runs", f"{TMP}/r-runs")
    job = s.ends(id)
    steps = [v["step"] for v in s.versions(id)]
    # two attempts: on a fast machine the second one has ended before the signal
    check("continued twice: the adapter of the command", job["state"] == "done" and job["attempts"] in (2, 3) and s.hash(id) == EXACT, job)
    check("the checkpoint is the first version after a restart", steps[:1] in ([6], [12]) and steps == sorted(set(steps)), steps)
    s.stops()


def test_memory():
    s = Trainer("memory", "--exact", "--runs", f"{TMP}/m-runs", "--train-memory", "48M")
    s.call("/v1/chat/completions", {"model": "fry-1", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]})
    idle, most = s.memory("VmRSS"), 0
    id = s.train("small")[1]["id"]
    while s.job(id)["state"] not in ENDED:
        most = max(most, s.memory("VmRSS"))
        time.sleep(0.02)
    check("trained in --train-memory", s.job(id)["state"] == "done" and s.hash(id) == EXACT, s.job(id))
    if "asan" not in os.environ["SHOAL"]:
        check("memory of the server", idle < most < idle + (56 << 20), (idle >> 20, most >> 20))
    s.stops()
    s = Trainer("tight", "--exact", "--runs", f"{TMP}/t-runs", "--train-memory", "1M")
    job = s.ends(s.train("large")[1]["id"])
    check("too little memory", job["state"] == "failed" and "raise --train-memory by" in job["note"], job)
    with open(f"{TMP}/t-runs/large.jsonl", "w") as f:
        f.truncate(1 << 33)  # a file without blocks
    job = s.ends(s.train("large", data=f"{TMP}/t-runs/large.jsonl")[1]["id"])
    check("too much data", job["state"] == "failed" and "reading the data needs" in job["note"], job)
    check("the server lives", s.api("/v1/jobs")[0] == 200)
    s.stops()
    s = Trainer("planned", "--exact", "--runs", f"{TMP}/l-runs", "--max-memory", "200M")
    status, v = s.train("none")
    check("no memory planned", status == 400 and "--train-memory" in v["error"]["message"], v)
    s.stops()
    s = Trainer("planned2", "--exact", "--runs", f"{TMP}/l2-runs", "--max-memory", "260M", "--train-memory", "48M")
    job = s.ends(s.train("some")[1]["id"])
    check("planned memory", job["state"] == "done" and s.hash(job["id"]) == EXACT, job)
    if "asan" not in os.environ["SHOAL"]:
        check("within --max-memory", s.memory("VmHWM") <= 260 << 20, s.memory("VmHWM") >> 20)
    s.stops()


def test_refused():
    s = Trainer("refused", "--exact", "--runs", f"{TMP}/f-runs", "--adapter", f"mine={TMP}/offline-exact")
    with open(f"{TMP}/f-runs/bad.jsonl", "w") as f:
        f.write('{"messages": 3}\n')
    with open(f"{TMP}/f-runs/recipe.yaml", "w") as f:
        f.write(f"model: {MODEL}\ndata: {DATA}\n")
    for name, field, job in (
            ("another kind", "in_process", s.train("x", kind="world", args=())),
            ("steps without a process", "publish_steps", s.train("x", publish_steps=3, in_process=None)),
            ("steps below 1", "publish_steps", s.train("x", publish_steps=0)),
            ("no bool", "in_process", s.train("x", in_process="yes")),
            ("rewards", "method", s.train("x", method="rloo")),
            ("es", "method", s.train("x", method="es")),
            ("the process's memory", "max-memory", s.train("x", max_memory="1G")),
            ("a plan", "dry-run", s.train("x", dry_run=True)),
            ("another class", "fast", s.train("x", fast=True)),
            ("another base", "args", s.train("x", args=("models/fry",))),
            ("a recipe", "args", s.train("x", args=(f"{TMP}/f-runs/recipe.yaml",))),
            ("no base", "args", s.train("x", args=())),
            ("versions of two adapters", "publish_steps", s.train("x", publish_steps=3, data=[f"a={DATA}", f"b={DATA}"])),
            ("versions of a served adapter", "publish_steps", s.train("mine", publish_steps=3))):
        check(f"refused: {name}", job[0] == 400 and job[1]["error"]["param"] == field, job)
    job = s.ends(s.train("x", data=f"{TMP}/f-runs/bad.jsonl")[1]["id"])
    check("bad data", job["state"] == "failed" and "messages" in job["note"], job)
    check("the server lives after bad data", s.api("/v1/jobs")[0] == 200)
    job = s.ends(s.train("two", data=[f"a={DATA}", f"b={DATA}"])[1]["id"])
    check("two adapters", job["state"] == "done" and len(s.results(job["id"])) == 2, job)
    s.stops()


try:
    EXACT, FAST = trained("offline-exact", "--exact", "--threads", "1"), trained("offline-fast", "--fast", "--threads", "2")
    only = os.environ.get("ONLY")
    for test in (test_versions, test_classes, test_dpo, test_pause, test_restart, test_memory, test_refused):
        if not only or only in test.__name__:
            test()
except Exception:
    check("the script", False, traceback.format_exc())
sys.exit(bool(failed))
END
