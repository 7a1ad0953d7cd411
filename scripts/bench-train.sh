#!/bin/sh
# bench-train: compares Shoal's training with a PyTorch loop (bench/train_torch.py).
#
# PyTorch is Debian's python3-torch, which the script installs if possible; else it prints a message. Then it measures
# Shoal only: twenty adapters in one pass, a step of short samples, all weights of a small model. ROUNDS (5), SHAPE
# (smollm-135m), QUANTS ("bf16 q4_0") and TYPES of PyTorch's weights ("f32 bf16") may be set; TYPES= omits PyTorch.
set -eu
cd "$(dirname "$0")/.."
shoal="$PWD/build/shoal" rounds="${ROUNDS:-5}" shape="${SHAPE:-smollm-135m}"
types="${TYPES-f32 bf16}" quants="${QUANTS:-bf16 q4_0}"
mkdir -p build/peers

python_find() {
    for python in python3 /usr/bin/python3; do
        $python -c 'import torch' 2>/dev/null && return
    done
    return 1
}

if [ -z "$types" ]; then
    echo "skip bench-train: no types of PyTorch asked for"
elif python_find || { sh scripts/setup.sh python3-torch libopenblas0-pthread && python_find; }; then
    $python bench/train_torch.py "$shoal" "$rounds" "$shape" "$quants" "$types"
else
    echo "skip bench-train: python3-torch cannot be had here"
fi

alone() {
    echo "$1"
    shift
    "$shoal" bench --what train --reps "$rounds" "$@"
}
set -- --shape "$shape" --quant "${quants%% *}"
alone "twenty adapters in one pass" "$@" --samples 20 --tokens 100 --adapters 20
alone "four samples of 40 tokens" "$@" --samples 4 --tokens 40
alone "all weights of the shape of models/fry" --shape fry --quant f32 --adapters 0 --samples 16 --tokens 64
