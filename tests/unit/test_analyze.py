"""Choices by token, skew and locality, against small examples worked by hand and what must always hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from moestream.analyze.choices import Choices, back, from_array, from_trace, source, split
from moestream.analyze.routing import DISTANCES, WINDOW, locality, mean_over_layers, skew, usage
from moestream.errors import RefusedError
from replay_traces import build, demo_trace, meta

PARTS = [([0, 1], 4096)]


def one_layer(rows: list[list[int]], experts: int) -> Choices:
    return from_array(np.array(rows)[:, None, :], experts)


def test_a_prompt_s_rows_are_its_tokens() -> None:
    steps = [[(0, [[3, 1], [2, 0]], []), (1, [[0, 1], [1, 3]], [])], [(0, [[1, 2]], []), (1, [[3, 2]], [])]]
    choices = from_trace(build(meta([4, 4], 2, PARTS, [8]), steps))
    assert choices.ids.tolist() == [[[3, 1], [0, 1]], [[2, 0], [1, 3]], [[1, 2], [3, 2]]]
    assert choices.clock.tolist() == [0, 1, 2]
    assert (choices.banks, choices.layers, choices.experts, choices.used) == ((0, 1), (0, 1), (4, 4), (2, 2))


def test_rows_dropped_before_the_last_layer_are_missing_not_guessed() -> None:
    trace = build(meta([4, 4], 2, PARTS, [8]), [[(0, [[3, 1], [2, 0]], []), (1, [[1, 3]], [])]])
    trace.routes.tokens[:] = 2
    choices = from_trace(trace)
    assert choices.ids[:, 1].tolist() == [[-1, -1], [1, 3]]
    assert choices.seen(1).tolist() == [False, True]
    assert choices.hot(1).sum(axis=1).tolist() == [0, 2]


def test_a_bank_that_was_read_whole_chose_nothing() -> None:
    whole = [[0, 1, 2, 3]]
    trace = build(meta([4, 4], 2, PARTS, [8]), [[(0, [[3, 1]], []), (1, whole, [])]])
    assert from_trace(trace).banks == (0,)


def test_all_experts_of_a_bank_are_a_choice_where_a_token_uses_all() -> None:
    trace = build(meta([4], 4, [([0], 4096)], [4]), [[(0, [[3, 1, 0, 2]], [])]])
    assert from_trace(trace).hot(0).tolist() == [[True] * 4]


def test_the_clock_of_a_failed_step_chose_nothing() -> None:
    trace = build(meta([4], 1, [([0], 4096)], [4]), [[(0, [[3]], [])], [(0, [[1]], [])]])
    trace.routes.token[1] = 7
    choices = from_trace(trace)
    assert choices.ids.tolist() == [[[3]], [[1]]]
    assert choices.clock.tolist() == [0, 7]


def test_a_trace_without_routes_is_refused() -> None:
    about = meta([4], 1, [([0], 4096)], [4])
    with pytest.raises(RefusedError, match="holds no steps, and so no routes"):
        from_trace(build(about, []))
    with pytest.raises(RefusedError, match="holds no token's choice, only banks that were read whole"):
        from_trace(build(about, [[(0, [[0, 1, 2, 3]], [])]]))


def test_clocks_far_apart_take_no_room() -> None:
    trace = build(meta([4], 1, [([0], 4096)], [4]), [[(0, [[3], [2]], [])], [(0, [[1]], [])]])
    trace.routes.token[1] = 1 << 50
    choices = from_trace(trace)
    assert choices.ids.tolist() == [[[3]], [[2]], [[1]]]
    assert choices.clock.tolist() == [0, 1, 1 << 50]


def test_the_demo_s_choices_are_those_recorded() -> None:
    choices = from_trace(demo_trace())
    assert choices.ids.shape == (77, 30, 8)
    assert choices.ids.min() >= 0


def test_skew_by_hand() -> None:
    # Expert 2 is chosen by four of six tokens, 0 and 1 by one each, 3 by none: 50 % take one expert, 80 % two
    # (5/6 = 83 %), 95 % three.
    (row,) = skew(one_layer([[2], [2], [0], [2], [1], [2]], 4))
    assert row["needed"] == {"50%": 1, "80%": 2, "95%": 3}
    assert (row["distinct"], row["experts"], row["distinct_in_window"]) == (3, 4, None)


def test_a_share_that_is_met_exactly_needs_no_more() -> None:
    (row,) = skew(one_layer([[0], [0], [0], [0], [1]], 8))
    assert row["needed"] == {"50%": 1, "80%": 1, "95%": 2}


def test_distinct_in_a_window() -> None:
    # Windows of 64 over 66 tokens: the first two hold two experts, the last (tokens 2 to 65) three.
    (row,) = skew(one_layer([[0]] * 2 + [[1]] * 62 + [[0], [2]], 4))
    assert row["distinct_in_window"] == pytest.approx((2 + 2 + 3) / 3)
    assert WINDOW == 64


def test_locality_by_hand() -> None:
    # {0,1} {1,2} {0,1}: neighbours share one of two, tokens two apart both.
    near = locality(one_layer([[0, 1], [1, 2], [0, 1]], 4))
    assert near["overlap"][0][:3] == [0.5, 1.0, None]
    assert near["distances"] == list(DISTANCES)


def test_shuffling_keeps_the_skew_and_loses_the_order() -> None:
    # Two topics in turn, 64 tokens each, that share nothing: what a neighbour chose is certain, shuffled it is even.
    rows = [[token // 64 % 2] for token in range(1024)]
    near = locality(one_layer(rows, 2))
    assert near["overlap"][0][0] > 0.98
    assert 0.4 < near["control"][0][0] < 0.6


def test_mean_leaves_out_what_is_not_known() -> None:
    assert mean_over_layers([[1.0, None], [0.5, None]]) == [0.75, None]


def test_sources_run_back_through_the_token_before() -> None:
    choices = from_array(np.zeros((4, 3, 1), int), 2)
    assert source(choices, 2, 1) == (1, 0)
    assert source(choices, 0, 1) == (2, 1)
    assert source(choices, 1, 3) == (1, 1)
    single = from_array(np.zeros((4, 1, 1), int), 2)
    assert source(single, 0, 3) == (0, 3)


def test_back() -> None:
    rows = np.array([[True], [False], [True]])
    assert back(rows, 1).tolist() == [[False], [True], [False]]
    assert back(rows, 0) is rows
    assert not back(rows, 3).any()


@given(st.integers(1, 10**6), st.floats(0.01, 0.99))
def test_both_parts_of_a_split_hold_something(tokens: int, share: float) -> None:
    first = split(tokens, share)
    assert 0 <= first < tokens
    assert first > 0 or tokens == 1


@st.composite
def choices_of_any_shape(draw: st.DrawFn) -> Choices:
    """One to five layers, one to twelve tokens, k from one to all experts, duplicates among the ids."""
    experts = draw(st.integers(1, 6))
    shape = draw(st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(1, experts)))
    return from_array(draw(hn.arrays(np.int32, shape, elements=st.integers(0, experts - 1))), experts)


@given(choices_of_any_shape())
def test_what_always_holds_of_skew(choices: Choices) -> None:
    counts = usage(choices)
    for layer, row in enumerate(skew(choices)):
        fifty, eighty, most = row["needed"].values()
        assert 1 <= fifty <= eighty <= most <= row["distinct"] <= row["experts"]
        assert sum(counts[layer]) == sum(len(set(ids)) for ids in choices.ids[:, layer].tolist())
        assert sum(sorted(counts[layer])[::-1][:most]) * 100 >= sum(counts[layer]) * 95


@given(choices_of_any_shape())
def test_what_always_holds_of_locality(choices: Choices) -> None:
    near = locality(choices)
    for rows in (near["overlap"], near["control"]):
        for layer in rows:
            known = [value for value in layer if value is not None]
            assert len(known) == min(len(DISTANCES), choices.tokens - 1)
            assert all(0 <= value <= 1 for value in known)


@given(st.integers(1, 6), st.integers(2, 12))
def test_tokens_that_choose_all_overlap_wholly(experts: int, tokens: int) -> None:
    near = locality(one_layer([list(range(experts))] * tokens, experts))
    assert set(near["overlap"][0][: tokens - 1]) == {1.0}
