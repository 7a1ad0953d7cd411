#!/bin/sh
# test_chat: 'shoal chat' on a terminal (chat_pty.py), and that a pipe has no prompt, no history and no escape
# sequences. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }

# ---- pipes
"$shoal" run test/models/fry-1 --chat 'sort: k b x' --temp 0 -n 12 >"$tmp/one" 2>/dev/null
for end in quit exit bye; do
    printf 'sort: k b x\n/%s\nnever said\n' $end | XDG_STATE_HOME=$tmp/state TERM=xterm "$shoal" chat test/models/fry-1 --temp 0 -n 12 \
        --store "$tmp/pipe.db" >"$tmp/out" 2>"$tmp/err"
    if cmp -s "$tmp/one" "$tmp/out" && [ ! -s "$tmp/err" ]; then ok "a pipe gets only the reply; /$end ends it"
    else bad "a pipe gets only the reply; /$end ends it" "$(cat "$tmp/out" "$tmp/err")"; fi
done
if [ -e "$tmp/state" ]; then bad "a pipe leaves no history" "$(find "$tmp/state")"; else ok "a pipe leaves no history"; fi
printf '/hepl\n/nothing\n' | "$shoal" chat test/models/fry-1 --store "$tmp/pipe.db" >"$tmp/out" 2>"$tmp/err"
printf "warning: no command '/hepl', did you mean '/help'? /help lists all\nwarning: no command '/nothing'; /help lists them\n" >"$tmp/want"
if cmp -s "$tmp/err" "$tmp/want"; then ok "unknown commands"; else bad "unknown commands" "$(cat "$tmp/err")"; fi

# ---- one conversation in two programs at once: nothing is lost, and the history is more than the ten exchanges in memory
for who in A B; do
    for i in 1 2 3 4 5 6 7; do echo "copy: $who$i 富士"; done |
        "$shoal" chat test/models/fry-1 --quiet -n 4 --store "$tmp/c.db" --conversation me >/dev/null 2>"$tmp/err.$who" &
done
wait
conversation() { "$shoal" conversation "$@" --store "$tmp/c.db" 2>"$tmp/err"; }
echo "/save $tmp/all" | "$shoal" chat test/models/fry-1 --quiet --store "$tmp/c.db" --conversation me 2>"$tmp/err"
if [ "$(grep -o '"role":"user"' "$tmp/all" | wc -l)" = 14 ] && [ "$(conversation show me | grep -c '^user: copy: [AB][1-7] 富士$')" = 14 ] &&
    [ "$(conversation show me --limit 3 --json | wc -l)" = 3 ] && [ ! -s "$tmp/err.A" ] && [ ! -s "$tmp/err.B" ]; then ok "one conversation in two programs"
else bad "one conversation in two programs" "$(conversation show me; cat "$tmp/err.A" "$tmp/err.B" "$tmp/err")"; fi
conversation show me --json >"$tmp/me.jsonl" && conversation import copy "$tmp/me.jsonl"
if conversation show copy --json | cmp -s - "$tmp/me.jsonl" && [ "$(conversation search 'a3' | grep -c '^-- ')" = 2 ] && conversation rename me '夏の計画' &&
    conversation delete copy && [ "$(conversation list --json | grep -c '"id":"me","title":"夏の計画","exchanges":14')" = 1 ]; then
    ok "conversations are imported, searched, renamed, deleted and listed"
else bad "conversations are imported, searched, renamed, deleted and listed" "$(cat "$tmp/err"; conversation list)"; fi
printf '{"user": "\\u001b[2Ja", "assistant": "\\u001b[2J"}\n' >"$tmp/escape.jsonl"
conversation import escape "$tmp/escape.jsonl"
if { conversation list && conversation show escape && conversation search a; } >"$tmp/out" && grep -q 'escape: ' "$tmp/out" &&
    ! grep -q "$(printf '\033')" "$tmp/out"; then ok "no escape sequences of conversations"
else bad "no escape sequences of conversations" "$(cat -v "$tmp/out" "$tmp/err")"; fi
if conversation show copy || ! grep -q "no conversation 'copy'" "$tmp/err"; then bad "a deleted conversation" "$(cat "$tmp/err")"; else ok "a deleted conversation"; fi
for wrong in "frob:is not a subcommand" "show:show takes ID" "list me:list takes no argument" "import x $tmp/none:no such file"; do
    # shellcheck disable=SC2086
    if conversation ${wrong%%:*} || ! grep -qi "${wrong#*:}" "$tmp/err"; then bad "conversation ${wrong%%:*}" "$(cat "$tmp/err")"; else ok "conversation ${wrong%%:*} is refused"; fi
done

# ---- --check: the selected reply is printed and kept, and the tokens of all samples are counted
said() { printf '%s\n' "$2" | "$shoal" chat models/fry --store "$tmp/check.db" --max-tokens 32 $1 >"$tmp/out" 2>"$tmp/err"; }
if said "--samples 4 --check calculator" "7325 + 6 = ?
/save $tmp/kept" && [ "$(tail -1 "$tmp/out")" = "answer: 7331" ] && grep -qE "^[1-4] of 4 samples passed check 'calculator'; [0-9]+ prompt tokens, [0-9]+ completion tokens$" "$tmp/err" &&
    grep -q '"content":"work: 5 + 6\\nanswer: 7331"' "$tmp/kept"; then ok "a reply that passes a check"
else bad "a reply that passes a check" "$(cat "$tmp/out" "$tmp/err")"; fi
generated() { sed -n 's/.*"generated":\([0-9]*\).*/\1/p' "$tmp/out"; }
said "--temperature 0 --json" '12 + 30 = ?'; one=$(generated)
said "--temperature 0 --json --samples 3 --check regex:42$" '12 + 30 = ?'
if [ "$(generated)" = $((3 * one)) ] && grep -q '"samples":3,"passed":[03]}' "$tmp/out"; then ok "the tokens of all samples"
else bad "the tokens of all samples" "one has $one: $(cat "$tmp/out" "$tmp/err")"; fi
said "--samples 2 --check regex:\\Anever\\z" 'Hi'
if [ -s "$tmp/out" ] && grep -q "^0 of 2 samples passed check 'regex'" "$tmp/err"; then ok "a reply if no sample passes"
else bad "a reply if no sample passes" "$(cat "$tmp/out" "$tmp/err")"; fi
for wrong in "--samples 2:needs '--check'" "--check question:'check.question' is missing" "--check regex:'pattern' is missing" "--check exact:needs the right answer" \
    "--check calculator --team:no effect with --team"; do
    if said "${wrong%%:*}" 'Hi' || ! grep -qF -- "${wrong#*:}" "$tmp/err"; then bad "refused: ${wrong%%:*}" "$(cat "$tmp/out" "$tmp/err")"
    else ok "refused: ${wrong%%:*}"; fi
done

# ---- a terminal
command -v python3 >/dev/null || { echo "skip the terminal: python3 is not installed"; exit 0; }
"$shoal" model new --shape stories15m --quant q8_0 "$tmp/slow.gguf" 2>"$tmp/err" || bad "a model" "$(cat "$tmp/err")"
mkdir "$tmp/pty"
python3 test/cli/chat_pty.py "$shoal" "$tmp/slow.gguf" "$tmp/pty" 2>"$tmp/err" || bad "the terminal" "$(tail -3 "$tmp/err")"
