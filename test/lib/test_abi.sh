#!/bin/sh
# test_abi: libshoal.so exports exactly the functions that shoal.h declares and src/lib/symbols.map lists, under their
# version; the layout of the public structs and the values of the enums are those of test/lib/abi.c; the header is valid
# C11 and C++. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines.
set -u
cd "$(dirname "$0")/../.." || exit 1
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
lib=build/libshoal.so
make -s $lib || exit 1

# equal NAME A B: whether two lists of symbols are equal.
equal() {
    if cmp -s "$tmp/$2" "$tmp/$3"; then ok "$1"; else bad "$1" "$(diff "$tmp/$2" "$tmp/$3" | grep '^[<>]' | tr '\n' ' ')"; fi
}
sed 's|/\*.*\*/||; /\/\*/,/\*\//d' include/shoal.h | tr '\n' ' ' | grep -o 'shoal_[a-z_]*(' | tr -d '(' | sort -u >"$tmp/declared"
sed -n 's/^ *\(shoal_[a-z_]*\);$/\1/p' src/lib/symbols.map | sort >"$tmp/listed"
nm -D --defined-only $lib | sed -n 's/.* T \(.*\)@@SHOAL_0\.1$/\1/p' | sort >"$tmp/exported"
nm -D --defined-only $lib | grep -v ' A ' | sed 's/.* . //; s/@@.*//' | sort >"$tmp/all"
equal "declared functions are listed in symbols.map" declared listed
equal "listed functions are exported with their version" listed exported
equal "nothing else is exported" exported all
if [ "$(objdump -p $lib | sed -n 's/ *SONAME *//p')" = libshoal.so.0 ]; then ok soname; else bad soname "$(objdump -p $lib | grep SONAME)"; fi

if ${CC:-cc} -std=c11 -pedantic -Wall -Wextra -Werror -Iinclude -c -o "$tmp/c.o" test/lib/abi.c 2>"$tmp/log"; then ok "layout, C11"; else bad "layout, C11" "$(head -n 2 "$tmp/log")"; fi
sed 's/energy, 12/energy, 16/' test/lib/abi.c >"$tmp/wrong.c"
if ${CC:-cc} -std=c11 -Iinclude -c -o "$tmp/w.o" "$tmp/wrong.c" 2>/dev/null; then bad "a wrong layout fails" "it compiled"; else ok "a wrong layout fails"; fi
if command -v g++ >/dev/null; then
    if g++ -std=c++17 -pedantic -Wall -Wextra -Werror -Iinclude -x c++ -c -o "$tmp/cc.o" test/lib/abi.c 2>"$tmp/log"; then ok "layout, C++"; else bad "layout, C++" "$(head -n 2 "$tmp/log")"; fi
else
    echo "skip layout, C++: g++ is not installed"
fi
