#!/bin/sh
# test_world_oracle: the golden lives of test/golden/world are what the oracle computes today.
cd "$(dirname "$0")/../.." || exit 1
if ! command -v python3 >/dev/null 2>&1; then
    echo "skip oracle world: no python3"
    exit 0
fi
exec python3 test/oracle/world.py --check
