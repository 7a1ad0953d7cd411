#!/usr/bin/env python3
"""commands: docs/COMMANDS.md, the help of every command, from the program.

    scripts/commands.py [SHOAL]            prints the page
    scripts/commands.py --write [SHOAL]    writes docs/COMMANDS.md
    scripts/commands.py --check [SHOAL]    exits 1 if the page differs

SHOAL is the program, default build/shoal.
"""
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "docs", "COMMANDS.md")
INTRODUCTION = """# Commands

The help of every command, generated from the tables of the program by `scripts/commands.py --write`. `shoal COMMAND --help` prints the main options,
`--help-all` prints this text. [CONFIG.md](CONFIG.md) describes settings files and variables, which can set every option.
"""


def run(program, *args):
    environment = {**os.environ, "SHOAL_CONFIG": ""}
    return subprocess.run([program, *args], check=True, capture_output=True, text=True, env=environment).stdout


def page(program):
    overview = run(program, "--help")
    parts, names = [INTRODUCTION], []
    for line in overview.splitlines():
        group, command = re.fullmatch(r"(\w.*):", line), re.fullmatch(r"  (\w+) +(.*)", line)
        if group:
            parts.append(f"\n**{group[1].capitalize()}**\n\n")
        elif command:
            names.append(command[1])
            parts.append(f"* [`{command[1]}`](#{command[1]}): {command[2]}\n")
    common = None
    for name in names:
        text = run(program, name, "--help-all").rstrip()
        text, _, rest = text.partition("\nfor every command:\n")
        common = common or rest
        parts.append(f"\n## {name}\n\n```text\n{text.rstrip()}\n```\n")
    parts.append(f"\n## Options of every command\n\n```text\n{common.rstrip()}\n```\n")
    return "".join(parts)


def main():
    args = sys.argv[1:]
    mode = args.pop(0) if args and args[0].startswith("--") else None
    text = page(args[0] if args else os.path.join(ROOT, "build", "shoal"))
    if mode == "--write":
        with open(PAGE, "w", encoding="utf-8") as file:
            file.write(text)
    elif mode == "--check":
        with open(PAGE, encoding="utf-8") as file:
            if file.read() != text:
                sys.exit("docs/COMMANDS.md differs from the program: run scripts/commands.py --write")
    elif mode:
        sys.exit(__doc__)
    else:
        print(text, end="")


main()
