#!/bin/sh
# run: builds Shoal and runs every test; "make test" is this script.
#
# 1. Every test program at the default processor level, then at every lower level the machine has
#    (SHOAL_CPU). A test whose source holds the comment "levels: once" runs at the default only.
# 2. test/check_layers.sh and test/test_*.sh, which print "ok NAME", "not ok NAME: why" and
#    "skip NAME: why" lines and find the built binary in SHOAL.
# 3. Every program once more under the address and undefined-behaviour sanitizers, leaks included.
# Of a program that fails first the reason is shown, then all that it said, and the reason once more
# at the end. The last line is "Tests: N passed, N failed, N skipped"; a program that dies counts as
# one failure for each test it did not reach. What is skipped is said aloud.
# SHOAL_TESTS="test_a test_b" limits the programs and scripts to those names.
set -u
cd "$(dirname "$0")/.." || exit 1

log=$(mktemp -d) || exit 1
trap 'rm -rf "$log"' EXIT
trap 'exit 130' INT TERM
passed=0 failed=0 skipped=0
: >"$log/failures"
limit=600 # seconds before a program counts as hung

finish() {
    [ -s "$log/failures" ] && echo "== failed, once more" && cat "$log/failures"
    echo "Tests: $passed passed, $failed failed, $skipped skipped"
    [ "$failed" = 0 ]
    exit
}

# build NAME [VARIABLE=VALUE]: the binary and the test programs; without them nothing can run.
build() {
    echo "== build: $1"
    if ! make -j"$(nproc)" --no-print-directory ${2+"$2"} all tests >"$log/build" 2>&1; then
        cat "$log/build"
        echo "not ok build: $1"
        failed=$((failed + 1))
        finish
    fi
    grep -i 'warning' "$log/build"
    return 0
}

wanted() {
    case " ${SHOAL_TESTS:-$1} " in *" $1 "*) return 0 ;; esac
    return 1
}

# report NAME STATUS START: adds the counts that awk left in $log/counts, and prints the progress
# line, and on failure everything.
report() {
    read -r p f s <"$log/counts"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    ms=$((($(date +%s%N) - $3) / 1000000))
    word=ok
    [ "$f" = 0 ] || word=FAIL
    printf '  %-4s %-24s %4d passed %3d failed %3d skipped %4d.%d s\n' \
        "$word" "$1" "$p" "$f" "$s" $((ms / 1000)) $((ms % 1000 / 100))
    if [ "$f" != 0 ]; then
        # First why, then everything.
        {
            grep -B 4 -A 6 '^not ok' "$log/out" | grep -v '^ok\|^not ok.*# SKIP' | cut -c 1-1000 | head -n 60
            tail -n 5 "$log/out" | cut -c 1-1000
            [ "$2" = 0 ] || echo "exit status $2"
        } >"$log/why"
        sed 's/^/       ! /' "$log/why"
        sed 's/^/       | /' "$log/out"
        { echo "  $1${SHOAL_CPU:+ at SHOAL_CPU=$SHOAL_CPU}:"; cat "$log/why"; } >>"$log/failures"
    else
        grep -E '^(SKIP|skip)[: ]' "$log/out" | sort -u | sed 's/^/       /'
    fi
}

# program_run PATH: one cmocka program, whose TAP is counted: the plan "1..N", then "ok",
# "not ok", "not ok N # SKIP".
program_run() {
    start=$(date +%s%N)
    CMOCKA_MESSAGE_OUTPUT=TAP timeout -k 5 $limit "$1" >"$log/out" 2>&1
    status=$?
    awk -v status=$status '
        /^1\.\.[0-9]+/ { planned += substr($1, 4) }
        /^ok [0-9]/ { passed++ }
        /^not ok [0-9]+ # SKIP/ { skipped++; next }
        /^not ok [0-9]/ { failed++ }
        END {
            lost = planned - passed - failed - skipped
            if (lost > 0) failed += lost
            if (status != 0 && failed == 0) failed = 1
            if (passed + failed + skipped == 0) failed = 1
            print passed + 0, failed + 0, skipped + 0
        }' "$log/out" >"$log/counts"
    report "$(basename "$1")" $status "$start"
}

# programs_run FOLDER each|all: "each" leaves out the tests that run once only.
programs_run() {
    for source in test/test_*.c; do
        [ -f "$source" ] || continue
        name=$(basename "$source" .c)
        wanted "$name" || continue
        if [ "$2" = each ] && grep -q '/\* levels: once \*/' "$source"; then continue; fi
        program_run "$1/$name"
    done
}

script_run() {
    start=$(date +%s%N)
    SHOAL="$PWD/build/shoal" timeout -k 5 $limit sh "$1" >"$log/out" 2>&1
    status=$?
    awk -v status=$status '
        /^ok / { passed++ }
        /^not ok / { failed++ }
        /^skip / { skipped++ }
        END {
            if (status != 0 && failed == 0) failed = 1
            if (passed + failed + skipped == 0) failed = 1
            print passed + 0, failed + 0, skipped + 0
        }' "$log/out" >"$log/counts"
    report "$(basename "$1" .sh)" $status "$start"
}

cpu_flags() {
    flags=" $(sed -n 's/^flags[^:]*://p' /proc/cpuinfo | head -n 1) "
    for flag; do
        case "$flags" in *" $flag "*) ;; *) return 1 ;; esac
    done
}

# The processor's flags say what could run; the program may still refuse a level that the system
# withholds.
level_usable() {
    case $1 in
    scalar) return 0 ;;
    avx2) cpu_flags avx2 fma f16c ;;
    avx512) cpu_flags avx512f avx512bw avx512vl avx512dq avx512_vnni ;;
    amx) cpu_flags avx512f avx512_bf16 amx_tile amx_int8 amx_bf16 ;;
    esac || return 1
    build/shoal doctor >/dev/null 2>&1 || return 0
    SHOAL_CPU=$1 build/shoal doctor >/dev/null 2>&1
}

build release
echo "== tests at the default level"
programs_run build all

best=scalar
for level in avx2 avx512 amx; do
    if level_usable $level; then
        best=$level
    else
        echo "skip level $level: this machine lacks it"
    fi
done
for level in scalar avx2 avx512 amx; do
    [ $level = $best ] && break # the default level, done
    level_usable $level || continue
    echo "== tests at SHOAL_CPU=$level"
    export SHOAL_CPU=$level
    programs_run build each
    unset SHOAL_CPU
done

echo "== layers and scripts"
for script in test/check_layers.sh test/test_*.sh; do
    if [ -f "$script" ] && wanted "$(basename "$script" .sh)"; then script_run "$script"; fi
done

build "sanitizers" BUILD=asan
echo "== tests under sanitizers"
export ASAN_OPTIONS="detect_leaks=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
programs_run build/asan all
finish
