"""_handle: C objects with an owner, and the lock of a model.

A C object borrows the objects that it was made from, and Python may finalize objects in any order (reference cycles,
interpreter exit). A Handle is therefore freed when it is closed or no longer referenced, and nothing uses it any more:
neither a handle made from it nor a running call.

Finalizers run at any point of any thread, also inside of this file. So they change state only by single operations of
sets and lists, which are atomic, and never wait for a lock.
"""
from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import Any, Callable, Iterator

from ._library import ffi
from .errors import StateError


class ModelLock:
    """One call at a time uses a model and the objects made from it. Other threads wait.

    A call inside of a call of the same thread (from a progress function) is refused, except inside of `nested`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._deferred: deque[Callable[[], object]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._depth > 0:
            self._lock.release()
            raise StateError("the model is in use by the call that runs this function")
        self._depth = 1

    def __exit__(self, *_: object) -> None:
        self._depth = 0
        self._lock.release()
        self._run_deferred()

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Allows calls of all threads while a callback of the library runs in this thread, which has the lock."""
        self._depth = 0
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._depth = 1

    def defer(self, action: Callable[[], object]) -> None:
        """Runs `action` when no call uses the model: now, or at the end of the call."""
        self._deferred.append(action)
        self._run_deferred()

    def _run_deferred(self) -> None:
        while self._deferred and self._lock.acquire(blocking=False):
            try:
                if self._depth > 0:
                    return
                self._deferred.popleft()()
            except IndexError:  # a finalizer took it
                return
            finally:
                self._lock.release()


class Handle:
    """Owns the C object `pointer`. `free` gets the pointer once, while no call has the lock."""

    def __init__(self, pointer: Any, free: Callable[[Any], object], parents: tuple[Handle, ...] = (),
                 lock: ModelLock | None = None, closed_text: str = "the object is closed"):
        self._pointer = pointer
        self._to_free = [free]
        self._parents = parents
        self._users: set[int] = set()  # handles made from this one and running calls
        self._closed = False
        self.lock = lock or ModelLock()
        self.closed_text = closed_text
        for parent in parents:
            parent._users.add(id(self))

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def pointer(self) -> Any:
        if self._closed:
            raise StateError(self.closed_text)
        return self._pointer

    @property
    def borrowed(self) -> Any:
        """The pointer for a handle that was made from this one, also when this one is closed."""
        return self._pointer

    @contextmanager
    def use(self) -> Iterator[Any]:
        """The pointer, with the lock, for the duration of a call."""
        with self.lock:
            call = object()
            self._users.add(id(call))
            try:
                yield self.pointer
            finally:
                self._users.discard(id(call))
                self._free_if_unused()

    def close(self) -> None:
        self._closed = True
        self._free_if_unused()

    __del__ = close

    def _free_if_unused(self) -> None:
        if self._closed and not self._users and self._to_free:
            self.lock.defer(self._free)

    def _free(self) -> None:
        try:
            free = self._to_free.pop()
        except IndexError:  # two users ended at the same time
            return
        free(self._pointer)
        self._pointer = ffi.NULL
        for parent in self._parents:
            parent._users.discard(id(self))
            parent._free_if_unused()
