"""templates: chat templates and variables that are designed to use the server's time or memory.

Without --trust-request-chat-template they are refused. With it, eight of each kind in parallel end at the limits of
rendering, while a normal client and /health are served.
"""
import http.client
import json
import threading
import time

from attack import CHAT, Server, report

KEY = {"SHOAL_API_KEY": "sk-attack"}
USER = [{"role": "user", "content": "hello"}]
LOOPS = "{%% for a in range(99999) %%}{%% for b in range(999) %%}%s{%% endfor %%}{%% endfor %%}"


def loop(expression, before=""):
    return before + LOOPS % ("{% if " + expression + " %}{% endif %}")


DEEP = ("{% set n = namespace(l=[1], m=[1], t=(1,)) %}{% for i in range(40) %}{% set n.l = [n.l, n.l] %}"
        "{% set n.m = [n.m, n.m] %}{% set n.t = (n.t, n.t) %}{% endfor %}")
TEMPLATES = {
    "nested in": "{% set l = range(99999)|list %}{% for a in l %}{% for b in l %}{% for c in l %}{% if -1 in l %}x{% endif %}"
                 "{% if -1 in l %}x{% endif %}{% if -1 in l %}x{% endif %}{% if -1 in l %}x{% endif %}"
                 "{% endfor %}{% endfor %}{% endfor %}",
    "equal deep lists": loop("n.l == n.m", DEEP),
    "a deep key": loop("n.t in {1: 1}", DEEP),
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "replace": "{% set s = 'a' * 99999 %}{{ s|replace('a', s)|replace('a', s) }}",
    "join": "{% set l = ['x' * 999] * 99999 %}{{ l|join(l|join) }}",
    "sort": loop("l|sort", "{% set l = [['a' * 9999, 1]] * 9999 %}"),
    "macros": "{% macro m(x) %}{% if x %}{{ m(x - 1) }}{{ m(x - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
    "endless macros": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "range": "{{ range(1000000000)|length }}",
    "format": "{{ '%99999999d' % 1 }}",
    "center": "{{ 'a'|center(1000000000) }}",
    "output": "{{ 'は' * 2000000 }}",
    "namespaces": "{% set n = namespace() %}" + LOOPS % "{% set n.a = [n.a] %}",
    "slices": loop("s[::-1]", "{% set s = 'a' * 999999 %}"),
    "sums": loop("l|sum", "{% set l = range(99999)|list %}"),
    "floats": loop("1.23456789e300|round(20)"),
}
LIMITS = ("too many steps", "writes more than", "MiB of memory", "nested too deeply", "longer than", "not supported", "was ended")


def template_body(template):
    return {"messages": USER, "chat_template": template, "max_tokens": 1}


def normal_client(s, waits, stop):
    """A normal client, with a request to /health next to each of its requests."""
    while not stop.is_set():
        for path, body in ((CHAT, {"messages": USER, "max_tokens": 1}), ("/health", None)):
            try:
                status, _, took = s.ask(path, body, key="sk-attack")
                waits.append((path, status, took))
            except (OSError, http.client.HTTPException) as e:
                waits.append((path, repr(e), 99))
        stop.wait(0.02)


def send_parallel(s, body, n=8):
    """The answers to n equal requests that are sent together."""
    answers = [None] * n

    def one(i):
        answers[i] = s.ask(CHAT, body, key="sk-attack", timeout=60)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return answers


def refused_without_flag():
    with Server(env=KEY) as s:
        wrong = []
        for path in (CHAT, "/tokenize"):
            for name, template in list(TEMPLATES.items())[:2] + [("harmless", "{{ messages[0].content }}")]:
                body = template_body(template)
                if path != CHAT:
                    del body["max_tokens"]  # not a field of this path
                status, text, seconds = s.ask(path, body, key="sk-attack")
                if status != 400 or "--trust-request-chat-template" not in text or seconds > 5:
                    wrong.append((path, name, status, text[:80]))
        report("a chat_template in a request is refused without the flag", not wrong or wrong)
        status, text, _ = s.ask(CHAT, template_body("x"), key="sk-attack")
        report("the refusal names the field", json.loads(text)["error"]["param"] == "chat_template" or text)


def limits_hold(s):
    waits, stop = [], threading.Event()
    client = threading.Thread(target=normal_client, args=(s, waits, stop))
    client.start()
    wrong, slowest = [], 0
    for name, template in TEMPLATES.items():
        for status, text, seconds in send_parallel(s, template_body(template)):
            slowest = max(slowest, seconds)
            if status not in (400, 503) or not any(words in text for words in LIMITS):
                wrong.append((name, status, text[:100]))
    stop.set()
    client.join()
    report(f"{len(TEMPLATES)} hostile templates, eight at once, end at limits", not wrong or wrong)
    bad = [w for w in waits if w[1] != 200]
    most = max(w[2] for w in waits)
    print(f"# slowest attack {slowest:.2f} s; {len(waits)} ordinary requests, slowest {most:.2f} s", flush=True)
    report("a normal client and /health are answered meanwhile", not bad and len(waits) > 10 and most < 10
           or (bad, len(waits), most))


def vanished_clients(s):
    """The work for clients that disconnect ends."""
    body = json.dumps(template_body(TEMPLATES["nested in"])).encode()
    for _ in range(40):
        c = http.client.HTTPConnection("127.0.0.1", s.port, timeout=10)
        c.request("POST", CHAT, body, {"Content-Type": "application/json", "Authorization": "Bearer sk-attack"})
        c.sock.close()
    status, _, seconds = s.ask(CHAT, {"messages": USER, "max_tokens": 1}, key="sk-attack")
    report("forty disconnected clients delay no request", status == 200 and seconds < 10 or (status, seconds))


def variables(s):
    many = {f"key{i}": i for i in range(80000)}
    status, text, seconds = s.ask(CHAT, {"messages": USER, "chat_template_kwargs": many, "max_tokens": 1}, key="sk-attack")
    report("80,000 names in chat_template_kwargs are refused at once",
           status == 400 and "1024" in text and seconds < 5 or (status, text[:100], seconds))
    some = {"messages": USER, "chat_template_kwargs": {"x": many}, "max_tokens": 1, "chat_template": "{{ x.key7 }}{{ x.none }}"}
    status, text, seconds = s.ask(CHAT, some, key="sk-attack")
    report("80,000 names in one variable are looked up quickly", status == 200 and seconds < 5 or (status, text[:100], seconds))
    rows = [{"role": "user", "content": "a"}] * 65537
    status, text, seconds = s.ask(CHAT, {"messages": rows, "max_tokens": 1}, key="sk-attack")
    report("more than 65,536 messages are refused", status == 400 and "65536" in text and seconds < 10 or (status, text[:100], seconds))
    status, text, seconds = s.ask(CHAT, template_body("x" * 70000), key="sk-attack")
    report("a template of 70,000 bytes is refused", status == 400 and "larger" in text or (status, text[:100]))
    # Consecutive texts of one role were joined by copying all of them for each.
    rows = [{"role": "system", "content": "abcdefghij"}] * 65000
    status, text, seconds = s.ask(CHAT, {"messages": rows, "chat_template": "{{ messages|length }}", "max_tokens": 1}, key="sk-attack")
    report("65,000 system messages in a row are joined quickly", status == 200 and seconds < 8 or (status, text[:100], seconds))


def going_on(s):
    """The end of the last message's tokens was searched by comparison at every position of the prompt."""
    text = "は" * 300000 + "x"
    body = {"messages": [{"role": "user", "content": "は" * 300000}, {"role": "assistant", "content": text}],
            "continue_final_message": True, "max_tokens": 1, "chat_template": "{{ messages[0].content }}{{ messages[0].content }}"}
    status, text, seconds = s.ask(CHAT, body, key="sk-attack", timeout=120)
    report("a long continued message is found quickly", status == 400 and seconds < 15 or (status, text[:100], seconds))


def stops_in_time(s):
    threads = [threading.Thread(target=lambda: send_parallel(s, template_body(TEMPLATES["nested in"]), 4)) for _ in range(2)]
    for t in threads:
        t.daemon = True
        t.start()
    time.sleep(0.2)
    began = time.time()
    s.process.terminate()
    try:
        s.process.wait(20)
    except Exception:  # it is a failure if the server still runs
        pass
    report("the server ends within its drain while it renders", not s.alive() and time.time() - began < 12)


refused_without_flag()
with Server("--trust-request-chat-template", env=KEY) as server:
    limits_hold(server)
    vanished_clients(server)
    variables(server)
    going_on(server)
    report("the server still runs", server.alive())
    stops_in_time(server)
