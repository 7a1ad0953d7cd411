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


def check(what, cond, got=b""):
    if not cond:
        sys.exit(f"{what}: {got[-600:]!r}")


def main():
    shoal, how = sys.argv[1:]
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(master)
        for fd in range(3):
            os.dup2(slave, fd)
        os.execv(shoal, [shoal, "world", "--watch", "--seed", "3", "--agents", "4"])
    got = read_for(master, b"q quit", 20)
    check("it enters another screen", b"\033[?1049h" in got, got)
    check("the terminal is in raw mode", not termios.tcgetattr(slave)[3] & termios.ICANON)
    os.write(master, b" n>>\033[A")  # pause, next agent, 20 ticks on, faster
    got = read_for(master, b"20/s  paused.*q quit", 20)
    check("it handles keys", b"20/s  paused" in got and b"agent_1:" in got, got)
    if how == "q":
        os.write(master, b"q")
    elif how == "hangup":
        os.kill(child, signal.SIGHUP)
    else:
        os.kill(child, getattr(signal, "SIG" + how))
    got = read_for(master, rb"\[\?1049l", 20)
    status = os.waitpid(child, 0)[1]
    check("it leaves the screen", b"\033[?25h\033[?1049l" in got, got)
    check("the terminal is restored", termios.tcgetattr(slave) == before)
    check("exit status", os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 if how == "q" else os.WIFSIGNALED(status),
         str(status).encode())


main()
