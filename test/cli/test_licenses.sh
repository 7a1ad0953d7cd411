#!/bin/sh
# test_licenses: 'shoal --licenses' prints LICENSE and THIRD_PARTY_NOTICES, which has a notice for every library that the
# Makefile links into the program and for files of others in web/ and src/. Prints "ok NAME", "not ok NAME: why" and
# "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }

"$shoal" --licenses >"$tmp/printed" || bad "--licenses" "exit status $?"
{ cat LICENSE && echo && cat THIRD_PARTY_NOTICES; } >"$tmp/files"
if cmp -s "$tmp/printed" "$tmp/files"; then ok "--licenses prints both files"; else bad "--licenses prints both files" "$(diff "$tmp/printed" "$tmp/files" | head -n 5)"; fi

# A notice is a heading between two lines of '=', an empty line, and a text.
awk '/^=====*$/ { getline heading; print heading
     getline; if ($0 !~ /^=====*$/) print "not ok " heading ": no line below it"
     getline; getline; if ($0 == "") print "not ok " heading ": no text" }' "$tmp/printed" >"$tmp/headings"
grep '^not ok' "$tmp/headings"
notice() { if grep -q "$2" "$tmp/headings"; then ok "notice of $1"; else bad "notice of $1" "no heading with '$2'"; fi; }
libraries=$(printf 'include Makefile\nprint:\n\t@echo $(LIBS_shoal)\n' | make -s -f - print | tr ' ' '\n' | sed -n 's/^-l//p')
[ -n "$libraries" ] || bad "libraries" "LIBS_shoal of the Makefile is empty"
for library in $libraries; do
    case $library in m | dl) continue ;; esac # of the C library
    notice "lib$library" "(lib$library)"
done
notice "sljit in PCRE2" '^sljit'
for file in web/*.LICENSE; do notice "$file" "web/$(basename "$file" .LICENSE).js"; done
notice "Unicode data" 'src/grammar/unicode_ranges.inc'
notice "ggml's quantiser" 'src/kernel/quant.c'
for text in 'Copyright (c) 2022 Leon Sorokin' 'GNU LESSER GENERAL PUBLIC LICENSE' 'GNU GENERAL PUBLIC LICENSE' 'UNICODE, INC. LICENSE AGREEMENT'; do
    if grep -qF "$text" "$tmp/printed"; then ok "$text"; else bad "$text" "it is not printed"; fi
done
