"""Misses of the published policies equal those of libcachesim, on objects of one size.

Routes name one expert each, so that no expert is kept only because its route needs it. Where libcachesim leaves a
choice, ours is the same: LFU forgets an expert's count when it leaves and of equals takes the one used longest ago;
S3-FIFO lets newcomers overflow into the main queue until the first eviction, as its authors' code does. Its queues
are whole numbers of experts, rounded down, so capacities under ten (where theirs refuses) are not compared.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from moestream import _core
from record_routes import RECORDED
from reference.belady import belady_misses

libcachesim = pytest.importorskip(
    "libcachesim", reason="libcachesim is not installed: pip install libcachesim"
)

OURS = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "sieve": "Sieve", "s3fifo": "S3FIFO", "belady": "Belady"}
CAPACITIES = [20, 37, 64, 99, 150, 240, 333, 700]
NEVER = 2**63 - 1
EXPERTS = 1920


def zipf() -> list[int]:
    chance = np.random.default_rng(1)
    return [int(rank) for rank in chance.zipf(1.2, 30_000) if rank < EXPERTS]


def drifting() -> list[int]:
    """A hot set that moves, with scans through it."""
    rng = random.Random(2)
    hot = [(time // 40 + int(rng.expovariate(1 / 60))) % EXPERTS for time in range(20_000)]
    return hot[:8_000] + list(range(500)) * 2 + hot[8_000:]


def recorded() -> list[int]:
    """The demo model's decode, expert after expert."""
    with np.load(RECORDED) as file:
        chosen = file["chosen"][int(file["prompt"]) :].astype(int)
    layers = np.arange(chosen.shape[1])[None, :, None]
    return (chosen + layers * int(chosen.max() + 1)).ravel().tolist()


STREAMS = {make.__name__: make() for make in (zipf, drifting, recorded)}


def our_misses(policy: str, stream: list[int], capacity: int) -> int:
    count = len(stream)
    done = _core.replay(
        bank=np.zeros(count, np.uint32),
        token=np.arange(count, dtype=np.uint64),
        tokens=np.ones(count, np.uint32),
        start=np.arange(count + 1, dtype=np.uint64),
        experts=np.asarray(stream, np.uint32),
        counts=np.ones(count, np.uint32),
        wish_start=np.empty(0, np.uint64),
        wishes=np.empty(0, np.uint32),
        parts=[(list(range(EXPERTS)), capacity)],
        part_bytes=[1],
        bank_of=[0] * EXPERTS,
        policy=policy,
        priority=[],
        counted_from=0,
    )
    return int(done["counters"]["misses"])


def their_misses(policy: str, stream: list[int], capacity: int) -> int:
    cache = getattr(libcachesim, policy)(cache_size=capacity, hashpower=12)
    next_use, following = [NEVER] * len(stream), dict[int, int]()
    for time in reversed(range(len(stream))):
        next_use[time] = following.get(stream[time], NEVER)
        following[stream[time]] = time
    request = libcachesim.Request(obj_size=1)
    misses = 0
    for time, expert in enumerate(stream):
        request.obj_id, request.clock_time, request.next_access_vtime = expert + 1, time, next_use[time]
        misses += not cache.get(request)
    return misses


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("policy", OURS)
def test_misses_are_equal(policy: str, stream: str) -> None:
    ours = {capacity: our_misses(policy, STREAMS[stream], capacity) for capacity in CAPACITIES}
    theirs = {capacity: their_misses(OURS[policy], STREAMS[stream], capacity) for capacity in CAPACITIES}
    assert ours == theirs
    assert len(set(ours.values())) >= 4, "the capacities do not tell policies apart"


@pytest.mark.parametrize("capacity", [20, 240])
def test_belady_equals_plain_python(capacity: int) -> None:
    stream = STREAMS["drifting"][:6_000]
    assert our_misses("belady", stream, capacity) == belady_misses([[expert] for expert in stream], capacity)
