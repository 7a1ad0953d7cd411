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
cflags="-std=c11 -Wall -Wextra -Werror $(pkg-config --cflags shoal)"
for source in "$at"/share/shoal/examples/*.c; do
    example=$(basename "$source" .c)
    # shellcheck disable=SC2046,SC2086
    if cc $cflags -o "$example" "$source" $(pkg-config --libs shoal) -lm >"$tmp/log" 2>&1; then ok "$example.c builds against the installed library"
    else bad "$example.c builds against the installed library" "$(head -c 500 "$tmp/log")"; fi
done
# shellcheck disable=SC2046,SC2086
if cc $cflags -o choose-static "$at/share/shoal/examples/choose.c" -Wl,-Bstatic -L"$at/lib" -lshoal -Wl,-Bdynamic \
    $(pkg-config --libs --static shoal | sed 's/-lshoal//') >"$tmp/log" 2>&1; then ok "choose.c builds against the static library"
else bad "choose.c builds against the static library" "$(head -c 500 "$tmp/log")"; fi
model=$at/share/shoal/models/fry
LD_LIBRARY_PATH=$at/lib ./choose "$model" >"$tmp/out" 2>&1
if grep -q "^base .*answer: " "$tmp/out"; then ok "choose answers"; else bad "choose answers" "$(head -c 300 "$tmp/out")"; fi
if ./choose-static "$model" | cmp -s - "$tmp/out"; then ok "both libraries answer the same"; else bad "both libraries answer the same" "$(./choose-static "$model" 2>&1 | head -c 300)"; fi
# The program that docs/LIBRARY.md shows: its first block of C.
awk '/^```/ { if (open) exit; open = $0 == "```c"; next } open' "$at/share/doc/shoal/docs/LIBRARY.md" >page.c
# shellcheck disable=SC2046,SC2086
if cc $cflags -o page page.c $(pkg-config --libs shoal) >"$tmp/log" 2>&1 && LD_LIBRARY_PATH=$at/lib ./page "$model" >"$tmp/out" 2>&1; then ok "the program of LIBRARY.md: $(cat "$tmp/out")"
else bad "the program of LIBRARY.md" "$(cat "$tmp/log" "$tmp/out" | head -c 300)"; fi
n=$(find "$at/share/man/man1" -name 'shoal-*.1' -size +0 | wc -l)
if [ -s "$at/share/man/man1/shoal.1" ] && [ "$n" = "$("$at/bin/shoal" --help | grep -c '^  [a-z]')" ]; then ok "man pages"; else bad "man pages" "$n of commands"; fi
# runs NAME ARGS...: whether an example ends with success.
runs() {
    name=$1; shift
    if LD_LIBRARY_PATH=$at/lib timeout 120 "./$name" "$@" >"$tmp/out" 2>&1 </dev/null && [ -s "$tmp/out" ]; then ok "$name runs"
    else bad "$name runs" "$(tail -c 300 "$tmp/out")"; fi
}
runs debate "$model"
runs embed "$model" cat dog 猫
runs evaluate "$model"
runs evolve "$model"
runs generate "$model" "sort: k b x"
runs serve "$model" state
runs simulate "$model" runs
runs train "$model"
runs world
cd - >/dev/null || exit 1
make -s uninstall PREFIX=/opt/shoal DESTDIR="$tmp/root" >/dev/null 2>&1
left=$(find "$tmp/root" ! -type d)
if [ -z "$left" ]; then ok "make uninstall removes every file"; else bad "make uninstall removes every file" "$left"; fi
