"""Routes of the demo model, replayed: the core and the reference decide alike, and hit as often as ever.

``record_routes.py`` made the recording, ``policy_tables.py`` the golden counts.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from moestream import _core
from policy_tables import (
    BANK_OF,
    BUDGETS,
    CHOSEN,
    EXPERTS,
    LAYERS,
    POLICIES,
    PRIORITY,
    PROMPT,
    TABLES,
    TOKENS,
    USED,
    belady,
    count,
    parts_of,
    steps,
)
from record_routes import RECORDED
from reference.cache import ReferenceCache

GOLDEN: dict[str, list[list[int]]] = json.loads(TABLES.read_text())["hits_misses_bytes"]


# In two parts and 64 frames the prompt's routes are wider than a part.
@pytest.mark.parametrize(("budget", "parts"), [(64, 2), (288, 1), (768, 2), (1900, 1)])
@pytest.mark.parametrize("policy", POLICIES)
def test_core_equals_reference_step_by_step(policy: str, budget: int, parts: int) -> None:
    core, reference = (
        make(parts_of(budget, parts), BANK_OF, policy, PRIORITY)
        for make in (_core.ExpertCache, ReferenceCache)
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
    assert [core.keep(e) for e in experts] == [reference.keep(e) for e in experts]
    counters = core.counters()
    assert counters["speculative_issued"] > 0
    assert counters["evictions"] > 0 or budget == max(BUDGETS)


@pytest.mark.parametrize("policy", POLICIES)
def test_golden_counts(policy: str) -> None:
    assert [count(_core.ExpertCache, policy, budget) for budget in BUDGETS] == GOLDEN[policy]


def test_golden_counts_are_of_these_policies_and_budgets() -> None:
    table = json.loads(TABLES.read_text())
    assert table["budgets"] == BUDGETS
    assert list(table["hits_misses_bytes"]) == [*POLICIES, "belady"]
    assert {text.partition(":")[0] for text in POLICIES} == set(_core.policy_members())


def test_nobody_beats_belady() -> None:
    assert [belady(budget) for budget in BUDGETS] == GOLDEN["belady"]
    for place in range(len(BUDGETS)):
        assert max(GOLDEN[policy][place][0] for policy in POLICIES) <= GOLDEN["belady"][place][0]


def test_lfu_adapt_is_never_worse_than_lru() -> None:
    assert all(adapt[0] >= lru[0] for adapt, lru in zip(GOLDEN["lfu-adapt"], GOLDEN["lru"], strict=True))


def test_the_recording_is_a_model_s() -> None:
    assert (LAYERS, USED, TOKENS - PROMPT) == (30, 8, 64)
    assert int(CHOSEN.max()) < EXPERTS
    ascending = np.sort(CHOSEN, axis=2)
    assert (ascending[:, :, 1:] != ascending[:, :, :-1]).all()
    assert RECORDED.stat().st_size < 100_000
