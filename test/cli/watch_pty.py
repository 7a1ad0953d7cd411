"""watch_pty SHOAL HOW: 'shoal world --watch' on a pseudo-terminal, ended by a key (q), a signal (TERM, SEGV) or a
hang-up; fails unless it drew, read keys, and restored the terminal.
"""
import os
import pty
import re
import select
import signal
import sys
import termios
import time


def read_for(fd, wanted, seconds):
    """The output until it matches the pattern `wanted`, the other side ends, or the time is over."""
    got, until = b"", time.monotonic() + seconds
    while not re.search(wanted, got, re.S) and time.monotonic() < until:
        if select.select([fd], [], [], 0.1)[0]:
            try:
                piece = os.read(fd, 65536)
            except OSError:
                break
            if not piece:
                break
            got += piece
    return got


def must(what, cond, got=b""):
    if not cond:
        sys.exit(f"{what}: {got[-600:]!r}")


def main():
    shoal, how = sys.argv[1:]
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(ours)
        for fd in range(3):
            os.dup2(theirs, fd)
        os.execv(shoal, [shoal, "world", "--watch", "--seed", "3", "--agents", "4"])
    got = read_for(ours, b"q quit", 20)
    must("it enters another screen", b"\033[?1049h" in got, got)
    must("the terminal gives keys one by one", not termios.tcgetattr(theirs)[3] & termios.ICANON)
    os.write(ours, b" n>>\033[A")  # pause, next agent, 20 ticks on, faster
    got = read_for(ours, b"20/s  paused.*q quit", 20)
    must("it takes keys", b"20/s  paused" in got and b"agent_1:" in got, got)
    if how == "q":
        os.write(ours, b"q")
    elif how == "hangup":
        os.kill(child, signal.SIGHUP)
    else:
        os.kill(child, getattr(signal, "SIG" + how))
    got = read_for(ours, rb"\[\?1049l", 20)
    status = os.waitpid(child, 0)[1]
    must("it leaves the screen", b"\033[?25h\033[?1049l" in got, got)
    must("the terminal is as before", termios.tcgetattr(theirs) == before)
    must("how it ended", os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 if how == "q" else os.WIFSIGNALED(status),
         str(status).encode())


main()
