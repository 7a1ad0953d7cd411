#!/usr/bin/env python3
"""results_evolve: the results of scripts/results-evolve.sh, from the result.json of each run METHOD-FAMILY-sSEED.

    scripts/results_evolve.py RUNS FAMILIES METHODS FLOPS OWN REST LEARN TABLES

Writes docs/results/evolution.md, with the file TABLES, and evolution.svg, and prints the part of docs/RESULTS.md.
"""
import contextlib
import json
import statistics
import sys
from pathlib import Path

from results_seeds import bar_chart, mean_interval, print_comparisons

FOLDER = Path(__file__).parent.parent / "docs" / "results"
LABELS = {"founder": "best founder", "soup": "uniform soup", "ties": "TIES, CMA-ES", "dare": "DARE, CMA-ES",
          "cma": "coefficients, CMA-ES", "pso": "coefficients, PSO", "ga": "breeding", "gradient": "further data",
          "es": "further data, evolution strategy", "hybrid": "coefficients, then further data", "pooled": "pooled data"}


def accuracies(runs, method, families):
    """[seed]: mean over the families of the result of a search, in %."""
    seeds = sorted({int(p.name.rpartition("-s")[2]) for p in Path(runs).glob(f"{method}-{families[0]}-s*")})
    values = []
    for seed in seeds:
        results = [json.loads((Path(runs) / f"{method}-{f}-s{seed}" / "result.json").read_text()) for f in families]
        values.append(100 * statistics.mean(r["table"][-1]["acc"] for r in results))
    return values


def main():
    runs, families, methods, flops, own, rest, learn, tables = sys.argv[1:]
    families, methods = families.split(), methods.split()
    rows = {m: accuracies(runs, m, families) for m in methods}
    mean = {m: statistics.mean(v) for m, v in rows.items()}
    n_seeds = len(rows["founder"])
    combined = [f"{name} gives {mean[m]:.1f} %" for m, name in (("cma", "a weighted sum of them (CMA-ES)"), ("ga", "breeding")) if m in mean]
    summary = (f"Of eight adapters that each learned a task in one language, the best is right on {mean['founder']:.1f} %"
               f"{'; without further data ' if combined else ''}{' and '.join(combined)} (means of {len(families)} families and {n_seeds} seeds).")
    bar_chart(FOLDER / "evolution.svg", "right answers, mean of the families (line: 95 % over seeds)",
              [(LABELS.get(m, m), *mean_interval(rows[m])) for m in sorted(methods, key=mean.get)])
    with open(FOLDER / "evolution.md", "w") as f, contextlib.redirect_stdout(f):
        print(f"# Evolution (`make results-evolve`)\n\n{summary}\n\n![Accuracy of each method](evolution.svg)\n\n"
              f"Methods that make one adapter from the same eight founders (rank 8; each learned {own} conversations of the family in "
              f"one language and {rest} of each other family) on the starter model in q8_0, exact class, each with at most {flops} "
              "FLOPs; ties and dare make few candidates, since making one costs more than evaluating it. gradient, es and hybrid "
              f"learn from the same {learn} further conversations. *pooled*, the reference, is one adapter trained on the data of all "
              "founders, with as many updates as they have together. Intervals are 95 % intervals over the seeds.")
        named = [pair for pair in (("cma", "founder"), ("ga", "founder"), ("hybrid", "gradient")) if rows.keys() >= set(pair)]
        more = [pair for pair in (("cma", "pooled"),) if rows.keys() >= set(pair)]
        print_comparisons(rows, named, more, lambda m: LABELS.get(m, m))
        print(f"\nThe first {len(named)} comparisons were named before the runs.")
        print(Path(tables).read_text(), end="")
    print(f"## Evolution (`make results-evolve`)\n\n{summary}\n\n![Accuracy of each method](results/evolution.svg)\n\n"
          "Families, costs and comparisons: [results/evolution.md](results/evolution.md).")


if __name__ == "__main__":
    main()
