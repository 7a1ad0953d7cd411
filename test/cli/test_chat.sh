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
