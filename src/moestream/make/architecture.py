"""What an architecture of llama.cpp asks of a file: the type of an entry of the tables.

An architecture is one entry, of ``asked.py`` or of ``written.py``. A key is written without its ``<arch>.`` and takes
the name of an attribute of ``Shape``, a plain value, or a list of these; ``PerLayer`` becomes an array with one
element for each layer. The tensors of an entry of ``asked.py`` are llama.cpp's own answer (``ask.py``), for which the
model must fit in memory as floats; those of an entry of ``written.py`` are written there and scale to any shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class PerLayer(tuple[str | int | float | bool, ...]):
    """One value for each layer; a pattern that is shorter than the model begins again."""


KeyValue = str | int | float | bool | PerLayer | list[str | int | float]


@dataclass(frozen=True)
class Architecture:
    """What one architecture of llama.cpp asks of a file beyond what all of them ask."""

    #: Tensors of a layer beside its experts, and of a layer with experts; empty when llama.cpp is asked.
    attention: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    keys: dict[str, KeyValue] = field(default_factory=dict)
    #: Tensors of a layer before ``leading_dense``; empty when every layer has experts.
    dense: tuple[str, ...] = ()
    #: Optional tensors that are left out: a pattern that a part of their names matches. Only when llama.cpp is asked.
    without: str = ""
    #: True to have gate and up apart where the loader takes them as one tensor too. Only when llama.cpp is asked.
    apart: bool = False
    #: True when the loader wants heads * head_dim to be embd.
    square_attention: bool = False
    #: True when the loader wants as many key heads as query heads.
    equal_heads: bool = False
    #: What llama.cpp calls it, where the table has a second layout of one architecture.
    known_as: str = ""
    #: Where this architecture's ``tiny`` differs from the others'.
    tiny: dict[str, int] = field(default_factory=dict)

    @property
    def asked(self) -> bool:
        """Whether llama.cpp is asked for the tensors."""
        return not self.attention
