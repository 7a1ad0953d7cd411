#!/bin/sh
# test_completion: the completion scripts of 'shoal completion' complete commands, options and files. Prints "ok NAME",
# "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
is() { if [ "$2" = "$3" ]; then ok "$1"; else bad "$1" "'$2', not '$3'"; fi; }

for shell in bash zsh fish; do "$shoal" completion $shell >"$tmp/$shell" 2>"$tmp/err" || bad "completion $shell" "$(cat "$tmp/err")"; done
"$shoal" completion csh >"$tmp/out" 2>"$tmp/err"
is "another shell is an error" "$?" 2
if command -v bash >/dev/null; then
    # complete LINE…: the completions of the last word, in bash.
    complete() {
        bash -c '. "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shoal; echo "${COMPREPLY[@]}"' - "$tmp/bash" "$@"
    }
    is "bash: a command" "$(complete shoal tra)" "train"
    is "bash: an option" "$(complete shoal run --tem)" "--temperature"
    is "bash: an option without a command" "$(complete shoal --li)" "--licenses"
    is "bash: an option of every command" "$(complete shoal doctor --js)" "--json"
    : >"$tmp/model.gguf"
    is "bash: a file" "$(complete shoal run "$tmp/mod")" "$tmp/model.gguf"
else echo "skip bash: it is not installed"; fi
if command -v zsh >/dev/null; then
    is "zsh: the script is valid" "$(zsh -f -c 'autoload -U compinit; compinit -u -d "$2"; . "$1"; print $+functions[_shoal] $_comps[shoal]' - "$tmp/zsh" "$tmp/dump" 2>&1)" "1 _shoal"
else echo "skip zsh: it is not installed"; fi
if command -v fish >/dev/null; then
    # complete LINE: the completions in fish, without their descriptions.
    complete() { HOME=$tmp fish --no-config -c 'source $argv[1]; complete -C $argv[2]' "$tmp/fish" "$1" 2>&1 | cut -f1; }
    is "fish: a command" "$(complete "shoal tra")" "train"
    is "fish: an option" "$(complete "shoal run --tem")" "--temperature"
    is "fish: an option without a command" "$(complete "shoal --li")" "--licenses"
else echo "skip fish: it is not installed"; fi
