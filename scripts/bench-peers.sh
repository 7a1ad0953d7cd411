#!/bin/sh
# bench-peers: makes random weights and twenty adapters, then compares the speed of Shoal and llama.cpp.
#
# LLAMA_BIN names a folder with llama-bench and llama-server of a native build (GGML_NATIVE=ON). Without it the peer is
# the npm package node-llama-cpp (prebuilt binaries, no scripts run), installed under build/peers or found in PEERS; it
# may be slower. Without node, or if the package cannot be installed, the script prints a message and succeeds. ROUNDS
# (5), QUANTS ("q8_0 q4_0 bf16 f16") and SHAPE (smollm-135m, or another with a context of 2,048 tokens) may be set.
# WHAT limits the rows: "prefill-512 prefill-2048 decode depth serve". ADAPTERS=0 leaves out those with adapters.
# SHOAL_CPU names a level, for a peer that is built for the same instructions.
set -eu
cd "$(dirname "$0")/.."
shoal="$PWD/build/shoal" dir="$PWD/build/peers" peers="${PEERS:-$PWD/build/peers}"
mkdir -p "$dir"
command -v node >/dev/null || { echo "skip bench-peers: no node to run the comparison with"; exit 0; }
if [ "${LLAMA_BIN-}" ]; then
    for program in llama-bench llama-server; do
        [ -x "$LLAMA_BIN/$program" ] || { echo "bench-peers: no program '$LLAMA_BIN/$program'" >&2; exit 2; }
    done
elif [ ! -d "$peers/node_modules/node-llama-cpp" ]; then
    command -v npm >/dev/null || { echo "skip bench-peers: no npm to install the peer with"; exit 0; }
    (cd "$peers" && npm install --silent --no-fund --no-audit --ignore-scripts node-llama-cpp@3) ||
        { echo "skip bench-peers: node-llama-cpp cannot be installed here"; exit 0; }
fi
shape="${SHAPE:-smollm-135m}"
for quant in ${QUANTS:-q8_0 q4_0 bf16 f16}; do
    model="$dir/$shape-$quant.gguf"
    [ -f "$model" ] || "$shoal" model new --quiet --shape "$shape" --type "$quant" --seed 1 "$model"
    i=1
    adapters=
    while [ $i -le "${ADAPTERS:-20}" ]; do
        adapter="$dir/$shape-$i.gguf"
        [ -f "$adapter" ] ||
            "$shoal" adapter new --quiet --model "$model" --rank 8 --seed $i "$adapter"
        adapters="$adapters $adapter"
        i=$((i + 1))
    done
    PEERS="$peers" node bench/peers.mjs "$shoal" "${ROUNDS:-5}" "$model" $adapters
done
