#!/usr/bin/env python3
"""results_grow: the results of scripts/results-grow.sh, from the file SEED.json of each seed.

    scripts/results_grow.py FOLDER FAMILIES N TEST_N OTHER PARAMETERS

Writes docs/results/grow.md and grow.svg, and prints the part of docs/RESULTS.md.
"""
import contextlib
import statistics
import sys
from pathlib import Path

from results_seeds import bar_chart, mean_interval, print_comparisons, sampled_tokens, seeds_read

FOLDER = Path(__file__).parent.parent / "docs" / "results"
LABELS = {"grown": "grown: team and check", "grown, one": "grown: best agent and check",
          "grown, votes": "grown: votes of the team", "grown, gold": "grown: right answers", "base": "base model"}


def accuracy(seed):
    return {row["name"]: 100 * row["acc"] for row in seed["test"]["rows"]}


def best_agent(seed):
    names, rows = {a["name"] for a in seed["agents"]}, accuracy(seed)
    return max(names, key=lambda name: rows[name])


def label_counts(result):
    return sum(r.get("kept", 0) for r in result["rounds"])


def retained(seed, best):
    """Accuracy on the other tasks, by the names of the table."""
    rows = {row["name"]: 100 * row["retained"] for row in seed["test"]["rows"] if "retained" in row}
    return {**rows, "best agent": rows[best]}


def flops(result, parameters):
    """Of the sampling and the checks of a run, in GFLOP: two per parameter and token."""
    return 2 * parameters * sampled_tokens(result) / 1e9


def rows_of(seeds):
    """{row of the table: [accuracy per seed, in %]}; the best agent of each seed under its own name too."""
    rows = {}
    for seed in seeds:
        best, acc = best_agent(seed), accuracy(seed)
        for name, value in acc.items():
            name = name.replace(f"{best}@", "best agent@")
            rows.setdefault("best agent" if name == best else name, []).append(value)
            if name == best:
                rows.setdefault(name, []).append(value)
    return {name: values for name, values in rows.items() if len(values) == len(seeds)}


def page(seeds, rows, samples, summary, families, n, test_n, other, parameters):
    print(f"# What a grown adapter gains (`make results-grow`)\n\n{summary}\n\n![Accuracy of each row](grow.svg)\n")
    print(f"{len(seeds)} seeds of teachers, questions and training; {n} unlabelled questions of each of {families}; test: {test_n} of each, generated "
          f"answers, exact class. Values are means over the seeds with 95 % t intervals. The last column is the accuracy on {other}, which the "
          "runs rehearse: the team's votes on 100 further questions, without labels, are learned too.\n")
    mean = {name: statistics.mean(values) for name, values in rows.items()}
    print(f"The check comes with the task: it asks the base model a second question that follows from the answer, and sees no right answer. Learning "
          f"with it adds {mean['grown, one'] - mean['best agent']:+.1f} points to the best agent when that agent proposes alone, and {mean['grown'] - mean['grown, one']:+.1f} more "
          "when the team proposes. With given choices, a check of every choice would win; so all answers here are generated. The right answers "
          "are a reference with as many updates of one adapter; grown is the best of the adapters of its rounds, by the check.\n")
    print(f"| row | right, % | 95 % interval | calls per question | tokens per question | {other}, % |\n|---|---:|---:|---:|---:|---:|")
    for name, values in rows.items():
        mean, lo, hi = mean_interval(values)
        cost = []
        for seed in seeds:
            wanted = best_agent(seed) if name == "best agent" else name.replace("best agent@", f"{best_agent(seed)}@")
            row = next(r for r in seed["test"]["rows"] if r["name"] == wanted)
            cost.append((row["calls"] / seed["test"]["n"], (row["prefilled"] + row["generated"]) / seed["test"]["n"]))
        kept = [r[name] for r in (retained(s, best_agent(s)) for s in seeds) if name in r]
        print(f"| {LABELS.get(name, name)} | {mean:.1f} | {lo:.1f} to {hi:.1f} | {statistics.mean(c[0] for c in cost):.1f} | "
              f"{statistics.mean(c[1] for c in cost):.0f} | {f'{statistics.mean(kept):.1f}' if kept else ''} |")
    pairs = [("grown", "best agent"), (f"team@{samples}, checked", f"best agent@{samples}, votes"), ("grown", "grown, one")]
    more = [(f"team@{samples}, checked", f"best agent@{samples}, checked"), ("grown", "grown, gold"), ("grown", "grown, votes")]
    print_comparisons(rows, pairs, more, lambda name: LABELS.get(name, name))
    print(f"\nThe first three comparisons were named before the runs. All teachers are wrong on "
          f"{100 * statistics.mean(s['test']['all_wrong'] for s in seeds):.1f} % of the test questions.\n")
    print("| labels from | kept answers | of these right, % | sampling and checks, GFLOP |\n|---|---:|---:|---:|")
    for name in ("", "one", "votes", "gold"):
        results = [s if not name else s["test"]["arms"][name] for s in seeds]
        right = [r["right"] for result in results for r in result["rounds"] if "right" in r]
        share = 100 * sum(r["right"] for r in right) / max(1, sum(r["of"] for r in right)) if right else 100
        print(f"| {LABELS.get('grown, ' + name if name else 'grown')} | {statistics.mean(map(label_counts, results)):.0f} | {share:.1f} | "
              f"{statistics.mean(flops(r, parameters) for r in results):.0f} |")


def main():
    folder, families, n, test_n, other, parameters = sys.argv[1:]
    seeds = list(seeds_read(folder).values())
    rows = rows_of(seeds)
    samples = next(r["name"].split("@")[1].split(",")[0] for r in seeds[0]["test"]["rows"] if "@" in r["name"])
    summary = (f"One adapter that learned answers which its three teachers proposed and a check selected is right on "
               f"{statistics.mean(rows['grown']):.1f} % of unseen questions; the best teacher is right on "
               f"{statistics.mean(rows['best agent']):.1f} % ({len(seeds)} seeds).")
    shown = ["base", "best agent", f"best agent@{samples}, votes", f"team@{samples}, votes", f"team@{samples}, checked",
             "grown, votes", "grown, one", "grown", "grown, gold"]
    bar_chart(FOLDER / "grow.svg", "right answers to unseen questions (line: 95 % over seeds)",
              [(LABELS.get(name, name), *mean_interval(rows[name])) for name in shown if name in rows])
    with open(FOLDER / "grow.md", "w") as f, contextlib.redirect_stdout(f):
        page(seeds, rows, samples, summary, families, n, test_n, other, float(parameters))
    print(f"## Growing an adapter (`make results-grow`)\n\n{summary}\n\n![Accuracy of each row](results/grow.svg)\n\n"
          "Rows, costs and comparisons: [results/grow.md](results/grow.md).")


if __name__ == "__main__":
    main()
