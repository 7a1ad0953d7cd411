#!/bin/sh
# test_ab: A/B experiments and feedback as clients and operators use them: a server, three adapters that answer
# differently, ratings by a rule, kill -9 and restarts, and feedback as data for 'shoal train'. Prints "ok NAME", "not
# ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip ab: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
SHOAL=${SHOAL:-build/shoal} TMP_DIR=$tmp python3 - <<'END'
import atexit, http.client, json, os, signal, sqlite3, subprocess, sys, threading, traceback, urllib.parse

shoal, tmp, model = os.environ["SHOAL"], os.environ["TMP_DIR"], "test/models/fry-1"
failed = []


def check(name, good, why=""):
    print(f"ok {name}" if good else f"not ok {name}: {why}", flush=True)
    if not good:
        failed.append(name)


def run(*args):
    return subprocess.run([shoal, *args], capture_output=True, text=True)


class Server:
    def __init__(self, state, *more, adapters=("m=a", "n=c", "b=b", "c=c")):
        self.state = f"{tmp}/{state}"
        named = [f"{x.split('=')[0]}={tmp}/{x.split('=')[1]}" for x in adapters]
        self.errors = open(f"{tmp}/{state}.err", "a+", errors="replace")
        self.process = subprocess.Popen([shoal, "serve", model, "--json", "--quiet", "--port", "0", "--threads", "1",
                                         "--state", self.state, "--adapter", *named, *more],
                                        stdout=subprocess.PIPE, stderr=self.errors, text=True)
        atexit.register(self.process.kill)  # has no effect if the process has ended
        line = self.process.stdout.readline()
        self.address = urllib.parse.urlparse(json.loads(line)["listening"]).netloc if line else None
        self.token = open(json.loads(line)["token_file"]).read().strip() if line else None

    def call(self, method, path, body=None, key=None):
        c = http.client.HTTPConnection(self.address, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or self.token}"}
        c.request(method, path, None if body is None else json.dumps(body), headers)
        r = c.getresponse()
        data = r.read()
        c.close()
        try:
            v = json.loads(data)
        except ValueError:
            v = data.decode()
        return r.status, v, r.getheader("X-Shoal-AB")

    def chat(self, name, key=None, question="what is 3 plus 4?", **more):
        """Returns (id, text, arm): arm is "EXPERIMENT/a", "EXPERIMENT/b", or None outside of experiments. After an error
        (None, body, status)."""
        body = {"model": name, "max_tokens": 12, "temperature": 0,
                "messages": [{"role": "user", "content": question}], **more}
        status, v, arm = self.call("POST", "/v1/chat/completions", body, key)
        if status != 200:
            return None, v, status
        if more.get("stream"):
            parts = [json.loads(x[6:]) for x in v.split("\n") if x.startswith("data: {")]
            text = "".join(p["choices"][0]["delta"].get("content", "") for p in parts)
            return parts[0]["id"], text, arm
        return v["id"], v["choices"][0]["message"]["content"], arm

    def rate(self, id, rating=None, key=None, **more):
        body = {"id": id, **more}
        if rating is not None:
            body["rating"] = rating
        return self.call("POST", "/v1/feedback", body, key)[:2]

    def experiment(self, name):
        return self.call("GET", f"/v1/ab/{name}")[1]

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.errors.close()

    def log_text(self):
        self.errors.flush()
        return open(self.errors.name, errors="replace").read()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait()
        self.errors.close()
        return code


def rate_until_decided(s, name, model_name, rule, max_requests):
    """Sends requests to a model and rates the replies by rule(side, index of the request) until the experiment `name`
    ends, at most max_requests. Returns the number of requests, and (id, text, arm) of each reply."""
    replies = []
    for i in range(max_requests):
        id, text, arm = s.chat(model_name, stream=i % 3 == 2)
        replies.append((id, text, arm))
        if arm is None:
            break
        status, v = s.rate(id, rule(arm[-1], i))
        if status != 200:
            check("a rating is accepted", False, v)
        if s.experiment(name)["state"] != "running":
            break
    return i + 1, replies


def experiments(s, answers):
    refused = [({"name": "x", "model": "m", "b": "nobody"}, 404), ({"name": "x", "model": "m", "b": "m"}, 400),
               ({"name": "x", "model": "fry-1", "b": "b"}, 400), ({"name": "x/y", "model": "m", "b": "b"}, 400),
               ({"model": "m", "b": "b"}, 400), ({"name": "x", "model": "m"}, 400),
               ({"name": "x", "model": "m", "b": "b", "share": 0}, 400),
               ({"name": "x", "model": "m", "b": "b", "alpha": 0.9}, 400),
               ({"name": "x", "model": "m", "b": "b*0.5+c*0.5"}, 400),
               ({"name": "x", "model": "m", "b": "b", "max_pairs": 10, "min_pairs": 11}, 400),
               ({"name": "x", "model": "m", "b": "b", "max_pairs": 10 ** 9}, 400)]
    got = [s.call("POST", "/v1/ab", body)[0] for body, _ in refused]
    check("invalid experiments are refused", got == [want for _, want in refused], got)
    check("refused experiments leave no data", s.call("GET", "/v1/ab")[1]["data"] == [])
    status, v, _ = s.call("POST", "/v1/ab", {"name": "first", "model": "fry-1:m", "b": "b"})
    check("an experiment starts", status == 200 and v["state"] == "running" and v["a"] == "m" and v["model"] == "m", v)
    got = [s.call("POST", "/v1/ab", {"name": n, "model": "m", "b": "b"})[0] for n in ("first", "second")]
    check("a second experiment with the same name or on the same model is refused", got == [409, 409], got)
    got = [s.call("GET", "/v1/ab/none")[0], s.call("POST", "/v1/ab/none/stop")[0], s.call("POST", "/v1/ab/first")[0],
           s.call("DELETE", "/v1/ab/none")[0]]
    check("unknown experiments are not found", got == [404] * 4, got)

    users = {u: {s.chat("m", user=f"人{u}")[2] for _ in range(4)} for u in range(24)}
    check("a user always gets the same variant", all(len(v) == 1 for v in users.values()), users)
    check("both variants get users", len(set().union(*users.values())) == 2, users)
    check("a request for b by name is not in the experiment", s.chat("b")[2] is None)

    mine = [s.chat("m", user="mine")[0] for _ in range(2)]
    got = [s.rate(mine[k], r)[1]["counted"] for k, r in ((0, 0.5), (1, 0.5), (0, 0.25))]
    check("one rating per user counts, and can be replaced", got == [True, False, True]
          and sum(s.experiment("first")["outcomes"].values()) == 1, got)
    s.call("DELETE", "/v1/ab/first")
    s.call("POST", "/v1/ab", {"name": "first", "model": "m", "b": "b", "once_per_user": False})
    mine = [s.chat("m", user="mine")[0] for _ in range(2)]
    got = [s.rate(i, 0.5)[1]["counted"] for i in mine]
    check("without once_per_user all ratings count", got == [True, True], got)
    s.call("DELETE", "/v1/ab/first")
    s.call("POST", "/v1/ab", {"name": "first", "model": "m", "b": "b"})

    # A rating can be replaced until the test has used it in a pair.
    sides = {}
    while len(sides) < 2:
        id, text, arm = s.chat("m")
        sides.setdefault(arm[-1], id)
    check("a rating counts", s.rate(sides["a"], 0)[1].get("counted") is True)
    check("a rating that is not in a pair can be replaced", s.rate(sides["a"], 0.5)[0] == 200 and s.experiment("first")["outcomes"] == {"a": 1, "b": 0})
    s.rate(sides["b"], 1)
    v = s.experiment("first")
    check("a pair consists of the last ratings", v["pairs"] == 1 and v["mean"] == {"a": 0.5, "b": 1.0}, v)
    check("a rating that is in a pair is final", [s.rate(sides[k], 0)[0] for k in "ab"] == [409, 409])
    check("a reply with a final rating can get a comment", s.rate(sides["a"], comment="なるほど")[0] == 200)
    bad = [{"rating": 2}, {"rating": -0.5}, {"rating": "good"}, {}, {"correction": ""}, {"comment": 7},
           {"rating": True}, {"correction": "x" * (1 << 20) + "x"}]
    got = [s.call("POST", "/v1/feedback", {"id": sides["a"], **b})[0] for b in bad]
    check("invalid ratings are refused", got == [400] * len(bad), got)
    got = [s.rate(i, 1)[0] for i in ("chatcmpl-nobody", "x", "")] + [s.rate("y" * 100, 1)[0]]
    check("invalid ids are refused", got == [404, 404, 404, 400], got)

    n, replies = rate_until_decided(s, "first", "m", lambda arm, i: 1 if arm == "b" else -1, 200)
    v = s.experiment("first")
    check("b is found better", v["state"] == "decided" and v["decision"] == "b_better", v)
    check("b is found better within 90 requests", n <= 90, n)
    check("the result has pairs, difference, means and e-values", v["pairs"] >= 20 and v["difference"]["lo"] > 0 and v["mean"]["b"] > v["mean"]["a"]
          and v["e_value"]["b_better"] >= v["e_value"]["decides_at"] == 40, v)
    wrong = [r for r in replies if r[1] != answers[{"a": "a", "b": "b"}[r[2][-1]]]]
    check("each variant is answered by its adapter", not wrong and len({r[2] for r in replies}) == 2, wrong[:2])
    check("the name refers to b now", s.chat("m")[1:] == (answers["b"], None), s.chat("m"))
    text = s.call("GET", "/metrics")[1]
    check("metrics", f'shoal_ab_pairs{{experiment="first"}} {v["pairs"]}' in text
          and 'shoal_ab_difference{experiment="first"}' in text and 'shoal_feedback_total{rating="up"}' in text)
    check("ratings after the decision do not count", s.rate(next(i for i, t, a in replies), comment="late")[1]["counted"] is False)
    return v


def restart_keeps(answers, before):
    s = Server("state")
    after = s.experiment("first")
    same = {k: v for k, v in before.items() if k != "requests"} == {k: v for k, v in after.items() if k != "requests"}
    check("the result survives kill -9", same, after)
    check("the restart reports no problem", s.log_text() == "", s.log_text())
    check("the winner serves the name after kill -9", s.chat("m")[1] == answers["b"])
    # The state of a server that was killed after the last outcome and before the decision was stored: the next start
    # decides.
    s.kill()
    db = sqlite3.connect(f"{s.state}/ab.db")
    db.execute("delete from logs where log = 'ab/first' and json_extract(event, '$.op') = 'decided'")
    db.execute("delete from documents where kind = 'promoted'")
    db.commit()
    db.close()
    s = Server("state")
    v = s.experiment("first")
    check("a decision that was not stored is recovered", v["decision"] == "b_better" and v["state"] == "decided"
          and s.chat("m")[1] == answers["b"], v)
    s.call("POST", "/v1/load_lora_adapter", {"lora_name": "m", "lora_path": f"{tmp}/a", "load_inplace": True})
    check("an adapter loaded by hand replaces the winner", s.chat("m")[1] == answers["a"])
    s.kill()
    s = Server("state")
    check("an adapter loaded by hand still replaces the winner after a restart", s.chat("m")[1] == answers["a"])
    return s


def rollback(s, answers):
    # Variant a (m) is not the adapter that the name n refers to. As b is worse, n must refer to the content of a at the
    # end.
    v = s.call("POST", "/v1/ab", {"name": "second", "model": "n", "a": "m", "b": "b", "max_pairs": 500})[1]
    rated = []
    while s.experiment("second")["pairs"] < 8:
        id, text, arm = s.chat("n")
        s.rate(id, 1 if arm[-1] == "a" else 0)
        rated.append(id)
    unrated = s.chat("n")[0]
    before = s.experiment("second")
    s.kill()
    s = Server("state")
    after = s.experiment("second")
    keys = ("state", "outcomes", "pairs", "mean", "difference", "e_value", "created")
    check("kill -9 in the middle loses no rating", {k: before[k] for k in keys} == {k: after[k] for k in keys}, after)
    check("ratings in pairs are final after kill -9", s.rate(rated[0], 0.5)[0] == 409)
    check("a reply that was not rated before kill -9 cannot be rated", s.rate(unrated, 1)[0] == 404)
    n, replies = rate_until_decided(s, "second", "n", lambda arm, i: 1 if arm == "a" else 0, 200)
    v = s.experiment("second")
    check("b is found worse", v["decision"] == "b_worse" and v["difference"]["hi"] < 0, v)
    check("the name serves variant a after the decision", {s.chat("n")[1:] for _ in range(6)} == {(answers["a"], None)}, s.chat("n"))
    check("b is still available by name", s.chat("b")[1] == answers["b"])
    return s


def in_flight(s, answers):
    """A reply in progress when b wins is completed by a."""
    long = {"max_tokens": 400, "ignore_eos": True, "stream": True}
    want = s.chat("m", **long)[1]  # m and n have the same content now
    s.call("POST", "/v1/ab", {"name": "fifth", "model": "n", "b": "b", "min_pairs": 20})
    user = next(u for u in map(str, range(99)) if s.chat("n", user=u)[2] == "fifth/a")
    last = {}
    while s.experiment("fifth")["pairs"] < 19 or len(last) < 2:
        id, text, arm = s.chat("n")
        if s.experiment("fifth")["pairs"] < 19:
            s.rate(id, int(arm[-1] == "b"))
        else:
            last[arm[-1]] = id
    got = []
    long_request = threading.Thread(target=lambda: got.append(s.chat("n", user=user, **long)))
    long_request.start()
    while s.call("GET", "/metrics")[1].count('vllm:num_requests_running{model_name="fry-1",engine="0"} 1') == 0 and not got:
        pass
    for side in last:
        s.rate(last[side], int(side == "b"))
    under_way = not got
    check("b wins during a reply", s.experiment("fifth")["decision"] == "b_better" and s.chat("n")[1] == answers["b"], s.experiment("fifth"))
    long_request.join()
    check("a reply in progress when b wins comes from a until its end", got[0][1:] == (want, "fifth/a") and len(want) > 100, got)
    if not under_way:
        print("skip a reply in progress when b wins: the reply ended before")
    s.kill()
    s = Server("state")
    check("a name that was loaded twice has the last content after a restart", s.chat("n")[1] == answers["b"])
    return s


def consecutive_experiments(s, answers):
    s.call("POST", "/v1/ab", {"name": "third", "model": "c", "b": "b", "max_pairs": 6, "min_pairs": 2})
    ids = [s.chat("c") for _ in range(2)]
    check("an experiment can be stopped", s.call("POST", "/v1/ab/third/stop")[1]["state"] == "stopped")
    check("an experiment can be stopped only once", s.call("POST", "/v1/ab/third/stop")[0] == 409)
    check("the model of a stopped experiment has the original adapter again", s.chat("c")[1:] == (answers["c"], None))
    check("a stopped experiment can be deleted", s.call("DELETE", "/v1/ab/third")[0] == 200 and s.call("GET", "/v1/ab/third")[0] == 404)
    s.call("POST", "/v1/ab", {"name": "third", "model": "c", "b": "b", "max_pairs": 6, "min_pairs": 2, "share": 0.5})
    check("replies of the previous experiment do not count", s.rate(ids[0][0], 1)[1]["counted"] is False)
    n, _ = rate_until_decided(s, "third", "c", lambda arm, i: 0.5, 100)
    v = s.experiment("third")
    check("an experiment can end without a difference", v["decision"] == "no_difference" and v["pairs"] == 6
          and s.chat("c")[1:] == (answers["c"], None), v)
    check("an experiment on the same model may follow",
          s.call("POST", "/v1/ab", {"name": "fourth", "model": "c", "b": "b", "share": 0.9, "max_pairs": 1000})[0] == 200)
    # Concurrent requests: each rating is counted once.
    counted, lock = [], threading.Lock()

    def client(k):
        for i in range(12):
            id, text, arm = s.chat("c", stream=bool(i % 2))
            status, v = s.rate(id, 0.5)
            with lock:
                counted.append((status, v.get("counted"), arm))

    threads = [threading.Thread(target=client, args=(k,)) for k in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    v = s.experiment("fourth")
    b = sum(c[2] == "fourth/b" for c in counted)
    n = {side: sum(c[1] and c[2] == "fourth/" + side for c in counted) for side in "ab"}
    check("ratings from many clients at once", all(c[0] == 200 for c in counted)
          and v["outcomes"] == n and v["pairs"] == min(n.values()), (v, n))
    check("about as many ratings of b count as of a", n["a"] == 72 - b and 0 < n["b"] <= 22, n)  # 7.2 on average of each; 22 is six standard deviations more
    check("the share of traffic is as configured", 48 <= b <= 72, b)  # 64.8 on average, and six standard deviations
    s.kill()
    s = Server("state")
    check("ratings from many clients survive kill -9", s.experiment("fourth")["outcomes"] == v["outcomes"])
    return s


def feedback(s):
    ja = "答えは7です。「3 + 4 = 7」😀\n理由：三と四を足す。"
    turns = [{"role": "system", "content": "短く答えて"}, {"role": "user", "content": [{"type": "text", "text": "三たす四は?"}]},
             {"role": "assistant", "content": "八", "name": "x"}, {"role": "user", "content": "本当に?"}]
    status, v, _ = s.call("POST", "/v1/chat/completions", {"model": "b", "max_tokens": 8, "messages": turns})
    check("a correction in Japanese is accepted", s.rate(v["id"], -1, correction=ja, comment="違う")[0] == 200)
    said = v["choices"][0]["message"]["content"]
    status, v, _ = s.call("POST", "/v1/completions", {"model": "b", "max_tokens": 8, "prompt": "三たす四は"})
    check("a completion can be corrected", s.rate(v["id"], correction="七")[0] == 200)
    status, t, _ = s.call("POST", "/v1/chat/completions", {"model": "b", "max_tokens": 8, "messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "7"}]})
    check("a reply to a tool's result can be corrected", status == 200 and s.rate(t["id"], correction="7")[0] == 200, t)

    rows, after = [], 0
    while True:
        status, page, _ = s.call("GET", f"/v1/feedback?after={after}&limit=50")
        rows += page["data"]
        after = page["last"]
        if not page["has_more"]:
            break
    ids = [r["id"] for r in rows]
    check("the pages together have all feedback", len(ids) == len(set(ids)) > 150 and len(page["data"]) <= 50, len(ids))
    row = rows[-3]
    check("a row has all fields", row["correction"] == ja and row["reply"] == said and row["rating"] == 0 and row["model"] == "b"
          and row["messages"][1]["content"] == "三たす四は?" and row["comment"] == "違う", row)
    got = [s.call("GET", f"/v1/feedback?{q}")[0] for q in ("after=x", "limit=-1", "limit=99999999", "after=")]
    check("invalid parameters of a page are refused", got == [400] * 4, got)
    check("an unknown export form is refused", s.call("GET", "/v1/feedback/export?form=csv")[0] == 400)

    for form, method in (("sft", "sft"), ("preference", "dpo")):
        status, text, _ = s.call("GET", f"/v1/feedback/export?form={form}")
        if not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False)
        lines = [json.loads(x) for x in text.splitlines()]
        check(f"the {form} export has the corrected replies, without the one after a tool call", len(lines) == 2, text[:500])
        path = f"{tmp}/{form}.jsonl"
        with open(path, "w") as f:
            f.write(text)
        r = run("train", model, "--data", path, "--method", method, "--out", f"{tmp}/out", "--dry-run", "--r", "4",
                "--json", "--quiet")
        lint = json.loads(r.stdout)["data"][0]["lint"] if r.returncode == 0 else {}
        check(f"shoal train accepts the {form} export", lint.get("kept") == (2 if form == "sft" else 4), r.stderr[-500:] + r.stdout[:500])
        if form == "sft":
            check("the sft export weights only the correction", lines[0]["messages"][-1] == {"role": "assistant", "content": ja}
                  and lines[0]["messages"][2] == {"role": "assistant", "content": "八", "weight": 0}, lines[0])
            learned = "".join(p["text"] for b in json.loads(r.stdout)["first_batch"] for p in b["parts"] if p["learned"])
            check("shoal train learns only the correction", ja in learned and "八" not in learned, learned)
            check("the sft export of a completion has prompt and completion", lines[1] == {"prompt": "三たす四は", "completion": "七"}, lines[1])
        else:
            check("the preference export has correction and reply", lines[0]["chosen"][0]["content"] == ja
                  and lines[0]["rejected"][0]["content"] == said and len(lines[0]["prompt"]) == 4, lines[0])


def scopes():
    state = f"{tmp}/keyed"
    os.makedirs(state)
    keys = {}
    for name, scope in (("one", "chat"), ("two", "chat"), ("root", "admin")):
        r = run("key", "add", name, "--store", f"{state}/serve.db", "--scope", scope, "--json", "--quiet")
        keys[name] = json.loads(r.stdout)["secret"] if r.returncode == 0 else r.stderr
    s = Server("keyed")
    id, _, _ = s.chat("b", key=keys["one"])
    check("the reply of another key cannot be rated", s.rate(id, 1, key=keys["two"])[0] == 404)
    check("a key can rate its own replies", s.rate(id, 1, key=keys["one"])[0] == 200)
    check("another key cannot rate it after it is stored either", s.rate(id, 0, key=keys["two"])[0] == 404)
    got = [s.call(m, p, key=keys["one"])[0] for m, p in
           (("GET", "/v1/ab"), ("POST", "/v1/ab"), ("GET", "/v1/feedback"), ("GET", "/v1/feedback/export"))]
    check("keys with the scope chat see neither experiments nor feedback", got == [403] * 4, got)
    check("a key with the scope admin sees feedback", s.call("GET", "/v1/feedback", key=keys["root"])[1]["data"][0]["id"] == id)
    check("the server exits with 0", s.end() == 0)


def unusable_state():
    s = Server("none", "--no-feedback")
    id = s.chat("m")[0]
    got = [s.rate(id, 1)[0], s.call("POST", "/v1/ab", {"name": "x", "model": "m", "b": "b"})[0]]
    check("--no-feedback stores nothing", got == [404, 409], got)
    s.end()
    # A running experiment opens its adapters from the paths that it has stored, even if their names now refer to others.
    # If the files are missing too, the name answers without the experiment, and the problem is reported.
    s = Server("state", adapters=("m=a", "n=c", "b=a", "c=c"))
    v = s.experiment("fourth")
    found = v["problem"] is None and s.chat("c")[2] is not None
    check("an experiment opens its adapters from the stored paths", found, v)
    s.kill()
    os.rename(f"{tmp}/b", f"{tmp}/b.away")
    s = Server("state", adapters=("m=a", "n=c", "c=c"))
    v = s.experiment("fourth")
    check("an experiment without its adapters waits", v["state"] == "running" and "b" in (v["problem"] or "") and s.chat("c")[2] is None, v)
    check("an experiment without its adapters is reported", "fourth" in s.log_text())
    s.kill()
    os.rename(f"{tmp}/b.away", f"{tmp}/b")
    db = sqlite3.connect(f"{s.state}/ab.db")
    db.execute("update logs set event = replace(event, '\"side\":', '\"sine\":') where log = 'ab/second' and seq = 4")
    db.commit()
    db.close()
    s = Server("state")
    code = s.process.wait()
    check("a damaged log stops the server, which names the experiment", code == 1 and "event 4 of A/B 'second' is damaged" in s.log_text(), s.log_text()[-400:])


def main():
    for k, name in enumerate("abc"):
        run("adapter", "new", "--model", model, "--rank", "4", "--seed", str(k + 1), f"{tmp}/z{name}", "--quiet")
        r = run("adapter", "blend", "--model", model, "--compat", "legacy", "--parents", f"{tmp}/z{name}", f"{tmp}/z{name}",
                "--child", f"{tmp}/{name}", "--mut", "1", "--mut-std", "0.15", "--seed", str(k + 1), "--quiet")
        if r.returncode:
            check("adapters are created", False, r.stderr)
            return
    s = Server("state")
    answers = {"a": s.chat("m")[1], "b": s.chat("b")[1], "c": s.chat("c")[1]}
    check("three adapters that answer differently", len(set(answers.values())) == 3, answers)
    before = experiments(s, answers)
    s.kill()
    s = restart_keeps(answers, before)
    s = rollback(s, answers)
    s = in_flight(s, answers)
    s = consecutive_experiments(s, answers)
    feedback(s)
    s.kill()
    scopes()
    unusable_state()


try:
    main()
except Exception:
    traceback.print_exc()
    print("not ok ab: the test ended with an exception", flush=True)
    failed.append("test")
sys.exit(bool(failed))
END
