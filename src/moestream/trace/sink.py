"""Where a running engine's steps go, and what a trace says about the run it is of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moestream.box import Box
from moestream.geometry import slab_geometry
from moestream.plan import Plan
from moestream.stats import Step
from moestream.version import __version__

if TYPE_CHECKING:
    from moestream.model import Model

#: What recording takes beyond what making a file's writer took: batches on their way and their compression.
WORKING_BYTES = 16 << 20


class TraceSink(Protocol):
    """``begin`` once, when everything is loaded; ``step`` after each step; ``close`` with what no step finished."""

    def begin(self, meta: dict[str, Any]) -> None: ...
    def step(self, index: int, phase: str, step: Step, events: Mapping[str, Any]) -> None: ...
    def close(self, events: Mapping[str, Any] | None = None) -> None: ...
    def discard(self) -> None:
        """Nothing came of it: leave nothing behind."""
        ...


def open_trace(trace: str | Path | TraceSink, model: Model) -> TraceSink:
    """The sink a ``trace=`` argument names: a file's writer, or the sink itself. Raises UsageError on a file that
    cannot be written or must not be replaced."""
    if not isinstance(trace, str | Path):
        return trace
    from moestream.trace.write import TraceWriter

    return TraceWriter(Path(trace), model.paths)


def trace_meta(model: Model, plan: Plan, mechanism: str, fallbacks: list[str]) -> dict[str, Any]:
    """What ``Trace.meta`` holds."""
    geometry = slab_geometry(model)
    return {
        "versions": {"moestream": __version__},
        "box": Box().describe(model.paths[0]),
        "mechanism": mechanism,
        "fallbacks": list(fallbacks),
        "budget": {
            name: getattr(plan, name)
            for name in (
                "cap_bytes",
                "dense_bytes",
                "kv_bytes",
                "compute_bytes",
                "other_bytes",
                "expert_bytes",
            )
        },
        "n_batch": plan.n_batch,
        "model": {
            "identity": model.identity,
            "arch": model.arch,
            "name": model.name,
            "bytes": model.bytes,
            "dense_bytes": model.dense_bytes,
            "expert_bytes": model.expert_bytes,
            "demand_bytes_per_token": model.demand_bytes_per_token,
            "layers": [bank.layer for bank in model.banks],
            "experts": [bank.count for bank in model.banks],
            "used": [bank.used for bank in model.banks],
            "roles": [[tensor.role for tensor in bank.tensors] for bank in model.banks],
            "slab_bytes": [[tensor.slab_bytes for tensor in bank.tensors] for bank in model.banks],
            "parts": [
                {"banks": list(part.banks), "frame_bytes": part.frame_bytes} for part in geometry.parts
            ],
            "capacities": list(plan.capacities),
        },
    }
