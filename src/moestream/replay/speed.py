"""What replayed bytes mean in tokens a second, on a box whose disk and compute rates are known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.errors import RefusedError, UsageError
from moestream.files import open_file
from moestream.units import parse_size
from moestream.values import Object, parse_json

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|ms|us)\s*", re.ASCII)
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
#: By their names in a probe's document, and in ``Rates``.
RATES = ("disk_bytes_per_s", "compute_s_per_token")


@dataclass(frozen=True)
class Rates:
    """``compute_s_per_token``: a decoded token's time when every expert is in memory."""

    disk_bytes_per_s: float
    compute_s_per_token: float


@dataclass(frozen=True)
class Speed:
    """``tok_per_s``: compute, then the disk, nothing overlapping but early reads. ``ceiling_tok_per_s``: the longer of
    the two alone, as if everything overlapped: no engine that reads these bytes is faster."""

    tok_per_s: float
    ceiling_tok_per_s: float


def expected(rates: Rates, demand_bytes: float, early_bytes: float) -> Speed:
    """The speed of tokens that read so many bytes each: ``demand_bytes`` waited for, ``early_bytes`` not."""
    compute = rates.compute_s_per_token
    floor = max(compute, (demand_bytes + early_bytes) / rates.disk_bytes_per_s)
    serial = compute + demand_bytes / rates.disk_bytes_per_s
    return Speed(1 / max(serial, floor), 1 / floor)


def parse_rates(disk: str | None, compute: str | None, probe: Path | None) -> Rates | None:
    """Rates as people write them (``1.9GB/s``, ``34ms``), what is not said taken from a probe file; None when nothing
    is said at all. Raises UsageError for other words and when one of the two is missing."""
    values: dict[str, float] = {} if probe is None else _read_probe(probe)
    if disk is not None:
        values["disk_bytes_per_s"] = parse_size(disk.strip().removesuffix("/s"))
    if compute is not None:
        values["compute_s_per_token"] = parse_duration(compute)
    if not values and probe is None:
        return None
    for name, option in zip(RATES, ("--disk 1.9GB/s", "--compute 34ms"), strict=True):
        if name not in values:
            raise UsageError(f"an expected speed needs both rates: add {option}")
    return Rates(*(values[name] for name in RATES))


def saved_rates(probe: Mapping[str, Any] | None) -> Rates | None:
    """Of a kept probe's document; None where there is none or it knows only one of the two."""
    if probe is None or any(probe[name] is None for name in RATES):
        return None
    return Rates(*(float(probe[name]) for name in RATES))


def parse_duration(text: str) -> float:
    """Seconds of ``34ms``, ``0.034s``, ``900us``. Raises UsageError for anything else and for zero."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"not a time above zero: {text!r} (write 34ms or 0.034s)")
    return seconds


def _read_probe(path: Path) -> dict[str, float]:
    values = {}
    try:
        with open_file(path, "make one with `moestream probe --json FILE`") as file:
            document = Object(parse_json(file.read()))
        for name in RATES:
            if document.members.get(name) is None:
                continue
            values[name] = float(document.number(name))
            if values[name] <= 0:
                raise ValueError(f"{name} must be a number above zero")
    except ValueError as error:
        raise RefusedError(
            f"{path}: {error}; a probe file is what `moestream probe --json FILE` writes"
        ) from None
    return values
