#!/bin/sh
# test_nats: a command on nodes that have joined a NATS server has the result of the command without a cluster, also while a
# node is killed and started again and while the server restarts. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why"
# lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
for needed in python3 nats-server; do
    command -v $needed >/dev/null 2>&1 || { echo "skip nats: $needed is not installed"; exit 0; }
done
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
SHOAL=${SHOAL:-build/shoal} TMP_DIR=$tmp python3 - <<'END'
import json, os, signal, socket, subprocess, time

SHOAL, TMP, MODEL = os.environ["SHOAL"], os.environ["TMP_DIR"], "test/models/fry-1"
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
ADDRESS = f"nats://127.0.0.1:{port}"
with open(f"{TMP}/nats.conf", "w") as f:
    f.write(f'listen: 127.0.0.1:{port}\nmax_payload: 8MB\njetstream {{store_dir: "{TMP}/store"}}\n')
started, runs = [], 0


def check(name, good, why=""):
    print(f"ok {name}" if good else f"not ok {name}: {str(why)[-500:]}", flush=True)


def start(command, **more):
    p = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **more)
    started.append(p)
    return p


def server():
    p = start(["nats-server", "-c", f"{TMP}/nats.conf"], stdout=subprocess.DEVNULL)
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return p
        except OSError:
            time.sleep(0.05)
    raise SystemExit("not ok nats: the server does not listen")


def node(name):
    return start([SHOAL, "node", MODEL, "--exact", "--join", ADDRESS, "--name", name, "--quiet"], stdout=subprocess.DEVNULL)


def evaluate(*more, n=300):
    global runs
    runs += 1
    return start([SHOAL, "eval", MODEL, "--tasks", "pick,order", "--n", str(n), "--exact", "--json", "--store", f"{TMP}/{runs}.db", *more],
                 stdout=subprocess.PIPE)


def result(p):
    out, err = p.communicate(timeout=300)
    rows = [json.loads(x) for x in out.splitlines() if '"task"' in x]
    for r in rows:
        for key in ("seconds", "joules", "joules_per_token", "manifest"):
            r.pop(key, None)
    return (p.returncode if "computed here" not in err else -1), rows, err


try:
    s = server()
    code, alone, err = result(evaluate())
    check("eval without a cluster", code == 0 and len(alone) == 2, err)
    nodes = [node("one"), node("two")]
    code, got, err = result(evaluate("--cluster", ADDRESS))
    check("eval on two nodes has the same result", code == 0 and got == alone, err)
    first, second = evaluate("--cluster", ADDRESS), evaluate("--cluster", ADDRESS)
    a, b = result(first), result(second)
    check("two commands share the nodes", a[0] == b[0] == 0 and a[1] == b[1] == alone, a[2] + b[2])

    whole = result(evaluate(n=6000))[1]
    p = evaluate("--cluster", ADDRESS, n=6000)
    time.sleep(7)  # the command has heard the nodes, which report every 5 s, and their units are in progress
    nodes[0].kill()
    nodes.append(node("three"))
    code, got, err = result(p)
    check("a node is killed, another one joins: the same result", code == 0 and got == whole, err)

    p = evaluate("--cluster", ADDRESS, n=6000)
    time.sleep(7)  # the command has heard the nodes, which report every 5 s, and their units are in progress
    s.kill()
    s.wait()
    time.sleep(1)
    s = server()
    code, got, err = result(p)
    check("the server is killed and started again: the same result", code == 0 and got == whole, err)

    code, got, err = result(evaluate("--cluster", ADDRESS, "--replicas", "2"))
    check("two nodes vote: the same result", code == 0 and got == alone, err)
    p = evaluate("--cluster", ADDRESS, n=6000)
    time.sleep(7)  # the command has heard the nodes, which report every 5 s, and their units are in progress
    nodes[1].send_signal(signal.SIGTERM)
    code, got, err = result(p)
    check("a node leaves: the same result", code == 0 and got == whole and nodes[1].wait(60) == 0, err)
    check("a node that leaves is not waited for", "'two' is dead: it has left" in err and "'two' is suspect" not in err, err)
    p = subprocess.run([SHOAL, "node", MODEL, "--join", "nats://127.0.0.1:1", "--quiet"], capture_output=True, text=True)
    check("a node without a server says so", p.returncode == 1 and "nats://127.0.0.1:1" in p.stderr, p.stderr)
finally:
    for p in started:
        p.kill()
END
