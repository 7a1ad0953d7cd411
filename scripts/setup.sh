#!/bin/sh
# setup: checks that the packages for building Shoal are installed, and installs missing ones on Debian and Ubuntu.
#
# setup.sh [--tests] [--print] [PACKAGE ...]: with --tests also those that the tests need: real clients, a browser,
# oracles. A test whose package cannot be installed is skipped with a message. If nothing is missing, it prints nothing
# and returns at once. Otherwise it prints the missing packages and installs them as root or with "sudo -n", without
# prompts. Where it may not install, and with --print, it prints the one line that would, and fails. It never removes
# anything. On Fedora, Arch and Alpine it prints that line if a library is missing, and does not install.
set -u

# Debian and Ubuntu, Fedora, Arch, Alpine; "-": part of another package.
build_packages="
build-essential gcc,gcc-c++,make base-devel build-base,linux-headers
pkg-config pkgconf-pkg-config pkgconf pkgconf
git git git git
ca-certificates ca-certificates ca-certificates ca-certificates
libjansson-dev jansson-devel jansson jansson-dev
libyaml-dev libyaml-devel libyaml yaml-dev
libpcre2-dev pcre2-devel pcre2 pcre2-dev
gettext gettext gettext gettext
libsqlite3-dev sqlite-devel sqlite sqlite-dev
libsodium-dev libsodium-devel libsodium libsodium-dev
libgmp-dev gmp-devel gmp gmp-dev
libunistring-dev libunistring-devel libunistring libunistring-dev
libedit-dev libedit-devel libedit libedit-dev
libcurl4-openssl-dev libcurl-devel curl curl-dev
libcmocka-dev libcmocka-devel cmocka cmocka-dev
libmicrohttpd-dev libmicrohttpd-devel libmicrohttpd libmicrohttpd-dev
libnats-dev - - -
python3-jinja2 python3-jinja2 python-jinja py3-jinja2"
test_packages="
curl curl curl curl
python3 python3 python python3
python3-cffi python3-cffi python-cffi py3-cffi
python3-numpy python3-numpy python-numpy py3-numpy
python3-setuptools python3-setuptools python-setuptools py3-setuptools
python3-venv - - -
python3-wheel python3-wheel python-wheel py3-wheel
bubblewrap bubblewrap bubblewrap bubblewrap
openssl openssl openssl openssl
nats-server - - -
procps procps-ng procps-ng procps-ng
chromium chromium chromium chromium
fonts-noto-cjk google-noto-sans-cjk-fonts noto-fonts-cjk font-noto-cjk
prometheus golang-github-prometheus prometheus prometheus
mkdocs mkdocs mkdocs mkdocs
mandoc mandoc mandoc mandoc
zlib1g-dev zlib-devel zlib zlib-dev
zsh zsh zsh zsh
fish fish fish fish"
node_packages="
nodejs nodejs nodejs nodejs
npm nodejs-npm npm npm"

print=
table=$build_packages
while [ $# -gt 0 ]; do
    case $1 in
    --tests)
        table="$table$test_packages"
        command -v npm >/dev/null || table="$table$node_packages"
        ;;
    --print) print=1 ;;
    *) break ;;
    esac
    shift
done

# The names of column $1 of the table, in one line.
column() {
    echo "$table" | awk -v column="$1" 'NF { print $column }' | tr ',' '\n' | grep -v '^-$' | tr '\n' ' '
}

libraries="jansson yaml-0.1 libpcre2-8 sqlite3 libsodium gmp libedit libcurl cmocka libmicrohttpd"
if ! command -v dpkg-query >/dev/null 2>&1; then
    pkg-config --exists $libraries 2>/dev/null && exit 0
    if command -v dnf >/dev/null; then
        install="dnf install $(column 2)"
    elif command -v pacman >/dev/null; then
        install="pacman -S --needed $(column 3)"
    elif command -v apk >/dev/null; then
        install="apk add $(column 4)"
    else
        install="no known package manager; the packages of Debian are: $(column 1)"
    fi
    echo "setup: libraries are missing; run as root:" >&2
    echo "$install$*" >&2
    exit 1
fi
packages="$(column 1)$*"

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

if [ "$print" ]; then
    echo "setup: packages are missing; run as root, or 'make demo', which installs them:" >&2
    echo "apt-get install --no-install-recommends$missing" >&2
    exit 1
elif [ "$(id -u)" = 0 ]; then
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
