#!/bin/sh
# test_sizes: `make sizes` on a small model: every command works within its plan on a machine of 1 GB; where it needs
# more than the machine has, it is refused with the figure. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why"
# lines; SHOAL is the binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
command -v python3 >/dev/null || { echo "skip sizes: python3 is not installed"; exit 0; }
export SIZES_DIR="$tmp/sizes" SIZES_MODELS="fry:q8_0"

# sizes NAME MACHINES COMMANDS: the table, in $tmp/out.
sizes() {
    if SIZES_MACHINES=$2 SIZES_COMMANDS=$3 python3 scripts/sizes.py "$shoal" >"$tmp/out" 2>"$tmp/err"; then ok "$1"
    else bad "$1" "$(tail -n 5 "$tmp/err")"; fi
}
rows() { grep -c "^| fry q8_0 |.*$1" "$tmp/out"; }

all="chat serve train debate evolve eval world quantize merge"
sizes "every command works on 1 GB" 1 "$all"
[ "$(rows ' | [0-9]* / [0-9–]* |')" = 9 ] && ok "each has a peak" || bad "each has a peak" "$(cat "$tmp/out")"
# A reply has a first token and a rate; serve a start as well; the other commands a time.
[ "$(rows 'chat | [0-9/ –]* |  | [0-9.]* | [0-9.]* | [0-9.]* |')" = 1 ] &&
    [ "$(rows 'serve | [0-9/ –]* | [0-9.]* | [0-9.]* | [0-9.]* |  |')" = 1 ] &&
    [ "$(rows '|  |  |  | [0-9.]* |')" = 7 ] && ok "times" || bad "times" "$(cat "$tmp/out")"
if grep -q 'RLIMIT_AS\.$' "$tmp/out"; then
    echo "skip refusals: memory control groups are not writable"
else
    sizes "an engine is refused on 20 MB" 0.02 "chat serve debate eval"
    [ "$(rows 'refused (')" = 4 ] && [ "$(grep -c '^[1-4]\. .* needs [0-9.]* MB' "$tmp/out")" = 4 ] &&
        ok "with the figure" || bad "with the figure" "$(cat "$tmp/out")"
fi
sizes "a table continues" 1 "$all"
[ ! -s "$tmp/err" ] && ok "without a second measurement" || bad "without a second measurement" "$(cat "$tmp/err")"
[ ! -e "$tmp/sizes/model" ] && ok "no model is left" || bad "no model is left" "$(ls "$tmp/sizes")"
