#!/bin/sh
# test_docs: the commands of the documents run and print what the pages show.
#
# Every block ```sh of README.md and docs/*.md (except API.md: test_api.sh) runs, in the order of its page, in one shell
# with "set -e". Each page has an empty folder with links to models, data, examples, protocols and worlds, an empty HOME,
# the exact numeric class and a free port in place of 8000. A block ```text after a block ```sh shows output: each of its
# lines must be part of a line that the commands printed. Commands that must not run (hours, network, root, placeholders)
# are in blocks ```console. DOCS="TUTORIAL.md" limits the test to these pages, DOCS_SECONDS (240, for slow and busy machines) is
# the limit of a block.
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
shoal=$(realpath "${SHOAL:-build/shoal}")
limit=${DOCS_SECONDS:-240}
tmp=$(mktemp -d) || exit 1
trap 'for pid in $(cat "$tmp"/*/pid 2>/dev/null); do kill -s KILL -- "-$pid" 2>/dev/null; done; rm -rf "$tmp"' EXIT
trap "exit 1" INT TERM
command -v curl >/dev/null || { echo "skip docs: curl is not installed"; exit 0; }
mkdir "$tmp/bin" && ln -s "$shoal" "$tmp/bin/shoal"

# split PAGE FOLDER: block N becomes N.sh, the output that it shows N.expected, and its line number N.line.
split() {
    awk -v folder="$2" '
        /^ *```/ {
            if (open) { open = 0; close(file); next }
            open = 1; file = "/dev/null"; tag = $0; sub(/^ *```/, "", tag)
            if (tag == "sh") { n++; file = folder "/" n ".sh"; print NR >(folder "/" n ".line"); shown = 1 }
            else if (tag == "text" && shown) { file = folder "/" n ".expected"; shown = 0 }
            next
        }
        open { print >file; next }
        /^#/ { shown = 0 } # output follows its commands in the same section
    ' "$1"
}

# untagged PAGE: the places of blocks without a tag.
untagged() {
    awk '/^ *```/ { if (!open && $0 ~ /``` *$/) print FILENAME ":" NR; open = !open }' "$1"
}

# free_port: prints a port that no program listens on.
free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# run_page PAGE: prints the result of every block to NAME.result.
run_page() {
    page=$1 name=$(basename "$1") here=$tmp/$(basename "$1")
    mkdir -p "$here/blocks" "$here/home" "$here/work"
    split "$page" "$here/blocks"
    [ -f "$here/blocks/1.sh" ] || return 0
    for folder in models data examples protocols worlds; do ln -s "$root/$folder" "$here/work/$folder"; done
    port=$(free_port) || port=18000
    sed -i "s/localhost:8000/localhost:$port/g; s/127\.0\.0\.1:8000/127.0.0.1:$port/g" "$here"/blocks/*.sh
    {
        echo "set -e; cd '$here/work'"
        n=1
        while [ -f "$here/blocks/$n.sh" ]; do
            echo "echo $n >'$here/current'; . '$here/blocks/$n.sh' >'$here/blocks/$n.log' 2>&1; : >'$here/blocks/$n.done'"
            n=$((n + 1))
        done
    } >"$here/page.sh"
    # In a separate process group, so that servers that a page does not end are killed with it.
    PATH=$tmp/bin:$PATH HOME=$here/home SHOAL_SERVE_PORT=$port SHOAL_ALL_EXACT=1 SHOAL_CONFIG='' \
        setsid sh "$here/page.sh" </dev/null >"$here/log" 2>&1 &
    pid=$!; echo $pid >"$here/pid"
    last='' ticks=0
    while kill -0 $pid 2>/dev/null; do
        sleep 0.2
        now=$(cat "$here/current" 2>/dev/null)
        [ "$now" = "$last" ] || ticks=0
        last=$now ticks=$((ticks + 1))
        [ $ticks -le $((limit * 5)) ] || { kill -s KILL -- -$pid; echo "the limit of $limit s" >"$here/blocks/$now.late"; }
    done
    wait $pid 2>/dev/null
    rm -f "$here/pid"
    kill -s TERM -- -$pid 2>/dev/null
    n=1 failed=''
    while [ -f "$here/blocks/$n.sh" ]; do
        block=$here/blocks/$n
        label="$name:$(cat "$block.line")"
        { tr '\r' '\n' <"$block.log" >"$block.out"; } 2>/dev/null
        if [ -n "$failed" ]; then
            echo "not ok $label: block $failed failed before it"
        elif [ ! -f "$block.done" ]; then
            failed=$(cat "$block.line")
            echo "not ok $label: $(cat "$block.late" 2>/dev/null || echo "a command failed"): $(tail -n 3 "$block.out" | tr '\n' ' ')"
        elif [ -f "$block.expected" ]; then
            grep -v '^…$' "$block.expected" | while IFS= read -r line; do
                grep -qF -- "$line" "$block.out" || printf '%s\n' "$line"
            done >"$block.missing"
            if [ -s "$block.missing" ]; then
                echo "not ok $label: it did not print: $(head -n 3 "$block.missing" | tr '\n' '|')"
            else
                echo "ok $label and its output"
            fi
        else
            echo "ok $label"
        fi
        n=$((n + 1))
    done
}

# check_messages PAGE: error messages in the first column of its tables are in the program: of the parts between quoted texts,
# numbers and "…", one of at least 10 bytes. Messages of the JSON library are not, if it is a shared object.
check_messages() {
    awk -F'|' '/^\|/ { print $2 }' "$1" | grep -o '`[^`]*`' | tr -d '`' | grep -v 'invalid token near\|unable to decode' | sort -u |
        while IFS= read -r message; do
            printf '%s\n' "$message" | sed "s/'[^']*'/\n/g; s/[:;…]/\n/g; s/[0-9][0-9.]*/\n/g" | sed 's/^ *//; s/ *$//' | grep -E '.{10}' >"$tmp/parts.$(basename "$1")" || continue
            grep -qaF -f "$tmp/parts.$(basename "$1")" "$shoal" || printf '%s; ' "$message"
        done >"$tmp/unknown.$(basename "$1")"
    if [ -s "$tmp/unknown.$(basename "$1")" ]; then echo "not ok messages of $1: not in the program: $(cat "$tmp/unknown.$(basename "$1")")"; else echo "ok messages of $1"; fi
}

pids=
for page in README.md docs/*.md; do
    name=$(basename "$page")
    [ "$name" = API.md ] && continue
    case " ${DOCS:-$name} " in *" $name "*) ;; *) continue ;; esac
    lines=$(untagged "$page" | tr '\n' ' ')
    if [ -z "$lines" ]; then echo "ok tags of $name"; else echo "not ok tags of $name: blocks without one: $lines"; fi
    case $name in TROUBLESHOOTING*) check_messages "$page" ;; esac
    run_page "$page" >"$tmp/result.$name" 2>&1 &
    pids="$pids $!"
done
for pid in $pids; do wait "$pid"; done
cat "$tmp"/result.*
