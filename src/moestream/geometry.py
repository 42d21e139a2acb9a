"""Where a model's slabs lie in pages, and how a budget is divided over them, as pure functions.

The arithmetic here and in the core must agree: of a slab's whole pages as many are *movable* as the tensor's poorest
slab has; every other page that holds expert bytes is *boundary*, read at load and never moved. Banks whose slabs have
the same movable pages form a *part*: any expert fits any other's frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moestream.errors import BudgetError
from moestream.units import format_bytes, megabytes

if TYPE_CHECKING:
    from moestream.model import Bank, Model

PAGE = 4096
#: A part's pool of frames is taken in pages of this size.
HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class Part:
    """Banks whose frames are alike. ``pages``: movable pages of a slab, by the tensor's place in its bank;
    ``widths``: (experts, needed at once by a token) of each bank."""

    banks: tuple[int, ...]
    pages: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]

    @property
    def frame_bytes(self) -> int:
        return sum(self.pages) * PAGE

    @property
    def experts(self) -> int:
        return sum(count for count, _ in self.widths)

    def demand(self, n_tokens: int) -> int:
        """Most experts one bank of the part can route in a step of ``n_tokens``."""
        return max(min(count, used * n_tokens) for count, used in self.widths)

    def pool_bytes(self, experts: int) -> int:
        """Memory taken for ``experts`` frames: whole huge pages."""
        return -(-experts * self.frame_bytes // HUGE_PAGE) * HUGE_PAGE


@dataclass(frozen=True)
class Geometry:
    """``parts`` in the order of their first bank; banks without a movable page are in none.
    ``resident_bytes``: all bytes of the files outside movable ranges; ``boundary_bytes``: those of its pages
    that hold expert bytes."""

    parts: tuple[Part, ...]
    resident_bytes: int
    boundary_bytes: int

    @property
    def frame_bytes_total(self) -> int:
        """Pool memory that holds every expert."""
        return self.bytes_of([part.experts for part in self.parts])

    def bytes_of(self, capacities: Sequence[int]) -> int:
        """Pool memory of so many experts a part."""
        return sum(part.pool_bytes(n) for part, n in zip(self.parts, capacities, strict=True))

    def smallest(self, n_tokens: int) -> list[int]:
        """Fewest experts a part with which a step of ``n_tokens`` can run."""
        return [part.demand(n_tokens) for part in self.parts]


def _movable_pages(offset: int, slab_bytes: int, count: int) -> int:
    """Fewest whole pages any of a tensor's slabs has inside it."""
    fewest = slab_bytes // PAGE
    for start in range(offset, offset + count * slab_bytes, slab_bytes):
        fewest = min(fewest, (start + slab_bytes) // PAGE - -(-start // PAGE))
        if fewest <= 0:
            return 0
    return fewest


def needed_at_once(bank: Bank) -> int:
    """Experts of the bank that must be in memory together for one token: of chunk experts all, whatever it uses,
    because the engine reads such a bank whole."""
    return bank.used if bank.kind == "routed" else bank.count


def slab_geometry(model: Model) -> Geometry:
    """Which of the model's pages move, and in which parts."""
    movable = [0] * len(model.shards)
    touched: list[list[tuple[int, int]]] = [[] for _ in model.shards]
    alike: dict[tuple[int, ...], list[int]] = {}
    for bank in model.banks:
        pages = tuple(_movable_pages(t.offset, t.slab_bytes, t.count) for t in bank.tensors)
        if any(pages):
            alike.setdefault(pages, []).append(bank.index)
        for tensor, count in zip(bank.tensors, pages, strict=True):
            movable[tensor.shard] += count * PAGE * tensor.count
            end = tensor.offset + tensor.slab_bytes * tensor.count
            touched[tensor.shard].append((tensor.offset // PAGE * PAGE, -(-end // PAGE) * PAGE))
    parts = []
    for pages, banks in alike.items():
        widths = tuple((model.banks[b].count, needed_at_once(model.banks[b])) for b in banks)
        parts.append(Part(tuple(banks), pages, widths))
    boundary = sum(
        _covered(ranges, shard.bytes) - moved
        for ranges, shard, moved in zip(touched, model.shards, movable, strict=True)
    )
    return Geometry(tuple(parts), model.bytes - sum(movable), boundary)


def movable_bytes_per_token(model: Model, geometry: Geometry) -> int:
    """Bytes one decoded token reads when nothing of it is cached: of what it demands, the pages that come and go."""
    trunk = model.n_layers - model.n_mtp_layers
    return sum(
        needed * part.frame_bytes
        for part in geometry.parts
        for b, (_, needed) in zip(part.banks, part.widths, strict=True)
        if model.banks[b].layer < trunk
    )


def _covered(ranges: list[tuple[int, int]], limit: int) -> int:
    """Bytes below ``limit`` that lie in at least one range."""
    total = at = 0
    for begin, end in sorted(ranges):
        begin, end = max(begin, at), min(end, limit)
        total += max(0, end - begin)
        at = max(at, end)
    return total


def split_budget(geometry: Geometry, budget_bytes: int, n_batch: int = 1) -> list[int]:
    """Experts for each part: all when all fit; else every part its demand for a step of ``n_batch`` tokens,
    and the rest in proportion to the parts' bytes. Raises BudgetError when the demand alone does not fit."""
    lowest = geometry.smallest(n_batch)
    needed = geometry.bytes_of(lowest)
    if needed > budget_bytes:
        raise BudgetError(
            f"a step of {n_batch} token{'s' if n_batch > 1 else ''} needs {format_bytes(needed)} for experts "
            f"and {format_bytes(max(0, budget_bytes))} are left: "
            f"name a cap larger by {megabytes(needed - budget_bytes)}"
        )
    if geometry.frame_bytes_total <= budget_bytes:
        return [part.experts for part in geometry.parts]
    capacities = _in_proportion(geometry, budget_bytes - HUGE_PAGE * len(geometry.parts), lowest)
    _hand_out(geometry, budget_bytes, capacities)
    return capacities


def _in_proportion(geometry: Geometry, budget_bytes: int, lowest: list[int]) -> list[int]:
    """Capacities in proportion to the parts' bytes, rounded down, none below its lowest. A part that is held
    at its lowest takes its bytes from the others, so the shares are found anew until none is."""
    capacities, parts = list(lowest), geometry.parts
    open_parts = set(range(len(capacities)))
    while open_parts:
        held = sum(part.frame_bytes * n for part, n in zip(parts, capacities, strict=True))
        held -= sum(parts[p].frame_bytes * capacities[p] for p in open_parts)
        weight = sum(parts[p].experts * parts[p].frame_bytes for p in open_parts)
        share = max(0, budget_bytes - held)
        targets = {p: min(share * parts[p].experts // weight, parts[p].experts) for p in open_parts}
        short = {p for p, target in targets.items() if target < lowest[p]}
        if not short:
            for p, target in targets.items():
                capacities[p] = target
            break
        open_parts -= short
    return capacities


def _hand_out(geometry: Geometry, budget_bytes: int, capacities: list[int]) -> None:
    """Give what rounding left, one expert at a time, to the part with the smallest share that it still
    fits."""
    left = budget_bytes - geometry.bytes_of(capacities)
    while True:
        best: tuple[float, int, int] | None = None
        for p, part in enumerate(geometry.parts):
            cost = part.pool_bytes(capacities[p] + 1) - part.pool_bytes(capacities[p])
            if capacities[p] < part.experts and cost <= left:
                best = min(best or (math.inf, 0, 0), (capacities[p] / part.experts, p, cost))
        if best is None:
            return
        capacities[best[1]] += 1
        left -= best[2]
