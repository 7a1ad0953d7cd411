#!/bin/sh
# test_config: the sources of option values from the user's view; and that a dry run leaves no files. Prints "ok NAME",
# "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
root=$PWD
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
unset SHOAL_CONFIG

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
# says NAME CODE TEXT COMMAND…: the command exits with CODE and its stderr contains TEXT.
says() {
    name=$1 code=$2 text=$3
    shift 3
    "$@" >"$tmp/out" 2>"$tmp/err"
    got=$?
    if [ $got != "$code" ]; then bad "$name" "exit $got, not $code: $(head -c 300 "$tmp/err")"
    elif [ -n "$text" ] && ! grep -qF -- "$text" "$tmp/err"; then bad "$name" "no '$text' in: $(head -c 300 "$tmp/err")"
    else ok "$name"; fi
}
# from NAME OPTION VALUE SOURCE COMMAND…: checks the option's value and source in config explain --json.
from() {
    name=$1 want="\"option\":\"$2\",\"value\":$3,\"secret\":$6,\"from\":\"$4\",\"source\":\"$5\""
    shift 6
    "$@" >"$tmp/out" 2>"$tmp/err"
    if grep -qF -- "$want" "$tmp/out"; then ok "$name"
    else bad "$name" "no $want in: $(head -c 300 "$tmp/err") $(grep -F "\"option\":\"${want#\"option\":\"}" "$tmp/out" | head -c 200)"; fi
}

mkdir "$tmp/here" && cd "$tmp/here" || exit 1
cat >shoal.conf <<'END'
# settings of this folder
[all]
threads = 2
[serve]
port = 9001
max-jobs = 3
api-key = hush
adapter = a=x
adapter = b=y
[train]
r = 4
lr = 0.002
END
chmod 644 shoal.conf
explain="$shoal config explain serve --json"
from "the file" port '"9001"' file ./shoal.conf:5 false $explain
from "the file's section of all" threads '"2"' file ./shoal.conf:3 false $explain
from "a list of the file" adapter '"a=x b=y"' file ./shoal.conf:9 false $explain
from "the default" max-waiting '"2048"' default "" false $explain
from "a variable over the file" port '"9002"' env SHOAL_SERVE_PORT false env SHOAL_SERVE_PORT=9002 $explain
from "a variable for all" threads '"1"' env SHOAL_ALL_THREADS false env SHOAL_ALL_THREADS=1 $explain
from "a flag over both" port '"9003"' flag "" false env SHOAL_SERVE_PORT=9002 $explain -- --port 9003
from "a secret is not shown" api-key null file ./shoal.conf:7 true $explain
if "$shoal" config explain serve 2>&1 | grep -q hush; then bad "nor in the table" "it is"; else ok "nor in the table"; fi
says "secrets that others can read give a warning" 0 "'./shoal.conf' contains secrets" $explain
chmod 600 shoal.conf
$explain >/dev/null 2>"$tmp/err"
if grep -q "contains secrets" "$tmp/err"; then bad "private secrets give no warning" "$(cat "$tmp/err")"; else ok "private secrets give no warning"; fi
says "a found file is not used silently" 0 "settings of './shoal.conf' are used" "$shoal" doctor
if "$shoal" doctor --help | grep -q "settings are read from './shoal.conf'"; then ok "help names it"; else bad "help names it" "no"; fi
printf 'lr: 0.004\n' >in && printf 'model: m\ntrain:\n  lr: 0.004\n' >r.yaml
from "a recipe over the file" lr '"0.004"' recipe r.yaml false "$shoal" config explain train --json -- r.yaml
from "a key that the recipe omits has the file's value" r '"4"' file ./shoal.conf:11 false "$shoal" config explain train --json -- r.yaml
from "a flag over the recipe" lr '"0.008"' flag "" false "$shoal" config explain train --json -- --lr 0.008 r.yaml
from "another file" port '"8000"' default "" false env SHOAL_CONFIG= $explain
printf '[world]\nsize = 33\nworld = seed\n' >world.conf
from "an option of a file over the rule set" size '"33"' file world.conf:2 false "$shoal" config explain world --config world.conf --json
says "an unknown variable is warned of" 0 "SHOAL_SERVE_PROT sets nothing; did you mean SHOAL_SERVE_PORT?" env SHOAL_SERVE_PROT=1 $explain
says "a missing file" 1 "cannot open 'none.conf'" "$shoal" doctor --config none.conf
says "so of the variable" 1 "cannot open 'none.conf'" env SHOAL_CONFIG=none.conf "$shoal" doctor

# wrong NAME TEXT LINE…: check and any command refuse a file of these lines, with TEXT.
wrong() {
    name=$1 text=$2
    shift 2
    printf '%s\n' "$@" >wrong.conf
    says "$name" 2 "$text" "$shoal" config check wrong.conf
    says "$name, by another command" 2 "$text" "$shoal" doctor --config wrong.conf
}
wrong "an unknown option" "wrong.conf:2: serve has no option 'prot'; did you mean 'port'?" "[serve]" "prot = 1"
wrong "a value out of range" "wrong.conf:2: 'port' cannot be 70000" "[serve]" "port = 70000"
wrong "an unknown section" "wrong.conf:1: no command 'srve'; did you mean 'serve'?" "[srve]"
wrong "an option of one command for all" "wrong.conf:2: [all] has no option 'port'" "[all]" "port = 1"
wrong "a key of the command line only" "wrong.conf:2: [all] has no option 'config'" "[all]" "config = other"
wrong "a value before any section" "wrong.conf:1: 'port' precedes every section" "port = 1"
says "a good file" 0 "" "$shoal" config check shoal.conf
cp wrong.conf shoal.conf
says "config check reads an invalid file" 2 "shoal.conf:1: 'port'" "$shoal" config check shoal.conf
says "and does not keep another from it" 0 "" "$shoal" config check world.conf
says "and named by the command that fails" 2 "./shoal.conf:1: 'port'" "$shoal" doctor
says "which can ignore it" 0 "" "$shoal" doctor --config ''
chmod 666 shoal.conf
says "a found file that others may write" 2 "others may write it" "$shoal" doctor
rm shoal.conf

# ---- defaults that changed
"$shoal" config defaults | sed 's/"max-waiting": "2048"/"max-waiting": "1024"/' >old.json
printf 'defaults = old.json\n[serve]\nport = 1\n' >pinned.conf
says "a changed default is reported" 0 "serve's default of 'max-waiting' was 1024 in" "$shoal" config explain serve --config pinned.conf
printf 'max-waiting = 7\n' >>pinned.conf
"$shoal" config explain serve --config pinned.conf >/dev/null 2>"$tmp/err"
if grep -q "default of" "$tmp/err"; then bad "but not for options that are set" "$(cat "$tmp/err")"; else ok "but not for options that are set"; fi
cd "$root" || exit 1
