"""Which experts each token chose, as one array: what every analysis starts from.

A trace holds routes of whole steps; here they are taken apart into tokens. Choices nobody saw (a bank that was read
whole, the rows of a prompt that llama.cpp drops before the last layer) are missing, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moestream.trace.trace import no_routes, starts

if TYPE_CHECKING:
    from moestream.trace.trace import Trace

Bool = NDArray[np.bool_]
Float = NDArray[np.float64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Choices:
    """``ids`` [tokens, layers, k]: numbers inside the bank in the router's order, -1 where there is none.

    "Layers" are the banks whose choices were seen, in the order they are routed: ``banks`` their numbers, ``layers``
    the model's layer of each, ``experts`` how many each has, ``used`` how many a token takes of them. ``clock``
    [tokens], ascending: the tokens processed before each.
    """

    ids: Int32
    banks: tuple[int, ...]
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    used: tuple[int, ...]
    clock: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def seen(self, layer: int) -> Bool:
        """Where the layer's choice is known, [tokens]."""
        known: Bool = self.ids[:, layer, 0] >= 0
        return known

    def hot(self, layer: int) -> Bool:
        """The choices of one layer as ones, [tokens, experts]; a missing choice is a row of zeros."""
        ids = self.ids[:, layer]
        hot = np.zeros((len(ids), self.experts[layer]), bool)
        token, place = np.nonzero(ids >= 0)
        hot[token, ids[token, place]] = True
        return hot


def from_trace(trace: Trace, name: str = "this trace") -> Choices:
    """The choices of a trace, its tokens in the order they were processed. RefusedError when it has none."""
    routes, model = trace.routes, trace.meta["model"]
    used = np.asarray(model["used"], int)
    chosen = np.nonzero(routes.k <= used[routes.bank])[0] if len(routes) else np.empty(0, int)
    if not len(chosen):
        raise no_routes(trace, name)
    banks = list(dict.fromkeys(routes.bank[chosen].tolist()))
    place = {bank: number for number, bank in enumerate(banks)}
    rows = routes.rows[chosen]
    # Rows are dropped from the front: what is asked for of a prompt is its last token.
    begin = routes.token[chosen] + routes.tokens[chosen] - rows
    first_row = starts(rows)
    row_clock = np.repeat(begin - first_row[:-1], rows) + np.arange(first_row[-1])
    # Clocks run on where a step failed: such tokens chose nothing.
    clock, token_of = np.unique(row_clock, return_inverse=True)
    ids = np.full((len(clock), len(banks), int(routes.k[chosen].max())), -1, np.int32)
    for number, route in enumerate(chosen.tolist()):
        of = routes.of(route)
        tokens = token_of[first_row[number] : first_row[number + 1]]
        ids[tokens, place[int(routes.bank[route])], : of.shape[1]] = of
    return Choices(
        ids,
        tuple(banks),
        tuple(int(model["layers"][bank]) for bank in banks),
        tuple(int(model["experts"][bank]) for bank in banks),
        tuple(int(used[bank]) for bank in banks),
        clock,
    )


def from_array(chosen: NDArray[np.integer], experts: int) -> Choices:
    """Choices of a model whose layers are all alike, [tokens, layers, k]."""
    tokens, layers, k = chosen.shape
    every = tuple(range(layers))
    return Choices(
        chosen.astype(np.int32), every, every, (experts,) * layers, (k,) * layers, np.arange(tokens)
    )


def source(choices: Choices, target: int, lookahead: int) -> tuple[int, int]:
    """The layer that is routed ``lookahead`` layers before ``target``, and how many tokens earlier that is: 0, or more
    where it lies before the token's first layer."""
    tokens_back, layer = divmod(target - lookahead, len(choices.layers))
    return layer, -tokens_back


def back(rows: Bool, tokens: int) -> Bool:
    """Row t holds what row ``t - tokens`` held; the first ones zeros."""
    if tokens == 0:
        return rows
    shifted = np.zeros_like(rows)
    shifted[tokens:] = rows[:-tokens]
    return shifted


def split(tokens: int, held_out: float) -> int:
    """The first token that is held out: the last ``held_out`` of them are, at least one, and never all of several."""
    return max(min(1, tokens - 1), tokens - max(1, round(tokens * held_out)))
