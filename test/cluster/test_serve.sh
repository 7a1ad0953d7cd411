#!/bin/sh
# test_serve: a server on a cluster has the replies of a server without one, streamed and not, with an adapter, log
# probabilities, stop texts and a grammar, also while nodes are killed or hang; a cancelled request ends at its node; no process is
# left. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip serve on a cluster: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
SHOAL=${SHOAL:-build/shoal}
"$SHOAL" adapter new --model test/models/fry-1 --rank 2 --seed 1 "$tmp/new" --quiet 2>/dev/null
for i in 1 2; do
    "$SHOAL" adapter blend --model test/models/fry-1 --operator noise_absolute --parents "$tmp/new" --child "$tmp/adapter$i" --step 0.05 --seed $i >/dev/null 2>&1
done
SHOAL=$SHOAL TMP_DIR=$tmp python3 - <<'END'
import json, os, re, signal, subprocess, sys, threading, time

sys.path[:0] = ["test/api", "test/cluster"]
import server
from processes import nodes_of
from server import check, failed

TMP, MODEL = server.TMP, "test/models/fry-1"
KILLS = int(os.environ.get("SHOAL_KILLS", "20"))


def until(condition, seconds=60):
    end = time.time() + seconds
    while time.time() < end:
        v = condition()
        if v:
            return v
        time.sleep(0.02)
    return None


class Server(server.Server):
    def __init__(self, name, *args):
        super().__init__(name, MODEL, "--adapter", f"one={TMP}/adapter1", "--exact", "--drain-seconds", "5", *args)
        self.token = open(f"{TMP}/{name}/token").read().strip()

    def said(self):
        return open(f"{TMP}/{self.name}.err").read()

    def open(self, path, body=None):
        c = super().open(path, body, self.token)
        return c, c.getresponse()

    def get(self, path, body=None):
        _, r = self.open(path, body)
        text = r.read().decode()
        return json.loads(text) if text.startswith("{") else text

    def nodes(self):
        """{name: pid} of its local nodes."""
        return {words[words.index("--name") + 1]: pid for pid, words in nodes_of(self.p.pid).items()}

    def up(self):
        return sorted(n["name"] for n in self.get("/v1/cluster")["nodes"] if n["state"] == "up" and n["usable"])

    def end(self):
        nodes = list(self.nodes().values())
        self.p.send_signal(signal.SIGTERM)
        code = self.p.wait(60)
        return code, until(lambda: not any(os.path.exists(f"/proc/{i}") for i in nodes)), len(nodes)


CHAT = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 40, "temperature": 1, "seed": 7}
LONG = {"prompt": "the", "max_tokens": 480, "temperature": 1, "ignore_eos": True, "loop_tokens": 0, "logprobs": 3}
ENDLESS = {**LONG, "logprobs": 1, "max_tokens": 1000, "context_shift": True}  # about 0.3 s
REQUESTS = {
    "a chat": ("/v1/chat/completions", CHAT),
    "an adapter": ("/v1/chat/completions", {**CHAT, "model": "one"}),
    "a mix of adapters": ("/v1/chat/completions", {**CHAT, "model": "one*0.5"}),
    "log probabilities": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3}),
    "greedy": ("/v1/chat/completions", {**CHAT, "temperature": 0}),
    "penalties": ("/v1/chat/completions", {**CHAT, "frequency_penalty": 0.5, "logit_bias": {"300": 5}}),
    "a stop text": ("/v1/completions", {**LONG, "seed": 3, "stop": ["e t"]}),
    "several replies": ("/v1/chat/completions", {**CHAT, "n": 3}),
    "a grammar": ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}}}}),
    "log probabilities of the prompt": ("/v1/completions", {"prompt": "one two three", "max_tokens": 4, "seed": 2, "echo": True, "logprobs": 2}),
    "a full context": ("/v1/completions", {**LONG, "seed": 4, "max_tokens": 600, "context_shift": True}),
}


def comparable(v):
    """Without ids, times and what depends on the state of a cache."""
    if isinstance(v, dict):
        return {k: comparable(x) for k, x in v.items() if k not in ("id", "created", "prompt_tokens_details", "timings")}
    return [comparable(x) for x in v] if isinstance(v, list) else v


def lines_of(response):
    return [line[6:] for line in (raw.decode().strip() for raw in response) if line.startswith("data: ")]


def joined(lines):
    """The content of a stream's events: text, log probabilities, finish reasons and usage; chunks may be divided anywhere."""
    texts, logprobs, finish, usage = {}, {}, {}, None
    for line in lines:
        if line == "[DONE]":
            continue
        event = json.loads(line)
        if "error" in event:
            return event
        usage = comparable(event.get("usage")) or usage
        for choice in event["choices"]:
            i = choice["index"]
            texts[i] = texts.get(i, "") + (choice.get("text") or choice.get("delta", {}).get("content") or "")
            for key, values in (choice.get("logprobs") or {}).items():
                logprobs.setdefault((i, key), []).extend(values or [])
            finish[i] = choice.get("finish_reason") or finish.get(i)
    return texts, logprobs, finish, usage, lines[-1:] == ["[DONE]"]


def stream(server, path, body):
    _, r = server.open(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    return joined(lines_of(r))


alone = Server("alone")
expected = {name: (comparable(alone.get(*r)), stream(alone, *r)) for name, r in REQUESTS.items()}
longs = {seed: stream(alone, "/v1/completions", {**ENDLESS, "seed": seed, "model": "one" if seed % 2 else "fry-1"}) for seed in range(4)}
check("the server without a cluster replies", all("choices" in whole and len(parts) == 5 for whole, parts in expected.values()) and
      all(usage["completion_tokens"] == 1000 for _, _, _, usage, _ in longs.values()), expected)
check("/v1/cluster without a cluster", alone.get("/v1/cluster")["error"]["code"] == "no_cluster")
check("one active node without a cluster", "murmurnet_active_nodes 1\n" in alone.get("/metrics"))

two = Server("two", "--cluster", "local:2", "--balancer", "round_robin")
check("two nodes join", until(lambda: len(two.up()) == 2), two.said())
check("two active nodes in the metrics", "murmurnet_active_nodes 2\n" in two.get("/metrics") and 'shoal_cluster_nodes{state="up"} 2\n' in two.get("/metrics"))
for name, r in REQUESTS.items():
    got = comparable(two.get(*r))
    check(f"{name}: the same reply", got == expected[name][0], (got, expected[name][0]))
    got = stream(two, *r)
    check(f"{name}: the same stream", got == expected[name][1], (got, expected[name][1]))
status = two.get("/v1/cluster")
check("nodes have computed", status["computed_here"] == 0 and sum(n["done"] for n in status["nodes"]) >= 2 * len(REQUESTS), status)

# an adapter that is loaded while the server runs
for s in (alone, two):
    s.get("/v1/load_lora_adapter", {"lora_name": "late", "lora_path": f"{TMP}/adapter2"})
late = ("/v1/chat/completions", {**CHAT, "model": "late"})
check("an adapter that is loaded later", stream(two, *late) == stream(alone, *late) and stream(two, *late) != expected["an adapter"][1])
check("nodes report adapters", until(lambda: any(len(n["adapters"]) >= 1 for n in two.get("/v1/cluster")["nodes"]), 20), two.get("/v1/cluster"))
e = two.get("/v1/embeddings", {"input": "a text"})
check("embeddings are computed by the server", e["data"] == alone.get("/v1/embeddings", {"input": "a text"})["data"])

# a client that goes away
before = sum(n["done"] for n in two.get("/v1/cluster")["nodes"])
c, r = two.open("/v1/completions", {**ENDLESS, "max_tokens": 4000, "seed": 1, "stream": True, "n": 4})
r.readline()
c.sock.close() if c.sock else None
r.close()
check("a cancelled request ends at its node", until(lambda: all(n["units"] == 0 for n in two.get("/v1/cluster")["nodes"])) and
      sum(n["done"] for n in two.get("/v1/cluster")["nodes"]) < before + 4, two.get("/v1/cluster"))
check("the nodes compute after that", stream(two, *late) == stream(alone, *late))

# a node that hangs in the middle of replies
results, begun = {}, threading.Barrier(5)


def long_stream(server, seed, key, barrier):
    _, r = server.open("/v1/completions", {**ENDLESS, "seed": seed, "model": "one" if seed % 2 else "fry-1", "stream": True, "stream_options": {"include_usage": True}})
    first = r.readline().decode().strip()
    barrier.wait(60)
    times, rest = [time.time()], []
    for raw in r:
        times.append(time.time())
        line = raw.decode().strip()
        if line.startswith("data: "):
            rest.append(line[6:])
    results[key] = joined([first[6:], *rest]), max(b - a for a, b in zip(times, times[1:]))


def streams(server, key, act):
    barrier = threading.Barrier(5)
    threads = [threading.Thread(target=long_stream, args=(server, seed, (key, seed), barrier)) for seed in range(4)]
    for t in threads:
        t.start()
    barrier.wait(60)
    act()
    for t in threads:
        t.join()
    return [seed for seed in range(4) if results[key, seed][0] != longs[seed]], max(results[key, seed][1] for seed in range(4))


pids = sorted(two.nodes().values())
wrong, gap = streams(two, "hang", lambda: os.kill(pids[0], signal.SIGSTOP))
os.kill(pids[0], signal.SIGCONT)
check("a node that hangs: the same streams", not wrong, (wrong, two.said()))
check("they were continued by the other node", two.get("/v1/cluster")["assigned_again"] > 0, two.get("/v1/cluster"))
code, gone, n = two.end()
check("SIGTERM ends the server and its nodes", code == 0 and gone and n == 2, (code, gone, n, two.said()))

# kills
three = Server("three", "--cluster", "local:3", "--balancer", "round_robin")
until(lambda: len(three.up()) == 3)
killed, bad, gaps = 0, [], []
for i in range(KILLS):
    until(lambda: len(three.up()) == 3 and len(three.nodes()) == 3)
    victim = sorted(three.nodes().items())[i % 3]
    wrong, gap = streams(three, i, lambda: os.kill(victim[1], signal.SIGKILL))
    gaps.append(gap)
    bad += [(i, seed, results[i, seed][0]) for seed in wrong]
status = three.get("/v1/cluster")
check(f"{KILLS} kills: the same streams (longest wait {max(gaps):.2f} s)", not bad and three.said().count("is dead") >= KILLS, (bad, three.said()[-300:]))
check("replies were continued by other nodes", status["assigned_again"] > KILLS // 2, status)  # a stream may end before the kill
check("no node is quarantined", all(n["state"] != "quarantined" for n in status["nodes"]) and "different tokens" not in three.said(), status)
for pid in three.nodes().values():
    os.kill(pid, signal.SIGKILL)
check("all nodes are killed: the same reply", comparable(three.get(*REQUESTS["a chat"])) == expected["a chat"][0], three.said()[-300:])
alone.end()
code, gone, n = three.end()
check("SIGTERM ends the server of three nodes", code == 0 and gone, (code, gone, n))
for args, says in ((["local:0"], "local:N"), (["local:2", "--balancer", "best"], "balancer")):
    p = subprocess.run([server.SHOAL, "serve", MODEL, "--port", "0", "--state", f"{TMP}/refused", "--cluster", *args], capture_output=True, text=True)
    check(f"--cluster {' '.join(args)} is refused", p.returncode == 2 and says in p.stderr, (p.returncode, p.stderr))
sys.exit(bool(failed))
END
