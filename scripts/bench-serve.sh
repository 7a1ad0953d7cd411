#!/bin/sh
# bench-serve: the server under load and the bare engine with the same work, alternately: tokens per second and the time
# to the first token, medians of ROUNDS (5) rounds of SECONDS_EACH (10), for every number of streams in STREAMS ("20
# 200").
#
# Every stream has one of twenty adapters of rank 8 on MODEL (models/fry) and sends the next request after each reply,
# of 16 to 48 tokens. Client and server share the machine's processors; the bare engine uses all of them.
set -eu
cd "$(dirname "$0")/.."
model="${MODEL:-models/fry}" shoal="$PWD/build/shoal" tmp=$(mktemp -d) server=
finish() {
    [ -n "$server" ] && kill "$server" 2>/dev/null && wait "$server" 2>/dev/null
    rm -rf "$tmp"
}
trap finish EXIT
names= paths=
for i in $(seq 20); do
    "$shoal" adapter new --quiet --model "$model" --rank 8 --seed "$i" "$tmp/a/agent$i"
    names="$names agent$i" paths="$paths $tmp/a/agent$i"
done
median() { sed -n "s/.*$2//p" "$1" | sed 's/[,}].*//' | sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
printf '%-8s %-8s %14s %16s %16s\n' streams what tokens/s "first token s" "between tokens s"
for streams in ${STREAMS:-20 200}; do
    "$shoal" serve "$model" --exact --port 0 --json --quiet --adapter-dir "$tmp/a" --state "$tmp/state" \
        --max-num-seqs "$streams" --max-model-len 128 >"$tmp/listening" 2>"$tmp/err" &
    server=$!
    port=
    for _ in $(seq 100); do
        port=$(sed -n 's/.*"listening":"http:\/\/[^"]*:\([0-9]*\)".*/\1/p' "$tmp/listening")
        [ -n "$port" ] && break
        sleep 0.1
    done
    : >"$tmp/served" && : >"$tmp/bare"
    for _ in $(seq 0 "${ROUNDS:-5}"); do # the first is for warm-up
        # shellcheck disable=SC2086
        build/load "$port" "$streams" "${SECONDS_EACH:-10}" 32 $names >>"$tmp/served"
        # shellcheck disable=SC2086
        build/bare "$model" "$streams" "${SECONDS_EACH:-10}" 32 128 $paths >>"$tmp/bare"
    done
    kill "$server" && wait "$server" || true
    server=
    for what in served bare; do
        sed -i 1d "$tmp/$what"
        printf '%-8s %-8s %14s %16s %16s\n' "$streams" "$what" "$(median "$tmp/$what" '"tokens_per_second":')" \
            "$(median "$tmp/$what" '"first_token":{"p50":')" "$(median "$tmp/$what" '"between_tokens":{"p50":')"
    done
done
