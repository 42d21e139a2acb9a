"""What of several experiments is being run and how long they will take, on the benchmark's own display."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from moestream.lab.bench_arms import Arm
from moestream.lab.bench_progress import Display
from moestream.lab.experiment_plan import PROBE, Step
from moestream.lab.schedule import Slot

#: Before estimates of so many seconds have come to pass, nobody knows how far off they are.
_KNOWN_AFTER_S = 60.0


class Watch(Protocol):
    """Told how one experiment gets on."""

    def begin(self, step: Step) -> None:
        """A run, or the probe, begins."""

    def end(self, step: Step, record: Mapping[str, Any] | None) -> None:
        """It has ended with this record; None: it was not run, or leaves none."""

    def note(self, text: str) -> None:
        """Something to be told beside it."""


class Unwatched:
    """A ``Watch`` that tells nobody."""

    def begin(self, step: Step) -> None:
        """Nobody is told."""

    def end(self, step: Step, record: Mapping[str, Any] | None) -> None:
        """Nobody is told."""

    def note(self, text: str) -> None:
        """Nobody is told."""


class Progress:
    """A ``Watch`` of experiments one after another. ``estimates``: by experiment how long each of its steps will take;
    the time left is what is estimated of the rest, as much longer as what is over took than it was estimated to."""

    def __init__(
        self, show: Display, estimates: Mapping[str, Mapping[Step, float]], clock: Callable[[], float]
    ) -> None:
        self._show, self._clock = show, clock
        self._names = list(estimates)
        self._left = {name: dict(steps) for name, steps in estimates.items()}
        self._total = sum(map(len, estimates.values()))
        self._name = ""
        self._estimated_s = self._took_s = self._begun = 0.0

    def enter(self, name: str) -> None:
        """From now on steps are of the experiment of that name."""
        self._name = name

    def leave(self) -> None:
        """Whatever of the experiment was not run will not be."""
        self._left[self._name].clear()

    def begin(self, step: Step) -> None:
        self._begun = self._clock()
        rest = sum(map(len, self._left.values()))
        self._show.begin(self._slot(step), self._total - rest + 1, self._total, self.left_s())

    def end(self, step: Step, record: Mapping[str, Any] | None) -> None:
        estimated = self._left[self._name].pop(step, 0.0)
        if record is None and step != PROBE:
            return
        self._estimated_s += estimated
        self._took_s += self._clock() - self._begun
        if record is not None:
            self._show.end(self._slot(step), dict(record))

    def note(self, text: str) -> None:
        self._show.note(text)

    def left_s(self) -> float:
        """Seconds until everything is over."""
        pace = self._took_s / self._estimated_s if self._estimated_s >= _KNOWN_AFTER_S else 1.0
        return pace * sum(sum(steps.values()) for steps in self._left.values())

    def _slot(self, step: Step) -> Slot:
        arm, prompt, number = step
        where = f"{self._name}, {self._names.index(self._name) + 1} of {len(self._names)}"
        return Slot(number, 0, prompt or "the disk", Arm(f"{arm} ({where})", None, None))
