"""evolution: recipes, and evolution step by step with a fitness function in Python."""
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable

import numpy as np

from ._call import (Option, Progress, RunningCall, call, encode, finish_call, long_call, on_callback_error,
                    options_of, running_calls, take_json, texts)
from ._handle import Handle
from ._library import ffi, lib
from .adapter import Adapter, adapter_pointers, new_adapter
from .errors import StateError

#: names [n] and adapters [n] of the candidates; returns scores [n, items], each from 0 to 1
Fitness = Callable[[list, list], Any]


def evolve(recipe: str | os.PathLike, *, progress: Progress | None = None, **options: Option) -> dict[str, Any]:
    """`shoal evolve` as a call: runs a recipe (a YAML file) and keeps everything in the folder of its run.

    options: runs (folder, "runs"), id, seed, threads, exact, fast
    Returns {run, adapters, generations, table, comparisons, …}. A cancelled run is paused: see `resume`.
    """
    return take_json(long_call(lib.shoal_evolve, encode(recipe), options_of(options), progress=progress))


def resume(run: str, *, progress: Progress | None = None, **options: Option) -> dict[str, Any]:
    """Continues a paused or killed run, with the same result as without the pause."""
    return take_json(long_call(lib.shoal_evolve_resume, encode(run), options_of(options), progress=progress))


@ffi.callback("shoal_fitness_fn", error=1, onerror=on_callback_error)
def _on_fitness(_ctx, n_candidates, adapters, names, n_items, scores):
    running_calls.stack[-1].score(n_candidates, adapters, names, n_items, scores)
    return 0


class _Evaluation(RunningCall):
    """A call of shoal_population_evaluate."""

    def __init__(self, population: Population, fitness: Fitness):
        super().__init__(None)
        self.population, self.fitness = population, fitness

    def score(self, n: int, adapters: Any, names: Any, n_items: int, scores: Any) -> None:
        candidates = [self.population._adapter(adapters[i]) for i in range(n)]
        with self.population._model.lock.nested():
            result = self.fitness([ffi.string(names[i]).decode() for i in range(n)], candidates)
        values = np.asarray(result, np.float64)
        if values.shape != (n, n_items):
            raise ValueError(f"the fitness function returned an array {values.shape}, not ({n}, {n_items})")
        ffi.memmove(scores, np.ascontiguousarray(values), values.nbytes)


class Population:
    """Adapters in evolution. After `evaluate`, candidate 0 is the fittest.

    The candidates are the elites, the children, and parents that are not elites, which are evaluated again.

    Its adapters may be kept after the next generation.
    """

    def __init__(self, model: Handle, founders: Mapping[str, Adapter], **options: Option):
        self._model = model
        self._evaluating = False
        names = texts(founders)
        with model.use() as s:
            pointer = call(lib.shoal_population_new, s, adapter_pointers(founders.values()), names, len(founders),
                           options_of(options))
        self._handle = Handle(pointer, lib.shoal_population_free, (model,), model.lock)

    def _adapter(self, pointer: Any) -> Adapter:
        return new_adapter(lib.shoal_adapter_retain(pointer), self._model)

    def _check_idle(self) -> None:
        """A fitness function may use the model, but not change the population."""
        if self._evaluating:
            raise StateError("the population is being evaluated")

    def evaluate(self, fitness: Fitness, items: int) -> None:
        """Calls `fitness` once, with the names and adapters of all candidates, and sorts them, the fittest first.

        fitness: returns an array [n_candidates, items] of scores from 0 to 1, the same items for all candidates.
        It may use the model. An exception ends the call and leaves the population as it was.
        """
        with self._handle.use() as p, _Evaluation(self, fitness) as running:
            self._check_idle()
            self._evaluating = True
            try:
                finish_call(running, lib.shoal_population_evaluate, p, _on_fitness, ffi.NULL, items)
            finally:
                self._evaluating = False

    def breed(self) -> None:
        """Replaces the candidates by the next generation: elites and children."""
        with self._handle.use() as p:
            self._check_idle()
            call(lib.shoal_population_breed, p)

    def __len__(self) -> int:
        return lib.shoal_population_size(self._handle.pointer)

    @property
    def names(self) -> list[str]:
        """[n_candidates]"""
        with self._handle.use() as p:
            return [ffi.string(lib.shoal_population_name(p, i)).decode() for i in range(len(self))]

    @property
    def adapters(self) -> list[Adapter]:
        """[n_candidates]"""
        with self._handle.use() as p:
            return [self._adapter(lib.shoal_population_adapter(p, i)) for i in range(len(self))]

    @property
    def best(self) -> Adapter:
        """The fittest candidate of the last evaluation."""
        return self.adapters[0]

    @property
    def info(self) -> dict[str, Any]:
        """The generation after its evaluation.

        {generation, candidates: [{name, parents, operator, fitness, …}], diversity, operators}
        """
        with self._handle.use() as p:
            text = lib.shoal_population_info(p)
            if text == ffi.NULL:
                raise StateError("the generation is not evaluated")
            return take_json(text)

    def close(self) -> None:
        self._handle.close()

    def __enter__(self) -> Population:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
