"""jobs_random: random job requests; in the file system only the server's state and runs change.

jobs_random.py [N [OPTION …]]: N requests (default 250): valid ones, valid ones in which options, arguments or the kind
are replaced at random (options of any command under any of their names, hostile paths), and recipes, teams and tasks
that refer to forbidden paths. At least 30 % must be accepted, and at least 20 % must succeed. OPTIONs are passed to the
server: with --jobs-run-commands the jobs run without landlock. JOBS_SEED selects other requests.
"""
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time

from attack import report
from jobs import MODEL, ROOT, SHOAL, JobServer

TOKEN = f"escaped{os.getpid()}"
KINDS = ("train", "evolve", "debate", "ask", "world", "eval", "quantize")
# Further names that a request may use for options: aliases, and options of all commands.
ALIASES = ["output-dir", "model-name-or-path", "base-model", "lora-r", "learning-rate", "num-generations", "adapters", "iter",
           "debug", "huggingface-model", "internal-model-path", "batch-size", "config", "help", "json", "quiet", "threads"]


def option_names():
    """{kind: names of its options}, from the program's help."""
    found = {}
    for kind in KINDS:
        text = subprocess.run([SHOAL, kind, "--help"], capture_output=True, text=True).stdout
        found[kind] = re.findall(r"^  --(?:\[no-\])?([a-z0-9-]+)", text, re.M)
    return found


class Requests:
    """Random requests for a JobServer."""

    def __init__(self, seed, job_server):
        self.rng = random.Random(seed)
        self.g, self.option_names = job_server, option_names()
        self.n_names = 0

    def name(self):
        """A new name for a result."""
        self.n_names += 1
        return f"r{self.n_names}"

    def valid(self):
        pick = self.rng.choice
        small_training = {"max-steps": pick([0, 1, 1]) or 1, "r": 2, "grad-accum": 1, "save-steps": 0}
        return pick([self.world, self.world, self.world, self.simulation, self.train, self.train_dry_run, self.quantize, self.eval, self.debate,
                     self.ask, self.evolve])(small_training)

    def world(self, _):
        options = {"policy": self.rng.choice(["rule", "random", ["reflex", "mock"]]), "steps": self.rng.randint(1, 4), "maps": 1,
                   "agents": 2, "seed": self.rng.randint(1, 99)}
        if self.rng.random() < 0.3:
            options = {"steps": 2, "agents": 2, "record": self.name() + ".jsonl"}
        return {"kind": "world", "args": [], "options": options}

    def simulation(self, _):
        return {"kind": "world", "args": [MODEL], "options": {"generations": 1, "steps": 2, "agents": 2, "held-out": 1, "size": 6,
                                                               "out": self.name()}}

    def train(self, small_training):
        options = {**small_training, "out": self.name(), "data": self.rng.choice(["data.jsonl", ["a=data.jsonl", "b=inner.jsonl"]])}
        if self.rng.random() < 0.2:
            options = {**small_training, "out": self.name(), "method": "rloo", "data": "fry:pick:2", "k": 2, "max-new-tokens": 1}
        return {"kind": "train", "args": [self.rng.choice([MODEL, "good.yaml"])] if "method" not in options else [MODEL],
                "options": options}

    def train_dry_run(self, small_training):
        return {"kind": "train", "args": [MODEL], "options": {**small_training, "data": "data.jsonl", "out": self.name(), "dry-run": True}}

    def quantize(self, _):
        return {"kind": "quantize", "args": [MODEL, self.name() + ".gguf"], "options": {"type": self.rng.choice(["q8_0", "q4_0"]), "tokens": 16,
                                                                                         "dry-run": self.rng.random() < 0.7}}

    def eval(self, _):
        options = {"tasks": self.rng.choice(["pick", "questions.jsonl", "pick,questions.jsonl"]), "n": 1}
        if self.rng.random() < 0.5:
            options["items"] = self.name()
        return {"kind": "eval", "args": [MODEL], "options": options}

    def debate(self, _):
        return {"kind": "debate", "args": [MODEL], "options": {"agents": ["base", "adapters/critic"], "tasks": "pick", "n": 1,
                                                                "samples": 0, "max-tokens": 1, "rounds": 1}}

    def ask(self, _):
        return {"kind": "ask", "args": [MODEL, "1 + 1 = ?"], "options": {"agents": 1, "iterations": 1, "max-tokens": 2}}

    def evolve(self, _):
        return {"kind": "evolve", "args": ["evolve.yaml"], "options": {"dry-run": self.rng.random() < 0.8, "seed": 3}}

    def path(self):
        g, escape = self.g, TOKEN + str(self.rng.randint(0, 9999))
        return self.rng.choice([
            g.path("outside", escape), "../outside/" + escape, "../" + escape, "/tmp/" + escape, "./" + escape, "a/../../" + escape,
            g.path("home", escape), os.path.join(ROOT, escape), "/etc/" + escape, g.path("srv/state", escape), "linked/" + escape,
            g.path("srv/state/out/../../..", escape), g.path("outside/secret.jsonl"), "link.jsonl", "pipe.jsonl", ".env", "..", "/",
            "/proc/self/environ", "/proc/1/environ", "/dev/stdin", g.path("srv/state/serve.db"), g.path("srv/runs/calls.db"),
            "data.jsonl", "inner.jsonl", MODEL, "adapters/critic", "critic", "evil-team.yaml", "evil-protocol.yaml", "evil-task.yaml",
            "work/../../work/data.jsonl", "\u202e" + escape, "ｄata.jsonl", "data.jsonl\n", "~/" + escape, "$HOME/" + escape,
            "file://" + g.path("outside", escape), "hf:../../" + escape, "hf:a/b", "-o" + escape, "--out=" + escape, "x" * 300, ""])

    def value(self, depth=0):
        pick, path = self.rng.choice, self.path
        return pick([path, path, path, lambda: f"{pick(['a', '..', '../../' + TOKEN, 'a/b', ''])}={path()}",
                     lambda: pick([-1, 0, 1, 2, 3, 0.5, 1e308, -2**63, True, False, None, {}, "", "7", "x", "all", "none", "seed"]),
                     lambda: pick([f"shell:touch {self.g.path('outside', TOKEN)}", f"command:touch {self.g.path('outside', TOKEN)}",
                                   f"sh -c 'touch {self.g.path('outside', TOKEN)}'", "regex:(", "exact"]),
                     lambda: [self.value(1) for _ in range(self.rng.randint(0, 3))] if depth == 0 else "x"])()

    def option(self, kind):
        name = self.rng.choice(self.option_names[self.rng.choice([kind] * 9 + list(KINDS))] + ALIASES)
        return self.rng.choice([name] * 6 + [name.replace("-", "_"), "no-" + name, "no_" + name, name.upper(), name[:-1], "--" + name])

    def mutated(self):
        v = self.valid()
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            what = self.rng.random()
            if what < 0.7:
                v["options"][self.option(v["kind"])] = self.value()
            elif what < 0.9:
                v["args"] = v["args"][:self.rng.randint(0, 2)] + [self.rng.choice(["export", "compare", self.path(), self.path()])]
            else:
                v["kind"] = self.rng.choice(KINDS)
        return v

    def forbidden_recipe(self):
        kind, args, options = self.rng.choice([
            ("train", [self.rng.choice(["evil-out.yaml", "evil-runs.yaml", "evil-data.yaml", "evil-name.yaml", "evil-state.yaml"])], {}),
            ("train", ["evil-reward.yaml"], {}), ("debate", [MODEL], {"team": "evil-team.yaml", "tasks": "pick", "n": 1}),
            ("debate", [MODEL], {"team": "evil-protocol.yaml", "topic": "x"}), ("eval", [MODEL], {"tasks": "evil-task.yaml", "n": 1}),
            ("evolve", ["evil-evolve.yaml"], {})])
        if kind == "train" and self.rng.random() < 0.8:
            options = {"out": self.name()}
        return {"kind": kind, "args": args, "options": options}

    def next(self):
        return self.rng.choice([self.valid] * 5 + [self.mutated] * 6 + [self.forbidden_recipe])()


def snapshot(top, excluded=()):
    """{path: what would show a change (mode, time of modification; of a file also its size and hash)} of everything in
    `top` except the paths in `excluded`."""
    found, stack = {}, [top]
    while stack:
        folder = stack.pop()
        for e in os.scandir(folder):
            if e.path in excluded or e.name in (".git", "__pycache__"):
                continue
            st = e.stat(follow_symlinks=False)
            if e.is_dir(follow_symlinks=False):
                stack.append(e.path)
                found[e.path] = ("folder", st.st_mode, st.st_mtime_ns)
            elif e.is_symlink():
                found[e.path] = ("link", os.readlink(e.path), st.st_mtime_ns)
            elif e.is_file():
                with open(e.path, "rb") as f:
                    found[e.path] = (st.st_size, st.st_mode, st.st_mtime_ns, hashlib.sha256(f.read()).hexdigest())
            else:
                found[e.path] = ("special", st.st_mode, st.st_mtime_ns)
    return found


def snapshot_all(g):
    found = snapshot(g.top, (g.path("srv/state"), g.path("srv/runs"), g.path("srv/stderr.txt")))
    found.update(snapshot(ROOT, (os.path.join(ROOT, "build"),)))
    return found


def stray_files(g):
    """Names that only a request of this test can have created, in directories that are quick to scan."""
    home = os.path.expanduser("~")
    places = {"/", "/tmp", "/etc", "/var/tmp", "/dev/shm", home, ROOT, g.before, g.top, g.path("srv"), g.path("srv/state")}
    return [os.path.join(p, n) for p in places if os.path.isdir(p) for n in os.listdir(p) if TOKEN in n]


def drain(g, key, unfinished, tally, max_unfinished):
    """Waits until at most max_unfinished of the jobs are unfinished. Counts the finished ones by their state and deletes
    them."""
    while len(unfinished) > max_unfinished:
        jobs = json.loads(g.server.ask("/v1/jobs", key=g.keys[key])[1])["jobs"]
        for job in jobs:
            if job["id"] in unfinished and job["state"] in ("done", "failed", "cancelled"):
                unfinished.discard(job["id"])
                tally[job["state"]] = tally.get(job["state"], 0) + 1
                if "--job-seconds" in job.get("note", ""):
                    tally["too long"] = tally.get("too long", 0) + 1
                g.server.ask("/v1/jobs/" + job["id"], method="DELETE", key=g.keys[key])
        if len(unfinished) > max_unfinished:
            time.sleep(0.05)


def main():
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 250
    options = sys.argv[2:]
    seed = int(os.environ.get("JOBS_SEED", "1"))
    began, tally, codes, unfinished = time.time(), {}, {}, set()
    with JobServer("--job-seconds", "5", *options) as g:
        requests = Requests(seed, g)
        before = snapshot_all(g)
        for i in range(n):
            request = requests.next()
            status, body = g.send(request)
            codes[status] = codes.get(status, 0) + 1
            if status == 201:
                unfinished.add(body["id"])
            elif status not in (400, 409):
                report(f"jobs: a random request is accepted or refused ({json.dumps(request)[:200]})", f"{status}: {body}")
            drain(g, "one", unfinished, tally, 30)
            if i % 1000 == 999:
                print(f"# {i + 1} requests, {time.time() - began:.0f} s, {codes}, {tally}", file=sys.stderr, flush=True)
        drain(g, "one", unfinished, tally, 0)
        after = snapshot_all(g)
        changed = sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))
        report(f"jobs: {n} random requests change nothing outside of the server's state", not changed or changed)
        report("jobs: random requests leave no files in system folders", not stray_files(g) or stray_files(g))
        accepted = codes.get(201, 0)
        report(f"jobs: {accepted} of {n} random requests are accepted, and enough of them succeed (seed {seed}, {codes}, "
               f"{tally}, {time.time() - began:.0f} s)",
               accepted >= 0.3 * n and tally.get("done", 0) >= 0.2 * n or "too few")
        report("jobs: the server still answers afterwards", g.server.alive() and g.server.ask("/health")[0] == 200)


if __name__ == "__main__":
    sys.exit(main())
