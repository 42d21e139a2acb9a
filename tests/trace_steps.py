"""Steps made by hand and written as a trace, for tests of trace files."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from moestream.stats import Step
from moestream.trace import EVENTS, Trace, TraceBuilder
from moestream.trace.write import FLUSH_STEPS, TraceWriter
from replay_traces import events, meta

EXPERTS = [4, 4, 8]
META = meta(EXPERTS, 2, [([0, 1, 2], 4096)], [6])


def a_step(number: int = 0, tokens: int = 1, **values: Any) -> Step:
    """A step whose every figure is another number."""
    figures = {field.name: (number + 1) * 100 + i for i, field in enumerate(fields(Step))}
    figures |= {name: figures[name] / 7 for name in ("seconds", "stall_s", "memory_work_s")}
    return Step(**{**figures, "tokens": tokens, **values})


def with_slabs(recorded: dict[str, Any], slabs: list[tuple[int, ...]]) -> dict[str, Any]:
    """``slabs``: route (as the core counts), expert, slot, kind, bytes, issued, ready, needed, waited."""
    columns = np.array(slabs, np.int64).reshape(-1, 9).T
    return {**recorded, **dict(zip(EVENTS[8:], columns, strict=True))}


def same(one: Trace, other: Trace) -> None:
    for kind in ("routes", "slabs"):
        for field in fields(getattr(one, kind)):
            a, b = getattr(getattr(one, kind), field.name), getattr(getattr(other, kind), field.name)
            np.testing.assert_array_equal(a, b, err_msg=f"{kind}.{field.name}")
            assert a.dtype == b.dtype, f"{kind}.{field.name}"
    assert set(one.steps) == set(other.steps)
    for name in one.steps:
        np.testing.assert_array_equal(one.steps[name], other.steps[name], err_msg=name)
    assert one.meta.items() <= {**other.meta, "versions": one.meta.get("versions")}.items()


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def silent(text: str) -> None:
    raise AssertionError(f"said {text!r} of a whole trace")


def record(path: Path, steps: list[tuple[str, Step, dict[str, Any]]], last: Any = None) -> Trace:
    """Write the steps to a file and keep them in memory too: the latter."""
    builder = TraceBuilder(dict(META))
    with TraceWriter(path, meta=META) as writer:
        for number, (phase, step, recorded) in enumerate(steps):
            for sink in (writer, builder):
                sink.step(number, phase, step, recorded)
        for sink in (writer, builder):
            sink.close(last)
    return builder.build()


def three_steps() -> list[tuple[str, Step, dict[str, Any]]]:
    """A prompt of two tokens and two more: one miss in each step."""
    prompt = events([(0, [[0, 1], [1, 2]], [5]), (2, [[7, 0], [3, 3]], [])], 0)
    steps = [("prefill", a_step(0, 2), with_slabs(prompt, [(1, 1, 0, 0, 64, 10, 20, 30, 40)]))]
    for number in (1, 2):
        recorded = events([(0, [[1, 0]], []), (2, [[6, 7]], [4, 5])], number + 1)
        slabs = [(2 * number + 2, 14, 1, 1, 32, 50, 0, 0, 0)]
        steps.append(("decode", a_step(number), with_slabs(recorded, slabs)))
    return steps


def cut_short(path: Path, steps: int = FLUSH_STEPS + 3) -> None:
    """Leave what a process that died in the middle leaves."""
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from trace_steps import META, TraceWriter, a_step, events\n"
        "writer = TraceWriter(sys.argv[1], meta=META)\n"
        f"for number in range({steps}):\n"
        "    writer.step(number, 'decode', a_step(number), events([(0, [[1, 0]], [])], number))\n"
        "os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path), str(Path(__file__).parent)])
    assert done.returncode == 9
