#!/usr/bin/env python3
"""results_evolve: the results of scripts/results-evolve.sh, from the files FAMILY/SEED.json of its runs.

    scripts/results_evolve.py FOLDER FAMILIES FLOPS OWN REST LEARN

Writes docs/results/evolution.md and evolution.svg, and prints the part of docs/RESULTS.md.
"""
import contextlib
import statistics
import sys
from pathlib import Path

from results_seeds import bar_chart, mean_interval, print_comparisons, print_methods, seeds_read

FOLDER = Path(__file__).parent.parent / "docs" / "results"
LABELS = {"founder": "best founder", "soup": "uniform soup", "ties": "TIES, CMA-ES", "dare": "DARE, CMA-ES",
          "cma": "coefficients, CMA-ES", "pso": "coefficients, PSO", "ga": "breeding", "gradient": "further data",
          "es": "further data, evolution strategy", "hybrid": "coefficients, then further data", "rloo": "rewards, RLOO",
          "grpo": "rewards, GRPO", "pooled": "pooled data"}


def main():
    folder, families, flops, own, rest, learn = sys.argv[1:]
    families = families.split()
    found = {f: seeds_read(Path(folder) / f) for f in families}
    seeds = sorted(set.intersection(*(set(v) for v in found.values())))
    methods = list(found[families[0]][seeds[0]])
    rows = {m: [100 * statistics.mean(found[f][s][m]["acc"] for f in families) for s in seeds] for m in methods}
    mean = {m: statistics.mean(v) for m, v in rows.items()}
    combined = [f"{name} gives {mean[m]:.1f} %" for m, name in (("cma", "a weighted sum of them (CMA-ES)"), ("ga", "breeding")) if m in mean]
    summary = (f"Of eight adapters that each learned a task in one language, the best is right on {mean['founder']:.1f} %"
               f"{'; without further data ' if combined else ''}{' and '.join(combined)} (means of {len(families)} families and {len(seeds)} seeds).")
    bar_chart(FOLDER / "evolution.svg", "right answers, mean of the families (line: 95 % over seeds)",
              [(LABELS.get(m, m), *mean_interval(rows[m])) for m in sorted(methods, key=mean.get)])
    with open(FOLDER / "evolution.md", "w") as f, contextlib.redirect_stdout(f):
        print(f"# Evolution (`make results-evolve`)\n\n{summary}\n\n![Accuracy of each method](evolution.svg)\n\n"
              f"Methods that make one adapter from the same eight founders (rank 8; each learned {own} conversations of the family in "
              f"one language and {rest} of each other family) on the starter model in q8_0, exact class, each with at most {flops} "
              "FLOPs; ties and dare make few candidates, since making one costs more than evaluating it. gradient, es and hybrid "
              f"learn from the same {learn} further conversations, rloo and grpo from right and wrong answers to new questions. *pooled*, "
              "the reference, is one adapter trained on the data of all founders, with as many updates as they have together. Intervals are 95 % intervals over the seeds.")
        named = [pair for pair in (("cma", "founder"), ("ga", "founder"), ("hybrid", "gradient"), ("cma", "rloo")) if rows.keys() >= set(pair)]
        more = [pair for pair in (("cma", "pooled"),) if rows.keys() >= set(pair)]
        print_comparisons(rows, named, more, lambda m: LABELS.get(m, m))
        print(f"\nThe first {len(named)} comparisons were named before the runs.")
        for family in families:
            print(f"\n## {family}\n")
            print_methods([found[family][s] for s in seeds], "founder", lambda m: LABELS.get(m, m))
    print(f"## Evolution (`make results-evolve`)\n\n{summary}\n\n![Accuracy of each method](results/evolution.svg)\n\n"
          "Families, costs and comparisons: [results/evolution.md](results/evolution.md).")


if __name__ == "__main__":
    main()
