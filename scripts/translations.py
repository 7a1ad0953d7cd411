#!/usr/bin/env python3
"""translations: which translated pages are older than their English page.

    scripts/translations.py                 prints a line for each page docs/NAME.ja.md and docs/NAME.zh.md; exits 1 if
                                            the mark of a page is missing or malformed
    scripts/translations.py --update PAGE…  records that these pages translate the English text as it is now

A mark is a line "PAGE HASH" of scripts/translations.txt. The hash is that of the English page without its white space, so
that other line breaks do not count. A change of a single word makes a translation out of date; if the translation needs no
change, --update records this.
"""
import glob
import hashlib
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MARKS = "scripts/translations.txt"


def english_page(page):
    """docs/README.ja.md translates README.md, docs/FAQ.ja.md translates docs/FAQ.md."""
    name = re.sub(r"\.(ja|zh)\.md$", ".md", page)
    return "README.md" if name == "docs/README.md" else name


def text_hash(path):
    with open(path, encoding="utf-8") as page:
        return hashlib.sha256("".join(page.read().split()).encode()).hexdigest()[:12]


def read_marks():
    marks = {}
    with open(MARKS, encoding="utf-8") as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                page, _, mark = line.strip().partition(" ")
                marks[page] = mark
    return marks


def check(pages, marks):
    """Prints the lines of a test script. Returns whether every mark is well formed."""
    valid = True
    for page in sorted(set(pages) | set(marks)):
        english = english_page(page)
        if page not in pages or not os.path.exists(english):
            print(f"not ok {page}: {MARKS} names it, but the page or '{english}' does not exist")
        elif page not in marks:
            print(f"not ok {page}: {MARKS} has no line for it; scripts/translations.py --update {page}")
        elif not re.fullmatch("[0-9a-f]{12}", marks[page]):
            print(f"not ok {page}: '{marks[page]}' in {MARKS} is not a hash of 12 digits")
        elif marks[page] != text_hash(english):
            print(f"skip {page}: out of date, {english} has changed since")
            continue
        else:
            print(f"ok {page} translates {english}")
            continue
        valid = False
    return valid


def main():
    os.chdir(ROOT)
    pages = glob.glob("docs/*.ja.md") + glob.glob("docs/*.zh.md")
    marks = read_marks()
    if len(sys.argv) > 2 and sys.argv[1] == "--update":
        for page in sys.argv[2:]:
            if page not in pages:
                sys.exit(f"translations: '{page}' is not a translated page in docs/")
            marks[page] = text_hash(english_page(page))
        with open(MARKS, "w", encoding="utf-8") as out:
            out.write("# PAGE HASH: the English text that each page translates; scripts/translations.py --update writes it.\n")
            out.writelines(f"{page} {marks[page]}\n" for page in sorted(marks))
    elif len(sys.argv) > 1:
        sys.exit(__doc__)
    elif not check(pages, marks):
        sys.exit(1)


main()
