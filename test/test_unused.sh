#!/bin/sh
# test_unused: a public function is used outside its file, by src/ or by a test. A function without uses must be
# deleted, one that only its file uses must be static. test/unused.txt lists exceptions with their reasons.
set -u
cd "$(dirname "$0")/.." || exit 1
command -v nm >/dev/null || { echo "skip test_unused: there is no nm"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT

for source in src/*/*.c; do
    object=build/${source%.c}.o
    [ -f "$object" ] && nm "$object" | awk -v f="$source" 'NF == 3 && $2 ~ /[TDBR]/ { print "def", $3, f } NF == 2 { print "use", $2, f }'
done >"$tmp/symbols"
awk '$1 == "use" { used[$2] = 1 } $1 == "def" { file[$2] = $3 }
     END { for (s in file) if (!(s in used) && s !~ /^shoal_/ && s != "main") print s, file[s] }' "$tmp/symbols" | sort >"$tmp/unused"
cat test/*.c test/*/*.c test/*.h bench/*.c examples/*.c | grep -oE '[a-z_][a-z0-9_]+' | sort -u >"$tmp/tests"
grep -v '^#' test/unused.txt | cut -d' ' -f1 | sort >"$tmp/allowed"
awk 'FILENAME ~ /tests$/ { t[$1] = 1; next } FILENAME ~ /allowed$/ { a[$1] = 1; next } !($1 in t) && !($1 in a)' \
    "$tmp/tests" "$tmp/allowed" "$tmp/unused" >"$tmp/found"
if [ -s "$tmp/found" ]; then
    sed 's/^\([^ ]*\) \(.*\)/not ok \1: only \2 uses it, or no file; delete it or make it static/' "$tmp/found"
else
    echo "ok every public function is used"
fi
while read -r name; do
    grep -q "^$name " "$tmp/unused" || echo "not ok $name: it is used; take it out of test/unused.txt"
done <"$tmp/allowed"
