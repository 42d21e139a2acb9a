"""What the table of architectures is held against: all that the loaded llama.cpp names, and which of them make experts.

An architecture without an entry is asked for its tensors with keys that would give it experts, if it had any.
"""

from __future__ import annotations

import ctypes
from functools import partial

import gguf

from moestream.errors import AbiError
from moestream.make.ask import tensors_or_reason
from moestream.make.asked import TRIED
from moestream.make.random_model import add_keys
from moestream.make.shapes import ARCHITECTURES, Scalar, Shape, llama_name, written_keys
from moestream.make.tokenizer import add_tokenizer

NO_EXPERTS = "no experts"
#: ``llm_arch_name(llm_arch)``: no public function lists what a loader knows.
_NAME_OF = "_Z13llm_arch_name8llm_arch"
#: What it answers to a number of none.
_NONE = "(unknown)"


def named_by_llama() -> list[str]:
    """Every architecture llama.cpp has a name for, in its order. Raises AbiError where it does not say."""
    from moestream.binding import low

    try:
        name_of = low._lib[_NAME_OF]
    except AttributeError:
        raise AbiError(f"this llama.cpp does not list its architectures: it has no {_NAME_OF}") from None
    name_of.restype = ctypes.c_char_p
    names: list[str] = []
    while (name := name_of(len(names)).decode()) != _NONE:
        names.append(name)
    return names


def without_entry() -> list[str]:
    """Those of them that the table has no entry for."""
    entries = {llama_name(arch) for arch in ARCHITECTURES}
    return [name for name in named_by_llama() if name not in entries]


def look(arch: str) -> str:
    """``NO_EXPERTS``, the expert tensors that its loader makes, or why llama.cpp makes no model of it."""
    shape, reason = Shape(), ""
    for keys in TRIED:
        found = tensors_or_reason(
            arch, partial(_add, keys=written_keys(arch, keys, shape), vocab=shape.vocab)
        )
        if not isinstance(found, str):
            names = {name.split(".", 2)[-1] for name, _ in found if "exps" in name}
            return " ".join(sorted(names)) or NO_EXPERTS
        reason = found
    return reason


def _add(writer: gguf.GGUFWriter, keys: dict[str, Scalar | list[Scalar]], vocab: int) -> None:
    add_keys(writer, keys)
    add_tokenizer(writer, vocab)
