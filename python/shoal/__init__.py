"""shoal: many LoRA agents on one small language model.

    import shoal
    with shoal.Model("models/fry") as model:
        print(model.run("pick the smallest of 41, 3, 907").text)

The package calls libshoal. Options are those of the program's flags (docs/COMMANDS.md) as keyword arguments, with
underscores: `--max-steps 60` is max_steps=60. A list gives an option several times. Long calls take `progress`, a
function (task, done, total, seconds, detail) that may return True to cancel the call, which then raises Cancelled.
Messages of the library go to the logger "shoal".
"""
from ._library import ffi as _ffi, lib as _lib
from .adapter import Adapter
from .errors import (Cancelled, CapacityError, Error, FormatError, MismatchError, MissingError, NumericError,
                     StateError, SystemIOError, UsageError)
from .evolution import Population, evolve, resume
from .generate import Reply, Stream, Usage
from .model import Model
from .server import Server
from .training import Trainer

__version__ = _ffi.string(_lib.shoal_version()).decode()
__all__ = ["Adapter", "Cancelled", "CapacityError", "Error", "FormatError", "MismatchError", "MissingError", "Model",
           "NumericError", "Population", "Reply", "Server", "StateError", "Stream", "SystemIOError", "Trainer",
           "UsageError", "Usage", "evolve", "resume"]
