"""Models, generation, embeddings and adapters."""
import json
import signal
import tempfile
import threading
import time
import unittest
from pathlib import Path

import numpy as np
from support import CHOICES, FRY, QUESTION, fry

import shoal


class Models(unittest.TestCase):
    def test_info(self):
        info = fry().info
        self.assertEqual((info["name"], info["class"], info["threads"]), ("fry-1", "exact", 2))
        self.assertEqual(repr(fry()), "<shoal.Model fry-1>")

    def test_a_closed_model(self):
        with shoal.Model(FRY, threads=1) as model:
            adapter = model.new_adapter(r=2)
        with self.assertRaisesRegex(shoal.StateError, "the model is closed"):
            model.run(QUESTION)
        self.assertEqual(repr(model), "<shoal.Model, closed>")
        with self.assertRaises(shoal.StateError):
            adapter.save("/nonexistent")
        self.assertEqual(len(adapter.hash), 64)

    def test_tokens(self):
        for text in ("", "héllo wörld", "日本語", "a" * 1000):
            self.assertEqual(fry().detokenize(fry().tokenize(text)), text)
        with self.assertRaises(shoal.UsageError):
            fry().detokenize([10**6])

    def test_embed(self):
        width = fry().info["width"]
        out = fry().embed(["one text", "another text", "one text"])
        self.assertEqual((out.shape, out.dtype), ((3, width), np.float32))
        np.testing.assert_array_equal(out[0], out[2])
        np.testing.assert_array_equal(out[:1], fry().embed("one text"))
        self.assertFalse(np.array_equal(out[0], out[1]))
        self.assertEqual(fry().embed([]).shape, (0, width))


class Generation(unittest.TestCase):
    def test_a_str_is_a_users_message(self):
        reply = fry().run(QUESTION)
        self.assertTrue(reply.text.startswith("answer: "))
        self.assertEqual((reply.finish, reply.choice, reply.probabilities), ("stop", None, None))
        self.assertGreater(reply.usage.completion_tokens, 0)
        self.assertEqual(fry().run([{"role": "user", "content": QUESTION}]).text, reply.text)
        self.assertEqual(str(reply), reply.text)

    def test_options(self):
        self.assertEqual(fry().run(QUESTION, max_tokens=1).finish, "length")
        self.assertEqual(fry().run(QUESTION, stop=[":"]).text, "answer")
        schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
        self.assertIn(json.loads(fry().run(QUESTION, json_schema=schema).text)["n"], (1, 2))
        a, b, c = (fry().run(QUESTION, temperature=2, seed=s).text for s in (1, 1, 2))
        self.assertEqual(a, b)
        self.assertNotEqual(a, c)

    def test_wrong_arguments(self):
        for arguments, text in (({}, "either"), ({"prompt": "a", "text": "b"}, "either"),
                                ({"prompt": [{"role": "user"}]}, "message"), ({"prompt": "a", "foo": 1}, "foo"),
                                ({"prompt": "a", "adapter": "x"}, "shoal.Adapter"),
                                ({"prompt": "a", "choices": ["b"]}, "1 choices")):
            with self.subTest(arguments), self.assertRaisesRegex(shoal.UsageError, text):
                fry().run(**arguments)

    def test_choices(self):
        reply = fry().choose(QUESTION, CHOICES)
        self.assertEqual((reply.text, reply.finish), (CHOICES[reply.choice], "choice"))
        self.assertEqual((reply.probabilities.shape, reply.probabilities.dtype), ((3,), np.float32))
        self.assertAlmostEqual(float(reply.probabilities.sum()), 1, places=5)
        self.assertEqual(int(reply.probabilities.argmax()), reply.choice)

    def test_a_batch_equals_single_runs(self):
        adapter = fry().new_adapter(r=2, seed=1)
        requests = [QUESTION, {"prompt": QUESTION, "adapter": adapter}, {"prompt": QUESTION, "choices": CHOICES},
                    {"text": "answer:", "max_tokens": 3}, {"prompt": QUESTION, "adapter": {adapter: 0.5}}]
        batch = fry().run_batch(requests, max_tokens=20)
        self.assertEqual(len(batch), 5)
        for request, reply in zip(requests, batch):
            alone = fry().run(**{"max_tokens": 20, **(request if isinstance(request, dict) else {"prompt": request})})
            self.assertEqual((alone.text, alone.finish, alone.choice), (reply.text, reply.finish, reply.choice))
        self.assertEqual(fry().run_batch([]), [])

    def test_stream(self):
        whole = fry().run(QUESTION)
        stream = fry().stream(QUESTION)
        first = next(stream)
        self.assertEqual(stream.reply.finish, "")
        self.assertEqual(fry().run(QUESTION).text, whole.text)  # another call in between
        pieces = [first, *stream]
        self.assertGreater(len(pieces), 1)
        self.assertEqual("".join(pieces), whole.text)
        self.assertEqual((stream.reply.text, stream.reply.finish), (whole.text, "stop"))

    def test_streams_at_once_and_cancelling(self):
        with fry().stream("sort: k b x", regex="a{200}") as a, fry().stream("sort: k b x") as b:
            next(a)
            self.assertEqual("".join(b), fry().run("sort: k b x").text)
        self.assertEqual(a.reply.finish, "cancelled")
        abandoned = fry().stream(QUESTION)
        next(abandoned)
        del abandoned
        self.assertEqual(fry().run(QUESTION).finish, "stop")

    def test_a_stream_never_cuts_a_character(self):
        pieces = list(fry().stream("x", regex="日本語ほげ", max_tokens=60))
        self.assertEqual("".join(pieces), "日本語ほげ")
        self.assertTrue(set("".join(pieces)) <= set("日本語ほげ"))

    def test_threads_take_turns(self):
        texts, expected = {}, fry().run(QUESTION).text

        def work(i):
            texts[i] = [fry().run(QUESTION).text for _ in range(5)]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(texts, {i: [expected] * 5 for i in range(4)})


class Progress(unittest.TestCase):
    def test_progress(self):
        seen = []
        fry().run_batch([QUESTION] * 3, progress=lambda *p: seen.append(p))
        task, done, total, seconds, detail = seen[-1]
        self.assertEqual((task, done, total, detail), ("requests", 3, 3, ""))
        self.assertGreaterEqual(seconds, 0)

    def test_cancel(self):
        with self.assertRaises(shoal.Cancelled) as caught:
            fry().run(QUESTION, progress=lambda *p: True)
        self.assertEqual(caught.exception.name, "state")
        self.assertEqual(fry().run(QUESTION).finish, "stop")

    def test_an_exception_in_a_callback_is_raised_after_the_call(self):
        def fail(*_):
            raise KeyError("mine")

        with self.assertRaises(KeyError):
            fry().run(QUESTION, progress=fail)

    def test_calls_in_a_progress_function_are_refused(self):
        with self.assertRaisesRegex(shoal.StateError, "in use"):
            fry().run(QUESTION, progress=lambda *p: fry().tokenize("a"))

    def test_an_interrupt_ends_a_call(self):
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        start = time.monotonic()
        try:
            with self.assertRaises(KeyboardInterrupt):
                fry().run_batch([QUESTION] * 64, regex="a{400}", max_tokens=400)
                time.sleep(1)  # if the call was faster
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        self.assertLess(time.monotonic() - start, 10)
        self.assertEqual(fry().run(QUESTION).finish, "stop")


class Adapters(unittest.TestCase):
    def test_save_and_load(self):
        adapter = fry().new_adapter(r=2, seed=3)
        self.assertEqual(fry().new_adapter(r=2, seed=3).hash, adapter.hash)
        self.assertNotEqual(fry().new_adapter(r=2, seed=4).hash, adapter.hash)
        self.assertIn(adapter.hash[:12], repr(adapter))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a"
            adapter.save(path)
            self.assertEqual(fry().load_adapter(path).hash, adapter.hash)
            (path / "adapter_config.json").write_text("{")
            with self.assertRaises(shoal.FormatError):
                fry().load_adapter(path)
        with self.assertRaises(shoal.MissingError):
            fry().load_adapter("/nonexistent")

    def test_combine(self):
        a, b = (fry().new_adapter(r=2, seed=s) for s in (1, 2))
        merged = fry().combine("ties", [a, b], [0.5, 0.5], seed=1)
        self.assertEqual(merged.lineage["operator"], "ties")
        self.assertEqual(merged.hash, fry().combine("ties", [a, b], [0.5, 0.5], seed=1).hash)
        with self.assertRaisesRegex(shoal.UsageError, "1 weights for 2 adapters"):
            fry().combine("ties", [a, b], [1])
        with self.assertRaises(shoal.Error):
            fry().combine("no-such-operator", [a, b])

    def test_an_untrained_adapter_changes_nothing(self):
        adapter = fry().new_adapter(r=4)
        self.assertEqual(adapter.lineage, {})
        base = fry().choose(QUESTION, CHOICES).probabilities
        np.testing.assert_allclose(fry().choose(QUESTION, CHOICES, adapter).probabilities, base, rtol=1e-5)


if __name__ == "__main__":
    unittest.main()
