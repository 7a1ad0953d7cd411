#!/bin/sh
# test_official: the MCP client with the official servers of npm, server-everything and server-filesystem, over stdio and
# streamable HTTP, and 'shoal agent --mcp' with them.
#
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary, build/test_mcp calls tools. Packages
# from the lock file are installed into build/mcp, once for each version of it.
set -u
cd "$(dirname "$0")/../.." || exit 1
SHOAL=${SHOAL:-build/shoal}
home=$PWD/build/mcp
tmp=$(mktemp -d) || exit 1
server=
finish() {
    [ -n "$server" ] && kill "$server" 2>/dev/null
    wait
    rm -rf "$tmp"
}
trap finish EXIT
trap 'exit 130' INT TERM

skip_all() {
    echo "skip official MCP servers: $1"
    exit 0
}
node_major() { node -p 'process.versions.node.split(".")[0]' 2>/dev/null || echo 0; }
[ "$(node_major)" -ge 18 ] || skip_all "they need Node 18, and 'node --version' says $(node --version 2>/dev/null || echo nothing)"
command -v npm >/dev/null 2>&1 || skip_all "there is no npm"

stamp=$(cat test/mcp/package.json test/mcp/package-lock.json | cksum)
mkdir -p "$home"
if [ "$(cat "$home/installed" 2>/dev/null)" != "$stamp" ]; then
    cp test/mcp/package.json test/mcp/package-lock.json "$home" && rm -f "$home/installed"
    if (cd "$home" && timeout 240 npm ci --ignore-scripts --no-audit --no-fund --fetch-retries=1) >"$tmp/npm" 2>&1; then
        echo "$stamp" >"$home/installed"
    else
        why=$(grep -i 'npm err' "$tmp/npm" | head -n 3 | tr '\n' ' ')
        case $why in
        *EUSAGE* | *EINTEGRITY* | *ERESOLVE* | *ETARGET* | *E404*) echo "not ok official MCP servers: $why" && exit ;;
        *) skip_all "'npm ci' could not install them: $why" ;;
        esac
    fi
fi
packages=$home/node_modules/@modelcontextprotocol
everything="node $packages/server-everything/dist/index.js"

# check NAME EXPECTED TARGET TOOL ARGUMENTS: EXPECTED is a part of the result.
check() {
    name=$1 expected=$2
    shift 2
    got=$(build/test_mcp "$@" 2>&1)
    case $got in
    *"$expected"*) echo "ok $name" ;;
    *) echo "not ok $name: expected '$expected', got: $(echo "$got" | head -c 500)" ;;
    esac
}

# check_everything NAME TARGET
check_everything() {
    check "$1: echo" "2025-11-25: Echo: 豆腐" "$2" echo '{"message": "豆腐"}'
    check "$1: sum" "The sum of 2 and 3 is 5." "$2" get-sum '{"a": 2, "b": 3}'
    check "$1: image" "(image, image/png, " "$2" get-tiny-image '{}'
    check "$1: structured content" '"temperature"' "$2" get-structured-content '{"location": "New York"}'
    check "$1: resource" "demo://resource/dynamic/text/1" "$2" get-resource-reference '{"resourceType": "Text", "resourceId": 1}'
    check "$1: resource links" "(resource 'Text Resource 2': demo://" "$2" get-resource-links '{"count": 3}'
    check "$1: annotated" "Error: Operation failed" "$2" get-annotated-message '{"messageType": "error", "includeImage": true}'
    check "$1: progress" "Long running operation completed" "$2" trigger-long-running-operation '{"duration": 1, "steps": 5}'
    check "$1: wrong arguments" "error: the tool failed" "$2" get-sum '{"a": "x"}'
    check "$1: unknown tool" "error: " "$2" no-such-tool '{}'
}

export SHOAL_TEST_SECRET=x
check_everything "everything, stdio" "$everything stdio"
case $(build/test_mcp "$everything stdio" get-env '{}') in
*SHOAL_TEST_SECRET*) echo "not ok environment: a server gets every variable" ;;
*'"PATH"'*) echo "ok environment" ;;
*) echo "not ok environment: no PATH" ;;
esac

PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export PORT
$everything streamableHttp >"$tmp/http" 2>&1 &
server=$!
for _ in $(seq 300); do
    grep -q listening "$tmp/http" && break
    sleep 0.1
done
check_everything "everything, HTTP" "http://127.0.0.1:$PORT/mcp"
if grep -q "session termination" "$tmp/http"; then echo "ok sessions end"; else echo "not ok sessions end: no DELETE arrived"; fi

mkdir "$tmp/files" && echo "三百円" >"$tmp/files/price.txt" && echo secret >"$tmp/secret.txt"
filesystem="node $packages/server-filesystem/dist/index.js $tmp/files"
check "filesystem: list" "[FILE] price.txt" "$filesystem" list_directory "{\"path\": \"$tmp/files\"}"
check "filesystem: read" "三百円" "$filesystem" read_text_file "{\"path\": \"$tmp/files/price.txt\"}"
check "filesystem: outside" "error: the tool failed" "$filesystem" read_text_file "{\"path\": \"$tmp/secret.txt\"}"
check "filesystem: write" "Successfully wrote" "$filesystem" write_file "{\"path\": \"$tmp/files/new.txt\", \"content\": \"x\"}"

tools=$("$SHOAL" agent --list-tools --mcp "all=$everything stdio" --mcp "files=$filesystem" 2>"$tmp/err")
for name in all__echo all__get-sum files__read_text_file files__directory_tree; do
    case $tools in *"$name: "*) echo "ok agent: $name" ;; *) echo "not ok agent: no tool $name: $(head -c 300 "$tmp/err")" ;; esac
done
answer=$("$SHOAL" agent models/fry --tools '' --mcp "all=$everything stdio" --mcp-tools all__echo --json 'sort: k b x' 2>"$tmp/err")
case $answer in
*'"all__echo":'*'"answer":'*) echo "ok agent: an answer with the probabilities of the tools" ;;
*) echo "not ok agent: $answer $(head -c 500 "$tmp/err")" ;;
esac
