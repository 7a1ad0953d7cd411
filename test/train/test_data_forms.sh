#!/bin/sh
# test_data_forms: trains on every example file of docs/DATA.md. Prints "ok NAME" and "not ok NAME: why" lines; SHOAL is
# the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
root=$PWD
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export SHOAL_CONFIG=''

for form in $(sed -n 's/^```jsonl //p' docs/DATA.md); do
    sed -n "/^\`\`\`jsonl $form\$/,/^\`\`\`\$/p" docs/DATA.md | grep '^{' >"$tmp/$form.jsonl"
    if "$shoal" train "$root/test/models/fry-1" --data "$tmp/$form.jsonl" --out "$tmp/$form" --runs "$tmp/runs" --max-steps 1 --r 1 --target q_proj >"$tmp/out" 2>&1 &&
        grep -q "4 samples in the form '$form'" "$tmp/out" && [ -e "$tmp/$form/adapter_config.json" ]; then
        ok=$("$shoal" train "$root/test/models/fry-1" --data "$tmp/$form.jsonl" --format "$form" --dry-run 2>&1 | grep -c "in the form '$form'")
        if [ "$ok" = 1 ]; then echo "ok $form"; else echo "not ok $form, by --format"; fi
    else
        echo "not ok $form: $(cat "$tmp/out")"
    fi
done
if [ "$(sed -n 's/^```jsonl //p' docs/DATA.md | wc -l)" = 10 ]; then echo "ok every form has an example"; else echo "not ok every form has an example"; fi
