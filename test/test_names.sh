#!/bin/sh
# test_names: names in documents exist in the source.
# docs/GLOSSARY.md: names of the third column are in src/, options of the fourth in a table of options.
# docs/ARCHITECTURE.md: functions, structs and files in `backquotes` are in src/.
# docs/COMPATIBILITY.md: every renamed option and value; names of earlier programs are on that page only.
set -u
cd "$(dirname "$0")/.." || exit 1

# words: every `quoted` text of standard input, one per line, without struct and enum.
words() {
    grep -o '`[^`]*`' | tr -d '`' | sed 's/^struct //; s/^enum //' | sort -u
}

# check_name NAME
check_name() {
    case $1 in
    *.c | *.h) [ -f "src/$1" ] ;;
    *) grep -rqw -- "$1" src ;;
    esac
}

{
    grep '^|' docs/GLOSSARY.md | cut -d'|' -f4 | words
    words <docs/ARCHITECTURE.md | grep -E '^[a-z][a-z0-9_]*(/[a-z0-9_]+\.[ch])?$'
} | sort -u | while read -r name; do
    if check_name "$name"; then echo "ok $name"; else echo "not ok $name: it is not in src/"; fi
done
grep '^|' docs/GLOSSARY.md | cut -d'|' -f5 | grep -o '`--[a-z-]*' | sed 's/`--//' | sort -u | while read -r option; do
    if grep -rqF -- "\"$option\"," src; then echo "ok --$option"; else echo "not ok --$option: no table of options has it"; fi
done

# docs/COMPATIBILITY.md has both names of every row of src/base/renamed.c.
# A row is {OLD, NEW} or {KIND, OLD, NEW, …}.
left=$(awk -F'"' '/^    \{"/ { n = NF > 6 ? 4 : 2; print $n; print $(n + 2) }' src/base/renamed.c | sort -u | while read -r name; do
    grep -qF "\`$name\`" docs/COMPATIBILITY.md || grep -qF -- "\`--$name\`" docs/COMPATIBILITY.md || echo "$name"
done)
if [ -z "$left" ]; then echo "ok renamed names"; else echo "not ok renamed names: docs/COMPATIBILITY.md lacks" $left; fi

# Names of the programs that Shoal reproduces are in docs/COMPATIBILITY.md only; metrics keep their prefix murmurnet_.
names='predecessor|helloworld_llm|murmurnet([^_a-z]|$)|evo-swarm|361do'
found=$(git ls-files 2>/dev/null | grep -vE '^(docs/COMPATIBILITY\.md|THIRD_PARTY_NOTICES|test/fixtures/.*|test/test_names\.sh)$' | tr '\n' '\0' | xargs -0r grep -InEi -- "$names" 2>/dev/null | cut -c1-160)
if [ -z "$found" ]; then echo "ok names of earlier programs"; else
    echo "$found"
    echo "not ok names of earlier programs: they belong into docs/COMPATIBILITY.md"
fi
