"""Declarations, options, errors, and the order in which objects are freed."""
import gc
import pickle
import subprocess
import sys
import textwrap
import threading
import unittest
from pathlib import Path

import numpy as np
from support import FRY, ROOT, fry

import shoal
from shoal import _call, _library, errors
from shoal._handle import Handle, ModelLock
from shoal._library import ffi, lib


def option_list(**options):
    array = _call.options_of(options)
    assert array[len(array) - 1] == ffi.NULL
    return [ffi.string(array[i]).decode() for i in range(len(array) - 1)]


class Declarations(unittest.TestCase):
    def test_comments_and_directives_are_removed(self):
        text = _library.declarations('#ifdef __cplusplus\nextern "C" {\n#endif\n#define SHOAL_API x\n/* a\n b */\n'
                                     'SHOAL_API int f(void); /* c */\n')
        self.assertEqual(text.split(), ["int", "f(void);"])

    def test_the_package_has_the_header_of_the_tree(self):
        header = Path(shoal.__file__).with_name("shoal.h")
        if not header.exists():
            self.skipTest("the package is not installed")
        self.assertEqual(header.read_text(), (ROOT / "include" / "shoal.h").read_text())

    def test_version(self):
        self.assertIn(f"VERSION := {shoal.__version__}\n", (ROOT / "Makefile").read_text())

    def test_missing_library(self):
        done = subprocess.run([sys.executable, "-c", "import shoal"], env={"SHOAL_LIBRARY": "/nonexistent.so"},
                              capture_output=True, text=True)
        self.assertIn("ImportError: cannot load '/nonexistent.so'", done.stderr)


class Options(unittest.TestCase):
    def test_values(self):
        self.assertEqual(option_list(max_tokens=5, exact=True, fast=False, lr=4e-3, seed=None),
                         ["max-tokens=5", "exact=true", "fast=false", "lr=0.004"])
        self.assertEqual(option_list(r=np.int64(8), p=np.float32(0.5), out=Path("a") / "b"),
                         ["r=8", "p=0.5", "out=a/b"])

    def test_lists_repeat_the_option(self):
        self.assertEqual(option_list(stop=["a", "b"], layers=(0, 1)), ["stop=a", "stop=b", "layers=0", "layers=1"])
        self.assertEqual(option_list(tasks=["pick", "route"], retain=None), ["tasks=pick,route"])
        self.assertEqual(option_list(data={"a": "x.jsonl", "b": Path("y")}), ["data=a=x.jsonl", "data=b=y"])

    def test_a_schema_becomes_json(self):
        self.assertEqual(option_list(json_schema={"type": "integer"}), ['json-schema={"type": "integer"}'])

    def test_an_underscore_at_the_end_is_not_part_of_the_name(self):
        self.assertEqual(option_list(lambda_=1), ["lambda=1"])

    def test_nul_is_refused(self):
        with self.assertRaisesRegex(shoal.UsageError, "NUL"):
            fry().tokenize("a\0b")


class Errors(unittest.TestCase):
    def test_each_code_has_a_class(self):
        for name in ("USAGE", "IO", "FORMAT", "MISMATCH", "MEMORY", "MISSING", "STATE", "NUMERIC"):
            code = getattr(lib, f"SHOAL_ERR_{name}")
            e = errors.error_from(ffi.new("struct shoal_error *", {"code": code, "text": b"why"}))
            self.assertEqual((e.code, e.text, str(e), e.name), (code, "why", "why", name.lower()))
            self.assertIsInstance(e, shoal.Error)

    def test_standard_classes(self):
        with self.assertRaises(FileNotFoundError):
            shoal.Model("/nonexistent")
        with self.assertRaisesRegex(ValueError, "'--thread'"):
            shoal.Model(FRY, thread=2)

    def test_errors_can_be_pickled(self):
        e = pickle.loads(pickle.dumps(shoal.MissingError("no file")))
        self.assertEqual((type(e), e.text, str(e)), (shoal.MissingError, "no file", "no file"))


class Handles(unittest.TestCase):
    def setUp(self):
        self.freed = []
        self.lock = ModelLock()

    def handle(self, name, *parents):
        return Handle(name, self.freed.append, parents, self.lock)

    def test_a_parent_is_freed_after_its_children(self):
        a = self.handle("a")
        b = self.handle("b", a)
        c = self.handle("c", a, b)
        a.close()
        b.close()
        self.assertEqual(self.freed, [])
        with self.assertRaises(shoal.StateError):
            a.pointer
        c.close()
        c.close()
        self.assertEqual(self.freed, ["c", "b", "a"])

    def test_reference_cycles(self):
        a = self.handle("a")
        cycle = [a, self.handle("b", a)]
        cycle.append(cycle)
        del a, cycle
        gc.collect()
        self.assertEqual(self.freed, ["b", "a"])

    def test_a_running_call_delays_freeing(self):
        a = self.handle("a")
        with a.use():
            a.close()
            self.assertEqual(self.freed, [])
        self.assertEqual(self.freed, ["a"])

    def test_a_call_of_another_thread_delays_freeing(self):
        a, b = self.handle("a"), self.handle("b")
        begun, end = threading.Event(), threading.Event()

        def call():
            with a.use():
                begun.set()
                end.wait(10)

        thread = threading.Thread(target=call)
        thread.start()
        begun.wait(10)
        b.close()
        self.assertEqual(self.freed, [])
        end.set()
        thread.join()
        self.assertEqual(self.freed, ["b"])

    def test_calls_within_a_call(self):
        a = self.handle("a")
        with a.use():
            with self.assertRaisesRegex(shoal.StateError, "in use"), a.use():
                pass
            with self.lock.nested(), a.use():
                pass
            with self.assertRaisesRegex(shoal.StateError, "in use"), a.use():
                pass
        with a.use():
            pass

    def test_interpreter_exit(self):
        code = textwrap.dedent(f"""
            import shoal
            model = shoal.Model({str(FRY)!r}, threads=2)
            adapter = model.new_adapter(r=2)
            stream = model.stream("pick the smaller of 3 and 4")
            next(stream)
            cycle = [model, adapter, stream]
            cycle.append(cycle)
            class Keeper:
                def __del__(self, model=model):
                    model.close()
            keeper = Keeper()
            print("end")
            """)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "end\n", ""))


if __name__ == "__main__":
    unittest.main()
