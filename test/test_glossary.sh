#!/bin/sh
# test_glossary: every name in the third column of docs/GLOSSARY.md is in src/, every option in the fourth is one.
set -u
cd "$(dirname "$0")/.." || exit 1
grep '^|' docs/GLOSSARY.md | awk -F'|' '{ print $4 }' | grep -o '`[^`]*`' | tr -d '`' | sed 's/^struct //; s/^enum //' | sort -u | while read -r name; do
    if grep -rqw -- "$name" src; then echo "ok $name"; else echo "not ok $name: it is not in src/"; fi
done
grep '^|' docs/GLOSSARY.md | awk -F'|' '{ print $5 }' | grep -o '`--[a-z-]*' | sed 's/`--//' | sort -u | while read -r option; do
    if grep -rqF -- "\"$option\"," src; then echo "ok --$option"; else echo "not ok --$option: no table of options has it"; fi
done
