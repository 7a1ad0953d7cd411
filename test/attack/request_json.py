"""JSON in requests: invalid JSON is refused in linear time and bounded memory, with a message about the input."""
import json

from attack import CHAT, Server, report

MB = 1 << 20


def chat(content="hi", call_arguments=()):
    turn = {"role": "assistant", "content": content}
    if call_arguments:
        turn["tool_calls"] = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": a}}
                              for a in call_arguments]
    return {"model": "fry-1", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}, turn]}


def error_message(text):
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text[:200]


with Server() as s:
    s.ask(CHAT, chat())

    # Regression: 0.64 MB of values before a syntax error once took 12.8 s to refuse.
    for name, unit in (("strings", b'"the quick brown fox",'), ("lists", b"[],"), ("members", b'{"a":{"b":1}},')):
        size = 4 * MB if name == "strings" else MB
        status, text, seconds = s.ask(CHAT, raw=b'{"messages":[' + unit * (size // len(unit)))
        report(f"json: {name} cut short are refused at once",
               (status == 400 and seconds < 5) or f"{status} {error_message(text)} after {seconds:.1f} s")

    # The arguments of a tool call are a string that contains JSON, which is parsed too. Regression: 12 MB of it once
    # took 0.7 GB of memory.
    before = s.memory("VmHWM")
    for name, call_arguments in (("one call", ["[" + "{}," * (4 * MB) + "{}]"]),
                                 ("many calls", ["[" + "{}," * 20000 + "{}]"] * 100),
                                 ("a deep one", ["[" * 1000 + "]" * 1000])):
        status, text, seconds = s.ask(CHAT, chat(call_arguments=call_arguments))
        report(f"json: heavy tool arguments are refused: {name}",
               (status == 400 and ("arguments" in text or "memory" in text) and seconds < 5)
               or f"{status} {error_message(text)} after {seconds:.1f} s")
    grown = (s.memory("VmHWM") - before) // MB
    report("json: heavy tool arguments take little memory", grown < 250 or f"{grown} MB")
    for name, arguments in (("an object", '{"a": 1}'), ("no JSON", "no JSON"), ("a key twice", '{"a":1,"a":2}')):
        status, text, _ = s.ask(CHAT, chat(call_arguments=[arguments]))
        report(f"json: usual tool arguments are read: {name}", status == 200 or f"{status} {error_message(text)}")

    # The messages describe the input, not the library that parses it.
    for name, raw, words in (("U+0000", b'{"a":"\\u0000"}', "U+0000"),
                             ("half a surrogate pair", b'{"a":"\\ud800"}', "surrogate"),
                             ("a deep one", b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "nested more than 100 deep")):
        status, text, _ = s.ask(CHAT, raw=raw)
        report(f"json: the message of a refusal is about the input: {name}",
               (status == 400 and words in error_message(text) and "JSON_" not in text)
               or f"{status} {error_message(text)}")
    report("json: the server still runs", s.alive())
