#!/bin/sh
# test_translations: every translated page has a mark of the English text that it translates. Pages that are out of date are
# printed as skipped, so that the report names them: scripts/translations.py.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null || { echo "skip translations: python3 is not installed"; exit 0; }
python3 scripts/translations.py
