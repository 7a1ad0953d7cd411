#!/usr/bin/env python3
"""sizes: which commands work, with their defaults, with models of 0.3 to 8 billion parameters on small machines.

    scripts/sizes.py [--write] [--strict] [SHOAL]

For every model, command and machine: whether it works by default, or the text of the refusal; the peak of its resident
memory and the plan that --dry-run prints; start, first token, tokens per second, and the time of the whole command.
Prints a Markdown table; --write puts it into docs/SIZES.md. The exit status is 1 if a command was killed or failed,
used more than 1.15 times its plan, or was refused on a machine that holds the weights and 2 GB; with --strict also
if a dry run and its run do not agree.

Models have random weights of the real shapes (`shoal model new`) and the tokenizer of models/fry. They never end a
reply, and their answers are wrong; memory and time are those of the real models. A machine is a memory control
group of that size, or RLIMIT_AS where control groups are not writable, and the table says which.

SIZES_MODELS="qwen3-0.6b llama3.2-1b:q8_0", SIZES_COMMANDS="chat serve", SIZES_MACHINES="8 0.5" (GB) limit the table.
SIZES_SECONDS (120) ends a longer command, which then counts as working. SIZES_DIR (build/sizes) holds one model at a
time, and results.jsonl: a row that is in it is not measured again, so an interrupted table continues.
"""
import contextlib
import http.client
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "docs", "SIZES.md")
BEGIN, END = "<!-- sizes: begin -->\n", "<!-- sizes: end -->\n"
MODELS = ("gemma3-270m:q8_0 smollm2-360m:q8_0 qwen3-0.6b:q4_0 llama3.2-1b:q4_k tinyllama-1.1b:q4_0 smollm2-1.7b:q4_0 "
          "qwen3-1.7b:q4_0 llama3.2-3b:q4_0 qwen3-4b:q4_0 gemma3-4b:q4_0 llama3.1-8b:q4_0")
COMMANDS = "chat serve train debate evolve eval world quantize merge"
MB = 1 << 20
REPLY_TOKENS = 32
DRY_SECONDS = 120  # of a dry run, or more with SIZES_SECONDS
PLAN_SLACK = 1.15
FREE_WITH_WEIGHTS = 2 << 30  # a machine with this much besides the weights must not refuse
RECIPE = """model: {model}
personas: [one={dir}/one.jsonl, two={dir}/two.jsonl]
tasks: [copy]
rounds: 1
max_tokens: 8
test_items: 4
train: {{r: 8, max_steps: 2, bsz: 1, grad_accum: 1, lr: 0.02}}
evolve: {{generations: 1, population: 2, elites: 1, rank: 8}}
fitness: {{items: 4}}
"""


class Machine:
    """A process started inside `enter` has at most `gb` of memory."""

    def __init__(self, gb):
        self.gb, self.bytes, self.group = gb, int(gb * (1 << 30)), None
        for parent, limit in self._groups():
            path = f"{parent}/shoal-sizes-{os.getpid()}-{gb}"
            try:
                os.mkdir(path)
            except OSError:
                continue
            try:
                with open(f"{path}/{limit}", "w") as f:
                    f.write(str(self.bytes))
                self.group = path
                return
            except OSError:
                os.rmdir(path)

    @staticmethod
    def _groups():
        """Folders that may hold a new control group, and the name of its limit: version 1, then 2."""
        with open("/proc/self/cgroup") as f:
            for line in f:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                if "memory" in controllers.split(","):
                    for at in (path, ""):
                        yield "/sys/fs/cgroup/memory" + at.rstrip("/"), "memory.limit_in_bytes"
                elif not controllers:
                    for at in (path, os.path.dirname(path), ""):
                        yield "/sys/fs/cgroup" + at.rstrip("/"), "memory.max"

    def __str__(self):
        return f"{self.gb:g} GB"

    @property
    def kind(self):
        return "memory control groups" if self.group else "RLIMIT_AS"

    def enter(self):
        """Runs in the child, before exec."""
        if self.group:
            with open(f"{self.group}/cgroup.procs", "w") as f:
                f.write(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_AS, (self.bytes, self.bytes))

    def close(self):
        if self.group:
            with contextlib.suppress(OSError):
                os.rmdir(self.group)


class Process:
    """A command inside a machine (None: this one), with the times of its output. Ended after `seconds`."""

    def __init__(self, machine, args, seconds, stdin=subprocess.DEVNULL, cwd=ROOT):
        self.err = tempfile.TemporaryFile()
        self.start = time.monotonic()
        self.late = False
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "SHOAL_CONFIG": ""}
        self.p = subprocess.Popen(args, stdin=stdin, stdout=subprocess.PIPE, stderr=self.err, cwd=cwd,
                                  preexec_fn=machine.enter if machine else None, env=environment)
        self.timer = threading.Timer(seconds, self._end)
        self.timer.start()

    def _end(self):
        self.late = True
        self.signal(signal.SIGKILL)

    def signal(self, number):
        # Not Popen's methods, which may reap the process: wait() needs its resource usage.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.p.pid, number)

    def read(self):
        """Reads stdout to its end: its text, and the times of its first and last piece after the start."""
        pieces, times = [], []
        while piece := os.read(self.p.stdout.fileno(), 1 << 16):
            pieces.append(piece)
            times.append(time.monotonic() - self.start)
        self.out = b"".join(pieces).decode("utf-8", "replace")
        self.first, self.last = (times[0], times[-1]) if times else (None, None)

    def messages(self):
        self.err.seek(0)
        return self.err.read().decode("utf-8", "replace")

    def wait(self):
        """Exit status (negative: a signal) and peak resident memory in bytes (VmHWM)."""
        _, status, usage = os.wait4(self.p.pid, 0)
        self.timer.cancel()
        self.p.stdout.close()
        self.p.returncode = os.waitstatus_to_exitcode(status)
        self.seconds = time.monotonic() - self.start
        self.peak = usage.ru_maxrss * 1024
        return self.p.returncode


def refusal(messages):
    """The command's last error message, without the name of the program."""
    lines = [x for x in messages.splitlines() if x.startswith("shoal")]
    text = lines[-1] if lines else (messages.strip().splitlines() or ["no message"])[-1]
    return re.sub(r"^shoal[ \w]*: ", "", text)


def plan_bytes(out, messages):
    """The bytes of the plan in a dry run's JSON, or in its line "memory: at most N MB", or None."""
    for line in out.splitlines():
        try:
            plan = json.loads(line)
        except ValueError:
            continue
        plan = plan.get("plan", plan.get("dry_run", plan)) if isinstance(plan, dict) else {}
        memory = plan.get("memory", {})
        if isinstance(memory, int):
            return memory
        parts = [memory[x] for x in ("used", "passes", "engine", "other") if x in memory] \
            if isinstance(memory, dict) else []
        if "total" in plan or parts:
            return plan.get("total") or memory.get("total") or sum(parts)
    found = re.search(r"memory: at most ([\d.]+) MB", messages)
    return int(float(found[1]) * MB) if found else None


class Bench:
    """One model in a folder, and its commands."""

    def __init__(self, shoal, folder, shape, quant, seconds):
        self.shoal, self.folder, self.seconds = shoal, folder, seconds
        self.name = f"{shape} {quant}"
        self.model = f"{folder}/{shape}.gguf"
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        self._quiet("model", "new", "--shape", shape, "--type", quant, "--tokenizer", "models/fry", self.model)
        for i in "12":
            self._quiet("adapter", "new", "--model", self.model, "--rank", "8", "--seed", i, f"{folder}/adapter{i}")
        for name, persona in (("one", "critic"), ("two", "explorer")):
            with open(f"{ROOT}/data/personas/{persona}.jsonl") as f, open(f"{folder}/{name}.jsonl", "w") as out:
                out.writelines(line for line, _ in zip(f, range(40)))
        with open(f"{folder}/recipe.yaml", "w") as f:
            f.write(RECIPE.format(model=self.model, dir=folder))

    def _quiet(self, *args):
        done = subprocess.run([self.shoal, *args, "--quiet"], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"sizes: shoal {' '.join(args)}: {done.stderr.strip()}")

    def arguments(self, command):
        model, at = self.model, self.folder
        return {
            "chat": ["chat", model, "--max-tokens", str(REPLY_TOKENS), "--store", f"{at}/calls.db"],
            "serve": ["serve", model, "--port", "0", "--state", f"{at}/state"],
            "train": ["train", model, "--data", f"{at}/one.jsonl", "--out", f"{at}/trained", "--max-steps", "1",
                      "--runs", f"{at}/runs"],
            "debate": ["debate", model, "--agents", f"{at}/adapter1", f"{at}/adapter2", "base", "--tasks", "copy",
                       "--n", "2", "--max-tokens", "8", "--store", f"{at}/calls.db"],
            "evolve": ["evolve", f"{at}/recipe.yaml", "--runs", f"{at}/runs"],
            "eval": ["eval", model, "--tasks", "copy", "--n", "4"],
            "world": ["world", model, "--agents", "2", "--steps", "5", "--generations", "1", "--eval-maps", "1",
                      "--runs", f"{at}/runs"],
            "quantize": ["quantize", model, f"{at}/quantized.gguf", "--type", "q8_0", "--tokens", "128"],
            "merge": ["adapter", "merge", model, f"{at}/adapter1", "--out", f"{at}/merged.gguf"],
        }[command]

    def row(self, command, machine):
        """One result. `works`: yes, refused, killed or failed; `text`: the refusal; times in seconds."""
        args = self.arguments(command)
        dry = Process(machine, [self.shoal, *args, "--dry-run", "--json"], max(self.seconds, DRY_SECONDS))
        dry.read()
        row = {"dry": dry.wait() if not dry.late else 0, "file": os.path.getsize(self.model)}
        row["plan"] = plan_bytes(dry.out, dry.messages()) if row["dry"] == 0 else None
        writes = re.search(r'"bytes of weights":(\d+)', dry.out)
        if writes and int(writes[1]) > shutil.disk_usage(self.folder).free * 0.8:
            return {**row, "works": "left out", "text": f"the result has {int(writes[1]) >> 30} GB, the disk less"}
        p = {"chat": self._chat, "serve": self._serve}.get(command, self._plain)(machine, args, row)
        code = p.wait()
        row.update(peak=p.peak, seconds=None if p.late or command == "serve" else round(p.seconds, 1), code=code)
        row["works"] = "yes" if code == 0 or p.late else "killed" if code < 0 else "refused" if code == 1 else "failed"
        if p.late:
            row["text"] = f"ended after {self.seconds:g} s"
        elif "no_reply" in row:
            row.update(works="failed", text=f"no reply: {row['no_reply']}")
        elif code:
            row["text"] = f"signal {-code}" if code < 0 else refusal(p.messages())
        for name in ("trained", "runs", "state", "merged.gguf", "quantized.gguf"):
            path = f"{self.folder}/{name}"
            shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.path.exists(path) and os.remove(path)
        return row

    def _plain(self, machine, args, row):
        p = Process(machine, [self.shoal, *args], self.seconds)
        p.read()
        return p

    def _chat(self, machine, args, row):
        with tempfile.TemporaryFile() as line:
            line.write(b"Hello, who are you?\n")
            line.seek(0)
            p = Process(machine, [self.shoal, *args], self.seconds, stdin=line)
        p.read()
        if p.first is not None and p.last > p.first:
            row.update(first=round(p.first, 2), tps=round((REPLY_TOKENS - 1) / (p.last - p.first), 1))
        return p

    def _serve(self, machine, args, row):
        """Start until it listens; then one streamed completion."""
        p = Process(machine, [self.shoal, *args], self.seconds)
        port = port_of(p)
        if port:
            row["start"] = round(time.monotonic() - p.start, 2)
            asked = time.monotonic()
            try:
                first, last = stream(port, "Hello, who are you?", REPLY_TOKENS)
                row.update(first=round(first - asked, 2), tps=round((REPLY_TOKENS - 1) / (last - first), 1))
            except (OSError, http.client.HTTPException) as problem:
                row["no_reply"] = str(problem)
            p.signal(signal.SIGTERM)
        p.read()
        return p


def port_of(server):
    """The port of a starting server, or None if it ended."""
    while True:
        found = re.search(r"listening on http://[\d.]+:(\d+)", server.messages())
        if found:
            return int(found[1])
        if select.select([server.p.stdout], [], [], 0.01)[0]:  # the end of its output
            return None


def stream(port, prompt, tokens):
    """The times of the first and the last generated token of `tokens`. prompt: text or token ids."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    times, text = [], b""
    for line in reply:
        text += line
        if b'"text"' in line:
            times.append(time.monotonic())
    if reply.status != 200 or len(times) < 2 or f'"completion_tokens":{tokens}'.encode() not in text.replace(b" ", b""):
        raise http.client.HTTPException(f"status {reply.status}: {text[-300:].decode('utf-8', 'replace')}")
    return times[0], times[-1]


def faults(row, machine, strict):
    """The defects that a row shows."""
    works, plan = row["works"], row["plan"]
    if works in ("killed", "failed"):
        yield f"{works}: {row.get('text')}"
    if works == "refused" and row["file"] + FREE_WITH_WEIGHTS <= machine.bytes:
        yield f"refused: {row['text']}"
    if works == "yes" and plan and row["peak"] > PLAN_SLACK * plan:
        yield f"peak {row['peak'] / MB:.0f} MB, plan {plan / MB:.0f} MB"
    if strict and works == "yes" and not plan:
        yield "the dry run prints no plan"
    if strict and works in ("yes", "refused") and (works == "yes") != (row["dry"] == 0):
        yield f"the dry run exits with {row['dry']}, the run: {works}"


def cell(row, notes):
    """A machine's cell: peak / plan in MB, or the failure, with a number of the notes below the table."""
    if not row:
        return ""
    plan = f"{row['plan'] / MB:.0f}" if row.get("plan") else "–"
    text = f"{row['peak'] / MB:.0f} / {plan}" if row["works"] == "yes" else row["works"]
    if row.get("text"):
        if row["text"] not in notes:
            notes.append(row["text"])
        text += f" ({notes.index(row['text']) + 1})"
    return text


def table(rows, models, commands, machines):
    """rows: {(model, command, GB): row} → lines of Markdown. Times are those of the smallest machine that works."""
    heads = ["model", "file, MB", "command", *(f"{m}: peak / plan, MB" for m in machines), "start, s", "first token, s",
             "tokens/s", "whole command, s"]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * 3 + "|---:" * (len(heads) - 3) + "|"
    notes = []
    for model in models:
        for command in commands:
            mine = [rows.get((model, command, m.gb)) for m in machines]
            timed = next((r for r in mine if r and r["works"] == "yes"), {})
            if any(mine):
                size = next(r["file"] for r in mine if r) / MB
                values = [model, f"{size:.0f}", command, *(cell(r, notes) for r in mine),
                          *(timed.get(x) for x in ("start", "first", "tps", "seconds"))]
                yield "| " + " | ".join("" if v is None else str(v) for v in values) + " |"
    if notes:
        yield ""
        yield from (f"{i}. {text}" for i, text in enumerate(notes, 1))


def about(shoal, machines):
    doctor = json.loads(subprocess.run([shoal, "doctor", "--json"], capture_output=True, text=True, check=True).stdout)
    with open("/proc/cpuinfo") as f:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", f.read(), re.M)
    wanted = r"avx2|avx512f|avx512_vnni|avx512_bf16|amx_int8|amx_bf16|f16c|asimd\w*"
    features = [x for x in (found[1].split() if found else []) if re.fullmatch(wanted, x)]
    return (f"Version {doctor['version']}, processor level {doctor['level']} ({' '.join(features)}), "
            f"{os.cpu_count()} cores, {doctor['memory_bytes'] / (1 << 30):.0f} GB of memory; machines are "
            f"{machines[0].kind}.")


def write_page(lines):
    with open(PAGE) as f:
        text = f.read()
    head, rest = text.split(BEGIN)
    with open(PAGE, "w") as f:
        f.write(head + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1])


def measure(rows, path, bench, command, machine):
    row = bench.row(command, machine)
    rows[bench.name, command, machine.gb] = row
    with open(path, "a") as f:
        f.write(json.dumps([bench.name, command, machine.gb, row]) + "\n")
    print(f"{bench.name} {command} {machine}: {cell(row, [])} {row.get('text', '')}", file=sys.stderr, flush=True)


def main():
    flags = [x for x in sys.argv[1:] if x.startswith("--")]
    if not set(flags) <= {"--write", "--strict"}:
        sys.exit(__doc__)
    shoal = os.path.abspath(next((x for x in sys.argv[1:] if x not in flags), f"{ROOT}/build/shoal"))
    folder = os.path.abspath(os.environ.get("SIZES_DIR", f"{ROOT}/build/sizes"))
    models = [(m + ":q4_0").split(":")[:2] for m in os.environ.get("SIZES_MODELS", MODELS).split()]
    commands = os.environ.get("SIZES_COMMANDS", COMMANDS).split()
    machines = [Machine(float(x)) for x in os.environ.get("SIZES_MACHINES", "8 16 24").split()]
    if set(commands) - set(COMMANDS.split()):
        sys.exit(f"sizes: no such command; there are {COMMANDS}")
    os.makedirs(folder, exist_ok=True)
    path = f"{folder}/results.jsonl"
    rows = {}
    if os.path.exists(path):
        with open(path) as f:
            rows = {(model, command, gb): row for model, command, gb, row in map(json.loads, f)}
    try:
        for shape, quant in models:
            missing = [(c, m) for c in commands for m in machines if (f"{shape} {quant}", c, m.gb) not in rows]
            if missing:
                bench = Bench(shoal, f"{folder}/model", shape, quant, float(os.environ.get("SIZES_SECONDS", "120")))
                for command, machine in missing:
                    measure(rows, path, bench, command, machine)
                shutil.rmtree(bench.folder)
    finally:
        for machine in machines:
            machine.close()
    names = [f"{shape} {quant}" for shape, quant in models]
    lines = [about(shoal, machines), "", *table(rows, names, commands, machines)]
    print("\n".join(lines))
    if "--write" in flags:
        write_page(lines)
    wrong = [f"{n} {c} {m}: {fault}" for n in names for c in commands for m in machines
             for fault in faults(rows[n, c, m.gb], m, "--strict" in flags)]
    print("\n".join(f"sizes: {x}" for x in wrong), end="\n" if wrong else "", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
