"""chat_pty SHOAL SLOW FOLDER: 'shoal chat' on a pseudo-terminal: line editing, history, completion, Ctrl-C and Ctrl-D.

SLOW is a model that generates for a second or more. FOLDER is empty and gets the state. Prints "ok NAME" and
"not ok NAME: why" lines.
"""
import fcntl
import json
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import termios
import time

SHOAL, SLOW, FOLDER = sys.argv[1:]
HISTORY = os.path.join(FOLDER, "state", "shoal", "history")
STORE = ["--store", os.path.join(FOLDER, "store.db")]
FRY = ["test/models/fry-1", "--temp", "0", "-n", "12", *STORE]
UP, LEFT, BACKSPACE, CTRL_C, CTRL_D = b"\033[A", b"\033[D", b"\x7f", b"\x03", b"\x04"
NEXT = b"\n> "


def check(name, cond, why=b""):
    print(f"ok {name}" if cond else f"not ok {name}: {why!r:.600}", flush=True)


class Chat:
    def __init__(self, *args, term="xterm"):
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        self.out = b""  # output after the last match
        env = {**os.environ, "XDG_STATE_HOME": os.path.join(FOLDER, "state"), "TERM": term, "LC_ALL": "C",
               "HOME": FOLDER}
        self.pid = os.fork()
        if self.pid == 0:
            self.take_terminal()
            os.execve(SHOAL, [SHOAL, "chat", *args], env)
        self.wait(b"> ")

    def take_terminal(self):
        os.setsid()
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
        for fd in range(3):
            os.dup2(self.slave, fd)

    def read(self):
        if not select.select([self.master], [], [], 0.1)[0]:
            return
        self.out += os.read(self.master, 65536)

    def wait(self, text, seconds=60):
        """The output up to and including a text; b"" if it does not come."""
        until = time.monotonic() + seconds
        while text not in self.out and time.monotonic() < until:
            self.read()
        if text not in self.out:
            check(f"the output has {text!r}", False, self.out)
            os.kill(self.pid, signal.SIGKILL)
            sys.exit(1)
        at = self.out.index(text) + len(text)
        got, self.out = self.out[:at], self.out[at:]
        return got

    def send(self, keys, then=NEXT):
        os.write(self.master, keys)
        return self.wait(then)

    def end(self, keys):
        """Sends the last keys; returns the exit status, and whether the terminal is as before."""
        os.write(self.master, keys)
        status, until = None, time.monotonic() + 60
        while status is None and time.monotonic() < until:
            pid, code = os.waitpid(self.pid, os.WNOHANG)
            status = code if pid else None
            self.read()
        same = termios.tcgetattr(self.slave) == self.before
        os.close(self.master)
        os.close(self.slave)
        return status, same


def saved(path):
    with open(path, encoding="utf-8") as f:
        return [m["content"] for m in json.loads(f.read())["messages"]]


def history():
    with open(HISTORY, encoding="utf-8") as f:
        return f.read().split("\n")[:-1]


def editing():
    talk = os.path.join(FOLDER, "talk")
    c = Chat(*FRY)
    c.send(b"sort: b a\r")
    c.send("春はは".encode() + BACKSPACE + LEFT + LEFT + "你".encode() + b"\r")
    got = c.send("一二三".encode() + LEFT + b"x", b"x")
    check("a kanji takes two columns", b"\b\b" in got, got)
    got = c.send(CTRL_C)
    check("Ctrl-C clears the line", b"^C\r\n" in got, got)
    c.send(UP + UP + b"\r")
    c.send(f"/save {talk}\r".encode())
    users = saved(talk)[::2]
    check("Japanese and Chinese lines can be edited, and arrow up recalls lines", users == ["sort: b a", "你春は", "sort: b a"],
          users)
    got = c.send(b"/he\t\r")
    check("Tab completes a command", b"/quit" in got and b"no command" not in got, got)
    got = c.send(b"/f\t", b"> /f")
    check("Tab lists the commands that fit", b"/facts  /forget" in got, got)
    c.send(CTRL_C)
    c.send(b"/adapter mod\t", b"els/")
    check("Tab completes a path", True)
    c.send(CTRL_C)
    got = c.send(b"/fcts\r")
    check("an unknown command names the nearest one", "did you mean '/facts'".encode() in got, got)
    got = c.send(CTRL_C)
    check("Ctrl-C on an empty line says how to end", b"a second Ctrl-C ends the chat" in got, got)
    c.send(b"1 + 2 = ?\r")
    status, same = c.end(CTRL_D)
    check("Ctrl-D ends the chat", status == 0, status)
    check("the terminal is restored", same)
    mode = stat.S_IMODE(os.stat(HISTORY).st_mode), stat.S_IMODE(os.stat(os.path.dirname(HISTORY)).st_mode)
    check("the history is private", mode == (0o600, 0o700), mode)
    check("the history has the lines", history() == ["sort: b a", "你春は", "sort: b a", f"/save {talk}", "/help", "/fcts",
                                                     "1 + 2 = ?"], history())


def later_sessions():
    with open(HISTORY, "a", encoding="utf-8") as f:
        f.writelines(f"line {i}\n" for i in range(1500))
    c = Chat(*FRY)
    got = c.send(UP, b"line 1499")
    c.send(CTRL_C)
    c.send(b"/facts\r")
    check("the next chat has the history", True)
    lines = history()
    check("the history has at most 1000 lines", len(lines) == 1000 and lines[-2:] == ["line 1499", "/facts"], lines[-3:])
    c.send(CTRL_C)
    status, same = c.end(CTRL_C)
    check("a second Ctrl-C ends the chat", status == 0 and same, status)

    c = Chat(*FRY, "--no-history")
    c.send(b"/board\r")
    status, _ = c.end(b"/bye\r")
    check("/bye ends the chat", status == 0, status)
    check("--no-history leaves the file as it is", history() == lines)

    c = Chat(*FRY, term="dumb")
    got = c.send(b"/facts\r")
    check("a terminal without cursor movement has no editing", b"\033" not in got, got)
    c.end(b"/exit\r")

    c = Chat(*FRY)
    os.kill(c.pid, signal.SIGTERM)
    status, same = c.end(b"")
    check("the terminal is restored after a signal", same and os.WTERMSIG(status) == signal.SIGTERM, status)


def interrupts():
    args = [SLOW, "--temp", "0", "-n", "100000", "--loop-tokens", "0", "--threads", "1", *STORE]
    whole = json.loads(subprocess.run([SHOAL, "chat", *args, "--json"], input=b"hello\n", capture_output=True).stdout)
    talk = os.path.join(FOLDER, "stopped")
    c = Chat(*args)
    c.send(b"hello\r", b"hello\r\n")
    while not c.out:
        c.read()
    c.send(CTRL_C)
    c.send(f"/save {talk}\r".encode())
    reply = saved(talk)[1]
    check("Ctrl-C stops a reply", reply and whole["answer"].startswith(reply) and len(reply) < len(whole["answer"]),
          (len(reply), len(whole["answer"])))
    status, same = c.end(CTRL_D)
    check("the chat ends after it as usual", status == 0 and same, status)

    c = Chat(SLOW, "--team", "--agents", "2", "--max-tokens", "100", "--threads", "1", *STORE)
    c.send(b"which is larger, 3 or 9?\r", b"agents think")
    got = c.send(CTRL_C)
    check("Ctrl-C stops the reply of a team", b"the reply was stopped" in got, got)
    status, same = c.end(CTRL_D)
    check("a team's chat ends after it as usual", status == 0 and same, status)


editing()
later_sessions()
interrupts()
