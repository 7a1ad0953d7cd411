#!/bin/sh
# test_commands: docs/COMMANDS.md is the help that the program prints. Prints "ok NAME" or "not ok NAME: why"; SHOAL is
# the binary.
cd "$(dirname "$0")/../.." || exit 1
if why=$(python3 scripts/commands.py --check "${SHOAL:-build/shoal}" 2>&1); then echo "ok docs/COMMANDS.md"; else echo "not ok docs/COMMANDS.md: $why"; fi
