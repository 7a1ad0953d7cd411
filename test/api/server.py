"""server: `shoal serve` and the results of checks, for the scripts of this folder. SHOAL is the binary, TMP_DIR a folder for files."""
import atexit
import http.client
import json
import os
import subprocess
import time
import urllib.parse

SHOAL, TMP = os.environ["SHOAL"], os.environ["TMP_DIR"]
failed = []


def check(name, good, why=""):
    print(f"ok {name}" if good else f"not ok {name}: {str(why)[:600]}", flush=True)
    if not good:
        failed.append(name)


def run(*args, timeout=None):
    """The output of a command of shoal, which must succeed."""
    r = subprocess.run([SHOAL, *args], capture_output=True, text=True, timeout=timeout)
    assert r.returncode == 0, r.stderr
    return r.stdout


class Server:
    """A server with its state in TMP_DIR/NAME, until the script ends."""

    def __init__(self, name, model, *args):
        self.name = name
        self.p = subprocess.Popen([SHOAL, "serve", model, "--json", "--quiet", "--port", "0", "--state", f"{TMP}/{name}", *args],
                                  stdout=subprocess.PIPE, stderr=open(f"{TMP}/{name}.err", "a+"), text=True)
        atexit.register(self.p.kill)  # has no effect if the process has ended
        v = {}
        while "listening" not in v:  # with --max-memory the memory plan comes first
            line = self.p.stdout.readline()
            assert line, open(f"{TMP}/{name}.err").read()
            v = json.loads(line)
        self.address = urllib.parse.urlparse(v["listening"]).netloc

    def open(self, path, body=None, key=None, method=None):
        """Sends a request; returns its connection."""
        c = http.client.HTTPConnection(self.address, timeout=120)
        c.request(method or ("GET" if body is None else "POST"), path, None if body is None else json.dumps(body),
                  {"Authorization": f"Bearer {key}"} if key else {})
        return c

    def call(self, path, body=None, key=None, method=None):
        """The status and the JSON of the reply."""
        c = self.open(path, body, key, method)
        r = c.getresponse()
        v = json.loads(r.read())
        c.close()
        return r.status, v

    def stream(self, path, body, key=None):
        """Returns the connection and a generator of (event, data); data is JSON, except the text "[DONE]"."""
        c = self.open(path, {**body, "stream": True}, key)
        r = c.getresponse()
        assert r.status == 200 and r.getheader("Content-Type") == "text/event-stream", (r.status, r.read())

        def events():
            name = "message"
            for line in iter(r.readline, b""):
                line = line.decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    yield name, "[DONE]" if line[6:] == "[DONE]" else json.loads(line[6:])
                    name = "message"
        return c, events()

    def running(self):
        """The number of requests that run or are queued."""
        figures = self.call("/v1/metrics")[1]
        return sum(s["value"] for n in ("running", "waiting") for s in figures[f"vllm:num_requests_{n}"]["series"])

    def waits_until_busy(self):
        """Whether a request runs or is queued within 20 seconds: polls, because there is a moment without requests between two steps."""
        end = time.time() + 20
        while time.time() < end and not self.running():
            time.sleep(0.01)
        return time.time() < end

    def waits_until_idle(self):
        """Whether, within 20 seconds, 8 polls in a row find no request: longer than the pause between two steps."""
        end, still = time.time() + 20, 0
        while time.time() < end and still < 8:
            still = 0 if self.running() else still + 1
            time.sleep(0.05)
        return still == 8
