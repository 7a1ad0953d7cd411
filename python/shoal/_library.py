"""_library: loads libshoal.so and declares its functions to cffi.

The declarations are those of shoal.h, so the header is their only source. Library and header are in the package after
`pip install`, or in the source tree. SHOAL_LIBRARY is the path of another library of the same version.
"""
from __future__ import annotations

import ctypes.util
import os
import re
from pathlib import Path
from typing import Any

import cffi

HERE = Path(__file__).resolve().parent
TREE = HERE.parent.parent

VERSION_FILE = HERE / "VERSION"  # written by setup.py


def declarations(header: str) -> str:
    """The declarations of a C header: without comments, lines of the preprocessor and `extern "C"`."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    text = re.sub(r"^#ifdef __cplusplus.*?^#endif", "", text, flags=re.S | re.M)
    text = re.sub(r"^#.*$", "", text, flags=re.M)
    return text.replace("SHOAL_API", "")


def first_file(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def library_path() -> str:
    """$SHOAL_LIBRARY, the library of the package or of the source tree, or the system's libshoal."""
    chosen = os.environ.get("SHOAL_LIBRARY")
    if chosen:
        return chosen
    own = first_file(HERE / "libshoal.so", TREE / "build" / "libshoal.so")
    found = str(own) if own else ctypes.util.find_library("shoal")
    if not found:
        raise ImportError("libshoal.so is neither in the package nor installed; set SHOAL_LIBRARY to its path")
    return found


def load() -> tuple[cffi.FFI, Any]:
    header = first_file(HERE / "shoal.h", TREE / "include" / "shoal.h")
    if not header:
        raise ImportError("shoal.h is not in the package")
    ffi = cffi.FFI()
    ffi.cdef(declarations(header.read_text(encoding="utf-8")))
    path = library_path()
    try:
        lib = ffi.dlopen(path)
    except OSError as e:
        raise ImportError(f"cannot load '{path}': {e}") from e
    version = ffi.string(lib.shoal_version()).decode()
    if VERSION_FILE.is_file() and VERSION_FILE.read_text().strip() != version:
        raise ImportError(f"'{path}' has version {version}, the package {VERSION_FILE.read_text().strip()}")
    return ffi, lib


ffi, lib = load()
