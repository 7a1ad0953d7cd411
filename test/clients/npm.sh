# shellcheck shell=sh
# npm: for scripts that run npm packages of a lock file; sourced, not run. SHOAL_TMP is a folder for temporary files.

node_major() { node -p 'process.versions.node.split(".")[0]' 2>/dev/null || echo 0; }

# npm_install NAME SOURCE HOME: installs the packages of SOURCE/package-lock.json into HOME, once for each version of the
# file; no file is written next to the sources. Prints the reason if it fails. A lock file that npm rejects is a failure
# of the test NAME.
npm_install() {
    stamp=$(cat "$2/package.json" "$2/package-lock.json" | cksum)
    mkdir -p "$3"
    [ "$(cat "$3/installed" 2>/dev/null)" = "$stamp" ] && return 0
    if ! command -v npm >/dev/null 2>&1; then
        echo "skip $1: there is no npm"
        return 1
    fi
    cp "$2/package.json" "$2/package-lock.json" "$3" && rm -f "$3/installed"
    if (cd "$3" && timeout 240 npm ci --ignore-scripts --no-audit --no-fund --fetch-retries=1) >"$SHOAL_TMP/npm" 2>&1; then
        echo "$stamp" >"$3/installed"
        return 0
    fi
    why=$(grep -i 'npm err' "$SHOAL_TMP/npm" | head -n 3 | tr '\n' ' ')
    case $why in
    *EUSAGE* | *EINTEGRITY* | *ERESOLVE* | *ETARGET* | *E404*) echo "not ok $1: $why" ;;
    *) echo "skip $1: 'npm ci' could not install them: $why" ;;
    esac
    return 1
}
