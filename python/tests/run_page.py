"""run_page: runs the blocks ```python of a page in order, in one namespace and the current folder.

Each line of a block ```text after a block ```python must be part of the output of that block. Prints "ok PAGE:LINE" and
"not ok PAGE:LINE: why" lines, and stops at the first error.
"""
import contextlib
import io
import re
import sys
import traceback
from pathlib import Path


def blocks(text):
    """(tag, line number of the first line, content) of each block."""
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.S | re.M):
        yield match.group(1), text.count("\n", 0, match.start()) + 2, match.group(2)


def main(page):
    name, namespace, output = Path(page).name, {"__name__": "__main__"}, ""
    for tag, line, content in blocks(Path(page).read_text(encoding="utf-8")):
        if tag == "python":
            captured = io.StringIO()
            try:
                with contextlib.redirect_stdout(captured):
                    exec(compile("\n" * (line - 1) + content, page, "exec"), namespace)
            except BaseException as e:
                traceback.print_exc()
                print(f"not ok {name}:{line}: {type(e).__name__}: {e}")
                return 1
            output = captured.getvalue()
        elif tag == "text":
            missing = [text for text in content.splitlines() if text not in output]
            if missing:
                print(f"not ok {name}:{line}: it did not print: {missing[0]}")
                return 1
        else:
            continue
        print(f"ok {name}:{line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
