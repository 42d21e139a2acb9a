"""The types a tensor can have, by ggml's name and number: those of the gguf package, and what ggml has had since."""

from __future__ import annotations

from typing import NamedTuple

import gguf


class Kind(NamedTuple):
    """A type: its rows are whole blocks of ``values`` numbers in ``nbytes`` bytes."""

    name: str
    number: int
    values: int
    nbytes: int


_KINDS = (
    *(Kind(known.name, int(known), *gguf.GGML_QUANT_SIZES[known]) for known in gguf.GGML_QUANT_SIZES),
    Kind("Q2_0", 42, 64, 18),
)
_BY_NAME = {kind.name: kind for kind in _KINDS}
_BY_NUMBER = {kind.number: kind for kind in _KINDS}


def named(name: str) -> Kind:
    """The type of ggml's name in capitals; KeyError where there is none."""
    return _BY_NAME[name]


def numbered(number: int) -> Kind:
    """The type of ggml's number; KeyError where there is none."""
    return _BY_NUMBER[number]
