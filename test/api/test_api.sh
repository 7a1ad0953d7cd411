#!/bin/sh
# test_api: every curl line of docs/API.md, with the server that the page describes: each succeeds, and the page
# documents every route of the program. Then the rules of the wire formats, on separate servers: serve_protocols.py.
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
server=
servers=
finish() {
    for pid in $servers; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; done
    [ -n "$server" ] && kill "$server" 2>/dev/null && wait "$server" 2>/dev/null
    rm -rf "$tmp"
}
trap finish EXIT
command -v curl >/dev/null || { echo "skip api: curl is not installed"; exit 0; }

# An adapter with an effect, trained for a few steps.
printf '%s\n' '{"messages": [{"role": "user", "content": "12 + 30 = ?"}, {"role": "assistant", "content": "answer: 42"}]}' >"$tmp/d.jsonl"
"$shoal" train models/fry --runs "$tmp/runs" --data "$tmp/d.jsonl" --out "$tmp/critic" --r 2 --quiet >/dev/null 2>"$tmp/err" ||
    { echo "not ok an adapter is trained: $(head -c 300 "$tmp/err")"; exit 1; }
"$shoal" train models/fry --runs "$tmp/runs" --data "$tmp/d.jsonl" --out "$tmp/newer" --r 4 --quiet >/dev/null 2>"$tmp/err" ||
    { echo "not ok another one is trained: $(head -c 300 "$tmp/err")"; exit 1; }
echo "The tide rises and falls twice a day." >"$tmp/tide.txt"
"$shoal" knowledge add "$tmp/knowledge.db" "$tmp/tide.txt" --quiet >/dev/null || echo "not ok a knowledge base is made"
"$shoal" serve models/fry --port 0 --json --knowledge "$tmp/knowledge.db" --memory "$tmp/memories.db" --adapter "{\"name\": \"critic\", \"path\": \"$tmp/critic\"}" --router likelihood --enable-lora --max-loras 8 --team panel=examples/team.yaml --agent helper=examples/agent.yaml --fallback safe=examples/fallback.yaml --state "$tmp/state" \
    --runs "$tmp/runs" --no-jobs-idle >"$tmp/listening" 2>"$tmp/err" &
server=$!
for _ in $(seq 600); do
    grep -q listening "$tmp/listening" 2>/dev/null && break
    sleep 0.1
done
url=$(sed -n 's/.*"listening":"http:\/\/\([^"]*\)".*/\1/p' "$tmp/listening")
[ -n "$url" ] || { echo "not ok the server starts: $(head -c 300 "$tmp/err")"; exit 1; }

# The lines inside ```sh fences; variables stay set from one line to the next.
sed -n '/^```sh$/,/^```$/p' docs/API.md | grep -v '^```' >"$tmp/lines"
n=0
while IFS= read -r line; do
    n=$((n + 1))
    here=$(printf '%s\n' "$line" | sed "s|localhost:8000|$url|; s|adapters/critic|$tmp/critic|g; s|adapters/newer|$tmp/newer|g; s|runs/serve/token|$tmp/state/token|; s|curl -s |curl -sS --fail-with-body --max-time 60 |")
    case $line in
    [A-Z]*=*) eval "$here"; continue ;;
    esac
    if eval "$here" >"$tmp/out" 2>"$tmp/why"; then echo "ok line $n: $(printf '%.70s' "$line")"
    else echo "not ok line $n: $(printf '%.90s' "$line"): $(head -c 300 "$tmp/out") $(head -c 200 "$tmp/why")"; fi
done <"$tmp/lines"

# Routes by their constant prefixes.
for route in $(sed -n 's/^ *{"[A-Z]*", "\(\/[^"]*\)",.*/\1/p' src/*/*.c | sed 's/\*$//' | sort -u); do
    if grep -qF -- "$route" docs/API.md; then echo "ok '$route' is described"; else echo "not ok '$route' is described: not in docs/API.md"; fi
done

kill "$server"
if wait "$server"; then echo "ok it ends on SIGTERM"; else echo "not ok it ends on SIGTERM: exit $?"; fi
server=

command -v python3 >/dev/null || { echo "skip protocols: python3 is not installed"; exit 0; }

# up ARGUMENTS…: starts another server; its address is in $url.
up() {
    : >"$tmp/listening"
    "$shoal" serve "$@" --port 0 --json --drain-seconds 2 >"$tmp/listening" 2>"$tmp/err" &
    servers="$servers $!"
    for _ in $(seq 600); do
        url=$(sed -n 's/.*"listening":"\([^"]*\)".*/\1/p' "$tmp/listening")
        [ -n "$url" ] && return 0
        sleep 0.1
    done
    echo "not ok the server of the protocols starts: $(head -c 300 "$tmp/err")"
    exit 1
}

# Two adapters with other output than the base, and a folder for vLLM's resolver.
seed=1
for i in one two; do
    "$shoal" adapter new --model test/models/fry-1 --rank 4 --seed $seed "$tmp/new$i" --quiet >/dev/null 2>"$tmp/err" &&
        "$shoal" adapter blend --model test/models/fry-1 --parents "$tmp/new$i" "$tmp/new$i" --child "$tmp/$i" --compat legacy --mut 1 --mut-std 0.15 --seed $seed \
            --quiet >/dev/null 2>"$tmp/err" || { echo "not ok adapters for the protocols: $(head -c 300 "$tmp/err")"; exit 1; }
    seed=$((seed + 1))
done
echo '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}' >"$tmp/schema.json"
mkdir "$tmp/resolver"
for i in late alien bad; do cp -r "$tmp/two" "$tmp/resolver/$i"; done
sed -i 's/"base_model_name_or_path": "[^"]*"/"base_model_name_or_path": "other\/llama"/' "$tmp/resolver/alien/adapter_config.json"
head -c 100 "$tmp/two/adapter_model.safetensors" >"$tmp/resolver/bad/adapter_model.safetensors"
# The base again, with a template that supports tools.
cp -r test/models/fry-1 "$tmp/tooled"
sed -i "s/\"chat_template\": *\"/&{% if tools %}{{ tools | tojson }}{% endif %}/" "$tmp/tooled/tokenizer_config.json"
up "$tmp/tooled" --state "$tmp/state2" --trust-request-chat-template
TOOLED=$url
VLLM_PLUGINS=lora_filesystem_resolver VLLM_LORA_RESOLVER_CACHE_DIR=$tmp/resolver VLLM_ALLOW_RUNTIME_LORA_UPDATING=True \
    up test/models/fry-1 --adapter "one=$tmp/one" --lora-modules "{\"name\": \"two\", \"path\": \"$tmp/two\", \"base_model_name\": \"fry-1\"}" \
    --served-model-name second-name --enable-lora --max_loras 4 --max_lora_rank 16 --max-cpu-loras 4 --max-num-seqs 4 --allow-check "json-schema:$tmp/schema.json" --state "$tmp/state3"
URL=$url TMP=$tmp TOOLED=$TOOLED TOKEN_FILE=$tmp/state3/token TOOLED_TOKEN_FILE=$tmp/state2/token PYTHONDONTWRITEBYTECODE=1 python3 test/serve/serve_protocols.py
