"""Memory: requests whose parsing, results, replies or stored data are large, in loops, together with a chat client. The
server's peak stays within --max-memory + 10 %, and if the system refuses memory, requests fail and the server survives.
ATTACK_ROUNDS (default 2) repeats the loop: 100 for a long run.
"""
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import attack
from attack import CHAT, COMPLETION, Server, report

ROUNDS = int(os.environ.get("ATTACK_ROUNDS", "2"))
MB = 1 << 20
LIMIT = 300 * MB
KEY, KEYED = "sk-attack", {"SHOAL_API_KEY": "sk-attack"}
USER = [{"role": "user", "content": "hi"}]
REFUSED = (400, 413, 429, 503)


def chat(**more):
    return {"messages": USER, "max_tokens": 8, **more}


def nested(n):
    """A call of an earlier turn whose arguments are a string of JSON: n empty objects."""
    arguments = "{\"a\":[" + "{}," * n + "{}]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, *USER]


def attacks():
    """(name, path, body or bytes, expected statuses)"""
    text, any_of = "lorem ipsum dolor " * 30, (200, *REFUSED)
    return [
        ("20 alternatives of prompts, twice", COMPLETION,
         {"prompt": [text] * 60, "max_tokens": 1, "echo": True, "logprobs": 20, "prompt_logprobs": 20}, any_of),
        ("the same of 8 prompts", COMPLETION,
         {"prompt": [text] * 8, "max_tokens": 1, "echo": True, "logprobs": 20, "prompt_logprobs": 20}, (200,)),
        ("2000 prompts with alternatives", COMPLETION,
         {"prompt": [text] * 2000, "max_tokens": 1, "echo": True, "logprobs": 20, "prompt_logprobs": 20}, REFUSED),
        ("128 replies with alternatives", CHAT, chat(n=128, max_tokens=400, logprobs=True, top_logprobs=20), REFUSED),
        ("a model's name of 2 MB", CHAT, chat(model="m" * 2 * MB), (400,)),
        ("a sum of names of 2 MB", CHAT, chat(model="fry-1*1+" + "m" * 2 * MB), (400,)),
        ("a user of 2 MB", CHAT, chat(user="u" * 2 * MB), (400,)),
        ("an adapter's name of 2 MB", "/v1/load_lora_adapter", {"lora_name": "x" * 2 * MB, "lora_path": "y"}, (400,)),
        ("a tool's name of 1 MB", CHAT, chat(tools=[{"type": "function", "function": {"name": "t" * MB}}],
                                            tool_choice="required"), (400,)),
        ("arguments of 12 MB that are JSON", CHAT, {"messages": nested(4_000_000)}, REFUSED),
        ("2 MB of empty objects", CHAT, b'{"messages":[' + b"{}," * 700_000 + b"{}]}", REFUSED),
        ("9 MB of one letter as tokens", "/tokenize", {"prompt": "a" * 9_000_000}, any_of),
        ("a prompt of 4 MB", COMPLETION, {"prompt": "word " * 800_000}, REFUSED),
        ("2048 embeddings", "/v1/embeddings", {"input": ["a b c"] * 2048}, any_of),
        ("a body of 31 MB", CHAT, b" " * 31 * MB, REFUSED),
    ]


def first_token(server):
    """Seconds until the first content of a streamed reply."""
    began = time.time()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as c:
        body = json.dumps(chat(stream=True, user="normal")).encode()
        c.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                  b"Authorization: Bearer sk-attack\r\nContent-Type: application/json\r\n"
                  b"Content-Length: %d\r\n\r\n" % len(body) + body)
        got = b""
        while b'"content":"' not in got.replace(b'"content":""', b""):
            piece = c.recv(65536)
            if not piece:
                raise RuntimeError("no token came: " + got[-200:].decode(errors="replace"))
            got += piece
        return time.time() - began


class BackgroundClient(threading.Thread):
    """A client that chats in a loop."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.seconds, self.failed, self.stopped = server, [], [], False
        self.start()

    def run(self):
        while not self.stopped:
            try:
                self.seconds.append(first_token(self.server))
            except (OSError, RuntimeError) as e:
                self.failed.append(str(e))
            time.sleep(0.05)

    def stop(self):
        self.stopped = True
        self.join()


def slow_reader(server, body):
    """Sends a request and does not read the reply."""
    c = socket.socket()
    c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    c.connect(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
              b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return c


def check_answer(server, name, path, body, right):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        status, text, _ = server.ask(path, raw=raw, key=KEY, timeout=120)
    except OSError as e:
        return f"{name}: {e}"
    if status not in right:
        return f"{name}: {status} {text[:120]}"
    if status != 200 and "message" not in json.loads(text)["error"]:
        return f"{name}: an error without a message"
    return ""


def loop():
    with Server("--max-memory", "300M", env=KEYED) as s:
        baseline = statistics.median(first_token(s) for _ in range(15))
        client, wrong, peaks = BackgroundClient(s), [], {}
        for _ in range(ROUNDS):
            for name, path, body, right in attacks():
                before = s.memory("VmHWM")
                wrong.append(check_answer(s, name, path, body, right))
                peaks[name] = max(peaks.get(name, 0), s.memory("VmHWM") - before)
        client.stop()
        peak, under_load = s.memory("VmHWM"), statistics.median(client.seconds)
        print(f"# peak {peak / MB:.0f} of {LIMIT / MB:.0f} MB; first token {baseline * 1e3:.1f} ms baseline, "
              f"{under_load * 1e3:.1f} under attack ({len(client.seconds)} of them)", flush=True)
        report("large requests in a loop get their status", "; ".join(w for w in wrong if w))
        report("a normal client is always answered meanwhile", "; ".join(client.failed[:3]))
        report("its first token comes in time", under_load < 2 * baseline + 1 or f"{under_load:.2f} s, baseline {baseline:.3f}")
        report("the peak is within --max-memory + 10 %", peak <= LIMIT * 1.1 or f"{peak / MB:.0f} MB: {peaks}")


def retained():
    """Stored data of requests, ratings first: 1 MB each, until they are refused."""
    with Server("--max-memory", "300M", "--max-feedback", "8M") as s:
        counts, sizes = {}, []
        for i in range(80):
            status, text, _ = s.ask(CHAT, {"messages": [{"role": "user", "content": "x " * 200 + str(i)}],
                                           "max_tokens": 1, "user": f"u{i}"})
            if status != 200:
                sizes.append(text[:80])
                continue
            reply = json.loads(text)["id"]
            for _ in range(20 if i == 0 else 1):
                rated = s.ask("/v1/feedback", {"id": reply, "rating": 1, "correction": "c" * 20_000})
                counts[rated[0]] = counts.get(rated[0], 0) + 1
        name = os.path.join(s.state, "ab.db")
        disk = sum(os.path.getsize(name + end) for end in ("", "-wal") if os.path.exists(name + end))
        report("chats are answered during ratings", "; ".join(sizes[:2]))
        report("a reply is rated 16 times, and a key's ratings end for the day",
               counts.get(200, 0) <= 8 * MB // 16 // 20_000 and counts.get(429, 0) >= 4 or str(counts))
        report("the file of ratings has its limit", disk < 8 * MB or f"{disk} bytes")


def slow_readers():
    with Server("--max-memory", "300M") as s:
        text = "lorem ipsum dolor " * 30
        body = {"prompt": [text] * 20, "max_tokens": 1, "echo": True, "logprobs": 20, "prompt_logprobs": 20}
        readers = [slow_reader(s, body if i % 4 != 3 else
                               {**{k: v for k, v in body.items() if k != "prompt_logprobs"}, "stream": True})
                   for i in range(60)]
        time.sleep(3)
        status, _, seconds = s.ask(CHAT, chat())
        peak = s.memory("VmHWM")
        report("slow readers hold no more than is reserved", peak <= LIMIT * 1.1 or f"{peak / MB:.0f} MB")
        report("a small request is answered meanwhile", status == 200 and seconds < 60 or f"{status}, {seconds} s")
        for c in readers:
            c.close()
        until = time.time() + 30
        while json.loads(s.ask("/v1/system")[1])["http"]["open"] > 1 and time.time() < until:
            time.sleep(0.2)
        status, text, _ = s.ask(COMPLETION, {**body, "prompt": [text] * 4})
        report("their memory is released", status == 200 or text)


def trickle():
    """Reads a few bytes per second of a large reply, and of a stream."""
    with Server("--body-seconds", "1") as s:
        text = "lorem ipsum dolor " * 30
        body = {"prompt": [text] * 24, "max_tokens": 1, "echo": True, "logprobs": 20}
        readers = [slow_reader(s, {**body, "stream": i % 2 == 1}) for i in range(4)]
        began, left = time.time(), 4
        while time.time() < began + 120 and left > 0:
            for c in readers:
                read_one_byte(c)
            time.sleep(0.5)
            left = json.loads(s.ask("/v1/system")[1])["http"]["open"] - 1
        report("a reply that is read a few bytes a second ends", left == 0 or f"{left} of 4 are open after 120 s")
        report("another client is answered", s.ask(CHAT, chat())[0] == 200)


def read_one_byte(c):
    c.settimeout(0.1)
    try:
        c.recv(1)
    except OSError:
        pass


def refused_by_system():
    """With less address space than the limit of requests."""
    with Server() as s:
        size = s.memory("VmSize")
    limit = (size + 160 * MB) >> 10
    wrap = ("sh", "-c", f'ulimit -v {limit}; exec "$0" "$@"')
    with Server("--max-request-memory", "4G", env=KEYED, wrap=wrap) as s:
        statuses, wrong = {}, []

        def send_attacks(i):
            for name, path, body, right in attacks()[i::4]:
                wrong.append(check_answer(s, name, path, body, (*right, 200, *REFUSED)))

        for _ in range(2):
            threads = [threading.Thread(target=send_attacks, args=(i,)) for i in range(4)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        alive = s.alive()
        if alive:
            until = time.time() + 10
            while (last := s.ask(CHAT, chat(), key=KEY)[0]) != 200 and time.time() < until:
                time.sleep(0.2)
            statuses["after"] = last
        report("a server without memory survives", alive or open(s.log).read()[-300:])
        report("its requests are answered or refused", "; ".join(w for w in wrong if w) if alive else True)
        report("it answers afterwards", statuses.get("after") == 200 or str(statuses))


def cgroup_made(limit):
    """The folder of a control group with a memory limit, of either version; or the reason why there is none."""
    why = "there are none"
    for base, name in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        if not os.path.exists(os.path.join(base, "cgroup.procs")):
            continue
        folder = os.path.join(base, f"shoal-attack-{os.getpid()}")
        try:
            os.mkdir(folder)
        except OSError as e:
            why = e.strerror
            continue
        try:
            with open(os.path.join(folder, name), "r+", encoding="ascii") as f:
                f.write(str(limit))
            return folder, None
        except OSError as e:
            why = e.strerror
            os.rmdir(folder)
    return None, why


def cgroup():
    """With less memory than the machine has, if control groups can be created."""
    folder, why = cgroup_made(LIMIT + 30 * MB)
    if not folder:
        attack.skip("a server in a control group", f"control groups cannot be made here: {why}")
        return
    wrap = ("sh", "-c", f'echo $$ >{folder}/cgroup.procs; exec "$0" "$@"')
    with Server("--max-memory", "300M", env=KEYED, wrap=wrap) as s:
        for name, path, body, right in attacks():
            check_answer(s, name, path, body, right)
        report("a server in a control group of --max-memory + 10 % survives", s.alive() or "it was killed")
    time.sleep(0.5)
    os.rmdir(folder)


def pool():
    """Adapters that are loaded one after the other under --max-memory."""
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        adapter = os.path.join(folder, "a")
        made = subprocess.run([attack.SHOAL, "adapter", "new", "--model", "test/models/fry-1", "--rank", "64", adapter],
                              capture_output=True, text=True, check=False)
        if made.returncode:
            attack.skip("adapters under --max-memory", made.stderr[-200:])
            return
        with Server("--max-memory", "200M", env=KEYED) as s:
            seen = []
            for i in range(40):
                s.ask("/v1/load_lora_adapter", {"lora_name": f"a{i}", "lora_path": adapter}, key=KEY)
                s.ask(CHAT, chat(model=f"a{i}", max_tokens=1), key=KEY)
                seen.append(json.loads(s.ask("/v1/system", key=KEY)[1])["memory"]["adapters"])
            peak = s.memory("VmHWM")
            print(f"# adapters {max(seen) / MB:.0f} MB, peak {peak / MB:.0f}", flush=True)
            report("adapters that are loaded stay within --max-memory",
                   peak <= 220 * MB and s.alive() or f"{peak / MB:.0f} MB")


for only in sys.argv[1:] or ("loop", "retained", "slow_readers", "trickle", "pool", "cgroup", "refused_by_system"):
    globals()[only]()
