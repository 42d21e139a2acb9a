"""The order of runs: rounds whose order turns round, with one arm that brackets every block. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moestream.lab.bench_arms import Arm


@dataclass(frozen=True)
class Slot:
    """One run to be made. ``round`` and ``position`` (inside the round) count from 0; ``again``: the sentinel's
    second run of a block."""

    round: int
    position: int
    prompt: str
    arm: Arm
    again: bool = False

    @property
    def name(self) -> tuple[int, int]:
        """What identifies it among the runs of one benchmark."""
        return self.round, self.position


def schedule(arms: Sequence[Arm], prompts: Sequence[str], repeats: int, sentinel: str | None) -> list[Slot]:
    """Every run in its order, ``repeats`` rounds of every arm on every prompt.

    A block is one prompt of one round: the arm with the key ``sentinel``, the others, and the sentinel again. The
    others run in the order opposite to the block before, and to the same prompt's in the last round (ABBA), so that
    a disk or a processor that drifts favours no arm."""
    slots = []
    for number in range(repeats):
        position = 0
        for place, prompt in enumerate(prompts):
            mine = [arm for arm in arms if arm.prompts is None or prompt in arm.prompts]
            ends = [arm for arm in mine if arm.key == sentinel]
            others = [(arm, False) for arm in mine if arm.key != sentinel]
            if (number + place) % 2:
                others.reverse()
            block = [(arm, False) for arm in ends] + others + [(arm, True) for arm in ends]
            for arm, again in block:
                slots.append(Slot(number, position, prompt, arm, again))
                position += 1
    return slots


def time_left(took_s: Mapping[str, Sequence[float]], todo: Sequence[Slot]) -> float | None:
    """Seconds the runs of ``todo`` will take by what runs of each arm took so far; None before the first has ended.

    An arm that has not run yet counts as the mean of all that have."""
    everything = [seconds for arm in took_s.values() for seconds in arm]
    if not everything:
        return None
    mean = sum(everything) / len(everything)
    total = 0.0
    for slot in todo:
        seconds = took_s.get(slot.arm.key)
        total += sum(seconds) / len(seconds) if seconds else mean
    return total
