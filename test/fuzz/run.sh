#!/bin/sh
# run: builds the parsers for libFuzzer and searches each for FUZZ_SECONDS (30); "make fuzz" calls this script.
#
# FUZZ_TARGETS="gguf json" limits it to those; FUZZ_JOBS is the number of parallel searches (default: the number of
# processors). A search starts from test/fuzz/corpus/TARGET and writes new inputs to build/fuzz/found/TARGET, never to
# the committed corpus; FUZZ_KEEP=1 merges inputs that cover new code into the corpus. A finding is printed with the
# input's path and the command that reproduces it, and fails the run. clang and its fuzzer runtime are installed if
# possible; without them the script prints a message and succeeds: "make test" runs every committed input without
# either.
set -u
cd "$(dirname "$0")/../.." || exit 1

seconds=${FUZZ_SECONDS:-30}
jobs=${FUZZ_JOBS:-$(nproc)}
out=build/fuzz
mkdir -p $out/found $out/log

# Most of the time inputs stay small, because a few kilobytes suffice for every branch of a parser. A fifth of the time
# is for inputs of up to a megabyte: those that "fuzzer" writes, committed ones repeated, and their mutations. An input
# that takes ten seconds or 512 MB is a finding like a crash.
checks="-timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=512"
limits="-max_len=8192 $checks"
large_seconds=$(((seconds + 4) / 5))

sh scripts/setup.sh clang libclang-rt-dev || true # the probe below decides
if ! echo 'int LLVMFuzzerTestOneInput(const char *p, unsigned long n) { return (void)p, (void)n, 0; }' |
    clang -x c -fsanitize=fuzzer,address,undefined -o $out/probe - 2>$out/log/probe; then
    echo "skip fuzz: clang with libFuzzer is not here: $(head -n 1 $out/log/probe)"
    exit 0
fi
rm -f $out/probe

echo "== build: fuzz"
if ! make -j"$jobs" --no-print-directory BUILD=fuzz $out/fuzzer >$out/log/build 2>&1; then
    cat $out/log/build
    exit 1
fi

targets=${FUZZ_TARGETS:-$(FUZZ_TARGET=list $out/fuzzer)}
count=$(echo $targets | wc -w)
echo "== fuzz: $count targets, $seconds s each, $jobs at a time: about" \
    "$(((count + jobs - 1) / jobs * seconds)) s in all"

# large_seeds TARGET FOLDER: inputs of a megabyte.
large_seeds() {
    FUZZ_TARGET=large FUZZ_LARGE="$2" $out/fuzzer
    for input in $(ls -S "test/fuzz/corpus/$1" | head -n 4); do
        cp "test/fuzz/corpus/$1/$input" "$2/repeated-$input"
        while [ -s "$2/repeated-$input" ] && [ "$(wc -c <"$2/repeated-$input")" -lt 524288 ]; do
            cat "$2/repeated-$input" "$2/repeated-$input" >"$2/twice" && mv "$2/twice" "$2/repeated-$input"
        done
    done
}

# one TARGET: searches with small inputs and then with large ones; fails on a finding, whose path is then in the log.
one() {
    found=$out/found/$1 corpus=test/fuzz/corpus/$1
    mkdir -p "$found" "$corpus"
    dict=test/fuzz/dict/$1.dict
    [ -f "$dict" ] && dict="-dict=$dict" || dict=
    FUZZ_TARGET=$1 $out/fuzzer $limits $dict -max_total_time=$((seconds - large_seconds)) \
        -print_final_stats=1 -close_fd_mask=3 -artifact_prefix="$found/FINDING-" "$found" "$corpus" \
        >"$out/log/$1" 2>&1 || return 1
    large=$(mktemp -d "$FUZZ_DIR/large-XXXXXX") && large_seeds "$1" "$large" || return 1
    # one takes up to a second, and all run before the time limit is checked: two per second
    ls "$large" | shuf | tail -n +$((2 * large_seconds + 1)) | while read -r input; do rm "$large/$input"; done
    FUZZ_TARGET=$1 $out/fuzzer -max_len=1048576 -len_control=0 $checks -max_total_time=$large_seconds \
        -close_fd_mask=3 -artifact_prefix="$found/FINDING-" "$large" >"$out/log/$1.large" 2>&1
    rc=$?
    rm -rf "$large"
    [ $rc = 0 ] || cat "$out/log/$1.large" >>"$out/log/$1"
    return $rc
}

pids= failed=0
FUZZ_DIR=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d) || exit 1
export FUZZ_DIR
trap 'rm -rf "$FUZZ_DIR"' EXIT
trap 'kill $pids 2>/dev/null; exit 130' INT TERM

# stalled TARGET INPUT: whether a timeout does not occur when the input runs again.
stalled() {
    case $2 in
    *FINDING-timeout-*) FUZZ_TARGET=$1 timeout 10 $out/fuzzer $checks "$2" >/dev/null 2>&1 ;;
    *) return 1 ;;
    esac
}

# wait_one TARGET PID [again]: the result of a search.
wait_one() {
    if wait "$2"; then
        runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$out/log/$1")
        cover=$(sed -n 's/.*cov: \([0-9]*\).*corp: \([0-9]*\).*/\1 edges, \2 inputs/p' "$out/log/$1" | tail -n 1)
        printf '  ok   %-16s %9s runs, %s\n' "$1" "$runs" "$cover"
        return
    fi
    input=$(sed -n "s/.*Test unit written to //p" "$out/log/$1" | tail -n 1)
    if [ $# = 2 ] && stalled "$1" "$input"; then
        printf '       %-16s the machine stood still, not the parser: searched again\n' "$1"
        rm -f "$input"
        one "$1" &
        pids="$pids $!"
        wait_one "$1" $! again
        return
    fi
    failed=$((failed + 1))
    printf '  FAIL %-16s %s\n' "$1" "${input:-no input was written}"
    grep -E '^SUMMARY|ERROR: |assertion failed|runtime error' "$out/log/$1" | head -n 5 | sed 's/^/       | /'
    echo "       again: FUZZ_TARGET=$1 $out/fuzzer $checks $input"
}

# `jobs` at a time, in groups: every search takes the same time.
group= size=0
for target in $targets; do
    one "$target" &
    pids="$pids $!" group="$group $target:$!" size=$((size + 1))
    [ "$size" -lt "$jobs" ] && continue
    for pair in $group; do wait_one "${pair%:*}" "${pair#*:}"; done
    group= size=0 pids=
done
for pair in $group; do wait_one "${pair%:*}" "${pair#*:}"; done

if [ -n "${FUZZ_KEEP:-}" ]; then
    for target in $targets; do
        # The smallest set of inputs that reaches every edge; counts of edges are ignored.
        FUZZ_TARGET=$target $out/fuzzer -set_cover_merge=1 -use_counters=0 -max_len=4096 -close_fd_mask=3 \
            "test/fuzz/corpus/$target" "$out/found/$target" >>"$out/log/$target" 2>&1
    done
    echo "kept: $(find test/fuzz/corpus -type f | wc -l) inputs in test/fuzz/corpus"
fi

echo "Fuzz: $((count - failed)) clean, $failed with findings"
[ "$failed" = 0 ]
