#!/bin/sh
# results-personas FOLDER SEED: trains the personas of results-grow and results-swarm, unless they are there: FOLDER/critic,
# FOLDER/practitioner and FOLDER/explorer, rank 8, with one thread, in the exact class. SHOAL is the program.
set -eu
at=$1 seed=$2
"$SHOAL" model data --quiet --n 2000 --seed "$seed" "$at/personas" >&2
for name in critic practitioner explorer; do
    [ -s "$at/$name/adapter_model.safetensors" ] ||
        "$SHOAL" train models/fry --exact --quiet --threads 1 --data "$at/personas/$name.jsonl" --out "$at/$name" --r 8 \
            --lr 4e-3 --bsz 4 --grad-accum 4 --epochs 1 --lora-dropout 0 --seed "$seed" --runs "$at/runs" >&2
done
