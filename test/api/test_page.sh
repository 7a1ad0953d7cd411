#!/bin/sh
# test_page: the web page in a real browser: every view in three languages, both themes, desktop and phone; chat,
# debate, jobs, worlds, evolution, experiments, keys. Screenshots are written to build/page/*.png.
#
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary. Without a browser ($CHROMIUM, or
# chromium in PATH), Node or npm's playwright-core, only the tests with curl run and the rest is skipped with a message.
# Debian: apt-get install --no-install-recommends chromium fonts-noto-cjk
# long, alone: a browser waits for what it shows
set -u
cd "$(dirname "$0")/../.." || exit 1
SHOAL=${SHOAL:-build/shoal}
page_folder=$PWD/build/page
tmp=$(mktemp -d) || exit 1
servers=
finish() {
    for pid in $servers; do kill "$pid" 2>/dev/null; done
    for pid in $servers; do wait "$pid" || bad "every server ends on SIGTERM" "exit $?: $(cat "$tmp"/*.err | head -c 600)"; done
    rm -rf "$tmp"
}
trap finish EXIT
trap 'exit 130' INT TERM
ok() { echo "ok page: $1"; }
bad() { echo "not ok page: $1: $2"; }
# expect_text TEST TEXT FILE: FILE must contain TEXT; case does not matter.
expect_text() { if grep -qiF -- "$2" "$3"; then ok "$1"; else bad "$1" "no '$2' in: $(head -c 300 "$3")"; fi; }

mkdir -p "$page_folder"
# need COMMAND…: runs a command without which the test cannot go on.
need() { "$@" >"$tmp/err" 2>&1 || { bad "$*" "$(tail -n 2 "$tmp/err")"; exit 1; }; }
need "$SHOAL" adapter new --model test/models/fry-1 --rank 2 --seed 1 "$tmp/critic"
need "$SHOAL" adapter new --model test/models/fry-1 --rank 2 --seed 2 "$tmp/newer"
# The runs that the page shows: an evolution with training, and a simulation.
cat >"$tmp/small.yaml" <<YAML
model: test/models/fry-1
personas: [doubter=data/personas/critic.jsonl, explorer=data/personas/explorer.jsonl]
tasks: [copy]
rounds: 0
chain_of_thought: false
test_items: 12
train: {r: 2, max_steps: 4, bsz: 4}
evolve: {generations: 2, population: 4, elites: 1, rank: 2}
fitness: {items: 8}
YAML
need "$SHOAL" evolve "$tmp/small.yaml" --runs "$tmp/runs" --id grown --quiet
need "$SHOAL" world test/models/fry-1 --runs "$tmp/runs" --world worlds/predators.yaml --generations 1 --steps 12 --agents 6 --eval-maps 1 --quiet
simulation_run=$(cd "$tmp/runs" && echo world-*)

# serve NAME FLAGS…: starts a server; its address is then in $url.
serve() {
    name=$1
    shift
    : >"$tmp/$name.out" # so that sed finds it before the server writes to it
    "$SHOAL" serve test/models/fry-1 --port 0 --json --no-jobs-idle --state "$tmp/$name" "$@" >"$tmp/$name.out" 2>"$tmp/$name.err" &
    servers="$servers $!"
    for _ in $(seq 600); do
        url=$(sed -n 's/.*"listening":"\([^"]*\)".*/\1/p' "$tmp/$name.out")
        [ -n "$url" ] && return 0
        sleep 0.1
    done
    bad "serve" "it does not listen: $(tail -n 3 "$tmp/$name.err")"
    exit 1
}
serve locked --api-key sk-of-the-test --no-feedback
locked_url=$url
serve nodes --cluster local:2
nodes_url=$url
printf 'tools: clock\nmax_steps: 1\nmax_tokens: 16\nthought_tokens: 16\n' >"$tmp/helper.yaml"
serve plain --runs "$tmp/runs" --memory "$tmp/memories.db" --adapter critic="$tmp/critic" --adapter newer="$tmp/newer" --team careful=examples/team.yaml --agent "$tmp/helper.yaml"

# ---- the files of the page, with curl
if command -v curl >/dev/null 2>&1; then
    curl -sD "$tmp/head" -H 'Accept: text/html' -o "$tmp/index" "$url/"
    expect_text "the page is at /" "<title>Shoal" "$tmp/index"
    expect_text "the policy allows only the server's own scripts" "content-security-policy: default-src 'self'" "$tmp/head"
    tag=$(sed -n 's/^[Ee][Tt]ag: \([^\r]*\).*/\1/p' "$tmp/head")
    same=$(curl -s -o "$tmp/body" -w '%{http_code} %{size_download}' -H 'Accept: text/html' -H "If-None-Match: W/$tag" "$url/")
    if [ -n "$tag" ] && [ "$same" = "304 0" ]; then ok "a cached file is not sent again"; else bad "a cached file is not sent again" "$same"; fi
    wrong=
    for f in web/*; do
        curl -s -o "$tmp/file" "$url/page/$(basename "$f")"
        cmp -s "$f" "$tmp/file" || wrong="$wrong $f"
    done
    if [ -z "$wrong" ]; then ok "every file of web/ is served"; else bad "every file of web/ is served" "different content:$wrong"; fi
    wrong=
    for f in nothing.js .. %2e%2e%2fMakefile app.js/ ../Makefile; do
        code=$(curl -s --path-as-is -o /dev/null -w '%{http_code}' "$url/page/$f")
        [ "$code" = 404 ] || wrong="$wrong /page/$f: $code"
    done
    if [ -z "$wrong" ]; then ok "no other files are served"; else bad "no other files are served" "$wrong"; fi
else
    echo "skip the files of the page: there is no curl"
fi

# ---- in a browser
skip() {
    echo "skip page in a browser: $1"
    exit 0
}
[ "$(node -p 'process.versions.node.split(".")[0]' 2>/dev/null || echo 0)" -ge 20 ] || skip "playwright-core needs Node 20 (Debian 12 has 18)"
chromium=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome)}
[ -n "$chromium" ] || skip "there is no chromium"
if [ ! -d "$page_folder/node_modules/playwright-core" ]; then
    command -v npm >/dev/null 2>&1 || skip "there is no npm"
    (cd "$page_folder" && timeout 240 npm install --no-save --ignore-scripts --no-audit --no-fund --fetch-retries=1 playwright-core@1.65.1) \
        >"$tmp/npm" 2>&1 || skip "npm could not install playwright-core: $(grep -i 'npm err' "$tmp/npm" | head -n 2 | tr '\n' ' ')"
fi
SHOAL_URL=$url SHOAL_TOKEN=$(cat "$tmp/plain/token") SHOAL_LOCKED_URL=$locked_url SHOAL_NODES_URL=$nodes_url CHROMIUM=$chromium SHOTS=$page_folder SHOAL_ADAPTER=$tmp/critic SHOAL_LIVED=$simulation_run \
    timeout -k 5 500 node test/clients/page.mjs
status=$?
[ $status = 0 ] || bad "the browser's tests" "they ended with $status"
exit $status
