"""Traces made by hand as files, for tests of what reads them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np

from moestream.stats import Step
from moestream.trace.trace import EVENTS, PHASES, Trace
from moestream.trace.write import TraceWriter


def save_trace(trace: Trace, path: Path) -> Path:
    """Write the trace's routes and steps; figures of its steps that it does not hold are 0."""
    routes = trace.routes
    with TraceWriter(path, meta=trace.meta) as writer:
        for at, number in enumerate(trace.steps["step"].tolist()):
            events = {name: np.empty(0, np.int64) for name in EVENTS}
            mine = np.nonzero(routes.step == number)[0]
            for name in ("bank", "token", "tokens", "rows", "k"):
                events[name] = getattr(routes, name)[mine]
            events["wishes"] = np.diff(routes.wish_start)[mine]
            first, last = (int(mine[0]), int(mine[-1]) + 1) if len(mine) else (0, 0)
            events["ids"] = routes.ids[routes.id_start[first] : routes.id_start[last]]
            events["wish_ids"] = routes.wish_ids[routes.wish_start[first] : routes.wish_start[last]]
            figures = {
                f.name: trace.steps[f.name][at].item() if f.name in trace.steps else 0 for f in fields(Step)
            }
            writer.step(number, PHASES[trace.steps["phase"][at]], Step(**figures), events)
    return path
