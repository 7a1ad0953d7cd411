"""training: adapters in training, for a loop of the caller."""
from __future__ import annotations

import os
from collections.abc import Sequence

from ._call import Message, Option, call, encode, messages_of, options_of
from ._handle import Handle
from ._library import ffi, lib
from .adapter import Adapter, adapter_pointers, new_adapter


class Trainer:
    """Copies of adapters in training, each with different samples. `adapter` is an index into them."""

    def __init__(self, model: Handle, adapters: Sequence[Adapter], **options: Option):
        self._model = model
        with model.use() as s:
            pointer = call(lib.shoal_trainer_new, s, adapter_pointers(adapters), len(adapters), options_of(options))
        self._handle = Handle(pointer, lib.shoal_trainer_free, (model,), model.lock)

    def add(self, messages: Sequence[Message], adapter: int = 0, weight: float = 1.0) -> None:
        """Adds the gradient of a conversation, whose assistant messages are the targets.

        weight: a factor of the loss, 1 for supervised learning or an advantage for policy gradients
        """
        conversation, n = messages_of(messages)
        with self._handle.use() as t:
            call(lib.shoal_trainer_add, t, adapter, conversation, n, weight)

    def update(self, learning_rate: float) -> float:
        """Applies the optimizer to the sum of the gradients. Returns the mean loss per target token, in nats."""
        loss = ffi.new("double *")
        with self._handle.use() as t:
            call(lib.shoal_trainer_update, t, learning_rate, loss)
        return loss[0]

    def loss(self, messages: Sequence[Message], adapter: int = 0) -> float:
        """The mean loss per target token of a conversation, in nats, without training."""
        conversation, n = messages_of(messages)
        loss = ffi.new("double *")
        with self._handle.use() as t:
            call(lib.shoal_trainer_loss, t, adapter, conversation, n, loss)
        return loss[0]

    def adapter(self, index: int = 0) -> Adapter:
        """A copy of an adapter in its present state."""
        with self._handle.use() as t:
            return new_adapter(call(lib.shoal_trainer_adapter, t, index), self._model)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the complete state, for exact continuation."""
        with self._handle.use() as t:
            call(lib.shoal_trainer_save, t, encode(path))

    def load(self, path: str | os.PathLike) -> None:
        """Continues a saved state, which needs the same options, adapters and model."""
        with self._handle.use() as t:
            call(lib.shoal_trainer_load, t, encode(path))

    def close(self) -> None:
        self._handle.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
