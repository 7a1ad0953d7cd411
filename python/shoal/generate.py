"""generate: requests to a model and their replies."""
from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

import numpy as np

from ._call import Message, Option, call, encode, floats, messages_of, options_of, texts
from ._handle import Handle
from ._library import ffi, lib
from .adapter import Adapters, adapter_pointers
from .errors import UsageError

#: A user's message, or a conversation.
Prompt = Union[str, Sequence[Message]]


class Usage(NamedTuple):
    """Numbers of tokens. cached: prompt tokens whose keys and values were in the cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Reply:
    """The reply to a request.

    text: the reply, or the most probable choice
    finish: "stop", "length" (max_tokens), "choice", "loop" (endless repetition), "cancelled"; "": not finished
    usage: numbers of tokens
    choice: the index of the most probable choice; None without choices
    probabilities: float32 [n_choices], which add up to 1; None without choices
    """

    text: str
    finish: str
    usage: Usage
    choice: int | None = None
    probabilities: np.ndarray | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.text


def free_request(model: Handle, pointer: Any) -> None:
    lib.shoal_cancel(model.borrowed, pointer)
    lib.shoal_request_free(pointer)


class Request:
    """A request of the library and the objects that it borrows."""

    def __init__(self, model: Handle, prompt: Prompt | None = None, *, text: str | None = None,
                 adapter: Adapters = None, choices: Sequence[str] | None = None, **options: Option):
        if (prompt is None) == (text is None):
            raise UsageError("give either a prompt or a text to continue")
        self._choices = list(choices or ())
        option_texts = options_of(options)
        with model.use() as s:
            if prompt is not None:
                messages, n = messages_of(prompt)
                pointer = call(lib.shoal_request_new, s, messages, n, option_texts)
            else:
                pointer = call(lib.shoal_request_new_text, s, encode(text or ""), option_texts)
        self.handle = Handle(pointer, lambda r: free_request(model, r), (model,), model.lock)
        self._set_adapters(adapter)
        if choices is not None:
            choice_texts = texts(self._choices)
            call(lib.shoal_request_set_choices, pointer, choice_texts, len(self._choices))

    def _set_adapters(self, adapter: Adapters) -> None:
        if adapter is None:
            return
        mix = adapter if isinstance(adapter, Mapping) else {adapter: 1.0}
        weights = floats(list(mix.values()), len(mix))
        call(lib.shoal_request_set_adapters, self.handle.pointer, adapter_pointers(mix), weights, len(mix))

    def text(self) -> bytes:
        """The reply so far."""
        return ffi.string(lib.shoal_request_text(self.handle.pointer))

    def finish(self) -> str:
        return ffi.string(lib.shoal_request_finish(self.handle.pointer)).decode()

    def reply(self) -> Reply:
        pointer = self.handle.pointer
        probabilities = np.zeros(len(self._choices), np.float32)
        choice = lib.shoal_request_choice(pointer, ffi.from_buffer("float[]", probabilities))
        u = lib.shoal_request_usage(pointer)
        return Reply(self._choices[choice] if choice >= 0 else self.text().decode("utf-8", errors="replace"),
                     self.finish(), Usage(u.prompt_tokens, u.cached_tokens, u.completion_tokens),
                     *((choice, probabilities) if choice >= 0 else ()))


class Stream:
    """The pieces of a reply while it grows: an iterator of str. Other calls may run between two pieces.

    close() ends the request with the text so far, as does the end of a `with` block.
    """

    def __init__(self, model: Handle, request: Request):
        self._model = model
        self._request: Request | None = request
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_read = 0  # bytes of the reply
        with model.use() as s:
            call(lib.shoal_submit, s, request.handle.pointer)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        while self._request:
            with self._model.use() as s:
                finish = self._request.finish()
                if not finish:
                    call(lib.shoal_step, s)
                    finish = self._request.finish()
                text = self._request.text()
                if finish:
                    self._end(self._request)
            piece = self._decoder.decode(text[self._n_read:], final=bool(finish))
            self._n_read = len(text)
            if piece:
                return piece
        raise StopIteration

    @property
    def reply(self) -> Reply:
        """The reply so far; complete after the last piece."""
        if not self._request:
            return self._reply
        with self._model.use():
            return self._request.reply()

    def _end(self, request: Request) -> None:
        self._reply = request.reply()
        request.handle.close()
        self._request = None

    def close(self) -> None:
        if not self._request:
            return
        with self._model.use() as s:
            lib.shoal_cancel(s, self._request.handle.pointer)
            self._end(self._request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
