#!/bin/sh
# test_arch_oracle: the golden answers of test/golden/arch are what the oracle computes today.
cd "$(dirname "$0")/../.." || exit 1
if ! command -v python3 >/dev/null 2>&1; then
    echo "skip oracle: no python3"
    exit 0
fi
exec python3 test/oracle/arch_oracle.py --check
