"""_call: Python values as C arguments, and calls that check the result for an error.

Each array of texts stays allocated as long as the array object: `_kept` has the texts. A caller keeps the array in a
variable during the call.
"""
from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, Union

from ._library import ffi, lib
from .errors import Cancelled, UsageError, error_from

#: task, steps done, steps in total (0: not known), seconds since the task began, detail such as the loss
Progress = Callable[[str, int, int, float, str], object]
#: {"role": "system", "user" or "assistant", "content": text}
Message = Mapping[str, str]
Option = Union[None, bool, int, float, str, os.PathLike, Sequence, Mapping]

log = logging.getLogger("shoal")
_kept: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_COMMA_LISTS = ("tasks", "retain")  # options that are lists in one text
running_calls = threading.local()  # .stack: the long calls of a thread, the innermost last


def encode(text: str | os.PathLike) -> bytes:
    """UTF-8 without NUL. Other bytes of a path are not changed."""
    data = os.fspath(text).encode("utf-8", "surrogateescape")
    if b"\0" in data:
        raise UsageError("a text has a NUL character")
    return data


def texts(values: Iterable[str | os.PathLike], end: bool = False):
    """A `char *[]`; with `end`, NULL follows the texts."""
    items = [ffi.new("char[]", encode(v)) for v in values]
    array = ffi.new("char *[]", items + [ffi.NULL] * end)
    _kept[array] = items
    return array


def _option_texts(value: Option) -> list[str]:
    """The items of an option: a list has one for each element, a mapping one "key=value" for each key."""
    if value is None:
        return []
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, Mapping):
        return [f"{k}={os.fspath(v)}" for k, v in value.items()]
    if isinstance(value, (str, os.PathLike)):
        return [os.fspath(value)]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy
        return _option_texts(value.item())
    if isinstance(value, Iterable):
        return [text for item in value for text in _option_texts(item)]
    return [repr(value) if isinstance(value, float) else str(value)]


def options_of(options: Mapping[str, Option]):
    """The options of a call as "name=value" texts.

    Underscores become dashes. A "_" at the end is left out: `lambda_` is the option "lambda". A JSON schema may be a
    mapping.
    """
    out = []
    for key, value in options.items():
        name = key.rstrip("_").replace("_", "-")
        if name == "json-schema" and isinstance(value, Mapping):
            value = json.dumps(value)
        elif name in _COMMA_LISTS and not isinstance(value, (str, os.PathLike)):
            value = ",".join(_option_texts(value)) or None
        out += [f"{name}={text}" for text in _option_texts(value)]
    return texts(out, end=True)


def messages_of(prompt: str | Sequence[Message]):
    """A `struct shoal_message[]` and its length. A str is the message of a user."""
    messages: list[Message] = list([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    for m in messages:
        if not isinstance(m, Mapping) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str):
            raise UsageError(f"a message is {{'role': text, 'content': text}}, not {m!r}")
    items = texts([m[key] for m in messages for key in ("role", "content")])
    array = ffi.new("struct shoal_message[]", len(messages))
    for i in range(len(messages)):
        array[i].role, array[i].content = items[2 * i], items[2 * i + 1]
    _kept[array] = items
    return array, len(messages)


def pointers(kind: str, values: Sequence[Any]):
    return ffi.new(f"struct {kind} *[]", list(values))


def floats(values: Sequence[float] | None, n: int):
    """A `float[n]`, or NULL for None."""
    if values is None:
        return ffi.NULL
    values = [float(v) for v in values]
    if len(values) != n:
        raise UsageError(f"{len(values)} weights for {n} adapters")
    return ffi.new("float[]", values)


def call(function: Callable, *arguments: Any):
    """Calls `function` with an error struct as the last argument. Raises the error, or returns the result."""
    err = ffi.new("struct shoal_error *")
    result = function(*arguments, err)
    if _failed(result):
        raise error_from(err)
    return result


def _failed(result: Any) -> bool:
    return result < 0 if isinstance(result, int) else result == ffi.NULL


def take_text(text: Any) -> str:
    """A `char *` of the library as str; frees it."""
    try:
        return ffi.string(text).decode("utf-8", errors="replace")
    finally:
        lib.shoal_free(text)


def take_json(text: Any) -> Any:
    return json.loads(take_text(text))


class RunningCall:
    """A call with callbacks. An exception of a callback cancels the call."""

    def __init__(self, progress: Progress | None):
        self.progress = progress
        self.exception: BaseException | None = None
        self.cancelled = False

    def __enter__(self) -> RunningCall:
        if not hasattr(running_calls, "stack"):
            running_calls.stack = []
        running_calls.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        running_calls.stack.remove(self)

    def raise_cause(self) -> None:
        if self.exception:
            raise self.exception
        if self.cancelled:
            raise Cancelled("cancelled by the progress function")


def on_callback_error(_kind: object, exception: BaseException, _traceback: object) -> None:
    """Keeps the exception of a callback for the end of its call. Other exceptions are a consequence of the first."""
    running = running_calls.stack[-1]
    if running.exception is None:
        running.exception = exception


@ffi.callback("int(void *, const struct shoal_progress *)", error=1, onerror=on_callback_error)
def _on_progress(_ctx, p):
    running = running_calls.stack[-1]
    if running.exception or running.cancelled:
        return 1
    if running.progress:
        running.cancelled = bool(running.progress(ffi.string(p.task).decode(), p.done, p.total, p.seconds,
                                                  ffi.string(p.detail).decode(errors="replace")))
    return running.cancelled


@ffi.callback("void(void *, const char *)", onerror=on_callback_error)
def _on_message(_ctx, text):
    log.info("%s", ffi.string(text).decode(errors="replace"))


def long_call(function: Callable, *arguments: Any, progress: Progress | None = None):
    """`call` for functions with callbacks before the error. Ctrl-C cancels too, at the next step."""
    callbacks = ffi.new("struct shoal_callbacks *", {"progress": _on_progress, "message": _on_message})
    with RunningCall(progress) as running:
        return finish_call(running, function, *arguments, callbacks)


def finish_call(running: RunningCall, function: Callable, *arguments: Any):
    err = ffi.new("struct shoal_error *")
    result = function(*arguments, err)
    if _failed(result):
        running.raise_cause()
        raise error_from(err)
    if running.exception:
        if not isinstance(result, int):
            lib.shoal_free(result)
        raise running.exception
    return result
