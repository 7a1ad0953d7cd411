#!/bin/sh
# test_fallback: fallback chains of a server: each link answers when those before it fail (not loaded, too slow, wrong
# statuses, endless, broken and redirected replies, queues that are full), in every API, whole and streamed; circuits open
# and close again; requests that are wrong are refused; the key of a remote server is in no reply, log or metric.
# Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip fallback: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export SHOAL_CONFIG='' HOME="$tmp" REMOTE_KEY=sk-secret-0123456789abcdef EVIL_KEY=sk-secret-0123456789abcdef
SHOAL=${SHOAL:-build/shoal} TMP_DIR=$tmp python3 - <<'END'
import concurrent.futures, http.server, json, os, shutil, signal, subprocess, sys, threading, time, traceback

sys.path.insert(0, "test/api")
import server
from server import check, failed, run

shoal, tmp, model = server.SHOAL, server.TMP, "test/models/fry-1"
KEY = os.environ["REMOTE_KEY"]
SORRY = "Sorry, no model can answer now."
CHATS = {"/v1/chat/completions", "/api/chat"}


def write(name, text):
    with open(f"{tmp}/{name}", "w") as f:
        f.write(text)
    return f"{tmp}/{name}"


# the remote server: the first part of a path is its name, whose mode decides what it does

class Remote:
    mode, posts, gets, bodies, keys, gone, lock = {}, {}, {}, {}, {}, {}, threading.Lock()
    held = threading.Event()  # set: requests of the mode "held" are answered
    arrived = threading.Event()  # set: the client of a stream has got text

    @classmethod
    def count(cls, table, name):
        with cls.lock:
            table[name] = table.get(name, 0) + 1


def chunk(text, **more):
    return {"choices": [{"index": 0, "delta": {"content": text}, "text": text, "finish_reason": None, **more}]}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, body, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for k, v in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(k.replace("_", "-"), v)
        self.end_headers()
        self.wfile.write(data)

    def begin(self, type="text/event-stream"):
        self.send_response(200)
        self.send_header("Content-Type", type)
        self.send_header("Connection", "close")
        self.end_headers()

    def event(self, v):
        self.wfile.write(b"data: " + (v if isinstance(v, bytes) else json.dumps(v).encode()) + b"\n\n")
        self.wfile.flush()

    def do_GET(self):
        name = self.path.split("/")[1]
        Remote.count(Remote.gets, name)
        down = Remote.mode.get(name) in ("500", "denied")
        self.reply(503 if down else 200, {"error": {"message": "down"}} if down else {"data": [{"id": "m"}]})

    def do_POST(self):
        name, body = self.path.split("/")[1], json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Remote.count(Remote.posts, name)
        with Remote.lock:
            Remote.bodies[name], Remote.keys[name] = body, self.headers["Authorization"]
        try:
            self.answer(name, Remote.mode.get(name, "good"), body)
        except (BrokenPipeError, ConnectionResetError):
            Remote.count(Remote.gone, name)
        self.close_connection = True

    def answer(self, name, mode, body):
        text = f"remote {name}: " + (body["messages"][-1]["content"] if "messages" in body else body["prompt"])
        whole = {"choices": [{"message": {"role": "assistant", "content": text}, "text": text, "finish_reason": "stop"}],
                 "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
        stream = body.get("stream")
        if mode in ("500", "400", "429"):
            self.reply(int(mode), {"error": {"message": f"no, {self.headers['Authorization']}"}})
        elif mode == "denied":
            self.reply(401, {"error": {"message": f"bad key {KEY}"}})
        elif mode == "redirect":
            self.reply(307, b"", Location=f"http://{address}/trap/v1/chat/completions")
        elif mode == "broken":
            self.reply(200, b'{"choices": [')
        elif mode == "other":
            self.reply(200, {"answer": 42})
        elif mode == "deep":
            self.reply(200, b"[" * 100000)
        elif mode == "silent":
            while True:  # until the client is gone
                self.connection.settimeout(30)
                if not self.connection.recv(1):
                    raise BrokenPipeError
        elif mode == "held":
            Remote.held.wait(60)
            self.reply(200, whole)
        elif mode == "endless":
            self.begin("text/event-stream" if stream else "application/json")
            while True:
                self.wfile.write(b": padding of a stream\n" * 1000 if stream else b" " * 20000)
        elif mode == "long":
            self.begin()
            while True:
                self.event(chunk("la " * 1000))
                Remote.arrived.wait(60)
        elif mode == "leak":
            if not stream:
                return self.reply(200, {"choices": [{"message": {"content": f"the key is {KEY}"}}]})
            self.begin()
            self.event(chunk("the key is "))
            Remote.arrived.wait(60)
            for part in (KEY[:7], KEY[7:12], KEY[12:], " indeed"):
                self.event(chunk(part))
            self.event(b"[DONE]")
        elif mode == "part":
            self.begin()
            self.event(chunk("half an "))
            Remote.arrived.wait(60)
        elif mode == "stuck":
            self.begin()
            self.event(chunk("half an "))
            self.answer(name, "silent", body)
        elif mode == "unasked":  # a stream of events, although the request does not ask for one
            self.begin()
            for part in (KEY[:7], KEY[7:]) if text.endswith("leak") else ("an unasked", " stream"):
                self.event(chunk(part))
            self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
            self.event(b"[DONE]")
        elif mode == "late":  # an error instead of the first part
            self.begin()
            self.event({"error": {"message": "overloaded"}})
        elif not stream:
            self.reply(200, whole)
        else:
            self.begin()
            for part in (text[:4], text[4:9], text[9:]):
                self.event(chunk(part))
            self.event({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]})
            self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
            self.event(b"[DONE]")


http.server.ThreadingHTTPServer.request_queue_size = 64
remote = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
remote.daemon_threads = True
threading.Thread(target=remote.serve_forever, daemon=True).start()
address = f"127.0.0.1:{remote.server_port}"


def link(name, timeout=20, threshold=1000, cooldown=30, key=True):
    return (f"  - name: {name}\n    model: big\n    url: http://{address}/{name}/v1\n    timeout: {timeout}\n"
            f"    failure_threshold: {threshold}\n    cooldown: {cooldown}\n" + ("    api_key_env: REMOTE_KEY\n" if key else ""))


seen = []  # all bytes that clients got


class Server(server.Server):
    def post(self, path, body):
        """The status, headers and JSON of a whole reply."""
        c = self.open(path, {"stream": False, **body})
        r = c.getresponse()
        text = r.read().decode()
        seen.append(text)
        c.close()
        return r.status, dict(r.getheaders()), json.loads(text)

    def lines(self, path, body):
        """The status, headers and JSON values of a stream, of lines or events."""
        Remote.arrived.clear()
        c = self.open(path, {**body, "stream": True})
        r = c.getresponse()
        values = []
        for line in iter(r.readline, b""):
            line = line.decode().rstrip("\n")
            seen.append(line)
            line = line[6:] if line.startswith("data: ") else line
            if line and not line.startswith(":") and line != "[DONE]":
                values.append(json.loads(line))
            if values and text_of(values[-1]):
                Remote.arrived.set()
        c.close()
        return r.status, dict(r.getheaders()), values


def body_of(path, name, question="hello", **more):
    if path in CHATS:
        body = {"messages": [{"role": "user", "content": question}]}
    else:
        body = {"prompt": question}
    limit = {"options": {"num_predict": 8, "seed": 3}} if path.startswith("/api") else {"n_predict": 8, "seed": 3} if path == "/completion" else {"max_tokens": 8, "seed": 3}
    return {"model": name, **body, **limit, **more}


def text_of(v):
    """The text of a reply or a part of a stream of any API."""
    choice = (v.get("choices") or [{}])[0]
    text = (choice.get("message") or choice.get("delta") or v.get("message") or {}).get("content")
    return text or choice.get("text") or v.get("response") or v.get("content") or ""


def told(v):
    return v.get("shoal", {}).get("fallback", {})


def chat(name, question="hello", **more):
    return s.post("/v1/chat/completions", body_of("/v1/chat/completions", name, question, **more))


def stream(name, question="hello", **more):
    return s.lines("/v1/chat/completions", body_of("/v1/chat/completions", name, question, **more))


def figure(name, **labels):
    series = s.call("/v1/metrics")[1].get(name, {"series": []})["series"]
    return sum(v["value"] for v in series if all(v["labels"].get(k) == x for k, x in labels.items()))


def circuit(chain, name):
    chains = s.call("/v1/fallbacks")[1]["fallbacks"]
    return next(v for c in chains if c["model"] == chain for v in c["links"] if v["name"] == name)["circuit"]


def until(what, seconds=30):
    end = time.time() + seconds
    while time.time() < end and not what():
        time.sleep(0.05)
    return what()


for i, name in ((1, "a1"), (2, "a2")):
    run("adapter", "new", "--model", model, "--rank", "2", "--seed", str(i), f"{tmp}/new{i}", "--quiet")
    run("adapter", "blend", "--model", model, "--parents", f"{tmp}/new{i}", f"{tmp}/new{i}", "--child", f"{tmp}/{name}",
        "--compat", "legacy", "--mut", "1", "--mut-std", "0.3", "--seed", str(i), "--quiet")
shutil.copytree(model, f"{tmp}/other")
reply = f"  - reply: {SORRY}\n"
chains = {
    "whole": f"links:\n  - model: expert\n  - model: second\n    name: base-two\n{link('cloud')}{reply}",
    "plain": f"links:\n  - model: missing\n  - model: fry-1\n{reply}",
    "cloud": f"links:\n{link('cloud')}{reply}",
    "fixed": f"links:\n{reply}",
    "hasty": f"links:\n{link('hasty', timeout=1)}{reply}",
    "hostile": f"links:\n{link('hostile', timeout=10)}{reply}",
    "failing": f"links:\n{link('failing', threshold=2, cooldown=0.3)}{reply}",
    "local": f"links:\n  - model: expert2\n    failure_threshold: 2\n    cooldown: 0.3\n{reply}",
    "bare": f"links:\n  - model: missing\n{link('bare')}",
    "brief": f"timeout: 1\nlinks:\n{link('brief')}{link('never')}{reply}",
    "many": f"links:\n  - model: missing\n{link('many')}{reply}",
    "pick": f"links:\n  - model: auto\n{reply}",
    "a2": "links:\n  - model: a2\n    timeout: 30\n",
}
for name, text in chains.items():
    write(f"{name}.yaml", text)
shutil.copytree(model, f"{tmp}/second")
s = Server("main", model, f"{tmp}/second", "--exact", "--adapter", f"expert={tmp}/a1", f"a2={tmp}/a2", "--drain-seconds", "1", "--fallback",
           *[f"{tmp}/{name}.yaml" for name in chains])
token = open(f"{tmp}/main/token").read().strip()


def same(v):
    """What replies of one model to one request have in common."""
    return {k: x for k, x in v.items() if k not in ("id", "created", "shoal", "timings", "created_at", "cached")
            and not k.endswith("_duration") and k != "usage"}


def test_each_link_in_turn():
    direct = s.post("/v1/chat/completions", body_of("/v1/chat/completions", "auto"))[2]
    v = chat("pick")[2]
    check("a link that chooses an adapter", same(v) == same(direct) and told(v)["link"] == "auto" and v["shoal"].items() >= direct["shoal"].items(), (v, direct))
    direct = s.post("/v1/chat/completions", body_of("/v1/chat/completions", "expert"))[2]
    status, headers, v = chat("whole")
    check("the first link answers with its reply", status == 200 and same(v) == same(direct) and v["model"] == "expert", (v, direct))
    check("the reply names the link", told(v) == {"model": "whole", "link": "expert", "failed": []} and headers["X-Shoal-Link"] == "expert", (told(v), headers))
    check("the reply can be rated", headers.get("X-Shoal-Reply") == v["id"], headers)
    check("an adapter is unloaded", s.open("/v1/unload_lora_adapter", {"lora_name": "expert"}, key=token).getresponse().status == 200)
    status, headers, v = chat("whole")
    direct = s.post("/v1/chat/completions", body_of("/v1/chat/completions", "second"))[2]
    check("another local model answers", status == 200 and same(v) == same(direct) and told(v)["link"] == "base-two", (v, direct))
    check("the reply names the failed link", [f["link"] for f in told(v)["failed"]] == ["expert"] and "does not exist" in told(v)["failed"][0]["error"], told(v))
    status, headers, v = chat("whole", "one two " * 400)
    check("a prompt that is too long goes to the remote server", status == 200 and told(v)["link"] == "cloud" and text_of(v).startswith("remote cloud: one two"), v)
    check("the remote server gets its model and key", Remote.bodies["cloud"]["model"] == "big" and Remote.keys["cloud"] == f"Bearer {KEY}", Remote.bodies)
    check("a reply of a remote server has its usage and model", (v["usage"]["prompt_tokens"], v["usage"]["completion_tokens"], v["model"]) == (7, 3, "big"), v)
    check("a reply of a remote server has no fingerprint of this one", v["system_fingerprint"] == "", v)
    Remote.mode["cloud"] = "500"
    status, headers, v = chat("whole", "one two " * 400)
    check("the fixed reply is the last link", status == 200 and text_of(v) == SORRY and told(v)["link"] == "reply" and len(told(v)["failed"]) == 3, v)
    Remote.mode["cloud"] = "good"
    check("answers are counted for each link", [figure("shoal_fallback_answers_total", chain="whole", link=n) for n in ("expert", "base-two", "cloud", "reply")] == [1, 1, 1, 1])
    check("failures are counted for each link", [figure("shoal_fallback_failures_total", chain="whole", link=n) for n in ("expert", "base-two", "cloud", "reply")] == [3, 2, 1, 0])


def test_every_api():
    for path in ("/v1/chat/completions", "/v1/completions", "/completion", "/api/chat", "/api/generate"):
        direct = s.post(path, body_of(path, "fry-1"))[2]
        status, _, v = s.post(path, body_of(path, "plain"))
        check(f"{path}: a local link", status == 200 and same(v) == same(direct) and told(v)["link"] == "fry-1", (v, direct))
        status, _, parts = s.lines(path, body_of(path, "plain"))
        check(f"{path}: the stream of a local link", status == 200 and "".join(map(text_of, parts)) == text_of(direct) and told(parts[0])["link"] == "fry-1", parts)
        status, _, v = s.post(path, body_of(path, "cloud"))
        check(f"{path}: a remote link", status == 200 and text_of(v) == "remote cloud: hello" and told(v)["link"] == "cloud", v)
        status, _, parts = s.lines(path, body_of(path, "cloud"))
        check(f"{path}: the stream of a remote link", status == 200 and "".join(map(text_of, parts)) == "remote cloud: hello" and len(parts) > 1
              and told(parts[0])["link"] == "cloud", parts)
        status, _, v = s.post(path, body_of(path, "fixed"))
        check(f"{path}: a fixed reply", status == 200 and text_of(v) == SORRY, v)
        status, _, parts = s.lines(path, body_of(path, "fixed"))
        check(f"{path}: the stream of a fixed reply", status == 200 and "".join(map(text_of, parts)) == SORRY and not any("error" in v for v in parts), parts)
    v = s.post("/api/chat", body_of("/api/chat", "cloud:latest"))[2]
    check("Ollama's tag and counts", v["done"] and v["done_reason"] == "stop" and (v["prompt_eval_count"], v["eval_count"]) == (7, 3), v)
    check("Ollama's settings reach the remote server", Remote.bodies["cloud"]["max_tokens"] == 8 and Remote.bodies["cloud"]["seed"] == 3, Remote.bodies["cloud"])
    v = s.post("/api/chat", {**body_of("/api/chat", "cloud"), "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]})[2]
    check("all messages reach the remote server", Remote.bodies["cloud"]["messages"] == [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}], Remote.bodies["cloud"])
    status, _, v = chat("fixed", n=3, logprobs=True, top_logprobs=2)
    check("a fixed reply answers every request", status == 200 and [c["message"]["content"] for c in v["choices"]] == [SORRY] * 3, v)
    status, _, v = chat("cloud", n=2)
    check("a remote link gives several replies", status == 200 and len({c["message"]["content"] for c in v["choices"]}) == 1 and Remote.bodies["cloud"]["seed"] == 4, v)
    before = Remote.posts["cloud"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    for what, more in (("tools", {"tools": tools, "tool_choice": "required"}), ("a schema", {"response_format": {"type": "json_object"}}), ("log-probabilities", {"logprobs": True})):
        v = chat("cloud", **more)[2]
        check(f"a remote link is not asked for {what}", text_of(v) == SORRY and "a remote link cannot" in told(v)["failed"][0]["error"], v)
    check("nothing is sent for them", Remote.posts["cloud"] == before and circuit("cloud", "cloud") == "closed", Remote.posts)
    v = chat("a2")[2]
    check("a chain with the name of an adapter", told(v)["link"] == "a2" and same(v) == same(chat("fry-1:a2")[2] | {"model": "a2"}), v)
    check("a healthy remote server gets no probe", "cloud" not in Remote.gets, Remote.gets)


def test_lists():
    ids = [m["id"] for m in s.call("/v1/models")[1]["data"]]
    check("chains are models", set(chains) <= set(ids) and ids.count("a2") == 1, ids)
    check("a chain is a model", s.call("/v1/models/cloud")[1]["id"] == "cloud")
    v = next(c for c in s.call("/v1/fallbacks")[1]["fallbacks"] if c["model"] == "whole")
    check("the list of chains", [(x["name"], x["kind"]) for x in v["links"]] == [("expert", "local"), ("base-two", "local"), ("cloud", "remote"), ("reply", "reply")]
          and v["timeout"] == 300, v)


def test_wrong_requests():
    before = Remote.posts.get("cloud", 0)
    status, headers, v = chat("plain", temperature=-1)
    check("a wrong request is refused by the first link that works", status == 400 and "temperature" in v["error"]["message"], v)
    status, _, v = s.post("/v1/chat/completions", {"model": "cloud", "messages": "no"})
    check("a wrong request is not sent to a remote server", status == 400 and Remote.posts.get("cloud", 0) == before, v)
    status, _, v = chat("nobody")
    check("a name that is no chain is unknown", status == 404, v)


def test_hostile_servers():
    for mode, says in (("500", "status 500"), ("400", "status 400"), ("429", "status 429"), ("denied", "refuses the key"), ("redirect", "status 307"), ("broken", "response"),
                       ("other", "choices[0]"), ("deep", "response"), ("endless", "more than"), ("leak", "contains the API key"), ("late", "overloaded")):
        Remote.mode["hostile"] = mode
        status, _, v = chat("hostile")
        check(f"a remote reply: {mode}", status == 200 and text_of(v) == SORRY and says in told(v)["failed"][0]["error"], v)
        status, _, parts = stream("hostile")
        text = "".join(map(text_of, parts))
        if mode == "leak":  # its beginning is sent before the key arrives
            check("a stream that leaks the key ends with an error", text == "the key is " and "error" in parts[-1] and KEY not in json.dumps(parts), parts)
        else:
            check(f"a remote stream: {mode}", status == 200 and text == SORRY and told(parts[0])["link"] == "reply", parts)
    check("a redirect is not followed", "trap" not in Remote.posts and "trap" not in Remote.gets, Remote.posts)
    for mode, text in (("part", "half an "), ("long", None)):
        Remote.mode["hostile"] = mode
        status, headers, parts = stream("hostile")
        got = "".join(map(text_of, parts))
        check(f"a stream that breaks ends with an error: {mode}", status == 200 and headers["X-Shoal-Link"] == "hostile" and "error" in parts[-1]
              and (got == text if text else 1000 < len(got) <= 1 << 18), (parts[-1], len(got)))
    check("broken streams are failures", figure("shoal_fallback_failures_total", chain="hostile", link="hostile") == 11 + 11 + 2, figure("shoal_fallback_failures_total", chain="hostile"))
    Remote.mode["hostile"] = "unasked"
    v = chat("hostile")[2]
    check("a server that streams a whole reply", text_of(v) == "an unasked stream" and told(v)["link"] == "hostile" and v["usage"]["completion_tokens"] == 3, v)
    v = chat("hostile", "leak")[2]
    check("its stream must not contain the key", text_of(v) == SORRY and "contains the API key" in told(v)["failed"][0]["error"], v)
    Remote.mode["hasty"] = "silent"
    v = chat("hasty")[2]
    check("a link that is too slow fails", text_of(v) == SORRY and "in time" in told(v)["failed"][0]["error"], v)
    parts = stream("hasty")[2]
    check("a stream without a first part fails", "".join(map(text_of, parts)) == SORRY, parts)
    Remote.mode["hasty"] = "stuck"
    parts = stream("hasty")[2]
    check("a stream that gets stuck ends with an error", "".join(map(text_of, parts)) == "half an " and "too long" in parts[-1]["error"]["message"], parts)
    check("the connection to the slow server ends", until(lambda: Remote.gone.get("hasty", 0) == 3), Remote.gone)
    Remote.mode["brief"] = "silent"
    began = time.time()
    v = chat("brief")[2]
    check("the time of the chain ends its links, but not the fixed reply", text_of(v) == SORRY and time.time() - began < 15 and "never" not in Remote.posts
          and "the time of the chain is over" in told(v)["failed"][1]["error"], v)


def test_no_link():
    Remote.mode["bare"] = "500"
    missing = figure("shoal_requests_rejected_total", reason="missing")
    status, headers, v = chat("bare")
    check("an attempt that failed is not counted as a request", figure("shoal_requests_rejected_total", reason="missing") == missing)
    check("without an answer the reply is 503", status == 503 and v["error"]["code"] == "no_link" and headers["Retry-After"] == "1"
          and "'missing'" in v["error"]["message"] and "status 500" in v["error"]["message"], (headers, v))
    check("so is that of a stream", s.open("/v1/chat/completions", body_of("/v1/chat/completions", "bare", stream=True)).getresponse().status == 503)
    status, _, v = s.post("/api/chat", body_of("/api/chat", "bare"))
    check("Ollama's form of it", status == 503 and isinstance(v["error"], str), v)


def test_circuit_of_a_remote_link():
    Remote.mode["failing"] = "500"
    for _ in range(2):
        chat("failing")
    posts = Remote.posts["failing"]
    v = chat("failing")[2]
    check("an open circuit keeps requests away", posts == 2 and Remote.posts["failing"] == 2 and "circuit is open" in told(v)["failed"][0]["error"], (posts, v))
    check("its state is reported", circuit("failing", "failing") in ("open", "half-open") and figure("shoal_fallback_circuit_state", chain="failing", link="failing") > 0)
    check("the server is probed again and again", until(lambda: Remote.gets.get("failing", 0) >= 3), Remote.gets)
    check("a failed probe leaves it open", circuit("failing", "failing") != "closed" and Remote.posts["failing"] == 2)
    Remote.mode["failing"] = "good"
    check("a probe that succeeds closes it", until(lambda: circuit("failing", "failing") == "closed"))
    v = chat("failing")[2]
    check("then the link answers", told(v)["link"] == "failing" and figure("shoal_fallback_circuit_state", chain="failing", link="failing") == 0, v)
    log = open(f"{tmp}/main.err").read()
    check("the open circuit is in the log", "the circuit of the link 'failing' is open" in log, log)
    Remote.mode["failing"] = "400"
    for _ in range(4):
        chat("failing")
    check("a refused request is no failure of the server", circuit("failing", "failing") == "closed")
    Remote.mode["failing"] = "part"
    for _ in range(2):
        stream("failing")
    check("broken streams open it", circuit("failing", "failing") != "closed" or Remote.gets["failing"] > 3)


def test_circuit_of_a_local_link():
    for _ in range(2):
        chat("local")
    check("the circuit of a local link opens", circuit("local", "expert2") == "open")
    c = s.open("/v1/load_lora_adapter", {"lora_name": "expert2", "lora_path": f"{tmp}/a2"}, key=token)
    check("the adapter is loaded", c.getresponse().status == 200)
    check("a request closes it", until(lambda: told(chat("local")[2])["link"] == "expert2") and circuit("local", "expert2") == "closed")


def test_many():
    expected = text_of(chat("plain", "sort: k b x")[2])

    def one(i):
        if i % 4 == 0:
            return text_of(chat("plain", "sort: k b x")[2]) == expected
        if i % 4 == 1:
            return "".join(map(text_of, stream("plain", "sort: k b x")[2])) == expected
        if i % 4 == 2:
            return text_of(chat("many", f"q{i}")[2]) == f"remote many: q{i}"
        return "".join(map(text_of, stream("many", f"q{i}")[2])) == f"remote many: q{i}"
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        good = list(pool.map(one, range(48)))
    check("12 clients at once get the right replies", all(good), good)
    check("no request remains", s.waits_until_idle())
    Remote.mode["many"] = "held"
    began = time.time()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(chat, "many", f"q{i}") for i in range(11)]
        check("11 requests wait for the remote server", until(lambda: Remote.posts["many"] >= 24 + 11))
        check("other requests do not", text_of(chat("fry-1", "sort: k b x")[2]) == expected)
        Remote.held.set()
        check("then they are answered", [text_of(w.result()[2]) for w in waiting] == [f"remote many: q{i}" for i in range(11)])
    Remote.held.clear()
    posts = Remote.posts["many"]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        waiting = [pool.submit(chat, "many", f"q{i}") for i in range(40)]
        check("32 requests wait for the remote server", until(lambda: Remote.posts["many"] == posts + 32 and sum(w.done() for w in waiting) == 8))
        Remote.held.set()
        codes = [w.result()[0] for w in waiting]
    check("further ones find no room", codes.count(200) == 32 and codes.count(503) == 8, codes)
    Remote.mode["many"] = "500"
    v = chat("many")[2]
    check("then the fixed reply answers again", text_of(v) == SORRY, v)
    Remote.mode["many"] = "good"


def test_clients_that_leave():
    Remote.mode["cloud"] = "silent"
    before = Remote.gone.get("cloud", 0)
    for more in ({}, {"stream": True}):
        c = s.open("/v1/chat/completions", body_of("/v1/chat/completions", "cloud", **more))
        posts = Remote.posts["cloud"]
        until(lambda: Remote.posts["cloud"] > posts)
        c.close()
    check("the requests of clients that leave are ended", until(lambda: Remote.gone.get("cloud", 0) == before + 2), Remote.gone)
    Remote.mode["cloud"] = "stuck"
    c, events = s.stream("/v1/chat/completions", body_of("/v1/chat/completions", "cloud"))
    next(events)
    c.close()
    check("so are their streams", until(lambda: Remote.gone.get("cloud", 0) == before + 3), Remote.gone)
    check("it is no failure of the server", circuit("cloud", "cloud") == "closed")
    Remote.mode["cloud"] = "good"
    c, events = s.stream("/v1/chat/completions", body_of("/v1/chat/completions", "plain", max_tokens=900, ignore_eos=True, loop_tokens=0))
    next(events)
    c.close()
    check("a local link ends with its client", s.waits_until_idle())


def test_busy_local_links():
    quick = write("quick.yaml", f"links:\n  - model: fry-1\n    timeout: 0.3\n    failure_threshold: 100\n{reply}")
    calm = write("calm.yaml", f"links:\n  - model: fry-1\n    failure_threshold: 100\n{reply}")
    busy = Server("busy", model, "--max-num-seqs", "1", "--max-waiting", "1", "--max-model-len", "512", "--context-shift", "--fallback", quick, calm)
    path, long = "/v1/chat/completions", {"max_tokens": 1000000, "ignore_eos": True, "loop_tokens": 0}
    v = busy.post(path, body_of(path, "quick", **long))[2]
    check("a local link that is too slow fails", text_of(v) == SORRY and "in time" in told(v)["failed"][0]["error"], v)
    check("its work ends", busy.waits_until_idle())
    streams = [busy.stream(path, body_of(path, "fry-1", **long)) for _ in range(2)]
    check("one request runs and one waits", until(lambda: busy.running() == 2))
    v = busy.post(path, body_of(path, "calm"))[2]
    check("a local link whose queue is full fails", text_of(v) == SORRY and "wait" in told(v)["failed"][0]["error"], v)
    for c, _ in streams:
        c.close()
    check("the queue is empty again", busy.waits_until_idle())
    v = busy.post(path, body_of(path, "calm"))[2]
    check("then the link answers", told(v)["link"] == "fry-1", v)


def test_refused_files():
    ok = write("ok.yaml", "links: [{model: fry-1}]\n")
    cases = [("no variable", f"links:\n{link('x').replace('REMOTE_KEY', 'NO_SUCH_KEY')}", "NO_SUCH_KEY"),
             ("an address with a password", "links: [{model: m, url: 'http://u:p@localhost/v1'}]\n", "without a user name"),
             ("an unknown key", "links: [{model: m, secret: x}]\n", "secret")]
    for what, text, says in cases:
        r = subprocess.run([shoal, "serve", model, "--port", "0", "--state", f"{tmp}/refused", "--fallback", write("bad.yaml", text)], capture_output=True, text=True, timeout=60)
        check(f"{what} is refused at the start", r.returncode in (1, 2) and says in r.stderr and "u:p" not in r.stderr, (r.returncode, r.stderr))
    r = subprocess.run([shoal, "serve", model, "--port", "0", "--state", f"{tmp}/refused", "--fallback", f"x={ok}", f"x={ok}"], capture_output=True, text=True, timeout=60)
    check("two chains of one name are refused", r.returncode in (1, 2) and "another chain has the name 'x'" in r.stderr, r.stderr)


try:
    test_each_link_in_turn()
    test_every_api()
    test_lists()
    test_wrong_requests()
    test_hostile_servers()
    test_no_link()
    test_circuit_of_a_remote_link()
    test_circuit_of_a_local_link()
    test_many()
    test_clients_that_leave()
    test_busy_local_links()
    test_refused_files()
except Exception:
    check("no exception", False, traceback.format_exc())
seen += [json.dumps(s.call(path)[1]) for path in ("/v1/metrics", "/v1/fallbacks", "/v1/models", "/v1/traces")]
Remote.mode["cloud"] = "silent"
posts = Remote.posts["cloud"]
s.open("/v1/chat/completions", body_of("/v1/chat/completions", "cloud"))
until(lambda: Remote.posts["cloud"] > posts)
s.p.send_signal(signal.SIGTERM)
check("the server ends while a link hangs", s.p.wait(60) == 0, open(f"{tmp}/main.err").read())
seen.append(open(f"{tmp}/main.err").read())
check("the key is in no reply, log or metric", not any(KEY in text for text in seen), [t for t in seen if KEY in t])
check("nor is a part of it", not any(KEY[:14] in text for text in seen), [t for t in seen if KEY[:14] in t])
sys.exit(1 if failed else 0)
END
