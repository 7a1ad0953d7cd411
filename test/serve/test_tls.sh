#!/bin/sh
# test_tls: serving over TLS: chats and streams, refused connections, and errors in the certificate or its key, which are
# reported before the model is loaded. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
server=
finish() {
    [ -n "$server" ] && kill "$server" 2>/dev/null && wait "$server" 2>/dev/null
    rm -rf "$tmp"
}
trap finish EXIT
for tool in curl openssl; do
    command -v $tool >/dev/null || { echo "skip tls: $tool is not installed"; exit 0; }
done

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
# make_pair NAME: writes NAME.key, a private key, and NAME.pem, its self-signed certificate for localhost.
make_pair() {
    openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 \
        -keyout "$tmp/$1.key" -out "$tmp/$1.pem" 2>"$tmp/err" || { bad "a certificate is made" "$(tail -3 "$tmp/err")"; exit 1; }
    chmod 600 "$tmp/$1.key"
}
make_pair a
make_pair b

# refused NAME TEXT FLAGS…: the server does not start and its error contains TEXT. The model does not exist, so an error that
# names it would show that the model is opened before the certificate.
refused() {
    name=$1 text=$2
    shift 2
    "$shoal" serve "$tmp/no-model" --port 0 --state "$tmp/state" "$@" >"$tmp/out" 2>"$tmp/err"
    got=$?
    if [ $got = 0 ]; then bad "$name" "exit 0"
    elif ! grep -qF -- "$text" "$tmp/err"; then bad "$name" "no '$text' in: $(head -c 300 "$tmp/err")"
    elif grep -q no-model "$tmp/err"; then bad "$name" "the model was opened first"
    else ok "$name"; fi
}
refused "another certificate's key" "are not a certificate and its key" --tls-cert "$tmp/a.pem" --tls-key "$tmp/b.key"
refused "a key without a certificate" "both --tls-cert and --tls-key" --tls-key "$tmp/a.key"
refused "a certificate without a key" "both --tls-cert and --tls-key" --tls-cert "$tmp/a.pem"
refused "a missing key" "cannot open '$tmp/none.key'" --tls-cert "$tmp/a.pem" --tls-key "$tmp/none.key"
printf 'this is no PEM\n' >"$tmp/text"
refused "an invalid certificate" "are not a certificate and its key" --tls-cert "$tmp/text" --tls-key "$tmp/a.key"
if [ "$(id -u)" = 0 ]; then echo "skip an unreadable key: root reads everything"
else
    cp "$tmp/a.key" "$tmp/closed.key"
    chmod 000 "$tmp/closed.key"
    refused "an unreadable key" "Permission denied" --tls-cert "$tmp/a.pem" --tls-key "$tmp/closed.key"
fi
cp "$tmp/a.key" "$tmp/open.key"
chmod 644 "$tmp/open.key"
"$shoal" serve test/models/fry-1 --dry-run --tls-cert "$tmp/a.pem" --tls-key "$tmp/open.key" >/dev/null 2>"$tmp/err"
if grep -qF "others can read the key '$tmp/open.key'" "$tmp/err"; then ok "a warning about a key that others can read"
else bad "a warning about a key that others can read" "$(head -c 300 "$tmp/err")"; fi
"$shoal" serve test/models/fry-1 --dry-run --tls-cert "$tmp/a.pem" --tls-key "$tmp/a.key" >/dev/null 2>"$tmp/err"
if grep -q "can read" "$tmp/err"; then bad "no warning about a key that only its owner can read" "$(head -c 300 "$tmp/err")"
else ok "no warning about a key that only its owner can read"; fi

"$shoal" serve test/models/fry-1 --port 0 --json --state "$tmp/state" --tls-cert "$tmp/a.pem" --tls-key "$tmp/a.key" >"$tmp/listening" 2>"$tmp/err" &
server=$!
for _ in $(seq 600); do
    grep -q listening "$tmp/listening" 2>/dev/null && break
    sleep 0.1
done
port=$(sed -n 's/.*"listening":"https:\/\/[^"]*:\([0-9]*\)".*/\1/p' "$tmp/listening")
[ -n "$port" ] || { bad "the server starts" "$(head -c 300 "$tmp/err")"; exit 1; }
ok "the server starts, and prints an https URL"
chat() {
    curl -sS --max-time 60 --cacert "$tmp/a.pem" "https://localhost:$port/v1/chat/completions" -H 'Content-Type: application/json' "$@"
}
body='"messages": [{"role": "user", "content": "12 + 30 = ?"}], "max_tokens": 8, "temperature": 0'
chat -d "{$body}" >"$tmp/whole" 2>"$tmp/err"
if grep -q '"finish_reason"' "$tmp/whole"; then ok "a chat"; else bad "a chat" "$(head -c 300 "$tmp/whole" "$tmp/err")"; fi
chat -N -d "{$body, \"stream\": true}" >"$tmp/stream" 2>"$tmp/err"
if [ "$(grep -c '^data: {' "$tmp/stream")" -gt 1 ] && tail -n 3 "$tmp/stream" | grep -q '^data: \[DONE\]'; then ok "a streamed chat"
else bad "a streamed chat" "$(head -c 300 "$tmp/stream" "$tmp/err")"; fi

if curl -sS --max-time 20 --cacert "$tmp/b.pem" "https://localhost:$port/health" >/dev/null 2>&1; then bad "a client that trusts another certificate does not connect" "it did"
else ok "a client that trusts another certificate does not connect"; fi
if curl -sS --max-time 20 "http://localhost:$port/health" >"$tmp/out" 2>/dev/null; then bad "plain HTTP on that port is not answered" "answered: $(head -c 100 "$tmp/out")"
else ok "plain HTTP on that port is not answered"; fi
for version in 1.0 1.1; do # security level 0, because otherwise Debian's openssl does not offer these versions, and the server would not be tested
    if curl -sS --max-time 20 --cacert "$tmp/a.pem" --tlsv1.0 --tls-max $version --ciphers 'DEFAULT@SECLEVEL=0' "https://localhost:$port/health" >/dev/null 2>"$tmp/err"; then
        bad "TLS $version is refused" "it was accepted"
    elif grep -q 'SSL_connect\|alert' "$tmp/err"; then ok "TLS $version is refused"
    else bad "TLS $version is refused" "refused for another reason: $(head -c 200 "$tmp/err")"; fi
done
for version in 1.2 1.3; do
    if curl -sS --max-time 20 --cacert "$tmp/a.pem" --tlsv$version --tls-max $version "https://localhost:$port/health" >/dev/null 2>"$tmp/err"; then ok "TLS $version is accepted"
    else bad "TLS $version is accepted" "$(head -c 200 "$tmp/err")"; fi
done
chat -d "{$body}" >"$tmp/again" 2>"$tmp/err"
if grep -q '"finish_reason"' "$tmp/again"; then ok "a chat after the refused connections"; else bad "a chat after the refused connections" "$(head -c 300 "$tmp/again" "$tmp/err")"; fi

kill "$server"
if wait "$server"; then ok "the server ends on SIGTERM"; else bad "the server ends on SIGTERM" "exit $?"; fi
server=
