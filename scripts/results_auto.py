#!/usr/bin/env python3
"""results_auto: the results of scripts/results-auto.sh.

    scripts/results_auto.py WORK FAMILIES LINES ROUTER_N
    scripts/results_auto.py --text CONVERSATIONS FILE

Asks a server per method which adapter answers each question of WORK/SET/samples.jsonl, for the sets "answers" and "text" of
adapters, and prints the part of docs/RESULTS.md. With --text, writes conversations as whole texts in the chat template of
models/fry. SHOAL is the binary, CLASS the option of the numeric class.
"""
import concurrent.futures
import http.client
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import urllib.parse

from results_seeds import Z95, wilson

SETS = {"answers": "adapters that learned the answers of conversations", "text": "adapters that learned questions and answers"}


def write_texts(source, target):
    with open(target, "w") as f:
        for line in open(source):
            turns = json.loads(line)["messages"]
            text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in turns)
            f.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def paired(a, b):
    """The difference of two methods on the same questions in points, its 95 % interval, and the p of McNemar's exact test."""
    n, only_a, only_b = len(a), sum(x and not y for x, y in zip(a, b)), sum(y and not x for x, y in zip(a, b))
    differ, d = only_a + only_b, (only_a - only_b) / n
    half = Z95 * math.sqrt(max(differ / n - d * d, 0) / n)
    p = min(1, 2 * sum(math.comb(differ, k) for k in range(min(only_a, only_b) + 1)) / 2**differ)
    return 100 * d, 100 * (d - half), 100 * (d + half), p


def choices(method, at, families, questions):
    """The model that a server with --router `method` chooses for each question."""
    p = subprocess.Popen([os.environ["SHOAL"], "serve", "models/fry", os.environ["CLASS"], "--json", "--quiet", "--port", "0", "--state", f"{at}/state",
                          "--no-feedback", "--router", method, "--adapter", *[f"{f}={at}/{f}" for f in families]], stdout=subprocess.PIPE, text=True)
    try:
        address = urllib.parse.urlparse(json.loads(p.stdout.readline())["listening"]).netloc
        local = threading.local()

        def ask(question):
            if not hasattr(local, "c"):
                local.c = http.client.HTTPConnection(address, timeout=120)
            local.c.request("POST", "/v1/chat/completions", json.dumps({"model": "auto", "max_tokens": 1, "messages": [{"role": "user", "content": question}]}))
            return json.loads(local.c.getresponse().read())["shoal"]["router"]["model"]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            return list(pool.map(ask, questions))
    finally:
        p.terminate()
        p.wait()


def load(at):
    """The texts of the questions, their families, and the questions on which each model is right."""
    right, family, text = {}, {}, {}
    for line in open(f"{at}/samples.jsonl"):
        r = json.loads(line)
        model, key = "base" if r["adapter"] == "base" else os.path.basename(r["adapter"]), (r["task"], r["item"])
        right.setdefault(model, {})[key] = r["right"]
        family[key], text[key] = r["task"], r["question"]
    keys = list(family)
    return [text[k] for k in keys], [family[k] for k in keys], {m: [v[k] for k in keys] for m, v in right.items()}


def rows_of(at, families):
    """The rows {name: (right, chosen)} of a set of adapters, the best fixed one, and the family of each question."""
    questions, family, right = load(at)
    rows = {"best fixed one": (max(right.values(), key=sum), None)}
    for name, method in (("likelihood", "likelihood"), ("similarity", "similarity"), ("router", f"{at}/routed.router.json")):
        chosen = ["base" if m == "fry" else m for m in choices(method, at, families, questions)]
        rows[name] = ([right[m][i] for i, m in enumerate(chosen)], chosen)
    rows["adapter of the family"] = ([right[f][i] for i, f in enumerate(family)], family)
    rows["oracle: any of them is right"] = ([any(v[i] for v in right.values()) for i in range(len(family))], None)
    # the expected accuracy of a uniform choice: no single question is right or wrong
    rows["random (expected)"] = ([statistics.mean(v[i] for v in right.values()) for i in range(len(family))], None)
    return rows, max(right, key=lambda m: sum(right[m])), family


def table(rows, families, family):
    fixed, n = rows["best fixed one"][0], len(family)
    print("| choice | right, % (95 % interval) | from the best fixed one, points (95 % interval) | p | chosen: the family's adapter, % | " + " | ".join(families) + " |")
    print("|---|---|---|---|---|" + "---|" * len(families))
    for name, (values, chosen) in sorted(rows.items(), key=lambda r: sum(r[1][0])):
        cells = " | ".join(f"{100 * statistics.mean(v for v, g in zip(values, family) if g == f):.1f}" for f in families)
        hits = f"{100 * statistics.mean(c == f for c, f in zip(chosen, family)):.1f}" if chosen else ""
        share, difference, p = f"{100 * sum(values) / n:.1f}", "", ""
        if name != "random (expected)":
            _, lo, hi = wilson(sum(values), n)
            share += f" ({100 * lo:.1f} to {100 * hi:.1f})"
            if values is not fixed:
                d, lo, hi, p = paired(values, fixed)
                difference, p = f"{d:+.1f} ({lo:+.1f} to {hi:+.1f})", f"{p:.2g}"
        print(f"| {name} | {share} | {difference} | {p} | {hits} | {cells} |")


def main():
    if sys.argv[1] == "--text":
        return write_texts(*sys.argv[2:])
    work, families, lines, router_n = sys.argv[1:]
    families = families.split()
    sets = {name: rows_of(f"{work}/{name}", families) for name in SETS}
    n = len(sets["answers"][2])
    print("## Choosing an adapter (`make results-auto`)\n")
    print(f"`\"model\": \"auto\"` of `shoal serve` chooses among the base and {len(families)} adapters that each learned {lines} conversations of one family. "
          f"{n} held-out questions; the answer of the chosen adapter counts. Profiles and routers read the question only, the likelihood costs a prefill "
          f"under each adapter.")
    for name, (rows, best, family) in sets.items():
        right = {m: 100 * sum(v) / n for m, (v, _) in rows.items()}
        null = [m for m in ("likelihood", "similarity", "router") if paired(rows[m][0], rows["best fixed one"][0])[1] <= 0]
        print(f"\nWith {SETS[name]}, the best one alone ({best}) is right on {right['best fixed one']:.1f} %; by likelihood {right['likelihood']:.1f} %, by "
              f"similarity {right['similarity']:.1f} %, by a router {right['router']:.1f} %." + (f" No gain: {', '.join(null)}." if null else "") + "\n")
        table(rows, families, family)
    print(f"\nMcNemar's exact test, without a correction for several comparisons; {os.environ['CLASS'].strip('-')} class, one seed. The best fixed one is chosen on "
          f"these questions, which favours it. The routers were fitted on {router_n} other questions per family. The prompt of a conversation is no target of its "
          f"training (docs/DATA.md), so the likelihood of a prompt says little about adapters that learned answers only.")


if __name__ == "__main__":
    main()
