#!/bin/sh
# bench-train: compares Shoal's training with a PyTorch loop (bench/train_torch.py).
#
# Uses a python3 that can import torch. If no python3 can, it installs Debian's python3-torch, and if that fails, it
# prints a message and omits the comparison. Three measurements of Shoal alone follow: twenty adapters in one pass, a
# step of short samples, and training of all weights of a small model. Environment variables and their defaults: ROUNDS
# (5), SHAPE (smollm-135m), QUANTS, the types of Shoal's weights ("bf16 q4_0"), and TYPES, the types of PyTorch's
# weights ("f32 bf16"). An empty TYPES omits the comparison.
set -eu
cd "$(dirname "$0")/.."
shoal="$PWD/build/shoal" rounds="${ROUNDS:-5}" shape="${SHAPE:-smollm-135m}"
types="${TYPES-f32 bf16}" quants="${QUANTS:-bf16 q4_0}"
mkdir -p build/peers

# Sets $python to an interpreter that has torch.
python_find() {
    for python in python3 /usr/bin/python3; do
        $python -c 'import torch' 2>/dev/null && return
    done
    return 1
}

if [ -z "$types" ]; then
    echo "skip the comparison with PyTorch: TYPES is empty"
elif python_find || { sh scripts/setup.sh python3-torch libopenblas0-pthread && python_find; }; then
    $python bench/train_torch.py "$shoal" "$rounds" "$shape" "$quants" "$types"
else
    echo "skip the comparison with PyTorch: python3-torch cannot be installed"
fi

# bench_shoal TITLE OPTIONS…: prints TITLE and measures Shoal's training.
bench_shoal() {
    echo "$1"
    shift
    "$shoal" bench --what train --reps "$rounds" "$@"
}
set -- --shape "$shape" --type "${quants%% *}"
bench_shoal "twenty adapters in one pass" "$@" --samples 20 --tokens 100 --num-adapters 20
bench_shoal "four samples of 40 tokens" "$@" --samples 4 --tokens 40
bench_shoal "all weights of a model with the shape of models/fry" --shape fry --type f32 --num-adapters 0 --samples 16 --tokens 64
