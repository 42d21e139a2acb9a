"""When expert pages are given back and taken again: decisions on planted memory, moves only where they may be made."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from moestream.box import Box
from moestream.cli.banner import summary
from moestream.geometry import Geometry, Part
from moestream.governor import CALM_S, LOW_BYTES, PERIOD_S, Change, Decision, Governor, Memory

MB = 1 << 20
PLENTY = Memory(8 << 30)


def decision(planned: int = 800 * MB, floor: int = 100 * MB, left: int = 4 << 30) -> Decision:
    return Decision(planned, floor, left)


def test_nothing_moves_while_there_is_enough() -> None:
    decide = decision()
    assert [decide(800 * MB, PLENTY, second) for second in range(60)] == [800 * MB] * 60


def test_what_is_lacking_is_given_back_and_an_eighth_at_least() -> None:
    decide = decision()
    assert decide(800 * MB, Memory(LOW_BYTES - 10 * MB), 0) == 700 * MB
    assert decide(700 * MB, Memory(LOW_BYTES - 150 * MB), 0.1) == 550 * MB


def test_never_below_what_one_step_needs() -> None:
    decide = decision()
    assert decide(150 * MB, Memory(0), 0) == 100 * MB
    assert decide(100 * MB, Memory(0), 1) == 100 * MB


def test_stalls_count_only_where_little_is_left() -> None:
    decide = decision()
    assert decide(800 * MB, Memory(4 << 30, stalled_percent=50), 0) == 800 * MB
    assert decide(800 * MB, Memory(LOW_BYTES + MB, stalled_percent=50), 1) == 700 * MB


def test_a_load_that_left_little_is_no_want_by_itself() -> None:
    decide = decision(left=20 * MB)
    assert decide.low == 10 * MB
    assert decide(800 * MB, Memory(19 * MB), 0) == 800 * MB
    assert decide(800 * MB, Memory(18 * MB, stalled_percent=50), 0.5) == 800 * MB
    assert decide(800 * MB, Memory(5 * MB), 1) == 700 * MB


def test_pages_are_taken_again_in_steps_once_it_is_calm() -> None:
    decide = decision()
    held = decide(800 * MB, Memory(0), 0)
    moments = []
    for tenth in range(1, 1200):
        after = decide(held, PLENTY, tenth / 10)
        if after != held:
            moments.append(tenth / 10)
            assert 0 < after - held <= 50 * MB
        held = after
    assert held == 800 * MB
    assert moments[0] >= CALM_S
    assert all(b - a >= CALM_S for a, b in itertools.pairwise(moments))


def test_a_budget_of_few_experts_grows_too() -> None:
    decide = Decision(16 * MB, 2 * MB, 4 << 30, least_step=2 * MB)
    held = decide(16 * MB, Memory(0), 0)
    assert decide(held, PLENTY, 1) == held
    assert decide(held, PLENTY, 1 + CALM_S) == held + 2 * MB


def test_what_is_taken_once_does_not_go_on() -> None:
    decide = decision()
    lefts = [2 << 30, 2 << 30, (2 << 30) - 300 * MB, (2 << 30) - 300 * MB]
    for look, left in enumerate(lefts):
        assert decide(800 * MB, Memory(left), look / 10, 1.0) == 800 * MB


@pytest.mark.parametrize("step_s", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("left_at_load", [2 << 30, 4 << 30])
@pytest.mark.parametrize("rate", [100 * MB, 2 << 30, 3 << 30])
def test_a_fast_neighbour_never_finds_memory_gone(rate: int, left_at_load: int, step_s: float) -> None:
    """One that takes nearly all we can give, at a steady rate, while steps let what is decided come true only now and
    then."""
    tick, period = 0.01, PERIOD_S
    planned, floor = 8 << 30, 1 << 30
    decide = decision(planned, floor, left_at_load)
    held = wanted = planned
    wants, taken, least = left_at_load + (planned - floor) * 0.8, 0.0, left_at_load
    for count in range(int((wants / rate + 2) / tick)):
        taken = min(wants, taken + rate * tick)
        if count % round(step_s / tick) == 0:
            held = wanted
        left = int(left_at_load + planned - held - taken)
        least = min(least, left)
        if count % round(period / tick) == 0:
            wanted = decide(held, Memory(max(0, left)), count * tick, 2 * period + step_s)
    assert taken == wants
    assert least > 0


def test_what_would_bring_the_want_back_is_not_taken() -> None:
    decide = decision()
    held = decide(800 * MB, Memory(0), 0)
    barely = Memory(2 * decide.low + 10 * MB)
    assert all(decide(held, barely, second) == held for second in range(1, 100))


GEOMETRY = Geometry((Part((0, 1), (16, 16), ((64, 4), (64, 4))),), 0, 0)


class Watched:
    """A governor over a budget of 64 experts whose memory the test says."""

    def __init__(self) -> None:
        self.memory = PLENTY
        self.looked = threading.Semaphore(0)
        self.resized: list[list[int]] = []
        self.least = 0  # experts that the policy cannot part with
        self.computing = threading.RLock()
        self.governor = Governor(self._resize, GEOMETRY, [64], 1, self.computing, self._look)

    def _look(self) -> Memory:
        self.looked.release()
        return self.memory

    def _resize(self, capacities: Sequence[int]) -> Sequence[int]:
        self.resized.append(list(capacities))
        return [max(count, self.least) for count in capacities]

    def wait(self, looks: int) -> None:
        while self.looked.acquire(blocking=False):
            pass
        for _ in range(looks):
            assert self.looked.acquire(timeout=30)


def test_an_idle_model_gives_back_by_itself() -> None:
    watched = Watched()
    told: list[Change] = []
    watched.governor.on_change = told.append
    watched.memory = Memory(0)
    watched.wait(4)
    watched.governor.close()
    assert watched.resized
    assert all(a[0] > b[0] for a, b in zip([[64], *watched.resized], watched.resized, strict=False))
    assert told == watched.governor.changes
    assert str(told[0]).startswith("gave back ")


def test_what_is_held_is_what_the_store_came_to() -> None:
    watched = Watched()
    watched.least = 40
    with watched.computing:
        watched.memory = Memory(0)
        watched.wait(2)
        watched.governor.step()
    (change,) = watched.governor.changes
    assert (change.before_bytes, change.bytes) == (GEOMETRY.bytes_of([64]), GEOMETRY.bytes_of([40]))
    watched.wait(4)  # asks again, and nothing more can be had: no change is told
    watched.governor.close()
    assert len(watched.resized) > 1
    assert watched.governor.changes == [change]


def test_what_computes_is_waited_for() -> None:
    watched = Watched()
    with watched.computing:  # this thread is the one that computes
        watched.memory = Memory(0)
        watched.wait(4)
        assert watched.resized == []
        watched.governor.step()
        assert len(watched.resized) == 1
    watched.governor.close()


def test_psi_is_read_of_the_machine_and_of_every_group(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "sys/fs/cgroup/a"
    (proc / "self").mkdir(parents=True)
    (proc / "pressure").mkdir()
    group.mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/a\n")
    (proc / "self/mountinfo").write_text("30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    assert Box(tmp_path).stalled_percent() == 0.0
    (proc / "pressure/memory").write_text(
        "some avg10=1.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 total=0\n"
    )
    assert Box(tmp_path).stalled_percent() == 1.5
    (group / "memory.pressure").write_text("some avg10=12.25 avg60=0.00 avg300=0.00 total=1\n")
    assert Box(tmp_path).stalled_percent() == 12.25
    # Where the cgroup is what bounds, others' stalls are for their own limits.
    (proc / "meminfo").write_text("MemAvailable: 9999999 kB\n")
    (group / "memory.max").write_text("1073741824\n")
    (group / "memory.pressure").write_text("some avg10=0.25 avg60=0.00 avg300=0.00 total=1\n")
    assert Box(tmp_path).stalled_percent() == 0.25


def test_a_run_s_summary_says_what_was_given() -> None:
    phase = dict.fromkeys(("tokens", "tok_per_s", "hits", "misses", "read_bytes_os"), 0)
    document = {"prefill": phase, "decode": phase, "budget": {"cap_bytes": None}, "ended": "tokens"}
    document["swapped"] = {}
    changes = [{"bytes": size} for size in (300_000_000, 200_000_000, 250_000_000)]
    assert "gave memory to others, 200 MB of experts at the least" in summary(
        {**document, "governor": changes}, 0
    )
    assert "gave" not in summary({**document, "governor": []}, 0)
    assert "gave" not in summary({**document, "governor": None}, 0)
