"""grammars: 32 parallel requests, each with a different grammar whose compilation or masks are expensive, together with
a client without a grammar, whose first token must not wait for them.
"""
import multiprocessing
import os
import statistics
import sys
import threading
import time

from attack import COMPLETION, Server, report

HOSTILE = 32
KEY = "sk-attack"


def ambiguous(i):
    """Thousands of parser configurations after each byte."""
    return {"guided_grammar": "root ::= r\nr ::= \"a\" r" + ' | [a-z ] r "b"' * (1500 + i) + ' | "a"'}


def counted(i):
    """Every position begins another count."""
    return {"guided_regex": "([ -~]*[a-m ][ -~]{%d}|x)" % (1000 + i)}


def nested(i):
    """A context-free grammar in which every text has exponentially many derivations."""
    return {"guided_grammar": 'root ::= a{1,%d}\na ::= b | b b | c\nb ::= [a-z ] a? | "(" a ")" \n'
                              'c ::= [ -~] a? [ -~]?' % (20 + i)}


def wide(i):
    """A schema whose names and values share prefixes."""
    properties = {f"{'n' * (k % 40)}{i}-{k}": {"type": "string", "pattern": "(a|b|[a-z]){1,%d}" % (k % 60 + 1)}
                  for k in range(300)}
    return {"guided_json": {"type": "object", "properties": properties}}


def choices(i):
    return {"guided_choice": [f"{k * 7919 % 100003} {i} {'ab' * (k % 30)}" for k in range(3000)]}


KINDS = [ambiguous, counted, nested, wide, choices]


class Plain(threading.Thread):
    """Times to the first token of a client that sends requests in a loop."""

    def __init__(self, server):
        super().__init__()
        self.server, self.seconds, self.over, self.failed = server, [], False, ""

    def run(self):
        number = 0
        while not self.over:
            number += 1
            status, text, seconds = self.server.ask(
                COMPLETION, {"prompt": f"The {number} fry swim", "max_tokens": 1}, key=KEY)
            if status != 200:
                self.failed = f"{status}: {text}"
            self.seconds.append(seconds)
            time.sleep(0.01)

    def end(self):
        self.over = True
        self.join()
        ordered = sorted(self.seconds)
        return statistics.median(ordered), ordered[int(len(ordered) * 0.95)], ordered[-1]


def hostile(server, i, until, kinds, counts):
    """Sends requests with grammars, each a new one."""
    while time.time() < until:
        kind = kinds[i % len(kinds)]
        try:
            status, _, _ = server.ask(COMPLETION, {"prompt": "a", "max_tokens": 64, **kind(i)}, key=KEY,
                                      timeout=max(until - time.time(), 0.5))  # then it goes
        except OSError as e:
            status = type(e).__name__
        name = f"{kind.__name__} {status}"
        counts[name] = counts.get(name, 0) + 1
        i += HOSTILE


def crowd(server, until, kinds, replies):
    """The hostile clients, in a separate process, because this one measures."""
    counts = {}
    threads = [threading.Thread(target=hostile, args=(server, i, until, kinds, counts)) for i in range(HOSTILE)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    replies.put(counts)


def beside(server, seconds, kinds):
    """Times of a plain client during an attack, and the statuses of the attack's requests."""
    replies = multiprocessing.Queue()
    until = time.time() + seconds
    process = multiprocessing.Process(target=crowd, args=(server, until, kinds, replies))
    process.start()
    plain = Plain(server)
    plain.start()
    time.sleep(seconds)
    figures = plain.end()
    counts = replies.get(timeout=150)
    process.join()
    return figures, counts, plain.failed


def bare(i):
    return {}


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5
    kinds = [k for k in KINDS if not os.environ.get("KIND") or k.__name__ in os.environ["KIND"].split()]
    with Server("--max-waiting", "200", env={"SHOAL_API_KEY": KEY}) as server:
        quiet = Plain(server)
        quiet.start()
        time.sleep(1)
        alone = quiet.end()
        crowded, _, _ = beside(server, 2, [bare])
        figures, counts, failed = beside(server, seconds, kinds)
        for name, f in ("alone", alone), ("beside 32 requests", crowded), ("beside 32 grammars", figures):
            print("# %-20s p50 %.1f p95 %.1f max %.1f ms" % (name, *(1000 * x for x in f)))
        print(f"# {counts}; VmHWM {server.memory('VmHWM') >> 20} MB", flush=True)
        report("a plain request during 32 hostile grammars is answered", failed)
        # on an idle machine it is less than 2 times the time during 32 plain requests; CI machines are shared
        report("its first token does not wait for their masks", figures[0] < 0.05 + 6 * crowded[0] or f"{figures[0]:.3f} s")
        report("the grammars' memory is bounded", server.memory("VmHWM") < 1 << 31)


if __name__ == "__main__":
    main()
