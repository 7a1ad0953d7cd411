#!/bin/sh
# test_load: the server with many clients: 200 streams over 20 adapters, 2,000 idle streams, constant memory, and a kill
# -9 in the middle after which no acknowledged data are missing. Prints "ok NAME", "not ok NAME: why" and "skip NAME:
# why" lines; SHOAL is the binary, LOAD_SECONDS the duration (5).
# long, alone: it measures throughput
set -u
shoal=${SHOAL:-build/shoal} seconds=${LOAD_SECONDS:-5}
load=$(dirname "$shoal")/load
tmp=$(mktemp -d) || exit 1
server=
finish() {
    [ -n "$server" ] && kill "$server" 2>/dev/null && wait "$server" 2>/dev/null
    rm -rf "$tmp"
}
trap finish EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
command -v curl >/dev/null || { echo "skip load: curl is not installed"; exit 0; }
ulimit -n 8192 2>/dev/null || { echo "skip load: 8192 open files are not allowed here"; exit 0; }

names=
for i in $(seq 20); do
    "$shoal" adapter new --model test/models/fry-1 --rank 4 --seed "$i" "$tmp/a/agent$i" --quiet 2>"$tmp/err" ||
        { bad "adapters are made" "$(head -c 300 "$tmp/err")"; exit 1; }
    names="$names agent$i"
done
start() {
    rm -f "$tmp/listening"
    "$shoal" serve test/models/fry-1 --port 0 --json --adapter-dir "$tmp/a" --state "$tmp/state" --max-num-seqs 200 \
        --max-model-len 128 >"$tmp/listening" 2>"$tmp/err" &
    server=$!
    for _ in $(seq 600); do
        url=$(sed -n 's/.*"listening":"http:\/\/\([^"]*\)".*/\1/p' "$tmp/listening" 2>/dev/null)
        [ -n "$url" ] && return
        sleep 0.1
    done
    bad "the server starts" "$(head -c 300 "$tmp/err")"
    exit 1
}
resident() { awk '/^VmRSS/ { print $2 }' "/proc/$server/status"; }
start
port=${url##*:}

# Rounds to warm up, until two in a row use no new memory: by then every page of the cache and every thread's heap has been
# used once, also on a busy machine.
before=0 flat=0
for _ in 1 2 3 4 5 6 7 8 9 10 11 12; do
    # shellcheck disable=SC2086
    "$load" "$port" 200 2 32 $names >"$tmp/warm" || bad "200 streams, warming up" "$(cat "$tmp/warm")"
    grown=$(($(resident) - before)) before=$(resident)
    if [ "$grown" -lt 4096 ]; then flat=$((flat + 1)); else flat=0; fi
    [ "$flat" = 2 ] && break
done
# shellcheck disable=SC2086
if "$load" "$port" 200 "$seconds" 32 $names >"$tmp/out" && grep -q '"unfinished":0' "$tmp/out"; then ok "200 streams over 20 adapters for $seconds s"
else bad "200 streams over 20 adapters for $seconds s" "$(cat "$tmp/out")"; fi
echo "# $(cat "$tmp/out")"
after=$(resident)
if [ $((after - before)) -lt 20480 ]; then ok "memory stays flat"; else bad "memory stays flat" "$before to $after kB"; fi

# The stream of a waiting job has no events.
token=$(cat "$tmp/state/token")
job=$(curl -sS -H "X-API-Key: $token" "http://$url/v1/jobs" -d '{"kind": "world", "args": ["test/models/fry-1"], "options": {"generations": 50, "out": "life"}}' | sed 's/.*"id":"\([^"]*\)".*/\1/')
curl -sS -H "X-API-Key: $token" -X POST "http://$url/v1/jobs/$job/pause" >"$tmp/paused"
before=$(resident)
SHOAL_KEY=$token "$load" "$port" 2000 "$seconds" idle "/v1/jobs/$job/events" >"$tmp/idle" &
idle=$!
sleep $((seconds / 2 + 1))
streams=$(curl -sS "http://$url/v1/system" | sed 's/.*"streams":\([0-9]*\).*/\1/')
if [ "$streams" -ge 2000 ]; then ok "2,000 idle streams"; else bad "2,000 idle streams" "there are $streams"; fi
reply=$(curl -sS --max-time 20 "http://$url/v1/completions" -d '{"prompt": "12 + 30 =", "max_tokens": 4}')
case $reply in
*'"text"'*) ok "other requests are served meanwhile" ;;
*) bad "other requests are served meanwhile" "$reply" ;;
esac
after=$(resident)
if [ $((after - before)) -lt 163840 ]; then ok "an idle stream costs little: $(((after - before) / 2)) bytes · 1,000"; else bad "an idle stream costs little" "$before to $after kB for 2,000"; fi
if wait $idle; then ok "no stream broke"; else bad "no stream broke" "$(cat "$tmp/idle")"; fi

# Killed under load: acknowledged data exist afterwards.
key=$("$shoal" key add kept --scope chat jobs admin --store "$tmp/state/serve.db" --json | sed 's/.*"secret":"\([^"]*\)".*/\1/')
# shellcheck disable=SC2086
"$load" "$port" 50 3 32 $names >/dev/null 2>&1 &
stream=$!
second=$(curl -sS -H "X-API-Key: $token" "http://$url/v1/jobs" -H 'Idempotency-Key: k' -d '{"kind": "world", "args": ["test/models/fry-1"], "options": {"generations": 2, "steps": 10, "agents": 4, "held-out": 1, "out": "b"}}' | sed 's/.*"id":"\([^"]*\)".*/\1/')
sleep 1
kill -9 "$server"
wait "$server" 2>/dev/null
wait "$stream" 2>/dev/null
start
list=$(curl -sS -H "Authorization: Bearer $key" "http://$url/v1/jobs")
for id in "$job" "$second"; do
    case $list in
    *"$id"*) ok "job $id survived kill -9" ;;
    *) bad "job $id survived kill -9" "$(printf '%.300s' "$list")" ;;
    esac
done
case $list in
*'"state":"paused"'*) ok "a paused job stays paused" ;;
*) bad "a paused job stays paused" "$(printf '%.600s' "$list")" ;;
esac
