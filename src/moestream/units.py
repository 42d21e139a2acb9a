"""Sizes as people write them: ``4GiB``, ``1.1GB``, ``800M``, ``1073741824``.

Units with an i (KiB, MiB, GiB) are powers of 1024; KB, MB, GB powers of 1000; a bare K, M, G is the power of 1024. A
number alone is bytes, and text of one too small for that lacks its unit: ``"4"`` is no size, ``"4B"`` and 4 are.
"""

from __future__ import annotations

import math
import re

from moestream.errors import UsageError

_UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
#: The largest size that is taken for one: an exbibyte.
_LARGEST = 1 << 60
#: Nobody types fewer bytes of memory or disk without a B.
_FEWEST_BARE = 1 << 20
#: Who leaves the unit away means gigabytes, with a number from here on megabytes.
_MEGABYTES_FROM = 256
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(text: str | int) -> int:
    """Bytes of a size as people write it. Raises UsageError for anything else: zero, negative, and a number that lacks
    its unit."""
    match = None if isinstance(text, bool) or not isinstance(text, (str, int)) else _SIZE.fullmatch(str(text))
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"not a size: {text!r} (write 4GiB or 1.1GB)")
    # A size of more digits than any disk has is not one anybody means.
    number = float(match[1]) if len(match[1]) < 40 else 2.0 * _LARGEST
    size = text if isinstance(text, int) else int(number * _UNITS[match[2].upper()])
    if size > _LARGEST:
        raise UsageError(f"a size of more than 2^60 bytes: {str(text)[:40]!r}")
    if isinstance(text, str) and not match[2] and 0 < number < _FEWEST_BARE:
        unit = "G" if number < _MEGABYTES_FROM else "M"
        raise UsageError(
            f"a size without its unit: {match[1]} would be {format_bytes(number)}; write {match[1]}{unit}B or "
            f"{match[1]}{unit}iB"
        )
    if size <= 0:
        raise UsageError(f"a size must be above zero, not {text!r}")
    return size


def format_bytes(count: float) -> str:
    """A size for people, in powers of 1000 and three digits: ``1.10 GB``, ``553 kB``, ``12 B``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            value = count / scale
            return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {unit}"
    return f"{count:.0f} B"


def format_age(seconds: float) -> str:
    """How long ago, for people: ``now``, ``12 min ago``, ``30 h ago``."""
    minutes = max(0.0, seconds) / 60
    if minutes < 1:
        return "now"
    return f"{minutes:.0f} min ago" if minutes < 120 else f"{minutes / 60:.0f} h ago"


def megabytes(count: int) -> str:
    """Bytes as a size to type, never rounded below what is needed: ``1101MB``."""
    return f"{math.ceil(count / 1e6)}MB"
