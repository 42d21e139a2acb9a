"""What fits: how a memory cap is divided, as pure functions. Nothing here reads a file or asks the machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moestream.box import Limit, Place, ProcessLimits
from moestream.errors import BudgetError, UsageError
from moestream.geometry import Geometry, movable_bytes_per_token, slab_geometry, split_budget
from moestream.mechanism import DEFAULT, Mechanism
from moestream.units import format_bytes, megabytes

if TYPE_CHECKING:
    from moestream.model import Model

#: Anonymous memory of a process that runs a model: Python, numpy, the binding, our index, the command line and its
#: bar (up to 56 MB measured without the vocabulary), and of the vocabulary (350 bytes a token measured).
BASE_BYTES = 56_000_000
BASE_BYTES_PER_VOCAB = 400
#: What a load itself adds to a process that has imported everything.
LOAD_BYTES = 16_000_000
#: Kept free for what no process figure shows but a cgroup counts, and for what grows after the plan: text and
#: statistics, and, in proportion to the file, page tables (1/512 of the addresses ever used, kept when pages
#: move away) and the mappings that moved slabs are.
MARGIN_BYTES = 8 << 20
MARGIN_SHARE = 256
#: Left to others when no cap is named: this much, but no more than a quarter of what is available and no less than a
#: tenth.
RESERVE_BYTES = 512 << 20
#: For a model that lies in memory: its pages are the experts' place.
IN_PLACE = Mechanism.parse("mapped+fault")
ANYWHERE = Place()


@dataclass(frozen=True)
class ContextSizes:
    """Bytes llama.cpp will allocate for a context: the KV cache (recurrent state included), the compute
    buffers and the output buffer. ``seconds``: what asking took. Without a memory (a diffusion model, an encoder)
    every batch stands for itself."""

    kv_bytes: int
    compute_bytes: int
    output_bytes: int
    seconds: float = 0.0
    has_memory: bool = True


class MemoryFacts(Protocol):
    """What a plan asks of a box."""

    def room(self) -> Limit:
        """Bytes a process could take now without paging or an OOM kill, and who allows no more."""
        ...

    def limits(self) -> ProcessLimits:
        """What else bounds it."""
        ...


@dataclass(frozen=True)
class Plan:
    """How a cap is divided. ``dense_bytes`` + ``boundary_bytes`` stay, ``expert_bytes`` come and go (for a mapped
    store: what the page cache may hold of them), ``other_bytes`` is the process itself. ``capacities``: experts for
    each part of the arena, () for other stores. ``movable_bytes_per_token``: what a token reads when nothing of it is
    cached. ``n_batch``: the largest step the budget allows. ``tok_per_s``: the range decoding is expected in, None
    where the disk's rate is not known."""

    mechanism: Mechanism
    cap_bytes: int
    dense_bytes: int
    boundary_bytes: int
    kv_bytes: int
    compute_bytes: int
    other_bytes: int
    margin_bytes: int
    expert_bytes: int
    capacities: tuple[int, ...]
    movable_bytes_per_token: int
    n_batch: int
    smallest_cap_bytes: int
    tok_per_s: tuple[float, float] | None
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    #: False: llama.cpp keeps nothing of one batch for the next, and computes all rows of each.
    has_memory: bool = True
    #: What a box says of an arena (``plan_limits``): is what has no pages closed, and how many mappings may there be?
    closed: bool = False
    max_mappings: int = 65530


def process_bytes(model: Model, used_bytes: int) -> int:
    """What a process that uses ``used_bytes`` of anonymous memory before it loads the model will need for itself."""
    vocabulary = BASE_BYTES_PER_VOCAB * model.n_vocab
    return max(BASE_BYTES, used_bytes + LOAD_BYTES) + vocabulary


@dataclass(frozen=True)
class _Need:
    """Bytes a mechanism needs whatever the cap; ``experts``: the fewest it can run with."""

    dense: int
    boundary: int
    experts: int
    process: int
    margin: int

    @property
    def fixed(self) -> int:
        return self.dense + self.boundary + self.process + self.margin

    @property
    def smallest_cap(self) -> int:
        """The least cap that works, in whole MB."""
        return math.ceil((self.fixed + self.experts) / 1e6) * 1_000_000


def make_plan(
    model: Model,
    box: MemoryFacts,
    cap_bytes: int | None,
    mechanism: Mechanism | None,
    sizes: ContextSizes,
    *,
    n_ubatch: int = 512,
    base_bytes: int | None = None,
    held_bytes: int = 0,
    disk_bytes_per_s: float | None = None,
    compute_s_per_token: float | None = None,
    place: Place = ANYWHERE,
) -> Plan:
    """Divide a cap. None for ``cap_bytes``: what the box has, and this process holds already (``held_bytes``), less a
    reserve; None for ``mechanism``: the model's own pages if its ``place`` is memory, everything in memory where it
    fits, else the default arena. Raises BudgetError, with the smallest cap that works, when the mechanism cannot run;
    UsageError for a model without experts."""
    if not model.is_moe:
        raise UsageError(f"{model.name or model.arch} has no experts: there is nothing to stream or to plan")
    reasons: list[str] = []
    room = box.room()
    available = room.bytes + held_bytes
    if cap_bytes is None:
        reserve = max(min(RESERVE_BYTES, available // 4), available // 10)
        cap_bytes = max(0, available - reserve)
        reasons.append(
            f"cap {format_bytes(cap_bytes)}: {format_bytes(available)} available ({room.source}) less "
            f"{format_bytes(reserve)} for others"
        )
    else:
        reasons.append(f"cap {format_bytes(cap_bytes)}: as asked")
    geometry = slab_geometry(model)
    if base_bytes is None:
        base_bytes = process_bytes(model, 0)
    compute_bytes = sizes.compute_bytes + sizes.output_bytes
    process = sizes.kv_bytes + compute_bytes + base_bytes
    if mechanism is None and place.in_memory:
        mechanism = IN_PLACE
        reasons.append(f"mechanism {IN_PLACE}: the model lies on {place.in_memory}, which is memory")
    elif mechanism is None:
        mechanism = _choose(model, geometry, cap_bytes, process, reasons)
    need = _need(model, geometry, mechanism, process)
    smallest = need.smallest_cap
    left = cap_bytes - need.fixed
    if left < need.experts:
        raise BudgetError(_too_little(mechanism, cap_bytes, need), smallest)
    capacities, n_batch, expert_bytes = _experts(model, geometry, mechanism, left, n_ubatch)
    demand = movable_bytes_per_token(model, geometry)
    reasons += _reasons(need, sizes, base_bytes, _least(mechanism, geometry))
    # What this process holds already is not available, but is part of its cap.
    here = Limit(room.bytes + base_bytes, room.source)
    warnings = _warnings(mechanism, cap_bytes, here, expert_bytes, demand, n_batch, n_ubatch)
    whole = geometry.frame_bytes_total if mechanism.cached else model.expert_bytes
    share = min(1.0, expert_bytes / max(1, whole))
    speed = _speed(demand, share, disk_bytes_per_s, compute_s_per_token, reasons)
    return Plan(
        mechanism=mechanism,
        cap_bytes=cap_bytes,
        dense_bytes=need.dense,
        boundary_bytes=need.boundary,
        kv_bytes=sizes.kv_bytes,
        compute_bytes=compute_bytes,
        other_bytes=base_bytes,
        margin_bytes=need.margin,
        expert_bytes=expert_bytes,
        capacities=capacities,
        movable_bytes_per_token=demand,
        n_batch=n_batch,
        smallest_cap_bytes=smallest,
        tok_per_s=speed,
        reasons=tuple(reasons),
        warnings=(*place.warnings, *warnings),
    )


def _need(model: Model, geometry: Geometry, mechanism: Mechanism, process: int) -> _Need:
    dense = geometry.resident_bytes - geometry.boundary_bytes
    margin = MARGIN_BYTES + model.bytes // MARGIN_SHARE
    if mechanism.store == "arena":
        lowest = geometry.bytes_of(geometry.smallest(1))
        return _Need(dense, geometry.boundary_bytes, lowest, process, margin)
    if mechanism.store == "resident":
        return _Need(model.dense_bytes, 0, model.expert_bytes, process, margin)
    if mechanism.cached:  # a budget of experts; the dense bytes are clean pages of the file, unless locked
        lowest = geometry.bytes_of(geometry.smallest(1))
        locked = mechanism.dense == "mlock"
        return _Need(dense * locked, geometry.boundary_bytes * locked, lowest, process, margin)
    if mechanism.dense == "mapped":  # clean pages the kernel can drop: nothing has to fit
        return _Need(0, 0, 0, process, margin)
    return _Need(dense, geometry.boundary_bytes, 0, process, margin)


def _choose(model: Model, geometry: Geometry, cap_bytes: int, process: int, reasons: list[str]) -> Mechanism:
    resident = Mechanism.parse("resident")
    whole = _need(model, geometry, resident, process).smallest_cap
    fits = whole <= cap_bytes
    chosen = resident if fits else DEFAULT
    how = "fits" if fits else "does not fit"
    reasons.append(
        f"mechanism {chosen}: everything in memory takes a cap of {format_bytes(whole)}, which {how}"
    )
    return chosen


def _experts(
    model: Model, geometry: Geometry, mechanism: Mechanism, left: int, n_ubatch: int
) -> tuple[tuple[int, ...], int, int]:
    """Capacities, the largest step, and the bytes of experts for what is left of a cap."""
    if not mechanism.cached:
        return (), n_ubatch, min(left, model.expert_bytes)
    n_batch, too_many = 1, n_ubatch + 1
    while n_batch + 1 < too_many:
        middle = (n_batch + too_many) // 2
        if geometry.bytes_of(geometry.smallest(middle)) <= left:
            n_batch = middle
        else:
            too_many = middle
    capacities = tuple(split_budget(geometry, left, n_batch))
    return capacities, n_batch, geometry.bytes_of(capacities)


def _speed(
    demand: int, share: float, disk: float | None, compute: float | None, reasons: list[str]
) -> tuple[float, float] | None:
    """Tokens a second with a hit rate from zero to the budget's share of the experts, never above compute."""
    ceiling = 1 / compute if compute else math.inf
    if disk is None and not (share >= 1 and compute):
        return None
    rates = []
    for hit in (0.0 if share < 1 else 1.0, share):
        missed = demand * (1 - hit)
        rates.append(min(ceiling, (disk or 0.0) / missed if missed else math.inf))
    if math.isinf(rates[0]):
        return None  # no reads and no known compute time: nothing to say
    if disk is not None and share < 1:
        reasons.append(
            f"speed: {format_bytes(demand)} a token at {format_bytes(disk)}/s, {share:.0%} of the experts "
            "fit; a policy that suits the text hits more than that share"
        )
    return rates[0], rates[1]


def _least(mechanism: Mechanism, geometry: Geometry) -> str:
    """Why a store asks for the experts' bytes that it asks for."""
    if mechanism.store == "resident":
        return "all of them, read once at load"
    if not mechanism.cached:
        return "the kernel keeps what there is room for"
    count = len(geometry.parts)
    return f"one token's demand of the widest layer of {count} part{'s' if count != 1 else ''}"


def _reasons(need: _Need, sizes: ContextSizes, base: int, least: str) -> list[str]:
    size = format_bytes
    return [
        f"dense {size(need.dense)}: pages without expert bytes, read once at load",
        f"boundary {size(need.boundary)}: pages an expert shares with a neighbour; they do not move",
        f"KV cache {size(sizes.kv_bytes)}, compute buffers {size(sizes.compute_bytes)}, output "
        f"{size(sizes.output_bytes)}: llama.cpp's own figures for this context",
        f"other {size(base)}: Python, the binding, the vocabulary and the index",
        f"margin {size(need.margin)}: {size(MARGIN_BYTES)} and 1/{MARGIN_SHARE} of the file, for page tables",
        f"experts at least {size(need.experts)}: {least}",
    ]


def _warnings(
    mechanism: Mechanism, cap: int, room: Limit, experts: int, demand: int, n_batch: int, n_ubatch: int
) -> list[str]:
    warnings = []
    if cap > room.bytes:
        warnings.append(
            f"the cap {format_bytes(cap)} is more than there is for this process: {format_bytes(room.bytes)} "
            f"({room.source})"
        )
    if mechanism.store == "arena" and mechanism.policy == "lru" and experts < demand:
        warnings.append(
            f"{format_bytes(experts)} for experts is under one token's demand of {format_bytes(demand)}: a "
            "global lru throws out what comes next and hits nothing; lru-layer keeps a share for each layer"
        )
    if n_batch < n_ubatch:
        warnings.append(
            f"prompts run {n_batch} tokens a step, not {n_ubatch}: more experts do not fit at once"
        )
    return warnings


def _too_little(mechanism: Mechanism, cap: int, need: _Need) -> str:
    size = format_bytes
    return (
        f"{size(cap)} is too little for {mechanism.store}: dense {size(need.dense + need.boundary)}, context "
        f"and process {size(need.process)}, margin {size(need.margin)}, experts at least "
        f"{size(need.experts)}; the smallest cap that works is {megabytes(need.smallest_cap)} "
        "(a shorter context or a smaller batch lowers it)"
    )
