#!/bin/sh
# test_memory_limit: a server with more adapters than fit into --max-memory. Its peak memory stays below the limit,
# adapters are evicted and loaded again, requests wait for room, and the replies have the bits of a server without a
# limit. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
servers=
trap 'for pid in $servers; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; done; rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
command -v python3 >/dev/null || { echo "skip memory limit: python3 is not installed"; exit 0; }

# 108 adapters of 1.3 MB each in memory: copies of 12 with different effects, which the server does not share.
model=test/models/fry-1 n=108
"$shoal" adapter new --model $model --rank 8 --seed 1 "$tmp/parent" --quiet 2>"$tmp/err" || bad "an adapter" "$(cat "$tmp/err")"
for i in $(seq 12); do
    "$shoal" adapter blend --model $model --parents "$tmp/parent" "$tmp/parent" --child "$tmp/adapters/a$i" --compat legacy \
        --mut 1 --mut-std 0.1 --seed "$i" --quiet >/dev/null 2>"$tmp/err" || { bad "adapters" "$(cat "$tmp/err")"; exit 1; }
    for k in $(seq $((i + 12)) 12 $n); do cp -r "$tmp/adapters/a$i" "$tmp/adapters/a$k"; done
done

# up NAME FLAGS…: starts a server; its address is in $url, its process in $server.
up() {
    name=$1
    shift
    : >"$tmp/$name.out"
    "$shoal" serve $model --port 0 --json --state "$tmp/state-$name" --drain-seconds 2 "$@" >"$tmp/$name.out" 2>"$tmp/$name.err" &
    server=$!
    servers="$servers $server"
    for _ in $(seq 600); do
        url=$(sed -n 's/.*"listening":"\([^"]*\)".*/\1/p' "$tmp/$name.out")
        [ -n "$url" ] && return 0
        kill -0 "$server" 2>/dev/null || break
        sleep 0.1
    done
    bad "the server '$name' starts" "$(head -c 500 "$tmp/$name.err")"
    return 1
}

# The refusal names a limit that is sufficient.
if "$shoal" serve $model --adapter-dir "$tmp/adapters" --max-memory 20M --dry-run >"$tmp/out" 2>"$tmp/err"; then
    bad "a limit that is too small is refused" "exit 0"
else ok "a limit that is too small is refused"; fi
least=$(sed -n 's/.*raise --max-memory to \([0-9]*M\),.*/\1/p' "$tmp/err")
up least --adapter-dir "$tmp/adapters" --max-memory "${least:-1M}" && LEAST=$url LEAST_PID=$server
up free --adapter-dir "$tmp/adapters" && FREE=$url FREE_PID=$server

cat >"$tmp/client.py" <<'PY'
import concurrent.futures, json, os, re, sys, urllib.error, urllib.request
n = int(os.environ['N'])

def post(at, **body):
    q = urllib.request.Request(at + '/v1/chat/completions', json.dumps(body).encode(), {'Content-Type': 'application/json'})
    try:
        with urllib.request.urlopen(q, timeout=120) as r:
            return r.status, json.load(r)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)

def replies(at):
    def ask(i):
        status, r = post(at, model='a%d' % (i % n + 1), max_tokens=6, temperature=1, seed=i, logprobs=True,
                         messages=[{'role': 'user', 'content': '12 + %d = ?' % i}])
        return (status, r['choices'][0]['message'], r['choices'][0]['logprobs']) if status == 200 else (status, r)
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        return list(pool.map(ask, range(n + 12)))

def peak(pid):
    return int(re.search(r'VmHWM:\s*(\d+)', open('/proc/%s/status' % pid).read()).group(1)) / 1024

def metric(at, name):
    with urllib.request.urlopen(at + '/metrics') as r:
        return float(re.search(r'^%s (\S+)' % name, r.read().decode(), re.M).group(1))

def check(what, right, why=''):
    print('ok ' + what if right else 'not ok %s: %s' % (what, str(why)[:400]))

at, limit = os.environ['LEAST'], float(os.environ['LIMIT'].rstrip('M'))
have, want = replies(at), replies(os.environ['FREE'])
late = [r for r in have if r[0] != 200]
check('requests wait until their adapters fit', not late, late[:1])
check('the replies are those of a server without a limit', have == want, next(((a, b) for a, b in zip(have, want) if a != b), ''))
check('the adapters have different effects', len({r[1]['content'] for r in want}) > 12)
used, free = peak(os.environ['LEAST_PID']), peak(os.environ['FREE_PID'])
print('# peak %.1f MB of %.0f MB, without a limit %.1f MB; %d evictions' % (used, limit, free, metric(at, 'shoal_adapter_drops_total')))
check('the peak memory is below the limit', used < limit < free, (used, limit, free))
check('adapters are evicted', metric(at, 'shoal_adapter_drops_total') > n / 2)
pool = 'a1*0.3+' + '+'.join('a%d*0.1' % i for i in range(2, 9))
status, r = post(at, model=pool, messages=[{'role': 'user', 'content': 'x'}])
check('a mix that never fits gets 503 with a message', status == 503 and 'the adapters of this mix need' in r['error']['message'], (status, r))
PY
if [ -n "${LEAST:-}" ] && [ -n "${FREE:-}" ]; then
    N=$n LEAST=$LEAST LEAST_PID=$LEAST_PID FREE=$FREE FREE_PID=$FREE_PID LIMIT=$least python3 "$tmp/client.py"
fi
