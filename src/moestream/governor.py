"""Gives expert pages back while others need memory, and takes them again when they no longer do.

A plan divides what a machine has at the time of the load; what starts later was not asked. The governor watches the
memory that is left (of the machine, and of every cgroup above this process) and the kernel's own account of stalls
for want of it, and moves the budget of experts between the fewest that one step needs and what was planned. Fewer
experts mean more reads, never another text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import moestream._core as _core
from moestream.assembly import translate
from moestream.box import Box
from moestream.errors import MoestreamError
from moestream.geometry import Geometry, slab_geometry, split_budget
from moestream.model import Model
from moestream.plan import Plan
from moestream.units import format_bytes

#: How often memory is looked at.
PERIOD_S = 0.1
#: Below this much left (or half of what the load left, where that is less) pages are given back.
LOW_BYTES = 256 << 20
#: Share of the last ten seconds in which somebody stalled for memory, percent, that counts as want.
STALLED_PERCENT = 10.0
#: What is given back at once, at least, and what is taken again: shares of the planned budget.
GIVE_SHARE, TAKE_SHARE = 1 / 8, 1 / 16
#: Seconds without want before pages are taken again, and between two such steps.
CALM_S = 5.0


@dataclass(frozen=True)
class Memory:
    """``left_bytes``: what this process could still take; ``stalled_percent``: PSI's some avg10, 0 where unknown."""

    left_bytes: int
    stalled_percent: float = 0.0


@dataclass(frozen=True)
class Change:
    """One move of the budget, seconds since the governor began. ``bytes``: of experts, after it."""

    at_s: float
    before_bytes: int
    bytes: int
    left_bytes: int

    def __str__(self) -> str:
        moved = format_bytes(abs(self.bytes - self.before_bytes))
        what = "gave back" if self.bytes < self.before_bytes else "took again"
        return (
            f"{what} {moved} of expert pages: {format_bytes(self.left_bytes)} of memory left, "
            f"{format_bytes(self.bytes)} for experts now"
        )


class Decision:
    """What the budget should be, from what is left of memory: no clock and no kernel of its own."""

    def __init__(self, planned: int, floor: int, left_at_load: int) -> None:
        self.planned, self.floor = planned, min(floor, planned)
        self.low = min(LOW_BYTES, left_at_load // 2)
        self._calm_since: float | None = None

    def __call__(self, held: int, memory: Memory, now: float) -> int:
        """Bytes of experts to hold from now on, where ``held`` are held."""
        short = self.low - memory.left_bytes
        stalls = memory.stalled_percent > STALLED_PERCENT and memory.left_bytes < 2 * self.low
        if short > 0 or stalls:
            self._calm_since = None
            return max(self.floor, held - max(short, int(self.planned * GIVE_SHARE)))
        if self._calm_since is None:
            self._calm_since = now
        step = min(int(self.planned * TAKE_SHARE), self.planned - held)
        # What is taken must not bring the want back.
        if step > 0 and now - self._calm_since >= CALM_S and memory.left_bytes - step > 2 * self.low:
            self._calm_since = now
            return held + step
        return held


class Governor:
    """Watches from a thread; changes the budget only where ``resize`` may be called: between steps, or while nothing
    runs (``computing`` is held meanwhile)."""

    def __init__(
        self,
        resize: Callable[[Sequence[int]], Sequence[int]],
        geometry: Geometry,
        capacities: Sequence[int],
        n_batch: int,
        computing: threading.RLock,
        look: Callable[[], Memory] | None = None,
    ) -> None:
        self._resize, self._geometry, self._n_batch = resize, geometry, n_batch
        self._look = look or Watch(Box())
        self._computing = computing
        self._held = geometry.bytes_of(capacities)
        floor = geometry.bytes_of(geometry.smallest(n_batch))
        self.decide = Decision(self._held, floor, self._look().left_bytes)
        self._wanted = self._held
        self._left = 0
        self._began = time.monotonic()
        self._ended = threading.Event()
        self.changes: list[Change] = []
        self.on_change: Callable[[Change], None] | None = None
        self._thread = threading.Thread(target=self._watch, name="moestream-governor", daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Between two steps: bring the budget to what is wanted. Called by whoever computes."""
        if self._wanted == self._held:
            return
        before = self._held
        reached = self._resize(split_budget(self._geometry, self._wanted, self._n_batch))
        # In whole experts, and no fewer than the policy can part with.
        self._held = self._wanted = self._geometry.bytes_of(reached)
        if self._held == before:
            return
        change = Change(time.monotonic() - self._began, before, self._held, self._left)
        self.changes.append(change)
        if self.on_change is not None:
            self.on_change(change)

    def _watch(self) -> None:
        while not self._ended.wait(PERIOD_S):
            memory = self._look()
            self._left = memory.left_bytes
            self._wanted = self.decide(self._held, memory, time.monotonic())
            # Somebody computes: the change waits for the end of that step.
            if self._wanted != self._held and self._computing.acquire(blocking=False):
                try:
                    if not self._ended.is_set():
                        self.step()
                except MoestreamError:
                    return  # the store has failed, and says so at the next step
                finally:
                    self._computing.release()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def govern(engine: Any, model: Model, plan: Plan | None, computing: threading.RLock) -> Governor | None:
    """A governor where the budget can move: an arena's, unless its policy holds it fixed. ``engine``: the core's."""
    if plan is None or not plan.capacities or plan.mechanism.store != "arena":
        return None
    if plan.mechanism.file_of("policy") is not None:
        return None

    def resize(capacities: Sequence[int]) -> Sequence[int]:
        try:
            return list(engine.resize(list(capacities)))
        except _core.CoreError as error:
            raise translate(error) from None

    return Governor(resize, slab_geometry(model), plan.capacities, plan.n_batch, computing)


class Watch:
    """Memory as a box tells it."""

    def __init__(self, box: Box) -> None:
        self._box = box

    def __call__(self) -> Memory:
        return Memory(self._box.available_memory(), self._box.stalled_percent())
