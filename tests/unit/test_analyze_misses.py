"""What predictors are worth to a cache, against small examples worked by hand and the engine's own counters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moestream.analyze import misses, predictors
from moestream.analyze.choices import Choices, from_trace
from moestream.analyze.plot import check_plot, plot
from moestream.analyze.predictors import Named
from moestream.analyze.report import analyze, cache_policy
from moestream.errors import UsageError
from moestream.replay import prepare, replay
from moestream.replay.curves import parse_budgets
from moestream.trace import Trace
from replay_traces import build, demo_trace, meta, small_trace

FRAME = 4096


def single(rows: list[list[int]], experts: int, capacity: int) -> Trace:
    """One bank, one token a step."""
    used = len(rows[0])
    about = meta([experts], used, [([0], FRAME)], [capacity])
    return build(about, [[(0, [row], [])] for row in rows], prompts=0)


def named(rows: list[list[int]]) -> list[Named]:
    return [Named(np.array(rows, np.int32))]


def test_coverage_by_hand() -> None:
    # An LRU of two over 0 1 2 2 0 1 | 3 1: the last two are held out. Before 3, {0, 1} are in memory and 3 is missed;
    # before 1, {1, 3} are, and 1 is there.
    trace = single([[0], [1], [2], [2], [0], [1], [3], [1]], 4, 2)
    choices = from_trace(trace)
    solo = misses.one_by_one(prepare(trace), choices)
    absent = misses.absent_before(solo, choices, "lru", [2])
    before, judged = absent
    assert judged.tolist() == [6, 7]
    assert before[0].tolist() == [[False, False, True, True], [True, False, True, False]]
    guess = named([[-1, -1]] * 6 + [[2, 3], [1, 0]])
    # First wishes: 2 is absent and wrong, 1 is there already.
    assert misses.coverage(solo, choices, guess, absent, 1) == {
        "named_share_of_misses": 0.0,
        "wasted_bytes_per_saved_byte": None,
    }
    # With the second: 3 is the miss, 0 is absent and wrong.
    assert misses.coverage(solo, choices, guess, absent, 2) == {
        "named_share_of_misses": 1.0,
        "wasted_bytes_per_saved_byte": 2.0,
    }


def test_effect_is_that_of_the_engine_s_cache() -> None:
    trace = single([[0], [1], [2], [2], [0], [1], [3], [1]], 4, 2)
    choices = from_trace(trace)
    solo = misses.one_by_one(prepare(trace), choices)
    plain = replay(solo, "lru", [2])
    right = named([[-1]] * 6 + [[3], [-1]])
    assert misses.effect(plain, choices, right, 1) == {
        "demand_bytes_saved": 1.0,
        "bytes_read_ratio": 1.0,
    }
    wrong = named([[-1]] * 6 + [[2], [-1]])
    # 2 takes the frame of 0, 3 then that of 1 (2 came later), which is wanted next: one miss more, one read for
    # nothing.
    assert misses.effect(plain, choices, wrong, 1) == {
        "demand_bytes_saved": -1.0,
        "bytes_read_ratio": 3.0,
    }


def test_one_by_one_has_the_same_choices() -> None:
    trace = demo_trace()
    choices, recording = from_trace(trace), prepare(trace)
    solo = misses.one_by_one(recording, choices)
    assert len(solo.experts) == choices.ids.size
    # The decoded tokens were one a step before: they are as they were.
    steps = recording.decode.nonzero()[0]
    tail = len(steps)
    for name in ("bank", "token", "tokens"):
        assert np.array_equal(getattr(solo, name)[-tail:], getattr(recording, name)[steps])
    assert np.array_equal(solo.experts[-tail * 8 :], recording.experts[int(recording.start[steps[0]]) :])


def test_wishes_stand_after_the_route_before() -> None:
    trace = demo_trace()
    choices = from_trace(trace)
    solo = misses.one_by_one(prepare(trace), choices)
    told = predictors.predict(choices)["previous"][1]
    wished = misses.with_wishes(solo, choices, told, 2)
    # After token 3's layer 4: the first two of token 2's layer 5; after the last layer: layer 0 of this token.
    for route, expected in (
        (3 * 30 + 4, choices.ids[2, 5, :2] + 5 * 64),
        (3 * 30 + 29, choices.ids[3, 0, :2]),
    ):
        begin, end = wished.wish_start[route : route + 2].astype(int)
        assert wished.wishes[begin:end].tolist() == expected.tolist()
    # Nothing is known before the second token, and nothing is wished after the last route.
    assert wished.wish_start[29] == 0
    assert wished.wish_start[-1] == wished.wish_start[-2]


def test_duplicates_among_the_ids_are_routed_once() -> None:
    trace = single([[1, 1], [2, 0]], 4, 2)
    solo = misses.one_by_one(prepare(trace), from_trace(trace))
    assert solo.experts.tolist() == [1, 0, 2]
    assert solo.start.tolist() == [0, 1, 3]


@pytest.mark.parametrize("capacity", [240, 480, 1900])
def test_misses_are_the_engine_s(capacity: int) -> None:
    """The experts marked absent before their route are exactly the misses that the core counts."""
    trace = demo_trace()
    choices = from_trace(trace)
    solo = misses.one_by_one(prepare(trace), choices)
    before, judged = misses.absent_before(solo, choices, "lfu-decay:16", [capacity])
    marked = sum(int((choices.hot(at)[judged] & before[at]).sum()) for at in range(30))
    counted = replay(solo, "lfu-decay:16", [capacity]).misses[judged[0] * 30 :]
    assert marked == counted.sum() > 0


def test_the_cliff_is_where_an_lru_first_hits() -> None:
    trace = demo_trace()
    choices = from_trace(trace)
    solo = misses.one_by_one(prepare(trace), choices)
    (cliff,) = misses._cliffs(solo)
    assert cliff is not None
    assert not replay(solo, "lru", [cliff - 1]).hits.any()
    assert replay(solo, "lru", [cliff]).hits.any()
    said = misses.demand(solo, choices)
    assert said["bytes_per_token"] == 30 * 8 << 20
    assert said["cliff_bytes"] == -(-(cliff << 20) // (2 << 20)) * (2 << 20)
    assert said["cliff_share"] == cliff / 1920


def test_experts_that_never_return_have_no_cliff() -> None:
    trace = single([[0], [1], [2], [3]], 4, 1)
    choices = from_trace(trace)
    said = misses.demand(misses.one_by_one(prepare(trace), choices), choices)
    assert (said["cliff_bytes"], said["cliff_share"]) == (None, None)


def test_a_repeated_route_hits_at_once() -> None:
    trace = single([[0, 1], [0, 1]], 4, 2)
    choices = from_trace(trace)
    said = misses.demand(misses.one_by_one(prepare(trace), choices), choices)
    assert said["cliff_share"] == 2 / 4


def test_tokens_that_lack_a_layer_need_no_less() -> None:
    """Of a prompt llama.cpp routes only the last token in the last layer: the others are no demand to learn from."""
    about = meta([4, 4], 1, [([0, 1], FRAME)], [4])
    prompt = [(0, [[0], [0], [0]], []), (1, [[1]], [])]
    trace = build(about, [prompt, *([(0, [[t % 3]], []), (1, [[t % 2]], [])] for t in range(5))])
    trace.routes.tokens[:2] = 3
    choices = from_trace(trace)
    assert choices.tokens == 8
    token, layer = misses.where(choices)
    assert token.tolist() == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert layer.tolist() == [0, 1] * 6
    assert misses.judged_tokens(choices).tolist() == [6, 7]


def test_a_trace_of_a_prompt_alone_is_judged_on_what_it_has() -> None:
    about = meta([4, 4], 1, [([0, 1], FRAME)], [4])
    trace = build(about, [[(0, [[t % 4] for t in range(8)], []), (1, [[1]], [])]])
    trace.routes.tokens[:] = 8
    trace.routes.rows[1] = 1
    choices = from_trace(trace)
    choices.ids[-1, 1] = -1  # not even the last token's
    assert misses.judged_tokens(choices).tolist() == [6, 7]
    assert len(misses.where(choices)[0]) == 8


def gate_trace() -> Trace:
    """Two layers; each route names what layer 1 will choose, and wrongly what layer 0 will."""
    about = meta([4, 4], 1, [([0, 1], FRAME)], [4], "arena+uring:8+lru+gate:1+anon")
    steps = [[(0, [[token % 4]], [4 + token % 3]), (1, [[token % 3]], [token % 4])] for token in range(20)]
    return build(about, steps, prompts=0)


def test_recorded_wishes_are_of_the_layer_and_token_they_were_for() -> None:
    trace = gate_trace()
    choices = from_trace(trace)
    by_lookahead = predictors.recorded(trace, choices)
    assert list(by_lookahead) == [1]
    told = by_lookahead[1]
    assert np.array_equal(told[1].ids[:, 0], choices.ids[:, 1, 0])
    # What the last layer named was for the next token.
    assert told[0].ids[:, 0].tolist() == [-1, *choices.ids[:-1, 0, 0].tolist()]
    tokens = predictors.held_out(choices)
    assert predictors.recall_by_layer(choices, told, tokens) == [0.0, 1.0]
    assert predictors.precision(choices, told, tokens, 1) == 0.5


def test_wishes_of_several_layers_are_told_apart() -> None:
    about = meta([4, 4, 4], 1, [([0, 1, 2], FRAME)], [6], "arena+uring:8+lru+gate:1x2+anon")
    steps = [
        [(0, [[0]], [4 + t % 4, 8 + t % 3]), (1, [[t % 4]], [8 + t % 2]), (2, [[t % 3]], [])]
        for t in range(20)
    ]
    said = document(build(about, steps, prompts=0))["predictors"]["recall"]["gate:1x2"]
    assert list(said) == ["1", "2"]
    # One layer ahead the second layer is always named, two layers ahead the third.
    assert said["1"][:2] == [None, 1.0]
    assert said["1"][2] < 1
    assert said["2"] == [None, None, 1.0]


def document(trace: Trace, budget: str = "recorded") -> dict:
    recording = prepare(trace, "a.parquet")
    return analyze(trace, recording, parse_budgets(budget, [recording]))


def test_a_recorded_gate_is_reported_under_its_own_text() -> None:
    told = document(gate_trace())["predictors"]
    assert told["recall"]["gate:1"] == {"1": [0.0, 1.0]}
    assert "gate" not in told["absent"]


def test_what_a_trace_does_not_hold_is_said_with_the_remedy() -> None:
    told = document(small_trace())["predictors"]
    assert "not in this trace" in told["absent"]["gate"]
    assert "--mechanism arena+gate:2x3 --trace FILE" in told["absent"]["gate"]  # as many as it routes
    short = document(single([[0], [1], [2]], 4, 2))["predictors"]
    assert "too few tokens in a row" in short["absent"]["ridge"]
    assert "ridge" not in short["recall"]


def test_a_long_prompt_whose_last_layer_was_seen_once_is_analysed_without_ridge() -> None:
    about = meta([4, 4], 1, [([0, 1], FRAME)], [4])
    trace = build(about, [[(0, [[t % 4] for t in range(40)], []), (1, [[1]], [])]])
    trace.routes.tokens[:] = 40
    said = document(trace)
    assert said["tokens"] == 40
    assert said["skew"][1]["distinct"] == 1
    assert "ridge" in said["predictors"]["absent"]


@pytest.mark.parametrize(
    "rows, experts",
    [([[0]], 1), ([[0]] * 20, 1), ([[0, 1, 2]] * 20, 3), ([[0], [1]] * 10, 2), ([[0, 0], [1, 0]] * 10, 2)],
    ids=["one token", "one expert", "all experts", "in turn", "duplicates"],
)
def test_any_trace_gives_a_whole_document(rows: list[list[int]], experts: int, tmp_path: Path) -> None:
    said = document(single(rows, experts, experts), "100%")
    json.dumps(said, allow_nan=False)
    plot(said, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_bytes().startswith(b"<?xml")


def test_the_demo_s_document() -> None:
    """Recorded once; a change of any figure is a change of meaning."""
    said = document(demo_trace(), "25%")
    json.dumps(said, allow_nan=False)
    assert "--mechanism arena+gate:8x3 --trace FILE" in said["predictors"]["absent"]["gate"]
    recall = {name: np.mean(by["1"]) for name, by in said["predictors"]["recall"].items()}
    assert recall["ridge"] > recall["previous"] + 0.1 > recall["random"] + 0.3
    assert recall["random"] == pytest.approx(8 / 64, abs=0.02)
    (budget,) = said["budgets"]
    assert budget["policy"] == "lru"
    for name in ("ridge", "random"):
        shares = [row["named_share_of_misses"] for row in budget["by"][name].values()]
        assert shares == sorted(shares)
        assert shares[0] > 0
    ridge, random = (budget["by"][name]["8"]["wasted_bytes_per_saved_byte"] for name in ("ridge", "random"))
    assert ridge * 4 < random
    # What the last token chose an LRU still holds: naming it again names no miss.
    assert budget["by"]["previous"]["8"]["named_share_of_misses"] == 0.0


@pytest.mark.parametrize(
    "mechanism, policy",
    [
        ("arena+uring:8+sieve+none+anon", "sieve"),
        ("arena+uring:8+none+none+anon", "lfu-adapt"),
        ("mapped+willneed", "lfu-adapt"),
        ("arena+pinned:routes.parquet", "lfu-adapt"),
    ],
)
def test_misses_are_counted_under_the_trace_s_own_policy(mechanism: str, policy: str) -> None:
    assert cache_policy(mechanism) == policy


def test_a_plot_s_name_is_checked_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in \.png, \.svg, \.pdf"):
        check_plot(tmp_path / "model.gguf")
    check_plot(tmp_path / "plot.PNG")


def test_choices_of_unequal_banks() -> None:
    """Banks of two widths in two parts, one of which nobody saw a choice of."""
    about = meta([4, 6, 8], 2, [([0, 1], FRAME), ([2], 2 * FRAME)], [6, 6])
    steps = [
        [(0, [[t % 4, (t + 1) % 4]], []), (1, [list(range(6))], []), (2, [[t % 8, (t + 3) % 8]], [])]
        for t in range(24)
    ]
    said = document(build(about, steps, prompts=0))
    assert said["layers"] == [0, 2]
    assert [row["experts"] for row in said["skew"]] == [4, 8]
    assert said["demand"]["bytes_per_token"] == 2 * FRAME + 2 * 2 * FRAME
    assert isinstance(from_trace(build(about, steps, prompts=0)), Choices)
