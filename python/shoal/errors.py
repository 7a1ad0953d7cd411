"""errors: the exceptions of the package, one class for each error code of shoal.h."""
from __future__ import annotations

from ._library import ffi, lib


class Error(Exception):
    """A call failed. `code` is the number of shoal.h (enum shoal_code), `name` its name, `text` the message."""

    code = 0

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text

    @property
    def name(self) -> str:
        return ffi.string(lib.shoal_error_name(self.code)).decode()

    def __str__(self) -> str:
        return self.text


class UsageError(Error, ValueError):
    """An argument or an option is wrong."""

    code = lib.SHOAL_ERR_USAGE


class SystemIOError(Error, OSError):
    """The system refused a file operation."""

    code = lib.SHOAL_ERR_IO


class FormatError(Error, ValueError):
    """A file or a text does not follow its format."""

    code = lib.SHOAL_ERR_FORMAT


class MismatchError(Error, ValueError):
    """Valid, but made for something else, such as an adapter of another model."""

    code = lib.SHOAL_ERR_MISMATCH


class CapacityError(Error, MemoryError):
    """Does not fit the memory or a fixed limit."""

    code = lib.SHOAL_ERR_MEMORY


class MissingError(Error, FileNotFoundError):
    """A file or a name does not exist."""

    code = lib.SHOAL_ERR_MISSING


class StateError(Error, RuntimeError):
    """Not possible now, such as a call with a closed object."""

    code = lib.SHOAL_ERR_STATE


class Cancelled(StateError):
    """The progress function has cancelled the call."""


class NumericError(Error, ArithmeticError):
    """NaN or infinity where a number is needed."""

    code = lib.SHOAL_ERR_NUMERIC


CLASSES = {c.code: c for c in (UsageError, SystemIOError, FormatError, MismatchError, CapacityError, MissingError,
                               StateError, NumericError)}


def error_from(err) -> Error:
    """The exception for a filled `struct shoal_error *`."""
    return CLASSES.get(err.code, Error)(ffi.string(err.text).decode(errors="replace"))
