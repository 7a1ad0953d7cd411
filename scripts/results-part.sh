#!/bin/sh
# results-part TITLE: standard input replaces the part "## TITLE…" of docs/RESULTS.md; other parts stay unchanged.
set -eu
doc="$(dirname "$0")/../docs/RESULTS.md"
awk -v title="## $1" '/^## / && index($0, title) == 1 { exit } { print }' "$doc" >"$doc.new"
[ -z "$(tail -n 1 "$doc.new")" ] || echo >>"$doc.new"
cat >>"$doc.new"
awk -v title="## $1" '/^## / { if (own) after = 1; own = index($0, title) == 1 }
                      after { if (!begun++) print ""; print }' "$doc" >>"$doc.new"
mv "$doc.new" "$doc"
