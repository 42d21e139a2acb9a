"""Ridge regression from choices already made to the next ones: what ``moestream fit`` does.

A trace holds which experts were chosen, not the router's inputs or logits; so the map's inputs are choices: this
token's in the bank routed before, and the bank's own for the token before, as ones and zeros. The last quarter of each
trace is held out: the written map has not seen it, and its recall is that on tokens of the same text it has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestream.analyze.choices import Bool, Choices, Float, back, source, split
from moestream.analyze.steps import Progress, Steps, silent
from moestream.errors import RefusedError, UsageError
from moestream.files import check_directory, exists
from moestream.make.output import new_file
from moestream.seeds import Fit, Linear, is_fit

HELD_OUT = 0.25
LAMBDAS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
FEATURES = "choice of the bank before for this token; choice of this bank for the token before"
#: Below this many tokens a quarter says nothing about the rest.
FEWEST_TOKENS = 16


@dataclass(frozen=True)
class Examples:
    """Inputs and outputs of one layer's map over some tokens: ``x`` [n, inputs], ``y`` [n, experts], ones and
    zeros."""

    x: Float
    y: Float


def examples(choices: Choices, target: int, lookahead: int, tokens: Bool) -> Examples:
    """Those of ``tokens`` whose choice and both inputs were seen."""
    layer, tokens_back = source(choices, target, lookahead)
    known = tokens & choices.seen(target)
    known &= back(choices.seen(layer), tokens_back).astype(bool)
    known &= back(choices.seen(target), 1).astype(bool)
    return Examples(inputs(choices, target, lookahead)[known], choices.hot(target)[known].astype(float))


def inputs(choices: Choices, target: int, lookahead: int) -> Float:
    """The inputs of a layer's map for every token, [tokens, inputs]; zeros where a choice was not seen."""
    layer, tokens_back = source(choices, target, lookahead)
    parts = back(choices.hot(layer), tokens_back), back(choices.hot(target), 1)
    return np.concatenate(parts, axis=1).astype(float)


class Ridge:
    """Least squares with a penalty on the weights (not on the bias), for any penalty at the price of one."""

    def __init__(self, x: Float, y: Float) -> None:
        """``x`` [n, inputs], ``y`` [n, outputs], n >= 1."""
        self._x_mean, self._y_mean = x.mean(axis=0), y.mean(axis=0)
        centered = x - self._x_mean
        # The eigenvectors serve every penalty; a negative eigenvalue is rounding.
        values, self._vectors = np.linalg.eigh(centered.T @ centered)
        self._values = np.maximum(values, 0.0)
        self._target = self._vectors.T @ (centered.T @ (y - self._y_mean))

    def weights(self, penalty: float) -> tuple[Float, Float]:
        """``weights`` [outputs, inputs] and ``bias`` [outputs]; scores are ``x @ weights.T + bias``."""
        weights = (self._vectors @ (self._target / (self._values + penalty)[:, None])).T
        return weights, self._y_mean - weights @ self._x_mean


def rank(scores: Float, wishes: int) -> NDArray[np.int64]:
    """The ``wishes`` best of each row, best first; of equals the lower number."""
    order: NDArray[np.int64] = np.argsort(-scores, axis=1, kind="stable")[:, :wishes]
    return order


def recall(named: NDArray[np.integer], hot: NDArray[np.generic]) -> float | None:
    """The mean share of each row's experts among those named ([n, N] numbers; -1 names none); None of no rows."""
    if not len(named):
        return None
    found = np.take_along_axis(hot.astype(bool), np.maximum(named, 0), axis=1) & (named >= 0)
    return float((found.sum(axis=1) / hot.sum(axis=1)).mean())


def fit(
    traces: Sequence[Choices],
    identity: str,
    name: str,
    experts: Sequence[int],
    wishes: int,
    progress: Progress = silent,
) -> Fit:
    """Fit one map a layer on traces of one model whose banks have ``experts``. The penalty is the one whose maps
    recall most, over all layers, on the last quarter of what is not held out. RefusedError for too few tokens."""
    for choices in traces:
        if choices.tokens < FEWEST_TOKENS:
            raise RefusedError(
                f"a trace of {choices.tokens} tokens is too short to fit and to hold some out: "
                f"record at least {FEWEST_TOKENS}"
            )
        if choices.banks != traces[0].banks:
            raise RefusedError("the traces route different layers: fit only traces of the whole model")
    steps = Steps(2 * len(traces[0].banks), progress)
    penalty = choose_penalty(traces, steps)
    maps: list[Linear | None] = [None] * len(experts)
    report = []
    for target, bank in enumerate(traces[0].banks):
        weights, bias = Ridge(*_pooled(traces, target, "train")).weights(penalty)
        before = traces[0].banks[source(traces[0], target, 1)[0]]
        maps[bank] = Linear(before, weights.astype(np.float32), bias.astype(np.float32))
        report.append({"layer": traces[0].layers[target], **_recalls(traces, target, weights, bias)})
        steps.step()
    counts = np.zeros(sum(experts), np.int64)
    first = np.concatenate([[0], np.cumsum(experts)])
    for choices in traces:
        for target, bank in enumerate(choices.banks):
            counts[first[bank] : first[bank + 1]] += choices.hot(target).sum(axis=0)
    about = {"features": FEATURES, "lambda": penalty, "held_out": HELD_OUT, "recall": report}
    return Fit(identity, name, tuple(experts), wishes, tuple(maps), counts, about)


def _part(choices: Choices, which: str) -> Bool:
    """The tokens of one part: ``train`` all that are not ``held_out``, of which ``validate`` are the last quarter and
    ``learn`` the rest."""
    token = np.arange(choices.tokens)
    end = split(choices.tokens, HELD_OUT)
    middle = split(end, HELD_OUT)
    parts = {
        "train": (0, end),
        "held_out": (end, choices.tokens),
        "learn": (0, middle),
        "validate": (middle, end),
    }
    begin, stop = parts[which]
    chosen: Bool = (token >= begin) & (token < stop)
    return chosen


def _pooled(traces: Sequence[Choices], target: int, which: str) -> tuple[Float, Float]:
    pool = [examples(choices, target, 1, _part(choices, which)) for choices in traces]
    x, y = np.concatenate([e.x for e in pool]), np.concatenate([e.y for e in pool])
    if not len(x) and which in ("train", "learn"):
        raise RefusedError(
            f"layer {traces[0].layers[target]} was routed for too few tokens in a row: record a longer trace"
        )
    return x, y


def choose_penalty(traces: Sequence[Choices], steps: Steps) -> float:
    """The penalty whose maps, learnt on three quarters of what is not held out, recall most of the other quarter; a
    step a layer."""
    totals = np.zeros(len(LAMBDAS))
    for target in range(len(traces[0].layers)):
        ridge = Ridge(*_pooled(traces, target, "learn"))
        x, y = _pooled(traces, target, "validate")
        for number, penalty in enumerate(LAMBDAS):
            weights, bias = ridge.weights(penalty)
            totals[number] += recall(rank(x @ weights.T + bias, traces[0].used[target]), y) or 0.0
        steps.step()
    return LAMBDAS[int(totals.argmax())]


def _recalls(traces: Sequence[Choices], target: int, weights: Float, bias: Float) -> dict[str, Any]:
    """Recall of as many experts as a token uses: of the map on both parts, and of its rivals on what is held out."""
    used, count = traces[0].used[target], traces[0].experts[target]
    train, held = (_pooled(traces, target, which) for which in ("train", "held_out"))
    previous = held[0][:, -count:]  # the bank's own choice for the token before
    return {
        "train": recall(rank(train[0] @ weights.T + bias, used), train[1]),
        "held_out": recall(rank(held[0] @ weights.T + bias, used), held[1]),
        "previous": recall(rank(previous, used), held[1]),
        "random": used / count,
    }


def check_out(out: Path) -> None:
    """UsageError when ``out`` cannot become a fit file, or exists and is something else: no model is written over."""
    check_directory(out, "--out")
    try:
        replaceable = not exists(out) or is_fit(out)
    except RefusedError:
        replaceable = False
    if not replaceable:
        raise UsageError(f"{out} exists and is no fit file: name another place with --out")


def write_fit(made: Fit, out: Path) -> None:
    """Write ``out`` whole or not at all; see ``check_out``."""
    check_out(out)
    arrays = made.arrays()
    with (
        new_file(out, sum(array.nbytes for array in arrays.values())) as temporary,
        temporary.open("wb") as file,
    ):
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
