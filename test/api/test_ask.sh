#!/bin/sh
# test_ask: debates and the answer pipeline over HTTP, streamed and not: the events while they run, results equal to
# those of 'shoal debate' and 'shoal ask', clients that disconnect, stored conversations, and refused requests. Prints
# "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip ask: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
SHOAL=${SHOAL:-build/shoal} TMP_DIR=$tmp python3 - <<'END'
import concurrent.futures, json, signal, sqlite3, sys, traceback

sys.path.insert(0, "test/api")
import server
from server import check, failed, run

tmp, model = server.TMP, "test/models/fry-1"


class Server(server.Server):
    def __init__(self, state, *more):
        super().__init__(state, model, "--exact", "--team", "panel=examples/team.yaml", f"crowd={tmp}/crowd.yaml", *more)


def comparable(v):
    """Without timestamps and manifest, and with 8 digits of each number: the command line prints 9, the server more."""
    if isinstance(v, dict):
        return {k: comparable(x) for k, x in v.items() if k not in ("timestamp", "manifest")}
    if isinstance(v, list):
        return [comparable(x) for x in v]
    return float(f"{v:.8g}") if isinstance(v, float) else v


def agent_texts(board):
    return [e["value"] for e in board if "agent" in e]


def stream_all(server, path, body):
    c, events = server.stream(path, body)
    got = list(events)
    c.close()
    return got


with open(f"{tmp}/crowd.yaml", "w") as f:  # agents that do not reach consensus soon
    f.write("temperature: 1.5\nrounds: 64\nagents:\n" + "".join(f"  - name: a{i}\n    system: You are number {i}.\n" for i in range(16)))
s = Server("plain")
debate = {"team": "panel", "question": "pick the smallest of 4, 9, 2", "choices": ["4", "9", "2"], "seed": 1}


def test_debates():
    for name, body in (("choices", debate), ("any answer", {"team": "panel", "question": "12 + 30 = ?", "rounds": 3, "seed": 5})):
        status, plain = s.call("/v1/debate", body)
        got = stream_all(s, "/v1/debate", body)
        kinds = [e for e, _ in got]
        check(f"a debate ({name}) ends with the result of the unstreamed request",
              status == 200 and got[-2] == ("result", plain) and got[-1] == ("message", "[DONE]"), got[-2:])
        turns = [v for e, v in got if e == "turn"]
        bare = [{k: x for k, x in v.items() if k not in ("flip", "before")} for v in turns]
        check(f"a debate's turns are streamed in order ({name})", bare == plain["said"] and set(kinds[:-2]) == {"turn", "vote"}, turns)
        last, good = {}, True
        for v in turns:
            before = last.get(v["name"])
            flipped = "answer" in v and before is not None and before != v["answer"]
            good = good and v["flip"] == flipped and v.get("before") == (before if flipped else None)
            last[v["name"]] = v.get("answer", before)
        check(f"changed answers are reported ({name})", good and (name != "choices" or any(v["flip"] for v in turns)), turns)
        rounds = [(e, v["round"]) for e, v in got if e in ("turn", "vote")]
        votes = [v for e, v in got if e == "vote"]
        check(f"a vote comes after the turns of its round ({name})",
              len(votes) == plain["rounds"] and rounds == sorted(rounds, key=lambda x: (x[1], x[0])), rounds)
        check(f"the last vote equals the result ({name})",
              votes[-1]["scores"] == plain["scores"] and votes[-1].get("answer") == plain.get("answer"), votes)
    from_cli = json.loads(run("debate", model, "--exact", "--team", "examples/team.yaml", "--topic", debate["question"], "--choices",
                          *debate["choices"], "--json", "--store", f"{tmp}/d.db"))
    check("a debate equals the result of 'shoal debate'", comparable(s.call("/v1/debate", debate)[1]) == comparable(from_cli), from_cli)


def ask_cli(question, *more):
    """The result of 'shoal ask'. Each question has its own store, because a board's sequence numbers continue in the same store."""
    return json.loads(run("ask", model, question, "--exact", "--json", "--board", "--store", f"{tmp}/{abs(hash(question))}.db", *more))


def test_asks():
    cases = [({"question": "What is 3 + 4?"}, []),
             ({"question": "太陽はどこから昇りますか？", "agents": 2, "iterations": 3, "seed": 9, "role_type": "planning"},
              ["--agents", "2", "--iterations", "3", "--seed", "9", "--role-type", "planning"]),
             ({"question": "Why? " * 40, "agents": 4, "iterations": 1, "language": "zh", "role_type": "model", "max_tokens": 20},
              ["--agents", "4", "--iterations", "1", "--language", "zh", "--role-type", "model", "--max-tokens", "20"]),
             ({"question": "12 + 30 = ?", "agents": 1, "iterations": 1, "max_tokens": 12, "samples": 6, "check": "calculator"},
              ["--agents", "1", "--iterations", "1", "--max-tokens", "12", "--samples", "6", "--check", "calculator"])]
    for body, flags in cases:
        label, from_cli = body["question"][:24].strip(), ask_cli(body["question"], *flags)
        status, plain = s.call("/v1/ask", body)
        got = stream_all(s, "/v1/ask", body)
        check(f"'{label}': the same text as 'shoal ask'",
              status == 200 and plain["answer"] == from_cli["answer"] and agent_texts(plain["board"]) == [u["text"] for u in from_cli["said"]]
              and [e["agent"] for e in plain["board"] if "agent" in e] == [u["name"] for u in from_cli["said"]], (plain, from_cli))
        board = {e["key"]: e for e in plain["board"]}
        check(f"'{label}': the same board as 'shoal ask'", {k: (e["value"][:100], e["seq"]) for k, e in board.items()} ==
              {k: (e["value"][:100], e["seq"]) for k, e in from_cli["board"]["entries"].items()}, (board, from_cli["board"]))
        entries = [v for e, v in got if e == "entry"]
        check(f"'{label}': the streamed entries and result equal the unstreamed ones",
              got[-1] == ("message", "[DONE]") and got[-2][0] == "result" and comparable(got[-2][1]) == comparable(plain)
              and comparable(entries) == comparable(plain["board"]), got)
        seq = [e["seq"] for e in entries]
        steps = [(e, v.get("iteration"), v.get("role")) for e, v in got if e == "step" or "agent" in v]
        check(f"'{label}': entries are streamed in order, each step before its entries",
              seq == sorted(set(seq)) and all(k == "step" or ("step", i, r) in steps[:at] for at, (k, i, r) in enumerate(steps)), steps)
        check(f"'{label}': roles and usage", len(plain["roles"]) == body.get("agents", 3) and plain["usage"]["completion_tokens"] > 0
              and all(r["name"] in [e.get("agent") for e in entries] and r["description"] for r in plain["roles"]), plain["roles"])
        checked = (plain.get("check") or {}).get
        check(f"'{label}': samples and how many passed", (checked("samples"), checked("passed")) == (from_cli.get("samples"), from_cli.get("passed")),
              (plain.get("check"), from_cli))
        asked = [e["messages"][-1]["content"] for e in entries if e.get("role") == "agent" and e["iteration"] == 1]
        check(f"'{label}': each agent was asked the question", asked and all(body["question"].strip() in a for a in asked), asked)
    bodies = [{"question": "What is 3 + 4?", "seed": i, "max_tokens": 16} for i in range(8)]
    alone = [agent_texts(s.call("/v1/ask", b)[1]["board"]) for b in bodies]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda b: agent_texts(s.call("/v1/ask", b)[1]["board"]), bodies))
    check("eight parallel requests equal single ones", alone == together and alone[0] != alone[1], together)


LONG = {"question": "Tell me all that you know of ships.", "agents": 15, "iterations": 16}


def test_disconnects():
    c, events = s.stream("/v1/ask", {**LONG, "conversation": "left"})
    first = next(v for e, v in events if e == "entry" and "agent" in v)
    check("an entry arrives while other agents still run", first["iteration"] == 1 and s.waits_until_busy(), first)
    status, v = s.call("/v1/ask", {"question": "And boats?", "agents": 1, "iterations": 1, "max_tokens": 4, "conversation": "left"})
    check("a conversation answers a second question meanwhile", status == 200, v)
    c.close()
    check("a client that disconnects stops its stream", s.waits_until_idle())
    status, v = s.call("/v1/conversations/left")
    check("the conversation has the finished exchange only", status == 200 and [x["user"] for x in v["data"]] == ["And boats?"], v)
    crowd = {"team": "crowd", "question": "Tell me all that you know of ships.", "rounds": 64}
    for path, body in (("/v1/debate", {**crowd, "stream": True}), ("/v1/ask", LONG), ("/v1/debate", crowd)):
        c = s.open(path, body)
        began = s.waits_until_busy()
        c.close()
        check(f"a client that disconnects from {path}{' streamed' if body.get('stream') else ''} stops its requests", began and s.waits_until_idle(), began)


def test_conversations():
    small = {"agents": 1, "iterations": 1, "max_tokens": 8, "conversation": "me"}
    locked = Server("locked", "--api-key", "sk-one", "sk-two")
    locked.call("/v1/ask", {**small, "question": "My name is Anna."}, "sk-one")
    ask = {**small, "question": "What is my name?"}
    status, v = locked.call("/v1/ask", ask, "sk-one")
    check("a conversation remembers", status == 200 and v["source"] == "memory" and "Anna" in v["answer"] and v["roles"] == [], v)
    status, v = locked.call("/v1/ask", ask, "sk-two")
    check("a conversation is not visible with another key", status == 200 and v["source"] != "memory" and "Anna" not in json.dumps(v), v)
    check("a request without a key is refused", locked.call("/v1/ask", ask)[0] == 401)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        several = list(pool.map(lambda i: locked.call("/v1/ask", {**small, "question": f"{i} 富士山?"}, "sk-one")[0], range(8)))
    status, v = locked.call("/v1/conversations", key="sk-one")
    check("conversations are listed", status == 200 and [(c["id"], c["title"], c["exchanges"]) for c in v["data"]] == [("me", "My name is Anna.", 10)], (several, v))
    status, v = locked.call("/v1/conversations/me?after=2&limit=100", key="sk-one")
    check("no exchange is lost", status == 200 and sorted(x["user"] for x in v["data"]) == [f"{i} 富士山?" for i in range(8)]
          and [x["number"] for x in v["data"]] == list(range(3, 11)), v)
    check("another key does not see them", locked.call("/v1/conversations/me", key="sk-two")[1]["data"][0]["user"] == "What is my name?"
          and locked.call("/v1/conversations/none", key="sk-two")[0] == 404)
    status, v = locked.call("/v1/conversations/me", {"title": "夏の計画"}, "sk-one")
    check("a conversation is renamed", status == 200 and locked.call("/v1/conversations", key="sk-one")[1]["data"][0]["title"] == "夏の計画", v)
    search = lambda text, key, more="": locked.call(f"/v1/conversations?search={text}{more}", key=key)
    status, v = search("%EF%BC%95%20%E5%AF%8C%E5%A3%AB", "sk-one")  # a full-width 5 finds 5
    check("conversations are searched", status == 200 and [(h["id"], h["user"]) for h in v["data"]] == [("me", "5 富士山?")], v)
    check("a search has a limit", len(search("FUJI", "sk-one")[1]["data"]) == 0 and len(search("%E5%AF%8C", "sk-one", "&limit=3")[1]["data"]) == 3)
    check("another key finds nothing", search("%E5%AF%8C", "sk-two")[1]["data"] == [])
    for text in ("", "x" * 300, "%FF%FE"):
        status, v = search(text, "sk-one")
        check(f"a search for {text[:9]!r} is refused", status == 400, v)
    for query in ("limit=0", "limit=101", "limit=ten", "after=-1", "after=1e3", "limit=99999999999999999999"):
        status, v = locked.call(f"/v1/conversations/me?{query}", key="sk-one")
        check(f"{query} is refused", status == 400 and v["error"]["param"] == query.split("=")[0], v)
    for body in ({}, {"title": 3}, {"title": "x" * 300}):
        check(f"a title of {json.dumps(body)[:20]} is refused", locked.call("/v1/conversations/me", body, "sk-one")[0] == 400)
    status, v = locked.call("/v1/conversations/me", key="sk-one", method="DELETE")
    check("a conversation is deleted", status == 200 and v["deleted"] and locked.call("/v1/conversations/me", key="sk-one")[0] == 404
          and len(locked.call("/v1/conversations", key="sk-two")[1]["data"]) == 1, v)
    store = sqlite3.connect(f"{tmp}/locked/conversations.db", isolation_level=None)
    owner, = store.execute("SELECT id FROM documents WHERE kind = 'conversation' AND id LIKE '%/me'").fetchone()
    bytes_of = lambda: store.execute("SELECT json_extract(value, '$.bytes') FROM documents WHERE id = ?", (owner,)).fetchone()[0]
    before, (status, v) = bytes_of(), locked.call("/v1/ask", ask, "sk-two")
    check("the size of a conversation is counted", status == 200 and 0 < before < bytes_of() < before + 400, (before, bytes_of()))
    store.execute("UPDATE documents SET value = json_set(value, '$.bytes', 67108865) WHERE id = ?", (owner,))
    store.execute("INSERT INTO documents VALUES('filler', '', printf('%.*c', 67108865, 'x'))")  # the sizes are read only if the file is as large
    status, v = locked.call("/v1/ask", ask, "sk-two")
    check("a key has a share of the conversations", status == 507 and "64 MiB" in v["error"]["message"], v)
    check("another key has its own share", locked.call("/v1/ask", {**ask, "conversation": "other"}, "sk-one")[0] == 200)
    store.execute("UPDATE documents SET value = json_set(value, '$.bytes', 1) WHERE id = ?", (owner,))
    for i in range(255):
        store.execute("INSERT INTO documents SELECT kind, replace(id, '/me', ?), value FROM documents WHERE id = ?", (f"/{i}", owner))
    status, v = locked.call("/v1/ask", {**ask, "conversation": "new"}, "sk-two")
    check("a 257th conversation is refused", status == 507 and "256" in v["error"]["message"], v)
    check("the 256 others go on", locked.call("/v1/ask", ask, "sk-two")[0] == 200)
    locked.call("/v1/conversations/7", key="sk-two", method="DELETE")
    check("after one is deleted, a new one is made", locked.call("/v1/ask", {**ask, "conversation": "new"}, "sk-two")[0] == 200)
    store.close()
    check("a deleted conversation is no conversation", locked.call("/v1/conversations/me", key="sk-one", method="DELETE")[0] == 404)
    locked.p.send_signal(signal.SIGTERM)
    check("the server with keys ends on SIGTERM", locked.p.wait(60) == 0, open(f"{tmp}/locked.err").read())


def test_failed_team():
    """A question that no agent has room for in its context: an error that says so, not an empty reply."""
    chat = {"model": "team:panel", "messages": [{"role": "user", "content": "word " * 3000}]}
    status, v = s.call("/v1/chat/completions", chat)
    check("a team without an answer replies with an error", status == 400 and "no room in the context" in v["error"]["message"], (status, v))
    got = stream_all(s, "/v1/chat/completions", {**chat, "stream": True})
    check("its stream ends with the error", "no room in the context" in got[-1][1]["error"]["message"], got)


def test_refused_requests():
    for path, body, status, says in (
            ("/v1/ask", {}, 400, "'question'"), ("/v1/ask", {"question": "x" * 70000}, 400, "'question'"),
            ("/v1/ask", {"question": 3}, 400, "'question'"), ("/v1/ask", {"question": "a", "agents": 16}, 400, "'agents'"),
            ("/v1/ask", {"question": "a", "iterations": 0}, 400, "'iterations'"),
            ("/v1/ask", {"question": "a", "role_type": "critics"}, 400, "auto, discussion"),
            ("/v1/ask", {"question": "a", "language": "fr"}, 400, "auto, ja, en, zh"),
            ("/v1/ask", {"question": "a", "conversation": ""}, 400, "'conversation'"),
            ("/v1/ask", {"question": "a", "stream": 1}, 400, "'stream'"), ("/v1/ask", {"question": "a", "model": "nobody"}, 404, "nobody"),
            ("/v1/ask", {"question": "a", "model": "team:panel"}, 404, "team:panel"), ("/v1/ask", [], 400, "'question'"),
            ("/v1/debate", {**debate, "stream": "yes"}, 400, "'stream'"), ("/v1/debate", {**debate, "team": "none"}, 404, "none"),
            ("/v1/debate", {**debate, "choices": ["one"], "stream": True}, 400, "'choices'")):
        got, v = s.call(path, body)
        check(f"{path} {json.dumps(body)[:50]} is refused", got == status and says in v["error"]["message"]
              and {"message", "type", "param", "code"} <= set(v["error"]), (got, v))
    check("no request runs at the end", s.waits_until_idle())


try:
    test_debates()
    test_asks()
    test_disconnects()
    test_conversations()
    test_failed_team()
    test_refused_requests()
except Exception:
    check("no exception", False, traceback.format_exc())
s.p.send_signal(signal.SIGTERM)
check("the server ends on SIGTERM", s.p.wait(60) == 0, open(f"{tmp}/plain.err").read())
sys.exit(1 if failed else 0)
END
