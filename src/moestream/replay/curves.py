"""Curves: each policy at each budget, over one or several traces of one model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestream.core import _core
from moestream.errors import BudgetError, MechanismError, RefusedError, UsageError
from moestream.geometry import Geometry, split_budget
from moestream.mechanism import Mechanism
from moestream.members import POLICIES
from moestream.nearest import did_you_mean
from moestream.replay.run import BELADY, Recording, Replayed, replay
from moestream.replay.speed import Rates, Speed, expected
from moestream.units import format_bytes, parse_size

#: What is compared when nothing is named: the default, what it must beat, what is known to be good, and the bound.
DEFAULT_POLICIES = ("lru", "lru-layer", "lfu-decay", "lfu-adapt", "sieve", "s3fifo", BELADY)
#: Budgets of a default curve, in shares of all expert bytes.
DEFAULT_SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
RECORDED = "recorded"
POOLED = "all traces"
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)


@dataclass(frozen=True)
class Policy:
    """``text``: canonical. ``priority``: the seed of a recording's replay, by global expert."""

    text: str
    priority: Callable[[Recording], NDArray[np.float64]] | None = None


def parse_policies(text: str | None, load: Callable[[str], NDArray[np.float64]]) -> list[Policy]:
    """The policies of ``lru,sieve,belady``, of ``all``, or (None) the ones worth comparing; each once, in order.
    ``load`` reads the file of ``pinned:FILE``; ``pinned`` alone is seeded from the first half of the trace itself.
    Raises UsageError for unknown names and wrong arguments, and what ``load`` does."""
    members = sorted(_core.policy_members())
    if text is None:
        words = [word for word in DEFAULT_POLICIES if word in (*members, BELADY)]
    else:
        words = [word.strip() for word in text.split(",")]
        if "all" in words:
            at = words.index("all")
            words[at : at + 1] = [*members, BELADY]
    return list({policy.text: policy for policy in (_policy(word, load) for word in words)}.values())


def _policy(word: str, load: Callable[[str], NDArray[np.float64]]) -> Policy:
    name, _, argument = word.partition(":")
    if word == BELADY:
        return Policy(word)
    if name not in POLICIES:
        known = [*POLICIES, BELADY]
        raise UsageError(f"no policy {word!r}{did_you_mean(name, known)} (known: {', '.join(known)}, all)")
    if word == "pinned":
        return Policy(word, first_half_counts)
    try:
        canonical = Mechanism.parse(f"arena+{word}").policy
    except MechanismError as error:
        # Here it is a word of the command line, as an unknown policy is.
        raise UsageError(f"policy {word!r}: {error}") from None
    if name == "pinned":
        priority = load(argument)
        return Policy(canonical, lambda recording: priority)
    return Policy(canonical)


def first_half_counts(recording: Recording) -> NDArray[np.float64]:
    """How many tokens of the first half of the steps chose each expert [experts]."""
    end = int(recording.start[recording.middle()])
    return np.bincount(
        recording.experts[:end], weights=recording.counts[:end], minlength=len(recording.bank_of)
    ).astype(np.float64)


@dataclass(frozen=True)
class Budget:
    """``text``: as asked for; ``bytes`` of expert memory, None for what was recorded."""

    text: str
    bytes: int | None

    def capacities(self, recording: Recording) -> tuple[int, ...]:
        """Experts a part, split as the engine does: for the widest step of the trace where that fits, else for the
        largest that does."""
        if self.bytes is None:
            return recording.capacities
        geometry, n_batch = recording.geometry, int(recording.tokens.max(initial=1))
        while n_batch > 1 and geometry.bytes_of(geometry.smallest(n_batch)) > self.bytes:
            n_batch //= 2
        return tuple(split_budget(geometry, self.bytes, n_batch))


def parse_budgets(text: str | None, recordings: Sequence[Recording]) -> list[Budget]:
    """The budgets of ``25%,400MB,recorded``, or (None) a curve from the widest route to all experts; each once.
    Raises UsageError for other words, BudgetError for what is too little; both name the smallest that works."""
    geometry = recordings[0].geometry
    smallest = geometry.bytes_of(geometry.smallest(1))
    if text is None:
        return _default_budgets(recordings, geometry)
    budgets = [_budget(word.strip(), geometry, smallest) for word in text.split(",")]
    for budget in budgets:
        for recording in recordings:
            if budget.bytes is None and not recording.capacities:
                raise RefusedError(
                    f"{recording.name} has no recorded budget: {recording.mechanism} keeps no experts itself"
                )
    return list(dict.fromkeys(budgets))


def _default_budgets(recordings: Sequence[Recording], geometry: Geometry) -> list[Budget]:
    """Every share in which no route is refused, and the least such budget before them."""
    widest = np.max([recording.widest for recording in recordings], axis=0)
    least = max(geometry.bytes_of(widest.tolist()), geometry.bytes_of(geometry.smallest(1)))
    total = geometry.frame_bytes_total
    shares = [Budget(f"{share:.0%}", int(share * total)) for share in DEFAULT_SHARES]
    larger = [budget for budget in shares if budget.bytes is not None and budget.bytes > least]
    budgets = larger if len(larger) == len(shares) else [Budget("least", least), *larger]
    return [b for b in budgets if all(_wide_enough(b, recording) for recording in recordings)]


def _wide_enough(budget: Budget, recording: Recording) -> bool:
    return all(c >= w for c, w in zip(budget.capacities(recording), recording.widest, strict=True))


def _budget(word: str, geometry: Geometry, smallest: int) -> Budget:
    least = f"the smallest that works is {-(-smallest // 1000)}KB"
    total = geometry.frame_bytes_total
    if word == RECORDED:
        return Budget(word, None)
    share = _SHARE.fullmatch(word)
    if share is not None:
        if not 0 < float(share[1]) <= 100:
            raise UsageError(f"budget {word!r}: a share is above 0% and at most 100%; {least}")
        size = int(float(share[1]) / 100 * total)
    else:
        try:
            size = parse_size(word)
        except UsageError as error:
            raise UsageError(f"budget {word!r}: {error}, or a share like 25%; {least}") from None
    if size < smallest:
        raise BudgetError(
            f"budget {word!r} is {format_bytes(size)} of the {format_bytes(total)} of experts, too little for one "
            f"token's route: {least}",
            smallest,
        )
    return Budget(word, size)


@dataclass(frozen=True)
class Figures:
    """Sums over the counted routes. ``bytes`` of misses, ``early_bytes`` of early loads; ``demand_bytes``: of every
    routed expert, what is read when nothing is kept. ``refused`` routes were wider than the budget: none of their
    experts is counted anywhere. ``decode_...``: of the steps that made text."""

    routes: int = 0
    refused: int = 0
    hits: int = 0
    misses: int = 0
    bytes: int = 0
    early: int = 0
    early_bytes: int = 0
    demand_bytes: int = 0
    evictions: int = 0
    speculative_used: int = 0
    speculative_wasted: int = 0
    decode_tokens: int = 0
    decode_hits: int = 0
    decode_misses: int = 0
    decode_bytes: int = 0
    decode_early_bytes: int = 0

    def __add__(self, other: Figures) -> Figures:
        names = [field.name for field in dataclasses.fields(Figures)]
        return Figures(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def hit_rate(self) -> float:
        """Routed experts that were there; 0 of none."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def bytes_read(self) -> int:
        return self.bytes + self.early_bytes


def sum_up(done: Replayed) -> Figures:
    """What the routes from ``counted_from`` on add up to."""
    recording = done.recording
    counted = np.arange(len(recording)) >= done.counted_from
    decode = counted & recording.decode
    ran = counted & ~done.refused
    _, passes = np.unique(
        np.stack([recording.step[decode], recording.token[decode]]), axis=1, return_index=True
    )

    def total(values: NDArray[np.generic], of: NDArray[np.bool_] = counted) -> int:
        return int(values[of].sum())

    return Figures(
        routes=int(counted.sum()),
        refused=total(done.refused),
        hits=total(done.hits),
        misses=total(done.misses),
        bytes=total(done.bytes),
        early=total(done.early),
        early_bytes=total(done.early_bytes),
        demand_bytes=total(recording.widths * recording.expert_bytes[recording.bank], ran),
        evictions=done.counters["evictions"],
        speculative_used=done.counters["speculative_used"],
        speculative_wasted=done.counters["speculative_wasted"],
        decode_tokens=int(recording.tokens[decode][passes].sum()),
        decode_hits=total(done.hits, decode),
        decode_misses=total(done.misses, decode),
        decode_bytes=total(done.bytes, decode),
        decode_early_bytes=total(done.early_bytes, decode),
    )


@dataclass(frozen=True)
class Point:
    """One policy at one budget over one trace, or over all of them. ``budget_bytes``: memory the capacities take (of
    several traces with budgets of their own: the mean). ``speed``: None where a rate or a decoded token is missing."""

    trace: str
    policy: str
    budget: str
    budget_bytes: int
    share: float
    capacities: tuple[int, ...]
    figures: Figures
    speed: Speed | None


@dataclass(frozen=True)
class Options:
    """``half``: 'first' or 'second' for that half of the steps alone, from an empty cache. ``warm_half``: the first
    half only warms the cache. Without ``speculation`` nothing is loaded early."""

    half: str | None = None
    warm_half: bool = False
    speculation: bool = True
    rates: Rates | None = None


def check_same_model(recordings: Sequence[Recording]) -> None:
    """Raises RefusedError unless all traces are of one model."""
    first = recordings[0]
    for other in recordings[1:]:
        if other.identity != first.identity or other.geometry != first.geometry:
            raise RefusedError(
                f"{other.name} is of model {other.identity} and {first.name} of {first.identity}: "
                "name traces of one model together"
            )


def curves(
    recordings: Sequence[Recording], policies: Sequence[Policy], budgets: Sequence[Budget], options: Options
) -> Iterator[Point]:
    """Every budget's policies: a point a trace and, of several traces, one for all of them."""
    check_same_model(recordings)
    for budget in budgets:
        for policy in policies:
            points = [_point(recording, policy, budget, options) for recording in recordings]
            yield from points
            if len(points) > 1:
                yield _pooled(points, options.rates)


def _point(whole: Recording, policy: Policy, budget: Budget, options: Options) -> Point:
    middle = whole.middle()
    recording = whole
    if options.half is not None:
        recording = whole.cut(0, middle) if options.half == "first" else whole.cut(middle, len(whole))
    capacities = budget.capacities(whole)
    done = replay(
        recording,
        policy.text,
        capacities,
        priority=None if policy.priority is None else policy.priority(whole),
        speculation=options.speculation,
        counted_from=middle if options.warm_half else 0,
    )
    figures = sum_up(done)
    size = whole.geometry.bytes_of(capacities)
    share = size / whole.geometry.frame_bytes_total
    speed = _speed(figures, options.rates)
    return Point(whole.name, policy.text, budget.text, size, share, capacities, figures, speed)


def _pooled(points: Sequence[Point], rates: Rates | None) -> Point:
    figures = sum((point.figures for point in points), Figures())
    size = sum(point.budget_bytes for point in points) // len(points)
    share = sum(point.share for point in points) / len(points)
    same = points[0].capacities if len({point.capacities for point in points}) == 1 else ()
    return dataclasses.replace(
        points[0],
        trace=POOLED,
        budget_bytes=size,
        share=share,
        capacities=same,
        figures=figures,
        speed=_speed(figures, rates),
    )


def _speed(figures: Figures, rates: Rates | None) -> Speed | None:
    if rates is None or figures.decode_tokens == 0:
        return None
    tokens = figures.decode_tokens
    return expected(rates, figures.decode_bytes / tokens, figures.decode_early_bytes / tokens)
