#!/bin/sh
# test_train_oracle: the golden trainings of test/golden/train are what the oracle computes today.
cd "$(dirname "$0")/../.." || exit 1
for python in python3 /usr/bin/python3; do
    $python -c 'import numpy' 2>/dev/null && OPENBLAS_NUM_THREADS=1 exec $python test/oracle/train_oracle.py --check
done
echo "skip oracle train: no python3 with numpy (Debian: python3-numpy)"
