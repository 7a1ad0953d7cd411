"""model: a language model with its engine, and all calls that use it."""
from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ._call import (Option, Progress, call, encode, floats, long_call, options_of, pointers, take_json, take_text,
                    texts)
from ._handle import Handle
from ._library import ffi, lib
from .adapter import Adapter, Adapters, adapter_pointer, adapter_pointers, new_adapter
from .errors import StateError
from .evolution import Population
from .generate import Prompt, Reply, Request, Stream
from .server import Server
from .training import Trainer


class Model:
    """Opens a GGUF file or a Hugging Face directory.

    options: threads (0: all processors), exact, fast, kv_cache_dtype, lora_dtype, max_num_seqs, max_model_len
    (0: the model's context, as far as memory allows)

    A model may be used by several threads: one call runs at a time, the others wait. Results do not depend on the
    number of threads or on other requests.
    """

    def __init__(self, path: str | os.PathLike, **options: Option):
        pointer = call(lib.shoal_open, encode(path), options_of(options))
        self._handle = Handle(pointer, lib.shoal_close, closed_text="the model is closed")
        self._server: Any = lambda: None  # a weak reference

    def close(self) -> None:
        """Stops its server. The memory is freed when the last adapter, trainer … of the model is freed."""
        server = self._server()
        if server:
            server.stop()
        self._handle.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def info(self) -> dict[str, Any]:
        """{name, hash, architecture, parameters, layers, width, vocabulary, max_seq_len, class, level, threads}"""
        with self._handle.use() as s:
            return take_json(call(lib.shoal_info, s))

    def __repr__(self) -> str:
        return "<shoal.Model, closed>" if self._handle.closed else f"<shoal.Model {self.info['name']}>"

    # tokens and embeddings

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a text. Special tokens are not recognised."""
        data = encode(text)
        with self._handle.use() as s:
            n = lib.shoal_tokenize(s, data, ffi.NULL, 0)
            out = ffi.new("int[]", n)
            lib.shoal_tokenize(s, data, out, n)
        return list(out)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens; a character that is cut at an end becomes U+FFFD."""
        ids = ffi.new("int[]", [int(t) for t in tokens])
        with self._handle.use() as s:
            return take_text(call(lib.shoal_detokenize, s, ids, len(ids)))

    def embed(self, texts_: Iterable[str] | str, adapter: Adapter | None = None) -> np.ndarray:
        """float32 [n_texts, width]: the mean over a text's tokens of the last hidden states."""
        array = texts([texts_] if isinstance(texts_, str) else texts_)
        with self._handle.use() as s:
            out = np.zeros((len(array), lib.shoal_embedding_size(s)), np.float32)
            if len(array):
                call(lib.shoal_embed, s, array, len(array), adapter_pointer(adapter), ffi.from_buffer("float[]", out))
        return out

    # generation

    def run(self, prompt: Prompt | None = None, *, text: str | None = None, adapter: Adapters = None,
            choices: Sequence[str] | None = None, progress: Progress | None = None, **options: Option) -> Reply:
        """Replies to a prompt: a user's message, or a conversation as a list of {"role", "content"}.

        text: a text to continue, instead of a prompt
        adapter: an adapter, or {adapter: weight, …} for a weighted sum; None: the base model
        choices: the reply is one of these texts (2 to 64), by exact probabilities, without sampling
        options: max_tokens (256), temperature (0: greedy), top_k, top_p, min_p, repeat_penalty, seed, stop (texts
            that end the reply), json_schema (a dict or JSON text), grammar (GBNF) or regex
        """
        request: dict[str, Any] = {"prompt": prompt, "text": text, "adapter": adapter, "choices": choices, **options}
        return self.run_batch([request], progress=progress)[0]

    def run_batch(self, prompts: Iterable[Prompt | Mapping[str, Any]], *, progress: Progress | None = None,
                  **common: Any) -> list[Reply]:
        """Runs several requests as one batch: replies [n].

        prompts: an item is a prompt, or a mapping of the arguments of `run`: {"prompt": …, "adapter": …, …}
        common: arguments of `run` for all of them
        """
        requests = [Request(self._handle, **{**common, **(p if isinstance(p, Mapping) else {"prompt": p})})
                    for p in prompts]
        try:
            with self._handle.use() as s:
                array = pointers("shoal_request", [r.handle.pointer for r in requests])
                long_call(lib.shoal_run, s, array, len(requests), progress=progress)
                return [r.reply() for r in requests]
        finally:
            for r in requests:
                r.handle.close()

    def stream(self, prompt: Prompt | None = None, *, text: str | None = None, adapter: Adapters = None,
               **options: Option) -> Stream:
        """The reply as it is generated: an iterator of texts. Arguments: those of `run`."""
        arguments: dict[str, Any] = options
        return Stream(self._handle, Request(self._handle, prompt, text=text, adapter=adapter, **arguments))

    def choose(self, question: Prompt, choices: Sequence[str], adapter: Adapters = None) -> Reply:
        """The most probable of 2 to 64 replies, with the probability of each."""
        return self.run(question, choices=choices, adapter=adapter)

    # adapters

    def load_adapter(self, path: str | os.PathLike) -> Adapter:
        """Loads a PEFT directory or a GGUF LoRA file made for this model."""
        with self._handle.use() as s:
            return new_adapter(call(lib.shoal_adapter_load, s, encode(path)), self._handle)

    def new_adapter(self, **options: Option) -> Adapter:
        """An untrained adapter, which changes nothing. options: r, lora_alpha, target, layers … and seed"""
        with self._handle.use() as s:
            return new_adapter(call(lib.shoal_adapter_new, s, options_of(options)), self._handle)

    def combine(self, operator: str, adapters: Sequence[Adapter], weights: Sequence[float] | None = None,
                **options: Option) -> Adapter:
        """Merges, crosses or mutates adapters by an operator of `shoal adapter operators`.

        weights: [n]; None: 1/n each
        options: rank, step, seed
        """
        array = adapter_pointers(adapters)
        with self._handle.use() as s:
            pointer = call(lib.shoal_adapter_combine, s, encode(operator), array, floats(weights, len(array)),
                           len(array), options_of(options))
            return new_adapter(pointer, self._handle)

    # training, evaluation, evolution

    def train(self, data: Option, out: str | os.PathLike, *, progress: Progress | None = None,
              **options: Option) -> list[dict[str, Any]]:
        """`shoal train` as a call: trains adapters on files and publishes those that are not worse than before.

        data: a file of conversations, or {name: file, …} for one adapter each
        out: the folder of the adapter, or of the adapters by name
        options: those of the command, such as r=8, lr=4e-3, max_steps=60; reports go to the folder runs ("runs")
        Returns {adapter, dir, hash, first_loss, last_loss, published, effect, …} for each adapter; effect has the
        losses and some replies before and after. An adapter that is not better than the version before has
        published: False, and is saved in another folder.
        """
        return self._json(lib.shoal_train, options_of({"data": data, "out": out, **options}), progress=progress)

    def trainer(self, adapters: Sequence[Adapter], **options: Option) -> Trainer:
        """Training of copies of adapters, step by step. options: optim, weight_decay, lora_dropout, seed …"""
        return Trainer(self._handle, adapters, **options)

    def evaluate(self, adapters: Mapping[str, Adapter] | None = None, *, progress: Progress | None = None,
                 **options: Option) -> list[dict[str, Any]]:
        """`shoal eval` as a call, for the base model and the named adapters.

        options: tasks, data, n, shots, split, seed, chain_of_thought
        Returns {task, adapter, n, acc, lo, hi, difference: {value, lo, hi, p, p_holm, …}, …} for each task and
        adapter; acc, lo and hi are the accuracy and its 95 % interval. The base model comes first.
        """
        return self._with_adapters(lib.shoal_evaluate, adapters or {}, options, progress)

    def debate(self, agents: Mapping[str, Adapter | None], *, progress: Progress | None = None,
               **options: Option) -> Any:
        """`shoal debate` as a call. agents: an adapter for each name; None: the base model.

        options: topic with choices, or tasks with n, data and shots; personas, protocol, rounds, vote, grader …
        Returns the transcript of the topic, or a report for each task.
        """
        return self._with_adapters(lib.shoal_debate, agents, options, progress)

    def population(self, founders: Mapping[str, Adapter], **options: Option) -> Population:
        """Evolution step by step. options: seed, and those of a recipe's section "evolve": population, elites …"""
        return Population(self._handle, founders, **options)

    def simulate(self, *, progress: Progress | None = None, **options: Option) -> list[dict[str, Any]]:
        """`shoal world MODEL` as a call: agents of the model live, learn and breed for some generations.

        options: those of the command, such as generations, agents, steps, num_adapters, runs, out, seed
        Returns {policy, held_out} for each baseline and {generation, decisions, held_out, …} for each generation.
        """
        return self._json(lib.shoal_simulate, options_of(options), progress=progress)

    def serve(self, **options: Option) -> Server:
        """Serves the model over HTTP. options: those of `shoal serve`, such as port (0: any free port), adapter"""
        if self._server():
            raise StateError("the model has a server")
        server = Server(self._handle, **options)
        self._server = weakref.ref(server)
        return server

    def _with_adapters(self, function: Any, adapters: Mapping[str, Adapter | None], options: Mapping[str, Option],
                       progress: Progress | None) -> Any:
        names, array = texts(adapters), adapter_pointers(adapters.values())
        return self._json(function, array, names, len(array), options_of(options), progress=progress)

    def _json(self, function: Any, *arguments: Any, progress: Progress | None) -> Any:
        with self._handle.use() as s:
            return take_json(long_call(function, s, *arguments, progress=progress))
