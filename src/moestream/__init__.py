"""moestream: run a mixture-of-experts GGUF larger than memory, bit-identical to llama.cpp.

    import moestream
    with moestream.Llama("model.gguf", ram="4GiB") as llm:
        print(llm("Once upon a time", max_tokens=64)["choices"][0]["text"])

Importing the package is cheap; llama.cpp is loaded by the first use of ``Llama``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moestream.errors import (
    AbiError,
    BudgetError,
    Cancelled,
    EngagementError,
    MechanismError,
    ModelError,
    MoestreamError,
    ReadError,
    RefusedError,
    UsageError,
)

if TYPE_CHECKING:
    from moestream.engine import Llama
    from moestream.mechanism import Mechanism
    from moestream.version import __version__

__all__ = [
    "AbiError",
    "BudgetError",
    "Cancelled",
    "EngagementError",
    "Llama",
    "Mechanism",
    "MechanismError",
    "ModelError",
    "MoestreamError",
    "ReadError",
    "RefusedError",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "Llama":
        from moestream.engine import Llama

        return Llama
    if name == "Mechanism":
        from moestream.mechanism import Mechanism

        return Mechanism
    if name == "__version__":
        from moestream.version import __version__

        return __version__
    raise AttributeError(f"module 'moestream' has no attribute {name!r}")
