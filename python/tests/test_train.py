"""Training, evaluation, debate, evolution, simulation and serving."""
import json
import os
import random
import subprocess
import sys
import tempfile
import unittest
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from support import CHOICES, FRY, QUESTION, conversation, fry, write_conversations

import shoal

RECIPE = """\
model: {model}
personas: [a={a}, b={b}]
tasks: [pick]
rounds: 0
test_items: 20
evolve: {{generations: 2, population: 3, elites: 1}}
fitness: {{items: 10, performance: 1, cooperation: 0, novelty: 0}}
finetune: {{max_steps: 4, r: 4, bsz: 4, grad_accum: 1, lr: 0.004}}
"""


class WithFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.addCleanup(os.chdir, os.getcwd())  # training keeps its runs in the current folder
        os.chdir(self.folder)


class Train(WithFolder):
    def test_two_adapters(self):
        data = {name: write_conversations(self.folder / f"{name}.jsonl", 20, i) for i, name in enumerate("ab")}
        seen = []
        results = fry().train(data, self.folder / "out", r=2, lr=4e-3, max_steps=2, bsz=4, grad_accum=1, seed=1,
                              progress=lambda *p: seen.append(p))
        self.assertEqual([r["adapter"] for r in results], ["a", "b"])
        for r in results:
            self.assertEqual(fry().load_adapter(r["dir"]).hash, r["hash"])
        self.assertTrue(seen)
        for task, done, total, seconds, detail in seen:
            self.assertEqual(tuple(map(type, (task, done, total, seconds, detail))), (str, int, int, float, str))

    def test_cancelled_training_continues_to_the_same_result(self):
        data = write_conversations(self.folder / "data.jsonl", 20)
        options = dict(r=2, lr=4e-3, max_steps=4, bsz=4, grad_accum=1, seed=1, save_steps=1)
        whole = fry().train(data, self.folder / "whole", **options)
        with self.assertRaises(shoal.Cancelled):
            fry().train(data, self.folder / "parts", progress=lambda task, done, *_: done >= 2, **options)
        parts = fry().train(data, self.folder / "parts", **options)
        self.assertEqual(parts[0]["hash"], whole[0]["hash"])

    def test_errors(self):
        with self.assertRaises(shoal.MissingError):
            fry().train("/nonexistent.jsonl", self.folder / "out")
        with self.assertRaisesRegex(shoal.UsageError, "ranks"):
            fry().train("x", self.folder / "out", ranks=8)


class Trainer(WithFolder):
    def test_the_loss_decreases(self):
        start = [fry().new_adapter(r=4, seed=s) for s in (1, 2)]
        chat = conversation(random.Random(1))
        with fry().trainer(start, optim="adamw") as trainer:
            before = trainer.loss(chat, 1)
            for _ in range(5):
                trainer.add(chat, adapter=1)
                self.assertGreater(trainer.update(4e-3), 0)
            self.assertLess(trainer.loss(chat, 1), before)
            trained = trainer.adapter(1)
            unchanged = fry().choose(QUESTION, CHOICES, trainer.adapter(0))
            self.assertEqual(unchanged.text, fry().choose(QUESTION, CHOICES).text)
        self.assertNotEqual(trained.hash, start[1].hash)
        self.assertEqual(fry().run(chat[:1], adapter=trained).finish, "stop")
        with self.assertRaises(shoal.StateError):
            trainer.update(1e-3)

    def test_save_and_load(self):
        start, rng = [fry().new_adapter(r=2, seed=1)], random.Random(2)
        chats = [conversation(rng) for _ in range(4)]
        one, two = (fry().trainer(start) for _ in range(2))
        for chat in chats[:2]:
            one.add(chat)
            one.update(1e-3)
        one.save(self.folder / "state")
        two.load(self.folder / "state")
        for trainer in (one, two):
            for chat in chats[2:]:
                trainer.add(chat)
                trainer.update(1e-3)
        self.assertEqual(one.adapter().hash, two.adapter().hash)

    def test_errors(self):
        with self.assertRaises(shoal.UsageError):
            fry().trainer([])
        trainer = fry().trainer([fry().new_adapter(r=2)])
        with self.assertRaises(shoal.UsageError):
            trainer.add([{"role": "user", "content": "no target"}])
        with self.assertRaises(shoal.Error):
            trainer.add(conversation(random.Random(1)), adapter=1)


class Evaluate(unittest.TestCase):
    def test_evaluate(self):
        base, own = fry().evaluate({"mine": fry().new_adapter(r=2)}, tasks="pick", n=20)
        self.assertEqual([(r["adapter"], r["n"]) for r in (base, own)], [("base", 20), ("mine", 20)])
        self.assertLess(base["lo"], base["acc"])
        self.assertEqual(own["difference"]["value"], 0)
        self.assertEqual([r["task"] for r in fry().evaluate(tasks=["pick", "route"], n=5)], ["pick", "route"])
        with self.assertRaises(shoal.Cancelled):
            fry().evaluate(tasks="pick", n=50, progress=lambda *p: True)

    def test_debate(self):
        agents = {"critic": fry().new_adapter(r=2), "base": None}
        transcript = fry().debate(agents, topic=QUESTION, choices=["3", "41", "907"], rounds=1, seed=1)
        self.assertIsInstance(transcript, dict)
        reports = fry().debate(agents, tasks="pick", n=4, rounds=1)
        self.assertEqual(len(reports), 1)
        with self.assertRaises(shoal.UsageError):
            fry().debate({}, topic=QUESTION)


class Evolve(WithFolder):
    def founders(self):
        return {name: fry().new_adapter(r=2, seed=i) for i, name in enumerate("abc", 1)}

    def test_population(self):
        with fry().population(self.founders(), population=4, elites=1, seed=1) as p:
            self.assertEqual((p.names, len(p)), (["a", "b", "c"], 3))
            with self.assertRaisesRegex(shoal.StateError, "not evaluated"):
                p.info

            def fitness(names, adapters):
                self.assertEqual([a.hash for a in adapters], [a.hash for a in p.adapters])
                self.assertEqual(fry().run(QUESTION, adapter=adapters[0]).finish, "stop")
                kept.extend(adapters)
                return np.array([[ord(name[0]) / 128] * 5 for name in names])

            kept: list = []
            p.evaluate(fitness, items=5)
            self.assertEqual(p.names, ["c", "b", "a"])
            self.assertEqual(p.best.hash, self.founders()["c"].hash)
            best = p.best
            p.breed()
            self.assertEqual(best.hash, self.founders()["c"].hash)
            self.assertEqual(kept[0].hash, self.founders()["a"].hash)
            self.assertEqual(len(p), 4)
            p.evaluate(lambda names, adapters: np.full((len(names), 5), 0.5), items=5)
            self.assertEqual(len(p.info["candidates"]), 4)
            keep = p.best
        self.assertEqual(len(keep.hash), 64)  # after the population is closed

    def test_an_exception_of_the_fitness_function(self):
        p = fry().population(self.founders(), population=4, seed=1)
        for fitness, error in ((lambda names, adapters: 1 / 0, ZeroDivisionError),
                               (lambda names, adapters: np.zeros((1, 1)), ValueError),
                               (lambda names, adapters: [["x"] * 5] * 3, ValueError)):
            with self.assertRaises(error):
                p.evaluate(fitness, items=5)
        self.assertEqual(p.names, ["a", "b", "c"])
        self.assertEqual(fry().run(QUESTION).finish, "stop")

    def test_a_fitness_function_uses_the_model_in_threads(self):
        p = fry().population(self.founders(), population=4, seed=1)
        choices = [f"answer: {i}" for i in (3, 41)]

        def score(adapter):
            return [fry().choose(QUESTION, choices, adapter).probabilities[0]] * 2

        def fitness(names, adapters):
            for change in (p.breed, lambda: p.evaluate(fitness, items=2)):
                with self.assertRaisesRegex(shoal.StateError, "being evaluated"):
                    change()
            with ThreadPoolExecutor(3) as pool:
                return list(pool.map(score, adapters))

        p.evaluate(fitness, items=2)
        p.breed()

    def test_evolve_and_resume(self):
        a, b = (write_conversations(self.folder / f"{seed}.jsonl", 20, seed) for seed in (1, 2))
        recipe = self.folder / "recipe.yaml"
        recipe.write_text(RECIPE.format(model=FRY, a=a, b=b))
        options = dict(runs=self.folder / "runs", threads=2)
        whole = shoal.evolve(recipe, id="whole", seed=1, exact=True, **options)
        n_steps = 0

        def pause(*_):
            nonlocal n_steps
            n_steps += 1
            return n_steps == 3

        with self.assertRaises(shoal.Cancelled):
            shoal.evolve(recipe, id="parts", seed=1, exact=True, progress=pause, **options)
        parts = shoal.resume("parts", **options)
        self.assertEqual(parts["adapters"], whole["adapters"])
        with self.assertRaises(shoal.MissingError):
            shoal.evolve(self.folder / "nothing.yaml", **options)


class Simulate(WithFolder):
    def test_simulate(self):
        options = dict(agents=2, steps=20, num_adapters=2, generations=1, eval_maps=1, runs=self.folder, seed=1)
        rows = fry().simulate(**options)
        self.assertTrue(any(row.get("generation") == 1 for row in rows), rows)
        with self.assertRaisesRegex(shoal.UsageError, "agent"):
            fry().simulate(agent=2)


class Serve(WithFolder):
    def options(self):
        return dict(port=0, state=self.folder / "state", runs=self.folder / "runs")

    def get(self, url):
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.read()

    def test_serve(self):
        adapter = fry().new_adapter(r=2)
        adapter.save(self.folder / "critic")
        with fry().serve(adapter={"critic": self.folder / "critic"}, **self.options()) as server:
            names = [m["id"] for m in json.loads(self.get(server.url.rstrip("/") + "/v1/models"))["data"]]
            self.assertIn("critic", names)
            self.assertTrue(server.token_file.exists())
            with self.assertRaises(shoal.StateError):
                fry().run(QUESTION)
            with self.assertRaises(shoal.StateError):
                fry().serve(**self.options())
        self.assertEqual(fry().run(QUESTION).finish, "stop")
        with self.assertRaisesRegex(shoal.StateError, "stopped"):
            server.url
        server.stop()

    def test_closing_the_model_stops_the_server(self):
        model = shoal.Model(FRY, threads=1)
        server = model.serve(**self.options())
        url = server.url
        model.close()
        with self.assertRaises(OSError):
            self.get(url)

    def test_interpreter_exit(self):
        code = f"import shoal; model = shoal.Model({str(FRY)!r}, threads=1); server = model.serve(port=0); server.url"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def test_errors(self):
        with self.assertRaisesRegex(shoal.UsageError, "ports"):
            fry().serve(ports=0)


if __name__ == "__main__":
    unittest.main()
