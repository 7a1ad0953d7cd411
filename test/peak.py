#!/usr/bin/env python3
"""Usage: peak.py FILE COMMAND ARGUMENTS...: runs the command, writes its peak of resident memory (VmHWM), in MB rounded
up, to FILE, and exits with the command's code."""
import os
import sys

child = os.fork()
if child == 0:
    os.execv(sys.argv[2], sys.argv[2:])
_, status, usage = os.wait4(child, 0)
with open(sys.argv[1], "w") as f:
    f.write(f"{-(-usage.ru_maxrss // 1024)}\n")
sys.exit(os.waitstatus_to_exitcode(status))
