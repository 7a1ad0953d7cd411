#!/bin/sh
# test_mcp: the MCP server over HTTP and stdio: hostile messages, rights of keys, sessions, cancelled calls; then the
# official SDKs' clients and the inspector's command line (test/clients/mcp, npm packages of the lock file in
# build/clients-mcp). Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
SHOAL=$(realpath "${SHOAL:-build/shoal}")
home=$PWD/build/clients-mcp
SHOAL_TMP=$(mktemp -d) || exit 1
export SHOAL SHOAL_TMP
server=
finish() {
    [ -z "$server" ] || kill -9 "$server" 2>/dev/null
    wait
    rm -rf "$SHOAL_TMP"
}
trap finish EXIT
trap 'exit 130' INT TERM
. test/clients/npm.sh

if ! "$SHOAL" train test/models/fry-1 --data a=data/personas/critic.jsonl --r 4 --lr 8e-3 --max-steps 10 --bsz 4 --grad-accum 1 \
    --out "$SHOAL_TMP/adapters" --runs "$SHOAL_TMP/runs" --quiet >"$SHOAL_TMP/train" 2>&1; then
    echo "not ok mcp: 'shoal train': $(tail -n 3 "$SHOAL_TMP/train")"
    exit 1
fi
cat >"$SHOAL_TMP/pair.yaml" <<'YAML'
protocol: du
rounds: 2
max_tokens: 30
agents:
  - {name: a, system: You look for what is wrong.}
  - {name: b}
YAML
echo "The tide rises and falls twice a day." >"$SHOAL_TMP/tide.txt"
"$SHOAL" knowledge add "$SHOAL_TMP/knowledge.db" "$SHOAL_TMP/tide.txt" --quiet >/dev/null || echo "not ok mcp: shoal knowledge add"

if command -v python3 >/dev/null 2>&1; then
    python3 test/api/mcp_requests.py
else
    echo "skip mcp requests: python3 is not installed"
fi

[ "$(node_major)" -ge 18 ] || {
    echo "skip mcp sdk: it needs Node 18, and 'node --version' says $(node --version 2>/dev/null || echo nothing)"
    exit 0
}
npm_install "mcp sdk" test/clients/mcp "$home" || exit 0

: >"$SHOAL_TMP/serve.out"
options="--adapter a=$SHOAL_TMP/adapters/a --team $SHOAL_TMP/pair.yaml --knowledge $SHOAL_TMP/knowledge.db --exact --context-shift --loop-tokens 0"
# shellcheck disable=SC2086 # words without blanks
"$SHOAL" serve test/models/fry-1 $options --port 0 --json --state "$SHOAL_TMP/serve.state" >"$SHOAL_TMP/serve.out" 2>"$SHOAL_TMP/serve.err" &
server=$!
for _ in $(seq 600); do
    SHOAL_URL=$(sed -n 's/.*"listening":"\([^"]*\)".*/\1/p' "$SHOAL_TMP/serve.out")
    [ -n "$SHOAL_URL" ] && break
    sleep 0.1
done
[ -n "$SHOAL_URL" ] || { echo "not ok mcp: 'shoal serve' does not listen: $(tail -n 3 "$SHOAL_TMP/serve.err")"; exit 1; }
SHOAL_TOKEN=$(cat "$SHOAL_TMP/serve.state/token")
mcp="mcp $PWD/test/models/fry-1 $options --quiet --state $SHOAL_TMP/mcp.state --runs $SHOAL_TMP/mcp.runs"
SHOAL_ARGS=$(echo "$mcp" | sed 's/ /","/g; s/^/["/; s/$/"]/')
export SHOAL_URL SHOAL_TOKEN SHOAL_ARGS
cp test/clients/mcp/sdk.mjs "$home" # next to the packages, where Node searches for them
timeout -k 5 300 node "$home/sdk.mjs" 2>"$SHOAL_TMP/node" || echo "not ok mcp sdk: exit $?: $(grep -v '^$' "$SHOAL_TMP/node" | head -n 5 | tr '\n' ' ')"

# inspect NAME TARGET…: the inspector's command line calls the tool chat. It looks for ../package.json in its working folder.
inspect() {
    name=$1
    shift
    if cd "$home/node_modules" && timeout 120 node .bin/mcp-inspector-cli --cli "$@" --method tools/call --tool-name chat \
        --tool-arg 'prompt=sort: k b x' temperature=0 >"$SHOAL_TMP/inspector" 2>&1 && grep -q '"text": "answer: b k x"' "$SHOAL_TMP/inspector"; then
        echo "ok mcp inspector: $name"
    else
        echo "not ok mcp inspector: $name: $(tail -n 5 "$SHOAL_TMP/inspector" | tr '\n' ' ')"
    fi
    cd ../../.. || exit 1
}
# shellcheck disable=SC2086 # words without blanks
inspect stdio "$SHOAL" $mcp
inspect http "$SHOAL_URL/mcp" --transport http

kill "$server"
if wait "$server"; then echo "ok mcp: the server ends on SIGTERM"; else echo "not ok mcp: the server ends on SIGTERM: exit $?"; fi
server=
