"""The order of runs, and how long those that are left will take."""

from __future__ import annotations

from bench_records import ARMS, DEFAULT, RESIDENT, SLOW, STOCK_ARM
from moestream.lab.bench_arms import Arm
from moestream.lab.schedule import Slot, schedule, time_left


def keys(slots: list[Slot], round: int, prompt: str) -> list[str]:
    return [slot.arm.key for slot in slots if (slot.round, slot.prompt) == (round, prompt)]


def test_the_sentinel_brackets_every_block_and_the_others_turn_round() -> None:
    slots = schedule(ARMS, ["one", "two"], 2, "default")
    forth = ["default", "stock", SLOW.key, "resident", "default"]
    back = ["default", "resident", SLOW.key, "stock", "default"]
    assert keys(slots, 0, "one") == keys(slots, 1, "two") == forth
    assert keys(slots, 0, "two") == keys(slots, 1, "one") == back
    assert [slot.again for slot in slots if slot.arm.key == "default"] == [False, True] * 4


def test_positions_count_through_a_round() -> None:
    slots = schedule(ARMS, ["one", "two"], 2, "default")
    assert [slot.name for slot in slots] == [(r, p) for r in range(2) for p in range(10)]


def test_over_rounds_every_pair_of_arms_is_in_both_orders_equally_often() -> None:
    slots = schedule(ARMS, ["one", "two", "three"], 4, None)
    first = 0
    for round in range(4):
        for prompt in ("one", "two", "three"):
            block = keys(slots, round, prompt)
            first += block.index("stock") < block.index(SLOW.key)
    assert first == 6


def test_an_arm_with_prompts_of_its_own_runs_on_those_only() -> None:
    own = Arm("own", None, None, prompts=("two",))
    slots = schedule([STOCK_ARM, own], ["one", "two"], 1, None)
    assert [(slot.prompt, slot.arm.key) for slot in slots] == [
        ("one", "stock"),
        ("two", "own"),
        ("two", "stock"),
    ]


def test_more_rounds_leave_the_first_ones_as_they_were() -> None:
    few, many = (schedule(ARMS, ["one", "two", "three"], count, "default") for count in (2, 5))
    assert many[: len(few)] == few


def test_time_left_counts_each_arm_as_it_was_and_an_unknown_one_as_the_mean() -> None:
    slots = [Slot(0, number, "one", arm) for number, arm in enumerate((STOCK_ARM, DEFAULT, RESIDENT))]
    assert time_left({}, slots) is None
    assert time_left({"stock": [10.0, 20.0], "default": [3.0]}, slots) == 15 + 3 + 11
    assert time_left({"stock": [10.0]}, []) == 0
