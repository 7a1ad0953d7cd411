#!/bin/sh
# test_world_oracle: the golden simulations of test/golden/world equal what the oracle computes today.
cd "$(dirname "$0")/../.." || exit 1
if ! command -v python3 >/dev/null 2>&1; then
    echo "skip oracle world: no python3"
    exit 0
fi
exec python3 test/oracle/world.py --check
