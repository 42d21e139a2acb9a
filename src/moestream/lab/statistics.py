"""From runs to claims: what is measured of a run, with what uncertainty, and what may be said about two arms.

Everything is deterministic: resampling is seeded. A *cell* is one prompt of one round; arms are compared inside a cell,
so that neither the text nor the hour of the day is between them. Ratios are averaged as logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from moestream.extras import lacking
from moestream.lab.validity import Record

#: The first steps after a prompt fill what the prompt's batch left: so many are not counted, of a short run a quarter.
WARM_UP_STEPS = 8
WARM_UP_SHARE = 1 / 4
CONFIDENCE = 0.95
_RESAMPLES = 4000
_SEED = 20_240_229
#: Two equal arms are never taken to be closer than this: clocks, file layout and address space differ every run.
LEAST_NOISE = 0.01
#: An interval of fewer pairs than this says nothing.
FEWEST_PAIRS = 3

Cell = tuple[int, str]


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its 95 % interval, of ``n`` observations. The ends are None for fewer than 3."""

    value: float
    low: float | None
    high: float | None
    n: int


class Verdict(str, Enum):
    """What may be said of one arm against another."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference shown"


@dataclass(frozen=True)
class Comparison:
    """``ratio``: one arm's rate over the other's, in cells that both ran; ``noise``: the floor it was judged by."""

    ratio: Interval
    noise: float | None
    verdict: Verdict


def warm_up(steps: int) -> int:
    """How many of a run's first steps are left out."""
    return min(WARM_UP_STEPS, int(steps * WARM_UP_SHARE))


def step_ms(record: Record, upto: int | None = None) -> list[float]:
    """Milliseconds of the steps that count, of the first ``upto`` steps only when given."""
    steps: list[float] = record["document"]["decode"]["step_ms"]
    return steps[warm_up(len(steps) if upto is None else min(upto, len(steps))) : upto]


def rate(record: Record, upto: int | None = None) -> float | None:
    """Tokens a second over the steps that count; None without one."""
    counted = step_ms(record, upto)
    return len(counted) / sum(counted) * 1e3 if counted and sum(counted) > 0 else None


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The geometric mean of values above zero with its bootstrap interval; None of nothing."""
    if not values:
        return None
    logs = [math.log(value) for value in values]
    middle = math.exp(math.fsum(logs) / len(logs))
    if len(logs) < FEWEST_PAIRS:
        return Interval(middle, None, None, len(logs))
    low, high = bootstrap_mean(logs)
    return Interval(middle, math.exp(low), math.exp(high), len(logs))


def rate_of(records: Iterable[Record]) -> Interval | None:
    """An arm's tokens a second over its runs."""
    return mean_interval([value for record in records if (value := rate(record)) is not None])


def ratios(ours: Iterable[Record], theirs: Iterable[Record]) -> list[float]:
    """One arm's rate over another's, one a cell that both ran, over the steps that both made.

    Several runs of an arm in one cell count as their geometric mean."""
    mine, others = _cells(ours), _cells(theirs)
    found = []
    for cell in mine:
        if cell not in others:
            continue
        together = [*mine[cell], *others[cell]]
        upto = min(len(record["document"]["decode"]["step_ms"]) for record in together)
        pair = [_mean_log(group[cell], upto) for group in (mine, others)]
        if pair[0] is not None and pair[1] is not None:
            found.append(math.exp(pair[0] - pair[1]))
    return found


def noise_floor(sentinel: Iterable[Record]) -> float | None:
    """By how much two equal arms differ over this many cells, as a share; None where it cannot be said.

    ``sentinel``: the runs of the arm that ran twice a cell. The floor is the end, farther from 1, of the interval of
    its second runs over its first ones."""
    runs = list(sentinel)
    pairs = ratios([run for run in runs if run.get("again")], [run for run in runs if not run.get("again")])
    found = mean_interval(pairs)
    if found is None or found.low is None or found.high is None:
        return None
    return max(found.high, 1 / found.low, 1 + LEAST_NOISE) - 1


def compare(ours: Iterable[Record], theirs: Iterable[Record], noise: float | None) -> Comparison | None:
    """What may be said of one arm against another; None where they share no cell.

    A word is given only when the whole interval of the ratio lies outside the noise floor; without a floor, never."""
    ratio = mean_interval(ratios(ours, theirs))
    if ratio is None:
        return None
    verdict = Verdict.NO_DIFFERENCE
    if noise is not None and ratio.low is not None and ratio.high is not None:
        if ratio.low > 1 + noise:
            verdict = Verdict.FASTER
        elif ratio.high < 1 / (1 + noise):
            verdict = Verdict.SLOWER
    return Comparison(ratio, noise, verdict)


def session_drift(records: Sequence[Record]) -> float | None:
    """How much faster (above 0) or slower the second half of a benchmark was than the first, as a share.

    Each run is held against the mean of its arm on its prompt, so what is compared is only when it ran; what ran once
    says nothing. ``records`` in the order they ran. None for fewer than 4 runs that say something."""
    groups: dict[tuple[str, str], list[float]] = {}
    logs: list[tuple[tuple[str, str], float]] = []
    for record in records:
        value = rate(record)
        if value is not None:
            key = record["arm"], record["prompt"]
            groups.setdefault(key, []).append(math.log(value))
            logs.append((key, math.log(value)))
    beside = [value - sum(groups[key]) / len(groups[key]) for key, value in logs if len(groups[key]) > 1]
    if len(beside) < 4:
        return None
    half = len(beside) // 2
    first, second = beside[:half], beside[-half:]
    return math.exp(sum(second) / half - sum(first) / half) - 1


def run_drift(record: Record) -> float | None:
    """How much faster (above 0) or slower the second half of a run's counted steps was, by medians; None for fewer
    than 8 steps."""
    counted = step_ms(record)
    if len(counted) < 8:
        return None
    half = len(counted) // 2
    return percentile(counted[:half], 50) / percentile(counted[-half:], 50) - 1


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation; of at least one value."""
    import numpy as np

    return float(np.percentile(values, percent))


def need_scipy() -> Any:
    """``scipy.stats``. Raises RefusedError, with the command that installs it, where there is none."""
    try:
        import scipy.stats
    except ImportError as error:
        raise lacking(error, "intervals", "scipy") from None
    return scipy.stats


def bootstrap_mean(logs: Sequence[float]) -> tuple[float, float]:
    """The ends of the percentile interval of a mean. (BCa has none for equal values, which a mock clock gives.)"""
    import numpy as np

    done = need_scipy().bootstrap(
        (np.asarray(logs),),
        np.mean,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    )
    return float(done.confidence_interval.low), float(done.confidence_interval.high)


def _cells(records: Iterable[Record]) -> dict[Cell, list[Record]]:
    found: dict[Cell, list[Record]] = {}
    for record in records:
        found.setdefault((record.get("round", 0), record["prompt"]), []).append(record)
    return found


def _mean_log(records: Sequence[Record], upto: int) -> float | None:
    values = [value for record in records if (value := rate(record, upto)) is not None]
    return sum(math.log(value) for value in values) / len(values) if values else None
