"""Skew and locality: how few experts do how much of the work, and how soon they are wanted again."""

from __future__ import annotations

from typing import Any

import numpy as np

from moestream.analyze.choices import Choices, Float

SHARES = (0.5, 0.8, 0.95)
DISTANCES = tuple(range(1, 33))
#: Tokens of a window in which distinct experts are counted.
WINDOW = 64


def usage(choices: Choices) -> list[list[int]]:
    """How many tokens chose each expert, by layer."""
    return [choices.hot(layer).sum(axis=0).tolist() for layer in range(len(choices.layers))]


def skew(choices: Choices) -> list[dict[str, Any]]:
    """By layer: ``needed`` (the fewest experts that take 50, 80 and 95 % of the activations), ``distinct`` experts
    ever chosen, and the mean distinct in any ``WINDOW`` tokens in a row (None of fewer tokens)."""
    rows = []
    for layer, counts in enumerate(usage(choices)):
        ranked = np.sort(counts)[::-1]
        total = int(ranked.sum())
        # In whole numbers: a share of a sum of floats can miss its own value.
        needed = [
            int(np.searchsorted(np.cumsum(ranked) * 100, total * round(share * 100))) + 1 for share in SHARES
        ]
        rows.append(
            {
                "layer": choices.layers[layer],
                "experts": choices.experts[layer],
                "needed": {f"{share:.0%}": n for share, n in zip(SHARES, needed, strict=True)},
                "distinct": int((ranked > 0).sum()),
                "distinct_in_window": _distinct_in_window(choices, layer),
            }
        )
    return rows


def _distinct_in_window(choices: Choices, layer: int) -> float | None:
    hot = choices.hot(layer)[choices.seen(layer)]
    if len(hot) < WINDOW:
        return None
    before = np.zeros((1, hot.shape[1]), np.int64)
    uses = np.concatenate([before, np.cumsum(hot, axis=0, dtype=np.int64)])
    return float((uses[WINDOW:] > uses[:-WINDOW]).sum(axis=1).mean())


def locality(choices: Choices, seed: int = 0) -> dict[str, Any]:
    """``overlap`` [layers][distances]: the share of a token's choice that the token so far before it had chosen too;
    ``control`` the same with the tokens shuffled, which leaves the skew and nothing of the order. None where no two
    tokens are so far apart."""
    order = np.random.default_rng(seed).permutation(choices.tokens)
    overlap, control = [], []
    for layer in range(len(choices.layers)):
        hot, seen = choices.hot(layer), choices.seen(layer)
        overlap.append([_overlap(hot, seen, distance) for distance in DISTANCES])
        control.append([_overlap(hot[order], seen[order], distance) for distance in DISTANCES])
    return {"distances": list(DISTANCES), "overlap": overlap, "control": control}


def _overlap(hot: Any, seen: Any, distance: int) -> float | None:
    if len(hot) <= distance:
        return None
    both = seen[distance:] & seen[:-distance]
    if not both.any():
        return None
    now, then = hot[distance:][both], hot[:-distance][both]
    return float(((now & then).sum(axis=1) / now.sum(axis=1)).mean())


def mean_over_layers(rows: list[list[float | None]]) -> list[float | None]:
    """Column by column the mean of what there is."""
    table: Float = np.array(rows, dtype=float)
    known = ~np.isnan(table)
    count = known.sum(axis=0)
    total = np.where(known, table, 0.0).sum(axis=0)
    return [float(t / n) if n else None for t, n in zip(total, count, strict=True)]
