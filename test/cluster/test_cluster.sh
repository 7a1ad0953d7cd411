#!/bin/sh
# test_cluster: commands on a cluster of processes of this machine have the results of the same commands without one, also
# while nodes are killed, and with a node with wrong results; no process is left. Prints "ok NAME", "not ok NAME: why" and "skip
# NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip cluster: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
SHOAL=${SHOAL:-build/shoal}
for i in 1 2; do
    "$SHOAL" adapter new --model test/models/fry-1 --rank 2 --seed $i "$tmp/new$i" --quiet 2>/dev/null
    "$SHOAL" adapter blend --model test/models/fry-1 --operator noise_absolute --parents "$tmp/new$i" --child "$tmp/founder$i" --step 0.05 --seed $i >/dev/null 2>&1
done
cat >"$tmp/evolve.yaml" <<YAML
model: test/models/fry-1
personas: [one=$tmp/founder1, two=$tmp/founder2]
tasks: [copy]
rounds: 0
chain_of_thought: false
test_items: 20
evolve: {generations: 2, population: 4, rank: 2}
fitness: {items: 10}
YAML
SHOAL=$SHOAL TMP_DIR=$tmp python3 - <<'END'
import json, os, re, signal, subprocess, sys, threading, time

sys.path.insert(0, "test/cluster")
from processes import nodes_of

SHOAL, TMP, MODEL = os.environ["SHOAL"], os.environ["TMP_DIR"], "test/models/fry-1"
runs = 0


def check(name, good, why=""):
    print(f"ok {name}" if good else f"not ok {name}: {str(why)[:500]}", flush=True)


def command(args):
    """The command with a new store, so that nothing is taken from an earlier one."""
    global runs
    runs += 1
    store = "--runs" if args[0] == "evolve" else "--store"
    return [SHOAL, *args, "--json", store, f"{TMP}/store-{runs}"]


def comparable(v):
    """Without times and what depends on the place of the computation."""
    if isinstance(v, dict):
        return {k: comparable(x) for k, x in v.items() if k not in ("seconds", "joules", "joules_per_token", "timestamp", "manifest", "run", "cost")}
    return [comparable(x) for x in v] if isinstance(v, list) else v


def result(p):
    out, err = p.communicate(timeout=300)
    lines = [json.loads(x) for x in out.splitlines()]
    if "computed here" in err:  # the result is right then too, but not that of the nodes
        return -1, [], err
    return p.returncode, [comparable(x) for x in lines if "task" in x or "run" in x or "name" in x], err


def start(args):
    return subprocess.Popen(command(args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition, seconds=60):
    end = time.time() + seconds
    while time.time() < end:
        v = condition()
        if v:
            return v
        time.sleep(0.02)
    return None


EVAL = ["eval", MODEL, "--tasks", "pick,order", "--n", "400", "--exact"]
code, alone, err = result(start(EVAL))
check("eval without a cluster", code == 0, err)

for name, more in (("two nodes", ["local:2"]), ("four nodes, by adapters", ["local:4", "--balancer", "adapter"]),
                   ("two nodes with a memory limit", ["local:2", "--max-memory", "400M"]),
                   ("three nodes that vote", ["local:3", "--replicas", "3"]),
                   ("four nodes that commit", ["local:4", "--replicas", "4", "--verify", "pbft"])):
    code, got, err = result(start([*EVAL, "--cluster", *more]))
    check(f"eval on {name} has the same result", code == 0 and got == alone and "warning" not in err, err or got)

for name, args in (
        ("debate", ["debate", MODEL, "--team", "examples/team.yaml", "--tasks", "pick", "--n", "40", "--exact"]),
        ("evolve", ["evolve", f"{TMP}/evolve.yaml", "--exact", "--id", "same"])):
    code, one, err = result(start(args))
    check(f"{name} without a cluster", code == 0, err)
    code, two, err = result(start([*args, "--cluster", "local:2"]))
    check(f"{name} on two nodes has the same result", code == 0 and one == two, err or (one, two))

# kills: at random times, until the end
p, killed = start([*EVAL[:5], "1500", "--exact", "--cluster", "local:3"]), 0
q = start([*EVAL[:5], "1500", "--exact"])
deadline = time.time() + 240
while p.poll() is None and time.time() < deadline:
    pids = sorted(nodes_of(p.pid))
    if len(pids) == 3 and killed < 20:
        time.sleep(0.3)
        try:
            os.kill(pids[killed % 3], signal.SIGKILL)
            killed += 1
        except ProcessLookupError:
            pass
    time.sleep(0.05)
code, got, err = result(p)
check(f"the same result while nodes are killed ({killed} kills)", code == 0 and killed > 1 and got == result(q)[1], err)

# a killed replica comes back with another key
p, killed = start([*EVAL, "--cluster", "local:4", "--replicas", "4", "--verify", "pbft", "--n", "1500"]), []
pids = until(lambda: (lambda v: v if len(v) == 4 else None)(sorted(nodes_of(p.pid))))
time.sleep(0.5)
if pids and p.poll() is None:
    os.kill(pids[1], signal.SIGKILL)
    killed.append(pids[1])
code, got, err = result(p)
check("four nodes that commit have the same result while one is killed", code == 0 and killed and got == result(start([*EVAL, "--n", "1500"]))[1], (killed, err))
check("the report has the keys of the replicas", "committed by 4 replicas, 0 of them caught" in err and err.count(", key ") == 4, err)

# a faulty node
p = start([*EVAL, "--cluster", "local:3", "--replicas", "3", "--n", "6000"])
words = until(lambda: next(iter(nodes_of(p.pid).values()), None))
address = words[words.index("--join") + 1] if words else ""
faulty = subprocess.Popen([sys.executable, "test/cluster/faulty_node.py", address, "120"], stdout=subprocess.PIPE, text=True)
code, got, err = result(p)
units = int(faulty.communicate(timeout=130)[0])
check("a node with wrong results is outvoted, and named", code == 0 and units > 0 and "node 'faulty' is quarantined" in err and
      got == result(start([*EVAL, "--n", "6000"]))[1], (units, err))

# the end of the program ends its nodes
p = start([*EVAL, "--cluster", "local:2", "--n", "1500"])
pids = until(lambda: (lambda v: v if len(v) == 2 else None)(list(nodes_of(p.pid))))
p.kill()
p.wait()
check("the nodes of a killed program end", bool(pids) and until(lambda: not any(os.path.exists(f"/proc/{i}") for i in pids)), pids)
check("no file is left", not [f for f in os.listdir("/tmp") if f.startswith("shoal-adapter-")], os.listdir("/tmp"))

for args, says in ((["local:0"], "local:N"), (["local:99"], "local:N"), (["nats"], "nats://HOST"), (["local:2x"], "local:N"),
                   (["local:2", "--replicas", "3"], "2 nodes"), (["local:2", "--balancer", "best"], "balancer"),
                   (["local:4", "--verify", "best"], "majority or pbft"), (["local:4", "--replicas", "3", "--verify", "pbft"], "--replicas 4 to 7")):
    code, _, err = result(start([*EVAL, "--cluster", *args]))
    check(f"--cluster {' '.join(args)} is refused", code == 2 and says in err, (code, err))
p = subprocess.run([SHOAL, "node", MODEL], capture_output=True, text=True)
check("a node without an address is refused", p.returncode == 2 and "--join" in p.stderr, p.stderr)
p = subprocess.run([SHOAL, "node", MODEL, "--join", "unix:/nonexistent"], capture_output=True, text=True)
check("a node without a bus says so", p.returncode == 1 and "/nonexistent" in p.stderr, p.stderr)
END
