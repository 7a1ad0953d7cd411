#!/bin/sh
# test_language: messages and help are in the user's language; the catalogues fit the sources. Prints "ok NAME",
# "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
shoal=${SHOAL:-build/shoal}
if [ ! -f build/locale/ja/LC_MESSAGES/shoal.mo ]; then
    echo "skip language: the program was built without gettext"
    exit 0
fi
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
unset LC_ALL LC_MESSAGES LANGUAGE SHOAL_JOB
export SHOAL_CONFIG='' LANG=C.UTF-8
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }

# says NAME TEXT VARIABLE=VALUE...: the error about a missing file has the text.
says() {
    name=$1 text=$2
    shift 2
    env "$@" "$shoal" model info nowhere >"$tmp/out" 2>&1
    if grep -qF "$text" "$tmp/out"; then ok "$name"; else bad "$name" "$(cat "$tmp/out")"; fi
}
english="cannot open 'nowhere'" japanese="開けません" chinese="无法打开"
says "no language" "$english" LANG=
says "English" "$english" LANG=en_US.UTF-8
says "the locale C has no language" "$english" LANG=C.UTF-8 LANGUAGE=ja
says "Japanese" "$japanese" LANG=ja_JP.UTF-8
says "Japanese preferred in another locale" "$japanese" LANG=de_DE.UTF-8 LANGUAGE=ja:en
says "Chinese" "$chinese" LANG=zh_CN.UTF-8
says "LC_ALL is used before LANG" "$chinese" LC_ALL=zh_CN.UTF-8 LANG=ja_JP.UTF-8
says "traditional Chinese has no catalogue" "$english" LANG=zh_TW.UTF-8
says "German has no catalogue" "$english" LANG=de_DE.UTF-8

for lang in ja_JP zh_CN; do
    LANG=$lang.UTF-8 "$shoal" help --man run >"$tmp/man"
    "$shoal" help --man run >"$tmp/english"
    if cmp -s "$tmp/man" "$tmp/english"; then ok "manual pages are English: $lang"; else bad "manual pages are English: $lang" "$(head -n 5 "$tmp/man")"; fi
    for c in $("$shoal" --help | sed -n 's/^  \([a-z]*\) .*/\1/p'); do
        LANG=$lang.UTF-8 "$shoal" "$c" --help-all
    done >"$tmp/help" 2>"$tmp/err"
    if ! command -v python3 >/dev/null; then
        echo "skip help in $lang: no python3"
    elif python3 - "$tmp/help" >"$tmp/out" 2>&1 <<'END'
import sys, unicodedata
lines = open(sys.argv[1], encoding='utf-8').read().splitlines()
columns = lambda line: sum(2 if unicodedata.east_asian_width(c) in 'WF' else 1 for c in line)
texts = [line for line in lines if line.startswith(' ' * 28)]
long = [line for line in texts if columns(line.rstrip()) > 81 and ' ' in line.strip()]
translated = sum(any('\u3040' < c < '\ufe00' for c in line) for line in lines)
assert not long and translated > 700, (translated, long[:3])
END
    then ok "help in $lang"; else bad "help in $lang" "$(cat "$tmp/out" "$tmp/err")"; fi
done

if ! command -v xgettext >/dev/null || ! command -v python3 >/dev/null; then
    echo "skip the catalogues fit the sources: no xgettext or python3"
elif python3 scripts/messages.py --check >"$tmp/out" 2>&1; then
    ok "the catalogues fit the sources"
else
    bad "the catalogues fit the sources" "$(cat "$tmp/out")"
fi
