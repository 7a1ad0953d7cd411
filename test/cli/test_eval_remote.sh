#!/bin/sh
# test_eval_remote: 'shoal eval --remote': a server of this program gives the figures of the local model, to the item; a
# hostile server (errors, slow, endless, broken and wrong responses, refused keys, texts with the key) is survived, and
# questions without a reply are reported as failed. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL
# is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip eval --remote: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export SHOAL_CONFIG='' HOME="$tmp"
SHOAL=${SHOAL:-build/shoal} TMP_DIR=$tmp python3 - <<'END'
import http.client, http.server, json, os, subprocess, sys, threading, time, traceback, urllib.parse

sys.path.insert(0, "test/api")
import server
from server import check, failed

shoal, tmp, model = server.SHOAL, server.TMP, "test/models/fry-1"
KEY = "sk-secret-0123456789"
N = 20


def write(name, text):
    with open(f"{tmp}/{name}", "w") as f:
        f.write(text)
    return f"{tmp}/{name}"


def recipe(name, n, grader="exact_match", stop='["\\n"]'):
    """n sums, asked as 'NUMBER: what is …'; the right answer is the sum."""
    lines = [json.dumps({"q": f"{i}: what is {i % 7} + {i % 5}?", "a": str(i % 7 + i % 5)}) for i in range(n)]
    write(f"{name}.jsonl", "\n".join(lines) + "\n")
    return write(f"{name}.yaml", f'file: {name}.jsonl\nquestion: q\nanswer: a\ngrader: {grader}\ntemplate: "{{q}}\\nanswer:"\n'
                                 f"stop: {stop}\nmax_tokens: 24\n")


def evaluate(url, *args, task="quiz.yaml", json_lines=True, key=True):
    """The exit code, the row of the remote model, stdout and stderr."""
    samples = f"{tmp}/samples.jsonl"
    if os.path.exists(samples):
        os.remove(samples)
    extra = (["--json"] if json_lines else []) + (["--remote-key-env", "TEST_KEY"] if key else [])
    r = subprocess.run([shoal, "eval", model, "--exact", "--tasks", f"{tmp}/{task}", "--remote", url, "--log-samples", samples, *extra, *args],
                       capture_output=True, text=True, timeout=120, env={**os.environ, "TEST_KEY": KEY})
    rows = [json.loads(line) for line in r.stdout.splitlines() if line.startswith("{")] if json_lines else []
    row = next((v for v in rows if v.get("kind") == "remote"), None)
    files = "".join(open(f"{tmp}/{f}").read() for f in ("samples.jsonl", "plan.json") if os.path.exists(f"{tmp}/{f}"))
    if KEY in r.stdout + r.stderr + files:
        check("the key is in no output", False, r.stdout + r.stderr)
    return r.returncode, row, r.stdout, r.stderr


def samples():
    """The lines of base and remote model, by question."""
    out = {"base": {}, "remote": {}}
    for line in open(f"{tmp}/samples.jsonl"):
        v = json.loads(line)
        out[v.pop("adapter").split(":")[0]][v["item"]] = v
    return out["base"], out["remote"]


# this program's server

def chat_right(url, name):
    """Right answers of the server in a chat, counted here."""
    c, right = http.client.HTTPConnection(urllib.parse.urlparse(url).netloc, timeout=60), 0
    for line in open(f"{tmp}/{name}.jsonl"):
        v = json.loads(line)
        body = {"model": "fry-1", "messages": [{"role": "user", "content": v["q"] + "\nanswer:"}], "temperature": 0, "max_tokens": 24, "stop": ["\n"]}
        c.request("POST", "/v1/chat/completions", json.dumps(body))
        right += v["a"] in json.loads(c.getresponse().read())["choices"][0]["message"]["content"].split()
    return right


def test_own_server():
    url = f"http://{server.Server('state', model, '--exact').address}"
    recipe("many", 200, grader="number", stop="[]")
    code, row, out, err = evaluate(url, "--remote-api", "completions", "--remote-requests", "8", task="many.yaml", key=False)
    base, remote = samples()
    base_row = json.loads(out.splitlines()[0])
    check("a server of this program gives the same verdicts", code == 0 and len(base) == 200 and base == remote and 0 < row["acc"] < 1, (code, err, out))
    check("its figures are the same", all(row[k] == base_row[k] for k in ("n", "acc", "lo", "hi", "score", "no_answer", "truncated", "prefilled")),
          (row, base_row))
    check("the comparison has no difference", row["difference"]["only_this"] == row["difference"]["only_base"] == 0, row)
    check("the manifest names the server", row["manifest"]["remote"] == {"url": url + "/v1", "model": "fry-1", "api": "completions", "reproducible": False}
          and row["manifest"]["model"] is None, row["manifest"])
    recipe("words", 60, grader="f1")
    code, row, out, err = evaluate(url, task="words.yaml", key=False)
    scored = sum(v["score"] > 0 for v in samples()[1].values())
    check("a chat has the verdicts of its replies", code == 0 and scored > 0 and scored == chat_right(url, "words") and row["n"] == 60, (scored, row, err))


# a hostile server

class State:
    seen, bodies, headers, running, most, lock = {}, [], [], 0, 0, threading.Lock()

    @classmethod
    def reset(cls):
        cls.seen, cls.bodies, cls.headers, cls.running, cls.most = {}, [], [], 0, 0


def completion(text, **fields):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop", **fields}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


class Hostile(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    counted = 0  # 1: the request is in State.running

    def log_message(self, *args):
        pass

    def request_end(self):
        with State.lock:
            State.running -= self.counted
            self.counted = 0

    def reply(self, status, body, **headers):
        self.request_end()  # before the client can see the reply and send its next request
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for k, v in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(k.replace("_", "-"), v)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        mode = self.path.split("/")[1]
        models = {"two": ["alpha", "beta\x1b[31m"], "none": [], "keyname": [f"m-{KEY}"]}.get(mode, ["m"])
        if mode == "denied":
            return self.reply(401, {"error": {"message": f"bad key {self.headers['Authorization']}"}})
        self.reply(200, {"data": [{"id": name} for name in models]})

    def do_POST(self):
        mode, body = self.path.split("/")[1], json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = int(body["messages"][0]["content"].split(":")[0])
        with State.lock:
            State.bodies.append(body)
            State.headers.append(self.headers["Authorization"])
            self.counted = 1
            State.running += 1
            State.most = max(State.most, State.running)
            count = State.seen[number] = State.seen.get(number, 0) + 1
        try:
            self.answer(mode, number, count, completion(str(number % 7 + number % 5)))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            self.request_end()

    def answer(self, mode, number, count, right):
        if mode == "half":
            time.sleep(0.05)
            return self.reply(200, right if number % 2 else completion("no number"))
        if mode == "busy" and count == 1:
            return self.reply(429, {"error": "slow down"}, Retry_After="2")
        if mode == "drop" and count == 1:
            self.close_connection = True
            return self.connection.shutdown(2)
        if mode == "some" and number % 5 == 0:
            return self.reply(400, {"error": {"message": f"no \x1b[31m{KEY}"}})
        if mode == "down":
            return self.reply(503, {"error": {"message": "over\x1b[31mloaded " + "x" * 100000}})
        if mode == "slow":
            time.sleep(3)
        if mode == "endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b" " * 65536)
        if mode == "text":
            return self.reply(200, b"<html>it works</html>")
        if mode == "deep":
            return self.reply(200, b"[" * 100000)
        if mode == "shape":
            return self.reply(200, [{"choices": 1}, {"choices": []}, {"choices": [{"message": {"content": 5}}]}, {"choices": [{"message": None}]}, [], 3][number % 6])
        if mode == "moved":
            return self.reply(302, b"", Location="http://127.0.0.1:1/")
        if mode == "echo":
            return self.reply(200, completion(f"the key is {KEY}"))
        if mode == "extra":
            numbers = right["choices"][0]["message"]["content"]
            return self.reply(200, completion(numbers + "\n99 or so", finish_reason="length") | {"usage": {"prompt_tokens": -5, "completion_tokens": 1e300}})
        if mode == "empty":
            return self.reply(200, completion(None, finish_reason="length"))
        self.reply(200, right)


def hostile_server():
    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 64

        def handle_error(self, request, client_address):
            pass  # a client that has given up

    hostile = Server(("127.0.0.1", 0), Hostile)
    hostile.daemon_threads = True
    threading.Thread(target=hostile.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{hostile.server_address[1]}"


def test_requests(url):
    State.reset()
    code, row, out, err = evaluate(f"{url}/half/v1/", "--remote-requests", "3", "--seed", "42")
    check("every question is asked once", code == 0 and row["n"] == N and sorted(State.seen.values()) == [1] * N, (err, State.seen))
    check("right answers are counted", row["acc"] == 0.5 and row["no_answer"] == 0 and row["failed"] == 0, row)
    check("tokens are those of the server", (row["calls"], row["prefilled"], row["generated"]) == (N, 7 * N, 3 * N), row)
    first = {k: v for k, v in State.bodies[0].items() if k != "messages"}
    check("fields of a request", first == {"model": "m", "temperature": 0, "seed": 42, "max_tokens": 24, "stream": False, "stop": ["\n"]}, first)
    check("at most N requests at once", State.most == 3, State.most)
    check("the key is sent", set(State.headers) == {f"Bearer {KEY}"}, State.headers[0])
    recipe("stops", 4, stop='["\\n", "a", "b", "c", "d", "e"]')
    State.reset()
    evaluate(f"{url}/half/v1", task="stops.yaml")
    check("no more stop texts than OpenAI accepts", len(State.bodies[0]["stop"]) == 4, State.bodies[0])
    code, row, out, err = evaluate(f"{url}/extra/v1")
    check("a reply ends at a stop text", row["acc"] == 1 and row["truncated"] == 0 and row["prefilled"] == 0 and row["generated"] == 0, row)
    code, row, out, err = evaluate(f"{url}/empty/v1")
    check("an empty reply is a wrong answer", row["acc"] == 0 and row["n"] == N and row["truncated"] == N, row)


def test_failures(url):
    for mode in ("busy", "drop"):
        State.reset()
        start = time.time()
        code, row, out, err = evaluate(f"{url}/{mode}/v1", "--remote-requests", str(N))
        check(f"{mode}: requests are repeated", code == 0 and row["acc"] == 1 and row["failed"] == 0 and row["calls"] == 2 * N, (row, err))
        if mode == "busy":
            check("Retry-After is kept", time.time() - start >= 2, time.time() - start)
    code, row, out, err = evaluate(f"{url}/some/v1")
    base, remote = samples()
    check("failed questions do not count", code == 0 and (row["n"], row["failed"], row["acc"]) == (N - N // 5, N // 5, 1), (row, err))
    check("samples mark failed questions", [i for i, v in remote.items() if v.get("failed")] == [i for i in base if i % 5 == 0], remote)
    check("the warning names the first failed question", "line 1: status 400" in err and f"4 of {N} questions" in err, err)
    code, row, out, err = evaluate(f"{url}/some/v1", json_lines=False)
    check("the table has the failed questions", f"4 of {N} questions failed and are not counted" in out, out)
    reasons = {"slow": "Timeout", "endless": "more than 8388608 bytes", "text": "the response", "deep": "the response", "shape": "has no",
               "moved": "a redirect is not followed", "echo": "contains the API key", "down": "status 503: over"}
    for mode, reason in reasons.items():
        State.reset()
        start = time.time()
        code, row, out, err = evaluate(f"{url}/{mode}/v1", "--remote-retries", "0", "--remote-timeout", "1" if mode == "slow" else "20")
        check(f"{mode}: all questions fail", code == 1 and (row["n"], row["failed"]) == (0, N), (code, row, err))
        check(f"{mode}: stops after 5 failures, with the reason", "failed 5 times in a row" in err and reason in err and len(State.bodies) <= 8 and len(err) < 3000
              and "\x1b" not in err, (len(State.bodies), err))
        check(f"{mode}: in time", time.time() - start < 15, time.time() - start)
    code, row, out, err = evaluate(f"{url}/down/v1", "--remote-retries", "0", json_lines=False)
    check("the local results are printed all the same", "quiz           base " in out, out)


def test_refused(url):
    def refused(name, address, *args, code=2, text="", **kw):
        State.reset()
        got, row, out, err = evaluate(address, *args, **kw)
        check(f"refused: {name}", got == code and out == "" and text in err and not State.bodies and "\x1b" not in err, (got, err))
        return err

    refused("a key that the server does not accept", f"{url}/denied/v1", code=1, text="status 401; the server refuses the key")
    refused("no key", f"{url}/denied/v1", code=1, text="the server wants a key", key=False)
    refused("several models", f"{url}/two/v1", text="--remote-model: alpha, beta")
    refused("no models", f"{url}/none/v1", text="it lists none")
    refused("a model whose name is the key", f"{url}/keyname/v1", text="--remote-model")
    refused("no server", "http://127.0.0.1:1", code=1, text="'http://127.0.0.1:1/v1/models'")
    for address in ("http://user:hunter2@127.0.0.1/v1", "http://127.0.0.1/v1?key=hunter2", "file:///hunter2", "hunter2", "http:///hunter2"):
        err = refused(f"the address {address}", address, text="the address of a server is")
        check("the address is not shown", "hunter2" not in err, err)
    refused("a variable that is not set", url, "--remote-key-env", "NO_SUCH_KEY", text="'NO_SUCH_KEY' is not set", key=False)
    refused("another API", url, "--remote-api", "soap", text="chat or completions")
    write("choices.jsonl", '{"question": "Which?", "choices": ["a", "b"], "answer": 1}\n')
    refused("choices", url, task="choices.jsonl", text="it answers tasks with a grader: gsm8k")
    State.reset()
    code, row, out, err = evaluate(f"{url}/two/v1", "--remote-model", "beta")
    check("a named model", code == 0 and row["adapter"] == "remote:beta" and State.bodies[0]["model"] == "beta", (row, err))


def test_plans(url):
    State.reset()
    code, row, out, err = evaluate("http://127.0.0.1:1", "--dry-run", "--remote-model", "m")
    check("a dry run sends nothing", code == 0 and not State.bodies, err)
    code, row, out, err = evaluate(f"{url}/half/v1", "--freeze", f"{tmp}/plan.json")
    plan = json.load(open(f"{tmp}/plan.json"))
    check("a plan names the server", code == 0 and plan["manifest"]["remote"]["url"] == f"{url}/half/v1" and not State.bodies
          and plan["plan"]["comparisons"] == ["quiz: remote:m - base"], (err, plan))
    code, row, out, err = evaluate(f"{url}/half/v1", "--frozen", f"{tmp}/plan.json")
    check("a plan is kept", json.loads(out.splitlines()[-1])["preregistration"]["kept"], out)
    code, row, out, err = evaluate(f"{url}/half/v1", "--frozen", f"{tmp}/plan.json", "--remote-api", "completions", "--remote-retries", "0")
    items = [v["item"] for v in json.loads(out.splitlines()[-1])["preregistration"]["items"] if not v["kept"]]
    check("another API deviates from a plan", items == ["remote api"], items)


recipe("quiz", N)
address = hostile_server()
for test in (lambda: test_own_server(), lambda: test_requests(address), lambda: test_failures(address), lambda: test_refused(address), lambda: test_plans(address)):
    try:
        test()
    except Exception:
        check("no exception", False, traceback.format_exc()[-1500:])
sys.exit(bool(failed))
END
