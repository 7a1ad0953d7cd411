#!/bin/sh
# check_layers: dependencies between the folders of src/ run one way.
#
# A file includes headers of its own folder and of the folders above it in the list below, and
# include/shoal.h; nothing else in quotes, no path with "..", no unknown folder.
# Prints one line per folder, "ok layers NAME" or "not ok layers NAME: FILE:LINE: why", and first
# proves on a small wrong tree that it would notice.
set -u
layers="base sandbox store hub backup kernel tokenizer template model adapter grammar engine memory grade eval train swarm evolve world agent cluster http ops jobs serve api lib cli"

# layers_check ROOT FOLDER: prints one line per offending include of ROOT/src/FOLDER, nothing when
# all is well.
layers_check() {
    find "$1/src/$2" -type f \( -name '*.[ch]' -o -name '*.inc' -o -name '*.cu' \) -exec awk \
        -v own="$2" -v layers="$layers" '
        BEGIN {
            n = split(layers, list, " ")
            for (i = 1; i <= n; i++) rank[list[i]] = i
        }
        !/^[ \t]*#[ \t]*include[ \t]*["<]/ { next }
        {
            name = $0
            quoted = name ~ /^[ \t]*#[ \t]*include[ \t]*"/
            sub(/^[ \t]*#[ \t]*include[ \t]*["<]/, "", name)
            sub(/[">].*/, "", name)
            split(name, part, "/")
            folder = index(name, "/") ? part[1] : ""
            why = ""
            if (name ~ /(^|\/)\.\.(\/|$)/)
                why = "a path with \"..\""
            else if (folder in rank && rank[folder] > rank[own])
                why = folder " is below " own
            else if (!(folder in rank) && quoted && folder != "")
                why = folder " is no layer"
            if (why != "") printf "%s:%d: includes %s: %s\n", FILENAME, FNR, name, why
        }' {} +
}

# layers_report ROOT: an ok or not-ok line per folder; fails when any folder offends.
layers_report() {
    failed=0
    for dir in "$1"/src/*/; do
        [ -d "$dir" ] || continue
        folder=$(basename "$dir")
        case " $layers " in
        *" $folder "*) found=$(layers_check "$1" "$folder") ;;
        *) found="$dir: '$folder' is not in the list of layers" ;;
        esac
        if [ -z "$found" ]; then
            echo "ok layers $folder"
        else
            echo "$found" | sed "s|^$1/||; s|^|not ok layers $folder: |"
            failed=1
        fi
    done
    return $failed
}

# A tree with one right file and three wrong ones: exactly the wrong ones must be named.
self_test() {
    tree=$(mktemp -d) || return 1
    trap 'rm -rf "$tree"' EXIT
    mkdir -p "$tree/src/base" "$tree/src/kernel" "$tree/src/model" "$tree/src/odd"
    printf '#include %s\n' '<stdio.h>' '"base/base.h"' '"local.h"' '"shoal.h"' \
        >"$tree/src/model/right.c"
    printf '#include "base/base.h"\n  #  include "model/model.h"\n' >"$tree/src/kernel/upward.c"
    printf '#include "../kernel/kernel.h"\n' >"$tree/src/model/dots.h"
    printf '#include <kernel/kernel.h>\n' >"$tree/src/base/angle.c"
    got=$(layers_report "$tree")
    rm -rf "$tree"
    trap - EXIT
    case "$got" in
    *"src/base/angle.c:1"*"src/kernel/upward.c:2"*"src/model/dots.h:1"*"src/odd/"*) ;;
    *) return 1 ;;
    esac
    case "$got" in *right.c*) return 1 ;; esac
}

cd "$(dirname "$0")/.." || exit 1
if self_test; then
    echo "ok layers self-test"
else
    echo "not ok layers self-test: the check does not notice a wrong include"
    exit 1
fi
layers_report .
