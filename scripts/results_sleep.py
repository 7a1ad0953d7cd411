#!/usr/bin/env python3
"""results_sleep: memories of invented users for scripts/results-sleep.sh, and the tables of its results.

    scripts/results_sleep.py make WORK USERS SEED    writes WORK/USER.jsonl for `shoal memory import`, and WORK/USER-questions.jsonl
    scripts/results_sleep.py user SHOAL WORK USER    prints the results of a user as JSON
    scripts/results_sleep.py report FOLDER CLASS     writes docs/results/sleep.md, and prints the part of docs/RESULTS.md
"""
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

from results_seeds import mean_interval, wilson

RESULTS = Path(__file__).parent.parent / "docs" / "results"
ONSETS = "b d f g k l m n p r s t v z br dr fl gr kl pr st tr".split()
VOWELS, ENDS = "a e i o u".split(), "n r s l k m".split() + [""] * 3
ANIMALS, FOODS = "cat dog rabbit parrot turtle".split(), "plums leeks walnuts oysters figs barley mustard celery".split()
JOBS = "baker welder nurse tailor glazier surveyor beekeeper printer".split()
HOBBIES = "archery juggling pottery fencing knitting chess rowing gliding".split()
LANGUAGES = "Icelandic Basque Maltese Welsh Estonian Quechua Zulu Khmer".split()

# Wordings for this table only, by an author who has not seen those of the training: of four for each attribute the first two that
# are in no training line.
QUESTIONS = {
    "name": ("Do you happen to remember what I'm called?", "Remind me, how did I introduce myself to you?"),
    "age": ("How many years old am I right now?", "Can you tell me my current age?"),
    "birthday": ("On which day and month do I celebrate my birthday?", "When should people wish me a happy birthday?"),
    "residence": ("Which town am I living in these days?", "Where is my home at the moment?"),
    "origin": ("Where do I come from originally?", "What's the name of my hometown?"),
    "occupation": ("Can you remember what my job is?", "Remind me what kind of work I do."),
    "employer": ("Which company am I employed by at the moment?", "Do you remember the name of my employer?"),
    "pet": ("What pet do I have, and what's it called?", "Do you remember which animal I keep at home?"),
    "allergy": ("Which food am I allergic to?", "What should I never eat because of my allergy?"),
    "hobby": ("What do I like doing in my free time?", "Can you tell me what my hobby is?"),
    "language": ("In what language can people talk to me?", "Do you remember what my language is?"),
}


def name(rng):
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + (rng.choice(ENDS) if last else "") for last in (0, 1)).capitalize()


def facts(rng):
    """Ten facts of a user: attribute, value and the sentence that states it."""
    town, origin, company, pet = name(rng), name(rng), name(rng) + " Works", rng.choice(ANIMALS) + " " + name(rng)
    day = f"{rng.randint(1, 28)} {rng.choice('January March May July September November'.split())}"
    own, job, food, hobby, tongue, age = name(rng), *(rng.choice(x) for x in (JOBS, FOODS, HOBBIES, LANGUAGES)), str(rng.randint(19, 84))
    known = [
        ("name", own, f"My name is {own}."), ("age", age, f"I am {age} years old."), ("birthday", day, f"My birthday is {day}."),
        ("residence", town, f"I live in {town}."), ("origin", origin, f"I come from {origin}."), ("occupation", job, f"I work as a {job}."),
        ("employer", company, f"I work for {company}."), ("pet", pet, f"I have a {pet}."), ("allergy", food, f"I'm allergic to {food}."),
        ("hobby", hobby, f"My hobby is {hobby}."), ("language", tongue, f"I speak {tongue}."),
    ]
    known.pop(rng.randrange(len(known)))
    return known


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_lines(path, rows):
    Path(path).write_text("".join(json.dumps(r) + "\n" for r in rows))


def make(work, users, seed):
    time = "2026-11-29T09:00:00Z"
    for i in range(int(users)):
        user, known = f"user{i:02}", facts(random.Random(f"{seed} {i}"))
        write_lines(Path(work) / f"{user}.jsonl", [
            {"id": n, "user": user, "attribute": attribute, "value": value, "text": text, "valid_from": time, "valid_until": None,
             "source": {"conversation": "", "turn": 0, "speaker": "user", "time": time}, "stated": 1, "last_stated": time, "uses": 0,
             "last_used": None, "importance": 0.9} for n, (attribute, value, text) in enumerate(known, 1)])
        write_lines(Path(work) / f"{user}-questions.jsonl", [
            {"messages": [{"role": "user", "content": q}]} for attribute, _, _ in known for q in QUESTIONS[attribute]])


def recalled(answer, value):
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", answer, re.I) is not None


def searched(shoal, db, user, question):
    """The values of the first five memories that the search finds."""
    command = [shoal, "memory", "search", question, "--store", db, "--user", user, "--limit", "5", "--json", "--quiet"]
    return [json.loads(x)["value"] for x in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()]


def user(shoal, work, who):
    at = f"{work}/{who}"
    wanted = [(m["value"], q) for m in read_lines(f"{at}.jsonl") for q in QUESTIONS[m["attribute"]]]
    answers = {phase: [r["text"] for r in read_lines(f"{at}-{phase}.jsonl") if "text" in r] for phase in ("before", "after")}
    found = [searched(shoal, f"{at}.db", who, q) for _, q in wanted]
    sleep = json.loads(Path(f"{at}-sleep.json").read_text().splitlines()[0])
    assert all(len(a) == len(wanted) for a in answers.values()), (who, answers)
    print(json.dumps({
        "user": who, "n": len(wanted), **{phase: sum(recalled(a, v) for a, (v, _) in zip(answers[phase], wanted)) for phase in answers},
        "first": sum(f[:1] == [v] for f, (v, _) in zip(found, wanted)), "five": sum(v in f for f, (v, _) in zip(found, wanted)),
        "published": sleep["published"], "why": sleep["why"], "recall": sleep["recall"], "retention": sleep["retention"], "lines": sleep["lines"],
        "rehearsal": sleep["rehearsal"], "undone": Path(f"{at}-undone").read_text() == Path(f"{at}-old").read_text()}))


def share(k, n):
    """A rate with Wilson's interval of 95 %."""
    p, lo, hi = wilson(k, n)
    return f"{n} | {100 * p:.1f} | {100 * lo:.1f} to {100 * hi:.1f}"


def gate_count(rows, key):
    return sum(round(r["recall"][key]["value"] * r["recall"]["n"]) for r in rows)


def recall_table(rows):
    n, measured = sum(r["n"] for r in rows), sum(r["recall"]["n"] for r in rows)
    print("| without retrieval | n | recall, % | 95 % interval |\n|---|---|---|---|")
    print(f"| before, wordings of the gate | {share(gate_count(rows, 'before'), measured)} |")
    print(f"| after, wordings of the gate | {share(gate_count(rows, 'after'), measured)} |")
    print(f"| before, other wordings | {share(sum(r['before'] for r in rows), n)} |")
    print(f"| after, other wordings | {share(sum(r['after'] for r in rows), n)} |")
    print(f"| retrieval alone, other wordings: the first result | {share(sum(r['first'] for r in rows), n)} |")
    print(f"| retrieval alone, other wordings: one of five results | {share(sum(r['five'] for r in rows), n)} |")


def families_table(rows):
    print("| family | n | before, % | after, % | change, points (95 % interval over users) |\n|---|---|---|---|---|")
    for i, s in enumerate(rows[0]["retention"]["sets"]):
        sets = [r["retention"]["sets"][i] for r in rows]
        change, lo, hi = mean_interval([100 * v["change"] for v in sets])
        mean = [100 * statistics.mean(v[k]["value"] for v in sets) for k in ("before", "after")]
        print(f"| {s['name']} | {sum(v['n'] for v in sets)} | {mean[0]:.2f} | {mean[1]:.2f} | {change:+.2f} ({lo:+.2f} to {hi:+.2f}) |")


def summary(rows):
    measured = sum(r["recall"]["n"] for r in rows)
    return (f"{len(rows)} invented users with ten facts each sleep once. In wordings that no training line has, the facts are recalled without retrieval "
            f"in {100 * gate_count(rows, 'before') / measured:.1f} % of the questions before and {100 * gate_count(rows, 'after') / measured:.1f} % after. "
            f"The gate published {sum(r['published'] for r in rows)} of {len(rows)} adapters; a rollback restored the old hash in "
            f"{sum(r['undone'] for r in rows)} of them.")


def report(folder, numeric_class):
    rows = [json.loads(p.read_text()) for p in sorted(Path(folder).glob("user*.json"))]
    with open(RESULTS / "sleep.md", "w") as f, contextlib.redirect_stdout(f):
        print(f"# Memories as weights (`make results-sleep`)\n\n{summary(rows)}\n")
        print(f"models/fry, {numeric_class} class, `shoal sleep` with its default options: {rows[0]['lines']} lines about the facts of a user, "
              f"{rows[0]['rehearsal']} lines of the families. Each fact is asked in two wordings of the gate, by which the sleep measures itself, and in "
              f"two other wordings, which an author has written for this table without knowledge of those of the training. Retrieval is `shoal memory search`, words only. A rejected "
              f"adapter is not published; its user's figures of the other wordings are those of the adapter before.\n")
        recall_table(rows)
        print()
        families_table(rows)
        refused = [f"* {r['user']}: {r['why']}" for r in rows if not r["published"]]
        if refused:
            print("\nRefused:\n\n" + "\n".join(refused))
    print(f"## Memories as weights (`make results-sleep`)\n\n{summary(rows)} [results/sleep.md](results/sleep.md) has all figures.\n")
    recall_table(rows)
    print()
    families_table(rows)


if __name__ == "__main__":
    {"make": make, "user": user, "report": report}[sys.argv[1]](*sys.argv[2:])
