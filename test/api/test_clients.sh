#!/bin/sh
# test_clients: the server with real clients: the npm packages openai, ollama, LangChain and LangGraph, and the requests
# of lm-evaluation-harness and of vLLM's users. Their programs are test/clients/*.mjs.
#
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary. Packages from the lock file are
# installed into build/clients, once for each version of it; no file is written next to the sources.
set -u
cd "$(dirname "$0")/../.." || exit 1
SHOAL=${SHOAL:-build/shoal}
home=$PWD/build/clients
SHOAL_TMP=$(mktemp -d) || exit 1
servers=
finish() {
    for pid in $servers; do kill -9 "$pid" 2>/dev/null; done
    wait
    rm -rf "$SHOAL_TMP"
}
trap finish EXIT
trap 'exit 130' INT TERM

skip_all() {
    echo "skip clients: $1"
    exit 0
}
. test/clients/npm.sh
[ "$(node_major)" -ge 18 ] || skip_all "they need Node 18, and 'node --version' says $(node --version 2>/dev/null || echo nothing)"

# serve NAME MODEL FLAGS…: starts a server; its address is then in $url.
serve() {
    name=$1
    shift
    : >"$SHOAL_TMP/$name.out" # exists before the server writes it
    "$SHOAL" serve "$@" --port 0 --drain-seconds 5 --json --state "$SHOAL_TMP/$name.state" >"$SHOAL_TMP/$name.out" 2>"$SHOAL_TMP/$name.err" &
    servers="$servers $!"
    for _ in $(seq 600); do
        url=$(sed -n 's/.*"listening":"\([^"]*\)".*/\1/p' "$SHOAL_TMP/$name.out")
        [ -n "$url" ] && return 0
        sleep 0.1
    done
    echo "not ok clients: 'shoal serve' does not listen: $(tail -n 3 "$SHOAL_TMP/$name.err")"
    exit 1
}

# A model whose template calls tools by name.
tools=$SHOAL_TMP/fry-tools
cp -r test/models/fry-1 "$tools"
sed 's/"chat_template": "/&{% if tools %}{{ '"'<|im_start|>system\\\\n'"' }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ '"'<|im_end|>\\\\n'"' }}{% endif %}/' \
    test/models/fry-1/tokenizer_config.json >"$tools/tokenizer_config.json"

# Adapters trained in seconds: any output that differs from the base's suffices.
if ! "$SHOAL" train test/models/fry-1 --data a=data/personas/critic.jsonl b=data/personas/practitioner.jsonl --r 4 --lr 8e-3 --max-steps 40 --bsz 4 \
    --grad-accum 1 --out "$SHOAL_TMP/adapters" --runs "$SHOAL_TMP/runs" --quiet >"$SHOAL_TMP/train" 2>&1; then
    echo "not ok clients: 'shoal train': $(tail -n 3 "$SHOAL_TMP/train")"
    exit 1
fi
cp -r "$SHOAL_TMP/adapters/a" "$SHOAL_TMP/adapters/broken"
echo '{' >"$SHOAL_TMP/adapters/broken/adapter_config.json"

# The reference for LangGraph's debate.
cat >"$SHOAL_TMP/pair.yaml" <<'END'
protocol: du
rounds: 3
max_tokens: 40
agents:
  - {name: a, adapter: adapters/a, system: You look for what is wrong.}
  - {name: b, adapter: adapters/b}
END

serve plain test/models/fry-1 --adapter a="$SHOAL_TMP/adapters/a" b="$SHOAL_TMP/adapters/b" --team "$SHOAL_TMP/pair.yaml" --exact
SHOAL_URL=$url SHOAL_TOKEN=$(cat "$SHOAL_TMP/plain.state/token")
serve narrow "$tools" --max-num-seqs 1
SHOAL_NARROW_URL=$url SHOAL_NARROW_TOKEN=$(cat "$SHOAL_TMP/narrow.state/token") SHOAL_NARROW_MODEL=$tools SHOAL_MODEL=$PWD/test/models/fry-1 SHOAL_LM_EVAL=$PWD/test/clients/lm_eval
SHOAL_ADAPTERS=$SHOAL_TMP/adapters LANGSMITH_TRACING=false
export SHOAL SHOAL_TMP SHOAL_URL SHOAL_TOKEN SHOAL_NARROW_TOKEN SHOAL_NARROW_URL SHOAL_NARROW_MODEL SHOAL_MODEL SHOAL_LM_EVAL SHOAL_ADAPTERS LANGSMITH_TRACING

clients="vllm lm_eval"
npm_install "clients of npm" test/clients "$home" && clients="$clients openai langchain langgraph ollama"
for client in $clients; do
    # Next to the packages, where Node searches for them.
    cp test/clients/lib.mjs "test/clients/$client.mjs" "$home"
    timeout -k 5 120 node "$home/$client.mjs" 2>"$SHOAL_TMP/node" || echo "not ok $client: exit $?: $(grep -v '^$' "$SHOAL_TMP/node" | head -n 5 | tr '\n' ' ')"
done

for pid in $servers; do
    kill "$pid"
    (sleep 30 && kill -9 "$pid") >/dev/null 2>&1 &
    guard=$!
    if wait "$pid"; then echo "ok a server ends on SIGTERM"; else echo "not ok a server ends on SIGTERM: exit $?"; fi
    kill "$guard"
done
servers=
