#!/bin/sh
# test_planted_bugs: whether the simulated histories of test_coordinator and test_pbft find bugs. Each bug of the lists
# below is planted in a copy of the source, and some history must then end badly. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why"
# lines.
set -u
cd "$(dirname "$0")/../.." || exit 1
build=$(dirname "${SHOAL:-build/shoal}")
[ -f "$build/libshoal.a" ] || { echo "skip planted bugs: $build/libshoal.a is missing"; exit 0; }
command -v python3 >/dev/null 2>&1 || { echo "skip planted bugs: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
LIBS="-lcmocka $(pkg-config --libs jansson yaml-0.1 libpcre2-8 sqlite3 libsodium gmp) -lunistring -lm -pthread -ldl" BUILD=$build TMP_DIR=$tmp python3 - <<'END'
import os, re, shlex, subprocess

TMP, BUILD = os.environ["TMP_DIR"], os.environ["BUILD"]
CC = [*shlex.split(os.environ.get("CC", "gcc")), "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-Iinclude", "-Isrc", "-Itest"]
COORDINATOR = [  # name, text of the source, the text that replaces it
    ("one vote decides", "if (2 * votes <= c->o.replicas) return false;", "if (votes < 1) return false;"),
    ("a vote quarantines the majority", "u->attempts[i].state == ATTEMPT_VOTED && strcmp(u->attempts[i].hash, hash) != 0)\n            node_q",
     "u->attempts[i].state == ATTEMPT_VOTED && strcmp(u->attempts[i].hash, hash) == 0)\n            node_q"),
    ("a quarantined node comes back", "    if (n->state == NODE_QUARANTINED) return;\n", ""),
    ("a quarantined node is heard", "if (node < 0 || c->nodes[node].state == NODE_QUARANTINED) return;", "if (node < 0) return;"),
    ("the first failure ends a unit", ">= UNIT_FAILURES)", ">= 1)"),
    ("a unit that always fails is never given up", "if (++c->units[index]->failures >= UNIT_FAILURES)", "if (0 && ++c->units[index]->failures)"),
    ("a lost message is never sent again", "    for (int i = 0; i < c->n_units; i++) slow_assign_again(c, c->units[i]);\n", ""),
    ("silence is not noticed", "silent >= NODE_SUSPECT_SECONDS", "silent >= 1e9"),
    ("a suspect node gets units", "node->state != NODE_UP || strcmp", "node->state == NODE_DEAD || node->state == NODE_QUARANTINED || strcmp"),
    ("the window is ignored", "if (node->n_units < c->o.window) may[n++] = i;", "may[n++] = i;"),
    ("a node with another model gets units", "strcmp(node->identity, c->identity) != 0) continue;", "0) continue;"),
    ("a node votes twice", "if (unit_attempt(u, i)) continue;", "if (unit_attempt(u, i) && unit_attempt(u, i)->state == ATTEMPT_RUNS) continue;"),
    ("a place is never free again", "if (a->state == ATTEMPT_RUNS) c->nodes[a->node].n_units--;", ""),
    ("a place is free twice", "if (a->state == ATTEMPT_RUNS) c->nodes", "c->nodes"),
    ("a unit that is submitted twice is done twice", "    if (unit_find(c, e->unit) >= 0) return;\n", ""),
    ("a tie is never broken", "needed = c->o.replicas / 2 + 1 - votes;", "needed = 0;"),
    ("the wrong unit is removed", "    unit_remove(c, index);\n    return true;", "    unit_remove(c, 0);\n    return true;"),
    ("a node that comes back stays dead", "if (n->state != NODE_UP) node_set_state(c, node, NODE_UP);", ""),
    ("failed nodes get a unit never again", "a->state != ATTEMPT_RUNS && a->state != ATTEMPT_VOTED &&", "0 &&"),
]
PBFT = [
    ("signatures are not verified", "return p->o.signer->verify(key, bytes, sizeof bytes, signature);", "return key && signature;"),
    ("f+1 replicas are a quorum", "return (n + pbft_faulty_max(n)) / 2 + 1;", "return pbft_faulty_max(n) + 1;"),
    ("values are not validated", "return e->len ? p->o.validate(p->o.ctx, e->bytes, e->len) : PBFT_AGREES;", "return e && p ? PBFT_AGREES : PBFT_DIFFERS;"),
    ("a value that is not computed yet is prepared", "if (verdict == PBFT_AGREES) pbft_slot_accept(p, s);", "if (verdict != PBFT_DIFFERS) pbft_slot_accept(p, s);"),
    ("equivocation is not noticed", "        pbft_name_equivocation(p, before, &now);\n        return false;\n    }\n    if (st->view",
     "        return false;\n    }\n    if (st->view"),
    ("the primary is never changed", "if (p->deadline > 0 && p->now >= p->deadline) pbft_view_change_start(p, p->view + 1);", ""),
    ("nothing is sent again", "    status_send(p);\n", ""),
    ("a key is executed twice", "if (e->len == 0 || ledger_find(l, e->bytes)) return;", "if (e->len == 0) return;"),
    ("a state is not compared with its checkpoint", "||\n        !state_is_right(p, &s))", ")"),
    ("a committed entry is believed without certificate", "!pbft_certificate_is_valid(p, PBFT_COMMIT, &proof.c) ||", ""),
]
PBFT_VIEW = [
    ("the plan of a new view is not checked", "valid = proposals_are_right(p, &v, &plan, m->s.view);", "valid = true;"),
    ("prepared entries are believed without certificate", "proof->c.view < m->s.view && pbft_certificate_is_valid(p, PBFT_PREPARE, &proof->c) &&", "proof->c.view < m->s.view &&"),
    ("prepared entries are not proposed again", "    for (int i = 0; i < n; i++) plan_add(plan, &v[i]);\n", ""),
    ("a view change hides what was prepared", "if (s->prepared.c.n) v.prepared[v.n++] = s->prepared;", ""),
]
PBFT_CLIENT = [
    ("one reply is enough", "replies_equal(c, s, r.s.seq) <= pbft_faulty_max(c->o.group.n)", "replies_equal(c, s, r.s.seq) < 1"),
    ("wrong votes are not noticed", "        name(c, i, PBFT_WRONG_VALUE, vote, &request);\n", ""),
]
SUBJECTS = [  # test, its histories without and with bugs, and for each source the bugs
    ("test_coordinator", 2000, 20000, {"coordinator.c": COORDINATOR}),
    ("test_pbft", 100, 1500, {"pbft.c": PBFT, "pbft_view.c": PBFT_VIEW, "pbft_client.c": PBFT_CLIENT}),
]


def run(command, **more):
    return subprocess.run(command, capture_output=True, text=True, **more)


def program(test, sources, name):
    """Links the test with sources, {file: text}, that replace those of the library."""
    for file, text in sources.items():
        with open(f"{TMP}/{file}", "w") as f:
            f.write(text)
    return run([*CC, "-o", f"{TMP}/{name}", f"{TMP}/{test}.o", *(f"{TMP}/{file}" for file in sources), f"{BUILD}/libshoal.a",
                *shlex.split(os.environ["LIBS"])])


def histories(name, n):
    return run([f"{TMP}/{name}"], timeout=300, env={**os.environ, "SHOAL_HISTORIES": str(n)})


def test_compile(test):
    """Only its histories: the tests of single events would fail too."""
    text = open(f"test/cluster/{test}.c").read()
    with open(f"{TMP}/{test}.c", "w") as f:
        f.write(re.sub(r" *cmocka_unit_test\((?!histories_end_well)\w+\),\n", "", text))
    return run([*CC, "-Wno-unused-function", "-c", "-o", f"{TMP}/{test}.o", f"{TMP}/{test}.c"])


def bug_find(test, file, source, n, name, old, new):
    if source.count(old) != 1:
        print(f"not ok bug: {name}: {file} has its text {source.count(old)} times")
    elif (compiled := program(test, {file: source.replace(old, new)}, "bug")).returncode:
        print(f"not ok bug: {name}: {compiled.stderr[:300]!r}")
    elif (out := histories("bug", n)).returncode == 0:
        print(f"not ok bug: {name}: no history ends badly")
    else:
        found = re.search(r"history (\d+) at [\d.]+ s: ([^;]*)", out.stdout + out.stderr)
        print(f"ok bug: {name}: " + (f"history {found[1]}: {found[2]}" if found else f"it ends with status {out.returncode}"), flush=True)


for test, n, n_with_bugs, files in SUBJECTS:
    sources = {file: open(f"src/cluster/{file}").read() for file in files}
    compiled = test_compile(test)
    compiled = compiled if compiled.returncode else program(test, sources, "none")
    if compiled.returncode:
        print(f"not ok planted bugs: {compiled.stderr[:300]!r}")
        continue
    out = histories("none", n)
    print(f"ok no bug: {n} histories of {test} end well" if out.returncode == 0 else f"not ok no bug: {out.stdout[-300:]!r} {out.stderr[-300:]!r}")
    for file, bugs in files.items():
        for bug in bugs:
            bug_find(test, file, sources[file], n_with_bugs, *bug)
END
