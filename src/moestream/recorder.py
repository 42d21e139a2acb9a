"""One record per ``llama_decode``: what it took and what the store did meanwhile."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moestream.stats import Step, phase_summary

_NS = 1e-9
#: Steps kept of one call; a longer call keeps its last ones (a day of tokens at ten a second fits).
MAX_STEPS = 1 << 20


def _read_bytes_os() -> int:
    """Bytes this process had the device read, by the kernel's account; 0 where the kernel keeps none."""
    try:
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    except OSError:
        return 0
    return 0


class Recorder:
    """Keeps the steps of the last call and a running total since load. Not thread-safe: one decode at a time."""

    def __init__(self, counters: Callable[[], dict[str, int]]) -> None:
        self._counters = counters
        self.last: list[Step] = []
        self.all: list[Step] = []

    def begin_call(self) -> None:
        self.last = []

    def stop(self) -> None:
        """Record no more: lets go of what the counters belong to, keeps the steps."""
        self._counters = dict

    def measure(self, tokens: int, run: Callable[[], Any]) -> Any:
        """Run one step and record it, whether it succeeds or not."""
        before = self._counters()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        read = _read_bytes_os()
        start = time.perf_counter()
        try:
            return run()
        finally:
            seconds = time.perf_counter() - start
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
            for steps in (self.last, self.all):
                if len(steps) >= MAX_STEPS:
                    del steps[: MAX_STEPS // 2]
                steps.append(step)


def split_phases(steps: list[Step]) -> tuple[list[Step], list[Step]]:
    """Prefill and decode: a step of several tokens, or the first of a call, is prefill."""
    prefill = [step for i, step in enumerate(steps) if step.tokens > 1 or i == 0]
    decode = [step for i, step in enumerate(steps) if step.tokens == 1 and i > 0]
    return prefill, decode


def summary(steps: list[Step]) -> dict[str, Any]:
    prefill, decode = split_phases(steps)
    return {"prefill": phase_summary(prefill), "decode": phase_summary(decode)}
