#!/usr/bin/env python3
"""results_specialists: the results of scripts/results-specialists.sh, from the file SEED.json of each seed.

    scripts/results_specialists.py FOLDER FAMILIES LINES FLOPS
    scripts/results_specialists.py --router FILE EVALUATION

Writes docs/results/specialists.md and specialists.svg, and prints the part of docs/RESULTS.md. With --router, adds the
accuracy of a team to the FILE of a seed, from the output of `shoal eval --json`.
"""
import contextlib
import json
import statistics
import sys
from pathlib import Path

from results_seeds import bar_chart, mean_interval, print_comparisons, print_methods, seeds_read

FOLDER = Path(__file__).parent.parent / "docs" / "results"
LABELS = {"founder": "best founder", "soup": "uniform soup", "ties": "TIES", "cma": "coefficients, CMA-ES", "breed": "breeding",
          "grown": "grown from checked answers", "joint": "data of all founders", "router": "router of all founders"}


def add_router(path, evaluation):
    seed = json.loads(Path(path).read_text())
    rows = [json.loads(line) for line in open(evaluation)]
    seed["router"] = {"acc": statistics.mean(r["acc"] for r in rows if r.get("kind") == "team")}
    Path(path).write_text(json.dumps(seed, indent=1) + "\n")


def main():
    if sys.argv[1] == "--router":
        return add_router(*sys.argv[2:])
    folder, families, lines, flops = sys.argv[1:]
    seeds = list(seeds_read(folder).values())
    rows = {m: [100 * s[m]["acc"] for s in seeds] for m in seeds[0]}
    label = lambda method: LABELS.get(method, method)
    bred = max((m for m in ("breed", "cma") if m in rows), key=lambda m: statistics.mean(rows[m]))
    summary = (f"Of {len(families.split())} adapters that each learned one task, the best is right on {statistics.mean(rows['founder']):.1f} % of the questions "
               f"of all tasks; {label(bred)}, without further data, makes one that is right on {statistics.mean(rows[bred]):.1f} % ({len(seeds)} seeds).")
    bar_chart(FOLDER / "specialists.svg", "right answers to questions of all tasks (line: 95 % over seeds)",
              [(label(m), *mean_interval(v)) for m, v in sorted(rows.items(), key=lambda r: statistics.mean(r[1]))])
    with open(FOLDER / "specialists.md", "w") as f, contextlib.redirect_stdout(f):
        print(f"# Specialists bred into a generalist (`make results-specialists`)\n\n{summary}\n\n![Accuracy of each method](specialists.svg)\n\n"
              f"Each founder learned {lines} conversations of one of: {families}. The methods get these adapters, no data, and at most {flops} FLOPs. "
              f"*{LABELS['grown']}*: the founders answer new questions, a check that sees no right answer selects, one adapter learns (`shoal grow`). "
              f"*{LABELS['joint']}*, a reference, is one adapter trained on the data of all founders with as many updates as they have together; "
              f"*{LABELS['router']}* keeps all adapters and calls one of them for a question (`shoal team fit`). {seeds[0]['founder']['items']} test "
              f"questions per seed, {len(seeds)} seeds, exact class. Intervals are 95 % intervals over the seeds.\n")
        print_methods([{m: v for m, v in s.items() if m != "router"} for s in seeds], "founder", label)
        named = [(m, base) for m in ("breed", "cma") for base in ("founder", "soup") if {m, base} <= rows.keys()]
        print_comparisons(rows, named, [(bred, other) for other in ("ties", "grown", "router", "joint")], label)
        print(f"\nThe first {len(named)} comparisons were named before the runs.")
    print(f"## Specialists (`make results-specialists`)\n\n{summary}\n\n![Accuracy of each method](results/specialists.svg)\n\n"
          "Costs and comparisons: [results/specialists.md](results/specialists.md).")


if __name__ == "__main__":
    main()
