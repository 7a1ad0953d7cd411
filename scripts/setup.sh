#!/bin/sh
# setup: checks that the Debian packages for building Shoal are installed, and installs missing ones.
#
# setup.sh [--tests] [PACKAGE ...]: with --tests also those that the tests need: real clients, a browser, oracles. A
# test whose package cannot be installed is skipped with a message. If nothing is missing, it prints nothing and returns
# at once. Otherwise it prints the missing packages and installs them as root or with "sudo -n", without prompts. Where
# it may not install, it prints the one line that would, and fails. It never removes anything.
set -u

tests=
if [ "${1-}" = --tests ]; then
    shift
    tests="curl python3 python3-cffi python3-numpy python3-setuptools python3-venv python3-wheel bubblewrap openssl procps chromium fonts-noto-cjk prometheus mkdocs mandoc"
    command -v npm >/dev/null || tests="$tests nodejs npm"
fi

packages="build-essential pkg-config git ca-certificates libjansson-dev libyaml-dev libpcre2-dev
gettext libsqlite3-dev libsodium-dev libunistring-dev libedit-dev libcurl4-openssl-dev libcmocka-dev libmicrohttpd-dev
python3-jinja2 $tests $*"

if ! command -v dpkg-query >/dev/null 2>&1; then
    echo "setup: no dpkg here; the build needs the counterparts of these Debian packages:" >&2
    echo "$packages" >&2
    exit 0
fi

# It prints the known ones to stdout and fails if any is unknown, which is no error here.
installed=$(dpkg-query -W -f '${db:Status-Status}:${Package}\n' $packages 2>/dev/null)
missing=
for package in $packages; do
    case "
$installed
" in
    *"
installed:$package
"*) ;;
    *) missing="$missing $package" ;;
    esac
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" = 0 ]; then
    as_root=
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    echo "setup: these packages are missing and this user cannot install them; run:" >&2
    echo "sudo apt-get install --no-install-recommends$missing" >&2
    exit 1
fi

echo "setup: installing$missing" >&2
apt="$as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y"
# A failed refresh is not fatal: the packages may be known already.
$apt update >&2 || echo "setup: warning: apt-get update failed, trying with what is known" >&2
if ! $apt install --no-install-recommends $missing >&2 </dev/null; then
    echo "setup: the installation failed; to try by hand:" >&2
    echo "apt-get update && apt-get install --no-install-recommends$missing" >&2
    exit 1
fi
