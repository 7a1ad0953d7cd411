#!/bin/sh
# test_attack: every attack of test/attack on the built program. SHOAL is the binary; ATTACKS="jobs templates" limits
# them to those scripts.
# long, alone: it measures times and memory
set -u
SHOAL=${SHOAL:-build/shoal}
export SHOAL PYTHONDONTWRITEBYTECODE=1
if ! command -v python3 >/dev/null 2>&1; then
    echo "skip attack: python3 is not installed"
    exit 0
fi
for script in test/attack/*.py; do
    name=$(basename "$script" .py)
    [ "$name" = attack ] && continue
    case " ${ATTACKS:-$name} " in *" $name "*) ;; *) continue ;; esac
    timeout 300 python3 "$script" || echo "not ok attack $name: exit status $?"
done
