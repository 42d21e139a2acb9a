"""The core's ExpertCache decides as the plain-Python reference does, for every policy, step by step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestream import _core
from reference.cache import ReferenceCache

POLICIES = [
    "none",
    "fifo",
    "lru",
    "lru-layer",
    "lfu",
    "lfu-decay",
    "lfu-decay:3.5",
    "lfu-decay:200",
    "lfu-adapt",
    "sieve",
    "s3fifo",
    "pinned:FILE",
    "dontneed:0",
    "dontneed:2",
]


def priorities(experts: int) -> list[float]:
    """A seed with ties and with experts that it has not seen."""
    return [float(expert * 7 % 5) for expert in range(experts)]


class Both:
    """The core's cache and the reference, driven together; every answer and state must agree."""

    def __init__(self, parts: list[tuple[list[int], int]], bank_of: list[int], policy: str) -> None:
        seed = priorities(len(bank_of))
        self.caches = tuple(
            make(parts, bank_of, policy, seed) for make in (_core.ExpertCache, ReferenceCache)
        )
        self.experts = range(len(bank_of))

    def __call__(self, verb: str, *arguments: Any) -> Any:
        got, expected = (getattr(cache, verb)(*arguments) for cache in self.caches)
        assert got == expected, f"{verb}{arguments}"
        core, reference = self.caches
        assert core.counters() == reference.counters()
        assert [core.residency(e) for e in self.experts] == [reference.residency(e) for e in self.experts]
        assert [core.keep(e) for e in self.experts] == [reference.keep(e) for e in self.experts]
        return got


@st.composite
def geometries(draw: st.DrawFn) -> tuple[list[tuple[list[int], int]], list[int]]:
    """Banks of unequal size, spread over up to three parts; some experts are in no part."""
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    bank_of = [bank for bank, size in enumerate(sizes) for _ in range(size)]
    part_of_bank = draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    always_resident = draw(st.sets(st.integers(0, len(bank_of) - 1), max_size=2))
    parts = []
    for number in range(3):
        experts = [e for e, b in enumerate(bank_of) if part_of_bank[b] == number and e not in always_resident]
        if experts:
            parts.append((experts, draw(st.integers(1, len(experts)))))
    return parts, bank_of


@given(st.sampled_from(POLICIES), geometries(), st.data())
@settings(max_examples=400, deadline=None)
def test_core_equals_reference_on_random_verbs(
    policy: str, geometry: tuple[list[tuple[list[int], int]], list[int]], data: st.DataObject
) -> None:
    parts, bank_of = geometry
    both = Both(parts, bank_of, policy)
    token = data.draw(st.sampled_from([0, 5, 10**7]))
    rng = data.draw(st.randoms(use_true_random=False))
    for _ in range(data.draw(st.integers(1, 60))):
        verb = rng.choice(
            ["route"] * 5 + ["speculate"] * 4 + ["release", "cancel", "unpin", "drop", "resize"]
        )
        bank = rng.choice(bank_of)
        if verb == "route":
            of_bank = [e for e, b in enumerate(bank_of) if b == bank]
            chosen = rng.sample(of_bank, rng.randint(1, len(of_bank)))
            tokens = rng.choice([1, 1, 1, 2, 7, 512])
            both("route", [(e, rng.randint(1, tokens)) for e in chosen], token, tokens)
            token += rng.choice([0, tokens])
        elif verb == "speculate":
            both("speculate", rng.randrange(len(bank_of)))
        elif verb == "release":
            both("release_speculative", bank)
        elif verb == "cancel":
            for expert in both.experts:
                if both("residency", expert) == "speculative":
                    both("cancel", expert)
                    break
        elif verb == "resize" and parts:
            part = rng.randrange(len(parts))
            both("set_capacity", part, rng.randint(0, len(parts[part][0]) + 1))
        elif verb == "drop":  # as a store does it: whatever of the last route the policy lets go
            both("unpin_route")
            for expert in both.experts:
                if both("residency", expert) == "resident" and rng.random() < 0.5:
                    both("drop", expert)
        else:
            both("unpin_route")


Step = tuple[int, int, list[tuple[int, int]]]


def local_routes(seed: int, banks: int, experts: int, k: int, steps: int) -> Iterator[Step]:
    """(token, tokens, route) of a model whose tokens mostly repeat the last choice and prefer low numbers."""
    rng = random.Random(seed)
    last = [rng.sample(range(experts), k) for _ in range(banks)]
    token = 0
    for step in range(steps):
        tokens = 16 if step % 50 == 0 else 1
        for bank in range(banks):
            fresh = [e for e in range(experts) if rng.random() < 1 / (1 + e)]
            wanted = [e for e in last[bank] if rng.random() < 0.6] + fresh + list(range(experts))
            last[bank] = list(dict.fromkeys(wanted))[:k]
            yield token, tokens, [(bank * experts + e, rng.randint(1, tokens)) for e in last[bank]]
        token += tokens


@pytest.mark.parametrize("policy", POLICIES)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(4, 40))
@settings(max_examples=15, deadline=None)
def test_core_equals_reference_on_routes_with_locality(policy: str, seed: int, k: int, capacity: int) -> None:
    banks, experts = 4, 10
    bank_of = [e // experts for e in range(banks * experts)]
    both = Both([(list(range(banks * experts)), capacity)], bank_of, policy)
    guess = random.Random(seed)
    for token, tokens, route in local_routes(seed, banks, experts, k, 120):
        both("route", route, token, tokens)
        bank = bank_of[route[0][0]]
        both("release_speculative", bank)
        for _ in range(2):  # as the engine does: the next layer's experts, right or wrong
            both("speculate", (bank + 1) % banks * experts + guess.randrange(experts))


# Two banks of six, one token a step, two experts a bank. The first half has a hot pair (0, 1) in both banks
# with a stream of others passing through; in the second half the hot pair is (4, 5).
BANK_0 = "01 02 13 01 04 15 01 23 01 10 02 01 45 43 45 52 45 41 45 40 54 35 45 45"
BANK_1 = "10 01 31 01 41 01 20 01 51 01 03 10 54 45 50 45 14 45 42 45 54 53 45 54"


def fixed_routes(clock: int = 0) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    for step, pair in enumerate(zip(BANK_0.split(), BANK_1.split(), strict=True)):
        for bank, chosen in enumerate(pair):
            yield clock + step, [(6 * bank + int(digit), 1) for digit in chosen]


def hits(make: Any, policy: str, capacity: int, clock: int = 0) -> int:
    cache = make([(list(range(12)), capacity)], [0] * 6 + [1] * 6, policy, priorities(12))
    for token, route in fixed_routes(clock):
        cache.route(route, token, 1)
    return int(cache.counters()["hits"])


# Hits of 96 uses at each capacity, worked out by the reference.
CAPACITIES = [2, 3, 4, 5, 6, 8, 10, 12]
PINNED = {
    "none": [0, 15, 33, 40, 48, 62, 71, 84],
    "lru": [0, 15, 46, 49, 63, 70, 74, 84],
    "lru-layer": [0, 15, 46, 55, 65, 71, 74, 84],
    "lfu-decay:4": [0, 22, 46, 59, 60, 67, 76, 84],
    "lfu-decay:16": [0, 17, 34, 46, 48, 67, 76, 84],
    "lfu-decay:64": [0, 14, 28, 36, 41, 65, 76, 84],
}


@pytest.mark.parametrize("make", [_core.ExpertCache, ReferenceCache])
@pytest.mark.parametrize("policy", PINNED)
def test_pinned_hits(make: Any, policy: str) -> None:
    assert [hits(make, policy, capacity) for capacity in CAPACITIES] == PINNED[policy]


@pytest.mark.parametrize("make", [_core.ExpertCache, ReferenceCache])
@pytest.mark.parametrize("clock", [0, 10**7, 10**12])
def test_lfu_decay_does_not_drift(make: Any, clock: int) -> None:
    """Eight uses in a row outlive one later use until they have decayed below it, at any clock."""
    survived = []
    for idle in range(30, 60):
        cache = make([([0, 1, 2], 2)], [0, 0, 0], "lfu-decay:16")
        for token in range(8):
            cache.route([(0, 1)], clock + token, 1)
        cache.route([(1, 1)], clock + 7 + idle, 1)
        cache.route([(2, 1)], clock + 7 + idle, 1)
        survived.append(cache.residency(0) == "resident")
    # f = sum of 2^(-i/16), i = 0..7 = 6.91: it is below 1 after 16 * log2(6.91) = 44.6 tokens.
    assert survived == [idle <= 44 for idle in range(30, 60)]
    assert hits(make, "lfu-decay", 5, clock) == hits(make, "lfu-decay", 5)


@pytest.mark.parametrize("make", [_core.ExpertCache, ReferenceCache])
def test_lfu_decay_weighs_a_step_by_its_tokens(make: Any) -> None:
    """32 uses spread over 512 tokens end as 32 * 16 / (512 ln 2) = 1.44 uses: two uses now outrank them."""
    cache = make([([0, 1, 2], 2)], [0, 0, 0], "lfu-decay:16")
    cache.route([(0, 32)], 0, 512)
    cache.route([(1, 1)], 512, 1)
    cache.route([(1, 1)], 513, 1)
    assert cache.route([(2, 1)], 513, 1) == [(2, 0)]


def test_constructor_names_what_is_wrong() -> None:
    for parts, policy, text in [
        ([([0, 1], 1)], "lur", "unknown member 'lur'.*lfu-decay, lru, lru-layer, none"),
        ([([0, 1], 1)], "lru:3", "lru takes no argument"),
        ([([0, 1], 1)], "sieve:3", "sieve takes no argument"),
        ([([0, 1], 1)], "pinned:FILE", "pinned needs a trace.*pinned:FILE"),
        ([([0, 1], 1)], "dontneed:-1", "how many experts of a bank stay"),
        ([([0, 1], 1)], "lfu-decay:0", "half-life is a number of tokens"),
        ([([0, 1], 1)], "lfu-decay:16x", "half-life is a number of tokens"),
        ([([0, 1], 1)], "lfu-decay:", "lacks its argument"),
        ([([0, 1], 0)], "lru", "capacity cannot be 0"),
        ([([0, 1], 3)], "lru", "capacity cannot be 3"),
        ([([1, 0], 1)], "lru", "ascending"),
        ([([0, 9], 1)], "lru", "expert 9 has no bank"),
        ([([0, 1], 1), ([1], 1)], "lru", "in another part"),
        ([([0], 1), ([1], 1)], "lru", "bank 0 is in two parts"),
    ]:
        with pytest.raises(_core.CoreError, match=text):
            _core.ExpertCache(parts, [0, 0, 1], policy)


def test_route_is_checked() -> None:
    cache = _core.ExpertCache([([0, 1, 2, 3], 2)], [0, 0, 1, 1], "lru")
    for route, tokens, text in [
        ([(0, 1), (0, 1)], 1, "once"),
        ([(0, 1), (2, 1)], 1, "one bank"),
        ([(4, 1)], 1, "expert 4 of 4"),
        ([(0, 0)], 1, "at least 1"),
        ([(0, 1)], 0, "at least 1"),
    ]:
        with pytest.raises(_core.CoreError, match=text):
            cache.route(route, 0, tokens)
    assert set(cache.counters().values()) == {0}


def test_policy_members_have_help() -> None:
    members = _core.policy_members()
    assert sorted({text.partition(":")[0] for text in POLICIES}) == list(members)
    assert all(members.values())


@given(st.integers(0, 2**32), st.integers(6, 20))
@settings(max_examples=3, deadline=None)
def test_lfu_adapt_equals_reference_when_moments_are_forgotten(seed: int, capacity: int) -> None:
    """More passes than it remembers, of banks too wide for one word of its sets."""
    rng = random.Random(seed)
    both = Both([(list(range(70 + 8)), capacity)], [0] * 70 + [1] * 8, "lfu-adapt")
    phrases = [[rng.sample(range(70), 4) for _ in range(6)] for _ in range(3)]
    token = 0
    while token < 330:
        for wide in rng.choice(phrases):
            both("route", [(e, 1) for e in wide], token, 1)
            both("route", [(70 + wide[0] % 8, 1)], token, 1)
            token += 1


@pytest.mark.parametrize("make", [_core.ExpertCache, ReferenceCache])
def test_lfu_adapt_knows_a_phrase_again(make: Any) -> None:
    """Phrases in any order, all as frequent: what belongs to the one at hand is kept, the rest pays."""
    rng = random.Random(1)
    phrases = [[[8 * p + 2 * i, 8 * p + 2 * i + 1] for i in range(4)] for p in range(3)]
    text = [route for _ in range(80) for route in rng.choice(phrases)]

    def misses(policy: str) -> int:
        cache = make([(list(range(24)), 12)], [0] * 24, policy)
        for token, route in enumerate(text):
            cache.route([(e, 1) for e in route], token, 1)
        return int(cache.counters()["misses"])

    others = [misses(policy) for policy in ("lru", "lfu-decay:16", "lfu-decay:64")]
    assert misses("lfu-adapt") < min(others)
