#!/bin/sh
# test_ollama: Ollama's API of a running server: text, chats, embeddings, lists, and derived models that are created,
# stored, copied and deleted. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
# Needs no network except loopback.
set -u
shoal=${SHOAL:-build/shoal}
tmp=$(mktemp -d) || exit 1
server=
trap '[ -z "$server" ] || kill $server 2>/dev/null; rm -rf "$tmp"' EXIT

for tool in curl python3; do
    command -v $tool >/dev/null || { echo "skip ollama: no $tool"; exit 0; }
done

# Two adapters whose output differs from the base's and from each other's.
for i in 1 2; do
    "$shoal" adapter new --model test/models/fry-1 --rank 4 --seed $i "$tmp/n$i" --quiet >/dev/null &&
        "$shoal" adapter blend --model test/models/fry-1 --parents "$tmp/n$i" "$tmp/n$i" --child "$tmp/a$i" --compat legacy --mut 1 --mut-std 0.15 \
            --seed $i --quiet >/dev/null || { echo "not ok ollama: no adapters"; exit 0; }
done
"$shoal" adapter convert --model test/models/fry-1 "$tmp/a1" "$tmp/a1.gguf" --quiet >/dev/null 2>&1

# A copy of the base whose chat template supports tools.
cp -r test/models/fry-1 "$tmp/tooled"
python3 - "$tmp/tooled/tokenizer_config.json" <<'END'
import json, sys
c = json.load(open(sys.argv[1]))
c['chat_template'] = ("{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + c['chat_template'])
json.dump(c, open(sys.argv[1], 'w'))
END

# start NAME ARGUMENTS…: starts `shoal serve ARGUMENTS`. Sets $server to its process, $url to its address and $TOKEN_FILE.
start() {
    out=$tmp/$1.out
    shift
    : >"$out"
    "$shoal" serve "$@" --port 0 --json --drain-seconds 2 >"$out" 2>"$tmp/err" &
    server=$!
    url=
    for _ in $(seq 600); do
        url=$(sed -n 's/.*"listening": *"\([^"]*\)".*/\1/p' "$out")
        TOKEN_FILE=$(sed -n 's/.*"token_file": *"\([^"]*\)".*/\1/p' "$out")
        [ -n "$url" ] && return 0
        kill -0 $server 2>/dev/null || break
        sleep 0.1
    done
    echo "not ok the server starts: $(head -c 400 "$tmp/err")"
    exit 0
}
# stop CHECK: stops the server. The check CHECK is whether it exits with 0.
stop() {
    kill $server
    wait $server
    code=$?
    server=
    if [ $code = 0 ]; then echo "ok $1"; else echo "not ok $1: exit $code, $(head -c 2000 "$tmp/err")"; fi
}

cat >"$tmp/client.py" <<'END'
import json, os, subprocess, sys, threading, urllib.request, urllib.error, hashlib, datetime, re
url, tmp, shoal = os.environ['URL'], os.environ['TMP'], os.environ['SHOAL']
token = open(os.environ['TOKEN_FILE']).read().strip() # creating and deleting models requires it

def call(method, path, body=None, raw=None, headers={}):
    """(status, text, headers)"""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    q = urllib.request.Request(url + path, data, {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + token, **headers}, method=method)
    try:
        with urllib.request.urlopen(q, timeout=120) as r:
            return r.status, r.read().decode(), r.headers
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode(), e.headers

def post(path, **body):
    status, text, _ = call('POST', path, body)
    return status, json.loads(text) if text.strip() else None

def lines(path, **body):
    status, text, headers = call('POST', path, body)
    assert headers['Content-Type'] == 'application/x-ndjson', headers['Content-Type']
    return [json.loads(l) for l in text.splitlines()]

def same(have, want):
    assert have == want, 'have %r, want %r' % (have, want)

def refused(path, status, words, **body):
    code, v = post(path, **body)
    same(code, status)
    same(list(v), ['error'])
    assert isinstance(v['error'], str) and words in v['error'], v

def run_counted(*args):
    """(output of shoal run, number of the prompt's tokens)"""
    v = json.loads(subprocess.run([shoal, 'run', 'test/models/fry-1', '--quiet', '--json', *args],
                                  capture_output=True, check=True).stdout)
    return v['text'], v['prefilled']

def run(*args):
    return run_counted(*args)[0]

def generated(**body):
    """The same of /api/generate."""
    v = post('/api/generate', stream=False, options=GREEDY, **body)[1]
    return v['response'], v['prompt_eval_count']

def user(text):
    return [{'role': 'user', 'content': text}]

JA, ZH = '412と907、大きいのは？', '比较412和907，哪个大？'
GREEDY = {'temperature': 0, 'num_predict': 16}
A1, A2 = tmp + '/a1', tmp + '/a2'
tests = []
def test(f):
    tests.append(f)
    return f
def run_tests():
    for f in tests:
        try:
            f()
            print('ok ollama:', f.__doc__)
        except Exception as e:
            print('not ok ollama: %s: %s: %s' % (f.__doc__, type(e).__name__, str(e).replace('\n', ' ')[:600]))
END

cat >"$tmp/main.py" <<'END'
from client import *

@test
def _():
    "a generation equals that of shoal run"
    for p in (JA, ZH, 'sort: k b x'):
        status, v = post('/api/generate', model='fry-1', prompt=p, stream=False, options=GREEDY)
        same(status, 200)
        same(v['response'], run('--chat', p, '--temp', '0', '--n', '16'))
        same((v['model'], v['done'], v['done_reason']), ('fry-1', True, 'stop'))
        datetime.datetime.fromisoformat(v['created_at'][:19])
        for k in ('total_duration', 'load_duration', 'prompt_eval_count', 'prompt_eval_duration', 'eval_count', 'eval_duration'):
            assert isinstance(v[k], int) and v[k] >= 0, k
        assert v['total_duration'] >= v['prompt_eval_duration'] + v['eval_duration'] > 0

@test
def _():
    "streaming is the default, and the chunks together equal the whole reply"
    for path, body, get in (('/api/generate', {'prompt': JA}, lambda v: v['response']),
                            ('/api/chat', {'messages': user(JA)}, lambda v: v['message']['content'])):
        parts = lines(path, model='fry-1', options=GREEDY, **body)
        same([p['done'] for p in parts], [False] * (len(parts) - 1) + [True])
        assert len(parts) >= 2 and parts[-1]['eval_count'] > 0
        _, whole = post(path, model='fry-1', options=GREEDY, stream=False, **body)
        same(''.join(map(get, parts)), get(whole))
        same(set(whole), set(parts[-1]))

@test
def _():
    "a long reply arrives in chunks of whole characters"
    for seed in range(4, 40): # where a reply ends depends on the numeric class
        wild = {'temperature': 5, 'top_k': 0, 'top_p': 1, 'seed': seed, 'num_predict': 400, 'stop': []}
        _, whole = post('/api/generate', model='fry-1', prompt='春', raw=True, stream=False, options=wild)
        if whole['eval_count'] >= 200: break
    parts = lines('/api/generate', model='fry-1', prompt='春', raw=True, options=wild)
    same(''.join(p['response'] for p in parts), whole['response'])
    assert len(parts) > 5 and not whole['response'].isascii(), (len(parts), whole)

@test
def _():
    "replies of two adapters, streamed at the same time, equal those of shoal run"
    want = {n: [run('--chat', p, '--adapter', d, '--temp', '0', '--n', '16') for p in (JA, ZH)] for n, d in (('one', A1), ('two', A2))}
    assert want['one'] != want['two']
    got, threads = {}, []
    def ask(name, i, p):
        parts = lines('/api/chat', model=name, messages=user(p), options=GREEDY)
        got[name, i] = ''.join(x['message']['content'] for x in parts)
    for n in ('one', 'two:latest', 'fry-1:one', 'two'):
        for i, p in enumerate((JA, ZH)):
            threads.append(threading.Thread(target=ask, args=(n, i, p)))
    for t in threads: t.start()
    for t in threads: t.join()
    for n, w in (('one', 'one'), ('two:latest', 'two'), ('fry-1:one', 'one'), ('two', 'two')):
        same([got[n, 0], got[n, 1]], want[w])

@test
def _():
    "Ollama's default options and a seed give the reply of shoal run"
    for seed in (5, 77, 78, 79, 80, 81):
        for flags, options in ((('--temp', '0.8', '--top-k', '40', '--top-p', '0.9'), {}),
                               (('--temp', '3', '--top-k', '40', '--top-p', '0.9'), {'temperature': 3}),
                               (('--temp', '3', '--top-k', '40', '--top-p', '1'), {'temperature': 3, 'top_p': 1}),
                               (('--temp', '0.8', '--top-k', '0', '--top-p', '1'), {'top_k': 0, 'top_p': 1})):
            want = run('-p', '春は', '--adapter', A2, '--seed', str(seed), '--n', '60', *flags)
            _, v = post('/api/generate', model='two', prompt='春は', raw=True, stream=False,
                        options=dict(options, seed=seed, num_predict=60, num_thread=3, use_mmap=True, num_ctx=4096))
            same(v['response'], want)
    other = {post('/api/generate', model='two', prompt=ZH, stream=False, options={'temperature': 3, 'top_k': 0, 'top_p': 1, 'num_predict': 12})[1]['response'] for _ in range(4)}
    assert len(other) > 1, 'without a seed all draws are alike'

@test
def _():
    "options reach the sampler"
    full = post('/api/generate', model='fry-1', prompt='sort: k b x', stream=False, options=GREEDY)[1]
    v = post('/api/generate', model='fry-1', prompt='sort: k b x', stream=False, options=dict(GREEDY, num_predict=2))[1]
    same((v['eval_count'], v['done_reason']), (2, 'length'))
    v = post('/api/generate', model='fry-1', prompt='sort: k b x', stream=False, options=dict(GREEDY, stop=['k', 'zz']))[1]
    same(v['response'], full['response'].split('k')[0])
    same(''.join(p['response'] for p in lines('/api/generate', model='fry-1', prompt='sort: k b x', options=dict(GREEDY, stop=['k']))), full['response'].split('k')[0])
    v = post('/api/generate', model='fry-1', prompt='sort: k b x', stream=False, options=dict(GREEDY, repeat_penalty=90, presence_penalty=2))[1]
    assert v['response'] != full['response']
    w = post('/api/generate', model='fry-1', prompt='sort: k b x', stream=False, options=dict(GREEDY, repeat_penalty=90, repeat_last_n=0))[1]
    same(w['response'], full['response'])

@test
def _():
    "raw prompts have no template"
    _, v = post('/api/generate', model='fry-1', prompt='春は', raw=True, stream=False, options=GREEDY)
    same(v['response'], run('-p', '春は', '--temp', '0', '--n', '16'))
    assert 'context' not in v
    refused('/api/generate', 400, 'raw mode', model='fry-1', prompt='x', raw=True, system='y')

@test
def _():
    "system is the first message"
    same(generated(model='fry-1', prompt=JA, system='短く'), run_counted('--chat', JA, '--system', '短く', '--temp', '0', '--n', '16'))

@test
def _():
    "a context continues the conversation like the messages of a chat"
    _, one = post('/api/generate', model='fry-1', prompt=JA, stream=False, options=GREEDY)
    _, two = post('/api/generate', model='fry-1', prompt=ZH, context=one['context'], stream=False, options=GREEDY)
    talk = user(JA) + [{'role': 'assistant', 'content': one['response']}] + user(ZH)
    _, chat = post('/api/chat', model='fry-1', messages=talk, stream=False, options=GREEDY)
    same(two['response'], chat['message']['content'])
    same(two['prompt_eval_count'], chat['prompt_eval_count'])
    same(two['context'][:len(one['context'])], one['context'])

TEMPLATES = ('{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}{{ if .Prompt }}<|im_start|>user\n'
             '{{ .Prompt }}<|im_end|>\n{{ end }}<|im_start|>assistant\n{{ .Response }}<|im_end|>\n',
             '{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n')

@test
def _():
    "a template in the request replaces that of the model"
    for t in TEMPLATES:
        same(generated(model='fry-1', prompt=JA, system='短く', template=t), run_counted('--chat', JA, '--system', '短く', '--temp', '0', '--n', '16'))
    _, v = post('/api/generate', model='fry-1', prompt='は', template='春{{/* 季節 */}}{{ if not (and .System "x") }}{{ .Prompt }}{{ else }}夏{{ end -}}  ', stream=False, options=GREEDY)
    same(v['response'], run('-p', '春は', '--temp', '0', '--n', '16'))
    refused('/api/generate', 400, 'is not understood', model='fry-1', prompt='x', template='{{ json .Tools }}')
    refused('/api/generate', 400, 'not closed', model='fry-1', prompt='x', template='{{ .Prompt')
    refused('/api/generate', 400, 'fewer', model='fry-1', prompt='x', template='{{ if .Prompt }}a')

@test
def _():
    "user text is never a special token, even with a template"
    a = post('/api/generate', model='fry-1', prompt='<|im_end|>', template='{{ .Prompt }}', stream=False, options=GREEDY)[1]
    b = post('/api/generate', model='fry-1', prompt='x', template='<|im_end|>', stream=False, options=GREEDY)[1]
    assert a['prompt_eval_count'] > b['prompt_eval_count'] == 1, (a['prompt_eval_count'], b['prompt_eval_count'])

@test
def _():
    "format: json gives an object, a schema what it describes"
    _, v = post('/api/generate', model='fry-1', prompt=JA, format='json', stream=False, options={'temperature': 1, 'seed': 3, 'num_predict': 60})
    assert isinstance(json.loads(v['response']), dict), v['response']
    schema = {'type': 'object', 'properties': {'大きい': {'type': 'integer'}, 'ok': {'type': 'boolean'}}, 'required': ['大きい', 'ok']}
    for stream in (False, True):
        parts = lines('/api/chat', model='one', messages=user(JA), format=schema, options=GREEDY | {'num_predict': 60}) if stream else \
            [post('/api/chat', model='one', messages=user(JA), format=schema, stream=False, options=GREEDY | {'num_predict': 60})[1]]
        v = json.loads(''.join(p['message']['content'] for p in parts))
        assert isinstance(v['大きい'], int) and isinstance(v['ok'], bool), v
    refused('/api/generate', 400, "'format'", model='fry-1', prompt='x', format='yaml')
    refused('/api/generate', 400, "'format'", model='fry-1', prompt='x', format=7)

@test
def _():
    "an empty prompt loads or unloads a model, as keep_alive says"
    for body, why in (({}, 'load'), ({'keep_alive': '5m'}, 'load'), ({'keep_alive': 0}, 'unload'), ({'keep_alive': '0s'}, 'unload'), ({'keep_alive': '0'}, 'unload'), ({'keep_alive': '0h0ms'}, 'unload'), ({'keep_alive': '1h30.5m'}, 'load'), ({'keep_alive': '300'}, 'load'), ({'keep_alive': -1}, 'load')):
        _, v = post('/api/generate', model='one', **body)
        same((v['response'], v['done'], v['done_reason']), ('', True, why))
        _, v = post('/api/chat', model='one', messages=[], **body)
        same((v['message'], v['done_reason']), ({'role': 'assistant', 'content': ''}, why))
    for bad in ('soon', '5 parsecs', '5m3', '1.2.3', 'm', True, [], ''):
        refused('/api/generate', 400, 'keep_alive', model='one', keep_alive=bad)

@test
def _():
    "logprobs: one for each token of the reply, the same tokens in a stream"
    _, v = post('/api/generate', model='fry-1', prompt=JA, stream=False, logprobs=True, top_logprobs=3, options=GREEDY)
    same(len(v['logprobs']), v['eval_count'] - 1)
    assert all(len(t['top_logprobs']) == 3 and t['logprob'] <= 0 for t in v['logprobs'])
    parts = lines('/api/chat', model='fry-1', messages=user(JA), logprobs=True, options=GREEDY)
    same([t['token'] for p in parts for t in p.get('logprobs', [])], [t['token'] for t in v['logprobs']])

@test
def _():
    "unknown models are 404 with Ollama's message"
    for path, body in (('/api/generate', {'prompt': 'x'}), ('/api/chat', {'messages': user('x')}), ('/api/embed', {'input': 'x'}),
                       ('/api/embeddings', {'prompt': 'x'}), ('/api/show', {}), ('/api/create', {'from': '猫'})):
        code, v = post(path, **dict({'model': '猫' if path != '/api/create' else 'new'}, **body))
        same((code, v), (404, {'error': "model '猫' not found"}))
    same(json.loads(call('DELETE', '/api/delete', {'model': '猫'})[1]), {'error': "model '猫' not found"})
    same(json.loads(call('POST', '/api/copy', {'source': '猫', 'destination': 'x'})[1]), {'error': "model '猫' not found"})
    refused('/api/show', 404, "model 'one:7b' not found", model='one:7b')
    code, text, _ = call('GET', '/api/nothing')
    same((code, list(json.loads(text))), (404, ['error']))
    code, text, _ = call('GET', '/api/chat')
    same((code, list(json.loads(text))), (405, ['error']))

@test
def _():
    "wrong types are 400 with the name of the field"
    cases = [('options', 'must be an object', [1]), ('stream', 'true or false', 'yes'), ('prompt', 'a string', 3), ('system', 'a string', {}),
             ('raw', 'true or false', 1), ('context', "'context'", 'x'), ('context', "'context'", ['x']), ('context', 'not one of this model', [1, 99999999]), ('images', 'text only', ['aGk=']), ('suffix', 'insert', 'end'),
             ('think', 'does not support thinking', True), ('think', "'think'", 5), ('logprobs', 'true or false', 2), ('top_logprobs', 'whole number', -1)]
    for key, words, value in cases:
        refused('/api/generate', 400, words, **dict({'model': 'fry-1', 'prompt': 'x'}, **{key: value}))
    for key, value in (('temperature', 'hot'), ('temperature', -1), ('top_k', 1.5), ('top_p', 2), ('min_p', []), ('seed', 'x'), ('num_predict', '3'),
                       ('num_predict', -3), ('repeat_penalty', 0), ('stop', 5), ('stop', [1]), ('repeat_last_n', 'all')):
        refused('/api/generate', 400, "'%s'" % key, model='fry-1', prompt='x', options={key: value})
    for m in (5, 'hi', {'role': 'user'}, ['x'], [{'role': 'cat', 'content': 'x'}], [{'role': 'user', 'content': 5}]):
        refused('/api/chat', 400, '', model='fry-1', messages=m)
    refused('/api/chat', 400, 'text only', model='fry-1', messages=[{'role': 'user', 'content': 'x', 'images': ['aGk=']}])
    refused('/api/chat', 400, "'tools'", model='fry-1', messages=user('x'), tools=[{'type': 'function'}])
    refused('/api/generate', 400, "'model'", prompt='x')
    refused('/api/generate', 400, "'model'", model=5, prompt='x')
    refused('/api/generate', 400, 'context is', model='fry-1', prompt='長い' * 3000)
    for raw in (b'', b'{', b'{"model":"fry-1","prompt":"' + b'\xff"}', b'[' * 5000, b'{"model":"fry-1","model":"fry-1"}', b'null', b'[]', b'"x"'):
        code, text, _ = call('POST', '/api/generate', raw=raw)
        same((code, list(json.loads(text))), (400, ['error']))

@test
def _():
    "think: false is accepted and changes nothing"
    same(post('/api/chat', model='fry-1', messages=user(JA), think=False, stream=False, options=GREEDY)[1]['message']['content'], run('--chat', JA, '--temp', '0', '--n', '16'))

@test
def _():
    "embeddings: order, norm, dimensions, long and empty inputs"
    _, v = post('/api/embed', model='fry-1', input=[JA, ZH, 'abc'])
    same((len(v['embeddings']), len(v['embeddings'][0]), v['model']), (3, 192, 'fry-1'))
    assert all(abs(sum(x * x for x in e) - 1) < 1e-5 for e in v['embeddings'])
    assert v['prompt_eval_count'] > 3 and v['total_duration'] > 0
    _, one = post('/api/embed', model='fry-1', input=ZH)
    same(one['embeddings'], [v['embeddings'][1]])
    _, old = post('/api/embeddings', model='fry-1', prompt=ZH)
    dot = sum(a * b for a, b in zip(old['embedding'], one['embeddings'][0])) / sum(a * a for a in old['embedding']) ** .5
    assert dot > 0.99999, dot
    assert post('/api/embed', model='one', input=ZH)[1]['embeddings'] != one['embeddings']
    _, short = post('/api/embed', model='fry-1', input=ZH, dimensions=8)
    same(len(short['embeddings'][0]), 8)
    assert abs(sum(x * x for x in short['embeddings'][0]) - 1) < 1e-5
    same(post('/api/embed', model='fry-1', input=[])[1]['embeddings'], [])
    same(post('/api/embeddings', model='fry-1', prompt='')[1]['embedding'], [])
    same(len(post('/api/embed', model='fry-1', input='長い' * 3000)[1]['embeddings']), 1)
    refused('/api/embed', 400, 'the context is', model='fry-1', input='長い' * 3000, truncate=False)
    for bad in (5, {}, [1, 2], [['x']]): refused('/api/embed', 400, "'input'", model='fry-1', input=bad)
    refused('/api/embed', 400, "'dimensions'", model='fry-1', input='x', dimensions=1000)

@test
def _():
    "tags and ps list the base and every adapter"
    v = {m['name']: m for m in json.loads(call('GET', '/api/tags')[1])['models']}
    assert {'fry-1:latest', 'one:latest', 'two:latest'} <= set(v), list(v)
    for m in v.values():
        same(m['model'], m['name'])
        assert re.fullmatch('[0-9a-f]{64}', m['digest']) and m['modified_at'].endswith('Z')
        same((m['details']['family'], m['details']['families'], m['details']['quantization_level']), ('llama', ['llama'], 'F32'))
    same(v['fry-1:latest']['digest'], json.loads(subprocess.run([shoal, 'run', 'test/models/fry-1', '-p', 'x', '--n', '1', '--json', '--quiet'], capture_output=True).stdout)['model_hash'])
    assert v['fry-1:latest']['size'] > v['one:latest']['size'] > 0
    same((v['one:latest']['details']['parent_model'], v['fry-1:latest']['details']['parent_model']), ('fry-1', ''))
    assert v['one:latest']['digest'] != v['two:latest']['digest']
    assert v['fry-1:latest']['details']['parameter_size'].endswith('M')
    ps = {m['name']: m for m in json.loads(call('GET', '/api/ps')[1])['models']}
    assert {'fry-1:latest', 'one:latest'} <= set(ps) and ps['fry-1:latest']['context_length'] == 512 and ps['one:latest']['size_vram'] == 0
    datetime.datetime.fromisoformat(ps['fry-1:latest']['expires_at'][:19])

@test
def _():
    "show describes a model and an adapter"
    for body in ({'model': 'fry-1'}, {'name': 'one:latest', 'verbose': True}):
        status, v = post('/api/show', **body)
        same(status, 200)
        i = v['model_info']
        same((i['general.architecture'], i['llama.embedding_length'], i['llama.block_count'], i['llama.context_length'], i['llama.attention.head_count_kv']), ('llama', 192, 6, 512, 2))
        assert i['general.parameter_count'] > 1e6 and '<|im_start|>' in v['template'] and 'FROM fry-1' in v['modelfile']
        same(v['capabilities'], ['completion', 'embedding'])
    assert 'ADAPTER' in v['modelfile']

@test
def _():
    "the root page, the version, and routes that are not supported"
    for method in ('GET', 'HEAD'):
        same(call(method, '/')[:2], (200, 'Ollama is running' if method == 'GET' else ''))
    assert 'Ollama' not in call('GET', '/', headers={'Accept': 'text/html,*/*'})[1]
    assert re.match(r'\d', json.loads(call('GET', '/api/version')[1])['version'])
    for path in ('/api/pull', '/api/push'):
        code, v = post(path, model='llama3')
        assert code >= 400 and list(v) == ['error'], v

@test
def _():
    "OpenAI's routes keep OpenAI's errors"
    code, v = post('/v1/chat/completions', model='猫', messages=user('x'))
    same((code, v['error']['code']), (404, 'model_not_found'))

# ---- derived models

def upload(data, digest=None):
    digest = digest or 'sha256:' + hashlib.sha256(data).hexdigest()
    return call('POST', '/api/blobs/' + digest, raw=data)[0], digest

def create(**body):
    parts = lines('/api/create', **body)
    same(parts[-1], {'status': 'success'})
    return [p['status'] for p in parts]

def reply(model, p=JA, **more):
    return post('/api/generate', model=model, prompt=p, stream=False, options=dict(GREEDY), **more)[1]['response']

@test
def _():
    "blobs are stored under their hash"
    data = os.urandom(5 << 20)
    digest = 'sha256:' + hashlib.sha256(data).hexdigest()
    same(call('HEAD', '/api/blobs/' + digest)[0], 404)
    same(upload(data)[0], 201)
    same(call('HEAD', '/api/blobs/' + digest)[0], 200)
    same(open(tmp + '/state/blobs/' + digest.replace(':', '-'), 'rb').read() == data, True)
    same(upload(data)[0], 200)
    wrong = 'sha256:' + '0' * 64
    code, text, _ = call('POST', '/api/blobs/' + wrong, raw=data)
    same(code, 400)
    assert 'digest mismatch' in json.loads(text)['error']
    same(call('HEAD', '/api/blobs/' + wrong)[0], 404)
    for bad in ('x', 'sha256:../../../etc/passwd', 'sha256:' + 'g' * 64, 'sha256:..%2f..%2fx'):
        same(call('POST', '/api/blobs/' + bad, raw=b'x')[0], 400)
        same(call('HEAD', '/api/blobs/' + bad)[0], 400)
    same([f for f in os.listdir(tmp + '/state/blobs') if '.tmp' in f], [])

@test
def _():
    "an uploaded adapter equals the original"
    want = [run('--chat', p, '--adapter', A1, '--temp', '0', '--n', '16') for p in (JA, ZH)]
    gguf = upload(open(tmp + '/a1.gguf', 'rb').read())[1]
    peft = {n: upload(open(A1 + '/' + n, 'rb').read())[1] for n in ('adapter_config.json', 'adapter_model.safetensors')}
    for name, adapters in (('from-gguf', {'a.gguf': gguf}), ('from-peft', peft), ('from-list', [gguf]), ('from-path', [A1])):
        assert len(create(model=name, **{'from': 'fry-1'}, adapters=adapters)) >= 2
        same([reply(name, p) for p in (JA, ZH)], want)

@test
def _():
    "a model with several adapters adds them"
    want = [run('--chat', p, '--adapter', A1 + ',' + A2, '--temp', '0', '--n', '16') for p in (JA, ZH)]
    create(model='both:latest', modelfile='FROM fry-1\nADAPTER %s\nADAPTER %s\n' % (A1, A2))
    same([reply('both', p) for p in (JA, ZH)], want)
    create(model='both2', **{'from': 'one'}, adapters=[A2])
    same([reply('both2:latest', p) for p in (JA, ZH)], want)
    _, v = post('/v1/chat/completions', model='both', messages=user(JA), temperature=0, max_tokens=16)
    same(v['choices'][0]['message']['content'], want[0])
    assert 'both:latest' in [m['name'] for m in json.loads(call('GET', '/api/tags')[1])['models']]

MODELFILE = '''# 短い答え
FROM fry-1
SYSTEM """短く
答えて"""
PARAMETER temperature 0
PARAMETER num_predict 16
PARAMETER stop "zz"
PARAMETER stop 7
MESSAGE user 3と5？
MESSAGE assistant "answer: 5"
LICENSE """自由"""
'''
TALK = [{'role': 'system', 'content': '短く\n答えて'}] + user('3と5？') + [{'role': 'assistant', 'content': 'answer: 5'}]

def check_settings(name):
    _, want = post('/api/chat', model='fry-1', messages=TALK + user(JA), stream=False, options=dict(GREEDY, stop=['zz', '7']))
    _, v = post('/api/chat', model=name, messages=user(JA), stream=False)
    same((v['message'], v['prompt_eval_count']), (want['message'], want['prompt_eval_count']))
    _, g = post('/api/generate', model=name, prompt=JA, stream=False)
    same((g['response'], g['prompt_eval_count']), (want['message']['content'], want['prompt_eval_count']))
    _, o = post('/v1/chat/completions', model=name, messages=user(JA))
    same((o['choices'][0]['message']['content'], o['usage']['prompt_tokens']), (want['message']['content'], want['prompt_eval_count']))
    assert '7' in reply('fry-1') and '7' not in want['message']['content']

@test
def _():
    "settings are stored with the model"
    create(model='短い', modelfile=MODELFILE)
    check_settings('短い')
    _, over = post('/api/generate', model='短い', prompt=JA, system='x', stream=False, options={'num_predict': 1})
    same(over['eval_count'], 1)
    _, v = post('/api/show', model='短い')
    same((v['system'], v['messages'], v['license']), ('短く\n答えて', TALK[1:], '自由'))
    assert 'temperature' in v['parameters'] and v['parameters'].count('stop') == 2 and 'MESSAGE user' in v['modelfile']
    assert create(model='短い2', modelfile=v['modelfile'])
    check_settings('短い2')

@test
def _():
    "a template is stored with the model"
    create(model='bare', **{'from': 'one'}, template='春{{ .Prompt }}')
    same(reply('bare', 'は'), run('-p', '春は', '--adapter', A1, '--temp', '0', '--n', '16'))
    _, o = post('/v1/chat/completions', model='bare', messages=[{'role': 'user', 'content': [{'type': 'text', 'text': 'は'}]}], temperature=0, max_tokens=16)
    same(o['choices'][0]['message']['content'], reply('bare', 'は'))
    for i, t in enumerate(TEMPLATES):
        create(model='chatml%d' % i, **{'from': 'fry-1'}, template=t)
        talk = TALK + user(JA) + [{'role': 'assistant', 'content': 'x'}] + user(ZH)
        have, want = (post('/api/chat', model=m, messages=talk, stream=False, options=GREEDY)[1] for m in ('chatml%d' % i, 'fry-1'))
        same((have['message'], have['prompt_eval_count']), (want['message'], want['prompt_eval_count']))
    statuses = create(model='odd', **{'from': 'one'}, template='{{ json .Tools }}')
    assert any("the base's own template" in t for t in statuses), statuses
    same(reply('odd'), reply('one'))
    same(post('/api/show', model='odd')[1]['template'], '{{ json .Tools }}')

@test
def _():
    "copy and delete"
    same(call('POST', '/api/copy', {'source': '短い', 'destination': 'kopie/短:latest'})[0], 200)
    check_settings('kopie/短')
    same(call('DELETE', '/api/delete', {'model': 'kopie/短:latest'})[0], 200)
    same(call('DELETE', '/api/delete', {'model': 'kopie/短:latest'})[0], 404)
    same(post('/api/show', model='kopie/短')[0], 404)
    same(call('POST', '/api/copy', {'source': 'both', 'destination': 'third'})[0], 200)
    same(reply('third'), reply('both'))
    same(call('DELETE', '/api/delete', {'name': 'third'})[0], 200)
    same(call('DELETE', '/api/delete', {'model': 'fry-1'})[0], 400)
    check_settings('短い')

@test
def _():
    "creating a model again replaces it, even by one without an adapter"
    create(model='again', **{'from': 'one'})
    same(reply('again'), reply('one'))
    create(model='again', **{'from': 'two'})
    same(reply('again', ZH), reply('two', ZH))
    create(model='again', **{'from': 'fry-1'}, system='短く')
    same(reply('again'), reply('fry-1', system='短く'))
    create(model='again', **{'from': 'one'})
    same(reply('again'), reply('one'))
    code, v = post('/api/create', model='again', **{'from': 'fry-1'}, stream=False)
    same((code, v), (200, {'status': 'success'}))
    same(reply('again'), reply('fry-1'))

@test
def _():
    "a model that is replaced while it answers gives the old or the new answer"
    froms = ('one', 'two', 'fry-1')
    allowed, seen, over = {reply(m, ZH) for m in froms}, [], []
    same(len(allowed), 3)
    def ask():
        while not over: seen.append(post('/api/generate', model='again', prompt=ZH, stream=False, options=GREEDY))
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for t in threads: t.start()
    for i in range(30): create(model='again', **{'from': froms[i % 3]})
    over.append(True)
    for t in threads: t.join()
    same({status for status, _ in seen}, {200})
    assert {v['response'] for _, v in seen} <= allowed and len({v['response'] for _, v in seen}) > 1, seen[:4]
    create(model='again', **{'from': 'fry-1'})

@test
def _():
    "invalid create requests report why and create nothing"
    for words, body in (('sha256:', {'adapters': {'a': 'sha256:' + '1' * 64}}), ('digest', {'adapters': {'adapter_config.json': 'x'}}), ("'adapters'", {'adapters': 5}),
                        ("'adapters'", {'adapters': [5]}), ('', {'adapters': ['/no/such/adapter']}), ("'temperature'", {'parameters': {'temperature': 'x'}}),
                        ("'parameters'", {'parameters': [1]}), ("'messages'", {'messages': [{'role': 'cat', 'content': 'x'}]}), ("'system'", {'system': 5}), ("'template'", {'template': 5}),
                        ('quantize', {'quantize': 'q4_0'}), ('Modelfile', {'modelfile': 'FROM fry-1\nSYSTEM """x'}), ('line 2', {'modelfile': 'FROM fry-1\nCAT x'}), ('at most 16', {'adapters': [A1] * 17}),
                        ("'from'", {'from': None}), ("'from'", {'from': 5}), ('mix', {'from': 'one*0.5+two*0.5'})):
        refused('/api/create', 400, words, **dict({'model': 'wrong', 'from': 'fry-1'}, **body))
        same(post('/api/show', model='wrong')[0], 404)
    for name in ('fry-1', 'fry-1:latest', 'base', 'mix', 'a b', 'a+b', '', '.x'):
        refused('/api/create', 400, '', model=name, **{'from': 'one'})
    refused('/api/copy', 400, "the base's name", source='one', destination='fry-1')
    refused('/api/copy', 400, "'source'", destination='x')

run_tests()
END

cat >"$tmp/again.py" <<'END'
from client import *
# The definitions of main.py from `upload` to `reply`, and from MODELFILE to `check_settings`.
exec(open(tmp + '/main.py').read().split('# ---- derived models')[1].split('@test')[0])
source = open(tmp + '/main.py').read()
exec(source[source.index("MODELFILE = '''"):].split('@test')[0])

@test
def _():
    "derived models exist after a restart, deleted ones do not"
    check_settings('短い')
    same(reply('both'), run('--chat', JA, '--adapter', A1 + ',' + A2, '--temp', '0', '--n', '16'))
    same(reply('from-peft'), run('--chat', JA, '--adapter', A1, '--temp', '0', '--n', '16'))
    same(reply('bare', 'は'), run('-p', '春は', '--adapter', A1, '--temp', '0', '--n', '16'))
    same(post('/api/show', model='kopie/短')[0], 404)

run_tests()
END

cat >"$tmp/tools.py" <<'END'
from client import *
TOOLS = [{'type': 'function', 'function': {'name': '天気', 'description': 'x', 'parameters': {'type': 'object', 'properties': {'都市': {'type': 'string', 'enum': ['東京', '北京']}, 'n': {'type': 'integer'}}, 'required': ['都市', 'n']}}}]

@test
def _():
    "a tool's arguments are an object, streamed or not"
    body = dict(model='tooled', messages=user('東京の天気は？'), tools=TOOLS, tool_choice='required', options=GREEDY | {'num_predict': 120})
    whole = post('/api/chat', stream=False, **body)[1]
    parts = lines('/api/chat', **body)
    calls = [c for p in parts for c in p['message'].get('tool_calls', [])]
    for c in (whole['message']['tool_calls'], calls):
        same(len(c), 1)
        f = c[0]['function']
        same(f['name'], '天気')
        assert f['arguments']['都市'] in ('東京', '北京') and isinstance(f['arguments']['n'], int), f
    same(calls[0]['function'], whole['message']['tool_calls'][0]['function'])
    same((whole['done_reason'], parts[-1]['done_reason'], whole['message']['content']), ('stop', 'stop', ''))
    back = user('東京の天気は？') + [whole['message'], {'role': 'tool', 'tool_name': '天気', 'content': '晴れ'}]
    status, v = post('/api/chat', model='tooled', messages=back, tools=TOOLS, stream=False, options=GREEDY)
    same(status, 200)
    assert isinstance(v['message']['content'], str)
    cut = post('/api/chat', stream=False, **dict(body, options=GREEDY | {'num_predict': 3}))[1]
    same((cut['done_reason'], 'tool_calls' in cut['message']), ('length', False))

@test
def _():
    "--context-shift is the default of all APIs, and a request may turn it off"
    body = dict(model='tooled', prompt='春は', raw=True, stream=False, options=GREEDY | {'num_predict': 540, 'ignore_eos': True, 'loop_tokens': 0})
    v, off = post('/api/generate', **body)[1], post('/api/generate', shift=False, **body)[1]
    same((v['eval_count'], off['eval_count']), (540, 512 - off['prompt_eval_count']))
    assert v['response'].startswith(off['response']) and v['done_reason'] == 'length'
    again = dict(model='tooled', prompt='春は', temperature=0, ignore_eos=True, loop_tokens=0)
    same(post('/v1/completions', max_tokens=540, **again)[1]['choices'][0]['text'], v['response'])
    same(post('/v1/completions', max_tokens=540, n_keep=2, **again)[1]['choices'][0]['text'], v['response'])
    same(post('/v1/completions', max_tokens=540, context_shift=False, **again)[1]['usage']['completion_tokens'], off['eval_count'])

@test
def _():
    "a template that supports tools gives the capability tools"
    same(post('/api/show', model='tooled')[1]['capabilities'], ['completion', 'embedding', 'tools'])

run_tests()
END

SHOAL=$shoal TMP=$tmp
export SHOAL TMP TOKEN_FILE
start main test/models/fry-1 --adapter "one=$tmp/a1" "two=$tmp/a2" --state "$tmp/state"
URL=$url python3 "$tmp/main.py"

# An interrupted upload leaves no file, and --max-body does not limit an upload.
head -c 50000000 /dev/zero >"$tmp/zeros"
digest=$(sha256sum "$tmp/zeros" | cut -d' ' -f1)
curl -s -m 1 --limit-rate 1M -o /dev/null -H "X-API-Key: $(cat "$TOKEN_FILE")" -T "$tmp/zeros" -X POST "$url/api/blobs/sha256:$digest"
for _ in $(seq 100); do ls "$tmp/state/blobs" | grep -q tmp || break; sleep 0.3; done
if ls "$tmp/state/blobs" | grep -q -e tmp -e "$digest"; then echo "not ok ollama: an interrupted upload leaves no file: $(ls "$tmp/state/blobs")"
else echo "ok ollama: an interrupted upload leaves no file"; fi
code=$(curl -s -o "$tmp/out" -w '%{http_code}' -H "X-API-Key: $(cat "$TOKEN_FILE")" -T "$tmp/zeros" -X POST "$url/api/blobs/sha256:$digest")
if [ "$code" = 201 ] && cmp -s "$tmp/zeros" "$tmp/state/blobs/sha256-$digest"; then echo "ok ollama: a blob may be larger than --max-body"
else echo "not ok ollama: a blob may be larger than --max-body: $code $(head -c 200 "$tmp/out")"; fi
code=$(curl -s -o "$tmp/out" -w '%{http_code}' -H "X-API-Key: $(cat "$TOKEN_FILE")" -T "$tmp/zeros" -X POST "$url/api/generate")
if [ "$code" = 413 ] && grep -q '^{"error":"' "$tmp/out"; then echo "ok ollama: a request may not be larger than --max-body"; else echo "not ok ollama: a request may not be larger than --max-body: $code $(head -c 200 "$tmp/out")"; fi
stop "ollama: the server exits with 0"

echo '{"name": "y"}' >"$tmp/state/models/$(printf x | sha256sum | cut -d' ' -f1).json"
echo 'no JSON' >"$tmp/state/models/odd.json"
start again test/models/fry-1 --adapter "one=$tmp/a1" "two=$tmp/a2" --state "$tmp/state"
URL=$url python3 "$tmp/again.py"
if [ "$(grep -c "is not served" "$tmp/err")" = 2 ]; then echo "ok ollama: invalid records are reported"; else echo "not ok ollama: invalid records are reported: $(head -c 300 "$tmp/err")"; fi
stop "ollama: the restarted server exits with 0"

start tools "$tmp/tooled" --state "$tmp/state2" --context-shift --keep 2
URL=$url python3 "$tmp/tools.py"
stop "ollama: the server with tools exits with 0"
