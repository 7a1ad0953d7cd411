#!/bin/sh
# test_world_memory: the peak memory (VmHWM) of twenty agents of rank 4 that act and learn over a smollm-135m shape is
# below 100,000,000 bytes at every processor level. A generation of six ticks includes the passes of an update.
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
# long: minutes at the level scalar
set -u
shoal=${SHOAL:-build/shoal}
cd "$(dirname "$0")/../.." || exit 1
limit=100000000
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT

if [ ! -e models/fry/tokenizer.json ]; then echo "skip the memory of twenty agents: models/fry is not there"; exit 0; fi
best=$("$shoal" doctor | sed -n 's/^level *\([a-z0-9]*\).*/\1/p')
for level in ${LEVELS:-scalar avx2 avxvnni avx512 avx512bf16 amx}; do
    SHOAL_CPU=$level "$shoal" doctor >/dev/null 2>&1 || continue
    SHOAL_CPU=$level "$shoal" bench --what life --shape smollm-135m --type nf4 --tokenizer models/fry/tokenizer.json --target q_proj,v_proj --rank 4 \
        --ticks 6 --set low-memory update-group-size=1 optim=sgd momentum=0 lr=0.05 horizon=1 batch-size=2 --threads 2 --json >"$out" 2>&1
    peak=$(sed -n 's/.*"tick_with_update":[0-9.]*[1-9][0-9.]*,"VmHWM":\([0-9]*\).*/\1/p' "$out")
    if [ -n "$peak" ] && [ "$peak" -gt 70000000 ] && [ "$peak" -lt $limit ]; then ok="ok"; else ok="not ok"; fi
    echo "$ok twenty agents in less than $limit bytes at the level $level: ${peak:-$(head -c 300 "$out")}"
    if [ "$level" = "$best" ]; then break; fi
done
