#!/bin/sh
# screenshot: evolves the demo's adapters and writes a picture of the web page that shows the run.
#
#     scripts/screenshot.sh [OUT.png]    the default is docs/page.png; SHOAL is the binary (build/shoal)
#
# The run is that of `shoal demo` in the exact numeric class, so its curves and family tree are the same on every
# processor. It takes two minutes and needs chromium (scripts/setup.sh --tests; CHROMIUM names another one).
set -eu
cd "$(dirname "$0")/.."
out=$(realpath "${1:-docs/page.png}")
shoal=${SHOAL:-build/shoal}
max_bytes=200000
die() {
    echo "screenshot: $*" >&2
    exit 1
}
chromium=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome)} || die "there is no chromium"
tmp=$(mktemp -d)
server=
finish() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    wait
    rm -rf "$tmp"
}
trap finish EXIT
trap 'exit 130' INT TERM

export SHOAL_ALL_EXACT=1
"$shoal" evolve examples/demo.yaml --runs "$tmp/runs" --id demo --quiet >"$tmp/log" 2>&1 || die "evolve: $(tail -n 3 "$tmp/log")"
: >"$tmp/listening"
"$shoal" serve models/fry --port 0 --json --state "$tmp/state" --runs "$tmp/runs" >"$tmp/listening" 2>"$tmp/log" &
server=$!
until grep -q '"page"' "$tmp/listening"; do
    kill -0 "$server" 2>/dev/null || die "serve: $(tail -n 3 "$tmp/log")"
    sleep 0.1
done
# This machine may read the runs without the token.
address=$(sed -n 's/.*"page":"\([^"]*\)".*/\1/p' "$tmp/listening")#/evolution/demo

# browse FLAG...: opens the page for 5 seconds of virtual time, which does not advance during requests.
browse() {
    LANGUAGE=en timeout 120 "$chromium" --headless --no-sandbox --user-data-dir="$tmp/profile" --lang=en --hide-scrollbars \
        --window-size=1280,896 --virtual-time-budget=5000 "$@" "$address" 2>"$tmp/log" || die "chromium: $(tail -n 3 "$tmp/log")"
}
browse --dump-dom >"$tmp/page.html"
grep -q 'class="node[^"]* best"' "$tmp/page.html" || die "the page does not show the family tree"
browse --screenshot="$tmp/page.png"
size=$(stat -c %s "$tmp/page.png")
[ "$size" -le $max_bytes ] || die "the picture has $size bytes, more than $max_bytes"
mv "$tmp/page.png" "$out"
echo "$out: $size bytes"
