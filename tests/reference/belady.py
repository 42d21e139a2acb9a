"""The fewest misses any policy can have, in plain Python: who is used latest from now leaves."""

from __future__ import annotations

from collections.abc import Sequence


def belady_misses(routes: Sequence[Sequence[int]], capacity: int) -> int:
    """Misses of ``capacity`` frames of one size. A route names distinct experts, at most ``capacity``; they may
    not leave for each other. Ties (never used again, used by the same route) cost the same either way."""
    to_come: dict[int, list[int]] = {}  # expert -> the routes that will use it, latest first
    for number, route in reversed(list(enumerate(routes))):
        for expert in route:
            to_come.setdefault(expert, []).append(number)
    resident: set[int] = set()
    misses = 0
    for route in routes:
        for expert in route:
            to_come[expert].pop()
        missing = set(route) - resident
        misses += len(missing)
        for _ in range(len(resident) + len(missing) - capacity):
            resident.remove(max(resident - set(route), key=lambda e: to_come[e][-1:] or [len(routes)]))
        resident |= missing
    return misses
