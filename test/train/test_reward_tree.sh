#!/bin/sh
# test_reward_tree: processes that a reward command starts do not survive the training, for any end of it; a training
# without bubblewrap prints the remedy. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the
# binary.
set -u
shoal=$(realpath "${SHOAL:-build/shoal}")
root=$PWD
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
export SHOAL_CONFIG=''
mark=987.$$ # seconds: an argument that only this run's processes have

ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
left() { # number of these processes
    n=0
    for p in /proc/[0-9]*/cmdline; do
        if { tr '\0' ' ' <"$p" | grep -q "^sleep $mark"; } 2>/dev/null; then n=$((n + 1)); fi
    done
    echo $n
}
until_left() { # N: waits for that number
    i=0
    while [ "$(left)" != "$1" ]; do
        i=$((i + 1))
        if [ $i -gt 600 ]; then return 1; fi
        sleep 0.1
    done
}
train() {
    exec "$shoal" train "$root/test/models/fry-1" --method rloo --data fry:pick --out "$tmp/out" --runs "$tmp/runs" --max-steps 2 --r 2 \
        --num-generations 2 --threads 1 "$@"
}
daemons="setsid sleep $mark & (setsid sleep $mark >/dev/null 2>&1 &) ; sleep $mark &"

# Without bubblewrap: refused, with the remedy; it runs if the option allows that.
mkdir none
got=0
(PATH=$tmp/none train --reward 'shell:echo 1; echo 1; echo 1; echo 1') >out.txt 2>&1 || got=$?
if [ $got != 0 ] && grep -q 'apt install bubblewrap' out.txt && grep -q -- '--no-reward-sandbox' out.txt; then ok "no bubblewrap"
else bad "no bubblewrap" "exit $got: $(tail -c 300 out.txt)"; fi
if (PATH=$tmp/none train --no-reward-sandbox --reward 'shell:while read -r line; do echo 1; done') >out.txt 2>&1; then
    ok "sandbox not requested"
else bad "sandbox not requested" "$(tail -c 300 out.txt)"; fi
if ! "$shoal" doctor | grep -q '^sandbox *bubblewrap'; then
    echo "skip reward trees: $("$shoal" doctor | grep '^missing')"
    exit 0
fi

# The training ends normally.
if (train --reward "shell:$daemons while read -r line; do echo 1; done") >out.txt 2>&1; then
    if [ "$(left)" = 0 ]; then ok "the end of a training"; else bad "the end of a training" "$(left) are left"; fi
else bad "the end of a training" "$(tail -c 300 out.txt)"; fi

# A reward that is too slow.
(train --reward-timeout 1 --reward "shell:$daemons sleep $mark") >out.txt 2>&1
if grep -q 'did not end in time' out.txt && [ "$(left)" = 0 ]; then ok "a reward beyond its time"
else bad "a reward beyond its time" "$(left) are left: $(tail -c 300 out.txt)"; fi

# Stopped and killed while the reward runs.
for signal in TERM KILL; do
    (train --reward "shell:$daemons sleep $mark") >out.txt 2>&1 &
    pid=$!
    if ! until_left 4; then bad "SIG$signal" "the reward does not run: $(tail -c 300 out.txt)"; kill -9 $pid; continue; fi
    kill -$signal $pid
    wait $pid 2>/dev/null
    if until_left 0; then ok "SIG$signal"; else bad "SIG$signal" "$(left) are left"; fi
done
