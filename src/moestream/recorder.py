"""One record per ``llama_decode``: what it took and what the store did meanwhile."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from moestream.box.accounts import process_counter
from moestream.stats import Phase, Step

_NS = 1e-9
#: Steps of a phase that are kept one by one, about half a kilobyte each: of one call, and of all since the load.
CALL_STEPS, LOAD_STEPS = 1 << 15, 1 << 12


def _read_bytes_os() -> int:
    """Bytes this process had the device read, by the kernel's account; 0 where the kernel keeps none."""
    return process_counter() or 0


#: The core's counters of a model that has no store: a dense one, or stock llama.cpp.
NO_COUNTERS = dict.fromkeys(
    (
        "hits",
        "misses",
        "bytes",
        "stall_ns",
        "memory_ns",
        "speculative_issued",
        "speculative_used",
        "speculative_wasted_bytes",
    ),
    0,
)


class Phases:
    """The steps that read a prompt and those that made text. A small budget runs a prompt one token a step, so a
    step's size does not tell which it was: the caller does."""

    def __init__(self, kept: int) -> None:
        self.prefill, self.decode = Phase(kept), Phase(kept)

    @property
    def steps(self) -> list[Step]:
        """Those that are kept, oldest first."""
        return [*self.prefill.steps, *self.decode.steps]

    def summary(self) -> dict[str, Any]:
        return {"prefill": self.prefill.summary(), "decode": self.decode.summary()}


class Recorder:
    """Keeps the steps of the last call and all since load. Not thread-safe: one decode at a time.

    ``reading_prompt``: what the next steps are; the owner sets it. ``last_s``: seconds of the last step.
    ``on_step`` is told each step's number since load, its phase and what it did.
    """

    def __init__(self, counters: Callable[[], dict[str, int]]) -> None:
        self._counters = counters
        self.last = Phases(CALL_STEPS)
        self.all = Phases(LOAD_STEPS)
        self.reading_prompt = True
        self.last_s = 0.0
        self.on_step: Callable[[int, str, Step], None] | None = None
        self._count = 0

    def begin_call(self) -> None:
        self.last = Phases(CALL_STEPS)
        self.reading_prompt = True

    def stop(self) -> None:
        """Record no more: lets go of what the counters belong to, keeps the steps."""
        self._counters = dict
        self.on_step = None

    def measure(self, tokens: int, run: Callable[[], Any]) -> Any:
        """Run one step and record it, whether it succeeds or not."""
        before = self._counters()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        read = _read_bytes_os()
        start = time.perf_counter()
        try:
            return run()
        finally:
            seconds = self.last_s = time.perf_counter() - start
            after = self._counters()
            now = resource.getrusage(resource.RUSAGE_SELF)

            def delta(name: str) -> int:
                return after[name] - before[name]

            step = Step(
                tokens=tokens,
                seconds=seconds,
                hits=delta("hits"),
                misses=delta("misses"),
                bytes_read=delta("bytes"),
                stall_s=delta("stall_ns") * _NS,
                memory_work_s=delta("memory_ns") * _NS,
                speculative_issued=delta("speculative_issued"),
                speculative_used=delta("speculative_used"),
                speculative_wasted_bytes=delta("speculative_wasted_bytes"),
                majflt=now.ru_majflt - usage.ru_majflt,
                minflt=now.ru_minflt - usage.ru_minflt,
                read_bytes_os=_read_bytes_os() - read,
            )
            for phases in (self.last, self.all):
                (phases.prefill if self.reading_prompt else phases.decode).add(step)
            if self.on_step is not None:
                self.on_step(self._count, "prefill" if self.reading_prompt else "decode", step)
            self._count += 1
