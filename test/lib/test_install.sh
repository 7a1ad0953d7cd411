#!/bin/sh
# test_install: 'make install' gives a program that finds its files, and a library that a C program builds against with
# pkg-config alone. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines.
set -u
cd "$(dirname "$0")/../.." || exit 1
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
command -v pkg-config >/dev/null || { echo "skip install: pkg-config is not installed"; exit 0; }

if make -s install PREFIX=/opt/shoal DESTDIR="$tmp/root" >"$tmp/log" 2>&1; then ok "make install"; else bad "make install" "$(tail -3 "$tmp/log")"; fi
at=$tmp/root/opt/shoal
mkdir "$tmp/empty" && cd "$tmp/empty" || exit 1
if "$at/bin/shoal" doctor >"$tmp/log" 2>&1; then ok "the installed program runs"; else bad "the installed program runs" "$(tail -3 "$tmp/log")"; fi
if "$at/bin/shoal" evolve "$at/share/shoal/examples/demo.yaml" --dry-run >"$tmp/log" 2>&1; then ok "it finds the starter model in another folder"
else bad "it finds the starter model in another folder" "$(tail -3 "$tmp/log")"; fi
export PKG_CONFIG_PATH="$at/lib/pkgconfig" PKG_CONFIG_SYSROOT_DIR="$tmp/root"
if [ "$(pkg-config --modversion shoal)" = "$("$at/bin/shoal" --version | cut -d' ' -f2)" ]; then ok "the version of shoal.pc"; else bad "the version of shoal.pc" "$(pkg-config --modversion shoal 2>&1)"; fi
for example in choose world; do
    # shellcheck disable=SC2046
    if cc -o $example "$at/share/shoal/examples/$example.c" $(pkg-config --cflags --libs shoal) >"$tmp/log" 2>&1; then ok "$example.c builds against the installed library"
    else bad "$example.c builds against the installed library" "$(head -c 500 "$tmp/log")"; fi
done
if ./choose "$at/share/shoal/models/fry" >"$tmp/out" 2>&1 && grep -q "answer" "$tmp/out"; then ok "choose answers"; else bad "choose answers" "$(head -c 300 "$tmp/out")"; fi
cd - >/dev/null || exit 1
make -s uninstall PREFIX=/opt/shoal DESTDIR="$tmp/root" >/dev/null 2>&1
left=$(find "$tmp/root" -type f)
if [ -z "$left" ]; then ok "make uninstall removes every file"; else bad "make uninstall removes every file" "$left"; fi
