#!/bin/sh
# run_one: runs one test for run.sh and prints its line of the report.
#
# run_one.sh LOG LEVEL PATH: PATH is a cmocka program or a script test_*.sh; LEVEL is a processor level (SHOAL_CPU), "-"
# for the default, or "asan". A lock prevents that the output of parallel tests is mixed. Adds "PASSED FAILED SKIPPED"
# to LOG/counts, failures to LOG/failures and the reasons of skipped tests to LOG/skips.
set -u
log=$1 level=$2 path=$3
name=$(basename "$path" .sh)
out=$log/$(basename "$path").$level # a program and a script may have the same name
limit=600 # seconds until a test is killed

case $level in
- | asan) ;;
*) export SHOAL_CPU="$level" ;;
esac
start=$(date +%s%N)
case $path in
*.sh) SHOAL="$PWD/build/shoal" timeout -k 5 $limit sh "$path" >"$out" 2>&1 ;;
*) CMOCKA_MESSAGE_OUTPUT=TAP timeout -k 5 $limit "$path" >"$out" 2>&1 ;;
esac
status=$?
ms=$((($(date +%s%N) - start) / 1000000))

# TAP of a program: the plan "1..N", then "ok", "not ok", "not ok N # SKIP". A program that dies counts as one failure for
# each test that it did not reach. A script: "ok NAME", "not ok NAME: why", "skip NAME: why".
counts=$(awk -v status=$status '
    /^1\.\.[0-9]+/ { planned += substr($1, 4) }
    /^ok / { passed++ }
    /^not ok [0-9]+ # SKIP/ { skipped++; next }
    /^not ok / { failed++ }
    /^skip / { skipped++ }
    END {
        lost = planned - passed - failed - skipped
        if (planned && lost > 0) failed += lost
        if (status != 0 && failed == 0) failed = 1
        if (passed + failed + skipped == 0) failed = 1
        print passed + 0, failed + 0, skipped + 0
    }' "$out")
set -- $counts

(
    flock 9
    echo "$counts" >>"$log/counts"
    word=ok
    [ "$2" = 0 ] || word=FAIL
    at=
    [ "$level" = - ] || at=" $level"
    printf '  %-4s %-31s %4d passed %3d failed %3d skipped %4d.%d s\n' \
        "$word" "$name$at" "$1" "$2" "$3" $((ms / 1000)) $((ms % 1000 / 100))
    if [ "$2" != 0 ]; then
        # The reason first, then the whole output.
        {
            grep -B 4 -A 6 '^not ok' "$out" | grep -v '^ok\|^not ok.*# SKIP' | cut -c 1-1000 | head -n 60
            tail -n 5 "$out" | cut -c 1-1000
            [ $status = 0 ] || echo "exit status $status"
        } >"$out.why"
        sed 's/^/       ! /' "$out.why"
        sed 's/^/       | /' "$out"
        { echo "  $name$at:"; cat "$out.why"; } >>"$log/failures"
    else
        grep -E '^(SKIP|skip)[: ]' "$out" | sort -u | sed 's/^/       /' | tee "$out.skips"
        [ ! -s "$out.skips" ] || { echo "  $name$at:"; cat "$out.skips"; } >>"$log/skips"
    fi
) 9>>"$log/lock"
rm -f "$out" "$out.why" "$out.skips"
