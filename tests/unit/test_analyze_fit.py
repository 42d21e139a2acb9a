"""Ridge finds what is there to find and nothing where there is nothing; fits are written whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from moestream.analyze import fit, predictors
from moestream.analyze.choices import Choices, from_array
from moestream.errors import RefusedError, UsageError
from moestream.seeds import read_fit

EXPERTS = 16


def planted(tokens: int = 400, layers: int = 3, seed: int = 3) -> Choices:
    """Each layer chooses two experts: those of the layer before moved by one. The first layer draws them."""
    draw = np.random.default_rng(seed)
    ids = np.empty((tokens, layers, 2), np.int32)
    ids[:, 0] = draw.random((tokens, EXPERTS)).argsort(axis=1)[:, :2]
    for layer in range(1, layers):
        ids[:, layer] = (ids[:, layer - 1] + 1) % EXPERTS
    return from_array(ids, EXPERTS)


def noise(tokens: int = 400, layers: int = 3, seed: int = 1) -> Choices:
    draw = np.random.default_rng(seed)
    return from_array(draw.random((tokens, layers, EXPERTS)).argsort(axis=2)[:, :, :2], EXPERTS)


def test_ridge_finds_what_was_planted_and_random_does_not() -> None:
    choices = planted()
    told = predictors.report(choices, predictors.predict(choices))
    first, *rest = told["recall"]["ridge"]["1"]
    assert rest == [1.0, 1.0]
    # Nothing says what the first layer draws: by luck two of sixteen.
    for value in (first, *told["recall"]["random"]["1"], *told["recall"]["previous"]["1"]):
        assert value == pytest.approx(2 / EXPERTS, abs=0.07)
    # Two layers ahead the last layer follows from the first; three ahead nothing does.
    assert told["recall"]["ridge"]["2"][2] == 1.0
    assert told["recall"]["ridge"]["3"][2] < 0.3
    assert told["precision"]["ridge"]["2"] == pytest.approx((2 + first) / 3)


def test_ridge_finds_nothing_in_noise() -> None:
    choices = noise()
    told = predictors.report(choices, predictors.predict(choices))
    assert all(value < 0.3 for value in told["recall"]["ridge"]["1"])


def test_a_fit_reports_what_was_planted() -> None:
    made = fit.fit([planted(), planted(seed=2)], "id", "name", [EXPERTS] * 3, wishes=2)
    assert [row["held_out"] for row in made.about["recall"][1:]] == [1.0, 1.0]
    assert [row["layer"] for row in made.about["recall"]] == [0, 1, 2]
    assert all(row["random"] == 2 / EXPERTS for row in made.about["recall"])
    assert [linear.before for linear in made.maps if linear is not None] == [2, 0, 1]
    assert made.counts.sum() == 2 * 400 * 3 * 2


def test_what_is_held_out_is_not_learnt() -> None:
    """The last quarter follows another rule: the map must not know it."""
    choices = planted(tokens=400)
    changed = choices.ids.copy()
    changed[300:, 1:] = (changed[300:, 1:] + 7) % EXPERTS
    other = from_array(changed, EXPERTS)
    same, different = (fit.fit([c], "id", "n", [EXPERTS] * 3, 1) for c in (choices, other))
    for a, b in zip(same.maps, different.maps, strict=True):
        assert a is not None and b is not None
        assert np.array_equal(a.weights, b.weights)
    # The second layer no longer follows from the first; the third still does from the second.
    assert [row["train"] for row in different.about["recall"][1:]] == [1.0, 1.0]
    second, third = (row["held_out"] for row in different.about["recall"][1:])
    assert second < 0.3
    assert third == 1.0


def test_maps_are_of_the_model_s_banks_not_of_the_trace_s_layers() -> None:
    """Banks whose choice nobody saw (here 0 and 2) have no map; the others say which bank comes before them."""
    choices = planted(layers=2)
    moved = Choices(choices.ids, (1, 3), (0, 1), choices.experts, choices.used, choices.clock)
    made = fit.fit([moved], "id", "n", [4, EXPERTS, 4, EXPERTS], 1)
    assert [linear.before if linear else None for linear in made.maps] == [None, 3, None, 1]
    assert made.counts[:4].sum() == made.counts[4 + EXPERTS : 8 + EXPERTS].sum() == 0


@given(
    hn.arrays(float, st.tuples(st.integers(2, 12), st.integers(1, 4)), elements=st.floats(-1, 1, width=16)),
    st.sampled_from(fit.LAMBDAS),
)
def test_ridge_solves_its_normal_equations(x: np.ndarray, penalty: float) -> None:
    y = np.stack([x.sum(axis=1), np.arange(len(x)) % 2], axis=1)
    weights, bias = fit.Ridge(x, y).weights(penalty)
    ones = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    gram = ones.T @ ones + penalty * np.diag([1.0] * x.shape[1] + [0.0])
    expected = np.linalg.solve(gram, ones.T @ y)
    assert np.allclose(np.concatenate([weights.T, bias[None]]), expected, atol=1e-8)


def test_ranks_are_best_first_and_ties_go_to_the_lower_number() -> None:
    scores = np.array([[0.1, 0.9, 0.9, 0.5], [0.0, 0.0, 0.0, 0.0]])
    assert fit.rank(scores, 3).tolist() == [[1, 2, 3], [0, 1, 2]]


def test_recall_by_hand() -> None:
    hot = np.array([[1, 1, 0, 0], [0, 0, 1, 1]], bool)
    assert fit.recall(np.array([[0, 2], [2, 3]]), hot) == 0.75
    # What names nothing finds nothing, though -1 would be the last expert.
    assert fit.recall(np.array([[-1, -1], [-1, -1]]), hot) == 0.0
    assert fit.recall(np.empty((0, 2), int), hot[:0]) is None


def test_too_short_a_trace_is_refused() -> None:
    with pytest.raises(RefusedError, match="15 tokens is too short"):
        fit.fit([planted(tokens=15)], "id", "n", [EXPERTS] * 3, 1)
    assert fit.fit([planted(tokens=16)], "id", "n", [EXPERTS] * 3, 1).maps[0] is not None


def test_traces_of_different_layers_are_refused() -> None:
    with pytest.raises(RefusedError, match="different layers"):
        fit.fit([planted(layers=3), planted(layers=2)], "id", "n", [EXPERTS] * 3, 1)


@pytest.mark.parametrize("shape", [(16, 1, 1), (16, 1, EXPERTS), (16, 4, EXPERTS), (40, 1, 3)])
def test_any_shape_can_be_fitted(shape: tuple[int, int, int]) -> None:
    draw = np.random.default_rng(0)
    tokens, layers, k = shape
    ids = draw.random((tokens, layers, EXPERTS)).argsort(axis=2)[:, :, :k]
    made = fit.fit([from_array(ids, EXPERTS)], "id", "n", [EXPERTS] * layers, 1)
    for row in made.about["recall"]:
        assert row["held_out"] == 1.0 if k == EXPERTS else 0 <= row["held_out"] <= 1


def test_a_fit_comes_back_as_it_was_written(tmp_path: Path) -> None:
    made = fit.fit([planted()], "0123", "a model", [EXPERTS] * 3, wishes=3)
    (tmp_path / "new").mkdir()
    fit.write_fit(made, tmp_path / "new" / "made.npz")
    fit.write_fit(made, tmp_path / "new" / "made.npz")  # its own kind it replaces
    back = read_fit(tmp_path / "new" / "made.npz")
    assert (back.identity, back.name, back.experts, back.wishes) == ("0123", "a model", (EXPERTS,) * 3, 3)
    assert back.about == made.about
    assert np.array_equal(back.counts, made.counts)
    for a, b in zip(made.maps, back.maps, strict=True):
        assert a is not None and b is not None
        assert (a.before, a.weights.tolist(), a.bias.tolist()) == (
            b.before,
            b.weights.tolist(),
            b.bias.tolist(),
        )
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["made.npz"]


@pytest.mark.parametrize("content", [b"GGUF" + bytes(60), b"PK" + bytes(60), b""])
def test_what_is_no_fit_is_not_written_over(tmp_path: Path, content: bytes) -> None:
    made = fit.fit([planted()], "0123", "a model", [EXPERTS] * 3, wishes=1)
    out = tmp_path / "model.gguf"
    out.write_bytes(content)
    with pytest.raises(UsageError, match="is no fit file"):
        fit.write_fit(made, out)
    assert out.read_bytes() == content
    with pytest.raises(UsageError, match="is no fit file"):
        fit.check_out(tmp_path)
    with pytest.raises(UsageError, match=r"--out .*: there is no directory .*/new: make it first"):
        fit.write_fit(made, tmp_path / "new" / "made.npz")
