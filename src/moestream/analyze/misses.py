"""What predictors are worth to a cache: the misses they name, and the bytes they waste.

A prediction of an expert that is in memory anyway is worth nothing, so a share of the slots says little; the engine's
own cache says which were missed. Every token counts as a step of its own, a prompt's too where all its choices were
seen; tokens that lack a layer would seem to need less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestream.analyze.choices import Bool, Choices
from moestream.analyze.predictors import Named, chosen, held_out, wishes_of
from moestream.core import _core
from moestream.geometry import HUGE_PAGE
from moestream.replay.run import Recording, Replayed, replay
from moestream.trace.trace import starts

#: At most so many (token, layer, expert) are kept of what was in memory when.
MOST_CELLS = 1 << 26


def one_by_one(recording: Recording, choices: Choices) -> Recording:
    """The recording's model with the choices as its routes, one token a step, no wishes; in the order of ``where``."""
    token, layer = where(choices)
    ids = np.sort(choices.ids[token, layer], axis=1)
    ids[:, 1:][ids[:, 1:] == ids[:, :-1]] = -1
    routed, start = _flat(ids, _first_experts(recording, choices)[layer])
    return dataclasses.replace(
        recording,
        step=token,
        decode=np.ones(len(token), bool),
        bank=np.asarray(choices.banks)[layer].astype(np.uint32),
        token=choices.clock[token].astype(np.uint64),
        tokens=np.ones(len(token), np.uint32),
        start=start,
        experts=routed,
        counts=np.ones(len(routed), np.uint32),
        wish_start=np.zeros(len(token) + 1, np.uint64),
        wishes=np.empty(0, np.uint32),
    )


def where(choices: Choices) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The routes of ``one_by_one``: token and layer of each."""
    token, layer = np.nonzero((choices.ids[:, :, 0] >= 0) & _whole(choices)[:, None])
    return token, layer


def _whole(choices: Choices) -> Bool:
    """The tokens whose choice was seen in every layer; all, where none of those on which predictors are judged is."""
    whole: Bool = np.all(choices.ids[:, :, 0] >= 0, axis=1)
    return whole if (whole & held_out(choices)).any() else np.ones(choices.tokens, bool)


def judged_tokens(choices: Choices) -> NDArray[np.int64]:
    """Those held out, less what ``where`` leaves out; the last of them where more than ``MOST_CELLS`` allows."""
    judged = np.nonzero(held_out(choices) & _whole(choices))[0]
    return judged[-max(1, MOST_CELLS // sum(choices.experts)) :]


def with_wishes(solo: Recording, choices: Choices, named: list[Named], wishes: int) -> Recording:
    """The same routes, each followed by the first ``wishes`` that are named for the next."""
    token, layer = where(choices)
    ids = np.full((len(token), wishes), -1, np.int32)
    for target, of in enumerate(named):
        # The route before asks for it.
        after = np.nonzero(layer[1:] == target)[0]
        some = of.first(wishes)[token[after + 1]]
        ids[after, : some.shape[1]] = some
    first = np.append(_first_experts(solo, choices)[layer[1:]], 0)
    flat, start = _flat(ids, first)
    return dataclasses.replace(solo, wish_start=start, wishes=flat)


def _first_experts(recording: Recording, choices: Choices) -> NDArray[np.int64]:
    """The global number of expert 0 of each layer, [layers]."""
    first = np.concatenate([[0], np.cumsum(np.bincount(recording.bank_of))])
    return first[list(choices.banks)].astype(np.int64)


def _flat(ids: NDArray[np.int32], first: NDArray[np.int64]) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """Rows of numbers inside a bank (-1: none) as global numbers one after another, and where each row starts."""
    named = ids >= 0
    experts = (ids + first[:, None])[named]
    return experts.astype(np.uint32), starts(named.sum(axis=1)).astype(np.uint64)


def absent_before(
    solo: Recording, choices: Choices, policy: str, capacities: Sequence[int]
) -> tuple[list[Bool], NDArray[np.int64]]:
    """Which experts of each layer were not in memory when it was about to be routed: [judged tokens, experts] by layer;
    and the judged tokens."""
    judged = judged_tokens(choices)
    parts = list(zip(solo.part_experts, [int(n) for n in capacities], strict=True))
    cache = _core.ExpertCache(parts, solo.bank_of, policy)
    absent = np.zeros(len(solo.bank_of), bool)
    for experts in solo.part_experts:
        absent[experts] = True
    first = _first_experts(solo, choices)
    before = [np.zeros((len(judged), count), bool) for count in choices.experts]
    row_of = {token: row for row, token in enumerate(judged.tolist())}
    token, layer = where(choices)
    for route, (t, at) in enumerate(zip(token.tolist(), layer.tolist(), strict=True)):
        if t in row_of:
            before[at][row_of[t]] = absent[first[at] : first[at] + choices.experts[at]]
        experts = solo.experts[int(solo.start[route]) : int(solo.start[route + 1])].tolist()
        moves = cache.route([(expert, 1) for expert in experts], int(choices.clock[t]), 1)
        for expert, victim in moves or ():
            absent[expert] = False
            if victim is not None:
                absent[victim] = True
    return before, judged


def coverage(
    solo: Recording,
    choices: Choices,
    named: list[Named],
    absent: tuple[list[Bool], NDArray[np.int64]],
    wishes: int,
) -> dict[str, float | None]:
    """Of the misses of the judged tokens the share (of bytes) that the first ``wishes`` name; and the bytes that would
    be read for nothing for each byte read in time. What reading early does to the cache is not in it."""
    before, judged = absent
    missed = saved = wasted = 0
    for layer, of in enumerate(named):
        size = int(solo.expert_bytes[choices.banks[layer]])
        seen = choices.seen(layer)[judged]
        hot, away = choices.hot(layer)[judged][seen], before[layer][seen]
        ids = of.first(wishes)[judged][seen]
        worth = chosen(ids, away)
        right = worth & chosen(ids, hot)
        missed += size * int((hot & away).sum())
        saved += size * int(right.sum())
        wasted += size * int((worth & ~right).sum())
    return {
        "named_share_of_misses": saved / missed if missed else None,
        "wasted_bytes_per_saved_byte": wasted / saved if saved else None,
    }


def effect(plain: Replayed, choices: Choices, named: list[Named], wishes: int) -> dict[str, float | None]:
    """The run ``plain`` with early reads of the first ``wishes``: the share of the demand bytes that went, and all
    bytes read as a share of those read without; of the judged tokens, every early read to its end."""
    solo = plain.recording
    early = replay(with_wishes(solo, choices, named, wishes), plain.policy, plain.capacities)
    begin = int(np.searchsorted(where(choices)[0], judged_tokens(choices)[0]))
    demand = int(plain.bytes[begin:].sum())
    still = int(early.bytes[begin:].sum())
    # What is read early for the first judged route is asked for by the route before it.
    ahead = int(early.early_bytes[max(0, begin - 1) :].sum())
    return {
        "demand_bytes_saved": 1 - still / demand if demand else None,
        "bytes_read_ratio": (still + ahead) / demand if demand else None,
    }


def demand(solo: Recording, choices: Choices) -> dict[str, Any]:
    """``bytes_per_token`` all of a token's experts together; ``cliff_bytes``, the smallest budget at which a global
    LRU hits anything at all (None: it never does), with ``cliff_share`` of all expert bytes that can leave."""
    sizes = [int(solo.expert_bytes[bank]) for bank in choices.banks]
    per_token = sum(size * used for size, used in zip(sizes, choices.used, strict=True))
    parts = solo.geometry.parts
    whole = sum(part.experts * part.frame_bytes for part in parts)
    # A budget is split over parts in proportion to their bytes: the first part that hits is the cliff.
    cliffs = [
        whole * capacity / part.experts
        for part, capacity in zip(parts, _cliffs(solo), strict=True)
        if capacity
    ]
    cliff = min(cliffs) if cliffs else None
    return {
        "bytes_per_token": per_token,
        "expert_bytes": whole,
        "cliff_bytes": None if cliff is None else -(-int(cliff) // HUGE_PAGE) * HUGE_PAGE,
        "cliff_share": None if cliff is None else cliff / whole,
    }


def _cliffs(solo: Recording) -> list[int | None]:
    """By part the least capacity with a hit, None where even all experts of it never hit."""
    full = [part.experts for part in solo.geometry.parts]
    found: list[int | None] = []
    for number, part in enumerate(solo.geometry.parts):
        mine = np.isin(solo.bank, part.banks)

        def hits(capacity: int, number: int = number, mine: Bool = mine) -> bool:
            capacities = [*full[:number], capacity, *full[number + 1 :]]
            done = replay(solo, "lru", capacities, speculation=False)
            return bool(done.hits[mine].any())

        low, high = solo.widest[number], part.experts
        if not hits(high):
            found.append(None)
            continue
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if hits(middle) else (middle + 1, high)
        found.append(low)
    return found


def report(
    solo: Recording,
    choices: Choices,
    predictions: dict[str, dict[int, list[Named]]],
    policy: str,
    capacities: Sequence[int],
) -> dict[str, Any]:
    """One budget: what of it was missed, and ``by`` predictor and number of wishes what ``coverage`` and ``effect``
    say."""
    absent = absent_before(solo, choices, policy, capacities)
    plain = replay(solo, policy, capacities)
    before, judged = absent
    missed = routed = 0
    for layer in range(len(choices.layers)):
        hot = choices.hot(layer)[judged]
        missed += int((hot & before[layer]).sum())
        routed += int(hot.sum())
    return {
        "policy": policy,
        "capacities": [int(n) for n in capacities],
        "budget_bytes": solo.geometry.bytes_of(capacities),
        "tokens": len(judged),
        "miss_rate": missed / routed if routed else None,
        "by": {
            name: {
                str(n): {
                    **coverage(solo, choices, by[1], absent, n),
                    **effect(plain, choices, by[1], n),
                }
                for n in wishes_of(choices)
            }
            for name, by in predictions.items()
        },
    }
