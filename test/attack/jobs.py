"""jobs: actions that a key with the scope `jobs` must not be able to perform: run commands, read or write outside the
allowed paths, replace served or foreign files, leave processes running. test_jobs.c tests the same on single functions;
random requests are in jobs_random.py, which uses the setup of this file.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

import attack
from attack import Server, report, skip

ROOT = os.getcwd()
SHOAL = os.path.abspath(attack.SHOAL)
MODEL = os.path.join(ROOT, "test/models/fry-1")
SECRET = "s3cr3t-of-the-operator"
LINE = json.dumps({"messages": [{"role": "user", "content": "1 + 1 = ?"}, {"role": "assistant", "content": "2"}]}) + "\n"


class JobServer:
    """A server in a temporary folder with all paths that a test checks: work (the server's working folder, with files
    that a careless operator leaves there), home, tmp, outside, and srv with the server's state and runs.
    """

    def __init__(self, *options, keys=("one", "two"), **more):
        attack.SHOAL = SHOAL
        self.top = tempfile.mkdtemp(prefix="attack-jobs-")
        for name in ("work", "home", "tmp", "outside", "srv/state"):
            os.makedirs(self.path(name))
        self.create_files()
        self.keys = {name: self.key(name, "jobs") for name in keys}
        self.keys["admin"] = self.key("admin", "jobs", "admin")
        self.before = os.getcwd()
        os.chdir(self.path("work"))
        self.server = Server("--max-jobs", "2", "--no-jobs-idle", "--adapter", "critic=adapters/critic", *options,
                             model=MODEL, folder=self.path("srv"),
                             env={"HOME": self.path("home"), "TMPDIR": self.path("tmp"), "HF_TOKEN": SECRET,
                                  "SHOAL_ALERT_SLACK": "http://127.0.0.1:9/" + SECRET}, **more)

    def path(self, *parts):
        return os.path.join(self.top, *parts)

    def write_file(self, name, text):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w") as f:
            f.write(text)

    def create_files(self):
        outside, escape = self.path("outside"), self.path("outside/escaped")
        self.write_file("work/data.jsonl", LINE * 4)
        self.write_file("work/questions.jsonl", json.dumps({"question": "1 + 1 = ?", "choices": ["2", "3"], "answer": 0}) + "\n")
        for name in ("work/.env", "work/.ssh/id.txt", "work/deploy.pem", "outside/secret.jsonl", "outside/secret.yaml",
                     "home/.bash_history", "home/notes.txt"):
            self.write_file(name, SECRET + "\n")
        recipe = f"model: {MODEL}\ntrain: {{max_steps: 1, r: 2, grad_accum: 1}}\n"
        self.write_file("work/good.yaml", recipe + "data: [data.jsonl]\n")
        self.write_file("work/evil-out.yaml", recipe + f"data: [data.jsonl]\nout: {escape}-out\n")
        self.write_file("work/evil-runs.yaml", recipe + f"data: [data.jsonl]\nruns: {escape}-runs\n")
        self.write_file("work/evil-data.yaml", recipe + f"data: [{outside}/secret.jsonl]\n")
        self.write_file("work/evil-name.yaml", recipe + "data: ['../../escaped-name=data.jsonl']\n")
        self.write_file("work/evil-reward.yaml", recipe + "data: ['fry:pick']\nmethod: rloo\n"
                 f"policy: {{k: 2, max_new_tokens: 2, reward: 'shell:id >{escape}-reward; yes 1'}}\n")
        self.write_file("work/evil-state.yaml", recipe + "data: [../srv/state/serve.db]\n")
        self.write_file("work/evil-team.yaml", f"agents: [{{adapter: {outside}/secret.jsonl}}, {{adapter: base}}]\n")
        self.write_file("work/evil-protocol.yaml", f"protocol: {outside}/secret.yaml\nagents: [{{adapter: base}}, {{adapter: base}}]\n")
        self.write_file("work/evil-task.yaml", f"file: {outside}/secret.jsonl\n")
        self.write_file("work/evolve.yaml", f"model: {MODEL}\npersonas: [a=data.jsonl, b=data.jsonl]\ntasks: [pick]\nrounds: 0\n"
                 "test_items: 2\ntrain: {max_steps: 1, r: 2, grad_accum: 1}\n"
                 "evolve: {generations: 1, population: 2, elites: 1}\nfitness: {items: 2}\n")
        self.write_file("work/evil-evolve.yaml", f"model: {MODEL}\npersonas: ['a={outside}/secret.jsonl', 'b=data.jsonl']\n"
                 "tasks: [pick]\n")
        os.symlink(self.path("outside/secret.jsonl"), self.path("work/link.jsonl"))
        os.symlink(self.path("outside"), self.path("work/linked"))
        os.symlink("data.jsonl", self.path("work/inner.jsonl"))
        os.mkfifo(self.path("work/pipe.jsonl"))
        subprocess.run([SHOAL, "adapter", "new", self.path("work/adapters/critic"), "--model", MODEL, "--rank", "2",
                        "--quiet"], check=True, stdout=subprocess.DEVNULL)

    def key(self, name, *scopes):
        out = subprocess.run([SHOAL, "key", "add", name, "--scope", *scopes, "--store", self.path("srv/state/serve.db"),
                              "--json"], check=True, capture_output=True, text=True).stdout
        return json.loads(out)["secret"]

    def start(self, kind, args=(), key="one", **options):
        """(status, body) of a request; '_' in the names of options become '-'."""
        body = {"kind": kind, "args": list(args), "options": {k.replace("_", "-"): v for k, v in options.items()}}
        return self.send(body, key)

    def send(self, body, key="one"):
        status, text, _ = self.server.ask("/v1/jobs", body, key=self.keys[key])
        return status, json.loads(text)

    def job(self, id, key="one"):
        return json.loads(self.server.ask(f"/v1/jobs/{id}", key=self.keys[key])[1])

    def post_action(self, id, what, key="one"):
        return self.server.ask(f"/v1/jobs/{id}/{what}", raw=b"", method="POST", key=self.keys[key])[0]

    def readable_text(self, id, key="one"):
        """All data of a job that a client can read."""
        return "".join(self.server.ask(f"/v1/jobs/{id}{part}", key=self.keys[key])[1] for part in ("", "/log", "/results"))

    def end(self, id, key="one"):
        """The job when it has ended; waits up to minutes."""
        for _ in range(3000):
            job = self.job(id, key)
            if job["state"] in ("done", "failed", "cancelled"):
                return job
            time.sleep(0.05)
        return job

    def run(self, kind, args=(), key="one", **options):
        status, job = self.start(kind, args, key, **options)
        return self.end(job["id"], key) if status == 201 else job

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop()
        os.chdir(self.before)
        shutil.rmtree(self.top, ignore_errors=True)

    def escaped(self):
        """Files that exist and must not."""
        names = [n for n in os.listdir(self.path("outside")) if n.startswith("escaped")]
        return names + [n for d in ("", "srv", "work", "tmp", "home") for n in os.listdir(self.path(d)) if "escaped" in n]


def expect_refused(g, name, kind, args=(), key="one", field=None, status=400, **options):
    got, body = g.start(kind, args, key, **options)
    error = body.get("error", {})
    good = got == status and (field is None or error.get("param") == field)
    report(f"jobs: {name}", good or f"{got}: {json.dumps(body)}")


def requests_refused(g):
    tiny = {"max_steps": 1, "r": 2, "k": 2}
    outside = g.path("outside/escaped")
    for i, reward in enumerate(("shell:id", "command:id", "shell:", "SHELL:id", "exact;id", "plugin:x.so")):
        expect_refused(g, f"a reward that is a command is refused ({i + 1})", "train", [MODEL], method="rloo", data="fry:pick",
                reward=f"{reward} >{outside}; yes 1", out="x", field="reward", **tiny)
    expect_refused(g, "a policy program is refused", "world", policy_pipe="id", field="policy-pipe")
    expect_refused(g, "an environment program is refused", "world", [MODEL], env_pipe="id", field="env-pipe")
    expect_refused(g, "a settings file is refused", "world", config="x.conf", field="config")
    expect_refused(g, "--runs cannot be set", "train", [MODEL], data="data.jsonl", out="x", runs=outside, field="runs")
    expect_refused(g, "--store cannot be set", "eval", [MODEL], store=outside, field="store")
    expect_refused(g, "--cache-folder cannot be set", "ask", [MODEL, "x"], cache_folder=outside,
            field="cache-folder")
    for bad in (outside, "../escaped", "a/b", ".", "..", ".x", "-x", "", "x" * 65, "ä", "a\nb"):
        for alias in ("out", "output-dir", "output_dir"):
            status, body = g.send({"kind": "train", "args": [MODEL], "options": {"data": "data.jsonl", alias: bad}})
            report(f"jobs: {alias} is a name and not {bad[:12]!r}", status == 400 and body["error"]["param"] == "out" or body)
    expect_refused(g, "a value of log-samples is a name", "eval", [MODEL], tasks="pick", n=1, items=outside, field="log-samples")
    expect_refused(g, "--report is a name", "debate", [MODEL], tasks="pick", n=1, report=outside, field="report")
    expect_refused(g, "--record is a name", "world", record=outside, field="record")
    expect_refused(g, "OUT of quantize is a name", "quantize", [MODEL, outside + ".gguf"], type="q8_0", field="args")
    expect_refused(g, "the name of a trained adapter is no path", "train", [MODEL], data=["../../escaped=data.jsonl"], out="x",
            field="data")
    expect_refused(g, "out is not given twice by two names", "train", [MODEL], data="data.jsonl", out="x", output_dir="y",
            field="output-dir")
    expect_refused(g, "more threads than the machine has are refused", "eval", [MODEL], threads=1000, field="threads")
    expect_refused(g, "an unknown option is refused", "train", [MODEL], data="data.jsonl", out="x", nonsense=1,
            field="nonsense")
    closed = ["/etc/passwd", "/proc/self/environ", "/dev/zero", g.path("outside/secret.jsonl"), "../outside/secret.jsonl",
              "link.jsonl", "linked/secret.jsonl", "pipe.jsonl", ".env", ".ssh/id.txt", "deploy.pem", "./work/../.env",
              g.path("srv/state/serve.db"), g.path("srv/state/jobs.db"), g.path("srv/state/token"), g.path("srv/state"),
              g.path("srv/runs/shoal.db"), g.path("home/.bash_history"), g.path("home/notes.txt"), "missing.jsonl",
              "/", "..", "", "data.jsonl\0", "data.jsonl/"]
    for path in closed:
        for value in (path, "a=" + path):
            status, body = g.start("train", [MODEL], data=[value], out="x")
            report(f"jobs: data may not be {value.replace(g.top, '')!r}", status == 400 or body)
    for name, more in (("model", {"data": "data.jsonl"}), ("start", {"data": "data.jsonl"})):
        status, body = g.start("train", [], **{name: g.path("outside"), "out": "x"}, **more)
        report(f"jobs: {name} outside is refused", status == 400 or body)
    expect_refused(g, "a model outside is refused", "eval", [g.path("outside")], field="args")
    expect_refused(g, "an adapter outside is refused", "eval", [MODEL], adapters=[g.path("outside")], field="adapter")
    expect_refused(g, "tasks outside are refused", "eval", [MODEL], tasks="pick," + g.path("outside/secret.jsonl"), field="tasks")


def inputs_work(g):
    for name, options in (("a relative path", {"data": "data.jsonl"}), ("an absolute one", {"data": g.path("work/data.jsonl")}),
                          ("a link inside", {"data": "inner.jsonl"}), ("names", {"data": ["a=data.jsonl", "b=data.jsonl"]}),
                          ("a built-in source", {"data": "fry:pick:4", "method": "rloo", "k": 2, "max_new_tokens": 2})):
        job = g.run("train", [MODEL], **options, out="good", max_steps=1, r=2, grad_accum=1)
        report(f"jobs: training reads {name}", job.get("state") == "done" or json.dumps(job))
    job = g.run("train", ["good.yaml"], out="good")
    report("jobs: a recipe works", job.get("state") == "done" or json.dumps(job))
    job = g.run("eval", [MODEL], tasks="pick,questions.jsonl", adapters=["adapters/critic"], n=1, items="items.jsonl")
    report("jobs: an evaluation works", job.get("state") == "done" or g.readable_text(job["id"]))
    report("jobs: a result is private to the user",
           os.stat(g.path("srv/state/out/items.jsonl")).st_mode & 0o077 == 0 or "others can read it")


def files_confined(g):
    """Paths inside a file that a job may read are checked by the same rules, and secrets in it are not quoted."""
    cases = [("a recipe's out", "train", ["evil-out.yaml"], {}),
             ("a recipe's runs", "train", ["evil-runs.yaml"], {"out": "x1"}),
             ("a recipe's data", "train", ["evil-data.yaml"], {"out": "x2"}),
             ("a recipe's name of an adapter", "train", ["evil-name.yaml"], {"out": "x3"}),
             ("a recipe's reward", "train", ["evil-reward.yaml"], {"out": "x4"}),
             ("a recipe's data in the state", "train", ["evil-state.yaml"], {"out": "x5"}),
             ("a team's adapter", "debate", [MODEL], {"team": "evil-team.yaml", "tasks": "pick", "n": 1}),
             ("a team's protocol", "debate", [MODEL], {"team": "evil-protocol.yaml", "tasks": "pick", "n": 1}),
             ("a task's file", "eval", [MODEL], {"tasks": "evil-task.yaml", "n": 1}),
             ("a persona's file", "evolve", ["evil-evolve.yaml"], {})]
    for name, kind, args, options in cases:
        job = g.run(kind, args, **options)
        quoted = SECRET in g.readable_text(job["id"]) if "id" in job else False
        report(f"jobs: {name} outside fails", (job.get("state") == "failed" and not quoted) or json.dumps(job))
    report("jobs: no file was written outside", not g.escaped() or g.escaped())


def knowledge_and_conversations(g):
    """A knowledge base of the operator can be read and does not change; conversations belong to their key."""
    g.write_file("work/note.txt", "the zebra has four stripes\n")
    subprocess.run([SHOAL, "knowledge", "add", "notes.db", "note.txt", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    before = sorted(os.listdir("."))
    ask = {"agents": 1, "iterations": 1, "max_tokens": 2, "facts": "rules", "conversation": "me", "board": True}
    job = g.run("ask", [MODEL, "which stripes has the zebra?"], knowledge="notes.db", **ask)
    report("jobs: a knowledge base is read", "four stripes" in g.readable_text(job["id"]) if "id" in job else job)
    report("jobs: and no file is written next to it", sorted(os.listdir(".")) == before or os.listdir("."))
    for base in ("srv/state/serve.db", "srv/runs/calls.db", "srv/state/jobs.db"):
        expect_refused(g, f"{base} is no knowledge base", "ask", [MODEL, "x"], knowledge=g.path(base), field="knowledge")
    for key, name, expected in (("one", "me", True), ("two", "me", False), ("two", "key-1/me", False)):
        job = g.run("ask", [MODEL, "hello"], key, **{**ask, "conversation": name})
        got_it = "zebra" in g.readable_text(job["id"], key)
        report(f"jobs: conversation {name} of key {key} is its own", got_it == expected or g.readable_text(job["id"], key))


def results_owned(g):
    small = {"policy": "rule", "steps": 1, "maps": 1, "agents": 2}
    record = {"steps": 1, "agents": 2, "record": "mine.jsonl"}
    job = g.run("world", **record)
    report("jobs: a result has an owner", job.get("state") == "done" or json.dumps(job))
    expect_refused(g, "another key does not replace it", "world", key="two", status=409, **record)
    report("jobs: its own key replaces it", g.run("world", **record).get("state") == "done")
    g.server.ask(f"/v1/jobs/{job['id']}", method="DELETE", key=g.keys["one"])
    expect_refused(g, "also when the job is deleted", "world", key="two", status=409, **record)
    os.makedirs(g.path("srv/state/out/foreign"))
    expect_refused(g, "a file that no job has written is not replaced", "train", [MODEL], data="data.jsonl", out="foreign", status=409)
    expect_refused(g, "a served adapter is not replaced", "train", [MODEL], data="data.jsonl", out="critic", status=409)
    expect_refused(g, "a served adapter is not replaced by the alias", "train", [MODEL], data="data.jsonl", output_dir="critic",
            status=409)
    job = g.run("train", [MODEL], key="admin", data="data.jsonl", out="critic", max_steps=1, r=2, grad_accum=1)
    report("jobs: a key with the scope admin may replace it", job.get("state") == "done" or json.dumps(job))
    status, first = g.send({"kind": "world", "options": small}, "one")
    headers = {"Idempotency-Key": "same"}
    ids = {json.loads(g.server.ask("/v1/jobs", {"kind": "world", "options": small}, key=g.keys[k], headers=headers)[1])["id"]
           for k in ("one", "two", "one")}
    report("jobs: idempotency keys are separate for each key", len(ids) == 2 or ids)
    long_jobs = g.start("world", steps=1000000, maps=100000, policy="rule")[1], g.start("world", steps=1000000, maps=100000)[1]
    codes = [g.start("world", **small)[0] for _ in range(101)]
    report("jobs: a key may have a hundred in the queue", codes[-1] == 429 and set(codes[:-1]) == {201} or set(codes))
    report("jobs: another key may still submit", g.start("world", key="two", **small)[0] == 201)
    for job in long_jobs:
        g.post_action(job["id"], "cancel")


def process_confined(g):
    """The kernel confines the process if it supports that, and the process does not inherit the server's variables."""
    job = g.start("world", steps=1000000, maps=100000, policy="rule")[1]
    while g.job(job["id"])["state"] == "queued":
        time.sleep(0.02)
    time.sleep(0.2)
    pid = g.job(job["id"]).get("pid")
    status = open(f"/proc/{pid}/status").read()
    names = [v.split(b"=")[0].decode() for v in open(f"/proc/{pid}/environ", "rb").read().split(b"\0") if v]
    limits = open(f"/proc/{pid}/limits").read()
    known = {"PATH", "HOME", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "TMPDIR", "SHOAL_CPU", "SHOAL_CACHE",
             "XDG_CACHE_HOME", "SHOAL_PROGRESS", "SHOAL_CONFIG", "SHOAL_JOB"}
    others = [n for n in names if n not in known and not n.startswith("LC_") and not n.endswith("SAN_OPTIONS")]
    report("jobs: the process gets only known environment variables", not others or others)
    report("jobs: the process writes no core file", re.search(r"Max core file size +0 +0", limits) is not None or limits)
    if "landlock" in open(g.server.log).read():
        skip("jobs: the kernel confines the process", "this kernel has no landlock")
    else:
        report("jobs: the kernel confines the process", "NoNewPrivs:\t1" in status or "it does not")
    g.post_action(job["id"], "cancel")


def commands_confined():
    """With --jobs-run-commands a reward runs in the sandbox, for any request and recipe, and cannot read the server's
    files.
    """
    tiny = {"max_steps": 1, "r": 2, "k": 2, "grad_accum": 1, "max_new_tokens": 2}
    with JobServer("--jobs-run-commands") as g:
        expect_refused(g, "programs of worlds are refused also with --jobs-run-commands", "world", policy_pipe="id", field="policy-pipe")
        for name, value in (("reward_sandbox", False), ("reward_network", True), ("reward_write", [g.path("outside")]),
                            ("reward_read", [g.path("outside")])):
            expect_refused(g, f"{name} cannot be set", "train", [MODEL], method="rloo", data="fry:pick", reward="shell:id", out="y",
                    field=name.replace("_", "-"), **{name: value}, **tiny)
        numbers = "cat >/dev/null; echo 1; echo 0"
        read_attempts = f"for f in {g.server.state}/token {g.server.state}/serve.db {g.path('work')}/data.jsonl; do if cat $f; then exit 7; fi; done"
        job = g.run("train", [MODEL], method="rloo", data="fry:pick:4", out="seen", reward=f"shell:{read_attempts} >/dev/null 2>&1; {numbers}", **tiny)
        readable_text = g.readable_text(job.get("id", "")) if "id" in job else json.dumps(job)
        if "bwrap" in readable_text or "bubblewrap" in readable_text:
            return skip("jobs: commands cannot read the server's files", readable_text)
        report("jobs: a reward command cannot read the server's files", job.get("state") == "done" or readable_text)
        for i, more in enumerate(("temperature: 1", "reward_sandbox: false", "reward_network: true", f"reward_write: [{g.path('outside')}]",
                                  f"reward_read: [{g.server.state}]")):
            g.write_file(f"work/recipe{i}.yaml", f"model: {MODEL}\ndata: [fry:pick:4]\nmethod: rloo\npolicy:\n  {more}\n  k: 2\n  reward: 'shell:{numbers}'\n"
                  "train: {max_steps: 1, r: 2, grad_accum: 1}\n")
            job = g.run("train", [f"recipe{i}.yaml"], out=f"r{i}")
            if i == 0:
                report("jobs: a recipe's reward command runs", job.get("state") == "done" or json.dumps(job))
            else:
                report(f"jobs: a recipe cannot loosen a command's sandbox ({more.split(':')[0]})",
                       job.get("state") == "failed" and any(w in job["note"] for w in ("may not set", "in a job", "not for jobs"))
                       or json.dumps(job))
    return None


def processes(name):
    """Processes whose command line contains the word."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                readable_text = f.read().split(b"\0")
        except OSError:
            continue
        if name.encode() in readable_text and int(pid) != os.getpid():
            found.append(int(pid))
    return found


def wait_until_gone(name):
    for _ in range(100):
        if not processes(name):
            return True
        time.sleep(0.1)
    return processes(name)


def nothing_survives():
    """With --jobs-run-commands: processes that a reward starts end with its job, for any end of it."""
    seconds = {how: str(98000 + os.getpid() % 900 + i * 1000) for i, how in enumerate(("cancel", "delete", "stop", "kill -9"))}
    reward = "shell:setsid sleep {0} & (setsid setsid sleep {0} &) ; cat >/dev/null; sleep {0}"
    for how, number in seconds.items():
        with JobServer("--jobs-run-commands") as g:
            status, job = g.start("train", [MODEL], method="rloo", data="fry:pick:4", reward=reward.format(number), out="x",
                                  max_steps=1, r=2, k=2, grad_accum=1, max_new_tokens=2, reward_timeout=600)
            if status != 201:
                return report("jobs: --jobs-run-commands takes a reward", json.dumps(job))
            for _ in range(300):
                state = g.job(job["id"])["state"]
                if len(processes(number)) >= 3 or state in ("failed", "done"):
                    break
                time.sleep(0.1)
            if len(processes(number)) < 3:
                readable_text = g.readable_text(job["id"])
                if "sandbox" in readable_text or "bwrap" in readable_text:
                    return skip("jobs: no process survives", readable_text)
                return report("jobs: a reward runs with --jobs-run-commands", readable_text)
            if how in ("cancel", "delete"):
                g.post_action(job["id"], "cancel")
                g.end(job["id"])
            if how == "delete":
                g.server.ask(f"/v1/jobs/{job['id']}", method="DELETE", key=g.keys["one"])
            if how == "stop":
                g.server.stop()
            if how == "kill -9":
                g.server.process.kill()
                g.server.process.wait()
            report(f"jobs: nothing survives {how}", wait_until_gone(number))


def main():
    with JobServer() as g:
        requests_refused(g)
        inputs_work(g)
        files_confined(g)
        knowledge_and_conversations(g)
        process_confined(g)
        results_owned(g)
        report("jobs: no file was written outside by any request", not g.escaped() or g.escaped())
        report("jobs: the server still answers", g.server.alive() and g.server.ask("/health")[0] == 200)
    nothing_survives()
    commands_confined()


if __name__ == "__main__":
    sys.exit(main())
