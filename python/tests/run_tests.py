"""run_tests: runs test_*.py of this folder; prints "ok NAME", "not ok NAME: why" and "skip NAME: why" lines."""
import sys
import unittest
from pathlib import Path


class Lines(unittest.TestResult):
    def line(self, word, test, why=""):
        print(word, ".".join(str(test.id()).split(".")[-3:]) + (f": {why}" if why else ""), flush=True)

    def addSuccess(self, test):
        self.line("ok", test)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.line("skip", test, reason)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.line("not ok", test, f"{err[0].__name__}: {err[1]}")
        print(self.failures[-1][1])

    def addError(self, test, err):
        super().addError(test, err)
        self.line("not ok", test, f"{err[0].__name__}: {err[1]}")
        print(self.errors[-1][1])

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err:
            self.line("not ok", subtest, f"{err[0].__name__}: {err[1]}")


if __name__ == "__main__":
    result = Lines()
    unittest.defaultTestLoader.discover(str(Path(__file__).parent)).run(result)
    sys.exit(not result.wasSuccessful())
