"""Belady's bound, as a yardstick: how much of what LRU wastes a policy saves."""

from __future__ import annotations

from collections.abc import Sequence

from moestream.replay.curves import Point
from moestream.replay.run import BELADY


def gaps_closed(points: Sequence[Point], baseline: str = "lru") -> list[float | None]:
    """For each point, the share of the bytes that ``baseline`` reads beyond Belady's which its policy does not read,
    for the same trace and budget: 0 is no better than the baseline, 1 is optimal, below 0 is worse. None where one
    of the two was not replayed, or where there is no gap."""
    read = {(point.trace, point.budget, point.policy): point.figures.bytes_read for point in points}
    shares: list[float | None] = []
    for point in points:
        theirs = read.get((point.trace, point.budget, baseline))
        least = read.get((point.trace, point.budget, BELADY))
        if theirs is None or least is None or theirs == least:
            shares.append(None)
        else:
            shares.append((theirs - point.figures.bytes_read) / (theirs - least))
    return shares
