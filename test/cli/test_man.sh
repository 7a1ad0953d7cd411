#!/bin/sh
# test_man: the manual pages of 'shoal help --man' are valid mdoc(7) without a warning, and have every command, option
# and environment variable. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=${SHOAL:-build/shoal}
src=$(dirname "$0")/../../src
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
export SHOAL_CONFIG='' LC_ALL=C.UTF-8

"$shoal" help --man >"$tmp/shoal.1" || bad "help --man" "exit status $?"
commands=$("$shoal" --help | sed -n 's/^  \([a-z]*\) .*/\1/p')
for c in $commands; do
    "$shoal" help --man "$c" >"$tmp/shoal-$c.1" || bad "help --man $c" "exit status $?"
    grep -q "^\.It Xr shoal-$c 1$" "$tmp/shoal.1" || bad "shoal(1)" "it does not name $c"
done
"$shoal" help --man trian >"$tmp/out" 2>"$tmp/err"
status=$?
if [ $status = 2 ] && grep -q "did you mean 'train'" "$tmp/err" && ! [ -s "$tmp/out" ]; then ok "help --man of no command"
else bad "help --man of no command" "exit status $status, $(cat "$tmp/err")"; fi
SOURCE_DATE_EPOCH=86400 "$shoal" help --man run >"$tmp/run"
if [ "$(head -n 1 "$tmp/run")" = ".Dd January 2, 1970" ]; then ok "the date of SOURCE_DATE_EPOCH"
else bad "the date of SOURCE_DATE_EPOCH" "$(head -n 1 "$tmp/run")"; fi

# Variables of the system and of jobs are not those of a user of Shoal.
missing=$(grep -rhoE 'getenv\("[A-Z_]+"' "$src" | cut -d'"' -f2 | sort -u | grep -vxE 'HOME|PATH|TERM|TMPDIR|SHOAL_JOB' |
    while read -r name; do grep -q "^\.It Ev $name$" "$tmp/shoal.1" || echo "$name"; done)
if [ -z "$missing" ]; then ok "shoal(1) has every variable"; else bad "shoal(1) has every variable" "$missing"; fi

command -v mandoc >/dev/null || { echo "skip mandoc: it is not installed"; exit 0; }
# mandoc looks for referenced pages in the folders of the system, where these are not installed.
for page in "$tmp"/shoal*.1; do
    messages=$(mandoc -Tlint -W style "$page" 2>&1 | grep -v 'referenced manual not found: Xr shoal')
    if [ -z "$messages" ]; then ok "$(basename "$page")"; else bad "$(basename "$page")" "$(echo "$messages" | head -n 3)"; fi
done
for c in $commands; do
    mandoc -Tutf8 "$tmp/shoal-$c.1" | sed 's/.\x08//g' >"$tmp/text"
    # An option is "--auth, --no-auth" or "--port N" in the page, a key of a recipe "port: N".
    missing=$("$shoal" "$c" --help-all | sed -n 's/^  --\(\[no-\]\)\{0,1\}\([^ ]*\).*/\2/p' | while read -r name; do
        grep -qE -- "^     (--$name(, --no-$name)?|$name:)( |$)" "$tmp/text" || echo "$name"; done)
    if [ -z "$missing" ]; then ok "shoal-$c(1) has every option"; else bad "shoal-$c(1) has every option" "$missing"; fi
done
mandoc -Tutf8 "$tmp/shoal-run.1" | sed 's/.\x08//g' >"$tmp/text"
holds() { if grep -qF -- "$2" "$tmp/text"; then ok "$1"; else bad "$1" "no '$2'"; fi; }
holds "a synopsis" "     shoal run MODEL [MESSAGE] [options]"
holds "an example" "           shoal run models/fry 'sort: k b x' --temperature 0"
holds "an option with its range and default" "default 64)"
