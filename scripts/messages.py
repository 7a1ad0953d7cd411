#!/usr/bin/env python3
"""Keeps the translations of messages and help texts (po/*.po) in step with the sources; needs gettext.

    scripts/messages.py --update    adds new texts to the catalogues, untranslated, and removes those that are gone
    scripts/messages.py --check     fails if a catalogue is malformed, has texts that are gone, or lacks more than 5 %

Messages are the formats of error_set, error_wrap, log_… and translate. Help texts are the string literals that occur in
docs/COMMANDS.md, which is made from them.
"""
import ast
import glob
import os
import re
import subprocess
import sys
import tempfile

KEYWORDS = "error_set:3 error_wrap:2 error_errno:2 log_warn:1 log_info:1 log_message:1 log_error:2 translate:1".split()
LEAST = 0.95  # share of translated texts
HEADER = '''msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"
"Content-Transfer-Encoding: 8bit\\n"

'''


def run(*command, **options):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def entries(po):
    """[(msgid, msgstr, references)] of a catalogue, without the header."""
    found, refs, texts, field = [], [], {}, None
    for line in po.splitlines() + [""]:
        if line.startswith("#:"):
            refs += line[2:].split()
        match = re.match(r'(msgid|msgstr)? ?(".*")$', line)
        if match:
            field = match[1] or field
            texts[field] = texts.get(field, "") + ast.literal_eval(match[2])
        elif not line and texts:
            if texts.get("msgid"):
                found.append((texts["msgid"], texts.get("msgstr", ""), refs))
            refs, texts, field = [], {}, None
    return found


def xgettext(*options):
    sources = sorted(glob.glob("src/*/*.[ch]"))
    return entries(run("xgettext", "-o", "-", "--from-code=UTF-8", "--no-wrap", *options, *sources, stderr=subprocess.DEVNULL))


def letters(text):
    return re.sub(r"\s", "", text)


def template():
    """The texts to translate: {msgid: references}."""
    texts = {text: refs for text, _, refs in xgettext("--keyword=", *("--keyword=" + k for k in KEYWORDS)) if re.search("[a-z]{2}", text)}
    help_texts = letters(open("docs/COMMANDS.md", encoding="utf-8").read())
    for text, _, refs in xgettext("--extract-all"):
        if " " in text.strip() and len(letters(text)) >= 12 and re.search("[A-Za-z]{3}", text) and letters(text) in help_texts:
            texts.setdefault(text, refs)
    return texts


def quoted(text):
    body = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return '"' + body + '"'


def write(path, translations, texts):
    """Writes the catalogue of the texts in the order of the sources."""
    order = sorted(texts, key=lambda t: (texts[t][0].rsplit(":", 1)[0], t) if texts[t] else ("", t))
    with open(path, "w", encoding="utf-8") as file:
        file.write(HEADER)
        for text in order:
            flag = "#, c-format\n" if re.search(r"%[^ ]", text) else ""
            file.write(f"{flag}msgid {quoted(text)}\nmsgstr {quoted(translations.get(text, ''))}\n\n")


def check(path, texts):
    problems = []
    with tempfile.NamedTemporaryFile() as out:
        result = subprocess.run(["msgfmt", "--check-format", "-o", out.name, path], stderr=subprocess.PIPE, text=True)
    if result.returncode:
        problems.append(result.stderr.strip())
    have = {text: translation for text, translation, _ in entries(open(path, encoding="utf-8").read())}
    gone = [text for text in have if text not in texts]
    if gone:
        problems.append(f"{path}: {len(gone)} texts are gone, such as {gone[0]!r}: run scripts/messages.py --update")
    done = sum(bool(have.get(text)) for text in texts)
    if done < LEAST * len(texts):
        problems.append(f"{path}: {done} of {len(texts)} texts are translated")
    print(f"{path}: {done} of {len(texts)} texts")
    return problems


def main():
    if sys.argv[1:] not in (["--update"], ["--check"]):
        sys.exit(__doc__)
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    texts, problems = template(), []
    for path in sorted(glob.glob("po/*.po")):
        if sys.argv[1] == "--update":
            write(path, {text: t for text, t, _ in entries(open(path, encoding="utf-8").read())}, texts)
        problems += check(path, texts)
    if sys.argv[1] == "--check" and problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
