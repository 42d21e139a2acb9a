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

from moestream.assembly import translate
from moestream.box import Box
from moestream.core import _core
from moestream.errors import MoestreamError
from moestream.geometry import Geometry, slab_geometry, split_budget
from moestream.model import Model
from moestream.plan import Plan
from moestream.units import format_bytes

#: How often memory is looked at; the second where so little is left that a fast neighbour could take it meanwhile.
PERIOD_S, CLOSE_PERIOD_S = 0.1, 0.05
#: Below this much left (or half of what the load left, where that is less) pages are given back.
LOW_BYTES = 256 << 20
#: Share of the last ten seconds in which somebody stalled for memory, percent, that counts as want.
STALLED_PERCENT = 10.0
#: ... where less is left than this many times what is little. What a load leaves is twice that or more, and no want.
STALLED_LEFT = 1.5
#: What is given back at once, at least, and what is taken again: shares of the planned budget.
GIVE_SHARE, TAKE_SHARE = 1 / 8, 1 / 16
#: Memory left, in multiples of what counts as want, below which it is looked at more often.
CLOSE = 4
#: What others take is expected to go on at its rate for as long as it takes to answer: two looks and a step, which is
#: believed to last this long at most.
LONGEST_STEP_S = 2.0
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
    """What the budget should be, from what is left of memory: no clock and no kernel of its own. ``least_step``: bytes
    by which a budget can grow at all."""

    def __init__(self, planned: int, floor: int, left_at_load: int, least_step: int = 1) -> None:
        self.planned, self.floor = planned, min(floor, planned)
        self.low = min(LOW_BYTES, left_at_load // 2)
        self._least_step = least_step
        self._calm_since: float | None = None
        self._seen: tuple[float, int, int] | None = None
        self._rate = 0.0

    def __call__(self, held: int, memory: Memory, now: float, answer_s: float = 0.0) -> int:
        """Bytes of experts to hold from now on, where ``held`` are held and ``answer_s`` passes before it is so."""
        left = memory.left_bytes - self._taken_meanwhile(held, memory.left_bytes, now, answer_s)
        short = self.low - left
        stalls = memory.stalled_percent > STALLED_PERCENT and left < STALLED_LEFT * self.low
        if short > 0 or stalls:
            self._calm_since = None
            return max(self.floor, held - max(short, int(self.planned * GIVE_SHARE)))
        if self._calm_since is None:
            self._calm_since = now
        step = min(max(int(self.planned * TAKE_SHARE), self._least_step), self.planned - held)
        # What is taken must not bring the want back.
        if step > 0 and now - self._calm_since >= CALM_S and left - step > 2 * self.low:
            self._calm_since = now
            return held + step
        return held

    def _taken_meanwhile(self, held: int, left: int, now: float, answer_s: float) -> int:
        """What others will have taken before an answer to it counts, at the lower of the rates between the last three
        looks: what is taken once (this process's own buffers, at its first step) does not go on."""
        before, self._seen = self._seen, (now, left, held)
        if before is None or now <= before[0]:
            return 0
        then, left_then, held_then = before
        rate = (left_then + max(0, held_then - held) - left) / (now - then)
        lasting, self._rate = min(rate, self._rate), rate
        return max(0, int(lasting * answer_s))


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
        left = self._look().left_bytes
        decide = Decision(self._held, floor, left, max(part.pool_bytes(1) for part in geometry.parts))
        self._close = CLOSE * decide.low
        self.decide: Callable[[int, Memory, float, float], int] = decide
        self._wanted = self._held
        self._left = left
        self._step_s = 0.0
        self._began = time.monotonic()
        self._raised: BaseException | None = None
        self._ended = threading.Event()
        self.changes: list[Change] = []
        self.on_change: Callable[[Change], None] | None = None
        self._thread = threading.Thread(target=self._watch, name="moestream-governor", daemon=True)
        self._thread.start()

    def step(self, last_s: float = 0.0) -> None:
        """Between two steps, of which the last took ``last_s``: bring the budget to what is wanted. Called by whoever
        computes. Raises what ``on_change`` raised in the watching thread."""
        self._step_s = min(last_s, LONGEST_STEP_S)
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        self._move()

    def _move(self) -> None:
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
        period = PERIOD_S
        while not self._ended.wait(period):
            memory = self._look()
            self._left = memory.left_bytes
            period = CLOSE_PERIOD_S if memory.left_bytes < self._close else PERIOD_S
            answer_s = 2 * period + self._step_s
            self._wanted = self.decide(self._held, memory, time.monotonic(), answer_s)
            # Somebody computes: the change waits for the end of that step.
            if self._wanted != self._held and self._computing.acquire(blocking=False):
                try:
                    if not self._ended.is_set():
                        self._move()
                except MoestreamError:
                    return  # the store has failed, and says so at the next step
                except BaseException as error:  # a listener's: whoever computes next is to hear of it
                    self._raised = error
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
