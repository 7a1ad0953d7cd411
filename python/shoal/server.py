"""server: an HTTP server for a model and its adapters."""
from __future__ import annotations

import weakref
from pathlib import Path

from ._call import Option, call, options_of
from ._handle import Handle
from ._library import ffi, lib


class Server:
    """Runs on separate threads until stop(), the end of a `with` block or the end of the program.

    While it runs, other calls with the model raise StateError.
    """

    def __init__(self, model: Handle, **options: Option):
        with model.use() as s:
            pointer = call(lib.shoal_serve, s, options_of(options))
        self._handle = Handle(pointer, lib.shoal_server_stop, (model,), model.lock, "the server has stopped")
        self.stop_at_exit = weakref.finalize(self, self._handle.close)

    @property
    def url(self) -> str:
        """Such as "http://127.0.0.1:8000"."""
        return ffi.string(lib.shoal_server_url(self._handle.pointer)).decode()

    @property
    def token_file(self) -> Path:
        """The file of the start-up token, which changes of the server need."""
        return Path(ffi.string(lib.shoal_server_token_file(self._handle.pointer)).decode())

    def stop(self) -> None:
        """Refuses new requests, and waits for running ones, at most for the option drain_seconds."""
        self._handle.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
