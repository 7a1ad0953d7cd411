"""results_seeds: the runs of a seed, statistics over seeds, Markdown tables and bar charts of the pages in docs/results.

    scripts/results_seeds.py RUNS KEY FILE METHOD[=TRAINED]...

Writes to FILE what the pages need of the finished runs METHOD-KEY in RUNS: {METHOD: {acc, items, flops, retained}}. TRAINED
is a folder of runs that made the adapter which METHOD-KEY evaluates, by `shoal train` or `shoal grow`: their FLOPs count too.

    scripts/results_seeds.py --best RUN

Prints the folder of the fittest founder of an evolution.
"""
import itertools
import json
import math
import statistics
import sys
from html import escape
from pathlib import Path

Z95 = 1.959964
T95 = [0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]


def sampled_tokens(result):
    """Tokens of the sampling and of the checks in a result of `shoal grow`."""
    return sum(r.get(k, {}).get(t, 0) for r in result.get("rounds", []) for k in ("cost", "check") for t in ("prefilled", "generated"))


def forward_tokens(folder):
    """Tokens of forward passes that cost as much as the sampling, the checks and the training of the runs in a folder. A trained
    token counts twice (forward, and backward without gradients of the base weights); with rewards four times, since it is also
    sampled, and scored under the reference."""
    total = 0
    for path in Path(folder).glob("*/train.jsonl"):
        steps = [json.loads(line) for line in path.open()]
        total += sum((4 if "reward" in s else 2) * s["tokens"] for s in steps)
    return total + sum(sampled_tokens(json.loads(p.read_text())) for p in Path(folder).glob("*/result.json"))


def run_outcome(folder, trained=None):
    """Of an evolution: accuracy of its result, test questions, FLOPs of the search, accuracy on the retained families."""
    result = json.loads((folder / "result.json").read_text())
    last, spent = result["table"][-1], result["spent"]
    outcome = {"acc": last["acc"], "items": last["n"], "flops": spent["flops"]}
    if trained:
        outcome["flops"] += forward_tokens(trained) * spent["flops"] / spent["forward_tokens"]
    if result.get("retention"):
        outcome["retained"] = statistics.mean(row["evolved"]["acc"] for row in result["retention"])
    return outcome


def best_founder(run):
    generation = json.loads((Path(run) / "result.json").read_text())["generations"][0]
    return f"{run}/adapters/gen_0/{generation['candidates'][0]['name']}"


def seeds_read(folder):
    """The objects of FOLDER/SEED.json, by seed."""
    return {int(p.stem): json.loads(p.read_text()) for p in sorted(Path(folder).glob("*.json"), key=lambda p: int(p.stem))}


def mean_interval(values):
    """(mean, lo, hi): the 95 % t interval of the mean; NaN with one value."""
    n, mean = len(values), statistics.mean(values)
    if n < 2:
        return mean, math.nan, math.nan
    half = T95[min(n - 1, len(T95) - 1)] * statistics.stdev(values) / math.sqrt(n)
    return mean, mean - half, mean + half


def wilson(right, n):
    """(share, lo, hi): Wilson's 95 % interval of a share."""
    p, z2 = right / n, Z95**2
    middle, half = p + z2 / (2 * n), math.sqrt(z2 * (p * (1 - p) + z2 / (4 * n)) / n)
    return p, (middle - half) / (1 + z2 / n), (middle + half) / (1 + z2 / n)


def sign_flip(values):
    """Two-sided p of the mean under all flips of signs."""
    seen = abs(sum(values)) - 1e-12
    flips = itertools.product((1, -1), repeat=len(values))
    return sum(abs(sum(s * v for s, v in zip(f, values))) >= seen for f in flips) / 2 ** len(values)


def holm(p):
    """The p values corrected for their number (Holm 1979)."""
    order, adjusted, most = sorted(range(len(p)), key=p.__getitem__), [0] * len(p), 0
    for rank, i in enumerate(order):
        most = max(most, min(1, p[i] * (len(p) - rank)))
        adjusted[i] = most
    return adjusted


def print_comparisons(rows, named, more=(), label=str):
    """rows: {name: [value per seed]}; named: pairs chosen before the runs, which Holm's correction counts."""
    print("\n| comparison | difference, points | 95 % interval | p over seeds |\n|---|---:|---:|---:|")
    pairs = [*named, *more]
    differences = [[a - b for a, b in zip(rows[x], rows[y])] for x, y in pairs]
    corrected = holm([sign_flip(d) for d in differences[:len(named)]])
    for i, ((x, y), d) in enumerate(zip(pairs, differences)):
        mean, lo, hi = mean_interval(d)
        p = f"{corrected[i]:.2g} (Holm)" if i < len(named) else f"{sign_flip(d):.2g}"
        print(f"| {label(x)} – {label(y)} | {mean:+.1f} | {lo:+.1f} to {hi:+.1f} | {p} |")


def print_methods(seeds, base, label=str):
    """seeds: objects of seeds_read. A row per method, best first, with differences from the method `base`."""
    column = lambda method, key: [100 * s[method][key] for s in seeds]
    less = lambda method, key: [a - b for a, b in zip(column(method, key), column(base, key))]
    spread = lambda values: "{:+.1f} ({:+.1f} to {:+.1f})".format(*mean_interval(values))
    retains = all("retained" in outcome for s in seeds for outcome in s.values())
    print(f"| method | right, % | from {label(base)}, points | p | FLOPs |{' retention, points |' if retains else ''}\n"
          f"|---|---:|---:|---:|---:|{'---:|' if retains else ''}")
    for method in sorted(seeds[0], key=lambda m: -statistics.mean(column(m, "acc"))):
        own = method == base
        cells = [label(method), "{:.1f} ({:.1f} to {:.1f})".format(*mean_interval(column(method, "acc"))),
                 "" if own else spread(less(method, "acc")), "" if own else f"{sign_flip(less(method, 'acc')):.2g}",
                 f"{statistics.mean(s[method]['flops'] for s in seeds):.2g}"]
        if retains:
            cells.append("" if own else spread(less(method, "retained")))
        print("| " + " | ".join(cells) + " |")


def bar_chart(path, title, bars):
    """Writes an SVG of bars [(label, mean, lo, hi)], values from 0 to 100."""
    left, width, row = 240, 420, 24
    height = 40 + row * len(bars)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 70} {height}" font-family="sans-serif" '
           f'font-size="13"><rect width="100%" height="100%" fill="#fff"/><text x="8" y="20">{escape(title)}</text>']
    for i, (label, mean, lo, hi) in enumerate(bars):
        y = 32 + i * row
        out.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>'
                   f'<rect x="{left}" y="{y + 3}" width="{mean / 100 * width:.1f}" height="{row - 8}" fill="#7aa6c2"/>')
        if not math.isnan(lo):
            out.append(f'<path d="M{left + lo / 100 * width:.1f} {y + 11}H{left + hi / 100 * width:.1f}" stroke="#222" '
                       'stroke-width="2"/>')
        out.append(f'<text x="{left + width + 8}" y="{y + 14}">{mean:.1f} %</text>')
    with open(path, "w") as f:
        f.write("\n".join(out) + "\n</svg>\n")


def main():
    if sys.argv[1] == "--best":
        return print(best_founder(sys.argv[2]))
    runs, key, path, *methods = sys.argv[1:]
    pairs = [m.partition("=") for m in methods]
    outcomes = {m: run_outcome(Path(runs) / f"{m}-{key}", trained) for m, _, trained in pairs}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(outcomes, indent=1) + "\n")


if __name__ == "__main__":
    main()
