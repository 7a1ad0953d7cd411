#!/bin/sh
# test_prose: comments and documents are plain technical English: at most 1 idiomatic phrase per 1,000 words (the
# default limit of scripts/prose.py, which also lists them).
set -u
cd "$(dirname "$0")/.." || exit 1
command -v python3 >/dev/null || { echo "skip test_prose: python3 is not installed"; exit 0; }
if out=$(python3 scripts/prose.py --self-test 2>&1); then echo "ok self-test"; else echo "not ok self-test: $out"; fi
if out=$(python3 scripts/prose.py --check 2>&1); then
    echo "ok $(echo "$out" | tail -n 1)"
else
    echo "$out"
    echo "not ok idioms: python3 scripts/prose.py --list FILE shows them"
fi
