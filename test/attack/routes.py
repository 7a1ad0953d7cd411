"""routes: every route of the program with every kind of caller. The result depends on the route's scope only; the
routes are read from the tables in src/*/*.c, so new routes are tested without a change here.

    python3 test/attack/routes.py --table      prints the table of docs/SECURITY.md

That table is between <!-- routes --> and <!-- /routes -->; this test compares the two.
"""
import glob
import json
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
ROW = re.compile(r'\{"(GET|POST|PUT|DELETE|PATCH|HEAD)",\s*"(/[^"]*)",\s*([A-Z_ |]+),\s*\w+\}')
SCOPES = ("OPEN", "CHAT", "METRICS", "JOBS", "ADMIN")
YES = "yes"

# Callers: a name, the kind of server (keyless, keyless with --no-auth, with keys), and the result for each scope.
KEYLESS, NO_AUTH, KEYED = "no keys", "no keys, --no-auth", "keys"
CALLERS = [
    (KEYLESS, "this machine", (YES, YES, YES, "401", "401")),
    (KEYLESS, "others", (YES, "401", "401", "401", "401")),
    (NO_AUTH, "others", (YES, YES, YES, "401", "401")),
    (KEYED, "this machine", (YES, "401", YES, "401", "401")),
    (KEYED, "others", (YES, "401", "401", "401", "401")),
    (KEYED, "revoked key", (YES, "401", "401", "401", "401")),
    (KEYED, "key: chat", (YES, YES, YES, "403", "403")),
    (KEYED, "key: jobs", (YES, "403", "403", YES, "403")),
    (KEYED, "key: admin", (YES, "403", "403", "403", YES)),
    (KEYLESS, "token", (YES, YES, YES, YES, YES)),
    (KEYED, "token", (YES, YES, YES, YES, YES)),
]


def routes():
    """[(method, path, scope)], sorted by path."""
    found = []
    for path in sorted(glob.glob(os.path.join(ROOT, "src", "*", "*.c"))):
        for method, route, words in ROW.findall(open(path).read()):
            scope = [w for w in words.replace("SCOPE_", "").replace(" ", "").split("|") if w in SCOPES]
            assert len(scope) == 1, (path, route, words)
            found.append((method, route, scope[0]))
    return sorted(found, key=lambda r: (r[1], r[0]))


def table():
    """The scopes' routes, and each caller's result for a scope."""
    lines = ["| scope | routes |", "|---|---|"]
    for scope in SCOPES:
        names = ", ".join(f"`{method} {path}`" for method, path, s in routes() if s == scope)
        lines.append(f"| {scope.lower()} | {names} |")
    lines += ["", "| server | caller | " + " | ".join(s.lower() for s in SCOPES) + " |", "|---" * (2 + len(SCOPES)) + "|"]
    lines += [f"| {server} | {who} | " + " | ".join(answers) + " |" for server, who, answers in CALLERS]
    return "\n".join(lines)


def main():
    from attack import SHOAL, Server, report, skip
    all_routes = routes()
    report(f"{len(all_routes)} routes are found", len(all_routes) >= 71 or len(all_routes))

    # The pattern above must match every row of a route table of the server. The autoscaler of cli has its own, without keys.
    rows = sum(len(re.findall(r'\{"(?:GET|POST|PUT|DELETE|PATCH|HEAD)", "/', open(p).read())) for p in glob.glob(os.path.join(ROOT, "src", "*", "*.c")) if "/cli/" not in p)
    report("every row is read", rows == len(all_routes) or (rows, len(all_routes)))

    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        store = folder + "/state/serve.db"

        def shoal(*args):
            return subprocess.run([SHOAL, "key", *args, "--store", store, "--quiet"], capture_output=True, text=True, check=True).stdout

        keys = {f"key: {s}": json.loads(shoal("add", s, "--scope", s, "--json"))["secret"] for s in ("chat", "jobs", "admin")}
        keys["revoked key"] = json.loads(shoal("add", "gone", "--scope", "chat", "jobs", "admin", "--json"))["secret"]
        shoal("revoke", "gone")
        servers = {KEYLESS: Server("--trusted-proxy", "127.0.0.1"), NO_AUTH: Server("--trusted-proxy", "127.0.0.1", "--no-auth"),
                   KEYED: Server("--trusted-proxy", "127.0.0.1", folder=folder)}
        try:
            for number, (kind, who, answers) in enumerate(CALLERS):
                s, wrong = servers[kind], []
                # A caller is remote unless it must be local; none sends more wrong keys than an address may.
                headers = {} if who == "this machine" else {"X-Forwarded-For": f"192.0.2.{number}"}
                key = s.token if who == "token" else keys.get(who)
                for method, path, scope in all_routes:
                    want = answers[SCOPES.index(scope)]
                    body = None if method in ("GET", "HEAD") else b"{}"
                    status, text, _ = s.ask(path.replace("*", "none"), raw=body, method=method, headers=headers, key=key)
                    got = str(status) if status in (401, 403, 429) or status == 0 else YES
                    if got != want:
                        wrong.append(f"{method} {path} ({scope.lower()}): {status}, not {want}")
                report(f"every route: {kind}, {who}", "; ".join(wrong[:4]))
        finally:
            codes = [s.stop() for s in servers.values()]
        report("the servers end well", codes == [0, 0, 0] or codes)

    page = os.path.join(ROOT, "docs", "SECURITY.md")
    if not os.path.exists(page):
        skip("the table of docs/SECURITY.md", "there is no such page")
        return
    found = re.search(r"<!-- routes -->\n(.*?)\n<!-- /routes -->", open(page).read(), re.S)
    same = found and found.group(1).strip() == table()
    report("the table of docs/SECURITY.md is that of the routes", same or "put there what 'python3 test/attack/routes.py --table' prints")


if "--table" in sys.argv:
    print(table())
else:
    main()
