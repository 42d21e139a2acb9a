"""What the numbers and names of an experiment's file may be, as far as each alone can tell."""

from __future__ import annotations

import math
from typing import Any

from moestream.errors import UsageError
from moestream.values import without_controls

#: Least and most by key, as the bench bounds its own options; a share of the model's bytes may be many times all.
BOUNDS: dict[str, tuple[float, float]] = {
    "cap": (0.001, 1000),
    "repeats": (1, 1000),
    "tokens": (1, 2**20),
    "threads": (1, 512),
    "ctx": (64, 2**20),
    "batch": (1, 2**20),
    "depths": (1, 1024),
    "splits": (1, 64),
    "rounds": (1, 1000),
    "case_mb": (1, 2**16),
    "case_s": (0.001, 60),
    "seconds": (1, 3000),
}
#: What the keys of a probe's cases begin with.
GROUPS = (
    "sequential", "sequential-warm", "random", "buffered", "sizes", "warm", "mapped-cold", "mapped-warm", "advice",
    "alignment-cold", "alignment-warm",
)  # fmt: skip
#: Shares and multiples of a budget.
MOST_TIMES = 1e6
_LONGEST_KEY, _SHOWN = 80, 60


def shown(value: Any) -> str:
    """A value in a complaint, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:
        return "a whole number of thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def check_number(key: str, value: Any, where: str) -> None:
    """UsageError for a number (or one of a list's) beyond what the key may be; texts and None pass."""
    least, most = BOUNDS.get(key, (-math.inf, math.inf))
    for one in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(one, bool) or not isinstance(one, (int, float)):
            continue
        # Held against the bounds first: a whole number may be too large for a float.
        if not least <= one <= most:
            raise UsageError(f"{where} {key} cannot be {shown(one)}: {least:g} to {most:g}")
        if isinstance(one, float) and not math.isfinite(one):
            raise UsageError(f"{where} {key} cannot be {shown(one)}: a number is needed")


def check_text(key: str, value: Any, where: str) -> None:
    """UsageError for a text that holds what no terminal shows; whatever else passes."""
    if isinstance(value, str) and without_controls(value) != value:
        raise UsageError(f"{where} {key} cannot be {shown(value)}: it holds control characters")


def check_key(key: str) -> None:
    """UsageError for a name of an arm that no table and no file's name has room for."""
    if not key.strip() or len(key) > _LONGEST_KEY or not key.isprintable():
        raise UsageError(
            f"arm {shown(key)}: its key must be 1 to {_LONGEST_KEY} characters that can be shown"
        )
