#!/usr/bin/env python3
"""Scores of F1, ROUGE-L and BLEU from their definitions, with regular expressions and counters.

overlap.py NAME FILE prints FILE (test/cases/grade-NAME.txt) with the third field of each case computed again; the
output should equal the file. Standard library only.
"""
import collections
import math
import re
import sys
import unicodedata

DENSE = "\u2e80-\U0010ffff"


def to_half_width(text):
    return "".join(chr(ord(c) - 0xFEE0) if "\uff01" <= c <= "\uff5e" else c for c in text)


def is_punctuation(c):
    return not c.isspace() and unicodedata.category(c)[0] not in "LNM"


def squad_words(text):
    text = re.split(r"(?i)(?:answer|答え|答案)[:：]", text)[-1]
    text = "".join(c for c in to_half_width(text).lower() if not is_punctuation(c))
    text = re.sub(f"([{DENSE}])", r" \1 ", text)
    return [w for w in text.split() if w not in ("a", "an", "the")]


def rouge_words(text):
    text = "".join(" " if is_punctuation(c) else c for c in to_half_width(text).lower())
    return re.sub(f"([{DENSE}])", r" \1 ", text).split()


def bleu_words(text):
    text = to_half_width(text)
    text = re.sub(f"([{DENSE}])", r" \1 ", text)
    text = "".join(f" {c} " if is_punctuation(c) and c not in ".,-'" else c for c in text)
    text = re.sub(r"(?<![0-9])([.,])", r" \1 ", text)
    text = re.sub(r"([.,])(?![0-9])", r" \1 ", text)
    text = re.sub(r"([0-9])-", r"\1 - ", text)
    return text.split()


def harmonic(common, n, m):
    if n == 0 or m == 0:
        return float(n == m)
    p, r = common / n, common / m
    return 2 * p * r / (p + r) if common else 0.0


def f1(answer, gold):
    a, b = squad_words(answer), squad_words(gold)
    common = sum((collections.Counter(a) & collections.Counter(b)).values())
    return harmonic(common, len(a), len(b))


def rouge_l(answer, gold):
    a, b = rouge_words(answer), rouge_words(gold)
    longest = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for k, y in enumerate(b):
            longest[i + 1][k + 1] = (longest[i][k] + 1 if x == y
                                     else max(longest[i][k + 1], longest[i + 1][k]))
    return harmonic(longest[-1][-1], len(a), len(b))


def bleu(answer, gold):
    a, b = bleu_words(answer), bleu_words(gold)
    logs, matched, smooth = [], 0, 1
    for n in range(1, min(4, len(a)) + 1):
        x = collections.Counter(tuple(a[i:i + n]) for i in range(len(a) - n + 1))
        y = collections.Counter(tuple(b[i:i + n]) for i in range(len(b) - n + 1))
        common, total = sum((x & y).values()), sum(x.values())
        matched += common
        if not common:
            smooth *= 2
        logs.append(math.log(common / total if common else 1 / (smooth * total)))
    if not matched:
        return 0.0
    brevity = 1 - len(b) / len(a) if len(a) < len(b) else 0
    return math.exp(brevity + sum(logs) / len(logs))


def main():
    score = {"f1": f1, "rouge_l": rouge_l, "bleu": bleu}[sys.argv[1]]
    with open(sys.argv[2], encoding="utf-8") as lines:
        for line in lines:
            part = line.rstrip("\n").split("\t")
            if len(part) == 3 and part[2] != "nofound":
                answer, gold = (p.replace("⏎", "\n") for p in part[:2])
                part[2] = f"{score(answer, gold):.4f}"
            print("\t".join(part))


if __name__ == "__main__":
    main()
