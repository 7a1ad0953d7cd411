#!/bin/sh
# test_agents: agents with tools as models of the server: replies and streams, equal to those of 'shoal agent --json' with
# the same file and seed, also of several answers and many clients at once; limits, clients that disconnect, refused
# requests, refused files, tools that need --allow-tool. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines;
# SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip agents: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export SHOAL_CONFIG='' SOURCE_DATE_EPOCH=1790000000 HOME="$tmp"
SHOAL=${SHOAL:-build/shoal} TMP_DIR=$tmp python3 - <<'END'
import concurrent.futures, functools, json, os, signal, subprocess, sys, time, traceback

sys.path.insert(0, "test/api")
import server
from server import check, failed

shoal, tmp, model = server.SHOAL, server.TMP, "models/fry"
run = functools.partial(server.run, timeout=120)


def write(name, text):
    with open(f"{tmp}/{name}", "w") as f:
        f.write(text)
    return f"{tmp}/{name}"


class Server(server.Server):
    def __init__(self, name, *args):
        super().__init__(name, model, "--exact", *args)

    def stream(self, body):
        c, events = super().stream("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
        return c, (data for _, data in events)


def exact(v):
    """Without what depends on the clock and the cache; numbers have the 9 digits that the command line prints."""
    if isinstance(v, dict):
        return {k: exact(x) for k, x in v.items() if k not in ("seconds", "cached", "error")}
    if isinstance(v, list):
        return [exact(x) for x in v]
    return float(f"{v:.9g}") if isinstance(v, float) else v


def of_choice(choice):
    """The run of a choice as 'shoal agent --json' prints it."""
    return exact({**choice["shoal"]["agent"], "answer": choice["message"]["content"]})


def of_command(name, question, seed, *args):
    return exact(json.loads(run("agent", model, "--exact", "--quiet", "--json", "--agent", f"{tmp}/{name}.yaml", "--seed", str(seed), *args, question)))


def ask(name, question, **more):
    return {"model": f"agent:{name}", "messages": [{"role": "user", "content": question}], **more}


def chat(s, body):
    return s.call("/v1/chat/completions", body)


CALLS = "in which room is tom?"  # models/fry calls the clock; the result is that of SOURCE_DATE_EPOCH
for i in (1, 2):
    run("adapter", "new", "--model", model, "--rank", "2", "--seed", str(i), f"{tmp}/new{i}", "--quiet")
    run("adapter", "blend", "--model", model, "--parents", f"{tmp}/new{i}", f"{tmp}/new{i}", "--child", f"{tmp}/a{i}",
        "--compat", "legacy", "--mut", "1", "--mut-std", "0.3", "--seed", str(i), "--quiet")
os.mkdir(f"{tmp}/notes")
write("notes/rooms.txt", "The rooms.\n\nThe room of tom is 217.\n")
run("knowledge", "add", f"{tmp}/k.db", f"{tmp}/notes", "--quiet")
write("helper.yaml", "tools: [calculator, clock]\nmax_tokens: 48\nmax_steps: 4\n")
write("warm.yaml", "system: Answer shortly.\ntools: clock\nform: react\nmax_steps: 3\nmax_tokens: 24\nthought_tokens: 16\ntemperature: 0.9\ntop_k: 20\n")
write("mixed.yaml", "tools: clock\nadapter: [a1=0.7, a2=0.5]\nmax_tokens: 32\n")
write("reader.yaml", "tools: [knowledge, read_file]\nknowledge: k.db\nroot: notes\nform: react\nmax_steps: 2\nmax_tokens: 24\n")
write("bare.yaml", "tools: []\nmax_tokens: 16\n")
write("hasty.yaml", "tools: clock\nmax_seconds: 0.000001\nmax_tokens: 16\n")
write("once.yaml", "tools: clock\nmax_steps: 1\nmax_tokens: 16\n")
write("endless.yaml", "tools: [calculator, clock]\nform: react\nmax_tokens: 2000\nthought_tokens: 500\nmax_seconds: 0\ntemperature: 3\ntop_p: 1\n")
names = ["helper", "warm", "mixed", "reader", "bare", "hasty", "once", "endless"]
s = Server("plain", "--agent", *[f"{tmp}/{n}.yaml" for n in names[1:]], f"helper={tmp}/helper.yaml")


def test_lists():
    status, v = s.call("/v1/agents")
    mine = {a["name"]: a for a in v["agents"]}
    check("agents are listed", status == 200 and sorted(mine) == sorted(names) and mine["helper"]["tools"] == ["calculator", "clock"]
          and mine["warm"]["system"] == "Answer shortly." and mine["warm"]["max_steps"] == 3 and mine["bare"]["tools"] == [], v)
    ids = [m["id"] for m in s.call("/v1/models")[1]["data"]]
    check("agents are models", ids[0] == "fry" and set(ids[1:]) == {f"agent:{n}" for n in names}, ids)
    check("an agent is a model", s.call("/v1/models/agent:warm")[1].get("id") == "agent:warm" and s.call("/v1/models/agent:nobody")[0] == 404)


def test_replies():
    for name, question, seed in (("helper", CALLS, 0), ("helper", "sort: k b x", 3), ("warm", CALLS, 5), ("warm", "12 + 30 = ?", 6), ("mixed", CALLS, 0),
                                 ("reader", CALLS, 0), ("bare", "sort: k b x", 0), ("once", CALLS, 0), ("hasty", CALLS, 0)):
        status, v = chat(s, ask(name, question, seed=seed))
        want = of_command(name, question, seed)
        check(f"the agent {name} ({question}) equals 'shoal agent'", status == 200 and of_choice(v["choices"][0]) == want, (v, want))
        run_, usage = v["choices"][0]["shoal"]["agent"], v["usage"]
        check(f"the usage of {name} ({question}) counts all steps",
              usage["prompt_tokens"] == sum(x["prefilled"] for x in run_["steps"]) == run_["prefilled"] > 0
              and usage["completion_tokens"] == sum(x["generated"] for x in run_["steps"]) > 0
              and usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
              and usage["prompt_tokens_details"]["cached_tokens"] == run_["cached"], usage)
    first = chat(s, ask("helper", CALLS))[1]["choices"][0]
    steps = first["shoal"]["agent"]["steps"]
    check("a call and its result are steps", len(steps) == 2 and steps[0]["tool"] == "clock" and steps[0]["arguments"] == {}
          and steps[0]["observation"].startswith("2026-09-21 ") and steps[1]["tool"] is None, steps)
    check("they are the reasoning", first["message"]["reasoning_content"] == f"call: clock {{}} (probability {steps[0]['probabilities']['clock']:.3f})\n"
          f"result: {steps[0]['observation']}\n", first)
    check("the limit of steps", chat(s, ask("once", CALLS))[1]["choices"][0]["shoal"]["agent"]["end"] == "step limit")
    check("the limit of time", chat(s, ask("hasty", CALLS))[1]["choices"][0]["shoal"]["agent"]["end"] == "time limit")
    base, mixed = (chat(s, ask(n, CALLS))[1] for n in ("helper", "mixed"))
    check("adapters are part of the fingerprint", base["system_fingerprint"] != mixed["system_fingerprint"])
    cut = chat(s, ask("helper", "sort: k b x", max_tokens=2))[1]["choices"][0]
    check("max_tokens of a request lowers the file's", cut["finish_reason"] == "length" and cut["shoal"]["agent"]["truncated"], cut)
    raised = chat(s, ask("hasty", "tell me all that you know of ships", max_completion_tokens=4000, temperature=3, seed=1))[1]["choices"][0]
    check("it does not raise it", raised["shoal"]["agent"]["steps"][-1]["generated"] <= 16, raised)
    quiet = chat(s, ask("helper", CALLS, include_reasoning=False))[1]["choices"][0]
    check("a reply without reasoning", "reasoning_content" not in quiet["message"] and "steps" not in quiet["shoal"]["agent"]
          and quiet["message"]["content"] == first["message"]["content"], quiet)
    want = of_command("helper", CALLS, 9, "--temperature", "1.5", "--top-k", "5")
    check("sampling of a request overrides the file's", of_choice(chat(s, ask("helper", CALLS, seed=9, temperature=1.5, top_k=5))[1]["choices"][0]) == want, want)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "sort: k b x"}]},
            {"role": "assistant", "content": "b k x"}, {"role": "user", "content": "sort: d a c"}]
    status, v = chat(s, {"model": "agent:helper", "messages": talk})
    check("a conversation", status == 200 and v["choices"][0]["message"]["content"], v)


def test_streams():
    for body in (ask("helper", CALLS), ask("warm", CALLS, seed=11, n=3), ask("bare", "sort: k b x")):
        plain = chat(s, body)[1]
        c, events = s.stream(body)
        got = list(events)
        c.close()
        name, n = body["model"], body.get("n", 1)
        check(f"a stream of {name} ends", got[-1] == "[DONE]" and got[-2]["choices"] == [] and got[-2]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"], got[-2:])
        for i in range(n):
            mine = [e["choices"][0] for e in got[:-2] if e["choices"][0]["index"] == i]
            whole = plain["choices"][i]
            text = lambda key: "".join(e["delta"].get(key, "") for e in mine)
            steps = [e["shoal"]["step"] for e in mine if "step" in e.get("shoal", {})]
            check(f"the stream of {name} {i} has the reply", text("content") == whole["message"]["content"]
                  and text("reasoning_content") == whole["message"].get("reasoning_content", ""), mine)
            check(f"the stream of {name} {i} has its steps", exact(steps) == exact(whole["shoal"]["agent"]["steps"]), steps)
            last = mine[-1]
            check(f"the stream of {name} {i} has its end", last["finish_reason"] == whole["finish_reason"]
                  and exact(last["shoal"]["agent"]) == exact({k: x for k, x in whole["shoal"]["agent"].items() if k != "steps"}), last)


def test_steps_arrive_early():
    """Steps that were sent only at the end would come in the order of the choices."""
    for _ in range(20):
        c, events = s.stream(ask("helper", CALLS, n=2))
        order = [e["choices"][0]["index"] for e in events if e != "[DONE]" and e["choices"] and "step" in e["choices"][0].get("shoal", {})]
        c.close()
        if order == [0, 1, 0, 1]:
            break
    check("a step is sent when it ends", order == [0, 1, 0, 1], order)


def test_many():
    v = chat(s, ask("warm", CALLS, seed=20, n=4))[1]
    alone = [chat(s, ask("warm", CALLS, seed=20 + i))[1]["choices"][0] for i in range(4)]
    check("answer i of a request has the seed + i", [of_choice(c) for c in v["choices"]] == [of_choice(c) for c in alone], v)
    bodies = [ask(("helper", "warm", "mixed", "reader")[i % 4], f"{CALLS} {i}", seed=i) for i in range(12)]
    one = [of_choice(chat(s, b)[1]["choices"][0]) for b in bodies]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        both = list(pool.map(lambda b: of_choice(chat(s, b)[1]["choices"][0]), bodies))
    check("twelve clients at once get the same", one == both and len({json.dumps(x) for x in one}) > 4, both)
    figures = s.call("/v1/metrics")[1]["shoal_requests_total"]["series"]
    check("requests to agents are counted", any("agent" in json.dumps(x) and x["value"] > 12 for x in figures), figures)


def test_disconnects():
    long = ask("endless", "tell me all that you know of ships", n=16)
    cancelled = lambda: sum(x["value"] for x in s.call("/v1/metrics")[1]["shoal_requests_cancelled_total"]["series"])
    for streamed in (False, True):
        before, c = cancelled(), s.open("/v1/chat/completions", {**long, "stream": streamed})
        began = s.waits_until_busy()
        c.close()
        end = time.time() + 20
        while time.time() < end and cancelled() == before:
            time.sleep(0.05)
        check(f"a client that disconnects{' from a stream' if streamed else ''} stops its agents", began and s.waits_until_idle() and cancelled() == before + 1, began)
    check("the server still answers", chat(s, ask("helper", "sort: k b x"))[0] == 200)


def test_refused_requests():
    for what, body, status, says in (
            ("an unknown agent", ask("nobody", "a"), 404, "GET /v1/agents"), ("no name", ask("", "a"), 404, "there is no agent ''"),
            ("tools of the request", ask("helper", "a", tools=[]), 400, "'tools'"), ("a format", ask("helper", "a", response_format={"type": "json_object"}), 400, "'response_format'"),
            ("log-probabilities", ask("helper", "a", logprobs=True), 400, "'logprobs'"), ("a stop text", ask("helper", "a", stop="x"), 400, "'stop'"),
            ("choices", ask("helper", "a", choices=["x", "y"]), 400, "'choices'"), ("a check", ask("helper", "a", check="calculator", samples=2), 400, "'samples'"),
            ("an unknown field", ask("helper", "a", max_steps=3), 400, "max_steps"), ("a wrong temperature", ask("helper", "a", temperature=-1), 400, "'temperature'"),
            ("no messages", {"model": "agent:helper", "messages": []}, 400, "'messages'"), ("too many answers", ask("helper", "a", n=1000), 400, "'n'"),
            ("a last message of the assistant", {"model": "agent:helper", "messages": [{"role": "assistant", "content": "a"}]}, 400, "role 'user'"),
            ("a question without room", ask("helper", "how old is tom? " * 2000), 400, "--max-model-len")):
        got, v = chat(s, body)
        check(f"{what} is refused", got == status and says in v["error"]["message"] and {"message", "type", "param", "code"} <= set(v["error"]), (got, v))
    c, events = s.stream(ask("helper", "how old is tom? " * 2000))
    got = list(events)
    c.close()
    check("a stream without room ends with the error", "--max-model-len" in got[-1]["error"]["message"], got)
    check("Ollama's API does not know agents", s.call("/api/chat", ask("helper", "a"))[0] == 404)
    check("no request runs at the end", s.waits_until_idle())
    small = Server("small", "--agent", f"{tmp}/helper.yaml", "--max-request-memory", "16M")
    got, v = chat(small, ask("helper", "a", n=64))
    check("the memory of the answers is bounded", got == 400 and v["error"]["param"] == "n", (got, v))
    check("one answer fits", chat(small, ask("helper", "sort: k b x"))[0] == 200)
    small.p.send_signal(signal.SIGTERM)
    check("the small server ends on SIGTERM", small.p.wait(60) == 0, open(f"{tmp}/small.err").read())


def test_refused_files():
    run_code = write("coder.yaml", "tools: [clock, python]\n")
    surf = write("surfer.yaml", "tools: http_get\nallow_host: example.org\n")
    for what, args, says in (
            ("an unknown key", [write("key.yaml", "tools: clock\nsteps: 3\n")], "line 2: unknown key 'steps'"),
            ("an unknown tool", [write("tool.yaml", "tools: abacus\n")], "there is no tool 'abacus'"),
            ("a wrong limit", [write("limit.yaml", "max_steps: 1000\n")], "line 1"),
            ("a missing adapter", [write("adapter.yaml", "adapter: nowhere\n")], "nowhere"),
            ("a missing database", [write("db.yaml", "tools: knowledge\nknowledge: nowhere.db\n")], "nowhere.db"),
            ("a missing file", [f"{tmp}/nowhere.yaml"], "nowhere.yaml"), ("two agents of one name", [f"{tmp}/helper.yaml", f"helper={tmp}/warm.yaml"], "another agent"),
            ("code without permission", [run_code], "--allow-tool python"), ("the network without permission", [surf], "--allow-tool http_get"),
            ("an MCP server without permission", [write("mcp.yaml", "tools: clock\nmcp: ['touch " + tmp + "/started']\n")], "--allow-tool mcp"),
            ("permission for a harmless tool", [f"{tmp}/helper.yaml", "--allow-tool", "calculator"], "'calculator' is not a tool that executes")):
        r = subprocess.run([shoal, "serve", model, "--port", "0", "--state", f"{tmp}/refused", "--agent", *args], capture_output=True, text=True, timeout=60)
        check(f"{what} is refused at the start", r.returncode in (1, 2) and says in r.stderr, (r.returncode, r.stderr))
    check("a refused MCP server is not started", not os.path.exists(f"{tmp}/started"))
    server = os.path.abspath("test/mcp/server.py")
    outside = Server("outside", "--agent", write("outside.yaml", f"tools: clock\nmcp: ['x=python3 {server} good']\nmcp_tools: x__e*\nmax_steps: 1\n"), "--allow-tool", "mcp")
    check("tools of an MCP server are served", outside.call("/v1/agents")[1]["agents"][0]["tools"] == ["clock", "x__echo", "x__env", "x__empty"])
    check("an agent with an MCP server answers", chat(outside, ask("outside", "sort: k b x"))[0] == 200)
    outside.p.send_signal(signal.SIGTERM)
    outside.p.wait(60)
    surfing = Server("surfing", "--agent", surf, "--allow-tool", "http_get")
    check("an allowed tool is served", surfing.call("/v1/agents")[1]["agents"][0]["tools"] == ["http_get"])
    surfing.p.send_signal(signal.SIGTERM)
    surfing.p.wait(60)


try:
    test_lists()
    test_replies()
    test_streams()
    test_steps_arrive_early()
    test_many()
    test_disconnects()
    test_refused_requests()
    test_refused_files()
except Exception:
    check("no exception", False, traceback.format_exc())
s.p.send_signal(signal.SIGTERM)
check("the server ends on SIGTERM", s.p.wait(60) == 0, open(f"{tmp}/plain.err").read())
sys.exit(1 if failed else 0)
END
