"""Routes of the demo model, replayed: the core and the reference decide alike, and hit as often as ever.

``record_routes.py`` made the recording. Golden counts are the reference's: ``python test_recorded_routes.py``
with the tests' directory on PYTHONPATH prints them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moestream import _core
from record_routes import RECORDED
from reference.cache import ReferenceCache

with np.load(RECORDED) as recorded:
    CHOSEN = recorded["chosen"]  # (tokens, layers, used)
    PROMPT = int(recorded["prompt"])
    EXPERTS = int(recorded["experts"])
TOKENS, LAYERS, USED = CHOSEN.shape
BANK_OF = [expert // EXPERTS for expert in range(LAYERS * EXPERTS)]

#: From two experts a layer (in two parts the prompt's routes are then wider than a part) to nearly all 1920.
CAPACITIES = [64, 240, 640, 1280, 1900]


def steps() -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """(token, tokens, route): the prompt at once, then each token; every layer in turn."""
    bounds = [0, *range(PROMPT, TOKENS + 1)]
    for start, end in itertools.pairwise(bounds):
        for layer in range(LAYERS):
            experts, counts = np.unique(CHOSEN[start:end, layer], return_counts=True)
            route = [(layer * EXPERTS + int(e), int(n)) for e, n in zip(experts, counts, strict=True)]
            yield start, end - start, route


def parts_of(capacity: int, parts: int) -> list[tuple[list[int], int]]:
    """The layers dealt out to parts in turn, the frames in equal shares."""
    return [
        ([e for e, bank in enumerate(BANK_OF) if bank % parts == part], capacity // parts)
        for part in range(parts)
    ]


def hits(make: Any, policy: str, capacity: int) -> int:
    cache = make(parts_of(capacity, 1), BANK_OF, policy)
    for token, tokens, route in steps():
        cache.route(route, token, tokens)
    return int(cache.counters()["hits"])


# Hits at each capacity.
GOLDEN = {
    "none": [0, 3686, 9221, 13745, 14845],
    "lru": [0, 5540, 10021, 14342, 14845],
    "lru-layer": [0, 5571, 10353, 14025, 14845],
    "lfu-decay:4": [1855, 5730, 10620, 14417, 14845],
    "lfu-decay:16": [2189, 6067, 10871, 14330, 14845],
    "lfu-decay:64": [2158, 5969, 10718, 14262, 14845],
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("policy", GOLDEN)
def test_core_equals_reference_step_by_step(policy: str, capacity: int, parts: int) -> None:
    core, reference = (
        make(parts_of(capacity, parts), BANK_OF, policy) for make in (_core.ExpertCache, ReferenceCache)
    )
    for number, (token, tokens, route) in enumerate(steps()):
        where = f"route {number}, token {token}, layer {number % LAYERS}"
        assert core.route(route, token, tokens) == reference.route(route, token, tokens), where
        assert core.counters() == reference.counters(), where
        bank = (number + 1) % LAYERS
        for cache in (core, reference):
            cache.release_speculative(BANK_OF[route[0][0]])
        # The next layer's last likeliest expert: a guess that is right now and then.
        guess = bank * EXPERTS + int(CHOSEN[max(0, token - 1), bank, 0])
        assert core.speculate(guess) == reference.speculate(guess), where
    experts = range(len(BANK_OF))
    assert [core.residency(e) for e in experts] == [reference.residency(e) for e in experts]
    counters = core.counters()
    assert counters["speculative_issued"] > 0
    assert counters["evictions"] > 0 or capacity == max(CAPACITIES)


@pytest.mark.parametrize("policy", GOLDEN)
def test_golden_hits(policy: str) -> None:
    assert [hits(_core.ExpertCache, policy, capacity) for capacity in CAPACITIES] == GOLDEN[policy]


def test_the_recording_is_a_model_s() -> None:
    assert (LAYERS, USED, TOKENS - PROMPT) == (30, 8, 64)
    assert int(CHOSEN.max()) < EXPERTS
    ascending = np.sort(CHOSEN, axis=2)
    assert (ascending[:, :, 1:] != ascending[:, :, :-1]).all()
    assert RECORDED.stat().st_size < 100_000


if __name__ == "__main__":
    for name in GOLDEN:
        print(f'    "{name}": {[hits(ReferenceCache, name, capacity) for capacity in CAPACITIES]},')
