"""What each predictor would have named, token by token, and how much of that was chosen.

All are judged on the same tokens, which ``ridge`` was not fitted on. ``gate`` needs the routers' inputs, which a trace
does not hold: its wishes are taken from the trace where the run recorded them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moestream.analyze import fit
from moestream.analyze.choices import Bool, Choices, Int32, back, source, split
from moestream.analyze.steps import Progress, Steps, silent
from moestream.errors import RefusedError

if TYPE_CHECKING:
    from moestream.trace.trace import Trace

LOOKAHEADS = (1, 2, 3)
NO_GATE = (
    "not in this trace, which holds no router inputs: record what it names with "
    "`moestream run --mechanism arena+gate:{used}x3 --trace FILE`"
)
NO_RIDGE = f"too few tokens in a row to fit and to hold some out: record {fit.FEWEST_TOKENS} or many more"


@dataclass(frozen=True)
class Named:
    """What one predictor names for one layer: ``ids`` [tokens, N] inside the bank, the likeliest first; -1: nothing."""

    ids: Int32

    def first(self, wishes: int) -> Int32:
        return self.ids[:, :wishes]


Predictions = dict[str, dict[int, list[Named]]]


def predict(choices: Choices, seed: int = 0, progress: Progress = silent) -> Predictions:
    """By predictor and lookahead, for each layer, as many experts as a token uses. ``previous`` and ``random`` see
    nothing of this token, so they say the same whatever the lookahead; ``ridge`` is left out of a trace too short to
    fit it on."""
    layers = range(len(choices.layers))
    generator = np.random.default_rng(seed)
    previous = [Named(_earlier(choices.ids[:, t])) for t in layers]
    random = [
        Named(
            generator.random((choices.tokens, choices.experts[t]))
            .argsort(axis=1)[:, : choices.used[t]]
            .astype(np.int32)
        )
        for t in layers
    ]
    made: Predictions = {
        "previous": dict.fromkeys(LOOKAHEADS, previous),
        "random": dict.fromkeys(LOOKAHEADS, random),
    }
    # Nearly all the time goes into these fits.
    steps = Steps(len(layers) * (1 + len(LOOKAHEADS)), progress)
    penalty = _penalty(choices, steps)
    if penalty is not None:
        made["ridge"] = {
            ahead: [_ridge(choices, t, ahead, penalty, steps) for t in layers] for ahead in LOOKAHEADS
        }
    return made


def _penalty(choices: Choices, steps: Steps) -> float | None:
    if choices.tokens < fit.FEWEST_TOKENS:
        return None
    try:
        return fit.choose_penalty([choices], steps)
    except RefusedError:
        return None  # a layer was seen too rarely, as the last one of a prompt is


def _earlier(ids: Int32) -> Int32:
    earlier = np.full_like(ids, -1)
    earlier[1:] = ids[:-1]
    return earlier


def _ridge(choices: Choices, target: int, lookahead: int, penalty: float, steps: Steps) -> Named:
    end = split(choices.tokens, fit.HELD_OUT)
    learnt = fit.examples(choices, target, lookahead, np.arange(choices.tokens) < end)
    ids = np.full((choices.tokens, choices.used[target]), -1, np.int32)
    if len(learnt.x):
        weights, bias = fit.Ridge(learnt.x, learnt.y).weights(penalty)
        scores = fit.inputs(choices, target, lookahead) @ weights.T + bias
        layer, tokens_back = source(choices, target, lookahead)
        known = back(choices.seen(layer), tokens_back) & back(choices.seen(target), 1)
        ids[known] = fit.rank(scores[known], choices.used[target])
    steps.step()
    return Named(ids)


def recorded(trace: Trace, choices: Choices) -> dict[int, list[Named]]:
    """What the run's own predictor named for each layer of single-token steps, by how many layers ahead; empty where it
    named nothing. A wish is recorded only where the disk was free for it, so some routes have none."""
    routes, layers = trace.routes, len(choices.layers)
    first = trace.first_expert
    place = {bank: number for number, bank in enumerate(choices.banks)}
    wishes = np.diff(routes.wish_start)
    asked = np.nonzero((routes.tokens == 1) & (wishes > 0))[0]
    most = int(wishes[asked].max(initial=0))
    named: dict[int, list[Int32]] = {}
    for route in asked.tolist():
        experts = routes.wish_ids[routes.wish_start[route] : routes.wish_start[route + 1]]
        bank_of = np.searchsorted(first, experts, side="right") - 1
        here = place.get(int(routes.bank[route]))
        for bank in dict.fromkeys(bank_of.tolist()):
            if bank not in place or here is None:
                continue
            # A bank that does not come after the one just routed is meant for the next token.
            ahead = (place[bank] - here - 1) % layers + 1
            token = int(np.searchsorted(choices.clock, routes.token[route])) + (place[bank] <= here)
            if token < choices.tokens:
                tables = named.setdefault(
                    ahead, [np.full((choices.tokens, most), -1, np.int32) for _ in choices.layers]
                )
                ids = experts[bank_of == bank] - first[bank]
                tables[place[bank]][token, : len(ids)] = ids
    widths = {ahead: max(_width(ids) for ids in tables) for ahead, tables in named.items()}
    return {ahead: [Named(ids[:, : widths[ahead]]) for ids in named[ahead]] for ahead in sorted(named)}


def _width(ids: Int32) -> int:
    """How many of the columns hold anything; wishes stand in the first ones."""
    return int((ids >= 0).any(axis=0).sum())


def held_out(choices: Choices) -> Bool:
    """The tokens on which predictors are judged: [tokens]."""
    held: Bool = np.arange(choices.tokens) >= split(choices.tokens, fit.HELD_OUT)
    return held


def recall_by_layer(choices: Choices, named: list[Named], tokens: Bool) -> list[float | None]:
    """Of each layer the mean share of a token's experts that were named, over ``tokens`` for which any were."""
    result = []
    for layer, of in enumerate(named):
        judged = tokens & choices.seen(layer) & (of.ids[:, 0] >= 0)
        result.append(fit.recall(of.ids[judged], choices.hot(layer)[judged]))
    return result


def precision(choices: Choices, named: list[Named], tokens: Bool, wishes: int) -> float | None:
    """The share of the first ``wishes`` named that were chosen, over all layers; None where none were named."""
    right = total = 0
    for layer, of in enumerate(named):
        judged = tokens & choices.seen(layer)
        ids = of.first(wishes)[judged]
        right += int(chosen(ids, choices.hot(layer)[judged]).sum())
        total += int((ids >= 0).sum())
    return right / total if total else None


def chosen(ids: NDArray[np.integer], hot: NDArray[np.bool_]) -> Bool:
    """Which of the named ([n, N], -1: nothing) are in ``hot`` [n, experts]: [n, N]."""
    found: Bool = np.take_along_axis(hot, np.maximum(ids, 0), axis=1) & (ids >= 0)
    return found


def report(choices: Choices, predictions: Predictions) -> dict[str, Any]:
    """``recall`` by predictor, lookahead and layer (of as many experts as a token uses), ``precision`` by predictor
    and number of wishes one layer ahead, and why a predictor is ``absent``."""
    tokens = held_out(choices)
    made = dict(predictions)
    absent: dict[str, str] = {}
    used = max(choices.used)
    if "ridge" not in made:
        absent["ridge"] = NO_RIDGE
    if not any(name.startswith("gate") for name in made):
        absent["gate"] = NO_GATE.format(used=used)
    return {
        "k": used,
        "tokens": int(tokens.sum()),
        "recall": {
            name: {str(ahead): recall_by_layer(choices, named, tokens) for ahead, named in by.items()}
            for name, by in made.items()
        },
        "precision": {
            name: {str(n): precision(choices, by[1], tokens, n) for n in wishes_of(choices)}
            for name, by in made.items()
        },
        "absent": absent,
    }


def wishes_of(choices: Choices) -> list[int]:
    """How many experts a layer are looked at: 1, 2, 4, and as many as a token uses."""
    most = max(choices.used)
    return sorted({n for n in (1, 2, 4, most) if n <= most})
