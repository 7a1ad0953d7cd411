#!/bin/sh
# test_data_forms: trains on every example file of docs/DATA.md, which are the blocks "KIND FORM". Prints "ok NAME" and
# "not ok NAME: why" lines; SHOAL is the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
root=$PWD
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export SHOAL_CONFIG=''

blocks() { grep -E '^```(jsonl|csv|tsv|txt) ' docs/DATA.md | cut -c4-; }
blocks | while read -r kind form; do
    file=$tmp/$form.$kind
    sed -n "/^\`\`\`$kind $form\$/,/^\`\`\`\$/p" docs/DATA.md | sed '1d;$d' >"$file"
    train() { "$shoal" train "$root/test/models/fry-1" --data "$file" "$@"; }
    if train --out "$tmp/out" --runs "$tmp/runs" --max-steps 1 --r 1 --target q_proj >"$tmp/log" 2>&1 && grep -q "4 samples in the form '$form'" "$tmp/log" &&
        train --format "$form" --dry-run 2>&1 | grep -q "4 samples in the form '$form'"; then
        echo "ok $kind, $form"
    else
        echo "not ok $kind, $form: $(cat "$tmp/log")"
    fi
    rm -rf "$tmp/out"
done
if [ "$(blocks | sed -n 's/^jsonl //p' | wc -l)" = 10 ]; then echo "ok every form has an example"; else echo "not ok every form has an example"; fi
