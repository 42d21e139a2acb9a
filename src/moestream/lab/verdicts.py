"""From figures to a verdict: ``agrees``, ``disagrees`` or ``cannot tell``, and never a word inside the noise.

Pure functions. A claim is judged on all its values, not on their mean: it agrees when the whole interval lies within
the claim's bounds, disagrees when the whole interval lies outside, and else nothing can be said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moestream.lab.experiment import Claim
from moestream.lab.experiment_figures import FIGURES
from moestream.lab.statistics import bootstrap_mean, ratios
from moestream.units import format_bytes

AGREES, DISAGREES, CANNOT_TELL = "agrees", "disagrees", "cannot tell"
#: Two equal arms differ by this much (measured by others on a quiet box as 6 %): no timed figure is known better, and
#: not better than an experiment's own repeats show.
NOISE = 0.06
#: The figure that is compared over the steps that both arms made.
RATE = "tok_per_s"
#: A timed figure of fewer values says nothing.
FEWEST_TIMED = 2
#: Fewer values than this have a range; more, a bootstrap interval of their mean.
FEWEST_BOOTSTRAP = 5


@dataclass(frozen=True)
class Sample:
    """One observation: ``arm`` as claims name it; ``prompt`` and ``round`` (or layer) pair it with other arms';
    ``figures`` by name, what is not known left out. ``record``: of the run it was seen in."""

    arm: str
    prompt: str
    round: int
    figures: Mapping[str, float]
    record: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Interval:
    """``value``: the mean (of ratios the geometric one); ``low``, ``high``: where it may be; ``n``: of how many."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Judged:
    """A claim with what was seen. ``interval`` is None where nothing was; ``why``: a sentence for the word."""

    claim: Claim
    word: str
    interval: Interval | None
    why: str

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        interval = asdict(self.interval) if self.interval is not None else None
        return {**asdict(self.claim), "word": self.word, "seen": interval, "why": self.why}


def judge(claim: Claim, samples: Sequence[Sample], noise: float = NOISE) -> Judged:
    """Compare a claim with what was seen. ``noise``: no timed figure is known better than that, as a share."""
    timed = FIGURES[claim.figure].timed
    values = seen(claim, samples)
    if not values:
        mine = _asked_for(claim, samples)
        lacking = [arm for arm in claim.arms if not _by_pair(arm, claim.figure, mine)]
        what = (
            f"no valid value of {' or of '.join(lacking)}"
            if lacking
            else "no two values that belong together"
        )
        return Judged(claim, CANNOT_TELL, None, what)
    made = interval(values, ratio=claim.over is not None, noise=noise if timed else 0.0)
    if timed and len(values) < FEWEST_TIMED:
        return Judged(
            claim, CANNOT_TELL, made, f"{len(values)} value of a time: {FEWEST_TIMED} or more are needed"
        )
    low = claim.at_least if claim.at_least is not None else -math.inf
    high = claim.at_most if claim.at_most is not None else math.inf
    if low <= made.low and made.high <= high:
        return Judged(claim, AGREES, made, "the whole interval is within the bounds")
    if made.high < low or made.low > high:
        return Judged(claim, DISAGREES, made, "the whole interval is outside the bounds")
    return Judged(
        claim, CANNOT_TELL, made, "the interval lies across a bound: more repeats, or a quieter box"
    )


def overall(judged: Sequence[Judged]) -> str:
    """One word for all claims: any that disagrees decides; all must agree to agree."""
    words = [one.word for one in judged]
    if DISAGREES in words:
        return DISAGREES
    return AGREES if words and all(word == AGREES for word in words) else CANNOT_TELL


def seen(claim: Claim, samples: Sequence[Sample]) -> list[float]:
    """The claim's values: the figure's, or ratios of two arms' figures of the same prompt and round."""
    mine = _asked_for(claim, samples)
    if claim.over is None:
        return list(_by_pair(claim.of, claim.figure, mine).values())
    above, below = _ordered(claim, claim.over, mine)
    if claim.figure == RATE and (pairs := _over_common_steps(above, below, mine)):
        return pairs
    ours, theirs = (_by_pair(arm, claim.figure, mine) for arm in (above, below))
    return [ours[pair] / theirs[pair] for pair in ours if theirs.get(pair)]


def _asked_for(claim: Claim, samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if claim.prompt is None or sample.prompt == claim.prompt]


def _ordered(claim: Claim, over: str, samples: Sequence[Sample]) -> tuple[str, str]:
    """The arm that stands above, and the other: as the claim names them, or the one with more of ``larger`` first."""
    if claim.larger is None:
        return claim.of, over
    sizes = [sum(_by_pair(arm, claim.larger, samples).values()) for arm in (claim.of, over)]
    return (claim.of, over) if sizes[0] >= sizes[1] else (over, claim.of)


def _over_common_steps(above: str, below: str, samples: Sequence[Sample]) -> list[float]:
    """Ratios of two arms' rates over the steps that both made, as the bench compares them; [] without records."""
    ours, theirs = (
        [dict(one.record) for one in samples if one.arm == arm and one.record is not None]
        for arm in (above, below)
    )
    return ratios(ours, theirs)


def interval(values: Sequence[float], *, ratio: bool, noise: float) -> Interval:
    """Where the mean of at least one value may be: their range, or of many a bootstrap interval; ``noise`` wider on
    both sides. Ratios are averaged by their logarithms, where they all have one."""
    logs = ratio and all(value > 0 for value in values)
    scaled = [math.log(value) if logs else value for value in values]
    mean = math.fsum(scaled) / len(scaled)
    low, high = min(scaled), max(scaled)
    if len(scaled) >= FEWEST_BOOTSTRAP and low < high:
        low, high = bootstrap_mean(scaled)
    if logs:
        mean, low, high = math.exp(mean), math.exp(low), math.exp(high)
    return Interval(mean, low - abs(low) * noise, high + abs(high) * noise, len(values))


def _by_pair(arm: str, figure: str, samples: Sequence[Sample]) -> dict[tuple[str, int], float]:
    """The arm's values of a figure, by what pairs them with another arm's."""
    return {
        (sample.prompt, sample.round): sample.figures[figure]
        for sample in samples
        if sample.arm == arm and figure in sample.figures
    }


def table(figures: Sequence[str], samples: Sequence[Sample]) -> dict[str, dict[str, Interval]]:
    """By arm (in the order they were seen) and figure, its mean and range."""
    made: dict[str, dict[str, Interval]] = {}
    for arm in dict.fromkeys(sample.arm for sample in samples):
        mine = [sample for sample in samples if sample.arm == arm]
        made[arm] = {
            name: interval(values, ratio=False, noise=0.0)
            for name in figures
            if (values := [sample.figures[name] for sample in mine if name in sample.figures])
        }
    return made


def shown(value: float, unit: str) -> str:
    """A figure for people."""
    if unit in ("B", "B/s"):
        return format_bytes(value) + unit[1:]
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    return f"{value:.1%}" if unit == "share" else f"{value:.3g}"
