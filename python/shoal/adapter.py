"""adapter: an immutable LoRA adapter of a model."""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Union

from ._call import call, encode, take_json
from ._handle import Handle
from ._library import ffi, lib
from .errors import UsageError


class Adapter:
    """Made by Model.load_adapter, new_adapter and combine, by Trainer.adapter, or part of a Population."""

    def __init__(self, handle: Handle, model: Handle):
        self._handle = handle
        self._model = model

    @property
    def hash(self) -> str:
        """SHA-256 of the content, 64 hex digits: equal adapters have equal hashes."""
        return ffi.string(lib.shoal_adapter_hash(self._handle.pointer)).decode()

    @property
    def lineage(self) -> dict[str, Any]:
        """How the adapter was made, {operator, parents, …}; {} if that is not known."""
        return take_json(lib.shoal_adapter_lineage(self._handle.pointer))

    def save(self, directory: str | os.PathLike) -> None:
        """Writes a PEFT directory, which must not exist or be an adapter."""
        with self._model.use() as model:
            call(lib.shoal_adapter_save, model, self._handle.pointer, encode(directory))

    def __repr__(self) -> str:
        return "<shoal.Adapter, closed>" if self._handle.closed else f"<shoal.Adapter {self.hash[:12]}>"


#: None: the base model. A mapping: the weighted sum of several adapters.
Adapters = Union[None, Adapter, Mapping[Adapter, float]]


def new_adapter(pointer: Any, model: Handle) -> Adapter:
    """An adapter that owns `pointer`."""
    return Adapter(Handle(pointer, lib.shoal_adapter_free, (model,), model.lock), model)


def adapter_pointer(adapter: Adapter | None) -> Any:
    if adapter is None:
        return ffi.NULL
    if not isinstance(adapter, Adapter):
        raise UsageError(f"an adapter is a shoal.Adapter, not {adapter!r}")
    return adapter._handle.pointer


def adapter_pointers(adapters: Iterable[Adapter | None]):
    """A `struct shoal_adapter *[]`; None becomes NULL."""
    return ffi.new("struct shoal_adapter *[]", [adapter_pointer(a) for a in adapters])


