"""beside: requests that once stopped or exhausted the server, in a loop, together with a normal client.

    python3 test/attack/beside.py [TIMES] [CLIENTS] [--assert]

CLIENTS attackers (8), each a separate process, send each kind of request TIMES times (3), while a normal client
requests short streamed replies in a loop. The script prints the client's median time to the first token, without attack
and during each kind, and the server's peak memory, which --max-memory limits. It always tests that every request gets
an answer, the server survives, the client is always served, and the peak stays within --max-memory plus a tenth. Times
depend on the machine: --assert also tests that the first token during an attack takes at most twice as long as without.
"""
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time

from attack import CHAT, COMPLETION, Server, report

NUMBERS = [int(a) for a in sys.argv[1:] if a.isdigit()]
TIMES, CLIENTS = NUMBERS + [3, 8][len(NUMBERS):]
STRICT = "--assert" in sys.argv
MAX_MEMORY = "640M"
KEY = "sk-beside"
HI = [{"role": "user", "content": "hi"}]
loops = ("{% set l = range(90000)|list %}" + "".join(f"{{% for i{n} in l %}}" for n in range(3)) + "{% if -1 in l %}x{% endif %}"
         + "{% endfor %}" * 3)


def body(value):
    return json.dumps(value).encode()


def regex(n):
    return "".join(f"([a-{chr(98 + (n + i) % 24)}]|[0-9]{{1,{2 + (n + i) % 7}}}|.{{1,{20 + i}}}x)*" for i in range(12))


# Each kind: name, path, and the body of its nth request, which differs from the others.
KINDS = [
    ("a template of nested loops", CHAT, lambda n: body({"messages": HI, "chat_template": loops, "max_tokens": 1})),
    ("80,000 template arguments", CHAT, lambda n: body(
        {"messages": HI, "chat_template_kwargs": {f"k{i}_{n}": i for i in range(80000)}, "max_tokens": 1})),
    ("truncated JSON", CHAT, lambda n: b'{"messages":[' + b'{"a":"b"},' * 64000),
    ("JSON inside JSON", CHAT, lambda n: body({"max_tokens": 1, "messages": HI + [{"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":[' + "[]," * 1_000_000 + "[]]}"}}]}]})),
    ("a model name of 1 MB", CHAT, lambda n: body({"model": "fry-1:" + str(n) + "x" * (1 << 20), "messages": HI, "max_tokens": 1})),
    ("log-probabilities of a long prompt", COMPLETION, lambda n: body(
        {"prompt": ["a b " * 120] * 60, "echo": True, "prompt_logprobs": 20, "logprobs": 5, "max_tokens": 1})),
    ("a hostile grammar", COMPLETION, lambda n: body({"prompt": "x", "guided_regex": regex(n), "max_tokens": 60})),
]


class Address:
    """A server of another process, for its clients."""
    ask = Server.ask

    def __init__(self, port):
        self.port = port


def send(port, kind, first, count, begin, answers):
    """One of the attacking clients: `count` requests one after the other. They are built in advance, and sent at the
    lowest priority, because attackers on other machines would not use this one's processors.
    """
    os.nice(19)
    _, path, make_body = KINDS[kind]
    bodies = [make_body(n) for n in range(first, min(first + count, first + 20))]  # enough variants, which still fit in memory
    begin.wait()
    for n in range(count):
        data = bodies[n % len(bodies)]
        try:
            answers.put(Address(port).ask(path, raw=data, key=KEY, timeout=120)[0])
        except OSError as e:
            answers.put(repr(e))


def first_token(server):
    """Seconds until the first event of a streamed reply."""
    import http.client
    began = time.time()
    c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    c.request("POST", COMPLETION, json.dumps({"prompt": "12 + 30 =", "max_tokens": 8, "stream": True}),
              {"Authorization": "Bearer " + KEY})
    reply = c.getresponse()
    if reply.status != 200:
        raise OSError(f"status {reply.status}: {reply.read(300)!r}")
    reply.readline()
    took = time.time() - began
    reply.read()
    c.close()
    return took


def client(server, stop, times, failures):
    while not stop.is_set():
        try:
            times.append(first_token(server))
        except OSError as e:
            failures.append(repr(e))
        time.sleep(0.02)


def measure_client(server, kind=None):
    """The client's times to the first token while requests of a kind are sent, and the statuses of those requests."""
    stop, times, failures, answers = threading.Event(), [], [], multiprocessing.Queue()
    t = threading.Thread(target=client, args=(server, stop, times, failures))
    statuses = []
    if kind is None:
        t.start()
        time.sleep(2)
    else:
        each, begin = -(-TIMES // CLIENTS), multiprocessing.Barrier(CLIENTS + 1)
        senders = [multiprocessing.Process(target=send, args=(server.port, kind, i * each, each, begin, answers))
                   for i in range(CLIENTS)]
        for p in senders:
            p.start()
        begin.wait()
        t.start()
        statuses = [answers.get(timeout=240) for _ in range(CLIENTS * each)]
        for p in senders:
            p.join()
    stop.set()
    t.join()
    return times, failures, statuses


def main():
    with Server("--max-memory", MAX_MEMORY, env={"SHOAL_API_KEY": KEY}) as s:
        measure_client(s)  # everything is loaded
        baseline = statistics.median(measure_client(s)[0])
        print(f"# baseline: {baseline * 1e3:.1f} ms to the first token", file=sys.stderr)
        for kind, (name, _, _) in enumerate(KINDS):
            times, failures, statuses = measure_client(s, kind)
            median = statistics.median(times) if times else float("inf")
            peak = s.memory("VmHWM")
            print(f"# {name}: {median * 1e3:.1f} ms ({median / baseline:.2f} x) over {len(times)} replies, answers "
                  f"{ {a: statuses.count(a) for a in set(statuses)} }, peak {peak >> 20} MB", file=sys.stderr)
            report(f"{name}: every request is answered", all(isinstance(a, int) and a != 500 for a in statuses) or set(statuses))
            report(f"{name}: the client is always answered", not failures or failures[0])
            if STRICT:
                report(f"{name}: the first token within twice of the baseline", median <= 2 * baseline or f"{median / baseline:.2f} times")
        limit = int(MAX_MEMORY[:-1]) << 20
        report("the peak stays within --max-memory and a tenth", s.memory("VmHWM") <= limit * 1.1 or f"{s.memory('VmHWM') >> 20} MB")
        report("the server ends on SIGTERM", s.stop() == 0 or "another exit status")


if __name__ == "__main__":
    main()
