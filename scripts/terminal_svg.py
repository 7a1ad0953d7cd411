#!/usr/bin/env python3
"""terminal_svg: runs commands and draws them with their output as a picture of a terminal.

    scripts/terminal_svg.py OUT.svg COMMAND...    each COMMAND is a line for sh; stderr is drawn too

docs/terminal.svg (on two cores with AVX-512, in a folder with links to models and data):
    scripts/terminal_svg.py docs/terminal.svg \\
        "shoal run models/fry 'pick the smaller of 120 and 350' --temperature 0" \\
        "shoal train models/fry --data data/personas/critic.jsonl --out adapters/critic --lr 4e-3 --max-steps 60" \\
        "shoal eval models/fry --tasks pick --adapter adapters/critic" \\
        "shoal run models/fry 'pick the smaller of 120 and 350' --temperature 0 --adapter adapters/critic"
"""
import html
import subprocess
import sys

COLUMNS, SIZE, LINE, MARGIN = 122, 13, 18, 16
WIDTH = COLUMNS * SIZE * 0.602 + 2 * MARGIN


def wrapped(line):
    return [line[i:i + COLUMNS] for i in range(0, len(line), COLUMNS)] or [""]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    lines = []
    for command in sys.argv[2:]:
        done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines += [("command", part) for part in wrapped("$ " + command)]
        lines += [("output", part) for line in done.stdout.splitlines() for part in wrapped(line.rstrip())]
        lines.append(("output", ""))
    height = len(lines) * LINE + 2 * MARGIN
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height}" font-family="monospace" '
           f'font-size="{SIZE}">\n'
           "<style>text{white-space:pre}.command{fill:#8ec5ff}.output{fill:#e2e4e9}</style>\n"
           f'<rect width="100%" height="100%" rx="8" fill="#15181d"/>\n']
    for i, (kind, text) in enumerate(lines):
        if text:
            out.append(f'<text class="{kind}" x="{MARGIN}" y="{MARGIN + SIZE + i * LINE}">{html.escape(text)}</text>\n')
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write("".join(out) + "</svg>\n")


main()
