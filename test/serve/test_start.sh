#!/bin/sh
# test_start: the messages of 'shoal serve' when it accepts requests: the printed curl line works when a shell runs it,
# without keys, with keys and over TLS. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the
# binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
server=
stop() { [ -n "$server" ] && kill "$server" 2>/dev/null && wait "$server" 2>/dev/null; server=; }
trap 'stop; rm -rf "$tmp"' EXIT
command -v curl >/dev/null || { echo "skip start: curl is not installed"; exit 0; }

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
holds() { if grep -qF -- "$2" "$tmp/err"; then ok "$1"; else bad "$1" "no '$2' in: $(cat "$tmp/err")"; fi; }
# start NAME MODEL FLAGS…: a server whose messages are in $tmp/err.
start() {
    name=$1 model=$2
    shift 2
    : >"$tmp/err" # the last server's messages
    "$shoal" serve "$model" --port 0 --state "$tmp/it's state" "$@" >"$tmp/out" 2>"$tmp/err" &
    server=$!
    for _ in $(seq 600); do
        grep -q '^try: ' "$tmp/err" && return
        kill -0 $server 2>/dev/null || break
        sleep 0.1
    done
    bad "$name" "$(head -c 500 "$tmp/err")"
}
# pasted NAME: a shell runs the curl line; no line is too much.
pasted() {
    sed -n 's/^try: //p' "$tmp/err" >"$tmp/line"
    sh "$tmp/line" >"$tmp/reply" 2>"$tmp/why"
    if grep -q '"finish_reason"' "$tmp/reply"; then ok "$1"; else bad "$1" "$(cat "$tmp/line" "$tmp/reply" "$tmp/why" | head -c 900)"; fi
    if [ "$(wc -l <"$tmp/err")" -le 8 ] && [ ! -s "$tmp/out" ]; then ok "$1: at most eight lines, on stderr"
    else bad "$1: at most eight lines, on stderr" "$(cat "$tmp/out" "$tmp/err")"; fi
}

"$shoal" model new --shape tiny-qwen3 "$tmp/a 'small' model.gguf" 2>"$tmp/err" || bad "a model" "$(cat "$tmp/err")"
adapters=
for i in 1 2 3 4 5; do
    "$shoal" adapter new --model test/models/fry-1 --rank 2 --seed $i "$tmp/new$i" >/dev/null 2>"$tmp/err" || bad "an adapter" "$(cat "$tmp/err")"
    # an untrained adapter has no effect, which is a warning
    "$shoal" adapter blend --model test/models/fry-1 --parents "$tmp/new$i" "$tmp/new$i" --child "$tmp/a$i" --compat legacy --mut 1 --mut-std 0.1 --seed $i \
        --quiet >/dev/null 2>"$tmp/err" || bad "an adapter" "$(cat "$tmp/err")"
    adapters="$adapters one$i=$tmp/a$i"
done
start "without keys" test/models/fry-1 --team panel=examples/team.yaml --adapter $adapters
holds "the models are listed" "model fry-1, 5 adapters (one1, one2, one3, one4 …), 1 team (team:panel)"
holds "no key is needed" "keys: none; this machine may chat without one"
holds "the file of the token" "token in $tmp/it's state/token"
pasted "the curl line works without keys"
stop
start "a model name with quotes and blanks" "$tmp/a 'small' model.gguf"
holds "a model without adapters" "model a 'small' model, 0 adapters, 0 teams"
sed -i 's/"max_tokens": 64/"max_tokens": 4/' "$tmp/err" # its context has 64 tokens
pasted "the curl line works with quotes in the name"
stop
cp "$tmp/a 'small' model.gguf" "$tmp/$(printf 'x\377').gguf"
start "a model name that is not UTF-8" "$tmp/$(printf 'x\377').gguf"
holds "a model name that is not UTF-8 is shown without the invalid byte" "model x�,"
sed -i 's/"max_tokens": 64/"max_tokens": 4/' "$tmp/err"
pasted "a model whose file name is not UTF-8"
stop
start "with keys" test/models/fry-1 --api-key a-secret-of-this-test
holds "a key is needed" "keys: every request needs a key"
pasted "the curl line works with keys"
if grep -q a-secret-of-this-test "$tmp/err"; then bad "no key is printed" "$(cat "$tmp/err")"; else ok "no key is printed"; fi
stop

for flag in --quiet --json; do
    : >"$tmp/out"
    "$shoal" serve test/models/fry-1 --port 0 --state "$tmp/it's state" $flag >"$tmp/out" 2>"$tmp/err" &
    server=$!
    for _ in $(seq 600); do
        [ -s "$tmp/it's state/token" ] && { [ $flag = --quiet ] || [ -s "$tmp/out" ]; } && break
        sleep 0.1
    done
    [ $flag = --quiet ] && sleep 0.3 # nothing shows that nothing more will be printed
    if [ ! -s "$tmp/err" ] && { [ $flag = --quiet ] && [ ! -s "$tmp/out" ] || grep -q '^{"listening":"[^"]*","page":"[^"]*","token_file":"[^"]*"}$' "$tmp/out"; }
    then ok "$flag prints no more than before"; else bad "$flag prints no more than before" "$(cat "$tmp/out" "$tmp/err")"; fi
    stop
done

command -v openssl >/dev/null || { echo "skip tls: openssl is not installed"; exit 0; }
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=shoal.example -keyout "$tmp/k.pem" -out "$tmp/c.pem" 2>"$tmp/why" ||
    bad "a certificate is made" "$(tail -3 "$tmp/why")"
chmod 600 "$tmp/k.pem"
for host in 127.0.0.1 0.0.0.0; do
    start "TLS on $host" test/models/fry-1 --host $host --api-key a-secret-of-this-test --tls-cert "$tmp/c.pem" --tls-key "$tmp/k.pem"
    pasted "the curl line works over TLS on $host"
    stop
done
