"""api: a structure-aware fuzzer of the HTTP API, with the built server on 127.0.0.1.

The templates are valid requests of every route: the curl lines of docs/API.md, and those below for requests that the
page only describes. Each is mutated as JSON (types, boundary values, texts, lengths, keys), as HTTP (methods, headers,
paths, framing) and as traffic (fragments, half-closed sockets, pipelines, aborted streams), on several connections at
once, a part of the time over TLS. Every reply must be valid HTTP; no request may end the server, trigger a sanitizer,
or reveal a secret or the server's folder; a client without mutations must always be served.

    python3 test/fuzz/api.py --seconds 60 --seed 1        SHOAL=build/asan/shoal
    python3 test/fuzz/api.py --replay test/fuzz/corpus-api/NAME.json

The last line is "API fuzz: N requests, M findings". A finding is printed with the file that replays it; the exit status
is 1 if there is one. The fuzzer uses only the standard library; --tls needs the program openssl.
"""
import argparse
import base64
import copy
import glob
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHOAL = os.path.abspath(os.environ.get("SHOAL", "build/asan/shoal"))
KEY = "sk-fuzz-b41d9c3e77"
SECRETS = [KEY, "hf_fuzzsecret5517"]
REPORTS = re.compile(r"ERROR: \w+Sanitizer|SUMMARY: \w+Sanitizer|runtime error: |Assertion .* failed|: CHECK|assertion failed")
MAX_READ = 64 << 20
REPLY_SECONDS, WILD_SECONDS, STREAM_SECONDS = 60, 10, 5  # a stream may last as long as its job; its client disconnects earlier

# requests that docs/API.md describes without curl: method, path, body
MORE = [
    ("GET", "/v1/ab/trial", None), ("POST", "/v1/ab/trial/start", {}), ("GET", "/v1/adapters/critic", None),
    ("POST", "/v1/adapters/critic/rollback", {"version": "x"}), ("GET", "/v1/feedback?limit=2&after=0", None),
    ("POST", "/ping", None), ("POST", "/api/pull", {"model": "a"}), ("POST", "/api/push", {"model": "a"}),
    ("POST", "/api/blobs/sha256:" + hashlib.sha256(b'"blob"').hexdigest(), "blob"), ("GET", "/api/blobs/sha256:" + "0" * 64, None),
    ("HEAD", "/api/blobs/sha256:" + "0" * 64, None), ("GET", "/v1/traces", None),
    ("POST", "/v1/jobs", {"kind": "train", "args": ["MODEL"], "options": {
        "data": "d.jsonl", "out": "made", "r": 2, "max-steps": 1}}),
    ("POST", "/v1/jobs", {"kind": "eval", "args": ["MODEL"], "options": {"data": "d.jsonl", "max-tokens": 4}}),
    ("POST", "/v1/jobs/JOB/pause", {}), ("POST", "/v1/jobs/JOB/resume", {}), ("POST", "/v1/jobs/JOB/cancel", {}),
    ("GET", "/v1/jobs/JOB/events?from=0", None), ("GET", "/v1/runs/made", None), ("GET", "/", None),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 3, "logit_bias": {"5": -100, "6": 3},
                                 "stop": ["x", "yz"], "stop_token_ids": [7], "presence_penalty": 0.5, "top_k": 4, "min_p": 0.1}),
    ("POST", "/v1/completions", {"prompt": "a", "guided_regex": "[a-z]{1,5}(x|y)?", "max_tokens": 8}),
    ("POST", "/v1/completions", {"prompt": "a", "guided_choice": ["one", "two"], "max_tokens": 8}),
    ("POST", "/v1/chat/completions", {"messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "t"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "r"}], "max_tokens": 4, "guided_json": {
            "type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}},
        "chat_template_kwargs": {"a": 1}, "metadata": {"a": "b"}, "seed": 3}),
    ("POST", "/api/create", {"model": "made", "from": "fry-1", "template": "{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}{{ .Response }}",
                             "messages": [{"role": "user", "content": "a"}], "parameters": {"stop": ["x"], "num_ctx": 64}}),
    ("POST", "/api/create", {"model": "other", "from": "fry-1", "template": "{{ range .Messages }}{{ .Role }}{{ .Content }}{{ end }}",
                             "adapters": {"x": "sha256:" + "0" * 64}}),
    ("POST", "/api/generate", {"model": "fry-1", "prompt": "a", "template": "{{ .Prompt }}", "stream": False, "raw": False,
                               "format": {"type": "object"}, "options": {"num_predict": 4, "temperature": 0, "stop": ["q"]}}),
    ("POST", "/api/chat", {"model": "fry-1", "messages": [{"role": "user", "content": "a"}], "format": "json",
                           "options": {"num_predict": 4}}),
    ("POST", "/api/chat", {"model": "fry-1", "messages": [{"role": "user", "content": "a"}],
                           "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "options": {"num_predict": 4}}),
]
# tools of the MCP server, with their arguments
TOOLS = [
    ("chat", {"prompt": "a", "system": "s", "model": "critic", "max_tokens": 4, "seed": 1}),
    ("ask", {"question": "a", "agents": 1, "iterations": 1, "max_tokens": 4, "conversation": "c"}),
    ("debate", {"team": "panel", "question": "a", "choices": ["x", "y"], "rounds": 1}), ("knowledge_search", {"query": "tide", "limit": 2}),
    ("memory_search", {"query": "a"}), ("conversation_list", {}), ("conversation_search", {"search": "a", "limit": 2}),
    ("conversation_read", {"conversation": "c", "after": 0, "limit": 2}), ("adapter_list", {}), ("job_list", {}), ("job_status", {"job": "JOB"}),
]
MORE += [("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}, [("Accept", "text/event-stream")])
         for method, params in [("notifications/cancelled", {"requestId": 1, "reason": "r"})] +
         [("tools/call", {"name": name, "arguments": arguments, "_meta": {"progressToken": 1}}) for name, arguments in TOOLS]]
TEXTS = ["", " ", "\0", "\ud83d\udc1f", "a" * 300, "x" * 70000, "\u202e\u0000\u001b[31m", "%s%n%d", "..", "../../x", "/dev/full",
         "/proc/self/environ", "team:panel", "agent:helper", "critic*0.5+critic*0.5", "critic*1e308", "base", "null", "true", "1", "-1", "{", "[[[[",
         "{{ 1 / 0 }}", "{% for i in range(9999) %}{{ i }}{% endfor %}", "(a*)*b", "a{1,60000}", "root ::= root", "é" * 2000,
         "\r\nX: y", "<tool_call>{", "data:image/png;base64,AAAA", "http://127.0.0.1:1/x", "sha256:", "job-", "file:///etc/hostname"]
NUMBERS = [0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, -1e308, 2 ** 31 - 1, 2 ** 31, -2 ** 31, 2 ** 32, 2 ** 53 + 1, 2 ** 63 - 1, -2 ** 63,
           2 ** 63, 10 ** 30, 255, 256, 65536, 3.999]
NAMES = ["model", "messages", "prompt", "max_tokens", "n", "stream", "stop", "logprobs", "seed", "options", "args", "kind", "data", "out",
         "user", "tools", "tool_choice", "response_format", "lora", "parameters", "template", "format", "id", "rating", "question", "team",
         "choices", "rounds", "agents", "name", "path", "from", "arguments", "params", "jsonrpc", "method", "grammar", "json_schema", "echo", "best_of", "logit_bias", "input"]


class Finding(Exception):
    pass


# ---- templates

def routes():
    """(method, path) of every row of the route tables."""
    found = set()
    for file in glob.glob(f"{ROOT}/src/*/*.c"):
        for method, path in re.findall(r'^ *\{"([A-Z]+)",\s*"(/[^"]*)",', open(file).read(), re.M):
            found.add((method, path))
    return sorted(found)


def fits(route, path):
    parts, asked = route.strip("/").split("/"), path.split("?")[0].strip("/").split("/")
    if parts[-1] == "*":
        return len(asked) >= len(parts) and asked[:len(parts) - 1] == parts[:-1]
    return parts == asked


def template(method, path, body, headers=()):
    return {"method": method, "path": path, "headers": [list(h) for h in headers],
            "json": body, "raw": None if body is not None else ""}


def templates():
    """The curl lines of the page, then MORE. $ID and similar become placeholders that are replaced when a request is
    made.
    """
    out = []
    for line in re.findall(r"^(?:[A-Z]+=\$\()?(curl .*)$", open(f"{ROOT}/docs/API.md").read(), re.M):
        line = re.sub(r"\| sed .*$", "", line).replace("$JOB", "JOB").replace("$BACKUP", "BACKUP").replace("$LIFE", "JOB").replace("$ID", "CALL").replace("$MEMORY", "1")
        method, path, body, headers = None, None, None, []
        words = iter(shlex.split(line)[1:])
        for w in words:
            if w == "-X":
                method = next(words)
            elif w == "-H":
                headers.append(tuple(next(words).split(": ", 1)))
            elif w in ("-d", "--data", "--data-binary"):
                body = next(words)
            elif w.startswith("localhost:8000"):
                path = w[len("localhost:8000"):] or "/"
        if path is None:
            continue
        try:
            value = json.loads(body) if body is not None else None
        except ValueError:
            continue
        out.append(template(method or ("GET" if body is None else "POST"), path, value, headers))
    out += [template(*m) for m in MORE]
    for method, path in routes():
        if not any(t["method"] == method and fits(path, t["path"]) for t in out):
            print(f"not covered by a template: {method} {path}", flush=True)
            out.append(template(method, path.replace("*", "x"), {} if method == "POST" else None))
    return out


# ---- mutation

def places(v, path=()):
    """Every position in a JSON value, as a path of keys."""
    yield path
    if isinstance(v, dict):
        for k in v:
            yield from places(v[k], path + (k,))
    elif isinstance(v, list):
        for i in range(len(v)):
            yield from places(v[i], path + (i,))


def value_at(v, path):
    for k in path:
        v = v[k]
    return v


def put(v, path, new):
    if not path:
        return new
    value_at(v, path[:-1])[path[-1]] = new
    return v


def nest(value, depth):
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


def any_value(r):
    kind = r.randrange(9)
    if kind < 3:
        return r.choice(TEXTS)
    if kind < 6:
        return r.choice(NUMBERS)
    if kind == 6:
        return r.choice([None, True, False, [], {}, [[]], [None], {"": ""}])
    if kind == 7:
        return nest(r.choice([1, "a", []]), r.choice([2, 20, 99, 101]))
    return [r.choice([1, "a", None, {}])] * r.choice([2, 33, 1000])


def scalar_near(v, r):
    """A value of the same type."""
    if isinstance(v, bool):
        return not v
    if isinstance(v, (int, float)):
        return r.choice([v + 1, v - 1, -v, v * 1000, r.choice(NUMBERS)])
    if isinstance(v, str):
        i = r.randrange(len(v) + 1)
        return r.choice([v * 2, v[:i], v[:i] + r.choice(TEXTS[:12]) + v[i:], r.choice(TEXTS), v.upper()])
    return any_value(r)


def mutate_json(v, r, others):
    path = r.choice(list(places(v)))
    old, kind = value_at(v, path), r.randrange(10)
    if kind < 4:
        return put(v, path, scalar_near(old, r))
    if kind < 6:
        return put(v, path, any_value(r))
    if isinstance(old, dict):
        if kind == 6 and old:
            del old[r.choice(list(old))]
        elif kind == 7:
            other = r.choice(others)
            old.update(copy.deepcopy(other) if isinstance(other, dict) else {})
        else:
            old[r.choice(NAMES)] = any_value(r)
        return v
    if isinstance(old, list) and old:
        if kind == 6:
            old.pop(r.randrange(len(old)))
        elif kind == 7:
            old.extend(copy.deepcopy(old[:50]) * r.choice([1, 1, 3, 40]))
        else:
            old.insert(r.randrange(len(old) + 1), any_value(r))
        return v
    return put(v, path, {r.choice(NAMES): old})


def mutate_text(text, r):
    """Bytes of JSON: invalid, duplicate keys, other encodings."""
    kind, i = r.randrange(7), r.randrange(len(text) + 1)
    if kind == 0:
        return text[:i]
    if kind == 1:
        return text[:i] + bytes([r.randrange(256)]) + text[i:]
    if kind == 2:
        return text[:i] + text[i + r.randrange(1, 4):]
    if kind == 3 and text[:1] == b"{":
        return text[:-1] + b", " + text[1:]
    if kind == 4:
        return r.choice([b"\xef\xbb\xbf", b"\xff\xfe", b" " * 5000, b"\n\n"]) + text
    if kind == 5:
        return text + r.choice([b"}", b"\0", b" {}", b"[" * 3000])
    return text.replace(b'"', b"'") if r.randrange(2) else b"[" * r.choice([99, 200, 100000])


def mutate_path(path, r):
    kind, i = r.randrange(10), r.randrange(1, len(path) + 1)
    if kind == 0:
        return path + "/" + r.choice(["", "..", ".", "x" * 300, "%00", "%2e%2e%2f", "%ff", "a/b/c"])
    if kind == 1:
        return path[:i] + r.choice(["%", "%2", "%zz", "%00", "%0d%0a", "%c0%af", "é"]) + path[i:]
    if kind == 2:
        return path + r.choice(["?", "&", "?a=b"]) + r.choice(["limit=-1", "n=99999999999999999999", "from=x", "a" * 9000, "slow=%", "id=%00"])
    if kind == 3:
        return path.replace("/", "//", 1)
    if kind == 4:
        return path[:i]
    if kind == 5:
        return r.choice(["*", "http://127.0.0.1/health", "", "/" * 4000, "/v1/../health", "/" + "%41" * 3000])
    if kind == 6:
        return re.sub(r"\d+", lambda m: str(r.choice([-1, 0, 2 ** 31, 2 ** 63, 10 ** 25])), path)
    return path


def mutate_headers(headers, r):
    kind = r.randrange(12)
    if kind == 0:
        headers.append(["Content-Type", r.choice(["text/plain", "multipart/form-data; boundary=x", "", "application/json; charset=utf-16"])])
    elif kind == 1:
        headers.append(["Content-Length", r.choice(["0", "-1", "5", "99999999999", "1e3", "0x10", "+3", "3, 3", ""])])
    elif kind == 2:
        headers.append(["Transfer-Encoding", r.choice(["chunked", "gzip", "chunked, chunked", "identity", "xchunked"])])
    elif kind == 3:
        headers.append(["Expect", r.choice(["100-continue", "200-ok", ""])])
    elif kind == 4:
        headers.append(["Range", r.choice(["bytes=0-0", "bytes=-1", "bytes=9-1,5-", "x"])])
    elif kind == 5:
        headers.append([r.choice(["X-A", "Cookie", "Accept", "Authorization", "Origin", "Host", "Idempotency-Key", "User-Agent"]),
                        r.choice(["", "x" * 9000, "\xff\xfe", "a\tb", "Bearer ", "null", "http://evil.example", "*/*;q=9"])])
    elif kind == 6:
        headers.extend([["X-%d" % i, "y"] for i in range(r.choice([10, 200]))])
    elif kind == 7:
        headers.append([r.choice(["", "A B", "A\0", ":", "\x7f"]), "v"])
    elif kind == 8:
        headers.append(["Connection", r.choice(["close", "keep-alive", "upgrade", "close, close"])])
    elif kind == 9:
        headers.append(["Upgrade", r.choice(["h2c", "websocket"])])
    elif kind == 10:
        headers.append(["X-Forwarded-For", r.choice(["127.0.0.1", "1.2.3.4, 127.0.0.1", "x" * 500])])
    else:
        headers.append(["If-None-Match", '"' + "a" * r.choice([1, 4000]) + '"'])


def request_make(t, r, others, words, plain=False):
    """One request, ready to be written to a file: {method, path, headers, body (base64), traffic, wild}; `plain`:
    without mutations. `wild`: its HTTP may be malformed, so that any answer or none is correct.
    """
    t = copy.deepcopy(t)
    q = {"method": t["method"], "path": t["path"], "headers": t["headers"], "wild": False, "traffic": {}}
    for word, known in words.items():
        if word in q["path"] and known:
            q["path"] = q["path"].replace(word, r.choice(known))
    body = t["json"]
    if body is not None:
        text = json.dumps(body)
        for word, known in words.items():
            text = text.replace(f'"{word}"', json.dumps(r.choice(known)) if known else f'"{word}"')
        body = json.loads(text)
        for _ in range(0 if plain else r.choice([0, 1, 1, 1, 2, 3, 6])):
            body = mutate_json(body, r, others)
    data = b"" if body is None else json.dumps(body, ensure_ascii=r.random() < 0.7).encode(errors="surrogatepass")
    if plain:
        return {**q, "key": "good", "body": base64.b64encode(data).decode()}
    if data and r.random() < 0.08:
        data = mutate_text(data, r)
    if not data and r.random() < 0.05:
        data = r.choice([b"{}", b"null", b"x" * 100000, b"\0"])
    if r.random() < 0.06:
        q["method"] = r.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "X" * 50])
        q["wild"] = q["method"] not in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
    if r.random() < 0.08:
        q["path"] = mutate_path(q["path"], r)
        q["wild"] = True
    if r.random() < 0.08:
        mutate_headers(q["headers"], r)
        q["wild"] = True
    kind = r.random()
    traffic = q["traffic"]
    if kind < 0.03:
        traffic["cut"] = r.randrange(1, 400)  # number of bytes that are sent before the socket is closed
    elif kind < 0.06:
        traffic["half"] = True  # the client closes its side after the request
    elif kind < 0.10:
        traffic["leave"] = r.choice([0, 1, 100, 3000])  # bytes of the reply that the client reads before it disconnects
    elif kind < 0.14:
        traffic["pipeline"] = r.randrange(2, 6)
    elif kind < 0.17:
        traffic["parts"] = r.choice([1, 7, 50])
    elif kind < 0.20:
        traffic["chunked"] = r.choice([1, 100, 5000])
    q["key"] = r.choices(["good", "none", "wrong"], [94, 3, 3])[0]
    q["body"] = base64.b64encode(data).decode()
    return q


# ---- one request over a socket

def encode(q):
    body, lines = base64.b64decode(q["body"]), [f"{q['method']} {q['path']} HTTP/1.1"]
    names = [h[0].lower() for h in q["headers"]]
    if "host" not in names:
        lines.append("Host: localhost")
    if q["key"] != "none" and "authorization" not in names:
        lines.append("Authorization: Bearer " + (KEY if q["key"] == "good" else "sk-wrong"))
    lines += [f"{k}: {v}" for k, v in q["headers"]]
    size = q["traffic"].get("chunked")
    if size and body and "transfer-encoding" not in names and "content-length" not in names:
        lines.append("Transfer-Encoding: chunked")
        body = b"".join(b"%x\r\n%s\r\n" % (len(body[i:i + size]), body[i:i + size]) for i in range(0, min(len(body), 500 * size), size)) + b"0\r\n\r\n"
    elif "content-length" not in names and "transfer-encoding" not in names and (body or q["method"] not in ("GET", "HEAD")):
        lines.append(f"Content-Length: {len(body)}")
    if q["traffic"].get("pipeline") is None:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body


class Reader:
    """Reads replies from a socket. Raises Finding if they are not HTTP."""

    def __init__(self, sock, seconds):
        self.sock, self.data = sock, b""
        self.until, self.stream = time.time() + seconds, False

    def more(self):
        left = self.until - time.time()
        if left <= 0:
            raise socket.timeout()
        self.sock.settimeout(left)
        try:
            part = self.sock.recv(65536)
        except (ConnectionError, ssl.SSLError) as e:
            if isinstance(e, ssl.SSLError) and "timed out" in str(e):
                raise socket.timeout() from None
            part = b""
        self.data += part
        return bool(part)

    def line(self):
        while b"\n" not in self.data:
            if len(self.data) > 1 << 20:
                raise Finding("a line of the head has more than 1 MB")
            if not self.more():
                return None
        line, self.data = self.data.split(b"\n", 1)
        return line.rstrip(b"\r")

    def take(self, n):
        while len(self.data) < n:
            if not self.more():
                return None
        part, self.data = self.data[:n], self.data[n:]
        return part

    def chunks(self):
        body = b""
        while True:
            line = self.line()
            if line is None:
                return None
            if not re.fullmatch(rb"[0-9a-fA-F]+(;.*)?", line):
                raise Finding(f"a chunk begins with {line[:60]!r}")
            n = int(line.split(b";")[0], 16)
            part = self.take(n)
            if part is None or self.line() is None:
                return None
            if n == 0:
                return body
            body += part
            if len(body) > MAX_READ:
                raise Finding("a reply has more than 64 MB")

    def reply(self, head_only=False):
        """(status, headers, body), or None if the connection ended before the reply was complete."""
        line = self.line()
        if line is None:
            return None
        found = re.fullmatch(rb"HTTP/1\.1 (\d{3}) [ -~]*", line)
        if not found:
            raise Finding(f"a reply begins with {line[:80]!r}")
        status, headers = int(found.group(1)), {}
        while True:
            line = self.line()
            if line is None:
                return None
            if not line:
                break
            if not re.fullmatch(rb"[!#-'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*", line):
                raise Finding(f"a header of a reply is {line[:80]!r}")
            k, v = line.decode("latin-1").split(":", 1)
            headers[k.lower()] = v.strip()
        if status == 100:
            return self.reply(head_only)
        if headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson")):
            self.stream, self.until = True, min(self.until, time.time() + STREAM_SECONDS)
        if head_only or status in (204, 304):
            return status, headers, b""
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = self.chunks()
        elif "content-length" in headers:
            body = self.take(int(headers["content-length"]))
        else:
            while self.more():
                if len(self.data) > MAX_READ:
                    raise Finding("a reply has more than 64 MB")
            body, self.data = self.data, b""
        return None if body is None else (status, headers, body)


def strict_json(text, what):
    def refuse(word):
        raise ValueError("constant " + word)
    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as e:
        raise Finding(f"{what} is no JSON: {e}: {text[:200]!r}") from None


def check_stream(text):
    for line in text.split("\n"):
        if line.startswith("data: ") and line != "data: [DONE]":
            strict_json(line[6:], "a line of a stream")
        elif line and not line.startswith(("data: ", "event: ", "id: ", "retry: ", ":")):
            raise Finding(f"a line of a stream is {line[:100]!r}")


def check_reply(q, reply, secrets):
    """Checks of each complete reply."""
    status, headers, body = reply
    kind = headers.get("content-type", "")
    try:
        text = body.decode()
    except UnicodeDecodeError as e:
        if kind.startswith(("text/", "application/json", "application/x-ndjson")):
            raise Finding(f"a reply is no UTF-8: {e}") from None
        text = ""
    if status == 401:  # for local clients the error names the token file, which only its owner can read
        text = re.sub(r"start-up token, which may do everything, is in '[^']*'", "", text)
    for secret in secrets:
        if secret in text or any(secret in v for v in headers.values()):
            if status >= 400 or secret in SECRETS:
                raise Finding(f"a reply of status {status} shows '{'a secret' if secret in SECRETS else 'a folder of the server'}': "
                              f"{text[max(0, text.find(secret) - 120):][:300]!r}")
    if status == 500 or status > 503:
        raise Finding(f"status {status}: {text[:300]!r}")
    if q["method"] == "HEAD":
        return
    if kind.startswith("application/json"):
        v = strict_json(text, "a reply")
        if status >= 400:
            e = v.get("error") if isinstance(v, dict) else None
            members = {"code"} if isinstance(v, dict) and v.get("jsonrpc") == "2.0" else {"type", "param", "code"}
            whole = isinstance(e, dict) and isinstance(e.get("message"), str) and members <= set(e)
            if not (isinstance(e, str) or whole):
                raise Finding(f"an error of the wrong form: {text[:200]!r}")
            message = e if isinstance(e, str) else e["message"]
            if len(message) > 4096:
                raise Finding(f"an error of {len(message)} characters: {message[:200]!r}")
    elif kind.startswith("text/event-stream"):
        check_stream(text)
    elif kind.startswith("application/x-ndjson"):
        for line in text.split("\n"):
            if line:
                strict_json(line, "a line of a stream")
    elif status >= 400 and not kind and not q["wild"]:
        raise Finding(f"status {status} without a type: {text[:200]!r}")


class Target:
    """The server, in a separate folder from which `../..` is still inside the test's folder."""

    def __init__(self, tls, folder=None):
        self.top = tempfile.TemporaryDirectory(prefix="api-fuzz-")
        self.cwd = os.path.join(self.top.name, *"abcdefgh")
        os.makedirs(self.cwd)
        self.tls, self.log = tls, os.path.join(self.top.name, "stderr.txt")
        self.prepare()
        options = ["--host", "127.0.0.1", "--port", "0", "--json", "--state", "state", "--runs", "runs", "--drain-seconds", "5", "--enable-lora",
                   "--max-loras", "8", "--adapter", "critic=adapters/critic", "--team", f"panel={ROOT}/examples/team.yaml", "--agent", f"helper={ROOT}/examples/agent.yaml", "--fallback", f"safe={ROOT}/examples/fallback.yaml", "--no-jobs-idle",
                   "--knowledge", "knowledge.db", "--memory", "memories.db"]
        if tls:
            self.certificate()
            options += ["--tls-cert", "../cert.pem", "--tls-key", "../key.pem"]
        env = {**os.environ, "SHOAL_API_KEY": KEY, "HF_TOKEN": SECRETS[1], "ASAN_OPTIONS":
               "quarantine_size_mb=16:malloc_context_size=12:detect_stack_use_after_return=0:allocator_may_return_null=1",
               "UBSAN_OPTIONS": "print_stacktrace=1"}
        self.process = subprocess.Popen([SHOAL, "serve", f"{ROOT}/test/models/fry-1", *options], cwd=self.cwd, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=open(self.log, "ab"), env=env)
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError("the server did not start: " + open(self.log).read()[-2000:])
        self.port = int(re.search(r":(\d+)", json.loads(line)["listening"]).group(1))
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.context = ssl.create_default_context()
        self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE

    made = None  # adapters, trained once

    def prepare(self):
        if Target.made is None:
            Target.made = tempfile.TemporaryDirectory(prefix="api-fuzz-adapters-")
            self.train(Target.made.name)
        shutil.copytree(Target.made.name, self.cwd, dirs_exist_ok=True)

    @staticmethod
    def train(cwd):
        with open(os.path.join(cwd, "tide.txt"), "w") as f:
            f.write("The tide rises and falls twice a day.\n")
        subprocess.run([SHOAL, "knowledge", "add", "knowledge.db", "tide.txt", "--quiet"], cwd=cwd, check=True, stdout=subprocess.DEVNULL)
        with open(os.path.join(cwd, "d.jsonl"), "w") as f:
            f.write('{"messages": [{"role": "user", "content": "12 + 30 = ?"}, {"role": "assistant", "content": "answer: 42"}]}\n')
        for name, rank in ("critic", "2"), ("newer", "4"):
            subprocess.run([SHOAL, "train", f"{ROOT}/test/models/fry-1", "--runs", "runs", "--data", "d.jsonl", "--out", f"adapters/{name}", "--r", rank,
                            "--max-steps", "1", "--quiet"], cwd=cwd, check=True, stdout=subprocess.DEVNULL,
                           env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"})

    def certificate(self):
        to = os.path.dirname(self.cwd)
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout",
                        f"{to}/key.pem", "-out", f"{to}/cert.pem"], check=True, stderr=subprocess.DEVNULL)
        os.chmod(f"{to}/key.pem", 0o600)

    def connect(self, timeout):
        s = socket.create_connection(("127.0.0.1", self.port), timeout)
        return self.context.wrap_socket(s, server_hostname="localhost") if self.tls else s

    def alive(self):
        return self.process.poll() is None

    def memory(self):
        text = open(f"/proc/{self.process.pid}/status").read()
        return int(re.search(r"RssAnon:\s+(\d+)", text).group(1)) << 10

    def reports(self):
        """The output of sanitizers and failed checks: of the server, and of its jobs."""
        for file in [self.log, *glob.glob(f"{self.cwd}/state/**/*", recursive=True), *glob.glob(f"{self.cwd}/runs/**/log*", recursive=True)]:
            try:
                with open(file, errors="replace") as f:
                    text = f.read(8 << 20)
            except OSError:
                continue
            found = REPORTS.search(text)
            if found:
                return f"{os.path.basename(file)}: {text[max(0, found.start() - 200):][:1500]}"
        return None

    def stop(self):
        """A finding, or None."""
        why = None
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(90)
            if code != 0:
                why = f"the server ended with status {code}: {open(self.log, errors='replace').read()[-1500:]}"
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            why = "the server did not end within 90 s of SIGTERM"
        return self.reports() or why


def send(target, q, timeout=REPLY_SECONDS):
    """Sends a request according to its traffic and checks the reply. Returns the status, 0 for none."""
    data, traffic = encode(q), q["traffic"]
    secrets = [*SECRETS, target.top.name]
    try:
        sock = target.connect(timeout)
    except (OSError, ssl.SSLError):
        if not target.alive():
            raise Finding("the server has ended") from None
        return 0
    with sock:
        try:
            if "cut" in traffic:
                sock.sendall(data[:traffic["cut"]])
                return 0
            step = traffic.get("parts")
            if step:
                for i in range(0, min(len(data), 40 * step), step):
                    sock.sendall(data[i:i + step])
                    time.sleep(0.005)
                data = data[min(len(data), 40 * step):]
            sock.sendall(data * traffic.get("pipeline", 1))
            if traffic.get("half") and not target.tls:
                sock.shutdown(socket.SHUT_WR)
            if "leave" in traffic:
                sock.recv(traffic["leave"] or 1)
                return 0
        except (OSError, ssl.SSLError):
            pass  # an early refusal; its reply may still arrive
        return replies_read(target, q, sock, traffic.get("pipeline", 1), secrets)


def replies_read(target, q, sock, n, secrets):
    reader, status = Reader(sock, WILD_SECONDS if q["wild"] or q["traffic"] else REPLY_SECONDS), 0
    try:
        for _ in range(n):
            reply = reader.reply(q["method"] == "HEAD")
            if reply is None:
                if not target.alive():
                    raise Finding("the server has ended")
                break
            check_reply(q, reply, secrets)
            status = reply[0]
            harvest(reply[2])
            if reply[1].get("connection", "").lower() == "close":
                break
    except socket.timeout:
        if reader.stream:
            return 200
        if not q["wild"] and not q["traffic"]:
            raise Finding("no reply within the time") from None
    except OSError:
        pass
    if status == 0 and not reader.stream and not q["wild"] and not q["traffic"]:
        raise Finding("a well-formed request has no reply")
    return status


WORDS = {"JOB": [], "BACKUP": [], "CALL": []}


def harvest(body):
    """Ids for later requests."""
    for word, pattern in ("JOB", rb'"id":"(job-[^"]*)"'), ("CALL", rb'"id":"((?:chat)?cmpl-[^"]*)"'), ("BACKUP", rb'"id":"(backup-[^"]*|\d{8}[^"]*)"'):
        for found in re.findall(pattern, body[:20000])[:2]:
            WORDS[word] = (WORDS[word] + [found.decode()])[-8:]


# ---- the run

class Run:
    def __init__(self, args):
        self.args, self.lock = args, threading.Lock()
        self.n, self.statuses, self.findings, self.known, self.recent = 0, {}, 0, set(), []
        self.covered, self.over, self.slow = set(), False, {}
        self.templates = templates()
        self.bodies = [t["json"] for t in self.templates if t["json"] is not None]

    def finding(self, what, requests):
        """Once for each kind: findings that differ only in digits are the same."""
        name = re.sub(r"[0-9]+|'[^']*'", "#", f"{requests[-1]['method'] if requests else ''} {what[:160]}")
        with self.lock:
            if name in self.known:
                return
            self.known.add(name)
            self.findings += 1
            file = os.path.join(self.args.out, f"finding-{self.args.seed}-{self.findings}.json")
            os.makedirs(self.args.out, exist_ok=True)
            with open(file, "w") as f:
                json.dump({"what": what, "seed": self.args.seed, "requests": requests}, f, indent=1)
            if requests:
                q = requests[-1]
                print(f"FINDING {q['method']} {q['path'][:80]} {base64.b64decode(q['body'])[:200]!r}")
            print(f"  {what[:1500]}\n  again: {sys.argv[0]} --replay {file}", flush=True)

    def tidy(self, target):
        """Cancels jobs: a mutated one may run for hours."""
        for job in list(WORDS["JOB"]):
            q = {"method": "POST", "path": f"/v1/jobs/{job}/cancel", "headers": [], "key": "good", "wild": True, "traffic": {}, "body": ""}
            send(target, q)

    def worker(self, target, number, until):
        r = random.Random(f"{self.args.seed} {number} {int(target.tls)}")
        while time.time() < until and not self.over:
            t = r.choice(self.templates)
            q = request_make(t, r, self.bodies, WORDS)
            with self.lock:
                self.recent = (self.recent + [q])[-60:]
            began = time.time()
            try:
                status = send(target, q)
            except Finding as e:
                time.sleep(1)  # a sanitizer needs a moment to print the reason before the server ends
                if not target.alive():
                    self.over = True
                    self.finding(f"the server has ended: {target.reports() or open(target.log, errors='replace').read()[-800:]}", self.recent)
                    return
                self.finding(str(e), [q])
                status = 0
            with self.lock:
                self.n += 1
                place = f"{t['method']} {t['path'][:40]}"
                self.slow[place] = self.slow.get(place, 0) + time.time() - began
                self.statuses[status] = self.statuses.get(status, 0) + 1
                if 200 <= status < 300:
                    self.covered.add((t["method"], t["path"], json.dumps(t["json"])))

    def canary(self, target, until):
        """A client that sends valid requests in a loop."""
        q = {"method": "POST", "path": "/v1/completions", "headers": [], "key": "good", "wild": False, "traffic": {},
             "body": base64.b64encode(json.dumps({"prompt": "a", "max_tokens": 1}).encode()).decode()}
        health = {**q, "method": "GET", "path": "/health", "body": ""}
        while time.time() < until and not self.over:
            if random.random() < 0.3:
                self.tidy(target)
            for one in q, health:
                began, status = time.time(), 0
                while status != 200 and time.time() - began < 60 and not self.over:
                    try:
                        status = send(target, one)
                    except Finding as e:
                        status = str(e)
                    if status != 200:
                        time.sleep(0.5)
                if status != 200 and not self.over:
                    self.finding(f"canary: {one['path']} was not answered with 200 for 60 s, last {status}", self.recent)
            time.sleep(1)

    def plain(self, target):
        """The unmodified templates, so that every part of the server was used once."""
        for t in self.templates:
            q, status = request_make(t, random.Random(0), self.bodies, WORDS, plain=True), 0
            try:
                status = send(target, q)
            except Finding as e:
                self.finding(str(e), [q])
            if 200 <= status < 300:
                self.covered.add((t["method"], t["path"], json.dumps(t["json"])))
            elif self.args.verbose:
                print(f"  {t['method']} {t['path']} {json.dumps(t['json'])[:100]}: {status}", flush=True)

    def phase(self, seconds, tls):
        target = Target(tls)
        for word in WORDS:
            WORDS[word] = []
        self.plain(target)
        base, until = target.memory(), time.time() + seconds
        threads = [threading.Thread(target=self.worker, args=(target, i, until)) for i in range(self.args.clients)]
        threads.append(threading.Thread(target=self.canary, args=(target, until)))
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if target.alive():
            time.sleep(1)
            grown = target.memory() - base
            print(f"{'TLS' if tls else 'HTTP'}: memory {base >> 20} MB, {grown >> 20:+d} MB at the end", flush=True)
            if grown > 512 << 20:
                self.finding(f"memory has grown by {grown >> 20} MB", [])
        why = target.stop()
        if why and not self.over:
            self.finding(why, self.recent)
        if not self.findings:
            target.top.cleanup()
        else:
            print(f"  the server's folder: {target.top.name}")
            target.top._finalizer.detach()

    def main(self):
        began, tls = time.time(), self.args.tls
        self.phase(self.args.seconds * (1 - tls), False)
        if tls > 0 and not self.over and subprocess.run(["sh", "-c", "command -v openssl"], stdout=subprocess.DEVNULL).returncode == 0:
            self.phase(self.args.seconds * tls, True)
        print(f"{time.time() - began:.0f} s, seed {self.args.seed}, statuses {dict(sorted(self.statuses.items()))}, "
              f"{len(self.covered)} of {len(self.templates)} templates answered with success")
        most = sorted(self.slow.items(), key=lambda p: -p[1])[:5]
        print("most time: " + ", ".join(f"{place} {s:.0f} s" for place, s in most))
        print(f"API fuzz: {self.n} requests, {self.findings} findings", flush=True)
        return 1 if self.findings else 0


def replay(file):
    """Sends the requests of a finding in order to a new server."""
    with open(file) as f:
        found = json.load(f)
    target, n = Target(False), 0
    try:
        for q in found["requests"]:
            n += 1
            try:
                status = send(target, q)
                print(f"{q['method']} {q['path'][:80]}: {status}")
            except Finding as e:
                print(f"FINDING {q['method']} {q['path'][:80]}: {e}")
                break
    finally:
        why = target.stop()
    if why:
        print(f"FINDING at the end: {why}")
    print(f"API fuzz: {n} requests replayed")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--seconds", type=float, default=60)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--clients", type=int, default=6)
    p.add_argument("--tls", type=float, default=0.2, help="the part of the time over TLS")
    p.add_argument("--out", default="build/api-fuzz", help="where findings are written")
    p.add_argument("--replay", help="a file of a finding")
    p.add_argument("--verbose", action="store_true", help="say which templates are refused as they are")
    p.add_argument("--routes", action="store_true", help="only say which routes have no template")
    args = p.parse_args()
    if args.replay:
        return replay(args.replay)
    if args.routes:
        return templates() and None
    return Run(args).main()


if __name__ == "__main__":
    sys.exit(main())
