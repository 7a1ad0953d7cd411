#!/usr/bin/env python3
"""prose: counts idiomatic phrases in comments, documents and messages.

    scripts/prose.py [PATHS]         words, hits and hits per 1,000 words of each folder, then the hits of each pattern
    scripts/prose.py --list [PATHS]  prints every hit as FILE:LINE: pattern: the text
    scripts/prose.py --check         exits 1 when src, docs, README.md and CONTRIBUTING.md together have more than --limit
                                     hits per 1,000 words (default 1.0), and prints the files with the most hits
    scripts/prose.py --new [REV]     reads only lines added since REV (default HEAD); exits 1 on any hit
    scripts/prose.py --self-test     checks the examples of every pattern

Without PATHS it reads the whole repository: comments of C, JavaScript, CSS, Python, shell, YAML and make, docstrings,
Markdown without its code, and string literals of C that read like a sentence (except in tests and DATA_FILES, where strings are
data). Lines of mostly Chinese or Japanese characters, generated files and test vectors are skipped.

A pattern matches a phrase that plain technical English does not need. Some hits are correct English, so the limit is above
zero. Overlapping hits count once. To add a pattern, add a row to PATTERNS with one example that the pattern must match and
one that no pattern may match, then run --self-test.

Hits per 1,000 words at the time of writing: redis 0.2, lua 0.5, raft 0.3, llama2.c 0.3, src of this repository 29.0.
"""
import argparse
import bisect
import os
import re
import signal
import subprocess
import sys
from collections import Counter, namedtuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CHECKED = ["src", "docs", "README.md", "CONTRIBUTING.md"]
DATA_FILES = {"wordings.c"}  # its strings are questions of users, who may say "in which city am I at home?"
SKIPPED = {"build", "node_modules", "fuzz", "golden", "vectors"}

# Pieces of the expressions below. A blank in an expression matches one or more blanks; END is the end of a clause.
IS = "(?:is|are|was|were|be|been|being)"
END = r"(?=[^\S\n]*(?:[.;:,)\]]|$))"
START = r"^[^\w\n#`]*"
PEOPLE = ("(?:users?|persons?|people|clients?|humans?|readers?|authors?|developers?|engineers?|programmers?|"
          "operators?|owners?|admins?|administrators?|maintainers?|contributors?|researchers?|attackers?|those|anyone|"
          "someone|everyone|he|she|you)")
LEARN = ("(?:know|knows|known|say|says|see|sees|show|shows|shown|check|checks|decide|decides|describe|describes|define|"
         "defines|explain|explains|determine|determines|understand|find|remember|remembers|specify|specifies|matter|about|"
         "exactly|on)")
TAKE = ("returns?|appends?|takes?|keeps?|kept|reads?|writes?|holds?|gives?|gets?|adds?|makes?|frees?|releases?|removes?|"
        "replaces?|copy|copies|counts?|leaves?|puts?|sends?|needs?|drops?|forgets?|stores?|skips?|loads?")
LINK = ("of|for|from|with|by|to|at|in|into|beside|behind|besides|under|over|after|before|but|without|against|among|between|"
        "except|and|or|nor|than|as|through|only|all")
UNIT = ("line|row|file|byte|symbol|dot|key|token|rank|page|slot|thread|call|entry|state|object|node|folder|adapter|sample|"
        "word|part|letter|value")
UNITS = "bytes|rows|tokens|nats|ticks|samples|calls|steps|bits|numbers|updates|questions|requests|floats|points"

# A hit directly after the expression `after` does not count.
Pattern = namedtuple("Pattern", "name regex write bad good after", defaults=("",))
PATTERNS = [Pattern(*row) for row in (
    ("who", r"\bwho(?:m|ever)?\b(?! owns\b)", "the noun: the request that, the thread that",
     "a counter for who waits", "users who have no key", rf"\b{PEOPLE},?(?: (?:to|of|for|from|with))? $"),
    ("whose", START + r"whose\b|\bwhose (?:is|are|was|it)\b", "the noun and its owner",
     "whose row it is", "a request whose prompt is long"),
    ("what-subject", r"(?:^|[.;:] )[^\w\n#`]*what\b(?! (?:we|you|I|follows|happens|happened|if|about)\b|'|[^.;\n]*\?)",
     "the noun as subject", "What is done leaves the queue.", "What happens when the file is missing?"),
    ("what-clause", rf"\bwhat (?:{IS}|of|has|had|stands|stood|belongs|comes|came|becomes|became|no)\b(?![^.;\n]*\?)",
     "the noun", "the rest, what was left there", "the message says what is wrong", rf"\b{LEARN}(?: \w+)? $"),
    ("what-object", rf"\b(?:{LINK}|{TAKE}) what\b(?! (?:to|we|you|I)\b)", "the noun as object",
     "a copy of what the client sent", "it decides what to do", r"\b(?:compared|similar|refer|refers|referring|equal) $"),
    ("nobody", r"\b(?:no|some|every|any)body(?:'s)?\b", "no thread, a caller, all agents",
     "a page that nobody holds", "a page without a reference"),
    ("lies", r"\b(?:lies?|lain)\b(?! (?:about|to|between|within)\b)", "is stored in, is in",
     "the table lies beside the file", "the value lies between 0 and 1"),
    ("stands", r"\b(?:stands?|stood)\b(?! (?:for|out|alone)\b|-)", "is, is stored, precedes",
     "the row stands in the store", "KV stands for keys and values", r"\bas (?:it|they) $|-$"),
    ("told", r"\b(?:told|promised)\b(?! (?:apart|otherwise|to)\b)", "reported, passed, guaranteed",
     "errors are told at the end", "unless told otherwise, the default applies"),
    ("asked", rf"\b{IS}(?: \w+)? asked\b(?! (?:for|to)\b)", "queried, called, prompted",
     "each source is asked once", "when n bytes are asked for"),
    ("said", rf"\b{IS}(?: \w+)? said\b(?! to\b)|\bsays? (?:so|nothing|anything)\b|\b(?:does|did|do) not say\b",
     "printed, reported, specified", "the reason is said in the log", "a set is said to be closed"),
    ("that-is-why", r"\b(?:that|which) (?:is|was) why (?:it|they|there|no|a)\b", "so, therefore",
     "it waits, that is why it is slow", "it waits, so it is slow"),
    ("goes-on", r"\b(?:goes|go|went|gone) on\b(?! (?:the|an?|top)\b)", "continues",
     "the walk goes on with the next node", "the block goes on the free list"),
    ("back", r"\b(?:come|comes|came|coming) back\b|\b(?:give|gives|gave|given|giving|hand|hands)(?: \w+)? back\b",
     "returns, releases", "the pages are given back", "the pages are released"),
    ("by-itself", r"\bby (?:itself|themselves)\b", "alone, automatically, separately",
     "the tail is encoded by itself", "the tail is encoded separately"),
    ("aloud", r"\baloud\b", "with a message", "the test skips aloud", "the test prints why it is skipped"),
    ("as-there-is", rf"\b(?:as (?:much|many|far|few)(?: \w+)? as|all) there (?:is|are|was|were)\b|"
     rf"\bthere (?:is|are|was|were){END}", "all, the number that exists",
     "as many rows as there are", "returns how many rows there are", r"\bhow (?:many|much)(?: \w+){0,3} $"),
    ("is-there", rf"\b{IS}(?: not| already| still| never| always)? there(?:{END}| (?:and|or|but|when|yet)\b)",
     "exists, is present", "NULL when the file is not there", "is there a file in the folder?"),
    ("own", rf"\b(?:of|on) (?:its|their|his|her|one's|our) own\b|\b\w+'s? own\b{END}|\b(?:the|an) own\b",
     "its, separate, private", "a lock of its own", "its own lock"),
    ("want-of", r"\bfor want of\b", "because there is no", "refused for want of memory", "refused: no memory is left"),
    ("is-none", r"\b(?:is|are|was|were|has|have|had|needs?) none\b", "does not exist, has no",
     "-1 if there is none", "the mode none disables it"),
    ("is-no", r"\b(?:is|are|was|were) no (?!longer|more|less|need|doubt|way|such|matter|other|one|guarantee|point|or)\w+",
     "is not a", "a name that is no path", "there is no path", r"\bthere(?: also)? $"),
    ("but-for", r"\bbut for\b", "except", "all rows but for the last", "like f() but for signed values",
     r"\blike [^.]*|function "),
    ("so-many", r"\bso many\b(?! that)|\bso much\b(?! (?:that|as|more|less|faster|slower))", "n, that number of",
     "after so many seconds", "so many that they do not fit"),
    ("beside", r"\bbeside\b", "next to, in addition to, compared with",
     "a thread beside the server", "a thread in addition to the server"),
    ("behind", rf"\bbehind\b(?!{END}| (?:the scenes|(?:the )?(?:last|leader|master|snapshot|live)|an? (?:\w+ )?proxy)\b)",
     "after", "the byte behind the quote", "a replica lags behind the leader",
     r"\b(?:falls?|lags?|lagging|hidden|reasoning|idea) $"),
    ("anew", r"\banew\b", "again", "the sum is made anew", "the sum is computed again"),
    ("wanted", rf"\b{IS} wanted\b|\bto be had\b", "required, requested, expected",
     "a number is wanted", "a number is required"),
    ("is-of", r"\b(?:is|are|was|were) of (?:an?|the|one|all|its|it|lives|this|that|what|each|every)\b"
     r"(?! (?:\w+ )?(?:type|kind|form|size|length)\b)", "belongs to, applies to",
     "the flag is of a trace", "the value is of type int"),
    ("headless", START + "(?:of|(?-i:that)|(?:in|from|to|by|at|into|with|under|on) which) ",
     "begin with the noun: number of, rows that", "of the last step", "the duration of the last step"),
    ("its-first", START + "(?-i:Its|Their|They|Theirs) ", "begin with the noun",
     "Its first row.", "The first row of the table."),
    ("a-per", rf"\b(?:an?|one|half an?) (?:{UNIT}) an? [a-z]+|"
     rf"\b(?:{UNITS}) an? (?!second|minute|hour|day|time|week|month)[a-z]+", "per",
     "it writes a line an update", "400 requests a second", r"\b(?:which|how many|the|total) $"),
    ("sure", r"\bhow sure(?:ly)?\b|\b(?:as|less|more|most) sure\b", "confidence, probability",
     "how sure an answer is", "make sure that it is closed"),
    ("gave-way", r"\b(?:gave|gives?|giving) way\b", "switched to", "two agents gave way", "two agents switched"),
    ("gone", r"\b(?:is|are|was|were|be|has|have|had) gone\b", "is removed, has ended, disconnected",
     "until the client has gone", "until the client disconnects"),
    ("as-it-is", r"\b(?:stays?|stayed|is|are|left|leaves?|kept|keeps?|remains?) as (?:it|they) (?:is|are|was|were)\b",
     "unchanged", "the file stays as it was", "the file stays unchanged"),
    ("genitive", rf"\b(?:is|are|was|were) (?:the|an?|another|each|every|this) \w+'s\b(?:{END}|(?= to\b))",
     "belongs to, the caller does", "the buffer is the caller's", "the caller owns the buffer"),
    ("another-than", r"\b(?:another|others)(?: \w+)? than\b", "other than, a different",
     "another size than its base", "a size other than that of the base"),
    ("looked-at", rf"\b{IS}(?: \w+)? looked (?:at|into|through)\b", "checked, examined",
     "each row is looked at once", "each row is looked up once"),
    ("all-that", r"\ball that (?!follows?\b|remains?\b|matters\b|(?:is|was) (?:needed|required)\b)\w",
     "everything, all + noun", "all that the run keeps", "everything the run keeps"),
    ("comes-of", r"\b(?:comes?|came|become|becomes|became) of\b", "result, outcome",
     "the text that came of it", "the text that resulted"),
    ("where-if", r"\bwhere (?:there (?:is|are|was|were)|none|nothing)\b", "if", "0 where nothing is set", "0 if unset"),
)]


def spaced(regex):
    return re.compile(regex.replace(" ", " +"), re.I | re.M)


COMPILED = [(p.name, spaced(p.regex), spaced(f"(?:{p.after})\\Z") if p.after else None) for p in PATTERNS]
WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*")
CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uff00-\uffef]")
CODE = re.compile(r"`[^`\n]*`|https?://\S+")

STRING = r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
GLUE = r"(?:\s|PRI\w+)*"
C_TOKEN = re.compile(rf'"(?:\\.|[^"\\\n])*"(?:{GLUE}"(?:\\.|[^"\\\n])*")*|{STRING}|/\*.*?\*/|'
                     r"//[^\n]*(?:\n[ \t]*//[^\n]*)*", re.S)
CSS_TOKEN = re.compile(rf"{STRING}|/\*.*?\*/", re.S)
HASH = r"(?<!\S)#[^\n]*(?:\n[ \t]*#[^\n]*)*"
PY_TOKEN = re.compile(rf'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|{STRING}|{HASH}', re.S)
HASH_TOKEN = re.compile(rf"{STRING}|{HASH}")
LEADER = re.compile(r"\A(?:/[*/]+|#+!?)|\n[ \t]*(?:/{2,}|\*+/?|#+)?|\*+/\Z")
ESCAPE = re.compile(rf'"{GLUE}"|\\.|\n', re.S)
FORMAT = re.compile(r"%[-+ #0-9.*]*(?:hh|h|ll|l|z|j|t)?[a-zA-Z%]")
PLAIN = re.compile(r"(?<!\S)[('\[]?[A-Za-z][a-z'-]+[,.:;)'\]]*(?!\S)")
NOT_TEXT = re.compile(r"<|\A[^a-z]*(?:SELECT|INSERT|CREATE|UPDATE|DELETE|DROP|ALTER|PRAGMA|BEGIN)\b|[{};][^ ]*[{};]")


def blank(regex, text, mark=" "):
    """Replaces each match by as many marks, so that offsets stay valid. A mark other than a blank ends a phrase."""
    return regex.sub(lambda m: mark * len(m.group()), text)


def english(text):
    """Replaces lines of mostly Chinese or Japanese characters by blanks."""
    if not CJK.search(text):
        return text
    return "\n".join(" " * len(t) if 4 * len(CJK.findall(t)) > len(t) else t for t in text.split("\n"))


def blocks(text, token, strings):
    """Yields (offset, text) of the comments, docstrings and messages in source code, with offsets as in the source."""
    for m in token.finditer(text):
        t = m.group()
        if t[:3] in ('"""', "'''"):
            margin = text[text.rfind("\n", 0, m.start()) + 1:m.start()]
            if not margin.strip(" rR"):  # else it is a value, not a docstring
                yield from ((m.start() + at, part) for at, part in paragraphs(" " * 3 + t[3:-3], margin))
        elif t[0] in "/#":
            yield m.start(), blank(LEADER, english(t))
        elif t[0] == '"' and strings:
            t = blank(FORMAT, blank(ESCAPE, t), "#")
            if len(PLAIN.findall(t)) >= 3 and not NOT_TEXT.search(t[1:]):
                yield m.start(), ("#" if t[1] == " " else " ") + t[1:]  # a continued text has no start


def paragraphs(text, margin=""):
    """Yields (offset, text) of the paragraphs, list items and table cells of Markdown that is indented by `margin`."""
    at, start, part, fence, code, previous = 0, 0, "", False, False, ""
    for line in text.split("\n"):
        bare = line.strip()
        item = re.match(r"\s*(?:[-*+]|\d+\.) ", line)
        indented = line.startswith(margin + "    ") and not item
        code = bool(bare) and indented and (code or not previous)
        marks = bare.startswith(("```", "~~~"))
        if (marks or fence or code or not bare or item or bare[0] in "|#" or previous[:1] in ("#", "|")) and part:
            yield start, part
            part = ""
        fence ^= marks
        if not (marks or fence or code or not bare):
            if not part:
                start = at
            part += line.replace("|", "\n") + " "
        at, previous = at + len(line) + 1, bare
    if part:
        yield start, part


def prose_of(path):
    """Returns the source and a list of (offset, text), or None when the file's type is not read."""
    name, ext = os.path.basename(path), os.path.splitext(path)[1]
    tokens = {".c": C_TOKEN, ".h": C_TOKEN, ".inc": C_TOKEN, ".js": C_TOKEN, ".css": CSS_TOKEN, ".py": PY_TOKEN,
              ".sh": HASH_TOKEN, ".yaml": HASH_TOKEN, ".yml": HASH_TOKEN}
    token = HASH_TOKEN if name == "Makefile" else tokens.get(ext)
    if not token and ext != ".md":
        return None
    with open(path, encoding="utf-8", errors="replace") as f:
        text = f.read()
    if ext == ".md":
        return text, list(paragraphs(english(text)))
    strings = ext in (".c", ".h", ".inc") and "test" not in path.split(os.sep) and name not in DATA_FILES
    return text, list(blocks(text, token, strings))


def hits_in(text):
    """Returns (begin, end, name) of each hit in a text of one block per line. The first of overlapping hits counts."""
    found = []
    for name, regex, after in COMPILED:
        for m in regex.finditer(text):
            if not after or not after.search(text[max(0, m.start() - 40):m.start()]):
                found.append((m.start(), m.end(), name))
    kept = []
    for hit in sorted(found):
        if not kept or hit[0] >= kept[-1][1]:
            kept.append(hit)
    return kept


def scan(path):
    """Returns the number of words and a list of (first line, last line, pattern, text), or None."""
    prose = prose_of(path)
    if not prose:
        return None
    source, parts = prose
    starts, size = [], 0
    for _, t in parts:
        starts.append(size)
        size += len(t) + 1
    raw = "\n".join(t for _, t in parts)
    text = blank(CODE, raw, "`")
    breaks = [m.start() for m in re.finditer("\n", source)]

    def line(at):
        i = bisect.bisect_right(starts, at) - 1
        return bisect.bisect_left(breaks, parts[i][0] + at - starts[i]) + 1

    hits = []
    for begin, end, name in hits_in(text):
        left, right = text.rfind("\n", 0, begin) + 1, text.find("\n", end)
        around = raw[max(left, begin - 40):min(right if right >= 0 else size, end + 40)]
        hits.append((line(begin), line(end - 1), name, " ".join(around.split())))
    return len(WORD.findall(text)), hits


def files_of(paths):
    for path in paths:
        if not os.path.isdir(path):
            yield path
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(d for d in folders if d[0] != "." and d not in SKIPPED)
            yield from (os.path.normpath(os.path.join(folder, n)) for n in sorted(names))


def rate(hits, words):
    return 1000 * hits / max(words, 1)


def report(results):
    folders = {}
    for path, (words, hits) in results.items():
        for key in ("/".join(os.path.dirname(path).split(os.sep)[:2]) or ".", "all"):
            row = folders.setdefault(key, [0, 0])
            row[0] += words
            row[1] += len(hits)
    folders["all"] = folders.pop("all", [0, 0])
    print(f"{'folder':24} {'words':>8} {'hits':>7} {'per 1,000':>10}")
    for key, (words, hits) in folders.items():
        print(f"{key:24} {words:8} {hits:7} {rate(hits, words):10.2f}")
    counts = Counter(h[2] for _, hits in results.values() for h in hits)
    print(f"\n{'pattern':24} {'hits':>8}  write instead")
    for p in sorted(PATTERNS, key=lambda p: -counts[p.name]):
        print(f"{p.name:24} {counts[p.name]:8}  {p.write}")


def show(path, hits):
    for first, _, name, text in hits:
        print(f"{path}:{first}: {name}: {text}")


def check(results, limit):
    words = sum(w for w, _ in results.values())
    hits = sum(len(h) for _, h in results.values())
    print(f"{hits} hits in {words} words, {rate(hits, words):.2f} per 1,000 (limit {limit:g})")
    if rate(hits, words) <= limit:
        return 0
    for path, (w, h) in sorted(results.items(), key=lambda r: -len(r[1][1]))[:10]:
        print(f"  {path}: {len(h)} hits, {rate(len(h), w):.2f} per 1,000")
    return 1


def added_lines(rev):
    """Returns {path: set of line numbers} that the working tree adds to a revision; None: the whole file is new."""
    def git(*args):
        return subprocess.run(["git", "-c", "core.quotepath=off", *args], check=True, capture_output=True, text=True,
                              errors="replace").stdout
    added, path = {}, None
    for line in git("diff", "-U0", "--no-color", "--no-ext-diff", "--no-prefix", rev, "--").split("\n"):
        if line.startswith("+++ "):
            path = line[4:].split("\t")[0]
        elif m := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, n = int(m[1]), int(m[2] or 1)
            added.setdefault(path, set()).update(range(first, first + n))
    added.update((path, None) for path in git("ls-files", "-o", "--exclude-standard").split("\n"))
    return added


def check_new(rev):
    n = 0
    for path, lines in sorted(added_lines(rev).items()):
        result = scan(path) if os.path.isfile(path) and not SKIPPED & set(path.split("/")) else None
        hits = [h for h in result[1] if lines is None or lines & set(range(h[0], h[1] + 1))] if result else []
        show(path, hits)
        n += len(hits)
    return n > 0


def self_test():
    failed = 0
    for p in PATTERNS:
        bad, good = ([h[2] for h in hits_in(t)] for t in (p.bad, p.good))
        if p.name not in bad or good:
            failed += 1
            print(f"{p.name}: found {bad} in '{p.bad}', {good} in '{p.good}'")
    for token, source, expected in (
            (C_TOKEN, 'f("no\\tword"); /* one\n * two */ g(\'"\'); // three\n  // four', "one two three four"),
            (C_TOKEN, 'e("rank %d is out " "of " PRIu64 " range"); f("%s/%d");', "rank is out of range"),
            (CSS_TOKEN, 'a { b: url("//c") } /* d */', "d"),
            (PY_TOKEN, '    """One.\n\n    Two.\n\n        no"""\nx = """no"""  # three\n"#no"', "One Two three"),
            (HASH_TOKEN, "a=${b#no} '#no' # it's\n# one", "it's one")):
        text = " ".join(WORD.findall(" ".join(t for _, t in blocks(source, token, True))))
        if text != " ".join(WORD.findall(expected)):
            failed += 1
            print(f"'{source}': read as '{text}'")
    text = " ".join(" ".join(t for _, t in paragraphs("# A\n\n    no\n\n```\nno\n```\n* b\n  c\n\n| d | e |")).split())
    if text != "# A * b c d e":
        failed += 1
        print(f"Markdown is read as '{text}'")
    print("failed" if failed else f"{len(PATTERNS)} patterns are right")
    return failed > 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", metavar="PATH")
    parser.add_argument("--list", action="store_true", help="print every hit")
    parser.add_argument("--check", action="store_true", help="exit 1 above the limit")
    parser.add_argument("--limit", type=float, default=1.0, help="hits per 1,000 words (1.0)")
    parser.add_argument("--new", nargs="?", const="HEAD", metavar="REV", help="check only lines added since REV (HEAD)")
    parser.add_argument("--self-test", action="store_true", help="check the examples of the patterns")
    args = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if args.self_test:
        return self_test()
    for path in args.paths:
        if not os.path.exists(path):
            parser.error(f"no file or folder '{path}'")
    if args.new or not args.paths:
        os.chdir(ROOT)
    if args.new:
        return check_new(args.new)
    results = {}
    for path in files_of(args.paths or (CHECKED if args.check else ["."])):
        result = scan(path)
        if result:
            results[path] = result
    if args.list:
        for path, (_, hits) in results.items():
            show(path, hits)
    elif not args.check:
        report(results)
    return check(results, args.limit) if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
