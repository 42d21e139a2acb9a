"""Everything ``moestream analyze`` says of a trace, as one document of plain JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moestream.analyze import misses, predictors, routing
from moestream.analyze.choices import from_trace
from moestream.analyze.steps import Progress, silent
from moestream.errors import MechanismError, RefusedError
from moestream.mechanism import DEFAULT, Mechanism

if TYPE_CHECKING:
    from moestream.replay.curves import Budget
    from moestream.replay.run import Recording
    from moestream.trace.trace import Trace

VERSION = 1


def cache_policy(mechanism: str) -> str:
    """The policy that misses are counted under: the trace's own, or the default's where that had no cache of its own
    or needs a file to be replayed."""
    own = Mechanism.parse(mechanism)
    name = own.policy.partition(":")[0]
    return (
        own.policy if own.store == "arena" and name not in ("none", "pinned", "dontneed") else DEFAULT.policy
    )


def analyze(
    trace: Trace, recording: Recording, budgets: Sequence[Budget], progress: Progress = silent
) -> dict[str, Any]:
    """``recording``: the same trace, prepared for replay. Shares are from 0 to 1, sizes in bytes, a value that cannot
    be said None; lists by layer are in the order of ``layers``."""
    try:
        own = Mechanism.parse(recording.mechanism).predictor
    except MechanismError as error:
        raise RefusedError(
            f"{recording.name} was recorded under a mechanism this version does not know: {error}"
        ) from None
    choices = from_trace(trace, recording.name)
    predictions = predictors.predict(choices, progress=progress)
    named = predictors.recorded(trace, choices)
    if 1 in named and own != "none":
        # What the run itself named, under its own text: gate:2.
        predictions[own] = named
    solo = misses.one_by_one(recording, choices)
    policy = cache_policy(recording.mechanism)
    model = trace.meta["model"]
    return {
        "version": VERSION,
        "trace": recording.name,
        "model": {name: model.get(name, "") for name in ("identity", "name", "arch")},
        "mechanism": recording.mechanism,
        "tokens": choices.tokens,
        "layers": list(choices.layers),
        "skew": routing.skew(choices),
        "usage": routing.usage(choices),
        "locality": routing.locality(choices),
        "predictors": predictors.report(choices, predictions),
        "demand": misses.demand(solo, choices),
        "budgets": [
            {
                "budget": budget.text,
                **misses.report(solo, choices, predictions, policy, budget.capacities(solo)),
            }
            for budget in budgets
        ],
    }
