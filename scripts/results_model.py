#!/usr/bin/env python3
"""Measures the starter model and prints the tables of models/fry/README.md, in Markdown.

    scripts/results_model.py [MODEL] [--n N] [--examples N] [--work DIR]

Accuracy of every family with and without a derivation, of an adapter per hard family, retrieval by depth, the model's
judgement of its own answers, characters per token, and sizes. In the exact class the same digits on every machine.
"""
import argparse
import json
import os
import subprocess

EASY = "copy sort compare sequence voice retrieval about".split()
HARD = "arithmetic pick order route deduction lookup form machine sums judge tools dialogue".split()
SCHEDULES = {"lookup": ("0.001", "6"), "dialogue": ("0.0015", "4")}  # learning rate and epochs that are not 0.004 and 2
DERIVED = "arithmetic route deduction lookup machine sums judge".split()  # families with a derivation that is more than a hint
LANGUAGES = {"English": "docs/FAQ.md", "Japanese": "docs/FAQ.ja.md", "Chinese": "docs/FAQ.zh.md"}


DESCRIPTIONS = {
    "copy": "repeat 3 to 5 letters", "sort": "put 3 or 4 letters in order", "compare": "the larger of two numbers",
    "sequence": "the next letter of a repeating pattern", "voice": "which persona says a sentence",
    "retrieval": "a code that a short text mentions", "about": "talk about Shoal and about the model",
    "arithmetic": "adding a digit to a number of four; *rare:* taking one away",
    "pick": "the larger of two numbers; *rare:* the smaller", "order": "letters ascending; *rare:* descending",
    "route": "where a walk on a grid ends; *rare:* where it began",
    "deduction": "what two premises imply; *rare:* premises in other positions",
    "lookup": "a value in a table; *rare:* of a person's friend",
    "form": "a field of a form; *rare:* of a sentence",
    "machine": "a variable of a program with additions; *rare:* with subtractions",
    "sums": "a sum of three digits; *rare:* a difference",
    "judge": "whether a proposed answer is right; *rare:* to a rare variant",
    "tools": "calls of offered tools and answers from their results; *rare:* chains of two",
    "dialogue": "facts of a conversation, corrected or not; *rare:* undone or repeated corrections"}


def run(*command):
    f32 = {f"SHOAL_{c}_KV_CACHE_DTYPE": "f32" for c in ("EVAL", "TRAIN")}  # as in the recorded figures
    environment = dict(os.environ, **f32)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def evaluate(shoal, model, tasks, n, *options):
    """{(task, adapter): row} of `shoal eval --json`."""
    text = run(shoal, "eval", model, "--tasks", ",".join(tasks), "--n", str(n), "--json", "--quiet", "--exact", *options)
    rows = [json.loads(line) for line in text.splitlines()]
    return {(row["task"], row["adapter"]): row for row in rows if "acc" in row}


def percent(row):
    return f"{100 * row['acc']:.2f} % | {100 * row['lo']:.2f} – {100 * row['hi']:.2f}"


def table(*columns):
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))


def adapters(o):
    """Trains an adapter per hard family and returns {family: (row of the base, row of the adapter)}. The families of
    DERIVED are trained and measured with derivations."""
    rows = {}
    for name in HARD:
        data, out = f"{o.work}/{name}.jsonl", f"{o.work}/{name}"
        derivation = ["--chain-of-thought"] if name in DERIVED else []
        rate, epochs = SCHEDULES.get(name, ("0.004", "2"))
        if not os.path.exists(out + "/adapter_config.json"):
            run(o.shoal, "model", "data", "--quiet", "--tasks", name, "--n", str(o.examples), *derivation, data)
            run(o.shoal, "train", o.model, "--data", data, "--out", out, "--runs", o.work + "/runs", "--quiet", "--exact",
                "--r", "16", "--lr", rate, "--bsz", "16", "--grad-accum", "1", "--epochs", epochs)
        measured = evaluate(o.shoal, o.model, [name], o.adapter_n, "--adapter", out, *derivation)
        rows[name] = measured[name, "base"], measured[name, out]
    return rows


def adapters_table(o):
    table("family", "base", "adapter", "difference, 95 % interval")
    for name, (base, row) in adapters(o).items():
        diff = row["difference"]
        print(f"| {name} | {100 * base['acc']:.2f} % | {100 * row['acc']:.2f} % | "
              f"{100 * diff['value']:+.2f} points, {100 * diff['lo']:+.2f} … {100 * diff['hi']:+.2f} |", flush=True)


def families(o):
    rows = evaluate(o.shoal, o.model, EASY + HARD, o.n)
    table("family", "asks", "n", "accuracy", "95 % interval (Wilson)")
    for name in EASY + HARD:
        print(f"| {name} | {DESCRIPTIONS[name]} | {o.n} | {percent(rows[name, 'base'])} |")
    derived = evaluate(o.shoal, o.model, DERIVED, o.n, "--chain-of-thought")
    table("family", "at once", "with a derivation", "difference")
    for name in DERIVED:
        before, after = rows[name, "base"]["acc"], derived[name, "base"]["acc"]
        print(f"| {name} | {100 * before:.2f} % | {100 * after:.2f} % | {100 * (after - before):+.2f} points |", flush=True)


def others(o):
    print("\nRetrieval from 4,000 tokens by depth:\n\n```\n" + run(o.starter, "needle", o.model, "1000") + "```")
    print("\nJudgements of its own answers:\n\n```\n" + run(o.starter, "judge", o.model, "1000") + "```\n")
    for language, path in LANGUAGES.items():
        print(f"{language}: " + run(o.starter, "tokens", o.model, path).split(": ")[1].strip())
    table("weights", "bytes")
    for kind in "f32", "bf16", "q8_0":
        out = f"{o.work}/{kind}.gguf"
        run(o.shoal, "convert", o.model, "--type", kind, "--out", out, "--quiet")
        print(f"| {kind} | {os.path.getsize(out):,} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="models/fry")
    parser.add_argument("--n", type=int, default=10000, help="questions per family")
    parser.add_argument("--adapter-n", type=int, default=2000, help="questions of a base and its adapter")
    parser.add_argument("--examples", type=int, default=2000, help="conversations an adapter is trained on")
    parser.add_argument("--work", default="build/results-model", help="folder of data and adapters, which are kept")
    parser.add_argument("--parts", default="families,adapters,others")
    parser.add_argument("--shoal", default="build/shoal")
    parser.add_argument("--starter", default="build/starter")
    o = parser.parse_args()
    os.makedirs(o.work, exist_ok=True)
    for part in o.parts.split(","):
        {"families": families, "adapters": adapters_table, "others": others}[part](o)


if __name__ == "__main__":
    main()
