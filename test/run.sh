#!/bin/sh
# run: builds Shoal and runs its tests; "make test" calls this script, "make test-all" calls "run.sh --all".
#
# Always: every test program (test_*.c in test/ and its folders, which are named like those of src/) at the default
# processor level, and every script (check_layers.sh, test_*.sh) except those with "# long" in their first lines.
# With --all also: those scripts; every program at every lower processor level that the machine has (SHOAL_CPU), except
# those that contain "levels: once"; every program under the address and undefined-behaviour sanitizers with leak
# checks.
#
# The number of parallel tests is the number of processors (SHOAL_JOBS). A test that contains "alone:" with a reason,
# because it measures times or uses the whole machine, runs separately after the others. A failed test is printed with
# the reason first, then its whole output, and the reason again at the end. The last line is "Tests: N passed, N failed,
# N skipped". Skipped tests are printed with the reason, and again at the end. SHOAL_TESTS="test_a test_b" limits the
# programs and scripts to those names.
set -u
cd "$(dirname "$0")/.." || exit 1
all=${1-}

export LC_ALL=C.UTF-8 # messages in English, whatever the user's language
log=$(mktemp -d) || exit 1
trap 'rm -rf "$log"' EXIT
trap 'exit 130' INT TERM
: >"$log/failures"
: >"$log/counts"
: >"$log/skips"

finish() {
    [ -s "$log/skips" ] && echo "== skipped, once more" && cat "$log/skips"
    [ -s "$log/failures" ] && echo "== failed, once more" && cat "$log/failures"
    awk '{ p += $1; f += $2; s += $3 }
        END { printf "Tests: %d passed, %d failed, %d skipped\n", p, f, s; exit f > 0 }' "$log/counts"
    exit
}

# build NAME [VARIABLE=VALUE]: the binary and the test programs; if this fails, nothing can run.
build() {
    echo "== build: $1"
    if ! make -j"$(nproc)" --no-print-directory ${2+"$2"} all tests >"$log/build" 2>&1; then
        cat "$log/build"
        echo "not ok build: $1"
        echo "0 1 0" >>"$log/counts"
        finish
    fi
    grep -i 'warning' "$log/build"
    return 0
}

# wanted SOURCE: whether SHOAL_TESTS selects it.
wanted() {
    name=$(basename "${1%.*}")
    case " ${SHOAL_TESTS:-$name} " in *" $name "*) return 0 ;; esac
    return 1
}

# programs LEVEL FOLDER: the programs to run at a level, one line "LEVEL PATH" each.
programs() {
    for source in test/test_*.c test/*/test_*.c; do
        wanted "$source" || continue
        case $1 in -|asan) ;; *) grep -q 'levels: once' "$source" && continue ;; esac
        echo "$1 $2/$(basename "$source" .c) $source"
    done
}

# scripts short|long
scripts() {
    for source in test/check_layers.sh test/test_*.sh test/*/test_*.sh; do
        wanted "$source" || continue
        if head -n 20 "$source" | grep -q '^# long'; then kind=long; else kind=short; fi
        [ $kind = "$1" ] && echo "- $source $source"
    done
}

# run NAME: runs the tests on standard input in parallel, and then those marked "alone:".
run() {
    echo "== $1"
    cat >"$log/plan"
    : >"$log/together"
    : >"$log/alone"
    while read -r level path source; do
        list=together
        head -n 40 "$source" | grep -q 'alone:' && list=alone
        echo "$log $level $path" >>"$log/$list"
    done <"$log/plan"
    xargs -r -P "${SHOAL_JOBS:-$(nproc)}" -L 1 sh test/run_one.sh <"$log/together"
    xargs -r -L 1 sh test/run_one.sh <"$log/alone"
}

cpu_flags() {
    flags=" $(sed -n 's/^flags[^:]*://p' /proc/cpuinfo | head -n 1) "
    for flag; do
        case "$flags" in *" $flag "*) ;; *) return 1 ;; esac
    done
}

# The processor's flags limit the levels; the program may still refuse a level that the system does not support.
level_usable() {
    case $1 in
    scalar) return 0 ;;
    avx2) cpu_flags avx2 fma f16c ;;
    avxvnni) cpu_flags avx2 fma f16c avx_vnni ;;
    avx512) cpu_flags avx512f avx512bw avx512vl avx512dq avx512_vnni ;;
    avx512bf16) cpu_flags avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 ;;
    amx) cpu_flags avx512f avx512_bf16 amx_tile amx_int8 amx_bf16 ;;
    esac || return 1
    build/shoal doctor >/dev/null 2>&1 || return 0
    SHOAL_CPU=$1 build/shoal doctor >/dev/null 2>&1
}

build release
# The longest first, so that both processors end at the same time.
{ scripts short | grep test_cli; programs - build; scripts short | grep -v test_cli; } | run "programs and scripts"
[ "$all" = --all ] || finish

best=scalar
for level in avx2 avxvnni avx512 avx512bf16 amx; do
    if level_usable $level; then
        best=$level
    else
        echo "skip level $level: this machine lacks it"
    fi
done
for level in scalar avx2 avxvnni avx512 avx512bf16 amx; do
    [ $level = $best ] && break # the default level, done
    level_usable $level || continue
    case $level in
    avxvnni) programs $level build | grep -E ' test/(kernel|model|adapter|engine)/' ;; # avx2 but for products in int8
    avx512bf16) programs $level build | grep -E ' test/(kernel|model|adapter|engine|backprop|train)/' ;; # avx512 but for the fast class
    *) programs $level build ;;
    esac | run "programs at SHOAL_CPU=$level"
done
scripts long | run "long scripts"

build "sanitizers" BUILD=asan
export ASAN_OPTIONS="detect_leaks=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
programs asan build/asan | run "programs under sanitizers"
finish
