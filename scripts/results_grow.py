#!/usr/bin/env python3
"""results_grow: the page of scripts/results-grow.sh, from the result.json of each seed.

    scripts/results_grow.py WORK FAMILIES N TEST_N OTHER
"""
import itertools
import json
import math
import statistics
import sys
from pathlib import Path

T95 = [0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
LABELS = {"grown": "grown: team and check", "grown, one": "grown: best agent and check",
          "grown, votes": "grown: votes of the team", "grown, gold": "grown: right answers", "base": "base model"}


def mean_interval(values):
    n, mean = len(values), statistics.mean(values)
    if n < 2:
        return mean, math.nan, math.nan
    half = T95[min(n - 1, len(T95) - 1)] * statistics.stdev(values) / math.sqrt(n)
    return mean, mean - half, mean + half


def sign_flip(values):
    """Two-sided p of the mean under all flips of signs."""
    seen = abs(sum(values)) - 1e-12
    flips = itertools.product((1, -1), repeat=len(values))
    return sum(abs(sum(s * v for s, v in zip(f, values))) >= seen for f in flips) / 2 ** len(values)


def holm(p):
    order, adjusted, most = sorted(range(len(p)), key=p.__getitem__), [0] * len(p), 0
    for rank, i in enumerate(order):
        most = max(most, min(1, p[i] * (len(p) - rank)))
        adjusted[i] = most
    return adjusted


def accuracy(seed):
    return {row["name"]: 100 * row["acc"] for row in seed["test"]["rows"]}


def best_agent(seed):
    names, rows = {a["name"] for a in seed["agents"]}, accuracy(seed)
    return max(names, key=lambda name: rows[name])


def label_counts(result):
    return sum(r["kept"] for r in result["rounds"])


def retained(seed, best):
    """Accuracy on the other tasks, by the names of the table."""
    rows = {row["name"]: 100 * row["retained"] for row in seed["test"]["rows"] if "retained" in row}
    return {**rows, "best agent": rows[best]}


def flops(result, parameters):
    """Of a run: sampling and checks are forward passes, an update costs three of its samples."""
    tokens = 0
    for r in result["rounds"]:
        tokens += sum(r.get("cost", {}).get(k, 0) + r.get("check", {}).get(k, 0) for k in ("prefilled", "generated"))
    return 2 * parameters * tokens / 1e9


def main():
    work, families, n, test_n, other = sys.argv[1:]
    seeds = [json.loads(p.read_text()) for p in sorted(Path(work).glob("*/result.json"), key=lambda p: int(p.parent.name))]
    rows = {}
    for seed in seeds:
        best, acc = best_agent(seed), accuracy(seed)
        for name, value in acc.items():
            name = name.replace(f"{best}@", "best agent@")
            rows.setdefault("best agent" if name == best else name, []).append(value)
            if name == best:
                rows.setdefault(name, []).append(value)
    print(f"# What a grown adapter gains (`make results-grow`)\n")
    first = {k: statistics.mean(v) for k, v in rows.items() if len(v) == len(seeds)}
    print(f"One adapter that learned from answers its three teachers proposed and a check selected is right on {first['grown']:.1f} % of unseen questions; "
          f"the best teacher is right on {first['best agent']:.1f} %.\n")
    print(f"{len(seeds)} seeds of teachers, questions and training; {n} unlabelled questions of each of {families}; test: {test_n} of each, generated "
          f"answers, exact class. Values are means over the seeds with 95 % t intervals. The last column is the accuracy on {other}, which the "
          "runs rehearse: the team's votes on 100 further questions, without labels, are learned too.\n")
    print(f"| row | right, % | 95 % interval | calls per question | tokens per question | {other}, % |\n|---|---:|---:|---:|---:|---:|")
    for name, values in rows.items():
        if len(values) < len(seeds):
            continue
        mean, lo, hi = mean_interval(values)
        cost = []
        for seed in seeds:
            wanted = best_agent(seed) if name == "best agent" else name.replace("best agent@", f"{best_agent(seed)}@")
            row = next(r for r in seed["test"]["rows"] if r["name"] == wanted)
            cost.append((row["calls"] / seed["test"]["n"], (row["prefilled"] + row["generated"]) / seed["test"]["n"]))
        kept = [r[name] for r in (retained(s, best_agent(s)) for s in seeds) if name in r]
        print(f"| {LABELS.get(name, name)} | {mean:.1f} | {lo:.1f} to {hi:.1f} | {statistics.mean(c[0] for c in cost):.1f} | "
              f"{statistics.mean(c[1] for c in cost):.0f} | {f'{statistics.mean(kept):.1f}' if kept else ''} |")
    samples = next(r["name"].split("@")[1].split(",")[0] for r in seeds[0]["test"]["rows"] if "@" in r["name"])
    pairs = [("grown", "best agent"), (f"team@{samples}, checked", f"best agent@{samples}, votes"), ("grown", "grown, one")]
    more = [(f"team@{samples}, checked", f"best agent@{samples}, checked"), ("grown", "grown, gold"), ("grown", "grown, votes")]
    print("\n| comparison | difference, points | 95 % interval | p over seeds |\n|---|---:|---:|---:|")
    tests = [[a - b for a, b in zip(rows[x], rows[y])] for x, y in pairs]
    adjusted = holm([sign_flip(t) for t in tests])
    for (x, y), t, p in zip(pairs, tests, adjusted):
        mean, lo, hi = mean_interval(t)
        print(f"| {LABELS.get(x, x)} – {LABELS.get(y, y)} | {mean:+.1f} | {lo:+.1f} to {hi:+.1f} | {p:.2g} (Holm) |")
    for x, y in more:
        t = [a - b for a, b in zip(rows[x], rows[y])]
        mean, lo, hi = mean_interval(t)
        print(f"| {LABELS.get(x, x)} – {LABELS.get(y, y)} | {mean:+.1f} | {lo:+.1f} to {hi:+.1f} | {sign_flip(t):.2g} |")
    print(f"\nThe first three comparisons were named before the runs. All teachers are wrong on "
          f"{100 * statistics.mean(s['test']['all_wrong'] for s in seeds):.1f} % of the test questions.\n")
    print("| labels from | kept answers | of these right, % | sampling and checks, GFLOP |\n|---|---:|---:|---:|")
    for name in ("", "one", "votes", "gold"):
        results = [s if not name else s["test"]["arms"][name] for s in seeds]
        right = [r["right"] for result in results for r in result["rounds"] if "right" in r]
        share = 100 * sum(r["right"] for r in right) / max(1, sum(r["of"] for r in right)) if right else 100
        print(f"| {LABELS.get('grown, ' + name if name else 'grown')} | {statistics.mean(map(label_counts, results)):.0f} | {share:.1f} | "
              f"{statistics.mean(flops(r, 2.5e6) for r in results):.0f} |")


if __name__ == "__main__":
    main()
