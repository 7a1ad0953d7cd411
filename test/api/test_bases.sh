#!/bin/sh
# test_bases: a server with several base models: each is loaded when a request names it, unloaded by keep_alive, or when
# another one needs its memory, and never while it is in use; its replies are those of a server with this base alone.
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
servers=
trap 'for pid in $servers; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; done; rm -rf "$tmp"' EXIT
ok() { echo "ok $1"; }
bad() { echo "not ok $1: $2"; }
command -v python3 >/dev/null || { echo "skip bases: python3 is not installed"; exit 0; }

# up NAME MODELS AND FLAGS…: starts a server; its address is in $url, its process in $server.
up() {
    name=$1
    shift
    : >"$tmp/$name.out"
    "$shoal" serve "$@" --port 0 --json --state "$tmp/state-$name" --drain-seconds 2 >"$tmp/$name.out" 2>"$tmp/$name.err" &
    server=$!
    servers="$servers $server"
    for _ in $(seq 600); do
        url=$(sed -n 's/.*"listening":"\([^"]*\)".*/\1/p' "$tmp/$name.out")
        [ -n "$url" ] && return 0
        kill -0 "$server" 2>/dev/null || break
        sleep 0.1
    done
    bad "the server '$name' starts" "$(head -c 500 "$tmp/$name.err")"
    exit 1
}
# refused NAME TEXT ARGUMENTS…: the command fails with this text.
refused() {
    name=$1 text=$2
    shift 2
    if "$shoal" serve "$@" --state "$tmp/state" --port 0 --dry-run >"$tmp/out" 2>"$tmp/err"; then bad "$name" "exit 0"
    elif grep -qF -- "$text" "$tmp/err"; then ok "$name"
    else bad "$name" "$(head -c 400 "$tmp/err")"; fi
}

one=test/models/fry-1
cp -r $one "$tmp/second"
cp -r $one "$tmp/broken"
mkdir -p "$tmp/hub/owner"
cp -r $one "$tmp/hub/owner/pulled"
cp -r $one "$tmp/hub/second"
"$shoal" adapter new --model $one --rank 4 --seed 1 "$tmp/a" --quiet 2>"$tmp/err" || bad "an adapter" "$(cat "$tmp/err")"
"$shoal" adapter blend --model $one --parents "$tmp/a" "$tmp/a" --child "$tmp/critic" --compat legacy --mut 1 --mut-std 0.1 --seed 1 \
    --quiet >/dev/null 2>"$tmp/err" || bad "an adapter" "$(cat "$tmp/err")"

refused "a limit for the largest two models is needed" "raise --max-memory to" models/fry $one "$tmp/second" --max-memory 20M --max-request-memory 64M --adapter fry-1:critic="$tmp/critic"
least=$(sed -n 's/.*raise --max-memory to \([0-9]*M\).*/\1/p' "$tmp/err")
refused "--keep-alive that is no duration is refused" "--keep-alive 'soon'" models/fry $one --keep-alive soon
refused "a model that does not exist is refused" "nothing-here" models/fry "$tmp/nothing-here" --max-memory 400M
if "$shoal" serve models/fry $one "$tmp/hub/second" "$tmp/second" --state "$tmp/state" --port 0 >"$tmp/out" 2>"$tmp/err"; then
    bad "two models of one name are refused" "exit 0"
elif grep -qF "is called 'second', too" "$tmp/err"; then ok "two models of one name are refused"
else bad "two models of one name are refused" "$(cat "$tmp/err")"; fi

limit=$least
up limited models/fry $one "$tmp/second" "$tmp/broken" --max-memory "${least:-1M}" --max-request-memory 64M --load-seconds 2 --adapter fry-1:critic="$tmp/critic"
LIMITED=$url LIMITED_PID=$server
up wide models/fry $one --model-dir "$tmp/hub" --keep-alive -1
WIDE=$url WIDE_PID=$server
# long: a context of 8192 tokens, of which the memory of `narrow` holds a part
cp -r $one "$tmp/long"
sed -i 's/\(max_position_embeddings": \)[0-9]*/\18192/' "$tmp/long/config.json"
up long $one "$tmp/long"
LONG=$url LONG_PID=$server
refused "the limit of a model with a long context" "raise --max-memory to" $one "$tmp/long" --max-memory 20M --max-request-memory 8M
least=$(sed -n 's/.*raise --max-memory to \([0-9]*M\).*/\1/p' "$tmp/err")
up narrow $one "$tmp/long" --max-memory "${least:-1M}" --max-request-memory 8M
NARROW=$url NARROW_PID=$server
up alone $one --adapter critic="$tmp/critic"
ALONE=$url

cat >"$tmp/client.py" <<'PY'
import calendar, concurrent.futures, json, os, re, socket, threading, time, urllib.error, urllib.request
limited, wide, alone = os.environ['LIMITED'], os.environ['WIDE'], os.environ['ALONE']
tmp, limited_pid, wide_pid = os.environ['TMP'], os.environ['LIMITED_PID'], os.environ['WIDE_PID']

def call(at, path, body=None, key=None):
    q = urllib.request.Request(at + path, json.dumps(body).encode() if body is not None else None, {'Content-Type': 'application/json'})
    if key:
        q.add_header('Authorization', 'Bearer ' + key)
    try:
        with urllib.request.urlopen(q, timeout=120) as r:
            text = r.read()
            return r.status, json.loads(text) if 'json' in r.headers['Content-Type'] else text, r.headers
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read()), e.headers

def token(name):
    with open('%s/state-%s/token' % (tmp, name)) as f:
        return f.read().strip()

def chat(at, model, i=0, **more):
    code, v, _ = call(at, '/v1/chat/completions', dict({'model': model, 'max_tokens': 8, 'temperature': 1, 'seed': i, 'logprobs': True,
                      'messages': [{'role': 'user', 'content': '12 + %d = ?' % i}]}, **more))
    return (code, v['choices'][0]['message'], v['choices'][0]['logprobs'], v['system_fingerprint']) if code == 200 else (code, v)

def loaded(at):
    return [m['name'].split(':')[0] for m in call(at, '/api/ps')[1]['models']]

def expires(at, model):
    return {m['name'].split(':')[0]: m['expires_at'] for m in call(at, '/api/ps')[1]['models']}[model]

def until(condition, seconds=60):
    end = time.time() + seconds
    while not condition() and time.time() < end:
        time.sleep(0.05)
    return condition()

def memory(pid, what):
    return int(re.search(what + r':\s*(\d+)', open('/proc/%s/status' % pid).read()).group(1)) / 1024

def rss(pid):
    return memory(pid, 'VmRSS')

def check(what, right, why=''):
    print('ok ' + what if right else 'not ok %s: %s' % (what, str(why)[:400]))

# names
ids = [m['id'] for m in call(limited, '/v1/models')[1]['data']]
check('all models are listed', ids == ['fry', 'fry-1', 'critic', 'second', 'broken'], ids)
tags = call(limited, '/api/tags')[1]['models']
check('all models have sizes and digests', [m['name'] for m in tags] == [i + ':latest' for i in ids] and
      all(len(m['digest']) == 64 and m['size'] > 0 for m in tags if m['name'] != 'critic:latest'), tags)
check('models of a folder are listed', [m['id'] for m in call(wide, '/v1/models')[1]['data']] == ['fry', 'fry-1', 'pulled', 'second'])
check('a model card loads nothing', call(limited, '/v1/models/second')[1]['root'].endswith('/second'))
check('only the first model is loaded at the start', loaded(limited) == ['fry'] and loaded(wide) == ['fry'])
code, v, _ = call(limited, '/v1/chat/completions', {'model': 'third', 'messages': [{'role': 'user', 'content': 'x'}]})
check('an unknown model is 404', code == 404, (code, v))
code, v, _ = call(limited, '/api/generate', {'model': 'second', 'keep_alive': 0})
check('unloading a model that is not loaded does not load it', (code, v['done_reason'], loaded(limited)) == (200, 'unload', ['fry']), (code, v))

# replies
base = rss(limited_pid)
same = [(chat(limited, m, i), chat(alone, m, i)) for m in ('fry-1', 'critic') for i in range(4)]
check('replies are those of a server with this base alone', all(a == b and a[0] == 200 for a, b in same), next(((a, b) for a, b in same if a != b), ''))
check('an adapter of the base has an effect', same[0][0][1:] != same[4][0][1:])
for path, body in (('/v1/embeddings', {'input': 'x'}), ('/tokenize', {'prompt': '12 + 30'}), ('/api/embed', {'input': 'x'}), ('/api/show', {}),
                   ('/completion', {'prompt': 'x', 'n_predict': 4, 'temperature': 0, 'seed': 1})):
    a, b = ({k: v for k, v in call(at, path, dict(body, model='fry-1'))[1].items() if k not in ('total_duration', 'modified_at', 'timings')}
            for at in (limited, alone))
    check('%s of a loaded base' % path, a == b and 'error' not in a, (a, b))
left = calendar.timegm(time.strptime(expires(limited, 'fry-1')[:19], '%Y-%m-%dT%H:%M:%S')) - time.time()
check('the default keep_alive is five minutes', 100 < left <= 301, left)
check('keep_alive of a request holds', call(limited, '/api/generate', {'model': 'fry-1', 'keep_alive': -1})[0] == 200 and
      expires(limited, 'fry-1').startswith('2318'), expires(limited, 'fry-1'))

# memory
full = rss(limited_pid)
check('a model that needs memory unloads the one that was used least recently', chat(limited, 'second')[0] == 200 and loaded(limited) == ['fry', 'second'], loaded(limited))
call(limited, '/api/generate', {'model': 'second', 'prompt': 'x', 'stream': False, 'keep_alive': 0, 'options': {'num_predict': 2}})
check('keep_alive 0 unloads after the request', until(lambda: loaded(limited) == ['fry']), loaded(limited))
least = rss(limited_pid)
check('unloading returns the memory', full - base > 9 and until(lambda: rss(limited_pid) < base + (full - base) / 3), (base, full, least))
call(limited, '/api/generate', {'model': 'second', 'keep_alive': '1s'})
was = loaded(limited)
check('a model expires', until(lambda: loaded(limited) == ['fry'], 30) and was == ['fry', 'second'], (was, loaded(limited)))

# a model in use: a client that does not read its stream
body = json.dumps({'model': 'second', 'max_tokens': 450, 'n': 8, 'ignore_eos': True, 'loop_tokens': 0, 'logprobs': True, 'top_logprobs': 20, 'stream': True,
                   'messages': [{'role': 'user', 'content': 'x'}]}).encode()
host, port = limited.split('//')[1].split(':')
slow = socket.socket()
slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
slow.connect((host, int(port)))
slow.sendall(b'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % len(body) + body)
first = slow.recv(64)
begin = time.time()
code, v, headers = call(limited, '/v1/chat/completions', {'model': 'fry-1', 'messages': [{'role': 'user', 'content': 'x'}]})
took = time.time() - begin
check('a request whose model finds no memory waits and gets 503', (code, headers['Retry-After']) == (503, '1') and took >= 2 and
      "no memory is left to load the model 'fry-1'" in v['error']['message'], (first, code, v, took))
check('the model in use is not unloaded', loaded(limited) == ['fry', 'second'], loaded(limited))
waiting = threading.Thread(target=call, args=(limited, '/api/generate', {'model': 'fry-1', 'prompt': 'x', 'stream': False}))
waiting.start()
check('other models run meanwhile', chat(limited, 'fry', 1)[0] == 200 and waiting.is_alive())
waiting.join()
slow.close()
check('the model can be loaded once the other is idle', until(lambda: chat(limited, 'fry-1')[0] == 200), chat(limited, 'fry-1'))

# a failed load
weights = tmp + '/broken/model.safetensors'
data = open(weights, 'rb').read()
open(weights, 'wb').write(data[:5000])
code, v, _ = call(limited, '/v1/chat/completions', {'model': 'broken', 'messages': [{'role': 'user', 'content': 'x'}]})
check('a failed load is an error', code == 500 and "cannot load the model 'broken'" in v['error']['message'], (code, v))
open(weights, 'wb').write(data)
check('the next request loads the model again', chat(limited, 'broken')[0] == 200, chat(limited, 'broken'))

used, limit = memory(limited_pid, 'VmHWM'), float(os.environ['LIMIT'].rstrip('M'))
check('the peak memory is below the limit', used < limit, (used, limit))

# contexts
def context(at):
    listed = {m['id']: m['max_model_len'] for m in call(at, '/v1/models')[1]['data']}['long']
    code, v, _ = call(at, '/tokenize', {'model': 'long', 'prompt': 'x'})
    return listed, v['max_model_len'] if code == 200 else v, {m['id']: m['max_model_len'] for m in call(at, '/v1/models')[1]['data']}['long']
long, narrow = os.environ['LONG'], os.environ['NARROW']
check('a model that is loaded on demand has its own context', context(long) == (8192, 8192, 8192), context(long))
code, v, _ = call(long, '/v1/completions', {'model': 'long', 'prompt': [5] * 4500, 'max_tokens': 2})
check('a prompt of more than 4096 tokens', code == 200 and v['usage']['prompt_tokens'] == 4500, (code, v))
got = context(narrow)
check('as far as memory allows', 1024 <= got[0] < 4096 and got[0] == got[1] == got[2], got)

# adapters that a request loads
code, v, _ = call(wide, '/v1/load_lora_adapter', {'lora_name': 'late', 'lora_path': tmp + '/critic', 'base_model_name': 'second'}, token('wide'))
a = chat(wide, 'late', 1)
call(wide, '/api/generate', {'model': 'second', 'keep_alive': 0})
gone = until(lambda: loaded(wide) == ['fry'])
check('an adapter of a base is available after the base was unloaded', code == 200 and gone and a == chat(wide, 'second:late', 1) == chat(alone, 'critic', 1), (code, v, a))

# several at once
names = ['fry', 'fry-1', 'pulled', 'second']
def mixed(i):
    return chat(wide, names[i % 4], i // 4)
with concurrent.futures.ThreadPoolExecutor(24) as pool:
    got = list(pool.map(mixed, range(48)))
check('models run at once, each with its own replies', all(r[0] == 200 for r in got) and set(names) <= set(loaded(wide)) and
      all(got[i + 1] == got[i + 2] == got[i + 3] == chat(alone, 'fry-1', i // 4) for i in range(0, 48, 4)), got[:2])
v = {b['id']: b for b in call(wide, '/v1/system')[1]['bases']}
check('the state of the bases', all(b['state'] == 'loaded' and b['loads'] >= 1 and b['expires_in'] is None for b in v.values()) and len(v) == 3, v)
with urllib.request.urlopen(wide + '/metrics') as r:
    text = r.read().decode()
check('metrics of every loaded model', all('vllm:num_requests_running{model_name="%s",engine="0"}' % m in text for m in names),
      [l for l in text.split('\n') if l.startswith('vllm:num_requests_running')])
PY
LONG=$LONG NARROW=$NARROW LIMITED=$LIMITED WIDE=$WIDE ALONE=$ALONE LIMIT=${limit:-1M} LIMITED_PID=$LIMITED_PID WIDE_PID=$WIDE_PID TMP=$tmp python3 "$tmp/client.py" || bad "the client" "exit $?"
servers=$server # the last one
for pid in $WIDE_PID $LIMITED_PID $LONG_PID $NARROW_PID; do
    kill "$pid"
    if wait "$pid"; then ok "a server with loaded models ends"; else bad "a server with loaded models ends" "exit $?"; fi
done
