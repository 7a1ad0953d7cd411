#!/bin/sh
# api: mutated requests to the server under the sanitizers for FUZZ_API_SECONDS (60), from FUZZ_API_SEED (1): see
# api.py. SHOAL is the binary, build/asan/shoal by default. Skips with a message if Python is not installed.
set -u
cd "$(dirname "$0")/../.." || exit 1
SHOAL=${SHOAL:-build/asan/shoal}
export SHOAL PYTHONDONTWRITEBYTECODE=1
if ! command -v python3 >/dev/null 2>&1; then
    echo "skip API fuzz: python3 is not installed"
    exit 0
fi
exec python3 test/fuzz/api.py --seconds "${FUZZ_API_SECONDS:-60}" --seed "${FUZZ_API_SEED:-1}" "$@"
