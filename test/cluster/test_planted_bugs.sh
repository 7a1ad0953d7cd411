#!/bin/sh
# test_planted_bugs: whether the simulated histories of test_coordinator find bugs. Each bug of the list below is planted in
# a copy of the coordinator, and some history must then end badly. Prints "ok NAME", "not ok NAME: why" and "skip NAME: why"
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
SOURCE = open("src/cluster/coordinator.c").read()
BUGS = [  # name, text of the coordinator, the text that replaces it
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


def run(command, **more):
    return subprocess.run(command, capture_output=True, text=True, **more)


def program(source, name):
    with open(f"{TMP}/{name}.c", "w") as f:
        f.write(source)
    return run([*CC, "-o", f"{TMP}/{name}", f"{TMP}/test.o", f"{TMP}/{name}.c", f"{BUILD}/libshoal.a", *shlex.split(os.environ["LIBS"])])


def histories(name, n):
    return run([f"{TMP}/{name}"], timeout=300, env={**os.environ, "SHOAL_HISTORIES": str(n)})


# only the histories: the tests of single events would fail too
test = open("test/cluster/test_coordinator.c").read()
with open(f"{TMP}/test.c", "w") as f:
    f.write(re.sub(r" *cmocka_unit_test\((?!histories_end_well)\w+\),\n", "", test))
compiled = run([*CC, "-Wno-unused-function", "-c", "-o", f"{TMP}/test.o", f"{TMP}/test.c"])
compiled = compiled if compiled.returncode else program(SOURCE, "none")
if compiled.returncode:
    print(f"not ok planted bugs: {compiled.stderr[:300]!r}")
else:
    out = histories("none", 2000)
    print("ok no bug: 2000 histories end well" if out.returncode == 0 else f"not ok no bug: {out.stdout[-300:]!r} {out.stderr[-300:]!r}")
    for name, old, new in BUGS:
        if SOURCE.count(old) != 1:
            print(f"not ok bug: {name}: the coordinator has its text {SOURCE.count(old)} times")
        elif (compiled := program(SOURCE.replace(old, new), "bug")).returncode:
            print(f"not ok bug: {name}: {compiled.stderr[:300]!r}")
        elif (out := histories("bug", 20000)).returncode == 0:
            print(f"not ok bug: {name}: no history ends badly")
        else:
            found = re.search(r"history (\d+) at [\d.]+ s: ([^;]*)", out.stdout + out.stderr)
            print(f"ok bug: {name}: " + (f"history {found[1]}: {found[2]}" if found else f"it ends with status {out.returncode}"))
END
