"""serve_hostile: shoal serve with hostile clients, for test_serve_hostile.sh.

Prints "ok NAME" and "not ok NAME: why" lines. The server is the built program on a free port; memory is the system's
value for its process. The script uses only the standard library.
"""
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

shoal, tmp = sys.argv[1], sys.argv[2]


def report(name, why=None):
    print(f"ok {name}" if not why else f"not ok {name}: {str(why)[:300]}", flush=True)


class Server:
    def __init__(self, *more):
        self.process = subprocess.Popen(
            [shoal, "serve", "test/models/fry-1", "--port", "0", "--json", "--drain-seconds", "3", "--adapter", f"spare={tmp}/spare", *more],
            stdout=subprocess.PIPE, stderr=open(f"{tmp}/serve.err", "ab"))
        said = json.loads(self.process.stdout.readline())
        self.port = int(said["listening"].rsplit(":", 1)[1])
        self.token = open(said["token_file"]).read().strip()

    def ask(self, path, body=None, raw=None, timeout=60):
        """(status, text, seconds)"""
        began = time.time()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        try:
            connection.request("GET" if data is None else "POST", path, data,
                               {"Content-Type": "application/json", "Authorization": "Bearer " + self.token})
            reply = connection.getresponse()
            return reply.status, reply.read().decode(), time.time() - began
        finally:
            connection.close()

    def alive(self):
        return self.process.poll() is None

    def memory(self):
        """Private bytes of the process."""
        return int(re.search(r"RssAnon:\s+(\d+)", open(f"/proc/{self.process.pid}/status").read()).group(1)) << 10

    def stream(self, body, path="/v1/completions"):
        data = json.dumps({**body, "stream": True}).encode()
        s = socket.create_connection(("127.0.0.1", self.port), 60)
        s.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return s

    def stop(self, timeout=20):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


def read_all(s):
    parts = []
    try:
        while block := s.recv(65536):
            parts.append(block)
    except OSError:
        pass
    s.close()
    return b"".join(parts).decode(errors="replace")


def is_error(text):
    """An error in the format of OpenAI."""
    try:
        e = json.loads(text)["error"]
        return isinstance(e["message"], str) and e["message"] and isinstance(e["type"], str) and "param" in e and "code" in e
    except (ValueError, KeyError, TypeError):
        return False


CHAT, COMPLETION, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HI = [{"role": "user", "content": "hi"}]
nested = b"[" * 100000
huge = "9" * 4000
refused = [
    ("deep JSON", CHAT, nested),
    ("deep JSON that ends", CHAT, b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    ("a number of 4,000 digits", CHAT, b'{"messages":[{"role":"user","content":"a"}],"max_tokens":' + huge.encode() + b"}"),
    ("1e999", CHAT, b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}'),
    ("-1e308 tokens", CHAT, b'{"messages":[{"role":"user","content":"a"}],"max_tokens":-1e308}'),
    ("no JSON", CHAT, b"\x00\xff\xfe"),
    ("empty", CHAT, b""),
    ("invalid UTF-8", CHAT, b'{"messages":[{"role":"user","content":"\xff\xc0"}]}'),
    ("a lone surrogate", CHAT, b'{"messages":[{"role":"user","content":"\\ud800"}]}'),
    ("an overlong NUL", CHAT, b'{"messages":[{"role":"user","content":"\xc0\x80"}]}'),
    ("JSON and more", CHAT, b'{"messages":[]} {"x":1}'),
    ("NaN", CHAT, b'{"temperature":NaN}'),
    ("duplicate keys", CHAT, b'{"messages":[{"role":"user","content":"a"}],"messages":[]}'),
    ("half a character in a role", CHAT, json.dumps({"messages": [{"role": "あ" * 40, "content": "x"}]}, ensure_ascii=False).encode()),
    ("a list", CHAT, b"[]"), ("a string", CHAT, b'"x"'), ("a number", COMPLETION, b"1"), ("null", EMBED, b"null"),
    ("128 replies to 2,000 prompts", COMPLETION, json.dumps({"prompt": ["x"] * 2000, "n": 128}).encode()),
    ("2,049 prompts", COMPLETION, json.dumps({"prompt": ["x"] * 2049}).encode()),
    ("17 stop texts", COMPLETION, json.dumps({"prompt": "x", "stop": ["a"] * 17}).encode()),
    ("a stop text of 1 MB", COMPLETION, json.dumps({"prompt": "x", "stop": "a" * (1 << 20)}).encode()),
    ("half a million objects", CHAT, b'{"messages":[' + b"{}," * 600000 + b"{}]}"),
    ("1 MB of one word", COMPLETION, json.dumps({"prompt": "a" * (1 << 20)}).encode()),
    ("20 MB of words", COMPLETION, json.dumps({"prompt": "the cat " * (5 << 19)}).encode()),
    ("100,000 messages", CHAT, json.dumps({"messages": HI * 100000}).encode()),
    ("a prompt of a million ids", COMPLETION, json.dumps({"prompt": [1] * 1000000}).encode()),
    ("ids out of range", COMPLETION, b'{"prompt":[1,-1,99999999999999]}'),
    ("mixed prompts", COMPLETION, b'{"prompt":["a",[1],{"b":2}]}'),
]
for bias in ({"x": 1}, {"-1": 1}, {"99999999999999999999": 1}, {"1": "a"}, {"1": 1e300}, {"1.5": 1}, {"": 1}, [1], {str(i): 1 for i in range(2000)}):
    refused.append((f"logit_bias {str(bias)[:30]}", COMPLETION, json.dumps({"prompt": "x", "logit_bias": bias}).encode()))
for name, kind, text in (
        ("a regex of braces", "guided_regex", "(((((a{1000}){1000}){1000}){1000}){1000})"),
        ("a regex of 300,000 letters", "guided_regex", "(a|b)" * 60000), ("an open regex", "guided_regex", "(" * 50000),
        ("a regex of stars", "guided_regex", "(" * 60 + "a" + "*)" * 60 + "{9999}"),
        ("a schema of itself", "guided_json", {"$ref": "#"}), ("a schema of huge bounds", "guided_json", {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}}),
        ("a schema of 20,000 keys", "guided_json", {"type": "object", "properties": {f"k{i}": {"type": "string", "pattern": ".{1,500}x"} for i in range(20000)}, "required": [f"k{i}" for i in range(20000)]}),
        ("a schema of huge strings", "guided_json", {"type": "string", "minLength": 10**9, "maxLength": 10**10}),
        ("a grammar of left recursion", "guided_grammar", "root ::= root \"a\" | root"),
        ("a grammar that doubles", "guided_grammar", "\n".join(["root ::= r60"] + [f"r{i} ::= r{i-1} r{i-1}" for i in range(1, 61)] + ["r0 ::= \"a\""])),
        ("no grammar", "guided_grammar", "\x01"), ("no choices", "guided_choice", []), ("choices of a kind", "guided_choice", [1, {}])):
    refused.append((name, COMPLETION, json.dumps({"prompt": "x", kind: text, "max_tokens": 40}).encode()))
for name, check, item in (
        ("a check that is a command", "command:sh -c id", None), ("a check that is a file", "json-schema:/etc/passwd", None), ("a check that runs code", "tests", {"check": {"tests": "1"}}),
        ("a check that is a database", "sql:/etc/passwd", None), ("a check of 1 MB", "regex:" + "(a|b)" * 200000, None), ("a check of braces", "regex:(((((a{1000}){1000}){1000}){1000}){1000})", None),
        ("a check that is open", "regex:" + "(" * 50000, None), ("an item of 1 MB", "regex", {"pattern": "a" * (1 << 20)}), ("an item of braces", "regex", {"pattern": "(((a{1000}){1000}){1000})"}),
        ("an item of a broken template", "question", {"check": {"question": "{% for", "answer": "1"}}), ("an item without fields", "question", {})):
    refused.append((name, CHAT, json.dumps({"messages": HI, "max_tokens": 4, "samples": 2, "check": check, "check_item": item}).encode()))
refused.append(("128 samples of 30,000 tokens with a check", CHAT, json.dumps({"messages": HI, "samples": 128, "check": "calculator", "logprobs": True, "top_logprobs": 20, "max_tokens": 30000, "context_shift": True}).encode()))
FIELDS = """model messages prompt input temperature top_p min_p typical_p repetition_penalty presence_penalty frequency_penalty top_k n seed
stream stream_options logit_bias stop stop_token_ids ignore_eos logprobs top_logprobs max_tokens max_completion_tokens response_format tools
tool_choice guided_json guided_regex guided_grammar guided_choice structured_outputs chat_template_kwargs add_generation_prompt
continue_final_message lora echo suffix best_of prompt_logprobs encoding_format dimensions lora_name lora_path load_inplace tokens
return_token_strs samples check check_item""".split()
VALUES = [True, -1, 1.5, 1e308, 2**63 - 1, "", "x", "\u0001", [], [[]], [{}], [None], ["x"], {}, {"type": 1}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": []}, {"function": 1}, {"x": {"y": []}}]


def test_refused(s):
    slowest = 0, ""
    for name, path, raw in refused:
        try:
            status, text, took = s.ask(path, raw=raw)
        except (OSError, http.client.HTTPException) as e:
            report(f"refused: {name}", f"{e!r}, alive {s.alive()}")
            if not s.alive():
                return
            continue
        slowest = max(slowest, (took, name))
        fine = 400 <= status < 500 and is_error(text)
        report(f"refused: {name}", None if fine and took < 10 else f"{status} after {took:.1f} s: {text[:200]}")
    print(f"# slowest: {slowest[1]}, {slowest[0]:.2f} s", file=sys.stderr)


def test_types(s):
    """Every field with values of every wrong type, on every route."""
    bases = {CHAT: {"messages": HI, "max_tokens": 2}, COMPLETION: {"prompt": "x", "max_tokens": 2}, EMBED: {"input": "x"}, "/tokenize": {"prompt": "x"},
             "/detokenize": {"tokens": [1]}, "/lora-adapters": [], "/v1/load_lora_adapter": {"lora_name": "n", "lora_path": "/nonexistent"},
             "/v1/unload_lora_adapter": {"lora_name": "n"}}
    wrong, asked = [], 0
    for path, base in bases.items():
        for field in FIELDS if isinstance(base, dict) else [None]:
            for value in VALUES:
                body = {**base, field: value} if field else value
                try:
                    status, text, _ = s.ask(path, body)
                except (OSError, http.client.HTTPException) as e:
                    wrong.append((path, field, value, repr(e)))
                    if not s.alive():
                        report("wrong types", wrong[-1])
                        return
                    continue
                asked += 1
                if status >= 400 and not is_error(text) or status >= 500:
                    wrong.append((path, field, value, status, text[:100]))
    report(f"wrong types: {asked} requests", f"{len(wrong)}: {wrong[:3]}" if wrong else None)


def test_messages(s):
    wrong = []
    for value in VALUES:
        for message in ({"role": value, "content": "x"}, {"role": "user", "content": value}, {"role": "assistant", "tool_calls": value},
                        {"role": "assistant", "tool_calls": [value]}, {"role": "assistant", "content": "x", "tool_calls": [{"function": value}]},
                        {"role": "assistant", "tool_calls": [{"function": {"name": value, "arguments": value}}]},
                        {"role": "tool", "tool_call_id": value, "content": "x", "name": value}, {"role": "user", "content": [value]},
                        {"role": "user", "content": [{"type": "text", "text": value}]}, value):
            for more in ({}, {"tools": [{"type": "function", "function": {"name": "f", "parameters": value}}], "tool_choice": "required"}):
                status, text, _ = s.ask(CHAT, {"messages": [message, *HI], "max_tokens": 2, **more})
                if status >= 400 and not is_error(text) or status >= 500:
                    wrong.append((message, more, status, text[:100]))
    report("wrong messages", f"{len(wrong)}: {wrong[:3]}" if wrong else None)


def test_checks(s):
    """Patterns that backtrack and templates that never end: other requests are answered meanwhile."""
    wrong = []
    for value in VALUES:
        for check in ("calculator", "regex", "question"):
            for item in (value, {"pattern": value}, {"question": value, "pattern": "x"}, {"check": value}, {"check": {"question": value, "answer": value}}):
                status, text, _ = s.ask(CHAT, {"messages": HI, "max_tokens": 2, "samples": 2, "check": check, "check_item": item})
                if status >= 400 and not is_error(text) or status >= 500:
                    wrong.append((check, item, status, text[:100]))
    report("wrong items of checks", f"{len(wrong)}: {wrong[:3]}" if wrong else None)
    loop = "{% for i in range(9999) %}{% for j in range(9999) %}{{ 'x' * 999999 }}{% endfor %}{% endfor %}"
    hostile = [{"check": r"regex:((.|\s)+)+\z(?<!.)(?<!\s)"}, {"check": "regex", "check_item": {"pattern": r"((\s|.)*)*\z(?<!.)(?<!\s)"}},
               {"check": "question", "check_item": {"check": {"question": loop, "answer": "1"}}}, {"check": "question", "check_item": {"check": {"question": "{{ 'a ' * 400000 }}", "answer": "1"}}}]
    body = {"messages": HI, "max_tokens": 64, "ignore_eos": True, "loop_tokens": 0, "samples": 64}
    answers = []
    threads = [threading.Thread(target=lambda more=more: answers.append(s.ask(CHAT, {**body, **more}))) for more in hostile * 2]
    for t in threads:
        t.start()
    slowest = 0
    while any(t.is_alive() for t in threads):
        slowest = max(slowest, s.ask("/health")[2])
        time.sleep(0.02)
    results = [json.loads(text)["shoal"]["check"] if status == 200 else text[:100] for status, text, _ in answers]
    fine = all(isinstance(r, dict) and (r["samples"], r["passed"], r["questions"]) == (64, 0, 0) for r in results) and slowest < 2
    report("checks that do not end", None if fine and len(results) == len(threads) else (slowest, results))
    gone = [s.stream({**body, **hostile[i % 4], "max_tokens": 400}, CHAT) for i in range(40)]
    time.sleep(0.3)
    for x in gone:
        x.close()
    for _ in range(100):
        status, text, took = s.ask(CHAT, {"messages": HI, "max_tokens": 2, "samples": 2, "check": "calculator"})
        if status != 503:
            break
        time.sleep(0.1)
    report("checks whose clients disconnect", None if status == 200 else (status, text[:200]))


def test_unload(s):
    streams = [s.stream({"model": "spare", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "seed": i}) for i in range(8)]
    time.sleep(0.2)
    status, _, _ = s.ask("/v1/unload_lora_adapter", {"lora_name": "spare"})
    gone, text, _ = s.ask(COMPLETION, {"model": "spare", "prompt": "x"})
    ends = [read_all(x) for x in streams]
    fine = status == 200 and gone == 404 and is_error(text) and all(x.rstrip().endswith("data: [DONE]\r\n\r\n0") or "data: [DONE]" in x for x in ends)
    report("an adapter is unloaded while streams use it", None if fine else (status, gone, [x[-80:] for x in ends]))
    back, text, _ = s.ask("/v1/load_lora_adapter", {"lora_name": "spare", "lora_path": f"{tmp}/spare"})
    report("the adapter is loaded again", None if back == 200 else text)


def test_crowd(s):
    """200 idle connections, and clients that disconnect in the middle."""
    idle = [socket.create_connection(("127.0.0.1", s.port)) for _ in range(200)]
    status, _, took = s.ask("/health")
    report("200 idle connections", None if status == 200 and took < 2 else (status, took))

    def leave(k):
        for i in range(10):
            x = s.stream({"prompt": "Once upon", "max_tokens": 400, "ignore_eos": True, "n": 1 + i % 4}, COMPLETION)
            x.recv(10 + 100 * (k % 5))
            x.close()

    threads = [threading.Thread(target=leave, args=(k,)) for k in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for x in idle:
        x.close()
    status, _, took = s.ask(COMPLETION, {"prompt": "x", "max_tokens": 4})
    report("160 streams whose clients disconnect", None if status == 200 and took < 5 else (status, took))


def test_embeddings_do_not_stop_others(s):
    """A request of many texts, and a stream next to it; then its client disconnects."""
    body = json.dumps({"input": ["the cat sat on the mat and " * 15] * 2048}).encode()
    x = socket.create_connection(("127.0.0.1", s.port))
    x.sendall(f"POST {EMBED} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    time.sleep(0.3)
    status, _, took = s.ask(COMPLETION, {"prompt": "x", "max_tokens": 4, "ignore_eos": True})
    report("completions during 2,048 embeddings", None if status == 200 and took < 5 else (status, took))
    x.close()


def settled(s):
    """Memory when no request is in progress."""
    least = s.memory()
    for _ in range(20):
        time.sleep(0.1)
        least = min(least, s.memory())
    return least


def test_memory(s):
    """All of it twice: growth in the second round is a leak."""
    def round_():
        for name, path, raw in refused:
            s.ask(path, raw=raw)
        test_crowd(s)
    before = settled(s)
    round_()
    after = settled(s)
    report("memory afterwards", None if after - before < 12 << 20 else f"{before >> 20} MB before, {after >> 20} MB after")
    print(f"# memory: {before >> 20} MB before a second round, {after >> 20} MB after", file=sys.stderr)


def test_stop(s):
    kinds = {"n": 4}, {"samples": 4, "check": "question", "check_item": {"check": {"question": "x", "answer": "y"}}}
    streams = [s.stream({"prompt": "Once", "max_tokens": 400, "ignore_eos": True, **kinds[i % 2]}) for i in range(20)]
    blocked = threading.Thread(target=lambda: ignore(lambda: s.ask(COMPLETION, {"prompt": ["x"] * 500, "max_tokens": 400, "ignore_eos": True})))
    blocked.start()
    time.sleep(0.3)
    began = time.time()
    code = s.stop()
    took = time.time() - began
    for x in streams:
        x.close()
    blocked.join()
    report("SIGTERM under load", None if code == 0 and took < 8 else (code, took))


def ignore(fn):
    try:
        fn()
    except (OSError, http.client.HTTPException):
        pass


def test_kill():
    s = Server()
    streams = [s.stream({"prompt": "Once", "max_tokens": 400, "ignore_eos": True}) for _ in range(20)]
    time.sleep(0.2)
    s.process.kill()
    s.process.wait()
    for x in streams:
        x.close()
    s = Server()
    status, _, _ = s.ask(COMPLETION, {"prompt": "x", "max_tokens": 4})
    code = s.stop()
    report("kill -9 under load damages no file", None if status == 200 and code == 0 else (status, code))


def main():
    s = Server()
    for test in (test_refused, test_types, test_messages, test_checks, test_unload, test_crowd, test_embeddings_do_not_stop_others, test_memory, test_stop):
        try:
            test(s)
        except (OSError, http.client.HTTPException, subprocess.TimeoutExpired) as e:
            report(test.__name__, f"{e!r}, exit {s.process.poll()}")
        if not s.alive() and test is not test_stop:
            report("the server still runs", f"it ended with {s.process.returncode} in {test.__name__}: {open(f'{tmp}/serve.err').read()[-300:]}")
            return
    if s.alive():
        s.process.kill()
        s.process.wait()
    test_kill()


main()
