#!/bin/sh
# test_auto: the model "auto", which chooses an adapter by the prompt: each method, in every protocol and in streams; the reply
# equals that of the chosen adapter by its name; scores do not depend on batch or threads; usage, metrics, disconnects, refused
# requests and options. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip auto: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export SHOAL_CONFIG='' HOME="$tmp"
SHOAL=${SHOAL:-build/shoal} TMP_DIR=$tmp python3 - <<'END'
import concurrent.futures, http.client, json, os, subprocess, sys, traceback

sys.path.insert(0, "test/api")
import server
from server import check, failed, run

shoal, tmp, model = server.SHOAL, server.TMP, "models/fry"
NAMES = ["sums", "sorts", "plain"]
QUESTIONS = {"sums": ["7294 + 6 = ?", "12加5等于？"], "sorts": ["sort: k b x", "降順：p n q b"], "plain": ["tell me of ships"]}
PROMPTS = [q for qs in QUESTIONS.values() for q in qs]

for i, name in enumerate(NAMES):
    run("adapter", "new", "--model", model, "--rank", "2", "--seed", str(i), f"{tmp}/{name}.new", "--quiet")
    run("adapter", "blend", "--model", model, "--parents", f"{tmp}/{name}.new", f"{tmp}/{name}.new", "--child", f"{tmp}/{name}",
        "--compat", "legacy", "--mut", "1", "--mut-std", "0.3", "--seed", str(i), "--quiet")
for name, task in (("sums", "arithmetic"), ("sorts", "order")):
    run("model", "data", "--tasks", task, "--n", "60", "--seed", "1", f"{tmp}/{task}.jsonl", "--quiet")
    run("adapter", "profile", f"{tmp}/{name}", f"{tmp}/{task}.jsonl")
with open(f"{tmp}/team.yaml", "w") as f:
    f.write("chain-of-thought: false\nagents:\n  - {name: fry, adapter: base}\n" + "".join(f"  - {{name: {n}, adapter: {tmp}/{n}}}\n" for n in NAMES))
run("team", "fit", f"{tmp}/team.yaml", "--exact", "--quiet", "--tasks", "arithmetic,order", "--n", "60", "--accept", "--out", f"{tmp}/routed.yaml",
    "--store", f"{tmp}/calls.db")


class Server(server.Server):
    def __init__(self, name, *args, adapters=NAMES):
        super().__init__(name, model, "--exact", "--adapter", *[f"{n}={tmp}/{n}" for n in adapters], *args)

    def admin(self, path, body):
        c = self.open(path, body, open(f"{tmp}/{self.name}/token").read().strip())
        r = c.getresponse()
        r.read()
        c.close()
        return r.status

    def metric(self, name):
        return {tuple(s["labels"].values()): s["value"] for s in self.call("/v1/metrics")[1][name]["series"]}


def ask(question, name="auto", **more):
    return {"model": name, "messages": [{"role": "user", "content": question}], "seed": 3, "max_tokens": 12, **more}


def chat(s, question, name="auto", **more):
    status, v = s.call("/v1/chat/completions", ask(question, name, **more))
    assert status == 200, v
    return v


def content(v):
    """What the reply by the chosen name must equal."""
    return [v["model"], v["system_fingerprint"], v["choices"]]


def scores(s, question):
    return chat(s, question)["shoal"]["router"]


def refused(name, text, *args, adapters=NAMES):
    r = subprocess.run([shoal, "serve", model, "--exact", "--port", "0", "--state", f"{tmp}/refused", "--adapter", *[f"{n}={tmp}/{n}" for n in adapters],
                        *args], capture_output=True, text=True, timeout=60)
    check(name, r.returncode != 0 and text in r.stderr, (r.returncode, r.stderr))


likely = Server("likely", "--threads", "1")
alike = Server("alike", "--router", "similarity")
routed = Server("routed", "--router", f"{tmp}/routed.router.json")


def test_replies():
    for s, method, candidates in ((likely, "likelihood", ["fry", *NAMES]), (alike, "similarity", NAMES[:2]), (routed, "router", ["fry", *NAMES])):
        for q in PROMPTS:
            v = chat(s, q, logprobs=True, n=2)
            r = v["shoal"]["router"]
            best = max(r["scores"], key=r["scores"].get)  # of equal ones the first
            check(f"{method}: the highest score answers ({q})", r["method"] == method and list(r["scores"]) == candidates and r["model"] == best == v["model"], r)
            check(f"{method}: the reply is that of {best} ({q})", content(v) == content(chat(s, q, best, logprobs=True, n=2)), v)


def test_methods():
    for name in ("sums", "sorts"):
        for q in QUESTIONS[name]:
            check(f"similarity finds what {name} was trained on ({q})", scores(alike, q)["model"] == name)
    likelihoods = scores(likely, PROMPTS[0])
    for name, value in likelihoods["scores"].items():
        v = chat(likely, PROMPTS[0], name, prompt_logprobs=0)
        each = [next(iter(t.values()))["logprob"] for t in v["prompt_logprobs"] if t]
        check(f"the likelihood under {name} is the mean of its log-probabilities", abs(sum(each) / len(each) - value) < 1e-5, (each, value))
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "sort: k b x"}, {"role": "assistant", "content": "b k x"},
            {"role": "user", "content": "7294 + 6 = ?"}]
    v = alike.call("/v1/chat/completions", {"model": "auto", "messages": talk, "max_tokens": 4})[1]
    check("the last message of the user decides", v["model"] == "sums", v)


def test_usage():
    v = chat(likely, "sort: z c m a")
    plain, r, u = chat(likely, "sort: z c m a", v["model"])["usage"], v["shoal"]["router"], v["usage"]
    n = plain["prompt_tokens"]
    check("usage counts the prefills of all candidates", r["prompt_tokens"] == 4 * n and u["prompt_tokens"] == 5 * n
          and u["completion_tokens"] == plain["completion_tokens"], (r, u, plain))
    check("the reply reuses the prefill of the chosen adapter", u["prompt_tokens_details"]["cached_tokens"] == n - 1, u)
    v = chat(alike, "sort: z c m a")
    check("similarity needs no prefill", v["shoal"]["router"]["prompt_tokens"] == 0 and v["usage"]["prompt_tokens"] == n, v)
    before = likely.metric("shoal_router_choices_total")
    chosen = chat(likely, PROMPTS[2])["model"]
    key = ("base" if chosen == "fry" else chosen, "likelihood")
    check("a metric counts the choices", likely.metric("shoal_router_choices_total")[key] == before.get(key, 0) + 1, before)


def test_streams():
    for s in (likely, alike):
        whole = chat(s, PROMPTS[0])
        c, events = s.stream("/v1/chat/completions", ask(PROMPTS[0]))
        got = [data for _, data in events]
        c.close()
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in got[:-1])
        last = got[-2]
        check(f"{s.name}: a stream has the reply", text == whole["choices"][0]["message"]["content"] and last["model"] == whole["model"], got)
        check(f"{s.name}: its last chunk has the choice", last["shoal"]["router"]["model"] == whole["model"]
              and list(last["shoal"]["router"]["scores"]) == list(whole["shoal"]["router"]["scores"]) and not any("shoal" in e for e in got[:-2]), got)


def test_protocols():
    q, options = PROMPTS[2], {"temperature": 0, "num_predict": 8}
    for s in (likely, alike):
        best = scores(s, q)["model"]
        for path, body, same in (
                ("/v1/completions", {"prompt": q, "max_tokens": 8, "temperature": 0}, lambda v: v["choices"]),
                ("/completion", {"prompt": q, "n_predict": 8, "temperature": 0}, lambda v: v["content"]),
                ("/api/chat", {"messages": [{"role": "user", "content": q}], "stream": False, "options": options}, lambda v: v["message"]),
                ("/api/generate", {"prompt": q, "stream": False, "options": options}, lambda v: v["response"])):
            status, v = s.call(path, {"model": "auto", **body})
            check(f"{s.name}: {path} chooses", status == 200 and v["shoal"]["router"]["model"] == v["model"], v)
            check(f"{s.name}: {path} replies as the chosen one", same(v) == same(s.call(path, {"model": v["model"], **body})[1]), v)
        check(f"{s.name}: Ollama's chat has the choice of OpenAI's", s.call("/api/chat", {"model": "auto", **{
            "messages": [{"role": "user", "content": q}], "stream": False, "options": options}})[1]["model"] == best)
    ids = likely.call("/tokenize", {"content": q})[1]["tokens"]
    ids = [t["id"] if isinstance(t, dict) else t for t in ids]
    status, v = alike.call("/v1/completions", {"model": "auto", "prompt": ids, "max_tokens": 4})
    check("tokens are a prompt", status == 200 and v["model"] == "sorts", v)


def test_determinism():
    two = Server("two", "--threads", "2")
    alone = {q: scores(likely, q) for q in PROMPTS}
    check("scores do not depend on the threads", all(scores(two, q) == alone[q] for q in PROMPTS))
    for s in (likely, two):
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            many = list(pool.map(lambda q: (q, scores(s, q)), PROMPTS * 8))
        check(f"{s.name}: nor on 12 clients at once", all(r == alone[q] for q, r in many), many[:3])
    narrow = Server("narrow", "--max-num-seqs", "1")
    check("nor on the size of the batch", all(scores(narrow, q) == alone[q] for q in PROMPTS))


def test_lists():
    ids = [m["id"] for m in likely.call("/v1/models")[1]["data"]]
    check("auto is a model", ids == ["fry", *NAMES, "auto"] and likely.call("/v1/models/auto")[1].get("id") == "auto", ids)
    one = Server("one", adapters=NAMES[:1])
    check("with one adapter it is not", "auto" not in [m["id"] for m in one.call("/v1/models")[1]["data"]]
          and one.call("/v1/chat/completions", ask("x"))[0] == 404)
    asked = Server("asked", "--router", "likelihood", adapters=NAMES[:1])
    check("unless --router was given", list(scores(asked, "sort: b a")["scores"]) == ["fry", "sums"])
    none = Server("none", "--router", "none")
    check("--router none", "auto" not in [m["id"] for m in none.call("/v1/models")[1]["data"]] and none.call("/v1/models/auto")[0] == 404)
    bare = Server("bare", "--router", "similarity", adapters=NAMES[2:])
    v = chat(bare, "sort: b a")
    check("without a profile the base answers", v["model"] == "fry" and v["shoal"]["router"]["scores"] == {"fry": None}, v)
    status = bare.admin("/v1/load_lora_adapter", {"lora_name": "sorts", "lora_path": f"{tmp}/sorts"})
    check("an adapter that is loaded later is a candidate", scores(bare, "sort: b a")["scores"].keys() == {"sorts"}, status)
    usual = Server("usual", adapters=NAMES[:2])
    v = scores(usual, "sort: b a")
    check("by default similarity chooses among adapters with profiles", v["method"] == "similarity" and v["model"] == "sorts", v)
    usual.admin("/v1/load_lora_adapter", {"lora_name": "plain", "lora_path": f"{tmp}/plain"})
    check("else likelihood", scores(usual, "sort: b a")["method"] == "likelihood")
    own = Server("own", "--served-model-name", "auto")
    check("a model of this name is not replaced", chat(own, "sort: b a")["model"] == "auto" and "shoal" not in chat(own, "sort: b a"))


def test_training():
    data, out = f"{tmp}/order.jsonl", f"{tmp}/trained"
    profile = f"{out}/prompt_profile.json"
    train = ["train", model, "--quiet", "--out", out, "--runs", f"{tmp}/runs", "--max-steps", "1", "--r", "2", "--data"]
    run(*train, data)
    check("training stores the profile of its data", open(profile).read() == open(f"{tmp}/sorts/prompt_profile.json").read())
    run(*train, "fry:copy", "--method", "rloo")
    check("but not of generated data", not os.path.exists(profile))


def test_refusals():
    for path, body, text in (("/v1/completions", {"prompt": ["a", "b"]}, "one prompt"), ("/v1/embeddings", {"input": "a"}, "auto"),
                             ("/v1/ask", {"question": "why?"}, "does not exist")):
        status, v = likely.call(path, {"model": "auto", **body})
        check(f"refused: {path}", status in (400, 404) and text in v["error"]["message"], v)
    status, v = likely.call("/v1/chat/completions", ask("tell " * 20000))
    check("refused: a prompt that is too long", status == 400 and v["error"]["code"] == "context_length_exceeded", v)
    small = Server("small", "--max-waiting", "3")
    status, v = small.call("/v1/chat/completions", ask("sort: b a"))
    check("refused: a queue that is too short for the candidates", status == 400 and "--max-waiting" in v["error"]["message"], v)
    refused("refused: a file that is no router", "--router", "--router", f"{tmp}/team.yaml")
    refused("refused: an unknown method", "likelihood, similarity", "--router", "guess")
    with open(f"{tmp}/other.json", "w") as f:
        v = json.load(open(f"{tmp}/routed.router.json"))
        v["agents"] = ["a", "b", "c", "d"]
        json.dump(v, f)
    refused("refused: a router of other agents", "no agent of the router", "--router", f"{tmp}/other.json")
    for i in range(17):
        likely.admin("/v1/load_lora_adapter", {"lora_name": f"more{i}", "lora_path": f"{tmp}/plain"})
    status, v = likely.call("/v1/chat/completions", ask("sort: b a"))
    check("refused: likelihood of too many adapters", status == 400 and "at most 16" in v["error"]["message"], v)
    for i in range(17):
        likely.admin("/v1/unload_lora_adapter", {"lora_name": f"more{i}"})
    with open(f"{tmp}/plain/prompt_profile.json", "w") as f:
        f.write('{"format": "shoal-prompt-profile-1", "questions": 1, "sum": [1e999]}')
    broken = Server("broken", "--router", "similarity")
    check("an adapter with a broken profile is no candidate", list(scores(broken, "sort: b a")["scores"]) == NAMES[:2])
    check("the log has the reason", "prompt_profile.json" in open(f"{tmp}/broken.err").read())
    os.remove(f"{tmp}/plain/prompt_profile.json")


def test_disconnects():
    long = "tell me of ships and of the sea " * 40
    for _ in range(12):
        c = likely.open("/v1/chat/completions", ask(long, max_tokens=200))
        c.close()
    check("disconnected clients leave no work", likely.waits_until_idle())
    check("and the server answers", scores(likely, PROMPTS[0])["model"] in ["fry", *NAMES])


def test_keys():
    with open(f"{tmp}/key", "w") as f:
        f.write("secret-of-the-test-0123456789\n")
    s = Server("keyed", "--api-key-file", f"{tmp}/key")
    check("a key is needed", s.call("/v1/chat/completions", ask("sort: b a"))[0] == 401)
    status, v = s.call("/v1/chat/completions", ask("sort: b a"), key="secret-of-the-test-0123456789")
    check("and enough", status == 200 and v["shoal"]["router"], v)


for test in (test_replies, test_methods, test_usage, test_streams, test_protocols, test_determinism, test_lists, test_training, test_refusals, test_disconnects, test_keys):
    try:
        test()
    except Exception:
        check(test.__name__, False, traceback.format_exc()[-600:])
for s in (likely, alike, routed):
    s.p.terminate()
    check(f"the server {s.name} ends", s.p.wait(timeout=60) == 0)
sys.exit(bool(failed))
END
