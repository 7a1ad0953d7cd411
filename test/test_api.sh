#!/bin/sh
# test_api: every curl line of docs/API.md, against the server that the page describes: each is answered with success,
# and every route that the program has stands on the page.
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
server=
finish() {
    [ -n "$server" ] && kill "$server" 2>/dev/null && wait "$server" 2>/dev/null
    rm -rf "$tmp"
}
trap finish EXIT
command -v curl >/dev/null || { echo "skip api: curl is not installed"; exit 0; }

# An adapter that changes something: trained for a moment.
printf '%s\n' '{"messages": [{"role": "user", "content": "12 + 30 = ?"}, {"role": "assistant", "content": "answer: 42"}]}' >"$tmp/d.jsonl"
"$shoal" train models/fry --runs "$tmp/runs" --data "$tmp/d.jsonl" --out "$tmp/critic" --r 2 --quiet >/dev/null 2>"$tmp/err" ||
    { echo "not ok an adapter is trained: $(head -c 300 "$tmp/err")"; exit 1; }
"$shoal" train models/fry --runs "$tmp/runs" --data "$tmp/d.jsonl" --out "$tmp/newer" --r 4 --quiet >/dev/null 2>"$tmp/err" ||
    { echo "not ok another one is trained: $(head -c 300 "$tmp/err")"; exit 1; }
"$shoal" serve models/fry --port 0 --json --adapter "{\"name\": \"critic\", \"path\": \"$tmp/critic\"}" --enable-lora --max-loras 8 --team panel=examples/team.yaml --state "$tmp/state" \
    --runs "$tmp/runs" --no-jobs-idle >"$tmp/listening" 2>"$tmp/err" &
server=$!
for _ in $(seq 100); do
    grep -q listening "$tmp/listening" 2>/dev/null && break
    sleep 0.1
done
url=$(sed -n 's/.*"listening":"http:\/\/\([^"]*\)".*/\1/p' "$tmp/listening")
[ -n "$url" ] || { echo "not ok the server starts: $(head -c 300 "$tmp/err")"; exit 1; }

# The lines inside ```sh fences; what a line assigns is kept from one to the next.
sed -n '/^```sh$/,/^```$/p' docs/API.md | grep -v '^```' >"$tmp/lines"
n=0
while IFS= read -r line; do
    n=$((n + 1))
    here=$(printf '%s\n' "$line" | sed "s|localhost:8000|$url|; s|adapters/critic|$tmp/critic|g; s|adapters/newer|$tmp/newer|g; s|curl -s |curl -sS --fail-with-body --max-time 60 |")
    case $line in
    [A-Z]*=*) eval "$here"; continue ;;
    esac
    if eval "$here" >"$tmp/out" 2>"$tmp/why"; then echo "ok line $n: $(printf '%.70s' "$line")"
    else echo "not ok line $n: $(printf '%.90s' "$line"): $(head -c 300 "$tmp/out") $(head -c 200 "$tmp/why")"; fi
done <"$tmp/lines"

# Routes by their fixed beginnings.
for route in $(sed -n 's/^ *{"[A-Z]*", "\(\/[^"]*\)",.*/\1/p' src/serve/*.c | sed 's/\*$//' | sort -u); do
    if grep -qF -- "$route" docs/API.md; then echo "ok '$route' is described"; else echo "not ok '$route' is described: not in docs/API.md"; fi
done

kill "$server"
if wait "$server"; then echo "ok it ends when told to"; else echo "not ok it ends when told to: exit $?"; fi
server=
