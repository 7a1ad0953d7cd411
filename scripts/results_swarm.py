#!/usr/bin/env python3
"""results_swarm: the results of scripts/results-swarm.sh, from the reports of each seed.

    scripts/results_swarm.py FOLDER FAMILIES N

Writes docs/results/debates.md and debates.svg, and prints the part of docs/RESULTS.md.
"""
import contextlib
import json
import statistics
import sys
from pathlib import Path

from results_seeds import bar_chart, mean_interval, print_comparisons

FOLDER = Path(__file__).parent.parent / "docs" / "results"


class Reports:
    """The reports of one command: of every seed and family."""

    def __init__(self, folder, name):
        paths = sorted(Path(folder).glob(f"*/{name}.jsonl"), key=lambda p: int(p.parent.name))
        self.seeds = [[json.loads(line) for line in p.read_text().splitlines()] for p in paths]
        self.agents = [self._best_agent(seed) for seed in self.seeds]

    @staticmethod
    def _best_agent(seed):
        """The agent with the best mean over the families."""
        names = [r["name"] for r in seed[0]["rows"] if r["kind"] == "solo"]
        return max(names, key=lambda name: sum(r["acc"] for report in seed for r in report["rows"] if r["name"] == name))

    def _row(self, report, best, name):
        """A report's row by its name in the table; self-consistency is of the family's best agent."""
        for r in report["rows"]:
            agent, _, rest = r["name"].partition("@")
            if r["name"] == name or name == "best agent" and r["name"] == best:
                return r
            if name.startswith("self-consistency") and r["kind"] == "samples" and name.split(", ")[1] in r["name"]:
                return r
            if name.startswith("best agent@") and agent != "team" and rest == name.partition("@")[2]:
                return r
        return None

    def rows(self, name):
        """[seed][family] of rows; None: no report has the row."""
        found = [[self._row(report, best, name) for report in seed] for seed, best in zip(self.seeds, self.agents)]
        return found if all(r for seed in found for r in seed) else None

    def accuracy(self, name):
        """[seed]: mean over the families, in %."""
        return [100 * statistics.mean(r["acc"] for r in seed) for seed in self.rows(name)]

    def cost(self, name):
        """(calls, tokens read, tokens written) of a question."""
        rows = [(r, report["n"]) for seed, reports in zip(self.rows(name), self.seeds) for r, report in zip(seed, reports)]
        return [statistics.mean(r[key] / n for r, n in rows) for key in ("calls", "prefilled", "generated")]


def print_table(reports, names):
    print("| row | right, % | 95 % interval | calls | tokens read | tokens written |\n|---|---:|---:|---:|---:|---:|")
    for name in names:
        mean, lo, hi = mean_interval(reports.accuracy(name))
        calls, read, written = reports.cost(name)
        print(f"| {name} | {mean:.1f} | {lo:.1f} to {hi:.1f} | {calls:.1f} | {read:.0f} | {written:.0f} |")


def print_families(reports, names, families):
    print(f"\n| row | {' | '.join(families)} |\n|---|{'---:|' * len(families)}")
    for name in names:
        rows = reports.rows(name)
        means = [100 * statistics.mean(seed[i]["acc"] for seed in rows) for i in range(len(families))]
        print(f"| {name} | {' | '.join(f'{m:.1f}' for m in means)} |")


def main():
    folder, families, n = sys.argv[1], sys.argv[2].split(","), sys.argv[3]
    free, choices, second, direct, split = (Reports(folder, x) for x in ("free", "choices", "second", "direct", "split"))
    names = ["base", "best agent", "first-round vote", "debate", "self-consistency, equal generated tokens",
             "self-consistency, equal total tokens", "best agent@6, majority", "team@6, majority", "best agent@6, checked",
             "team@6, checked", "oracle"]
    names = [name for name in names if free.rows(name)]
    values = {name: free.accuracy(name) for name in names}
    mean = {name: statistics.mean(v) for name, v in values.items()}
    summary = (f"Of free answers of three small agents {mean['first-round vote']:.1f} % are right after a vote and "
               f"{mean['debate']:.1f} % after a debate; the best agent alone is right on {mean['best agent']:.1f} %, and a check "
               f"that selects among six answers of the team gives {mean['team@6, checked']:.1f} % ({len(free.seeds)} seeds).")
    bar_chart(FOLDER / "debates.svg", "right answers (line: 95 % over seeds)", [(n, *mean_interval(values[n])) for n in names])
    with open(FOLDER / "debates.md", "w") as f, contextlib.redirect_stdout(f):
        wrong = statistics.mean(100 * report["all_wrong"] for seed in free.seeds for report in seed)
        print(f"# Votes, debates, samples and checks (`make results-swarm`)\n\n{summary}\n\n![Accuracy of each row](debates.svg)\n\n"
              f"{len(free.seeds)} seeds of personas and questions; {n} questions of each of {', '.join(families)}; generated answers "
              "without a chain of thought, exact class. Values are means over families and seeds, with 95 % t intervals over the "
              "seeds; costs are per question, those of checks included. The best agent is that of all families; self-consistency and "
              "samples take the best agent of each family on the same questions, which favours them. Temperatures are tuned on other "
              f"questions. All agents are wrong on {wrong:.1f} % of the questions.\n")
        print_table(free, names)
        print_comparisons(values, [("debate", "first-round vote"), ("debate", "best agent"),
                                   ("team@6, checked", "self-consistency, equal total tokens")],
                          [("team@6, checked", "best agent@6, checked"), ("best agent@6, checked", "best agent@6, majority")])
        print("\nThe first three comparisons were named before the runs; the fourth is the team's share, the fifth the check's.")
        print_families(free, names, families)
        print("\n## Agents that learned to debate\n\nEach agent learns its second turns from real first answers of the team, or, as a "
              "control, the same labels directly, with as many updates. Answers are chosen among four choices.\n")
        rows = {f"{kind}: {name}": r.accuracy(name) for kind, r in (("before", choices), ("second turns", second), ("same labels", direct))
                for name in ("best agent", "first-round vote", "debate")}
        print("| training | best agent | first-round vote | debate |\n|---|---:|---:|---:|")
        for kind in ("before", "second turns", "same labels"):
            print(f"| {kind} | " + " | ".join(f"{statistics.mean(rows[f'{kind}: {x}']):.1f}"
                                              for x in ("best agent", "first-round vote", "debate")) + " |")
        print_comparisons(rows, [("second turns: debate", "second turns: first-round vote"),
                                 ("second turns: debate", "same labels: best agent")])
        print("\n## Split evidence\n\nEvery agent sees a third of the facts. A vote without communication cannot determine the answer; "
              "a debate can.\n")
        print_table(split, ["best agent", "first-round vote", "debate"])
    print(f"## Debates (`make results-swarm`)\n\n{summary}\n\n![Accuracy of each row](results/debates.svg)\n\n"
          "Rows, costs, comparisons, trained debates and split evidence: [results/debates.md](results/debates.md).")


if __name__ == "__main__":
    main()
