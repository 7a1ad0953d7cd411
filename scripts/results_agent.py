#!/usr/bin/env python3
"""results_agent: the results of scripts/results-agent.sh, from the file NAME.json of each row.

    scripts/results_agent.py FOLDER N CLASS FIRST UPDATES ROUNDS SAMPLES

Writes docs/results/agent.md and agent.svg, and prints the part of docs/RESULTS.md. A row whose file is missing is left out.
"""
import contextlib
import json
import sys
from pathlib import Path

from results_seeds import bar_chart, wilson

FOLDER = Path(__file__).parent.parent / "docs" / "results"
LABELS = {"without": "without tools", "untrained": "tools, not trained", "first": "demonstrations", "demonstrated": "more demonstrations",
          "rewarded": "then rewards"}
NEED_TOOLS = ["arithmetic", "lookup", "chain", "sum"]


def percent(share):
    return "–" if share is None else f"{100 * share['value']:.1f}"


def interval(share):
    return "–" if share is None else f"{100 * share['value']:.1f} ({100 * share['lo']:.1f} to {100 * share['hi']:.1f})"


def needing_tools(report):
    """Accuracy on the questions that need a tool, with Wilson's interval of 95 %, in %."""
    kinds = [report["kinds"][k] for k in NEED_TOOLS]
    right = sum(k["accuracy"]["value"] * k["n"] for k in kinds)
    return tuple(100 * v for v in wilson(right, sum(k["n"] for k in kinds)))


def table(rows):
    print("| agent | all that need tools | " + " | ".join(NEED_TOOLS) + " | direct | right calls | unneeded calls | confidence error |")
    print("|---|" + "---|" * (len(NEED_TOOLS) + 5))
    for name, r in rows.items():
        kinds = " | ".join(percent(r["kinds"][k]["accuracy"]) for k in NEED_TOOLS)
        print(f"| {LABELS[name]} | {needing_tools(r)[0]:.1f} | {kinds} | {percent(r['kinds']['direct']['accuracy'])} | {percent(r['right_calls'])} | "
              f"{percent(r['unneeded'])} | {r['calibration_error']:.3f} |")


def summary(rows, n):
    best = max(rows, key=lambda name: needing_tools(rows[name]))
    return (f"On questions that need a calculator or a table of facts, the starter model alone answers {needing_tools(rows['without'])[0]:.1f} % right, "
            f"and {needing_tools(rows[best])[0]:.1f} % as an agent that learned to use these tools ({n} questions about people, towns and numbers that "
            f"it has not seen).")


def page(rows, n, numeric_class, first, updates, rounds, samples):
    print(f"# What tools, demonstrations and rewards gain (`make results-agent`)\n\n{summary(rows, n)}\n\n![Right answers](agent.svg)\n")
    print(f"{n} questions of the test split of `shoal model data --tasks residents`, {numeric_class} class, one seed. Kinds: long arithmetic; one look-up in a "
          f"knowledge base of 300 invented people and towns; a chain of two look-ups; the sum of two look-ups by the calculator; direct questions, "
          f"which need no tool. All figures but the last are percent.\n")
    table(rows)
    print(f"\n*Demonstrations*: {first} updates of 16 conversations whose calls and replies the generator knows; *more*: {updates} more updates from "
          f"other tables.")
    if "rewarded" in rows:
        print(f"*Then rewards*: instead of these, {rounds} rounds in which the agent answers the same questions {samples} times with sampled calls, and "
              f"learns from the runs with a right answer, {updates} updates in all.")
    print()
    print("Right calls: the share of calls with the tool and the arguments of the demonstration, in its order. Unneeded calls: the share of direct "
          "questions in which a tool was called. The confidence error is the expected calibration error of the reported confidence.\n")
    print("| agent | right answers of all (95 % interval) | calls | failed calls | runs without an answer | tokens read | written | s/run |")
    print("|---|---|---|---|---|---|---|---|")
    for name, r in rows.items():
        print(f"| {LABELS[name]} | {interval(r['accuracy'])} | {r['calls']:,} | {r['failed_calls']} | {r['failed_runs']} | {r['prefilled']:,} | "
              f"{r['generated']:,} | {r['seconds'] / r['n']:.2f} |")
    print("\nNo call is malformed: the arguments are written under a grammar of the tool's schema. A call fails if the tool returns an error, such as "
          "for an expression that has no value.")


def part(rows, n):
    print(f"## An agent with tools (`make results-agent`)\n\n{summary(rows, n)} [results/agent.md](results/agent.md) has all figures.\n")
    print("![Right answers](results/agent.svg)\n")
    table(rows)


def main():
    folder, n, numeric_class, first, updates, rounds, samples = sys.argv[1:]
    files = {name: Path(folder) / f"{name}.json" for name in LABELS}
    rows = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    with open(FOLDER / "agent.md", "w") as f, contextlib.redirect_stdout(f):
        page(rows, n, numeric_class, first, updates, rounds, samples)
    bar_chart(FOLDER / "agent.svg", "right answers to questions that need tools, %", [(LABELS[name], *needing_tools(r)) for name, r in rows.items()])
    part(rows, n)


if __name__ == "__main__":
    main()
