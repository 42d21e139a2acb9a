"""Recorded routes as the core replays them, and one replay of them.

The engine's own cache decides; no byte moves. Under the recorded policy and capacities a replay gives the recorded
hits and misses exactly, early reads included: what the engine asked for early is part of the recording.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestream.core import _core
from moestream.errors import MoestreamError, RefusedError, UsageError
from moestream.geometry import PAGE, Geometry, Part
from moestream.mechanism import Mechanism
from moestream.trace import Trace, no_routes
from moestream.trace.trace import PHASES, Int, starts

#: What no policy can beat: it knows the routes to come. Only replay has it.
BELADY = "belady"


@dataclass(frozen=True)
class Recording:
    """The routes of one trace, each expert once a route with the number of tokens that chose it.

    Arrays as ``_core.replay`` takes them: [routes] ``bank``, ``token``, ``tokens``; [routes + 1] ``start``,
    ``wish_start``; [routed] ``experts`` (global, ascending in a route), ``counts``; ``wishes`` (global). ``step``
    [routes] is the route's step, ``decode`` [routes] whether that step made text. ``bank_of``: by global expert.
    ``geometry``: the parts. ``capacities``: the recorded ones, by part; () where the mechanism had no cache.
    """

    name: str
    identity: str
    mechanism: str
    geometry: Geometry
    capacities: tuple[int, ...]
    bank_of: list[int]
    step: Int
    decode: NDArray[np.bool_]
    bank: NDArray[np.uint32]
    token: NDArray[np.uint64]
    tokens: NDArray[np.uint32]
    start: NDArray[np.uint64]
    experts: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    wish_start: NDArray[np.uint64]
    wishes: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.bank)

    @cached_property
    def part_experts(self) -> list[list[int]]:
        """The global experts of each part, ascending."""
        part_of = {bank: p for p, part in enumerate(self.geometry.parts) for bank in part.banks}
        experts: list[list[int]] = [[] for _ in self.geometry.parts]
        for expert, bank in enumerate(self.bank_of):
            if bank in part_of:
                experts[part_of[bank]].append(expert)
        return experts

    @cached_property
    def expert_bytes(self) -> Int:
        """Bytes that travel for an expert of each bank [banks]; 0 for banks that are always in memory."""
        sizes = np.zeros(max(self.bank_of, default=-1) + 1, np.int64)
        for part in self.geometry.parts:
            sizes[list(part.banks)] = part.frame_bytes
        return sizes

    @cached_property
    def widths(self) -> Int:
        """Distinct experts of each route [routes]."""
        return (self.start[1:] - self.start[:-1]).astype(np.int64)

    @cached_property
    def widest(self) -> list[int]:
        """Most experts one route of each part chose; at least 1."""
        return [
            int(self.widths[np.isin(self.bank, part.banks)].max(initial=1)) for part in self.geometry.parts
        ]

    def cut(self, first: int, last: int) -> Recording:
        """Only the routes first .. last - 1, to be replayed from an empty cache."""
        a, b = int(self.start[first]), int(self.start[last])
        c, d = int(self.wish_start[first]), int(self.wish_start[last])
        a_route = ("step", "decode", "bank", "token", "tokens")
        return dataclasses.replace(
            self,
            **{name: getattr(self, name)[first:last] for name in a_route},
            start=self.start[first : last + 1] - self.start[first],
            wish_start=self.wish_start[first : last + 1] - self.wish_start[first],
            experts=self.experts[a:b],
            counts=self.counts[a:b],
            wishes=self.wishes[c:d],
        )

    def middle(self) -> int:
        """The first route of the second half of the steps."""
        steps = np.unique(self.step)
        return int(np.searchsorted(self.step, steps[len(steps) // 2])) if len(steps) else 0


def prepare(trace: Trace, name: str = "") -> Recording:
    """A trace's routes for replay. Raises RefusedError for one that has none, or whose experts do not come and go."""
    model, routes = trace.meta["model"], trace.routes
    experts = np.asarray(trace.experts, np.int64)
    if len(routes) == 0:
        raise no_routes(trace, name or "the trace")
    if not model["parts"]:
        raise RefusedError(f"{name or 'the trace'} is of a model whose experts are too small to stream")
    route = np.repeat(np.arange(len(routes)), np.diff(routes.id_start))
    bank = routes.bank[route]
    total = int(experts.sum())
    keys, counts = np.unique(route * total + trace.first_expert[bank] + routes.ids, return_counts=True)
    decoding = trace.steps["step"][trace.steps["phase"] == PHASES.index("decode")]
    return Recording(
        name=name,
        identity=trace.identity,
        mechanism=str(trace.meta["mechanism"]),
        geometry=_geometry(model),
        capacities=tuple(int(n) for n in model.get("capacities") or ()),
        bank_of=np.repeat(np.arange(len(experts)), experts).tolist(),
        step=routes.step,
        decode=np.isin(routes.step, decoding),
        bank=routes.bank.astype(np.uint32),
        token=routes.token.astype(np.uint64),
        tokens=np.maximum(routes.tokens, 1).astype(np.uint32),
        start=starts(np.bincount(keys // total, minlength=len(routes))).astype(np.uint64),
        experts=(keys % total).astype(np.uint32),
        counts=counts.astype(np.uint32),
        wish_start=routes.wish_start.astype(np.uint64),
        wishes=routes.wish_ids.astype(np.uint32),
    )


def _geometry(model: dict[str, Any]) -> Geometry:
    """The parts as the plan splits a budget over them. A frame's pages are not told apart by tensor here."""
    parts = []
    for part in model["parts"]:
        banks = tuple(int(bank) for bank in part["banks"])
        widths = tuple(_width(model, b) for b in banks)
        parts.append(Part(banks, (int(part["frame_bytes"]) // PAGE,), widths))
    return Geometry(tuple(parts), 0, 0)


def _width(model: dict[str, Any], bank: int) -> tuple[int, int]:
    """As ``Part.widths``: a bank of chunk experts is read whole."""
    experts = int(model["experts"][bank])
    chunks = "roles" in model and any(str(role).startswith("chunk_") for role in model["roles"][bank])
    return experts, experts if chunks else int(model["used"][bank])


@dataclass(frozen=True)
class Replayed:
    """One replay. Arrays have one entry a route: ``bytes`` of misses; ``early`` loads and their ``early_bytes``, as
    if each had been read to its end; ``refused``: wider than its part's capacity, so nothing happened (the engine
    would have taken a smaller step). ``counters`` are of the routes from ``counted_from`` on."""

    recording: Recording
    policy: str
    capacities: tuple[int, ...]
    counted_from: int
    counters: dict[str, int]
    hits: NDArray[np.uint32]
    misses: NDArray[np.uint32]
    early: NDArray[np.uint32]
    bytes: NDArray[np.uint64]
    early_bytes: NDArray[np.uint64]
    refused: NDArray[np.bool_]

    def per_step(self) -> dict[str, Int]:
        """``step`` and, for each, ``hits``, ``misses``, ``early``, ``bytes``, ``early_bytes``, ``refused`` [steps]."""
        steps, index = np.unique(self.recording.step, return_inverse=True)
        table = {"step": steps}
        for name in ("hits", "misses", "early", "bytes", "early_bytes", "refused"):
            table[name] = np.zeros(len(steps), np.int64)
            np.add.at(table[name], index, getattr(self, name).astype(np.int64))
        return table


def replay(
    recording: Recording,
    policy: str,
    capacities: Sequence[int],
    *,
    priority: NDArray[np.float64] | None = None,
    speculation: bool = True,
    counted_from: int = 0,
) -> Replayed:
    """Feed the recording to the engine's cache under ``policy`` (or to ``belady``) with so many experts a part.

    ``priority``: the seed of ``pinned``, by global expert. Without ``speculation`` the recorded early reads are left
    out. Routes before ``counted_from`` only warm the cache. Raises UsageError for words the core does not know.
    """
    no_wishes = np.empty(0, np.uint64)
    try:
        result = _core.replay(
            bank=recording.bank,
            token=recording.token,
            tokens=recording.tokens,
            start=recording.start,
            experts=recording.experts,
            counts=recording.counts,
            wish_start=recording.wish_start if speculation else no_wishes,
            wishes=recording.wishes if speculation else no_wishes.astype(np.uint32),
            parts=list(zip(recording.part_experts, [int(n) for n in capacities], strict=True)),
            part_bytes=[part.frame_bytes for part in recording.geometry.parts],
            bank_of=recording.bank_of,
            # Which file a seed came from is nothing to the core, which knows no names that are not UTF-8.
            policy=policy if priority is None else policy.partition(":")[0],
            priority=[] if priority is None else priority.tolist(),
            counted_from=counted_from,
        )
    except _core.CoreError as error:
        kind, text = error.args
        raise (UsageError if kind == "usage" else MoestreamError)(text) from None
    result |= {"policy": policy, "refused": result["refused"].astype(bool)}
    return Replayed(recording, capacities=tuple(capacities), counted_from=counted_from, **result)


@dataclass(frozen=True)
class Fidelity:
    """The recorded mechanism replayed: its hits and misses, and how many of the steps differ from the record."""

    policy: str
    hits: int
    misses: int
    recorded_hits: int
    recorded_misses: int
    steps: int
    different_steps: int


def check_fidelity(
    trace: Trace, recording: Recording, load: Callable[[str], NDArray[np.float64]] | None = None
) -> Fidelity | None:
    """Replay the whole trace under its own mechanism; None where that had no cache. All steps must be the same,
    unless the trace does not begin with the load or its policy is not what it was. ``load`` reads the seed's file
    that a policy names. Raises MechanismError for a mechanism this version does not know, and what ``load`` does."""
    if not recording.capacities:
        return None
    mechanism = Mechanism.parse(recording.mechanism)
    file = mechanism.file_of("policy")
    priority = load(file) if load is not None and file is not None else None
    table = replay(recording, mechanism.policy, recording.capacities, priority=priority).per_step()
    # A recording that broke off may have routes of a step that never ended.
    steps, mine, theirs = np.intersect1d(table["step"], trace.steps["step"], return_indices=True)
    hits, misses = (trace.steps[name][theirs].astype(np.int64) for name in ("hits", "misses"))
    different = (hits != table["hits"][mine]) | (misses != table["misses"][mine])
    return Fidelity(
        policy=mechanism.policy,
        hits=int(table["hits"][mine].sum()),
        misses=int(table["misses"][mine].sum()),
        recorded_hits=int(hits.sum()),
        recorded_misses=int(misses.sum()),
        steps=len(steps),
        different_steps=int(different.sum()),
    )
