"""Whether the llama.cpp here knows a model's architecture, asked before the seconds that loading takes.

A GGUF says which architecture it has, never who can run it; llama.cpp has no function to ask. Its library
holds the names it knows as plain strings.
"""

from __future__ import annotations

import mmap
from functools import cache
from pathlib import Path

from moestream.errors import ModelError
from moestream.model.ggml import binding_version, find_library
from moestream.model.numbers import check_numbers
from moestream.model.overrides import naming
from moestream.model.tables import check_tables
from moestream.model.types import Model


def known_architecture(arch: str) -> bool:
    """True if libllama holds ``arch`` as the end of a NUL-terminated string.

    The end, because the linker lets "llama" share the bytes of "xllama". So an ending of a known name passes
    here and is left to llama.cpp to refuse; a known name never fails. Raises AbiError when there is no
    libllama.
    """
    return bool(arch) and "\0" not in arch and _library_has(find_library("llama"), arch.encode() + b"\0")


def check_architecture(model: Model) -> None:
    """Raises ModelError when this llama.cpp does not know the model's architecture, or would end over its numbers or
    its tables of experts."""
    if not known_architecture(model.arch):
        raise ModelError(
            f"{model.paths[0]}: architecture {model.arch!r} is unknown to {binding_version()}; "
            "install a newer moestream (and its llama-cpp-python)"
        )
    with naming(model.overrides):
        check_numbers(model)
    check_tables(model)


@cache
def _library_has(library: Path, needle: bytes) -> bool:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        return image.find(needle) >= 0
