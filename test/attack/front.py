"""front: attacks on the HTTP layer of the server: routes without a key, Host and Origin, forwarding headers, guessed
keys, requests that occupy every worker, and the shutdown of a server with such requests. See attack.py.
"""
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time

from attack import CHAT, SHOAL, Server, report, skip

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
JOB = {"kind": "world", "args": [], "options": {"policy": "rule", "steps": 20}}


def note(text):
    print("# " + text, file=sys.stderr, flush=True)


def raw(port, text, timeout=10):
    """The status of a request whose bytes are sent unchanged; 0: there was no answer."""
    with socket.create_connection(("127.0.0.1", port), timeout) as s:
        s.sendall(text.encode())
        try:
            line = s.makefile("rb").readline().split()
        except OSError:
            return 0
        return int(line[1]) if len(line) > 1 else 0


def start_refused(*options, env=None):
    """Exit status and stderr of a server that should refuse to start; it is killed if it does not."""
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        p = subprocess.Popen([SHOAL, "serve", "test/models/fry-1", "--port", "0", "--json", "--state", folder + "/s", "--runs", folder + "/r",
                              *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
        line = p.stdout.readline()
        if line:
            p.terminate()
        _, errors = p.communicate(timeout=60)
        return p.returncode, errors


# ---- the start-up token

def test_token():
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        with Server(folder=folder) as s:
            path, token = os.path.join(s.state, "token"), s.token
            mode = stat.S_IMODE(os.stat(path).st_mode)
            report("the token is for its owner only", mode == 0o600 or oct(mode))
            report("it is long", (len(token) == 46 and token.startswith("st-")) or token)
            visible = open(s.log).read() + open(f"/proc/{s.process.pid}/cmdline").read() + open(f"/proc/{s.process.pid}/environ").read()
            report("log, command line and environment do not contain it", token not in visible)
            status, text, _ = s.ask("/v1/jobs", JOB)
            report("a job without a key is refused on loopback, too", (status == 401 and path in text) or (status, text))
            status, text, _ = s.ask("/v1/jobs", JOB, key="st-" + "A" * 43)
            report("and with another token", status == 401 or (status, text))
            for name, headers in (("a bearer token", {"Authorization": "Bearer " + token}), ("X-API-Key", {"X-API-Key": token})):
                status, text, _ = s.ask("/v1/jobs", headers=headers)
                report(f"the token opens jobs as {name}", status == 200 or (status, text))
            status, text, _ = s.ask("/v1/backups", key=token)
            report("the token opens admin routes", status == 200 or (status, text))
            status, text, _ = s.ask(CHAT, HI)
            report("chat is open on loopback without keys", status == 200 or (status, text))
            status, text, _ = s.ask(CHAT, HI, key="sk-of-another-server")
            report("chat ignores unknown keys on loopback without keys", status == 200 or (status, text))
        report("the file is removed at a clean stop", not os.path.exists(path))
        os.symlink(folder + "/elsewhere", path)
        with Server(folder=folder) as s:
            report("a link in its place is replaced, not followed", not os.path.islink(path) and not os.path.exists(folder + "/elsewhere"))
            report("each start has a different token", s.token != token)
            status, _, _ = s.ask("/v1/jobs", key=token)
            report("the previous token is refused", status == 401 or status)


# ---- access to the server

def routes_sample():
    return [("GET", "/"), ("GET", "/page/app.js"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/v1/models"), ("POST", CHAT),
            ("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/backups"), ("POST", "/v1/load_lora_adapter"), ("GET", "/api/tags"),
            ("DELETE", "/api/delete"), ("GET", "/nowhere")]


def test_rebinding():
    """A page whose host name resolves to the server's address, on every bind: with its own Host, or a foreign Origin.
    """
    foreign = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "2130706433", "0x7f.1"]
    for bind in ("127.0.0.1", "0.0.0.0"):
        more = [] if bind == "127.0.0.1" else ["--no-auth"]
        with Server("--host", bind, *more, "--allowed-host", "shoal.example") as s:
            wrong = []
            for method, path in routes_sample():
                tail = f"Connection: close\r\nX-API-Key: {s.token}\r\nContent-Length: 2\r\n\r\n" + "{}"
                for host in foreign:
                    got = raw(s.port, f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{tail}")
                    if got != 403:
                        wrong.append((host, method, path, got))
                for host in ("localhost", f"127.0.0.1:{s.port}", "[::1]", "192.0.2.1", "shoal.example"):
                    got = raw(s.port, f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{tail}")
                    if got in (0, 401, 403):
                        wrong.append((host, method, path, got))
                for origin in ("http://evil.example", "null", f"http://evil.example:{s.port}"):
                    got = raw(s.port, f"{method} {path} HTTP/1.1\r\nHost: localhost:{s.port}\r\nOrigin: {origin}\r\n{tail}")
                    if got != 403:
                        wrong.append((origin, method, path, got))
                for head in ("HTTP/1.1\r\n", "HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n"):
                    got = raw(s.port, f"{method} {path} {head}{tail}")
                    if got != 400:
                        wrong.append((head, method, path, got))
            report(f"a foreign Host or Origin, or none, on {bind} without keys", str(wrong[:3]) if wrong else True)
    with Server(env={"SHOAL_API_KEY": "sk-attack"}) as s:
        status = raw(s.port, "GET /metrics HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        report("with keys, /metrics of a foreign Host needs one", status == 401 or status)
        status, _, _ = s.ask("/v1/models", key="sk-attack", headers={"Host": "proxied.example"})
        report("with a key any Host is accepted", status == 200 or status)
    code, text = start_refused("--cors", "*")
    report("--cors '*' without keys is refused at the start", (code == 2 and "shoal key add" in text) or (code, text))
    with Server("--cors", "*", env={"SHOAL_API_KEY": "sk-attack"}) as s:
        status, _, _ = s.ask("/v1/models", headers={"Origin": "http://evil.example"})
        report("with keys --cors '*' is accepted, and requests need a key", status == 401 or status)


def test_forwarded():
    """A reverse proxy on this machine does not make remote clients local."""
    headers = [{"X-Forwarded-For": "192.0.2.1"}, {"X-Forwarded-For": "127.0.0.1"}, {"X-Forwarded-Host": "shoal.example"},
               {"X-Forwarded-Proto": "https"}, {"Forwarded": "for=127.0.0.1"}, {"X-Real-IP": "127.0.0.1"}, {"Via": "1.1 proxy"}]
    for options in ((), ("--trusted-proxy", "192.0.2.0/24"), ("--trusted-proxy", "127.0.0.1")):
        with Server(*options) as s:
            wrong = []
            for h in headers:
                local = h.get("X-Forwarded-For") == "127.0.0.1" and "127.0.0.1" in options
                for path, want in (("/v1/models", 401), ("/metrics", 401), ("/v1/jobs", 401), ("/health", 200), ("/page/app.js", 200)):
                    status, _, _ = s.ask(path, headers=h)
                    if status != (200 if local and path != "/v1/jobs" else want):
                        wrong.append((h, path, status))
                status, _, _ = s.ask("/v1/jobs", headers=h, key=s.token)
                if status != 200:
                    wrong.append((h, "with the token", status))
            report(f"forwarded requests are not local {options}", str(wrong[:3]) if wrong else True)


# ---- keys

def test_key_file():
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        path = folder + "/keys"
        open(path, "w").write("# of the test\n\n  sk-first  \nsk-second\r\n")
        os.chmod(path, 0o600)
        with Server("--api-key-file", path) as s:
            got = [s.ask("/v1/models", key=k)[0] for k in ("sk-first", "sk-second", "#", "sk-third")]
            report("keys of a file", got == [200, 200, 401, 401] or got)
            shown = open(f"/proc/{s.process.pid}/cmdline").read()
            report("and no key is on the command line", "sk-first" not in shown)
            report("a private key file gives no warning", "can read" not in open(s.log).read())
        os.chmod(path, 0o644)
        with Server("--api-key-file", path) as s:
            report("a key file that others can read gives a warning", "others can read the keys" in open(s.log).read())
        for text, name in (("# nothing\n", "empty"), ("sk a b\xff\n" * 2, None)):
            open(path, "w").write(text)
            if name:
                code, why = start_refused("--api-key-file", path)
                report(f"an {name} file of keys is refused", (code == 2 and "holds no key" in why) or (code, why))
        code, why = start_refused("--api-key-file", folder + "/none")
        report("a missing one is refused", (code != 0 and "none" in why) or (code, why))


def flood(s, seconds, headers, made):
    """Wrong keys from several connections: number of compared keys, number of refused attempts, and whether `made`
    failed.
    """
    counts, failures, end = {}, [], time.time() + seconds

    def guess(number):
        i = 0
        with socket.create_connection(("127.0.0.1", s.port), 10) as c:
            f = c.makefile("rb")
            while time.time() < end:
                i += 1
                c.sendall(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{headers}X-API-Key: guess-{number}-{i}\r\n\r\n".encode())
                status = int(f.readline().split()[1])
                length = 0
                while (line := f.readline().strip()):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                f.read(length)
                counts[status] = counts.get(status, 0) + 1

    threads = [threading.Thread(target=guess, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    extra = dict(line.split(": ") for line in headers.strip().split("\r\n") if line)
    while time.time() < end:
        status, text, _ = s.ask("/v1/models", key=made, headers=extra)
        if status != 200:
            failures.append((status, text))
        time.sleep(0.05)
    for t in threads:
        t.join()
    return counts.get(401, 0), counts.get(429, 0), failures


def test_guesses():
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        made = json.loads(subprocess.run([SHOAL, "key", "add", "made", "--json", "--quiet", "--store", folder + "/state/serve.db"],
                                         capture_output=True, text=True, check=True).stdout)["secret"]
        with Server("--trusted-proxy", "127.0.0.1", folder=folder, env={"SHOAL_API_KEY": "chosen"}) as s:
            here, there = {"X-Forwarded-For": "192.0.2.1"}, {"X-Forwarded-For": "192.0.2.2"}
            seconds = 3.5
            looked, waiting, failures = flood(s, seconds, "X-Forwarded-For: 192.0.2.1\r\n", made)
            note(f"wrong keys in {seconds} s: {looked} compared, {waiting} told to wait")
            report("wrong keys are slowed down", (looked <= 16 and waiting > 100) or (looked, waiting))
            report("generated keys are admitted from that address meanwhile", str(failures[:1]) if failures else True)
            status, text, _ = s.ask("/v1/models", key="chosen", headers=here)
            report("a right guess of a fixed key gets the answer of a wrong one", (status == 429 and "too_many_wrong_keys" in text) or (status, text))
            status, _, _ = s.ask("/v1/models", key="chosen", headers=there)
            report("another address is not affected", status == 200 or status)
            flood(s, 0.5, "X-Forwarded-For: 192.0.2.2\r\n", made)
            status, _, _ = s.ask("/v1/models", key="chosen", headers=there)
            report("a fixed key is admitted from an address that has used it before", status == 200 or status)
            status, _, _ = s.ask("/v1/models", headers=here)
            report("a request without a key gets an error that asks for one", status == 401 or status)


# ---- concurrent requests

def test_concurrent():
    with Server("--trusted-proxy", "127.0.0.1", "--max-concurrent", "4", env={"SHOAL_API_KEY": "sk-attack"}) as s:
        body = json.dumps({"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True})

        def stream(address):
            c = socket.create_connection(("127.0.0.1", s.port), 30)
            c.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-API-Key: sk-attack\r\nX-Forwarded-For: {address}\r\n"
                      f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
            head = c.recv(4096).decode()
            return c, int(head.split()[1]), head

        held = [stream("192.0.2.1") for _ in range(6)]
        got = [status for _, status, _ in held]
        report("a key and an address have so many requests at once", got == [200] * 4 + [429] * 2 or got)
        report("and get a Retry-After header", "Retry-After: 1" in held[5][2] or held[5][2])
        status, _, _ = s.ask("/v1/models", key="sk-attack")
        report("this machine itself is not limited", status == 200 or status)
        for c, _, _ in held:
            c.close()
        for _ in range(100):
            c, status, _ = stream("192.0.2.3")
            c.close()
            if status == 200:
                break
            time.sleep(0.1)
        report("finished requests are not counted", status == 200 or status)


def connections_inside():
    """Runs in a separate network namespace, in which 192.0.2.1 is this machine and no loopback address."""
    s = Server("--host", "0.0.0.0", "--no-auth", "--max-connections-per-address", "20")

    def connections(address, n):
        held, open_ones = [], 0
        for _ in range(n):
            c = socket.create_connection((address, s.port), 10)
            c.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            try:
                open_ones += c.recv(100).startswith(b"HTTP/1.1 200")
            except OSError:
                pass
            held.append(c)
        return held, open_ones

    with s:
        held, n = connections("192.0.2.1", 40)
        report("an address has so many connections", n == 20 or n)
        here, n = connections("127.0.0.1", 40)
        report("this machine's own are not counted", n == 40 or n)
        for c in held + here:
            c.close()
        time.sleep(1)
        held, n = connections("192.0.2.1", 5)
        report("those that were closed are not counted", n == 5 or n)
        for c in held:
            c.close()


def test_connections():
    command = ["unshare", "-rn", "sh", "-c", "ip link set lo up && ip address add 192.0.2.1/32 dev lo"]
    try:
        able = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        able = False
    if not able:
        skip("connections of an address", "no network namespace can be made here")
        return
    subprocess.run([*command[:-1], command[-1] + ' && exec "$0" "$1" --connections', sys.executable, os.path.abspath(__file__)], check=True)


# ---- every worker occupied

HANG = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* A file system that never answers, for the folder of backups, once $HANG is there. */
DIR *opendir(const char *path) {
    size_t n = strlen(path);
    while (n > 7 && strcmp(path + n - 7, "backups") == 0 && access(getenv("HANG"), F_OK) == 0) sleep(1);
    DIR *(*real)(const char *) = (DIR * (*)(const char *)) dlsym(RTLD_NEXT, "opendir");
    return real(path);
}
"""


def hang_environment(folder):
    """The environment in which listing backups never ends once folder/hang exists; None: no compiler."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if not compiler:
        return None
    open(folder + "/hang.c", "w").write(HANG)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder + "/hang.so", folder + "/hang.c", "-ldl"], check=True)
    return {"LD_PRELOAD": folder + "/hang.so", "HANG": folder + "/hang"}


def occupy_workers(s, n=24):
    """More requests that do not end than workers."""
    held = []
    for _ in range(n):
        c = socket.create_connection(("127.0.0.1", s.port), 10)
        c.sendall(f"GET /v1/backups HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {s.token}\r\n\r\n".encode())
        held.append(c)
    time.sleep(0.5)
    return held


def children(pid):
    return [int(p) for p in open(f"/proc/{pid}/task/{pid}/children").read().split()] if os.path.exists(f"/proc/{pid}/task/{pid}/children") else []


def job_process(s):
    """A running job's process."""
    job = json.loads(s.ask("/v1/jobs", {"kind": "world", "args": [], "options": {"policy": "rule", "steps": 2000000}}, key=s.token)[1])["id"]
    for _ in range(200):
        for task in os.listdir(f"/proc/{s.process.pid}/task"):
            found = open(f"/proc/{s.process.pid}/task/{task}/children").read().split()
            if found:
                return job, int(found[0])
        time.sleep(0.05)
    return job, None


def is_running(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def terminate_server(s, signals, limit):
    """Exit status and seconds from the first signal."""
    began = time.time()
    for n in range(signals):
        s.process.terminate()
        time.sleep(0.3)
    try:
        return s.process.wait(limit), time.time() - began
    except subprocess.TimeoutExpired:
        return None, limit


def test_stuck():
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        env = hang_environment(folder)
        if not env:
            skip("stuck workers", "there is no C compiler")
            return
        with Server("--drain-seconds", "1", "--no-jobs-idle", env=env) as s:
            _, child = job_process(s)
            open(folder + "/hang", "w").close()
            held = occupy_workers(s)
            slowest, wrong = {}, []
            for i in range(60):
                for path in ("/health", "/ping", "/version", "/metrics"):
                    try:
                        status, _, took = s.ask(path, timeout=5)
                    except OSError as e:
                        status, took = repr(e), 5
                    slowest[path] = max(slowest.get(path, 0), took)
                    if status != 200:
                        wrong.append((path, status))
                if wrong:
                    break
            note("all workers stuck, slowest of 60: " + ", ".join(f"{p} {1000 * t:.1f} ms" for p, t in slowest.items()))
            report("all workers blocked: /health answers", str(wrong[:2]) if wrong else max(slowest.values()) < 1 or slowest)
            try:
                stuck = s.ask("/v1/models", timeout=1)
            except OSError:
                stuck = None
            report("the workers are really blocked", stuck is None or stuck)
            token = os.path.join(s.state, "token")
            code, took = terminate_server(s, 1, 30)
            note(f"SIGTERM with stuck workers and a drain of 1 s: status {code} after {took:.1f} s")
            report("SIGTERM ends a server whose workers are stuck", (code == 3 and took < 15) or (code, took))
            report("and reports it", "ending without them" in open(s.log).read())
            report("its token is removed", not os.path.exists(token))
            for _ in range(100):
                if child and not is_running(child):
                    break
                time.sleep(0.05)
            report("its job's process has ended", (child is not None and not is_running(child)) or child)
            for c in held:
                c.close()
        os.unlink(folder + "/hang")
        with Server("--drain-seconds", "60", env=env) as s:
            open(folder + "/hang", "w").close()
            held = occupy_workers(s)
            code, took = terminate_server(s, 2, 30)
            note(f"a second SIGTERM: status {code} after {took:.1f} s")
            report("a second signal ends it at once", (code == 3 and took < 5) or (code, took))
            for c in held:
                c.close()


def test_busy():
    """Large requests with long computations: /health answers in time meanwhile."""
    with Server() as s:
        text = json.dumps({"prompt": "the cat " * 400000}).encode()
        stop, sent = [], []

        def work():
            while not stop:
                try:
                    sent.append(s.ask("/tokenize", raw=text, timeout=60)[0])
                except OSError:
                    pass

        threads = [threading.Thread(target=work) for _ in range(16)]
        for t in threads:
            t.start()
        time.sleep(0.5)
        took = sorted(s.ask("/health", timeout=30)[2] for _ in range(50))
        stop.append(1)
        for t in threads:
            t.join()
        note(f"busy workers: /health median {1000 * took[25]:.1f} ms, slowest {1000 * took[-1]:.1f} ms beside {len(sent)} large requests")
        report("busy workers do not hold up /health", took[25] < 0.5 or took)


if "--connections" in sys.argv:
    connections_inside()
    sys.exit()
for test in (test_token, test_rebinding, test_forwarded, test_key_file, test_guesses, test_concurrent, test_connections, test_stuck, test_busy):
    try:
        test()
    except Exception as e:  # the other tests still run
        if test is test_stuck and "ASan runtime" in str(e):
            skip("stuck workers", "a program under ASan takes no preloaded library")
        else:
            report(test.__name__, f"{type(e).__name__}: {e}")
