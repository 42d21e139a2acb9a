"""Routers for experts that are all alike: which of them a token takes should look as it does in a trained
model.

A trained router's routes have locality: neighbouring tokens share experts, more so in later layers, and a
layer's load is uneven without being extreme. Rows made from the hidden states of real text give routes like
that; rows of random numbers do not. This module knows nothing of files or of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

#: How much of each row is a random direction; the rest is a centroid of hidden states.
RANDOM_SHARE = 0.7
_KMEANS_ROUNDS = 12
_BALANCE_ROUNDS = 120
_BALANCE_STEP = 0.1


@dataclass(frozen=True)
class RouterShape:
    """How one layer's routes should look, set from the layer's depth so that they fall in the ranges of
    trained models.

    ``slowness``: 0 leaves directions as they come; above it, directions along which the text changes slowly
    from token to token count for more, so that neighbours share more experts. ``skew``: standard deviation of
    the logarithm of the experts' intended loads.
    """

    slowness: float
    skew: float

    @classmethod
    def at_depth(cls, depth: float) -> RouterShape:
        """``depth`` runs from 0, the first layer, to 1, the last."""
        return cls(slowness=0.15 * depth**1.5, skew=0.45 - 0.05 * depth)


def make_router(
    states: npt.NDArray[np.float32], experts: int, used: int, shape: RouterShape, seed: int
) -> npt.NDArray[np.float32]:
    """One router's weight, (experts, n_embd), for a layer that is fed with ``states``, (n_tokens, n_embd), in
    text order.

    Over ``states`` each expert's logit has a standard deviation of about one. The values are rounded to half
    precision, which hides the last bits in which one BLAS differs from another, so that the same states give
    the same bytes.
    """
    x = states.astype(np.float64)
    # RandomState's stream is frozen across numpy versions, a Generator's is not.
    random = np.random.RandomState(seed)
    mean = x.mean(axis=0)
    rows = (1 - RANDOM_SHARE) * _unit(_centroids(x, experts, random) - mean)
    rows += RANDOM_SHARE * _unit(random.standard_normal((experts, x.shape[1])))
    if shape.slowness > 0:
        rows = _favour_slow_directions(rows, x - mean, shape.slowness)
    rows /= ((x - mean) @ rows.T).std(axis=0)[:, None]
    # With its share taken out, the mean state answers every expert alike and carries only the balance.
    along_mean = mean / (mean @ mean)
    rows -= np.outer(rows @ mean, along_mean)
    loads = np.exp(shape.skew * random.standard_normal(experts))
    offsets = _balance(x @ rows.T, x @ along_mean, used, loads / loads.sum())
    return (rows + np.outer(offsets, along_mean)).astype(np.float16).astype(np.float32)


def _unit(rows: Matrix) -> Matrix:
    lengths: Matrix = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / lengths


def _centroids(x: Matrix, count: int, random: np.random.RandomState) -> Matrix:
    """Plain k-means from ``count`` of the points; a centroid that loses all its points stays where it was."""
    centroids = x[random.choice(len(x), count, replace=False)]
    for _ in range(_KMEANS_ROUNDS):
        nearest = ((centroids**2).sum(axis=1) - 2 * x @ centroids.T).argmin(axis=1)
        for index in range(count):
            members = nearest == index
            if members.any():
                centroids[index] = x[members].mean(axis=0)
    return centroids


def _favour_slow_directions(rows: Matrix, centred: Matrix, slowness: float) -> Matrix:
    """``rows`` with their share along each direction of the text scaled by (autocorrelation at one
    token)**slowness.

    Directions are those of slow feature analysis: in coordinates where the states are white, the eigenvectors
    of the covariance between neighbours. Directions that do not persist at all are kept, small.
    """
    covariance = centred.T @ centred / len(centred)
    # A ridge, because a few thousand tokens do not span the space well.
    covariance += 0.02 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    lagged = centred[1:].T @ centred[:-1] / len(centred)
    colour = np.linalg.cholesky(covariance)
    whiten = np.linalg.inv(colour)
    persistence, directions = np.linalg.eigh(whiten @ (lagged + lagged.T) @ whiten.T / 2)
    gains = np.clip(persistence, 1e-3, None) ** slowness
    result: Matrix = rows @ colour @ (directions * gains) @ directions.T @ whiten
    return result


def _balance(logits: Matrix, mean_share: Matrix, used: int, loads: Matrix) -> Matrix:
    """Offsets along the mean state, one an expert, under which the experts take about ``loads`` of all
    choices."""
    offsets = np.zeros(len(loads))
    wanted = loads * len(logits) * used
    for _ in range(_BALANCE_ROUNDS):
        counts = _takers(logits + np.outer(mean_share, offsets), used)
        offsets += _BALANCE_STEP * np.log((wanted + 5) / (counts + 5))
    return offsets


def _takers(logits: Matrix, used: int) -> npt.NDArray[np.int64]:
    """How many tokens take each expert: those whose logit is among the token's ``used`` largest. Partitioning finds
    the least of these in a fifth of the time that sorting takes."""
    least = np.partition(logits, -used, axis=1)[:, -used, None]
    takers: npt.NDArray[np.int64] = np.count_nonzero(logits >= least, axis=0)
    return takers
