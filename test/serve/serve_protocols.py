# serve_protocols: rules of the wire formats that test_ollama.sh and test_clients.sh do not check, one test each, on the
# server that test_api.sh has started: the base fry-1 (alias: second-name), adapters one and two, and in the resolver's
# folder late (for this base), alien (for another base), bad (damaged).
import base64, json, math, os, re, struct, threading, time, urllib.error, urllib.request

url, tmp, tooled = os.environ['URL'], os.environ['TMP'], os.environ['TOOLED']

# The servers' start-up tokens: adapters are loaded with one.
tokens = {url: open(os.environ['TOKEN_FILE']).read().strip(), tooled: open(os.environ['TOOLED_TOKEN_FILE']).read().strip()}

def call(method, path, body=None, headers={}, at=None):
    data = None if body is None else json.dumps(body).encode()
    sent = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + tokens[at or url], **headers}
    q = urllib.request.Request((at or url) + path, data, sent, method=method)
    try:
        with urllib.request.urlopen(q, timeout=120) as r:
            return r.status, r.read().decode(), r.headers
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode(), e.headers

def post(path, at=None, **body):
    status, text, _ = call('POST', path, body, at=at)
    assert status == 200, (status, text[:300])
    return json.loads(text)

def get(path):
    status, text, _ = call('GET', path)
    assert status == 200, (status, text[:300])
    return json.loads(text)

def events(path, at=None, **body):
    status, text, headers = call('POST', path, dict(body, stream=True), at=at)
    assert status == 200 and headers['Content-Type'] == 'text/event-stream', (status, text[:300])
    return [e[6:] for e in text.split('\n\n') if e.startswith('data: ')]

def chunks(path, at=None, **body):
    v = events(path, at, **body)
    assert v[-1] == '[DONE]', v[-1]
    return [json.loads(e) for e in v[:-1]]

def same(have, want):
    assert have == want, 'have %r, want %r' % (have, want)

def refused(path, status, words, **body):
    code, text, _ = call('POST', path, body)
    e = json.loads(text)['error']
    assert code == status and words in e['message'] and set(e) == {'message', 'type', 'param', 'code'}, (code, text[:300])
    return e

ASK = '412と907、大きいのは？'

def user(text):
    return [{'role': 'user', 'content': text}]

def chat(**body):
    return post('/v1/chat/completions', **dict({'temperature': 0, 'max_tokens': 12, 'messages': user(ASK)}, **body))

def words(**body):
    return chat(**body)['choices'][0]['message']['content']

tests = []
def test(f):
    tests.append(f)

# OpenAI

@test
def _():
    "chat: the fields of a reply and of its chunks"
    v = chat(model='one')
    same(set(v), {'id', 'object', 'created', 'model', 'choices', 'usage', 'system_fingerprint'})
    same((v['object'], v['model'], v['id'][:9]), ('chat.completion', 'one', 'chatcmpl-'))
    c = v['choices'][0]
    same((set(c), c['logprobs']), ({'index', 'message', 'logprobs', 'finish_reason'}, None))
    same((set(c['message']), c['message']['refusal']), ({'role', 'content', 'refusal'}, None))
    u = v['usage']
    same(u['total_tokens'], u['prompt_tokens'] + u['completion_tokens'])
    assert isinstance(u['prompt_tokens_details']['cached_tokens'], int)
    parts = chunks('/v1/chat/completions', model='one', messages=user(ASK), temperature=0, max_tokens=12, stream_options={'include_usage': True})
    same({(p['id'], p['created'], p['object']) for p in parts}, {(parts[0]['id'], parts[0]['created'], 'chat.completion.chunk')})
    same(parts[0]['choices'][0]['delta'], {'role': 'assistant', 'content': ''})
    same((parts[-2]['choices'][0]['delta'], parts[-2]['choices'][0]['finish_reason']), ({}, c['finish_reason']))
    same((parts[-1]['choices'], parts[-1]['usage']['completion_tokens']), ([], u['completion_tokens']))
    same({p['usage'] is None for p in parts[:-1]}, {True})
    same(''.join(p['choices'][0]['delta'].get('content', '') for p in parts[:-1]), c['message']['content'])
    assert all('usage' not in p for p in chunks('/v1/chat/completions', messages=user('x'), max_tokens=2))

@test
def _():
    "log-probabilities end where a stop text cuts the reply"
    ask = dict(model='one', messages=user('sort: k b x'), logprobs=True)
    full = chat(**ask)['choices'][0]
    all_tokens = [t['token'] for t in full['logprobs']['content']]
    stop = all_tokens[3]
    assert stop[0] == ' ' and stop not in all_tokens[:3], all_tokens
    cut = chat(**ask, stop=[stop])['choices'][0]
    same(cut['message']['content'], full['message']['content'].split(stop)[0])
    same([t['token'] for t in cut['logprobs']['content']], all_tokens[:3])
    inside = chat(**ask, stop=[stop.strip()])['choices'][0]
    same([t['token'] for t in inside['logprobs']['content']], all_tokens[:4]) # the leading blank is removed
    parts = chunks('/v1/chat/completions', **ask, temperature=0, max_tokens=12, stop=[stop])
    same([t['token'] for p in parts for t in (p['choices'][0]['logprobs'] or {'content': []})['content']], all_tokens[:3])
    v = post('/v1/completions', model='one', prompt='sort: k b x', temperature=0, max_tokens=8, logprobs=1)['choices'][0]
    t = v['logprobs']['tokens']
    cut = post('/v1/completions', model='one', prompt='sort: k b x', temperature=0, max_tokens=8, logprobs=1, stop=t[2])['choices'][0]
    for k in ('tokens', 'token_logprobs', 'top_logprobs', 'text_offset'):
        same(cut['logprobs'][k], v['logprobs'][k][:t.index(t[2])])
    o = post('/api/chat', **ask, stream=False, options={'temperature': 0, 'num_predict': 12, 'stop': [stop]})
    same([t['token'] for t in o['logprobs']], all_tokens[:3])

@test
def _():
    "streams report the same tokens as whole replies, including tokens without text"
    silent = str(post('/tokenize', prompt='<|endoftext|>', add_special_tokens=False)['tokens'][0])
    for bias in (0, 7.5, 100): # sometimes a token without text, and with bias 100 always
        body = dict(model='two', prompt='猫は', temperature=3, seed=5, max_tokens=20, logprobs=2, ignore_eos=True, logit_bias={silent: bias})
        whole = post('/v1/completions', **body)['choices'][0]
        parts = [p['choices'][0] for p in chunks('/v1/completions', **body)]
        same(''.join(p['text'] for p in parts), whole['text'])
        same(len(whole['logprobs']['tokens']), 20)
        for k in ('tokens', 'text_offset'):
            same([t for p in parts if p['logprobs'] for t in p['logprobs'][k]], whole['logprobs'][k])
        del body['prompt'] # chat requests have no such field
        body = dict(body, messages=user(ASK), logprobs=True)
        whole = post('/v1/chat/completions', **body)['choices'][0]
        parts = [p['choices'][0] for p in chunks('/v1/chat/completions', **body)]
        same([t['token'] for p in parts if p['logprobs'] for t in p['logprobs']['content']], [t['token'] for t in whole['logprobs']['content']])
    same(whole['message']['content'], '')

@test
def _():
    "completions: log-probabilities of an echoed prompt and one token contain each token and the best one"
    prompts = [[5, 6, 7, 300], [250, 251]]
    v = post('/v1/completions', model='one', prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
    for c, p in zip(v['choices'], prompts):
        l = c['logprobs']
        same([len(l[k]) for k in ('tokens', 'token_logprobs', 'top_logprobs', 'text_offset')], [len(p) + 1] * 4)
        same((l['token_logprobs'][0], l['top_logprobs'][0]), (None, None))
        for t, x, top in zip(l['tokens'][1:], l['token_logprobs'][1:], l['top_logprobs'][1:]):
            assert x in top.values() and 1 <= len(top) <= 2, (t, x, top)
        same(l['token_logprobs'][-1], max(l['top_logprobs'][-1].values()))
    same([c['index'] for c in v['choices']], [0, 1])
    none = post('/v1/completions', model='one', prompt=prompts[0], temperature=0, max_tokens=0, logprobs=1, echo=True)['choices'][0]
    same(len(none['logprobs']['tokens']), 4)

@test
def _():
    "completions: index is prompt·n + sample, and best_of returns the most probable"
    v = post('/v1/completions', model='two', prompt=['春', '12 +'], n=3, temperature=2, seed=3, max_tokens=6, logprobs=0)
    same([c['index'] for c in v['choices']], list(range(6)))
    best = post('/v1/completions', model='two', prompt=['春', '12 +'], n=1, best_of=3, temperature=2, seed=3, max_tokens=6, logprobs=0)
    mean = lambda c: sum(c['logprobs']['token_logprobs']) / max(len(c['logprobs']['token_logprobs']), 1)
    for p in (0, 1):
        want = max(v['choices'][3 * p:3 * p + 3], key=mean)
        same((best['choices'][p]['index'], best['choices'][p]['text']), (p, want['text']))
    same((len(best['choices']), best['usage']['completion_tokens']), (2, v['usage']['completion_tokens']))
    refused('/v1/completions', 400, "'best_of'", prompt='x', n=3, best_of=2)
    refused('/v1/completions', 400, "'best_of'", prompt='x', best_of=2, stream=True)

# samples and check

SUM = [dict(role='user', content='7325 + 6 = ?')]
result = lambda v: (v['shoal']['check']['kind'], v['shoal']['check']['samples'], v['shoal']['check']['passed'])

@test
def _():
    "check: the reply is the most frequent answer of the samples that pass, and usage counts all samples"
    want = dict(temperature=1.5, seed=5, max_tokens=6, n=8)
    texts = [c['message']['content'] for c in chat(**want)['choices']]
    total = chat(**want)['usage']['completion_tokens']
    letter = max(set(''.join(texts)) - set(' \n\\'), key=lambda l: sum(l in t for t in texts))
    passing = [t for t in texts if letter in t]
    answers = [t.rsplit('answer:', 1)[-1].strip() for t in passing]
    most = max(answers.count(a) for a in answers)
    first = next(t for t, a in zip(passing, answers) if answers.count(a) == most)
    del want['n']
    v = chat(samples=8, check='regex:' + re.escape(letter), **want)
    same((len(v['choices']), v['choices'][0]['index'], v['choices'][0]['message']['content']), (1, 0, first))
    same((result(v), v['usage']['completion_tokens']), (('regex', 8, len(passing)), total))
    same(chat(samples=8, check='regex', check_item={'pattern': re.escape(letter)}, **want)['choices'], v['choices'])
    none = chat(samples=8, check='regex:\\Anever', **want)
    same((result(none), none['choices'][0]['message']['content'] in texts), (('regex', 8, 0), True))
    plain = chat(**want)
    same('shoal' in plain, False)

@test
def _():
    "check: streams, log-probabilities and /v1/completions have the selected sample"
    want = dict(temperature=1.5, seed=5, max_tokens=6, samples=8, check='regex:[0-9]')
    v = chat(logprobs=True, **want)
    c = chunks('/v1/chat/completions', messages=user(ASK), stream_options={'include_usage': True}, logprobs=True, **want)
    said = [x['choices'][0] for x in c if x['choices']]
    same(''.join(x['delta'].get('content', '') for x in said), v['choices'][0]['message']['content'])
    same([t['token'] for x in said if x['logprobs'] for t in x['logprobs']['content']], [t['token'] for t in v['choices'][0]['logprobs']['content']])
    same(({x['index'] for x in said}, said[-1]['finish_reason'], result(c[-1])), ({0}, v['choices'][0]['finish_reason'], result(v)))
    same({k: c[-1]['usage'][k] for k in ('prompt_tokens', 'completion_tokens')}, {k: v['usage'][k] for k in ('prompt_tokens', 'completion_tokens')})
    want.update(model='one', prompt='12 + 30 =')
    whole, c = post('/v1/completions', logprobs=2, **want), chunks('/v1/completions', **want)
    same((''.join(x['choices'][0]['text'] for x in c), len(whole['choices'])), (whole['choices'][0]['text'], 1))
    same(''.join(whole['choices'][0]['logprobs']['tokens']), whole['choices'][0]['text'])

@test
def _():
    "check: question asks the base model, and usage counts its tokens"
    want = dict(model='one', messages=SUM, temperature=1, seed=3, max_tokens=16)
    plain = chat(n=4, **want)['usage']
    item = {'check': {'question': 'say {{ answer }}', 'answer': '{{ answer }}'}}
    v = chat(samples=4, check='question', check_item=item, **want)
    check = v['shoal']['check']
    same((check['kind'], check['questions'], check['prompt_tokens'] > 4, check['completion_tokens'] > 0), ('question', 4, True, True))
    same((v['usage']['prompt_tokens'], v['usage']['completion_tokens']),
         (plain['prompt_tokens'] + check['prompt_tokens'], plain['completion_tokens'] + check['completion_tokens']))

@test
def _():
    "check: a check of --allow-check, named as the server names it"
    schema = 'json-schema:' + tmp + '/schema.json'
    v = chat(samples=2, check=schema, max_tokens=40, response_format={'type': 'json_schema', 'json_schema': {'name': 'a', 'schema': {'enum': [{'a': 1}]}}})
    same(result(v), ('json-schema', 2, 2))
    refused('/v1/chat/completions', 400, "--allow-check", messages=SUM, check=schema + '/../schema.json')

@test
def _():
    "check: what is refused"
    def no(words, param, path='/v1/chat/completions', **body):
        body = dict({'prompt': 'x'} if path == '/v1/completions' else {'messages': SUM}, **body)
        same(refused(path, 400, words, **body)['param'], param)
    for spec in ('command:ls', 'shell:ls', 'tests', 'json-schema:/etc/passwd', 'sql:/etc/passwd', 'unknown', '', 'calculator:x', 'Calculator'):
        no('--allow-check', 'check', check=spec, samples=2)
    no('needs the right answer', 'check', check='exact', check_item={'answer': 'x'})
    no('missing closing', 'check', check='regex:(')
    no("'pattern' is missing", 'check_item', check='regex')
    no("'check.question' is missing", 'check_item', check='question')
    no("'check.answer'", 'check_item', check='question', check_item={'check': {'question': 'x'}})
    no('must be an object', 'check_item', check='calculator', check_item=[1])
    no('larger than', 'check_item', check='calculator', check_item={'question': 'x' * 70000})
    no("requires 'check'", 'samples', samples=2)
    no("requires 'check'", 'check_item', check_item={})
    no('from 1 to 128', 'samples', samples=129, check='calculator')
    no("'n' must be 1", 'n', samples=2, check='calculator', n=2)
    no('one prompt', 'check', path='/v1/completions', samples=2, check='calculator', prompt=['a', 'b'])
    no("'best_of' must be 1", 'best_of', path='/v1/completions', samples=2, check='calculator', best_of=2)
    no("not among calls of 'tools'", 'check', samples=2, check='calculator', tool_choice='required', tools=[{'type': 'function', 'function': {'name': 'f'}}])

@test
def _():
    "prompt_logprobs in vLLM's format"
    p = post('/tokenize', prompt='12 + 30 =')['tokens']
    v = post('/v1/completions', model='one', prompt=p, temperature=0, max_tokens=1, prompt_logprobs=2)['choices'][0]
    echo = post('/v1/completions', model='one', prompt=p, temperature=0, max_tokens=1, logprobs=2, echo=True)['choices'][0]['logprobs']
    rows = v['prompt_logprobs']
    same((len(rows), rows[0], v['logprobs']), (len(p), None, None))
    for i in range(1, len(p)):
        mine = rows[i][str(p[i])]
        same((mine['logprob'], mine['decoded_token']), (echo['token_logprobs'][i], echo['tokens'][i]))
        same(sorted((e['logprob'] for e in rows[i].values()), reverse=True)[:2], sorted(echo['top_logprobs'][i].values(), reverse=True)[:2])
        same(next(e['rank'] for e in rows[i].values() if e['logprob'] == max(echo['top_logprobs'][i].values())), 1)
    c = chat(model='one', prompt_logprobs=0, max_tokens=1)
    same((len(c['prompt_logprobs']), {len(r) for r in c['prompt_logprobs'][1:]}), (c['usage']['prompt_tokens'], {1}))
    refused('/v1/completions', 400, '`prompt_logprobs` are not available when `stream=True`.', prompt='x', prompt_logprobs=1, stream=True)
    both = post('/v1/completions', model='one', prompt=p, temperature=0, max_tokens=2, prompt_logprobs=3, logprobs=1)['choices'][0]
    same([len(t) for t in both['logprobs']['top_logprobs']], [1, 1])

@test
def _():
    "embeddings: floats, base64, tokens, dimensions"
    f = post('/v1/embeddings', model='one', input=['one', '二'])
    b = post('/v1/embeddings', model='one', input=['one', '二'], encoding_format='base64')
    same((f['object'], [d['index'] for d in f['data']], f['usage']['total_tokens']), ('list', [0, 1], f['usage']['prompt_tokens']))
    for x, y in zip(f['data'], b['data']):
        raw = base64.b64decode(y['embedding'])
        same([struct.unpack('<f', struct.pack('<f', e))[0] for e in x['embedding']], list(struct.unpack('<%df' % (len(raw) // 4), raw)))
    ids = post('/v1/embeddings', model='one', input=post('/tokenize', prompt='one')['tokens'], dimensions=8)
    full = f['data'][0]['embedding'][:8]
    norm = math.sqrt(sum(e * e for e in full))
    assert all(abs(a - e / norm) < 1e-5 for a, e in zip(ids['data'][0]['embedding'], full)) and len(ids['data'][0]['embedding']) == 8

@test
def _():
    "at most one tool call if parallel_tool_calls is false"
    two = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
    tools = [{'type': 'function', 'function': {'name': n}} for n in 'fg']
    body = dict(messages=user('x'), tools=tools, guided_choice=[two], max_tokens=200)
    names = lambda v: [c['function']['name'] for c in v['choices'][0]['message']['tool_calls']]
    same(names(post('/v1/chat/completions', at=tooled, **body)), ['f', 'g'])
    v = post('/v1/chat/completions', at=tooled, parallel_tool_calls=False, **body)
    same((names(v), v['choices'][0]['finish_reason'], v['choices'][0]['message']['content']), (['f'], 'tool_calls', None))
    same(v['choices'][0]['message']['tool_calls'][0]['function']['arguments'], '{"a": 1}')
    parts = chunks('/v1/chat/completions', at=tooled, parallel_tool_calls=False, **body)
    calls = [c for p in parts for c in p['choices'][0]['delta'].get('tool_calls', [])]
    same(({c['index'] for c in calls}, ''.join(c['function']['arguments'] for c in calls)), ({0}, '{"a": 1}'))
    same((calls[0]['type'], calls[0]['function']['name'], parts[-1]['choices'][0]['finish_reason']), ('function', 'f', 'tool_calls'))
    refused('/v1/chat/completions', 400, "'parallel_tool_calls'", messages=user('x'), tools=tools, tool_choice='required', parallel_tool_calls='no')

FORMS = {
    'Hermes': ('<tool_call>{"name": "f", "arguments": {"a": [1, "}"]}}</tool_call>\n<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>', '<tool_call>'),
    'Mistral': ('[TOOL_CALLS][{"name": "f", "arguments": {"a": [1, "}"]}}, {"name": "g", "arguments": {}}]', '[TOOL_CALLS]'),
    'Mistral with names': ('[TOOL_CALLS]f[ARGS]{"a": [1, "}"]}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}', '[TOOL_CALLS]'),
    'Granite': ('<|tool_call|>[{"name": "f", "arguments": {"a": [1, "}"]}}, {"name": "g", "arguments": {}}]', '<|tool_call|>'),
    'Llama': ('<|python_tag|>{"name": "f", "parameters": {"a": [1, "}"]}}; {"name": "g", "parameters": {}}', '<|python_tag|>'),
    'DeepSeek': ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": [1, "}"]}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', '<｜tool▁call▁begin｜>'),
    'DeepSeek R1': ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": [1, "}"]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
                    '<｜tool▁call▁begin｜>')}

@test
def _():
    "tool calls in the forms of other models, whole and in a stream"
    tools = [{'type': 'function', 'function': {'name': n}} for n in 'fg']
    for name, (text, tag) in FORMS.items():
        for before in ('', 'I look. '):
            body = dict(messages=user('x'), tools=tools, guided_choice=[before + text], max_tokens=400, chat_template='{{ messages[0].content }}{% if tools %}' + tag + '{% endif %}')
            c = post('/v1/chat/completions', at=tooled, **body)['choices'][0]
            same((name, c['finish_reason'], c['message']['content'] or ''), (name, 'tool_calls', before))
            same([(t['function']['name'], json.loads(t['function']['arguments'])) for t in c['message']['tool_calls']], [('f', {'a': [1, '}']}), ('g', {})])
            got, content = {}, ''
            for d in (p['choices'][0]['delta'] for p in chunks('/v1/chat/completions', at=tooled, **body)):
                content += d.get('content') or ''
                for t in d.get('tool_calls', []):
                    n, a = got.get(t['index'], ('', ''))
                    got[t['index']] = (n + t['function'].get('name', ''), a + t['function']['arguments'])
            same((name, content, [(n, json.loads(a)) for n, a in got.values()]), (name, before, [('f', {'a': [1, '}']}), ('g', {})]))

@test
def _():
    "errors have message, type, param and code"
    e = refused('/v1/chat/completions', 404, 'nobody', model='nobody', messages=user('x'))
    same((e['param'], e['code']), ('model', 'model_not_found'))
    same(refused('/v1/chat/completions', 400, 'messages', model='fry-1')['type'], 'invalid_request_error')
    same(call('GET', '/v1/models', headers={'Authorization': 'Bearer '})[0], 200)

@test
def _():
    "a forced call that is cut off is neither content nor a call"
    tools = [{'type': 'function', 'function': {'name': 'f', 'parameters': {'type': 'object', 'properties': {'a': {'type': 'string'}}, 'required': ['a']}}}]
    ends = set()
    for n in list(range(1, 12)) + list(range(12, 60, 3)):
        for choice in ('required', {'type': 'function', 'function': {'name': 'f'}}):
            body = dict(messages=user('x'), tools=tools, tool_choice=choice, max_tokens=n, temperature=2, seed=n)
            c = post('/v1/chat/completions', **body)['choices'][0]
            ends.add(c['finish_reason'])
            same(c['message']['content'], None)
            same('tool_calls' in c['message'], c['finish_reason'] == 'tool_calls')
            for t in c['message'].get('tool_calls', []):
                assert isinstance(json.loads(t['function']['arguments'])['a'], str)
            parts = chunks('/v1/chat/completions', **body)
            same((''.join(p['choices'][0]['delta'].get('content') or '' for p in parts), parts[-1]['choices'][0]['finish_reason']), ('', c['finish_reason']))
    same(ends, {'length', 'tool_calls'})
    c = post('/v1/chat/completions', messages=user('x'), tools=tools, tool_choice='required', max_tokens=200, stop=['"a"'])['choices'][0]
    same((c['finish_reason'], c['message']['content'], 'tool_calls' in c['message']), ('stop', None, False))
    for wrong in (dict(tool_choice='required'), dict(tools=[], tool_choice='required'), dict(tools=tools, tool_choice=5), dict(tools=tools, tool_choice={'type': 'function'})):
        same(refused('/v1/chat/completions', 400, "'tool_choice'", messages=user('x'), **wrong)['param'], 'tool_choice')

@test
def _():
    "every reply has a request id: the client's, if it is valid"
    for sent, kept in (('abc-1.2:3_Z', True), ('x' * 128, True), ('x' * 129, False), ('a b', False), (None, False)):
        for path, body in (('/v1/models', None), ('/nowhere', None), ('/v1/chat/completions', {}), ('/v1/completions', dict(prompt='x', max_tokens=1, stream=True))):
            headers = {'X-Request-Id': sent} if sent else {}
            have = call('POST' if body is not None else 'GET', path, body, headers)[2].get_all('X-Request-Id')
            same((len(have), have[0] == sent, have[0].startswith('req_')), (1, kept, not kept))
    for stream in False, True:  # a reply is traced before its end is sent
        call('POST', '/v1/completions', dict(prompt='x', max_tokens=1, stream=stream), {'X-Request-Id': 'traced-%s' % stream})
        same(get('/v1/traces')['traces'][0]['request_id'], 'traced-%s' % stream)

@test
def _():
    "system_fingerprint: the same for the same adapters and weights, of chats, completions and chunks"
    prints = [post('/v1/completions', prompt='x', max_tokens=1, model=m)['system_fingerprint'] for m in ('fry-1', 'second-name', 'one', 'two', 'one*0.5', 'one', 'one*0.5+two*0.5')]
    assert all(re.fullmatch('fp_[0-9a-f]{12}', p) for p in prints), prints
    same((prints[0] == prints[1], prints[2] == prints[5], len(set(prints))), (True, True, 5))
    same(chat(model='one')['system_fingerprint'], prints[2])
    same({p['system_fingerprint'] for p in chunks('/v1/chat/completions', messages=user('x'), max_tokens=2, model='one')}, {prints[2]})

def shifted(prompt, n, keep, context=512):
    """The n greedy tokens after a prompt of token ids, each from a request whose prompt is what remains, and those."""
    ids, out = list(prompt), []
    while len(out) < n:
        if len(ids) >= context: del ids[keep:keep + (len(ids) - keep) // 2]
        room = min(n - len(out), context - len(ids))
        more = post('/completion', prompt=ids, n_predict=room, temperature=0, ignore_eos=True, loop_tokens=0, return_tokens=True)['tokens']
        out, ids = out + more, ids + more
    return out, ids

@test
def _():
    "context_shift: a reply continues after the context is full, as from a prompt of the tokens that remain"
    prompt = [5 + 7 * i % 400 for i in range(505)]
    ask = dict(prompt=prompt, temperature=0, ignore_eos=True, loop_tokens=0)
    full = post('/completion', n_predict=300, return_tokens=True, **ask)
    same((full['truncated'], len(full['tokens']), full['stop_type']), (True, 7, 'limit'))
    for keep in (0, 3, -1):
        v = post('/completion', n_predict=300, return_tokens=True, context_shift=True, n_keep=keep, **ask)
        kept = keep if keep >= 0 else 505
        same(v['tokens'], shifted(prompt, 300, kept)[0])
        same((v['truncated'], v['tokens_predicted'], v['tokens_evaluated'], v['generation_settings']['n_keep']), (True, 300, 505, keep))
    v = post('/v1/completions', max_tokens=40, context_shift=True, n_keep=3, **ask)
    same((v['usage'], v['choices'][0]['finish_reason']), ({'prompt_tokens': 505, 'completion_tokens': 40, 'total_tokens': 545, 'prompt_tokens_details': v['usage'].get('prompt_tokens_details')}, 'length'))
    same(post('/completion', n_predict=40, context_shift=True, n_keep=3, **ask)['content'], v['choices'][0]['text'])
    same(post('/v1/completions', max_tokens=40, **ask)['usage']['completion_tokens'], 7)
    same(post('/completion', n_predict=-2, context_shift=True, **ask)['tokens_predicted'], 7)
    short = post('/completion', n_predict=3, context_shift=True, **ask)
    same((short['truncated'], short['tokens_predicted']), (False, 3))
    refused('/v1/completions', 400, 'context', prompt=[7] * 600, max_tokens=4, context_shift=True)
    for n in (-2, 'x'): same(refused('/v1/chat/completions', 400, "'n_keep'", messages=user('x'), n_keep=n)['param'], 'n_keep')

@test
def _():
    "Ollama: shift, num_keep and a context to continue"
    def generate(prompt, **more):
        options = {'temperature': 0, 'num_ctx': 64, 'num_keep': 2, 'num_predict': 100, **more.pop('options', {})}
        return post('/api/generate', model='fry-1', prompt=prompt, stream=False, options=options, **more)
    def eval_count(**more):
        return generate('1 2 3 4 5', options={'ignore_eos': True, 'loop_tokens': 0, **more.pop('options', {})}, **more)['eval_count']
    n = generate('1 2 3 4 5')['prompt_eval_count']
    same([eval_count(), eval_count(shift=False), eval_count(shift=True)], [64 - n, 64 - n, 100])
    same([eval_count(shift=True, options={'num_predict': k}) for k in (-1, -2)], [640 - n, 64 - n])
    v = generate('1 2 3 4 5', shift=True, options={'ignore_eos': True, 'loop_tokens': 0})
    prompt = generate('1 2 3 4 5', options={'num_predict': 1})['context'][:n]
    same(v['context'], shifted(prompt, 100, 2, 64)[1])

@test
def _():
    "truncate_prompt_tokens keeps the last tokens of a prompt; a prompt longer than the context is refused without it"
    usage = lambda **body: post('/v1/completions', temperature=0, max_tokens=4, **body)['usage']['prompt_tokens']
    same([usage(prompt=[5, 6, 7, 8, 9], truncate_prompt_tokens=n) for n in (0, 1, 3, 5, 9)], [5, 1, 3, 5, 5])
    same(post('/v1/completions', prompt=[5, 6, 7, 8, 9], truncate_prompt_tokens=3, max_tokens=0, echo=True)['choices'][0]['text'],
         post('/v1/completions', prompt=[7, 8, 9], max_tokens=0, echo=True)['choices'][0]['text'])
    refused('/v1/completions', 400, 'context', prompt=[7] * 600, max_tokens=4)
    same((usage(prompt=[7] * 600, truncate_prompt_tokens=-1), chat(messages=user('a b ' * 600), max_tokens=400, truncate_prompt_tokens=-1)['usage']['prompt_tokens']), (508, 256))
    for n in (-2, 1.5, 'x'): same(refused('/v1/completions', 400, "'truncate_prompt_tokens'", prompt='x', truncate_prompt_tokens=n)['param'], 'truncate_prompt_tokens')

@test
def _():
    "loop_tokens ends a reply that repeats itself, with the reason 'length'; not with ignore_eos, unless asked for"
    def reply(**body):
        v = post('/v1/completions', prompt='x', temperature=0, max_tokens=400, logit_bias={'70': 100}, **body)
        return v['usage']['completion_tokens'], v['choices'][0]['finish_reason']
    same((reply(), reply(loop_tokens=20), reply(loop_tokens=0), reply(ignore_eos=True), reply(ignore_eos=True, loop_tokens=9)),
         ((256, 'length'), (20, 'length'), (400, 'length'), (400, 'length'), (9, 'length')))
    v = post('/completion', prompt='x', temperature=0, n_predict=400, logit_bias=[[70, 100]], loop_tokens=30)
    same((v['tokens_predicted'], v['stop_type'], v['truncated']), (30, 'limit', False))
    v = post('/api/generate', prompt='x', model='fry-1', stream=False, raw=True, options={'temperature': 0, 'loop_tokens': 12, 'repeat_penalty': 1, 'num_predict': 400})
    assert v['eval_count'] <= 400 and v['done_reason'] in ('stop', 'length')

# A valid body of each path that takes texts; %s is in one of them.
TEXTS = {'messages[0].content': ('/v1/chat/completions', '{"max_tokens": 1, "messages": [{"role": "user", "content": "a%s"}]}'),
         'messages[1].content[0].text': ('/v1/chat/completions', '{"messages": [{"role": "user", "content": "x"}, {"content": [{"type": "text", "text": "%s"}]}]}'),
         'stop': ('/v1/completions', '{"prompt": "x", "stop": "%s"}'), 'prompt': ('/v1/completions', '{"prompt": "%sb"}'), 'prompt[1]': ('/v1/completions', '{"prompt": ["b", "%s"]}'),
         'input': ('/v1/embeddings', '{"input": "a%s"}'), 'question': ('/v1/ask', '{"question": "a%s"}'), 'choices[0]': ('/v1/debate', '{"team": "x", "choices": ["a%s"]}'),
         'correction': ('/v1/feedback', '{"id": "x", "correction": "a%s"}'), 'content': ('/tokenize', '{"content": "a%s"}'), 'grammar': ('/completion', '{"prompt": "x", "grammar": "%s"}'),
         'messages[0].tool_calls[0].function.arguments': ('/api/chat', '{"messages": [{"tool_calls": [{"function": {"arguments": "%s"}}]}]}'), 'system': ('/api/generate', '{"system": "%s"}')}

@test
def _():
    "U+0000, half of a surrogate pair and bytes that are not UTF-8 are refused, and the error names the field"
    bad = {b'\\u0000': 'the character U+0000', b'\\ud83d': 'surrogate', b'\\ude00': 'surrogate', b'\\ud83dx': 'surrogate', b'\\ud83d\\ud83d': 'surrogate', b'\xff': 'UTF-8',
           b'\xed\xa0\xbd': 'UTF-8'}
    for field, (path, body) in TEXTS.items():
        for text, why in bad.items():
            q = urllib.request.Request(url + path, body.encode().replace(b'%s', text), {'Authorization': 'Bearer ' + tokens[url]})
            try:
                urllib.request.urlopen(q, timeout=60)
                raise AssertionError('accepted: %s %r' % (path, text))
            except urllib.error.HTTPError as e:
                v = json.load(e)['error']
                said = v if isinstance(v, str) else v['message']
                assert e.code == 400 and said.startswith("'%s' " % field) and why in said, (path, text, said)
                if not isinstance(v, str): same(v['param'], field)
    same(post('/v1/completions', prompt='\U0001f600 \ufffd', max_tokens=1)['object'], 'text_completion')

@test
def _():
    "fields that a path does not know or cannot honour are refused by name"
    asked = user('x')
    bodies = {'/v1/chat/completions': dict(messages=asked, max_tokens=1), '/v1/completions': dict(prompt='x', max_tokens=1), '/v1/embeddings': dict(input='x'), '/v1/ask': dict(question='x'),
              '/v1/debate': dict(team='x', question='x'), '/tokenize': dict(prompt='x'), '/detokenize': dict(tokens=[5]), '/completion': dict(prompt='x', n_predict=1),
              '/completions': dict(prompt='x', n_predict=1), '/v1/feedback': dict(id='x', rating=1), '/v1/ab': dict(name='t', model='one', b='two'), '/v1/jobs': dict(kind='world'),
              '/v1/adapters/one/rollback': {}, '/v1/load_lora_adapter': dict(lora_name='x', lora_path=tmp + '/one'), '/v1/unload_lora_adapter': dict(lora_name='one'),
              '/api/chat': dict(model='fry-1', messages=asked), '/api/generate': dict(model='fry-1', prompt='x'), '/api/embed': dict(model='fry-1', input='x'),
              '/api/embeddings': dict(model='fry-1', prompt='x'), '/api/show': dict(model='fry-1'), '/api/create': {'model': 'm', 'from': 'one'}, '/api/copy': dict(source='one', destination='m')}
    for path, body in bodies.items():
        for field, value in dict(knowledge='k', internal_model='m', functions=[{'name': 'f'}], function_call={'name': 'f'}, audio={'voice': 'x'}, modalities=['text', 'audio']).items():
            code, text, _ = call('POST', path, {**body, field: value})
            e = json.loads(text)['error']
            assert code == 400 and (e if isinstance(e, str) else e['message']).startswith("'%s' is not " % field), (path, field, code, text[:200])
            if not isinstance(e, str): same((path, e['param']), (path, field))
            assert call('POST', path, {**body, field: None, 'zzz': 1})[0] == 400, path
    code, text, _ = call('POST', '/api/chat', dict(model='fry-1', messages=asked, options={'mirostat': 2}))
    assert code == 400 and "'mirostat' is not supported" in text, (code, text)
    post('/api/chat', model='fry-1', messages=asked, stream=False, options={'mirostat': 0, 'num_keep': 4, 'num_predict': 1})
    post('/completion', prompt='x', n_predict=1, cache_prompt=True, id_slot=0, timings_per_token=True, mirostat=0)

@test
def _():
    "param names the field of an error"
    asked = dict(messages=user('x'), max_tokens=1)
    cases = [('/v1/chat/completions', {**asked, **bad}, param) for bad, param in (
        ({'messages': []}, 'messages'), ({'messages': [{'role': 'king', 'content': ''}]}, 'messages[0].role'), ({'messages': [{'role': 'user', 'content': 5}]}, 'messages[0].content'),
        ({'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}, 'messages[0].content'), ({'messages': user('x ' * 5000)}, 'messages'), ({'temperature': 'hot'}, 'temperature'),
        ({'stop': 'x' * 100000}, 'stop'), ({'guided_choice': []}, 'guided_choice'), ({'structured_outputs': {'choice': []}}, 'structured_outputs'), ({'guided_regex': '('}, 'guided_regex'),
        ({'response_format': {'type': 'xml'}}, 'response_format.type'), ({'response_format': {'type': 'json_schema', 'json_schema': {'schema': {'type': 'nothing'}}}}, 'response_format'),
        ({'tools': [{'type': 'function', 'function': {'name': 'f'}}]}, 'tool_choice'), ({'tools': 5, 'tool_choice': 'auto'}, 'tools'), ({'prompt_logprobs': 1, 'stream': True}, 'prompt_logprobs'),
        ({'n': 129}, 'n'), ({'logit_bias': {'x': 1}}, 'logit_bias'), ({'model': 'one*x'}, 'model'), ({'model': 'one*0.1' + '+one*0.1' * 99}, 'model'), ({'lora': [{'id': 77}]}, 'lora'),
        ({'parameters': {'adapter_id': 5}}, 'adapter_id'), ({'stream_options': {'include_usage': 5}, 'stream': True}, 'include_usage'))]
    cases += [('/v1/completions', {'prompt': 'x', **bad}, param) for bad, param in (
        ({'prompt': 5}, 'prompt'), ({'prompt': []}, 'prompt'), ({'prompt': [[-1]]}, 'prompt'), ({'prompt': 'x ' * 5000}, 'prompt'), ({'suffix': 'x'}, 'suffix'), ({'best_of': 0}, 'best_of'),
        ({'max_tokens': -1}, 'max_tokens'), ({'echo': 1}, 'echo'))]
    cases += [('/v1/embeddings', {'input': 5}, 'input'), ('/v1/embeddings', {'input': 'x', 'dimensions': 0}, 'dimensions'), ('/v1/embeddings', {'input': 'x', 'model': 'one+two'}, 'model'),
              ('/v1/ask', {}, 'question'), ('/v1/ask', {'question': 'x', 'agents': 99}, 'agents'), ('/v1/ask', {'question': 'x', 'samples': 2}, 'samples'), ('/v1/ask', {'question': 'x', 'check': 'sql:/etc/passwd'}, 'check'), ('/v1/ask', {'question': 'x', 'role_type': 'x'}, 'role_type'), ('/v1/debate', {'rounds': 0}, 'rounds'),
              ('/tokenize', {}, 'prompt'), ('/detokenize', {'tokens': 5}, 'tokens'), ('/completion', {'prompt': {}}, 'prompt'), ('/v1/feedback', {'id': 5}, 'id'), ('/v1/jobs', {'kind': 'x'}, 'kind'),
              ('/v1/load_lora_adapter', {'lora_name': 5}, 'lora_name'), ('/v1/load_lora_adapter', {'lora_name': 'x'}, 'lora_path'), ('/v1/ab', {'name': 't', 'share': 0}, 'model')]
    for path, body, param in cases:
        code, text, _ = call('POST', path, body)
        assert (code, json.loads(text).get('error', {}).get('param')) == (400, param), (path, str(body)[:100], param, code, text[:250])

# vLLM

@test
def _():
    "models: vLLM's model cards, the base and its other names first"
    cards = get('/v1/models')['data']
    same([c['id'] for c in cards[:4]], ['fry-1', 'second-name', 'one', 'two'])
    for c in cards:
        same(set(c), {'id', 'object', 'created', 'owned_by', 'root', 'parent', 'max_model_len', 'permission'})
        same((c['object'], c['owned_by'], c['permission'][0]['object']), ('model', 'vllm', 'model_permission'))
        same(c['permission'][0]['allow_sampling'], True)
    same([c['parent'] for c in cards[:3]], [None, None, 'fry-1'])
    same(cards[2]['root'], tmp + '/one')
    same(words(model='second-name'), words(model='fry-1'))
    same(get('/v1/models/fry-1%3Aone')['root'], tmp + '/one')

@test
def _():
    "an adapter of the resolver's folder is loaded at its first request"
    ids = [c['id'] for c in get('/v1/models')['data']]
    assert 'late' not in ids, ids
    same(words(model='late'), words(model='two'))
    same(words(model='fry-1:late'), words(model='two'))
    assert 'late' in [c['id'] for c in get('/v1/models')['data']]
    for name in ('alien', 'bad', '../one', './late', 'none'):
        refused('/v1/chat/completions', 404, 'does not exist', model=name, messages=user('x'))

@test
def _():
    "load_lora_adapter: adapters of experts are refused"
    e = refused('/v1/load_lora_adapter', 400, 'is_3d_lora_weight', lora_name='x', lora_path=tmp + '/one', is_3d_lora_weight=True)
    same(e['type'], 'BadRequestError')

@test
def _():
    "adapters by the names of vLLM, Ray, llama.cpp and LoRAX"
    one, base = words(model='one'), words(model='fry-1')
    assert one != base
    for body in ({'model': 'fry-1:one'}, {'model': 'fry-1@one'}, {'lora': [{'id': 0, 'scale': 1}]}, {'parameters': {'adapter_id': 'one'}},
                 {'model': 'fry-1', 'parameters': {'adapter_id': 'one', 'adapter_source': 'hub'}},
                 {'parameters': {'adapter_id': tmp + '/one', 'adapter_source': 'local'}},
                 {'parameters': {'merged_adapters': {'ids': ['one', 'two'], 'weights': [1, 0], 'merge_strategy': 'linear'}}}):
        same(words(**body), one)
    mixed = {'merged_adapters': {'ids': ['one', 'two'], 'weights': [0.5, 0.25]}}
    same(words(parameters=mixed, max_tokens=30), words(model='one*0.5+two*0.25', max_tokens=30))
    for parameters, text in (({'adapter_id': 'one', 'adapter_source': 'moon'}, "'adapter_source'"), ({'adapter_id': 5}, "'adapter_id'"),
                             ({'merged_adapters': {'ids': ['one'], 'merge_strategy': 'ties'}}, 'adapter merge'),
                             ({'merged_adapters': {'ids': ['one'], 'weights': [1, 2]}}, "'weights'"),
                             ({'merged_adapters': {'ids': ['one'], 'weights': ['1']}}, "'weights'"),
                             ({'merged_adapters': {'weights': [1]}}, "'ids'")):
        refused('/v1/chat/completions', 400, text, messages=user('x'), parameters=parameters)
    refused('/v1/chat/completions', 404, 'nobody', messages=user('x'), parameters={'adapter_id': 'nobody'})

@test
def _():
    "tokenize and detokenize: vLLM's form and llama.cpp's"
    v = post('/tokenize', prompt='á 猫<|im_end|>', add_special_tokens=False)
    same((set(v), v['token_strs'], v['count']), ({'count', 'max_model_len', 'tokens', 'token_strs'}, None, len(v['tokens'])))
    l = post('/tokenize', content='á 猫<|im_end|>')
    same(l, {'tokens': v['tokens']})
    pieces = post('/tokenize', content='á 猫<|im_end|>', with_pieces=True)['tokens']
    same([p['id'] for p in pieces], v['tokens'])
    raw = b''.join(p['piece'].encode() if isinstance(p['piece'], str) else bytes(p['piece']) for p in pieces)
    same(raw.decode(), 'á 猫<|im_end|>')
    assert any(isinstance(p['piece'], list) for p in pieces)
    assert len(post('/tokenize', content='<|im_end|>', parse_special=False)['tokens']) > len(post('/tokenize', content='<|im_end|>')['tokens']) == 1
    same(post('/detokenize', tokens=v['tokens']), {'prompt': 'á 猫<|im_end|>', 'content': 'á 猫<|im_end|>'})
    refused('/tokenize', 400, "'content'", content=5)

# llama.cpp

def complete(**body):
    return post('/completion', **dict({'temperature': 0, 'n_predict': 8}, **body))

@test
def _():
    "completion: the fields of a reply, and the text of /v1/completions"
    v = complete(model='one', prompt='12 + 30 =')
    want = post('/v1/completions', model='one', prompt='12 + 30 =', temperature=0, max_tokens=8)
    same(v['content'], want['choices'][0]['text'])
    same((v['tokens_predicted'], v['tokens_evaluated']), (want['usage']['completion_tokens'], want['usage']['prompt_tokens']))
    same(set(v), {'index', 'content', 'tokens', 'stop', 'id_slot', 'tokens_predicted', 'tokens_evaluated', 'model', 'generation_settings', 'prompt',
                  'has_new_line', 'truncated', 'stop_type', 'stopping_word', 'tokens_cached', 'timings'})
    same((v['stop'], v['tokens'], v['model'], v['prompt'], v['truncated'], v['generation_settings']['n_predict']), (True, [], 'one', '12 + 30 =', False, 8))
    t = v['timings']
    same((t['prompt_n'] + t['cache_n'], t['predicted_n']), (v['tokens_evaluated'], v['tokens_predicted']))
    assert t['prompt_ms'] > 0 and all(isinstance(t[k], float) for k in ('prompt_per_second', 'predicted_per_token_ms', 'predicted_per_second', 'predicted_ms'))
    same(post('/completions', prompt='12 + 30 =', temperature=0, n_predict=8)['content'], complete(prompt='12 + 30 =')['content'])
    same(complete(prompt='12 + 30 =', lora=[{'id': 0, 'scale': 1}])['content'], v['content'])

@test
def _():
    "completion: stop reasons"
    full = complete(model='one', prompt='sort: k b x', n_predict=5)
    same((full['stop_type'], full['stopping_word'], full['truncated']), ('limit', '', False))
    letter = next(c for c in full['content'] if c.isalnum())
    v = complete(model='one', prompt='sort: k b x', n_predict=5, stop=['never so', letter])
    same((v['content'], v['stop_type'], v['stopping_word']), (full['content'].split(letter)[0], 'word', letter))
    same(complete(prompt='x', grammar='root ::= "yes" | "no"')['stop_type'], 'eos')
    v = complete(prompt='長' * 100, n_predict=-1, ignore_eos=True)
    same((v['stop_type'], v['truncated'], v['tokens_evaluated'] + v['tokens_predicted']), ('limit', True, v['generation_settings']['n_ctx']))
    same(complete(prompt='x', n_predict=0)['content'], '')

@test
def _():
    "completion: streams, tokens and probabilities"
    v = complete(model='one', prompt='12 + 30 =', return_tokens=True, n_probs=3)
    rows = v['completion_probabilities']
    same([r['id'] for r in rows], v['tokens'])
    same(''.join(bytes(b for r in rows for b in r['bytes']).decode()), v['content'])
    assert all(len(r['top_logprobs']) == 3 and set(r) == set(r['top_logprobs'][0]) | {'top_logprobs'} for r in rows), rows[0]
    assert all(r['logprob'] == max(t['logprob'] for t in r['top_logprobs']) for r in rows)
    parts = [json.loads(e) for e in events('/completion', model='one', prompt='12 + 30 =', temperature=0, n_predict=8, n_probs=3)]
    same([p['stop'] for p in parts], [False] * (len(parts) - 1) + [True])
    same((''.join(p['content'] for p in parts), [t for p in parts for t in p['tokens']]), (v['content'], v['tokens']))
    same(sum(len(p.get('completion_probabilities', [])) for p in parts), len(rows))
    same(set(parts[0]), {'index', 'content', 'tokens', 'stop', 'id_slot', 'tokens_predicted', 'tokens_evaluated', 'completion_probabilities'})
    same(parts[-1]['stop_type'], v['stop_type'])

@test
def _():
    "completion: prompts of strings, ids and both"
    ids = post('/tokenize', content='sort: k b x')['tokens']
    one = complete(prompt='sort: k b x')['content']
    for p in (ids, ['sort: k b', ids[-1]] if len(post('/tokenize', content='sort: k b')['tokens']) == len(ids) - 1 else ids, {'prompt_string': 'sort: k b x'}):
        same(complete(prompt=p)['content'], one)
    many = complete(prompt=['sort: k b x', [5, 6], {'prompt_string': 'x'}])
    same(([m['index'] for m in many], many[0]['content']), ([0, 1, 2], one))
    twice = complete(prompt='春', n_cmpl=2, temperature=2, seed=4)
    same(len(twice), 2)
    for bad in ([], None, 5.5, [['a', ['b']]], [5, ['a']], [99999999], {'prompt_string': 'x', 'multimodal_data': ['a']}, {}, [[5, {}]], ''):
        refused('/completion', 400, '', prompt=bad)

@test
def _():
    "completion: settings that change the text"
    same(complete(prompt='x', json_schema={'enum': ['ab']})['content'], '"ab"')
    same(complete(prompt='x', grammar='root ::= "yes"')['content'], 'yes')
    refused('/completion', 400, 'not both', prompt='x', grammar='root ::= "a"', json_schema={})
    plain = complete(prompt='sort: k b x', return_tokens=True)
    banned = complete(prompt='sort: k b x', return_tokens=True, logit_bias=[[plain['tokens'][0], False]])
    assert banned['tokens'][0] != plain['tokens'][0]
    for bias in ([[7, 100]], {'7': 100}):
        same(complete(prompt='x', n_predict=1, return_tokens=True, logit_bias=bias)['tokens'], [7])
    text = complete(prompt='x', n_predict=2, return_tokens=True, logit_bias=[['猫', 100]])['tokens']
    assert set(text) <= set(post('/tokenize', content='猫')['tokens']), text
    for bad in ([[1]], [['a']], [[{}, 1]], 5, [[99999999, 1]]):
        refused('/completion', 400, 'logit_bias', prompt='x', logit_bias=bad)
    for key, value in (('mirostat', 2), ('dry_multiplier', 0.8), ('xtc_probability', 0.5), ('dynatemp_range', 1), ('post_sampling_probs', True)):
        refused('/completion', 400, key, prompt='x', **{key: value})
    same(complete(prompt='sort: k b x', mirostat=0, xtc_probability=0.0, cache_prompt=False, id_slot=3)['content'], plain['content'])
    a, b = (post('/completion', model='two', prompt='春', seed=9, n_predict=12)['content'] for _ in range(2))
    same(a, b)

@test
def _():
    "penalties apply to the last repeat_last_n tokens (llama.cpp, Ollama)"
    # a bias makes one token the only one; the penalty allows another token while that one is in the window
    def runs(n):
        t = post('/completion', prompt='x', temperature=0, n_predict=9, return_tokens=True, logit_bias=[[7, 90]], presence_penalty=100, repeat_last_n=n)['tokens']
        return [i for i, id in enumerate(t) if id == 7]
    same((runs(0), runs(1), runs(3), runs(-1), runs(64)), (list(range(9)), [0, 2, 4, 6, 8], [0, 4, 8], [0], [0]))
    seen = {n: post('/api/generate', model='fry-1', prompt='a a b b a a b b a a', raw=True, stream=False,
                    options={'temperature': 0, 'num_predict': 12, 'repeat_penalty': 90, 'repeat_last_n': n})['response'] for n in (0, 2, -1)}
    assert len(set(seen.values())) == 3, seen

@test
def _():
    "lora-adapters, slots and props"
    same([(a['id'], a['path'], a['scale']) for a in get('/lora-adapters')[:2]], [(0, tmp + '/one', 0.0), (1, tmp + '/two', 0.0)])
    one = words(model='one')
    same(json.loads(call('POST', '/lora-adapters', [{'id': 0, 'scale': 1.0}])[1]), {'success': True})
    same((words(), words(model='fry-1') != one), (one, True))
    call('POST', '/lora-adapters', [])
    assert words() != one
    p = get('/props')
    same((p['model_path'].endswith('test/models/fry-1'), p['default_generation_settings']['params']['temperature'] > 0.79), (True, True))
    same(p['chat_template'], json.load(open('test/models/fry-1/tokenizer_config.json'))['chat_template'])
    slots = get('/slots')
    same((len(slots), p['total_slots'], {s['is_processing'] for s in slots}), (4, 4, {False}))
    same(p['default_generation_settings']['n_ctx'], slots[0]['n_ctx'])
    stop = threading.Event()
    def busy():
        while not stop.is_set():
            post('/v1/completions', prompt='x', n=4, max_tokens=400, ignore_eos=True, temperature=2, seed=77)
    t = threading.Thread(target=busy)
    t.start()
    try:
        seen, full = [], None
        for _ in range(400):
            seen = seen or [s for s in get('/slots') if s['is_processing']]
            code, text, _ = call('GET', '/slots?fail_on_no_slot=1')
            if code == 503: full = json.loads(text)['error']
            if seen and full: break
        assert seen and full, (len(seen), full)
        n = seen[0]['next_token']
        same((seen[0]['params']['seed'] // 10, n['has_next_token'], n['n_remain'] + n['n_decoded']), (7, True, 400))
        same((full['message'], full['type']), ('no slot available', 'unavailable_error'))
    finally:
        stop.set()
        t.join()

# Ollama

@test
def _():
    "num_ctx limits prompt and reply: the oldest messages are removed, the system message and the last one are kept"
    v = post('/api/generate', model='fry-1', prompt='x', raw=True, stream=False, options={'temperature': 5, 'seed': 1, 'num_predict': -1, 'num_ctx': 20, 'top_k': 0, 'top_p': 1, 'stop': []})
    assert v['prompt_eval_count'] + v['eval_count'] <= 20, v
    talk = [{'role': 'system', 'content': '短く'}] + [m for i in range(12) for m in (user('sort: k b x %d' % i)[0], {'role': 'assistant', 'content': 'b k x'})] + user('sort: q a')
    opts = {'temperature': 0, 'num_predict': 8}
    sizes = {}
    for ctx in (0, 60, 100):
        sizes[ctx] = post('/api/chat', model='one', messages=talk, stream=False, options=dict(opts, num_ctx=ctx))
    assert sizes[60]['prompt_eval_count'] < 60 and sizes[60]['prompt_eval_count'] < sizes[100]['prompt_eval_count'] < 100 < sizes[0]['prompt_eval_count']
    # the remaining messages are the longest suffix that fits: alone they are the same prompt, with one message more it
    # is too long
    for k in range(1, len(talk)):
        short = post('/api/chat', model='one', messages=[talk[0]] + talk[k:], stream=False, options=opts)
        if short['prompt_eval_count'] < 60: break
    same((short['prompt_eval_count'], short['message']['content']), (sizes[60]['prompt_eval_count'], sizes[60]['message']['content']))
    code, text, _ = call('POST', '/api/chat', {'model': 'one', 'messages': talk, 'truncate': False, 'options': dict(opts, num_ctx=60)})
    assert code == 400 and 'context is 60' in json.loads(text)['error'], text
    code, text, _ = call('POST', '/api/generate', {'model': 'one', 'prompt': 'sort: k b x', 'options': {'num_ctx': 4}})
    assert code == 400 and 'context is 4' in json.loads(text)['error'], text

# Prometheus

@test
def _():
    "metrics: names and types that dashboards query"
    status, text, headers = call('GET', '/metrics')
    same(headers['Content-Type'], 'text/plain; version=0.0.4; charset=utf-8')
    kinds = dict(l.split()[2:4] for l in text.splitlines() if l.startswith('# TYPE'))
    same(len(kinds), sum(l.startswith('# TYPE') for l in text.splitlines()))
    same(set(kinds), {l.split()[2] for l in text.splitlines() if l.startswith('# HELP')})
    want = {'gauge': 'num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc cache_config_info lora_requests_info',
            'counter': 'prompt_tokens_total generation_tokens_total request_success_total num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total',
            'histogram': 'time_to_first_token_seconds time_per_output_token_seconds inter_token_latency_seconds e2e_request_latency_seconds request_queue_time_seconds '
                         'request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens '
                         'iteration_tokens_total request_max_num_generation_tokens request_params_n request_params_max_tokens'}
    for kind, names in want.items():
        for n in names.split():
            same((n, kinds.get('vllm:' + n)), (n, kind))
    for n, kind in {'murmurnet_requests_total': 'counter', 'murmurnet_tasks_processed_total': 'counter', 'murmurnet_errors_total': 'counter', 'murmurnet_active_nodes': 'gauge',
                    'murmurnet_current_load': 'gauge', 'murmurnet_memory_usage_bytes': 'gauge', 'murmurnet_pending_tasks': 'gauge', 'murmurnet_request_duration_seconds': 'histogram',
                    'murmurnet_task_execution_duration_seconds': 'histogram', 'murmurnet_response_size_bytes': 'histogram', 'llamacpp:prompt_tokens_total': 'counter',
                    'llamacpp:tokens_predicted_total': 'counter', 'llamacpp:predicted_tokens_seconds': 'gauge', 'llamacpp:requests_processing': 'gauge',
                    'llamacpp:requests_deferred': 'gauge', 'process_cpu_seconds_total': 'counter', 'process_resident_memory_bytes': 'gauge', 'process_open_fds': 'gauge',
                    'process_start_time_seconds': 'gauge', 'shoal_build_info': 'gauge'}.items():
        same((n, kinds.get(n)), (n, kind))
    assert 'vllm:num_requests_running{model_name="fry-1",engine="0"}' in text
    assert call('GET', '/metrics', headers={'Accept': 'application/openmetrics-text; version=1.0.0'})[1].endswith('# EOF\n')

for f in tests:
    try:
        f()
        print('ok protocols:', f.__doc__)
    except Exception as e:
        print('not ok protocols: %s: %s: %s' % (f.__doc__, type(e).__name__, str(e).replace('\n', ' ')[:600]))
