"""Replay against what it must equal: the cache stepped by hand, the reference, brute force, counting loops."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestream import _core
from moestream.errors import RefusedError, UsageError
from moestream.replay import BELADY, Recording, check_fidelity, prepare, replay
from moestream.trace import Trace
from reference.cache import ReferenceCache
from replay_traces import Route, build, demo_trace, meta

POLICIES = ["none", "lru", "lru-layer", "lfu-decay:16"]


def stepped(trace: Trace, policy: str, capacities: tuple[int, ...]) -> tuple[ReferenceCache, list[list[int]]]:
    """The recording by the reference, route by route as the engine does it: [hits, misses, early] of each."""
    recording = prepare(trace)
    parts = list(zip(recording.part_experts, capacities, strict=True))
    cache = ReferenceCache(parts, recording.bank_of, policy)
    rows = []
    for r in range(len(trace.routes)):
        first = int(trace.first_expert[trace.routes.bank[r]])
        experts, counts = np.unique(trace.routes.of(r), return_counts=True)
        before = cache.counters()
        route = [(first + int(e), int(n)) for e, n in zip(experts, counts, strict=True)]
        moves = cache.route(route, int(trace.routes.token[r]), int(trace.routes.tokens[r]))
        if moves is not None:
            cache.release_speculative(int(trace.routes.bank[r]))
            for wish in trace.routes.wish_ids[trace.routes.wish_start[r] : trace.routes.wish_start[r + 1]]:
                cache.speculate(int(wish))
        now = cache.counters()
        rows.append([now[name] - before[name] for name in ("hits", "misses", "speculative_issued")])
    return cache, rows


@pytest.mark.parametrize("wishes", [False, True])
@pytest.mark.parametrize(("capacity", "parts"), [(240, 1), (640, 2)])
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_is_the_cache_stepped_by_hand(policy: str, capacity: int, parts: int, wishes: bool) -> None:
    trace = demo_trace(capacity, policy, parts, wishes)
    capacities = (capacity // parts,) * parts
    cache, rows = stepped(trace, policy, capacities)
    done = replay(prepare(trace), policy, capacities)
    assert done.counters == cache.counters()
    assert np.stack([done.hits, done.misses, done.early], axis=1).tolist() == rows
    assert (done.counters["speculative_issued"] > 0) == wishes
    assert done.policy == policy
    # Layer b is of part b % parts, whose frames are 1 MiB >> part; a guess is for the next layer.
    bank = trace.routes.bank
    assert (done.bytes == done.misses.astype(np.int64) * ((1 << 20) >> (bank % parts))).all()
    assert (done.early_bytes == done.early.astype(np.int64) * ((1 << 20) >> ((bank + 1) % 30 % parts))).all()


def test_without_speculation_nothing_is_loaded_early() -> None:
    plain = replay(prepare(demo_trace(240)), "lru", (240,))
    left_out = replay(prepare(demo_trace(240, wishes=True)), "lru", (240,), speculation=False)
    assert left_out.counters == plain.counters
    assert left_out.early.sum() == 0


def test_steps_add_up() -> None:
    done = replay(prepare(demo_trace(240, wishes=True)), "lru", (240,))
    table = done.per_step()
    assert len(table["step"]) == 65
    for name in ("hits", "misses", "early", "bytes", "early_bytes", "refused"):
        assert table[name].sum() == getattr(done, name).sum()
    assert table["misses"][3] == done.misses[90:120].sum()


def test_recorded_mechanism_gives_the_recorded_hits() -> None:
    trace = demo_trace(240, "lfu-decay:16", wishes=True)
    _, rows = stepped(trace, "lfu-decay:16", (240,))
    by_step = np.array(rows).reshape(65, 30, 3).sum(axis=1)
    trace.steps.update(hits=by_step[:, 0], misses=by_step[:, 1])
    fidelity = check_fidelity(trace, prepare(trace))
    assert fidelity is not None
    assert (fidelity.steps, fidelity.different_steps) == (65, 0)
    assert (fidelity.hits, fidelity.misses) == tuple(by_step.sum(axis=0)[:2])
    trace.steps["hits"][7] += 1
    different = check_fidelity(trace, prepare(trace))
    assert different is not None and different.different_steps == 1


def test_a_mechanism_without_a_cache_has_nothing_to_reproduce() -> None:
    trace = demo_trace()
    trace.meta["model"]["capacities"] = []
    assert check_fidelity(trace, prepare(trace)) is None


def test_warming_is_left_out_of_the_counters() -> None:
    recording = prepare(demo_trace(240, wishes=True))
    half = recording.middle()
    assert half == 32 * 30
    whole, warm = (replay(recording, "lru", (240,), counted_from=n) for n in (0, half))
    assert (warm.hits == whole.hits).all()
    assert warm.counters["hits"] == whole.hits[half:].sum()
    assert warm.counters["misses"] == whole.misses[half:].sum()
    assert warm.counters["speculative_issued"] == whole.early[half:].sum()
    assert set(replay(recording, "lru", (240,), counted_from=len(recording)).counters.values()) == {0}
    bound = replay(recording, BELADY, (240,), counted_from=half)
    assert bound.counters["misses"] == bound.misses[half:].sum()


def test_halves_are_replayed_for_themselves() -> None:
    recording = prepare(demo_trace(240, wishes=True))
    half = recording.middle()
    first, second = recording.cut(0, half), recording.cut(half, len(recording))
    whole = replay(recording, "lru", (240,))
    assert (replay(first, "lru", (240,)).misses == whole.misses[:half]).all()
    cold = replay(second, "lru", (240,))
    assert cold.misses[0] == 8  # the cache is empty
    assert cold.counters["misses"] > whole.misses[half:].sum()


def test_too_wide_a_route_is_refused_and_counted() -> None:
    trace = demo_trace()
    widths = prepare(trace).widths
    capacity = int(widths.max()) - 1
    for policy in ("lru", BELADY):
        done = replay(prepare(trace), policy, (capacity,))
        assert (done.refused == (widths > capacity)).all()
        assert done.refused.any()
        assert not done.hits[done.refused].any() and not done.misses[done.refused].any()
        assert done.hits[~done.refused].sum() + done.misses.sum() == widths[~done.refused].sum()


def test_a_bank_in_no_part_neither_hits_nor_unpins() -> None:
    """As in the arena: what is always in memory never reaches the cache, and its route pins nothing."""
    about = meta([2, 2, 2], 1, [([0, 2], 4096)], [2])
    # Bank 1 always stays. Its wish may take nobody's place: bank 0's expert is pinned still, bank 2's protected.
    steps: list[list[Route]] = [[(0, [[0]], [4]), (1, [[1]], [5]), (2, [[0]], [])]]
    done = replay(prepare(build(about, steps)), "lru", (2,))
    assert done.hits.tolist() == [0, 0, 1]
    assert done.misses.tolist() == [1, 0, 0]
    assert done.early.tolist() == [1, 0, 0]
    assert replay(prepare(build(about, steps)), BELADY, (2,)).hits.tolist() == [0, 0, 0]


def test_counts_are_the_tokens_that_chose() -> None:
    about = meta([4], 2, [([0], 4096)], [4])
    recording = prepare(build(about, [[(0, [[3, 1], [1, 2], [1, 3]], [])]]))
    assert recording.experts.tolist() == [1, 2, 3]
    assert recording.counts.tolist() == [3, 1, 2]
    assert recording.tokens.tolist() == [3]
    assert recording.widest == [3]


# -- Belady ---------------------------------------------------------------------------------------------------


def fewest_misses(routes: list[frozenset[int]], capacity: int) -> int:
    """By trying every way to keep: what is kept after a route holds all of it and nothing that was not there."""

    @functools.cache
    def best(number: int, held: frozenset[int]) -> int:
        if number == len(routes):
            return 0
        route = routes[number]
        others = held - route
        room = capacity - len(route)
        kept = itertools.combinations(sorted(others), min(room, len(others)))
        return len(route - held) + min(best(number + 1, route | frozenset(keep)) for keep in kept)

    return best(0, frozenset())


routes_of_one_bank = st.lists(
    st.frozensets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=9
)


@given(routes=routes_of_one_bank, capacity=st.integers(3, 6))
@settings(max_examples=200, deadline=None)
def test_belady_is_the_optimum(routes: list[frozenset[int]], capacity: int) -> None:
    steps: list[list[Route]] = [[(0, [sorted(route)], [])] for route in routes]
    recording = prepare(build(meta([6], 1, [([0], 4096)], [capacity]), steps))
    assert replay(recording, BELADY, (capacity,)).counters["misses"] == fewest_misses(routes, capacity)


@given(routes=routes_of_one_bank)
@settings(max_examples=100, deadline=None)
def test_belady_ignores_what_is_refused(routes: list[frozenset[int]]) -> None:
    """A route wider than the capacity is no future use: the optimum is that of the others."""
    steps: list[list[Route]] = [[(0, [sorted(route)], [])] for route in routes]
    recording = prepare(build(meta([6], 1, [([0], 4096)], [2]), steps))
    fitting = [route for route in routes if len(route) <= 2]
    assert replay(recording, BELADY, (2,)).counters["misses"] == fewest_misses(fitting, 2)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("capacity", [128, 240, 640, 1280, 1900])
def test_no_policy_loads_less_than_belady(capacity: int, parts: int) -> None:
    capacities = (capacity // parts,) * parts
    recording = prepare(demo_trace(wishes=True, parts=parts))
    least = replay(recording, BELADY, capacities)
    assert least.early.sum() == 0
    for policy in POLICIES:
        done = replay(recording, policy, capacities)
        assert done.counters["misses"] + done.counters["speculative_issued"] >= least.counters["misses"]
        assert done.bytes.sum() + done.early_bytes.sum() >= least.bytes.sum()
    distinct = len(np.unique(recording.experts))
    assert least.counters["misses"] >= distinct
    assert least.counters["hits"] + least.counters["misses"] == len(recording.experts)


def test_belady_counts_each_part_for_itself() -> None:
    recording = prepare(demo_trace(parts=2))
    both = replay(recording, BELADY, (120, 300))
    for part, capacity in enumerate((120, 300)):
        own = np.isin(recording.bank, recording.geometry.parts[part].banks)
        alone = dataclasses.replace(
            recording,
            geometry=dataclasses.replace(recording.geometry, parts=(recording.geometry.parts[part],)),
        )
        done = replay(alone, BELADY, (capacity,))
        assert (done.misses[own] == both.misses[own]).all()


# -- speed ----------------------------------------------------------------------------------------------------


def many_routes(routed: int, banks: int = 48, experts: int = 128, used: int = 8) -> Recording:
    """A recording of so many routed experts, skewed as routers are."""
    rng = np.random.default_rng(5)
    routes = routed // used
    ids = np.argsort(rng.random((routes, experts)) / np.linspace(4, 1, experts), axis=1)[:, :used]
    bank = np.arange(routes) % banks
    flat = np.sort(ids, axis=1) + (bank * experts)[:, None]
    template = prepare(
        build(meta([experts] * banks, used, [(list(range(banks)), 4096)], []), [[(0, [[0]], [])]])
    )
    return dataclasses.replace(
        template,
        step=bank,
        decode=np.ones(routes, bool),
        bank=bank.astype(np.uint32),
        token=(np.arange(routes) // banks).astype(np.uint64),
        tokens=np.ones(routes, np.uint32),
        start=np.arange(0, routes * used + 1, used).astype(np.uint64),
        experts=flat.ravel().astype(np.uint32),
        counts=np.ones(routes * used, np.uint32),
        wish_start=np.zeros(routes + 1, np.uint64),
    )


@pytest.mark.parametrize("policy", [*POLICIES, "lfu-adapt", "sieve", "s3fifo", BELADY])
def test_a_routed_expert_costs_no_more_than_counting_it(policy: str) -> None:
    """A million in five seconds is 5 us each, what an interpreter takes for a few dozen instructions. Held against
    such a loop, so that a busy machine slows both."""
    recording = many_routes(200_000)
    started = time.process_time()
    count: dict[int, int] = {}
    for _ in range(10):
        for expert in recording.experts.tolist():
            count[expert] = count.get(expert, 0) + 1
    counting = time.process_time() - started
    started = time.process_time()
    done = replay(recording, policy, (1500,))
    replaying = time.process_time() - started
    assert done.counters["misses"] > 10_000
    assert replaying < 4 * counting, f"{replaying:.3f} s for what counting ten times takes {counting:.3f} s"


@pytest.mark.parametrize("policy", sorted({*_core.policy_members(), BELADY}))
def test_a_million_routed_experts_take_less_than_five_seconds(policy: str) -> None:
    """Of processor time, which another process on the machine does not lengthen much."""
    recording = many_routes(1_000_000)
    priority = np.zeros(48 * 128)
    started = time.process_time()
    done = replay(recording, policy, (1500,), priority=priority)
    assert time.process_time() - started < 5
    assert done.counters["hits"] + done.counters["misses"] == 1_000_000


# -- bad input ------------------------------------------------------------------------------------------------


def test_what_the_core_does_not_know_is_said() -> None:
    recording = prepare(demo_trace())
    with pytest.raises(UsageError, match="mru"):
        replay(recording, "mru", (480,))
    with pytest.raises(UsageError, match="capacity cannot be 0"):
        replay(recording, BELADY, (0,))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"experts": np.array([0, 0], np.uint32)}, "names an expert twice"),
        ({"experts": np.array([0, 9], np.uint32)}, "the model does not have"),
        ({"experts": np.array([0, 4], np.uint32)}, "of another bank"),
        ({"counts": np.array([0, 1], np.uint32)}, "no token chose"),
        ({"counts": np.array([1], np.uint32)}, "one a routed expert"),
        ({"tokens": np.array([0], np.uint32)}, "without tokens"),
        ({"start": np.array([0, 1], np.uint64)}, "from 0 to 2"),
        ({"start": np.array([0], np.uint64)}, "one entry more"),
        ({"bank": np.array([2], np.uint32)}, "a bank the model does not have"),
        ({"wishes": np.array([9], np.uint32)}, "wishes for an expert"),
    ],
)
def test_the_core_checks_what_it_is_given(change: dict[str, np.ndarray], complaint: str) -> None:
    about = meta([4, 4], 2, [([0, 1], 4096)], [4])
    recording = prepare(build(about, [[(0, [[0, 1]], [5])]]))
    assert replay(recording, "lru", (4,)).counters["misses"] == 2
    with pytest.raises(UsageError, match=complaint):
        replay(dataclasses.replace(recording, **change), "lru", (4,))


def test_a_trace_that_cannot_be_replayed_is_refused() -> None:
    about = meta([4], 2, [([0], 4096)], [4])
    with pytest.raises(RefusedError, match=r"^a\.parquet holds no steps, and so no routes"):
        prepare(build(about, []), "a.parquet")
    silent = build({**about, "mechanism": "mapped+fault"}, [])
    silent.steps["step"] = np.arange(3)
    with pytest.raises(
        RefusedError, match=r"^a\.parquet holds no routes \(it was recorded under mapped\+fault\)"
    ):
        prepare(silent, "a.parquet")
    small = build({**about, "model": {**about["model"], "parts": []}}, [[(0, [[0, 1]], [])]])
    with pytest.raises(RefusedError, match="too small to stream"):
        prepare(small)


def test_only_replay_has_belady() -> None:
    assert BELADY not in _core.policy_members()
