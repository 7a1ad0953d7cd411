"""attack: common parts of the scripts in this folder: a server, requests, and the result lines.

Each script test/attack/NAME.py reproduces attacks of one kind on the built program and prints "ok NAME", "not ok NAME:
why" or "skip NAME: why" lines; test/test_attack.sh runs them all. SHOAL is the binary. Servers listen on 127.0.0.1
only. The scripts use only the standard library.

    from attack import Server, report
    with Server("--max-waiting", "10") as s:
        status, text, seconds = s.ask("/v1/jobs", {"kind": "train"}, key=s.token)
        report("a job without 'data' is refused", status == 400 or text)
"""
import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
import time

SHOAL = os.environ.get("SHOAL", "build/shoal")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def report(name, good):
    """Passed if `good` is True, None or empty; any other value is the reason of the failure."""
    if good is True or good is None or good == "":
        print(f"ok {name}", flush=True)
    else:
        why = "it is not so" if good is False else str(good)
        print(f"not ok {name}: {why[:400]}".replace("\n", " "), flush=True)


def skip(name, why):
    print(f"skip {name}: {why}", flush=True)


class Server:
    """`shoal serve test/models/fry-1` with a separate state folder, which is deleted at the end."""

    def __init__(self, *options, model="test/models/fry-1", folder=None, env=None, wrap=()):
        self.own = None if folder else tempfile.TemporaryDirectory(prefix="attack-")
        self.folder = folder or self.own.name
        self.state = os.path.join(self.folder, "state")
        self.log = os.path.join(self.folder, "stderr.txt")
        self.process = subprocess.Popen(
            [*wrap, SHOAL, "serve", model, "--port", "0", "--json", "--state", self.state,
             "--runs", os.path.join(self.folder, "runs"), "--drain-seconds", "2", *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=open(self.log, "ab"),
            env={**os.environ, **(env or {})})
        line = b"plan"
        while line and b'"listening"' not in line:  # a plan precedes it
            line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError("the server did not start: " + open(self.log).read()[-500:])
        self.port = int(re.search(r":(\d+)", json.loads(line)["listening"]).group(1))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def token(self):
        """The start-up token, which has every scope."""
        with open(os.path.join(self.state, "token")) as f:
            return f.read().strip()

    def ask(self, path, body=None, *, raw=None, method=None, headers=None, key=None, timeout=60):
        """(status, text, seconds). `body` is sent as JSON, `raw` unchanged; `key` as a bearer token."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        if key:
            sent["Authorization"] = "Bearer " + key
        began = time.time()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method or ("GET" if data is None else "POST"), path, data, sent)
            reply = connection.getresponse()
            return reply.status, reply.read().decode(errors="replace"), time.time() - began
        finally:
            connection.close()

    def alive(self):
        return self.process.poll() is None

    def memory(self, name="RssAnon"):
        """Bytes by a name of /proc/PID/status: RssAnon is the current value, VmHWM the maximum so far."""
        text = open(f"/proc/{self.process.pid}/status").read()
        return int(re.search(rf"{name}:\s+(\d+)", text).group(1)) << 10

    def stop(self, timeout=20):
        """The exit status; kills a process that does not end in time."""
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self.process.stdout.close()
            if self.own:
                self.own.cleanup()
                self.own = None
