#!/bin/sh
# results-world: writes docs/RESULTS.md's part on the world and docs/world.svg, from models/fry and this file only.
#
# Every group is one configuration, each of its runs a seed, GROUP-sSEED below $WORK/runs; all are evaluated after each
# generation on the same few held-out maps, and at the end on many. Interrupted runs are continued. The curves of a finished
# run are kept in docs/results/world, and a run that has them there is not run again (FOUND names another folder, for other
# sizes). In the exact class the same commands give the same digits on every processor, so the runs may come from different
# machines. SEEDS, GROUPS_OF_RUNS, GENERATIONS, HELD and FINAL (number of maps), AT (decisions), WORK (build/results-world),
# THREADS and SHOAL may be set.
set -eu
cd "$(dirname "$0")/.."
export SHOAL_WORLD_KV_CACHE_DTYPE=f32 # as in the recorded figures
shoal="${SHOAL:-$PWD/build/shoal}" work="${WORK:-build/results-world}" held="${HELD:-2}" final="${FINAL:-16}" generations="${GENERATIONS:-12}" at="${AT:-60000}"
seeds="${SEEDS:-1 2 3 4 5}" groups="${GROUPS_OF_RUNS:-both online evolution frozen untrained taught taught_online one_taught one_online}"
runs="$work/runs" base="$work/fry-q8_0.gguf" found="${FOUND:-docs/results/world}"
mkdir -p "$runs"
[ -f "$base" ] || "$shoal" quantize --quiet models/fry "$base" --type q8_0 >/dev/null # a third of f32's time

# The defaults of version 0.1, in which these groups are measured; --num-adapters 0: a separate adapter for every agent.
old="--num-adapters 0 --curriculum 0 --temperature 2 --elites 4 --update-interval 10 --batch-size 4 --shared-experience-fraction 0 --horizon 16 --discount 0.9 --entropy-coef 0.05 --lr 1e-3 --warmup-steps 20"

# Flags of a group, in addition to the common ones.
flags() {
    rewards="--update-interval 2 --batch-size 16 --shared-experience-fraction 1 --lr 2e-3 --entropy-coef 0.03"
    twice="--generations $((2 * generations))" # without a teacher: they need more generations
    teacher="--learn clone --update-interval 2 --batch-size 8 --replay-fraction 1"
    shared="--num-adapters 1 --no-breed --init-noise 0 --update-interval 2 --batch-size 64 --buffer-size 20000"
    case $1 in
    both) echo "$rewards $twice" ;;
    online) echo "$rewards $twice --no-breed" ;;
    evolution) echo "$twice --learn none" ;;
    frozen) echo "--learn none --no-breed --generations 1" ;;
    untrained) echo "--learn none --no-breed --init-noise 0 --generations 1" ;;
    taught) echo "$teacher" ;;
    taught_online) echo "$teacher --no-breed" ;;
    one_taught) echo "--learn clone $shared" ;;
    one_online) echo "$shared $twice --lr 2e-3 --entropy-coef 0.03" ;;
    esac
}

# keep FOLDER TO: the curve of the run in FOLDER.
keep() {
    mkdir -p "$2"
    cp "$1/curve.jsonl" "$2/curve.jsonl"
}

for seed in $seeds; do
    for group in $groups; do
        run="$group-s$seed" last="$work/final/$group-s$seed"
        [ ! -s "$found/final/$run/curve.jsonl" ] || continue
        echo "$run" >&2
        # shellcheck disable=SC2046,SC2086
        "$shoal" world "$base" --exact --quiet --threads "${THREADS:-0}" $old --seed "$seed" --generations "$generations" \
            --eval-maps "$held" --runs "$work/db" --out "$runs/$run" $(flags "$group") >/dev/null
        # the final evaluation: no training
        case $group in one_*) minds="--num-adapters 1" ;; *) minds="--num-adapters 0" ;; esac
        # shellcheck disable=SC2086
        "$shoal" world "$base" --exact --quiet --threads "${THREADS:-0}" --adapter "$runs/$run" $minds --learn none --no-breed \
            --temperature 2 --init-noise 0 --generations 0 --eval-maps "$final" --runs "$work/db" --out "$last" >/dev/null
        keep "$runs/$run" "$found/runs/$run"
        keep "$last" "$found/final/$run"
    done
done

# The deliveries of a group after $at decisions of each run.
delivered() { "$shoal" world compare "$1" --runs "$found/runs" --at-decisions "$at" | awk -v group="$1" '$1 == group { print $4 }'; }

{
    cat <<END
## The world (\`make results-world\`)

Twenty agents learn from rewards alone to find food and carry it home: after $at decisions an agent delivers $(delivered one_online) units in an episode if all twenty share one adapter, $(delivered both) if each
has its own adapter and the best adapters are bred, and $(delivered online) if each has its own adapter and none is bred. So breeding is compared with both alternatives at an equal number of decisions: to share
one adapter, and to keep twenty separate adapters.

The agents run on the starter model in q8_0, with the rules \`repaired\` and episodes of 500 ticks, $generations generations with a teacher and $((2 * generations)) without, $(echo "$seeds" | wc -w) seeds. An adapter has
rank 8 on all projections. \`one_online\` is the shared adapter, which learns during its episode by policy gradient from rewards. In \`both\` each adapter learns from its own steps and
those of other agents, and the next generation is bred from it. \`online\` learns in the same way and is not bred, \`evolution\` is bred and does not learn, \`frozen\` does neither,
\`untrained\` is the model without adapters. \`taught\`, \`taught_online\` and \`one_taught\` are \`both\`, \`online\` and \`one_online\` with a teacher (\`reflex\`, which has the same
observations) instead of rewards. An update uses 64 decisions in \`one_online\` and 16 for each of the twenty adapters in \`both\` and \`online\`; their other options of learning are equal.

![Learning curves](world.svg)

END
    printf 'At an equal number of decisions, on %s held-out maps:\n\n' "$held"
    "$shoal" world compare one_online both online --runs "$found/runs" --at-decisions "$at" | sed 's/^/    /'
    cat <<END

At the ends of the runs, on the same maps (80 % refers to the deliveries of the policy \`rule\`):

END
    "$shoal" world compare $groups --runs "$found/runs" --out docs/world.svg | sed 's/^/    /'
    printf '\nThe same with a teacher instead of rewards, compared with learning alone and evolution alone:\n\n'
    "$shoal" world compare taught taught_online evolution frozen untrained --runs "$found/runs" | sed 's/^/    /'
    printf '\nAfter the last generation, on %s maps, which are the same for all groups:\n\n' "$final"
    "$shoal" world compare $groups --runs "$found/final" | sed 's/^/    /'
} >"$work/part.md"
sh scripts/results-part.sh "The world" <"$work/part.md"
