#!/bin/sh
# test_python: the Python package is installed from this tree into a virtual environment, without a network, and passes
# its tests; the blocks ```python of docs/PYTHON.md and examples/notebook.py run. Files of the build are in build/python
# only. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines.
set -u
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
# The Python that has Debian's packages.
python=/usr/bin/python3
[ -x $python ] || python=$(command -v python3) || { echo "skip python: python3 is not installed"; exit 0; }
for module in cffi numpy setuptools wheel ensurepip; do
    $python -c "import $module" 2>/dev/null && continue
    [ $module = ensurepip ] && module=venv
    echo "skip python: python3-$module is not installed"
    exit 0
done
export PYTHONDONTWRITEBYTECODE=1 PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1 TMPDIR="$tmp"
unset MAKEFLAGS MAKELEVEL SHOAL_LIBRARY PYTHONPATH

: >"$tmp/start"
if $python -m venv --system-site-packages "$tmp/venv" >"$tmp/log" 2>&1 &&
    "$tmp/venv/bin/pip" install --no-build-isolation --no-deps . >"$tmp/log" 2>&1; then ok "pip install"
else bad "pip install" "$(tail -n 5 "$tmp/log")"; exit 1; fi
left=$(find . -maxdepth 3 -path ./build -prune -o -newer "$tmp/start" \( -name '*.egg-info' -o -path './python/*' \) -print)
if [ -z "$left" ]; then ok "no files of the build in the tree"; else bad "no files of the build in the tree" "$left"; fi
if (cd / && PYTHONPATH=$root/python $python -c 'import shoal; shoal.Model') >"$tmp/log" 2>&1; then ok "import from the tree"
else bad "import from the tree" "$(tail -n 1 "$tmp/log")"; fi

mkdir "$tmp/work" && cd "$tmp/work" || exit 1
ln -s "$root/models" "$root/data" .
python=$tmp/venv/bin/python
$python "$root/python/tests/run_tests.py"
$python "$root/python/tests/run_page.py" "$root/docs/PYTHON.md"
if $python "$root/examples/notebook.py" >"$tmp/log" 2>&1; then ok notebook.py; else bad notebook.py "$(tail -n 5 "$tmp/log" | tr '\n' ' ')"; fi
