"""train_serving: the slowdown of requests by a training in the process of the server.

usage: train_serving.py SHOAL MODEL DATA [--rounds 5] [--seconds 6] [SERVE OPTION …]

One server, one client that streams replies one after another. Each round measures it without a training and then with one (a
job with "in_process", paused between the rounds), so that both see the same load of the machine. Prints tokens per second and
seconds to the first token of each round, the medians over the rounds, their ratios, the steps of the training, and the memory
of the server before and during the training.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
import http.client
import urllib.parse

PROMPT = "Tell me what you know about the numbers from one to twenty, and which of them are odd."


class Server:
    def __init__(self, shoal, model, folder, more):
        self.p = subprocess.Popen([shoal, "serve", model, "--json", "--quiet", "--port", "0", "--state", f"{folder}/state", "--runs", f"{folder}/runs", *more],
                                  stdout=subprocess.PIPE, text=True)
        line = json.loads(self.p.stdout.readline())
        self.address, self.token = urllib.parse.urlparse(line["listening"]).netloc, open(line["token_file"]).read().strip()

    def call(self, path, body=None):
        c = http.client.HTTPConnection(self.address, timeout=600)
        c.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), {"Authorization": f"Bearer {self.token}"})
        v = json.loads(c.getresponse().read())
        c.close()
        assert "error" not in v, v
        return v

    def reply(self, i):
        """Seconds to the first token, seconds of all, number of tokens. Each prompt is new, so that no prefix is cached."""
        body = {"stream": True, "max_tokens": 64, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True},
                "messages": [{"role": "user", "content": f"{i}: {PROMPT}"}]}
        c = http.client.HTTPConnection(self.address, timeout=600)
        began, first, tokens = time.monotonic(), None, 0
        c.request("POST", "/v1/chat/completions", json.dumps(body))
        for line in iter(c.getresponse().readline, b""):
            if not line.startswith(b"data: {"):
                continue
            v = json.loads(line[6:])
            if first is None and any(choice["delta"].get("content") for choice in v["choices"]):
                first = time.monotonic() - began
            if v.get("usage"):
                tokens = v["usage"]["completion_tokens"]
        c.close()
        return first, time.monotonic() - began, tokens

    def memory(self):
        return {line.split(":")[0]: int(line.split()[1]) / 1024 for line in open(f"/proc/{self.p.pid}/status") if line.startswith(("VmRSS", "RssAnon"))}


def measure(server, seconds, count):
    """Tokens per second, and the median seconds to the first token."""
    end, firsts, tokens, began = time.monotonic() + seconds, [], 0, time.monotonic()
    while time.monotonic() < end:
        count[0] += 1
        first, _, n = server.reply(count[0])
        firsts.append(first)
        tokens += n
    return tokens / (time.monotonic() - began), statistics.median(firsts)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("shoal"), a.add_argument("model"), a.add_argument("data")
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--seconds", type=float, default=6)
    o, more = a.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        server, count, rounds = Server(o.shoal, o.model, folder, more), [0], []
        try:
            measure(server, 2, count)
            idle_memory, most = server.memory(), {}
            job = server.call("/v1/jobs", {"kind": "train", "in_process": True, "args": [o.model],
                                           "options": {"data": o.data, "out": "bench", "max-steps": 1000000, "save-steps": 0, "r": 8}})["id"]
            step = lambda: server.call(f"/v1/jobs/{job}").get("progress", {}).get("done", 0)
            while step() < 1:
                assert server.call(f"/v1/jobs/{job}")["state"] in ("queued", "running"), server.call(f"/v1/jobs/{job}")
                time.sleep(0.05)
            for i in range(o.rounds):
                server.call(f"/v1/jobs/{job}/pause", {})
                time.sleep(0.5)
                idle = measure(server, o.seconds, count)
                server.call(f"/v1/jobs/{job}/resume", {})
                time.sleep(0.5)
                before = step()
                busy = measure(server, o.seconds, count)
                steps = (step() - before) / o.seconds
                most = {k: max(v, most.get(k, 0)) for k, v in server.memory().items()}
                began, before = time.monotonic(), step()
                time.sleep(o.seconds / 2)
                alone = (step() - before) / (time.monotonic() - began)
                rounds.append((idle, busy, steps, alone))
                print(f"round {i + 1}: idle {idle[0]:.1f} tokens/s, first {1000 * idle[1]:.1f} ms; training {busy[0]:.1f} tokens/s, first {1000 * busy[1]:.1f} ms; "
                      f"{steps:.2f} steps/s, {alone:.2f} without requests", flush=True)
            median = lambda f: statistics.median(f(r) for r in rounds)
            print(f"median tokens/s {median(lambda r: r[0][0]):.1f} idle, {median(lambda r: r[1][0]):.1f} training: ratio {median(lambda r: r[1][0] / r[0][0]):.3f}")
            print(f"median first token {1000 * median(lambda r: r[0][1]):.1f} ms idle, {1000 * median(lambda r: r[1][1]):.1f} ms training: ratio {median(lambda r: r[1][1] / r[0][1]):.3f}")
            print(f"steps/s {median(lambda r: r[2]):.2f} under load, {median(lambda r: r[3]):.2f} without requests")
            print("memory, MB:", ", ".join(f"{k} {idle_memory[k]:.0f} to {most[k]:.0f}" for k in idle_memory), f"; load {os.getloadavg()[0]:.1f}")
        finally:
            server.p.terminate()
            server.p.wait()


main()
