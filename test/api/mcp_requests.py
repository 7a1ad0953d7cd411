"""mcp_requests: messages to the MCP server that its clients in test/clients/mcp do not send; see test_mcp.sh."""
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, "test/attack")
from attack import SHOAL, Server, report  # noqa: E402

TMP, MODEL = os.environ["SHOAL_TMP"], "test/models/fry-1"
EVENTS = {"Accept": "application/json, text/event-stream"}
CHAT = {"name": "chat", "arguments": {"prompt": "sort: k b x", "temperature": 0, "max_tokens": 20}}
# With ENDLESS, a reply of 3,241 tokens; BUSY of them together take many seconds.
LONG = {"name": "chat", "arguments": {"prompt": "x", "temperature": 100, "max_tokens": 100000, "seed": 13}}
ENDLESS, BUSY = ["--exact", "--context-shift", "--loop-tokens", "0"], 40


def rpc(method, params=None, id=1):
    return {"jsonrpc": "2.0", "id": id, "method": method, **({} if params is None else {"params": params})}


def initialize(version="2025-06-18"):
    return rpc("initialize", {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}})


def session(s, key=None):
    """The id of a new session."""
    import http.client
    c = http.client.HTTPConnection("127.0.0.1", s.port, timeout=60)
    c.request("POST", "/mcp", json.dumps(initialize()), {"Authorization": "Bearer " + key} if key else {})
    r = c.getresponse()
    r.read()
    c.close()
    return r.getheader("Mcp-Session-Id")


def wait_idle(s, key=None):
    """Whether the batch is empty within 20 seconds."""
    for _ in range(200):
        batch = json.loads(s.ask("/v1/system", key=key)[1])["batch"]
        if batch["running"] + batch["waiting"] == 0:
            return True
        time.sleep(0.1)
    return batch


# ---- messages

def nested(depth):
    return b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":' + b"[" * depth + b"]" * depth + b"}}"


def refused(s):
    long_text = "x" * 300
    cases = [  # name, body, status, code
        ("no body", b"", 400, -32700), ("no JSON", b"nope", 400, -32700), ("half of a message", b'{"jsonrpc":"2.0","id":1', 400, -32700),
        ("two messages", b'{"jsonrpc":"2.0","id":1,"method":"ping"}{}', 400, -32700), ("deep nesting", nested(20000), 400, -32700),
        ("a key twice", b'{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}', 400, -32700),
        ("bytes that are not UTF-8", b'{"jsonrpc":"2.0","id":"\xff","method":"ping"}', 400, -32700),
        ("a NUL", b'{"jsonrpc":"2.0","id":"\\u0000","method":"ping"}', 400, -32700),
        ("a batch", json.dumps([rpc("ping"), rpc("ping", id=2)]).encode(), 400, -32600), ("an empty batch", b"[]", 400, -32600),
        ("a large batch", b"[" + b"{}," * 20000 + b"{}]", 400, -32600),
        ("a number", b"7", 400, None), ("null", b"null", 400, None), ("an empty object", b"{}", 400, -32600),
    ]
    for name, m, code in [
            ("JSON-RPC 1", {**rpc("ping"), "jsonrpc": "1.0"}, -32600), ("no version", {"id": 1, "method": "ping"}, -32600),
            ("a null id", rpc("ping", id=None), -32600), ("a fraction as id", rpc("ping", id=1.5), -32600),
            ("an object as id", rpc("ping", id={}), -32600), ("a long id", rpc("ping", id=long_text), -32600),
            ("a number as method", rpc(7), -32600), ("a list of parameters", rpc("tools/list", []), -32602),
            ("an unknown method", rpc("resources/list"), -32601), ("a long method", rpc("x" * 100000), -32601),
            ("a method with control characters", rpc("\x1b[31m\n"), -32601),
            ("initialize without a version", rpc("initialize", {}), -32602), ("a version of another type", rpc("initialize", {"protocolVersion": 5}), -32602),
            ("a cursor", rpc("tools/list", {"cursor": "x"}), -32602), ("no tool", rpc("tools/call", {}), -32602),
            ("an unknown tool", rpc("tools/call", {"name": "rm"}), -32602), ("a list of arguments", rpc("tools/call", {**CHAT, "arguments": []}), -32602),
            ("an object as token", rpc("tools/call", {**CHAT, "_meta": {"progressToken": {}}}), -32602),
            ("a long token", rpc("tools/call", {**CHAT, "_meta": {"progressToken": long_text}}), -32602)]:
        cases.append((name, json.dumps(m).encode(), None, code))
    for name, body, status, code in cases:
        got, text, _ = s.ask("/mcp", raw=body, method="POST")
        try:
            error = json.loads(text)["error"]
            good = (status is None or got == status) and (code is None or error["code"] == code) and 5 < len(error["message"]) < 400
        except (ValueError, KeyError):
            good = False
        report(f"mcp: refused: {name}", good or (got, text[:300]))
    got, text, _ = s.ask("/mcp", raw=b" " * (3 << 20), method="POST")
    report("mcp: refused: a body above the limit", got == 413 or (got, text))


def arguments(s):
    """Arguments that name other routes or files are values, nothing else."""
    for name, args in [("job_status", {"job": j}) for j in ("x/events", "../models", "", "%2e%2e", "a" * 5000, "x\n")] + [
            ("conversation_read", {"conversation": c}) for c in ("../x", "a/b", "x" * 5000, "%00", "?limit=1")] + [
            ("conversation_search", {"search": ""}), ("conversation_search", {"search": "x", "limit": 10 ** 6}), ("knowledge_search", {"query": "x" * 5000}),
            ("chat", {"prompt": "x", "stream": True}), ("chat", {"prompt": "x", "n": 9}), ("chat", {"prompt": ["x"]}), ("chat", {"prompt": None}),
            ("ask", {"question": "x", "check": "tests"}), ("debate", {"team": "../x", "question": "x"}), ("debate", {"team": "pair", "question": "x", "choices": [1]})]:
        status, text, _ = s.ask("/mcp", rpc("tools/call", {"name": name, "arguments": args}), key=s.token, headers=EVENTS)
        r = json.loads(text).get("result", {})
        report(f"mcp: an error of a tool: {name} {json.dumps(args)[:40]}", (status == 200 and r.get("isError") is True) or text[:300])


def stateless(s, version="2026-07-28", **changed):
    """A request of version 2026-07-28, with other headers."""
    headers = {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "chat", **changed}
    body = rpc("tools/call", {**CHAT, "_meta": {"io.modelcontextprotocol/protocolVersion": version, "io.modelcontextprotocol/clientCapabilities": {}}})
    return s.ask("/mcp", body, headers={k: v for k, v in headers.items() if v is not None})


def http_rules(s):
    ping = rpc("ping")
    for name, status, call in [
            ("GET has no stream", 405, lambda: s.ask("/mcp")), ("an unknown session", 404, lambda: s.ask("/mcp", ping, headers={"Mcp-Session-Id": "0" * 32})),
            ("DELETE of no session", 404, lambda: s.ask("/mcp", method="DELETE")),
            ("an unknown version", 400, lambda: s.ask("/mcp", ping, headers={"MCP-Protocol-Version": "1999-01-01"})),
            ("the stateless version without its _meta", 400, lambda: s.ask("/mcp", ping, headers={"MCP-Protocol-Version": "2026-07-28"})),
            ("the stateless version", 200, lambda: stateless(s)),
            ("an unknown stateless version", 400, lambda: stateless(s, version="2027-01-01")),
            ("a version of another type", 400, lambda: stateless(s, version=5)),
            ("another version in the header", 400, lambda: stateless(s, **{"MCP-Protocol-Version": "2025-11-25"})),
            ("no version in the header", 400, lambda: stateless(s, **{"MCP-Protocol-Version": None})),
            ("another method in the header", 400, lambda: stateless(s, **{"Mcp-Method": "tools/list"})),
            ("another tool in the header", 400, lambda: stateless(s, **{"Mcp-Name": "job_list"})),
            ("no tool in the header", 400, lambda: stateless(s, **{"Mcp-Name": None})),
            ("a known version", 200, lambda: s.ask("/mcp", ping, headers={"MCP-Protocol-Version": "2025-03-26"})),
            ("a page of another origin", 403, lambda: s.ask("/mcp", ping, headers={"Origin": "https://evil.example"})),
            ("DNS rebinding", 403, lambda: s.ask("/mcp", ping, headers={"Host": "evil.example"})),
            ("the own origin", 200, lambda: s.ask("/mcp", ping, headers={"Origin": f"http://127.0.0.1:{s.port}"})),
            ("a notification", 202, lambda: s.ask("/mcp", {"jsonrpc": "2.0", "method": "notifications/x", "params": {}})),
            ("a response", 202, lambda: s.ask("/mcp", {"jsonrpc": "2.0", "id": 1, "result": {}}))]:
        got, text, _ = call()
        report(f"mcp: {name}: {status}", got == status or (got, text))
    text = s.ask("/mcp", initialize("2099-01-01"))[1]
    report("mcp: an unknown version is answered with the newest", json.loads(text)["result"]["protocolVersion"] == "2025-11-25" or text)
    progress = {**CHAT, "_meta": {"progressToken": 5}}
    text = s.ask("/mcp", rpc("tools/call", progress))[1]
    report("mcp: without Accept of events the reply is JSON", json.loads(text)["result"]["structuredContent"]["text"] == "answer: b k x" or text)
    text = s.ask("/mcp", rpc("tools/call", progress, id="i"), headers=EVENTS)[1]
    messages = [json.loads(m) for m in re.findall(r"^data: (.*)$", text, re.M)]
    report("mcp: events end with the response", (len(messages) > 1 and messages[-1]["id"] == "i" and
                                                 all(m["params"]["progressToken"] == 5 for m in messages[:-1])) or text)


# ---- calls that end early

def call_in_thread(s, body, headers):
    result = []
    t = threading.Thread(target=lambda: result.append(s.ask("/mcp", body, headers=headers)))
    t.start()
    return t, result


def load(s):
    """A session with calls that take many seconds."""
    one = session(s)
    threads = [call_in_thread(s, rpc("tools/call", LONG, id=i), {"Mcp-Session-Id": one})[0] for i in range(BUSY)]
    time.sleep(0.3)
    return one, threads


def load_end(s, one, threads):
    """Ends the session, and so its calls."""
    status = s.ask("/mcp", method="DELETE", headers={"Mcp-Session-Id": one})[0]
    for t in threads:
        t.join(20)
    return status == 204 and not any(t.is_alive() for t in threads)


def cancelled(s):
    for events in (False, True):
        busy, one, two = load(s), session(s), session(s)
        params = {**LONG, **({"_meta": {"progressToken": 1}} if events else {})}
        t, result = call_in_thread(s, rpc("tools/call", params, id=9), {**EVENTS, "Mcp-Session-Id": one})
        time.sleep(0.3)
        note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 9}}
        s.ask("/mcp", note, headers={"Mcp-Session-Id": two})
        s.ask("/mcp", {**note, "params": {"requestId": 8}}, headers={"Mcp-Session-Id": one})
        s.ask("/mcp", {**note, "params": {"requestId": {}}}, headers={"Mcp-Session-Id": one})
        time.sleep(0.3)
        kind = "streamed" if events else "plain"
        report(f"mcp: another session's or id's cancellation has no effect ({kind})", t.is_alive() or result)
        s.ask("/mcp", note, headers={"Mcp-Session-Id": one})
        t.join(20)
        status, text = result[0][:2] if result else (None, "it still runs")
        good = '"id":9' not in text and status == (200 if events else 202)
        report(f"mcp: a cancelled call ends without a response ({kind})", good or (status, text[-300:]))
        report(f"mcp: the end of a session cancels its calls ({kind})", load_end(s, *busy))
        report(f"mcp: the work of cancelled calls stops ({kind})", wait_idle(s))


def disconnected(s):
    import socket
    for events in (False, True):
        params = {**LONG, **({"_meta": {"progressToken": 1}} if events else {})}
        body = json.dumps(rpc("tools/call", params))
        clients = [socket.create_connection(("127.0.0.1", s.port)) for _ in range(BUSY)]
        for c in clients:
            c.sendall(f"POST /mcp HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(0.5)
        for c in clients:
            c.close()
        report(f"mcp: the work for a client that disconnects stops ({'streamed' if events else 'plain'})", wait_idle(s))


# ---- keys

def key_add(folder, name, *options):
    out = subprocess.run([SHOAL, "key", "add", name, *options, "--store", folder + "/state/serve.db", "--quiet", "--json"],
                         capture_output=True, text=True, check=True).stdout
    return json.loads(out)["secret"]


def keys():
    folder = os.path.join(TMP, "keys")
    os.makedirs(folder)
    chat, other = key_add(folder, "chat", "--scope", "chat"), key_add(folder, "other", "--scope", "chat")
    jobs, both = key_add(folder, "jobs", "--scope", "jobs"), key_add(folder, "both", "--scope", "chat", "jobs")
    few = key_add(folder, "few", "--scope", "chat", "--rpm", "4")
    with Server(folder=folder) as s:
        def names(key):
            return [t["name"] for t in json.loads(s.ask("/mcp", rpc("tools/list"), key=key)[1])["result"]["tools"]]

        def call(name, args, key, **more):
            return json.loads(s.ask("/mcp", rpc("tools/call", {"name": name, "arguments": args}), key=key, **more)[1])

        report("mcp: no key: 401", s.ask("/mcp", rpc("ping"))[0] == 401)
        report("mcp: a key without the scope chat: 403", s.ask("/mcp", rpc("ping"), key=jobs)[0] == 403)
        report("mcp: a key of the scope chat sees no jobs", not any(n.startswith("job") for n in names(chat)))
        r = call("job_list", {}, chat)
        report("mcp: and cannot call their tools", r.get("error", {}).get("code") == -32602 or r)
        report("mcp: a key of both scopes sees them", {"job_list", "job_status"} < set(names(both)))
        report("mcp: and calls them", call("job_list", {}, both)["result"]["structuredContent"] == {"jobs": []})
        report("mcp: tools that the server does not offer are not listed", not {"debate", "knowledge_search", "memory_search"} & set(names(both)))
        report("mcp: nor called", call("knowledge_search", {"query": "x"}, both).get("error", {}).get("code") == -32602)

        call("ask", {"question": "sort: k b x", "conversation": "mine", "agents": 1, "iterations": 1}, chat)
        own = call("conversation_list", {}, chat)["result"]["structuredContent"]["conversations"]
        report("mcp: a conversation belongs to its key", (len(own) == 1 and own[0]["id"] == "mine" and
                                                         call("conversation_list", {}, other)["result"]["structuredContent"] == {"conversations": []}) or own)
        status = [s.ask("/mcp", rpc("tools/call", CHAT), key=few)[0] for _ in range(6)]
        report("mcp: a call of a tool counts as one request", status == [200] * 4 + [429] * 2 or status)

        mine = session(s, chat)
        report("mcp: the session of another key is unknown", s.ask("/mcp", rpc("ping"), key=other, headers={"Mcp-Session-Id": mine})[0] == 404)
        for _ in range(1100):
            last = session(s, other)
        report("mcp: many sessions of a key do not end those of another", s.ask("/mcp", rpc("ping"), key=chat, headers={"Mcp-Session-Id": mine})[0] == 200)
        report("mcp: the newest session remains", s.ask("/mcp", rpc("ping"), key=other, headers={"Mcp-Session-Id": last})[0] == 200)


def agents():
    """An agent of the server is not an adapter. Its tools may change something, so chat is not read-only then."""
    with open(f"{TMP}/helper.yaml", "w") as f:
        f.write("tools: clock\nmax_steps: 1\nmax_tokens: 20\nthought_tokens: 8\n")
    for said in ("I live in Osaka.", "I've moved to Kyoto.", "I'm allergic to peanuts."):
        subprocess.run([SHOAL, "memory", "learn", said, "--store", f"{TMP}/memories.db", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    with Server("--agent", f"helper={TMP}/helper.yaml", "--memory", f"{TMP}/memories.db") as s:
        def call(name, args=None):
            return json.loads(s.ask("/mcp", rpc("tools/call", {"name": name, **({"arguments": args} if args else {})}))[1])["result"]

        found = call("adapter_list")["structuredContent"]
        report("mcp: agents are not listed as adapters", found == {"models": ["fry-1"], "adapters": [], "agents": ["agent:helper"]} or found)
        tools = json.loads(s.ask("/mcp", rpc("tools/list"))[1])["result"]["tools"]
        hints = {t["name"]: t["annotations"]["readOnlyHint"] for t in tools}
        report("mcp: chat is not read-only with agents", (hints["chat"] is False and hints["adapter_list"] is True) or hints)
        homes = call("memory_search", {"attribute": "residence", "ended": True})["structuredContent"]["memories"]
        report("mcp: memories of the user, also ended ones", sorted((m["value"], "valid_until" in m) for m in homes) ==
               [("Kyoto", False), ("Osaka", True)] or homes)
        found = call("memory_search", {"query": "allergic to peanuts", "limit": 1})["structuredContent"]["memories"]
        report("mcp: a search in memories", [m["value"] for m in found] == ["peanuts"] or found)
        report("mcp: an unknown attribute of memories is refused", call("memory_search", {"attribute": "x"}).get("isError") is True)
        r = call("chat", {"prompt": "sort: k b x", "model": "agent:helper"})
        report("mcp: chat with an agent", (not r.get("isError") and r["structuredContent"]["model"] == "agent:helper") or r)


# ---- stdio

def stdio_start(*options, state="stdio"):
    return subprocess.Popen([SHOAL, "mcp", MODEL, "--quiet", "--state", f"{TMP}/{state}", "--runs", f"{TMP}/{state}.runs", *options],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(f"{TMP}/{state}.err", "w"))


def stdio_lines(data, *options, state="stdio"):
    p = stdio_start(*options, state=state)
    out, _ = p.communicate(data, timeout=120)
    return p.returncode, [json.loads(line) for line in out.splitlines()]


def stdio():
    ping = json.dumps(rpc("ping")).encode()
    code, lines = stdio_lines(ping + b"\r\n\n \n" + json.dumps(rpc("ping", id="last")).encode())
    report("mcp stdio: blank lines, CRLF, and a last line without an end", (code == 0 and sorted(str(m["id"]) for m in lines) == ["1", "last"]) or (code, lines))
    many = b"".join(json.dumps(rpc("tools/call", CHAT, id=i)).encode() + b"\n" for i in range(200))
    code, lines = stdio_lines(many)
    report("mcp stdio: 200 calls at once", (code == 0 and sorted(m["id"] for m in lines) == list(range(200)) and
                                            all("structuredContent" in m["result"] for m in lines)) or (code, len(lines), lines[:2]))
    bad = [b"nope", b"[]", b"\xff\xfe", b"{}", nested(5000), b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', b"x" * (3 << 20)]
    code, lines = stdio_lines(b"\n".join(bad) + b"\n" + ping + b"\n", "--max-request-memory", "8M")
    errors = [m["error"]["code"] for m in lines if "error" in m]
    report("mcp stdio: wrong lines are answered, and the next one works", (code == 0 and len(errors) == len(bad) and {"jsonrpc": "2.0", "id": 1, "result": {}} in lines) or (code, lines))
    calls = [rpc("tools/call", LONG, id=f"c{i}") for i in range(BUSY)]
    notes = [{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": f"c{i}"}} for i in range(BUSY)]
    for order, messages in [("after all calls", [*calls, *notes]), ("directly after each call", [m for pair in zip(calls, notes) for m in pair])]:
        code, lines = stdio_lines(b"".join(json.dumps(m).encode() + b"\n" for m in [*messages, rpc("ping")]), *ENDLESS)
        report(f"mcp stdio: calls cancelled {order} have no response",
               (code == 0 and lines == [{"jsonrpc": "2.0", "id": 1, "result": {}}]) or (code, len(lines)))

    for name, end in [("SIGTERM", lambda p: p.send_signal(signal.SIGTERM)), ("SIGINT", lambda p: p.send_signal(signal.SIGINT)),
                      ("a client that reads no more", lambda p: (p.stdout.close(), p.stdin.write(ping + b"\n"), p.stdin.flush()))]:
        p = stdio_start(*ENDLESS)
        p.stdin.write(json.dumps(rpc("ping", id=0)).encode() + b"\n")
        p.stdin.flush()
        p.stdout.readline()  # it is ready
        p.stdin.write(b"".join(json.dumps(m).encode() + b"\n" for m in calls))
        p.stdin.flush()
        time.sleep(0.5)
        end(p)
        try:
            code = p.wait(30)
        except subprocess.TimeoutExpired:
            p.kill()
            code = "it still runs"
        report(f"mcp stdio: {name} ends a server that works", code == 0 or (code, open(f"{TMP}/stdio.err").read()[-300:]))
    p = stdio_start()
    p.stdin.write(ping + b"\n")
    p.stdin.flush()
    p.stdout.readline()
    second = stdio_start()
    second.communicate(b"", timeout=60)
    p.communicate(b"", timeout=60)
    report("mcp stdio: a second process with the same state is refused", (second.returncode == 1 and "--state" in open(f"{TMP}/stdio.err").read()) or second.returncode)

    p = stdio_start(state="listens")
    p.stdin.write(ping + b"\n")
    p.stdin.flush()
    p.stdout.readline()
    inodes = {os.readlink(f"/proc/{p.pid}/fd/{f}") for f in os.listdir(f"/proc/{p.pid}/fd")}
    report("mcp stdio: it has no socket", not any(i.startswith("socket:") for i in inodes) or inodes)
    p.communicate(b"", timeout=60)


def main():
    with Server(*ENDLESS, "--max-request-memory", "256M", "--max-body", "2000000", "--team", f"{TMP}/pair.yaml", "--knowledge", f"{TMP}/knowledge.db") as s:
        refused(s)
        arguments(s)
        http_rules(s)
        cancelled(s)
        disconnected(s)
        report("mcp: the server ends well", s.stop() == 0 or open(s.log).read()[-500:])
    keys()
    agents()
    stdio()


main()
