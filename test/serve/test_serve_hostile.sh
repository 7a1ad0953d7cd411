#!/bin/sh
# test_serve_hostile: shoal serve with hostile clients (serve_hostile.py). Every answer is an error in the correct
# format, other clients are served meanwhile, memory is released, and every shutdown is clean. SHOAL is the binary.
# alone: it measures times and memory
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
if ! command -v python3 >/dev/null 2>&1; then
    echo "skip serve_hostile: python3 is not here"
    exit 0
fi
"$shoal" adapter new --model test/models/fry-1 --rank 4 --seed 1 "$tmp/spare" --quiet >/dev/null 2>&1 || echo "not ok adapter new: failed"
python3 test/serve/serve_hostile.py "$shoal" "$tmp"
