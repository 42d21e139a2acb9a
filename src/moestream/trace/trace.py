"""A trace in memory: flat numpy arrays, the same whether they were just recorded or read from a file.

One *route* is what one layer (bank) chose in one step. Its rows are the step's tokens; each row holds ``k`` expert
numbers inside the bank, in the router's own order. ``wishes`` are the experts the engine asked for early after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestream.errors import RefusedError
from moestream.stats import Step

Int = NDArray[np.int64]

#: What ``_core.Engine.take_trace`` returns: the arrays of one step's events.
EVENTS = (
    "bank",
    "token",
    "tokens",
    "rows",
    "k",
    "wishes",
    "ids",
    "wish_ids",
    "slab_route",
    "slab_expert",
    "slab_slot",
    "slab_kind",
    "slab_bytes",
    "slab_issued_ns",
    "slab_ready_ns",
    "slab_needed_ns",
    "slab_waited_ns",
)
#: Slab kinds by number, as ``moestream/recorder.h`` numbers them.
SLAB_KINDS = ("demand", "speculative", "advised", "dropped")
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Routes:
    """``n`` routes in the order they happened.

    ``step``, ``bank``, ``token`` (tokens before the pass: the policies' clock), ``tokens`` of the pass, ``rows`` of
    ids and ``k`` ids a row: [n]. Rows are the pass's tokens; fewer in the last layer, which computes only the rows
    whose logits are wanted (the last ones); 1 where the choice was not seen and the whole bank was read.
    Route r's ids are ``ids[id_start[r]:id_start[r + 1]]``, row by row, numbers inside the bank; its wishes are
    ``wish_ids[wish_start[r]:wish_start[r + 1]]``, *global* expert numbers.
    """

    step: Int
    bank: Int
    token: Int
    tokens: Int
    rows: Int
    k: Int
    id_start: Int  # [n + 1]
    ids: NDArray[np.int32]
    wish_start: Int  # [n + 1]
    wish_ids: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.bank)

    def of(self, route: int) -> NDArray[np.int32]:
        """The ids of one route, [rows, k]."""
        ids = self.ids[self.id_start[route] : self.id_start[route + 1]]
        return ids.reshape(int(self.rows[route]), int(self.k[route]))


@dataclass(frozen=True)
class Slabs:
    """``n`` slab reads. ``step``: in which the event ended; ``route``: the route that caused it (-1: none);
    ``expert``: global; ``slot``: the tensor's place in its bank; ``kind``: a number of SLAB_KINDS. Times are
    CLOCK_MONOTONIC ns, 0 for what did not happen; ``waited_ns`` is how long a matmul slept for it."""

    step: Int
    route: Int
    expert: Int
    slot: Int
    kind: Int
    bytes: Int
    issued_ns: Int
    ready_ns: Int
    needed_ns: Int
    waited_ns: Int

    def __len__(self) -> int:
        return len(self.expert)


@dataclass(frozen=True)
class Trace:
    """``steps``: arrays [steps] named as the fields of ``stats.Step`` plus ``phase`` (a number of PHASES).

    ``meta``: ``versions``, ``box``, ``mechanism`` (canonical text), ``budget``, ``command``, and ``model`` with
    ``identity``, ``arch``, ``name``, ``layers`` (of each bank), ``experts`` and ``used`` (of each bank),
    ``slab_bytes`` (of each bank, by slot), ``parts`` (each {"banks", "frame_bytes"}) and ``capacities`` (experts,
    by part; empty where the mechanism has no cache). Global expert numbers count through the banks in order.
    """

    meta: dict[str, Any]
    routes: Routes
    slabs: Slabs
    steps: dict[str, NDArray[Any]]

    @property
    def experts(self) -> list[int]:
        """Experts of each bank."""
        return [int(count) for count in self.meta["model"]["experts"]]

    @property
    def first_expert(self) -> Int:
        """The global number of expert 0 of each bank, and the number of all at the end: [banks + 1]."""
        return np.concatenate([[0], np.cumsum(self.experts)]).astype(np.int64)

    @property
    def identity(self) -> str:
        return str(self.meta["model"]["identity"])


def no_routes(trace: Trace, name: str) -> RefusedError:
    """What is said of a trace that holds no route, or none of which a token's choice is known."""
    if not len(trace.steps.get("step", ())):
        return RefusedError(f"{name} holds no steps, and so no routes: record a run that makes some text")
    what = "no token's choice, only banks that were read whole," if len(trace.routes) else "no routes"
    return RefusedError(
        f"{name} holds {what} (it was recorded under {trace.meta['mechanism']}): record one under a mechanism that "
        "looks at what the router chose, as with `moestream run --mechanism arena --trace FILE`"
    )


class TraceBuilder:
    """Collects steps into a Trace: a TraceSink that keeps everything in memory."""

    def __init__(self, meta: dict[str, Any] | None = None) -> None:
        self.meta = meta or {}
        self._routes: list[dict[str, Any]] = []
        self._slabs: list[dict[str, Any]] = []
        self._steps: dict[str, list[Any]] = {}

    def begin(self, meta: dict[str, Any]) -> None:
        self.meta = meta

    def step(self, index: int, phase: str, step: Step, events: Mapping[str, Any]) -> None:
        self.add(index, phase, asdict(step), events)

    def close(self, events: Mapping[str, Any] | None = None) -> None:
        """``events``: the slabs that no step has finished."""
        if events is not None and self._slabs:
            slabs = {name.removeprefix("slab_"): events[name] for name in EVENTS[8:]}
            self._slabs.append({**slabs, "step": self._slabs[-1]["step"]})

    def discard(self) -> None:
        self._routes.clear()
        self._slabs.clear()
        self._steps.clear()

    def add(self, index: int, phase: str, step: Mapping[str, Any], events: Mapping[str, Any]) -> None:
        """One step: its number, 'prefill' or 'decode', the fields of its ``Step``, the arrays of EVENTS."""
        self._routes.append({**{name: events[name] for name in EVENTS[:8]}, "step": index})
        slabs = {name.removeprefix("slab_"): events[name] for name in EVENTS[8:]}
        self._slabs.append({**slabs, "step": index})
        for name, value in {**step, "step": index, "phase": PHASES.index(phase)}.items():
            self._steps.setdefault(name, []).append(value)

    def build(self) -> Trace:
        return Trace(self.meta, self._build_routes(), self._build_slabs(), self._build_steps())

    def _build_routes(self) -> Routes:
        def column(name: str) -> Int:
            return _joined([part[name] for part in self._routes], np.int64)

        rows, k, wishes = column("rows"), column("k"), column("wishes")
        return Routes(
            step=_joined([np.full(len(part["bank"]), part["step"]) for part in self._routes], np.int64),
            bank=column("bank"),
            token=column("token"),
            tokens=column("tokens"),
            rows=rows,
            k=k,
            id_start=starts(rows * k),
            ids=_joined([part["ids"] for part in self._routes], np.int32),
            wish_start=starts(wishes),
            wish_ids=_joined([part["wish_ids"] for part in self._routes], np.int32),
        )

    def _build_slabs(self) -> Slabs:
        step = _joined([np.full(len(part["expert"]), part["step"]) for part in self._slabs], np.int64)
        columns = {
            field.name: _joined([part[field.name] for part in self._slabs], np.int64)
            for field in fields(Slabs)
            if field.name not in ("step", "route")
        }
        # The core counts the routes before the event; the last of them caused it.
        route = _joined([part["route"] for part in self._slabs], np.int64) - 1
        return Slabs(step=step, route=route, **columns)

    def _build_steps(self) -> dict[str, NDArray[Any]]:
        return {name: np.asarray(values) for name, values in self._steps.items()}


def starts(counts: Int) -> Int:
    """Where each of consecutive runs of these lengths starts, and where the last ends: [n + 1]."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _joined(arrays: list[Any], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)
