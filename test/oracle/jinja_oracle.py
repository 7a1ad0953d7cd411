#!/usr/bin/env python3
"""Renders chat templates with Jinja2, configured like in transformers.

  jinja_oracle.py check FILE...    whether the tables' expected results are Jinja's
  jinja_oracle.py fill FILE...     writes Jinja's results into the tables, except for '?' results
  jinja_oracle.py render           a JSON line in {template, vars, trusted, now}, one out {text} or {error}
  jinja_oracle.py shared DIR FILE  hashes of every template of DIR with the conversations of FILE
  jinja_oracle.py random SEED N    N random templates: {template, vars} with {text} or {error}

Needs the Debian package python3-jinja2. test_jinja runs it.
"""

import copy
import datetime
import hashlib
import json
import os
import random
import sys
import warnings

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """{% generation %}: transformers also records its position; the text is that of its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def render(template, variables, trusted=None, now=-1):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    if now >= 0:
        date = datetime.datetime.fromtimestamp(now, datetime.timezone.utc)
        env.globals["strftime_now"] = date.strftime
    return env.from_string(template).render(**{**variables, **(trusted or {})})


def outcome(*args):
    try:
        return {"text": render(*args)}
    except Exception as e:  # any exception of a template counts as an error
        return {"error": f"{type(e).__name__}: {e}"}


# Tables. In a '.lines' file a case is one line, 'TEMPLATE => RESULT'; in a '.blocks' file it is '== NAME', lines of
# template, '-- CONTEXT' and lines of result. A result is text (in a line: a JSON string), or '! WORDS': an error whose
# message contains WORDS, or '? WORDS': the same for features of Jinja that Shoal refuses.


def lines_cases(path):
    context = {}
    for i, line in enumerate(open(path, encoding="utf-8"), 1):
        line = line.rstrip("\n")
        if line.startswith("context: "):
            context = json.loads(line[9:])
        elif line and not line.startswith("#"):
            template, _, want = line.rpartition(" => ") if " => " in line else (line, "", "")
            yield i, template, context, want


def blocks_cases(path):
    text = "\n" + open(path, encoding="utf-8").read()
    for block in text.split("\n== ")[1:]:
        name, _, rest = block.partition("\n")
        template, _, rest = rest.partition("\n-- ")
        context, _, want = rest.partition("\n")
        yield name, template, json.loads(context), want.rstrip("\n")


def quoted(path, text):
    return json.dumps(text, ensure_ascii=False) if path.endswith(".lines") else text.rstrip("\n")


def check(path):
    bad = 0
    for name, template, context, want in cases(path):
        got = outcome(template, context)
        if want.startswith("? "):
            continue
        correct = "error" in got if want.startswith("! ") else want == quoted(path, got.get("text", "\0"))
        if not correct:
            bad += 1
            print(f"{path}: {name}: {template!r}: expected {want!r}, Jinja gives {got!r}")
    return bad


def cases(path):
    return lines_cases(path) if path.endswith(".lines") else blocks_cases(path)


def fill_results(path):
    results = {}
    for name, template, context, want in cases(path):
        got = outcome(template, context)
        if "error" in got and not want.startswith("! "):
            print(f"{path}: {name}: {template!r}: {got['error']}")
        if want.startswith("? ") or want.startswith("! "):
            results[name] = want
        else:
            results[name] = quoted(path, got["text"]) if "text" in got else "! "
    old = open(path, encoding="utf-8").read()
    blocks = [] if path.endswith(".lines") else list(blocks_cases(path))
    with open(path, "w", encoding="utf-8") as f:
        if path.endswith(".lines"):
            for i, line in enumerate(old.splitlines(), 1):
                template = line.rpartition(" => ")[0] if " => " in line else line
                f.write(f"{template} => {results[i]}\n" if i in results else line + "\n")
        else:
            f.write(old[: old.index("\n== ") + 1])
            for name, template, context, _ in blocks:
                line = json.dumps(context, ensure_ascii=False)
                f.write(f"== {name}\n{template}\n-- {line}\n{results[name]}\n\n")


def conversation_vars(c, prompt):
    return {"tools": None, "documents": None, **c.get("extra", {}), "messages": c["messages"],
            **({"tools": c["tools"]} if "tools" in c else {}), "add_generation_prompt": prompt}


TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def print_hashes(folder, conversations):
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".jinja"):
            continue
        template = open(os.path.join(folder, name), encoding="utf-8").read()
        for c in json.load(open(conversations, encoding="utf-8")):
            for prompt in False, True:
                got = outcome(template, conversation_vars(c, prompt), TOKENS, c.get("now", -1))
                mark = "error"
                if "text" in got:
                    mark = hashlib.sha256(got["text"].encode()).hexdigest()
                print(name, c["name"], int(prompt), mark)


# Random templates: every operator, filter, method and statement, with values that often have the wrong type.

HERE = os.path.dirname(os.path.abspath(__file__))
CONTEXT = json.load(open(os.path.join(HERE, "../golden/jinja/random.json"), encoding="utf-8"))
NAMES = list(CONTEXT) + ["missing", "x", "y"]
BINARY = ["+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
FILTERS = ["trim", "length", "upper", "lower", "capitalize", "title", "string", "list", "first", "last",
           "int", "float", "abs", "sort", "unique|list", "reverse|list", "join(',')", "join", "tojson",
           "tojson(indent=2)", "default('q')", "default('q', true)", "d(1)", "items|list", "dictsort",
           "replace('l','L')", "map('string')|list", "map(attribute='role')|list", "round", "round(1)",
           "selectattr('role','equalto','user')|list", "rejectattr('role')|list", "select('string')|list",
           "reject('none')|join('-')", "indent", "indent(2,true)", "sum", "min", "max", "count",
           "map('upper')|join", "format(1)", "sort(reverse=true)", "attr('k')", "e", "safe"]
TESTS = ["defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "true", "false",
         "mapping", "iterable", "sequence", "odd", "even", "divisibleby 3", "in l", "eq 7", "sameas true",
         "lower", "upper", "callable", "not none", "not defined", "gt 1", "ne 'a'"]
METHODS = ["strip()", "split(',')", "split()", "upper()", "lower()", "title()", "startswith('H')",
           "endswith(' ')", "replace('a','bb')", "lstrip('H')", "rstrip('\\n ')", "items()", "keys()|list",
           "values()|list", "get('k')", "get('q', 5)", "split(',', 1)", "rsplit(',', 1)", "find('l')",
           "count('l')", "join(w)", "splitlines()", "partition(',')", "index(1)", "capitalize()",
           "isdigit()", "removeprefix('He')", "append(1)", "format(3, 4)"]
TEXTS = [" text ", "\n", "  \n  ", "日本\n", "}", "{ ", "\t", "# x"]


class TemplateGenerator:
    def __init__(self, seed):
        self.r = random.Random(seed)

    def pick(self, options):
        return self.r.choice(options)

    def atom(self):
        p = self.r.random()
        if p < 0.55:
            return self.pick(NAMES)
        literals = ["1", "0", "-3", "2.5", "1e3", "'a'", '"b\\n"', "'日本'", "none", "true", "[1, 'a']",
                    "(1, 2)", "{'a': 1}", "[]", "''", "()", "'%s-%d'", "'{} {}'", "range(3)", "1_000"]
        return self.pick(literals)

    def expr(self, depth):
        p = self.r.random()
        if depth <= 0 or p < 0.15:
            return self.atom()
        sub = lambda: self.expr(depth - 1)
        if p < 0.40:
            return f"{sub()} {self.pick(BINARY)} {sub()}"
        if p < 0.58:
            return f"{sub()}|{self.pick(FILTERS)}"
        if p < 0.66:
            return f"{sub()} is {self.pick(TESTS)}"
        if p < 0.76:
            return f"{self.atom()}.{self.pick(METHODS)}"
        if p < 0.80:
            return f"({sub()})"
        if p < 0.84:
            return f"{sub()} if {sub()} else {sub()}"
        if p < 0.87:
            return f"{self.pick(['not ', '-'])}{sub()}"
        if p < 0.93:
            parts = ["0", "-1", "'k'", "'role'", "1:", ":-1", "::-1", "::2", "-1:0:-1", "sub", "9"]
            return f"{self.atom()}[{self.pick(parts).replace('sub', sub())}]"
        return f"{self.atom()}.{self.pick(['k', 'x.y', 'role', 'items', '0', 'content', 'x', 'zz'])}"

    def tag(self, text):
        return "{%" + self.pick(["", "", "-", "+"]) + " " + text + " " + self.pick(["", "", "-", "+"]) + "%}"

    def body(self, depth):
        return "".join(self.statement(depth) for _ in range(self.r.randint(1, 3)))

    def statement(self, depth):
        p = self.r.random()
        if depth <= 0 or p < 0.2:
            return self.pick(TEXTS)
        if p < 0.55:
            dash = self.pick(["", "", "-"])
            return "{{" + dash + " " + self.expr(3) + " " + self.pick(["", "-"]) + "}}"
        body = lambda: self.body(depth - 1)
        t = self.tag
        if p < 0.65:
            orelse = t("else") + body() if self.r.random() < 0.5 else ""
            return t("if " + self.expr(2)) + body() + orelse + t("endif")
        if p < 0.78:
            names = self.pick(["x", "x", "y", "x, y"])
            iterable = self.pick(["l", "w", "m", "d", "d.items()", "t", "el", "range(2)", self.expr(2)])
            cond = self.pick(["", "", " if x"])
            inner = body() + self.pick(["", "{{ loop.index }}", "{% if loop.last %}{% break %}{% endif %}",
                                        "{{ loop.previtem }}", "{% set x = 5 %}{{ x }}",
                                        "{% continue %}", "{{ loop.cycle('a', 'b') }}"])
            orelse = t("else") + body() if self.r.random() < 0.2 else ""
            return t(f"for {names} in {iterable}{cond}") + inner + orelse + t("endfor")
        if p < 0.86:
            return t(f"set {self.pick(['x', 'y', 'q'])} = {self.expr(2)}")
        if p < 0.89:
            return t("set x") + body() + t("endset") + "{{ x }}"
        if p < 0.92:
            return t("macro mm(x, y=2)") + body() + t("endmacro") + "{{ mm(" + self.expr(1) + ") }}"
        if p < 0.94:
            return t("filter upper") + body() + t("endfilter")
        if p < 0.96:
            return t("set ns = namespace(a=1)") + t("set ns.a = " + self.expr(1)) + "{{ ns.a }}"
        if p < 0.98:
            return t("generation") + body() + t("endgeneration")
        return "{#" + self.pick(["", "-"]) + " comment " + self.pick(["", "-"]) + "#}"

    def template(self):
        if self.r.random() < 0.7:
            return "{{ " + self.expr(self.r.randint(1, 3)) + " }}"
        return self.body(3) + self.pick(["", "\n", "\n\n"])


def print_json(value):
    print(json.dumps(value, ensure_ascii=False), flush=True)


def main(argv):
    warnings.simplefilter("ignore", SyntaxWarning)
    sys.stdout.reconfigure(encoding="utf-8")
    if len(argv) > 1 and argv[0] == "check":
        return sum(check(path) for path in argv[1:]) > 0
    if len(argv) > 1 and argv[0] == "fill":
        for path in argv[1:]:
            fill_results(path)
    elif argv == ["render"]:
        for line in sys.stdin:
            v = json.loads(line)
            print_json(outcome(v["template"], v["vars"], v.get("trusted"), v.get("now", -1)))
    elif len(argv) == 3 and argv[0] == "shared":
        print_hashes(argv[1], argv[2])
    elif len(argv) == 3 and argv[0] == "random":
        for i in range(int(argv[2])):
            template = TemplateGenerator(int(argv[1]) * 1000003 + i).template()
            print_json({"template": template, **outcome(template, copy.deepcopy(CONTEXT))})
    else:
        sys.stderr.write(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
