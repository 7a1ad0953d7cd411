#!/bin/sh
# test_color: errors, warnings and headings have colours on a terminal only, and not with NO_COLOR or TERM=dumb. Prints
# "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
command -v script >/dev/null || { echo "skip color: script is not installed"; exit 0; }
unset NO_COLOR
export TERM=xterm SHOAL_CONFIG=''
esc=$(printf '\033')

# terminal COMMAND…: what a terminal gets on stdout and stderr, with the escape character as "^[".
terminal() { script -qec "$*" /dev/null </dev/null 2>&1 | tr -d '\r' | sed "s/$esc/^[/g"; }
holds() { if terminal "$3" | grep -qF -- "$2"; then ok "$1"; else bad "$1" "no '$2' in '$(terminal "$3" | head -n 3)'"; fi; }
plain() { if terminal "$2" | grep -qF '^['; then bad "$1" "$(terminal "$2" | head -n 3)"; else ok "$1"; fi; }

holds "an error" "^[[1;31mshoal: ^[[0mno command 'trian'" "'$shoal' trian"
holds "an error of a command" "^[[1;31mshoal pull: ^[[0munknown flag '--nothing'" "'$shoal' pull --nothing"
holds "a warning" "^[[33mwarning: ^[[0m" "SHOAL_METRICS_NOTHING=1 '$shoal' metrics"
holds "a heading of --help" "^[[1musage:^[[0m shoal run" "'$shoal' run --help"
terminal "'$shoal' --help" >"$tmp/help"
groups=$("$shoal" --help | grep -c '^[a-z ]*:$')
if [ "$(grep -c '^^\[\[1m[a-z ]*:^\[\[0m$' "$tmp/help")" = "$groups" ]; then ok "the groups of commands"; else bad "the groups of commands" "$(head -n 5 "$tmp/help")"; fi
holds "an empty NO_COLOR has no effect" "^[[1;31m" "NO_COLOR= '$shoal' trian"
for command in "trian" "--help" "run --help-all" "pull --nothing"; do
    plain "NO_COLOR=1 shoal $command" "NO_COLOR=1 '$shoal' $command"
    plain "TERM=dumb shoal $command" "TERM=dumb '$shoal' $command"
    plain "no TERM: shoal $command" "env -u TERM '$shoal' $command"
    plain "pipe: shoal $command" "'$shoal' $command 2>&1 | cat"
    plain "file: shoal $command" "'$shoal' $command >out 2>&1; cat out"
done
plain "--json" "'$shoal' metrics --json"
# Text of others gets no control sequence to the terminal.
holds "an error with a control sequence in a name" "no command '�[32mgreen'" "'$shoal' '$esc[32mgreen'"
