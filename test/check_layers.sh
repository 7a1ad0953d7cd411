#!/bin/sh
# check_layers: dependencies between the folders of src/ have one direction.
#
# A file includes headers of its folder, the public headers (FOLDER/FOLDER.h) of the folders that precede it in the list
# below, and include/shoal.h; no path with "..", no unknown folder. One exception: api/ contains the handlers of serve/
# and includes all its headers. All headers can be included together: no two define the same name. The first comment of a
# file begins with the file's name and a colon, that of internal.h with its folder's; the guard of a header is
# SHOAL_FOLDER_FILE_H, that of FOLDER/FOLDER.h SHOAL_FOLDER_H. --draw prints the
# table between the marks <!-- layers --> of docs/ARCHITECTURE.md. Prints one line per folder, "ok layers NAME" or "not
# ok layers NAME: FILE:LINE: why"; a self-test first checks that violations in a small tree are found.
set -u
layers="base sandbox store hub remote mcp backup families kernel tokenizer template model adapter grammar engine memory grade check eval data backprop train swarm grow sleep evolve world agent cluster http ops scaling jobs serve api lib cli"

# layers_check ROOT FOLDER: prints one line per offending include of ROOT/src/FOLDER; no output if there is none.
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
            else if (folder in rank && folder != own && part[2] != folder ".h" && !(own == "api" && folder == "serve"))
                why = "a private header of " folder
            if (why != "") printf "%s:%d: includes %s: %s\n", FILENAME, FNR, name, why
        }' {} +
}

# layers_report ROOT: an ok or not-ok line per folder; fails if a folder has violations.
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

# heads_check ROOT: prints one line per file with a wrong first comment or guard.
heads_check() {
    (cd "$1" && printf '%s\n' src/*/*.[ch] | xargs awk '
        function report() {
            if (file != "" && !titled) print file ": its first comment does not begin with \"" title ":\""
            if (file != "" && header && !guarded) print file ": its guard is not " guard
        }
        FNR == 1 {
            report()
            file = FILENAME
            split(file, part, "/")
            name = part[3]
            header = sub(/\.h$/, "", name)
            sub(/\.c$/, "", name)
            title = name == "internal" ? part[2] : name
            guard = toupper("SHOAL_" part[2] (name == part[2] ? "" : "_" name) "_H")
            titled = guarded = 0
            tested = ""
        }
        FNR <= 2 && index($0, (FNR == 1 ? "/* " : " * ") title ":") == 1 { titled = 1 }
        tested == "" && $1 == "#ifndef" { tested = $2 }
        $1 == "#define" && $2 == guard && tested == guard { guarded = 1 }
        END { report() }')
}

# A tree with one valid file and four invalid ones: exactly the invalid ones must be reported.
self_test() {
    tree=$(mktemp -d) || return 1
    trap 'rm -rf "$tree"' EXIT
    mkdir -p "$tree/src/base" "$tree/src/kernel" "$tree/src/model" "$tree/src/odd"
    printf '#include %s\n' '<stdio.h>' '"base/base.h"' '"local.h"' '"shoal.h"' \
        >"$tree/src/model/right.c"
    printf '#include "base/base.h"\n  #  include "model/model.h"\n' >"$tree/src/kernel/upward.c"
    printf '#include "../kernel/kernel.h"\n' >"$tree/src/model/dots.h"
    printf '#include <kernel/kernel.h>\n' >"$tree/src/base/angle.c"
    printf '#include "kernel/internal.h"\n' >"$tree/src/model/private.c"
    got=$(layers_report "$tree")
    printf '/* model: x */\n#ifndef SHOAL_MODEL_H\n#define SHOAL_MODEL_H\n' >"$tree/src/model/model.h"
    printf '/*\n * model: x\n */\n#ifndef SHOAL_INTERNAL_H\n#define SHOAL_INTERNAL_H\n' >"$tree/src/model/internal.h"
    heads=$(heads_check "$tree")
    rm -rf "$tree"
    trap - EXIT
    case "$heads" in *model/model.h*) return 1 ;; esac
    for wrong in "model/right.c: its first" "model/internal.h: its guard is not SHOAL_MODEL_INTERNAL_H"; do
        case "$heads" in *"src/$wrong"*) ;; *) return 1 ;; esac
    done
    for wrong in base/angle.c:1 kernel/upward.c:2 model/dots.h:1 model/private.c:1 odd/; do
        case "$got" in *"src/$wrong"*) ;; *) return 1 ;; esac
    done
    case "$got" in *right.c*) return 1 ;; esac
}

# The folders in order, each with the folders whose headers it includes.
draw() {
    echo "| folder | includes |"
    echo "|---|---|"
    for own in $layers; do
        [ -d "src/$own" ] || continue
        list=
        for other in $layers; do
            [ "$own" != "$other" ] && grep -rqE "^#include \"$other/" "src/$own" && list="$list $other"
        done
        echo "| \`$own\` |${list:- nothing} |"
    done
}

cd "$(dirname "$0")/.." || exit 1
if [ "${1-}" = --draw ]; then
    draw
    exit
fi
if self_test; then
    echo "ok layers self-test"
else
    echo "not ok layers self-test: the check does not notice a wrong include"
    exit 1
fi
layers_report .
if heads=$(heads_check .) && [ -z "$heads" ]; then
    echo "ok first comments and guards"
else
    echo "$heads" | sed 's/^/not ok /'
fi

# Every header in one file, with the Makefile's library flags.
all=$(mktemp) || exit 1
trap 'rm -f "$all"' EXIT
for header in src/*/*.h; do echo "#include \"${header#src/}\""; done >"$all"
echo '#include "shoal.h"' >>"$all"
if why=$("${CC:-gcc}" -x c -fsyntax-only -std=gnu11 -D_GNU_SOURCE -Iinclude -Isrc $(pkg-config --cflags jansson yaml-0.1 libpcre2-8 sqlite3 libsodium gmp) "$all" 2>&1); then
    echo "ok all headers in one file"
else
    echo "not ok all headers in one file: $(echo "$why" | grep -m1 error)"
fi
if [ "$(sed -n '/<!-- layers -->/,/<!-- \/layers -->/p' docs/ARCHITECTURE.md | grep '^|')" = "$(draw)" ]; then
    echo "ok the table of docs/ARCHITECTURE.md"
else
    echo "not ok the table of docs/ARCHITECTURE.md: put there what 'sh test/check_layers.sh --draw' prints"
fi
