"""Predictors inside the engine: none changes a bit of the answer, and each names what it says it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from answers import Answer, answer, prompt_tokens
from conftest import load, same_answer
from moestream.analyze import fit
from moestream.analyze.choices import Choices, from_trace
from moestream.analyze.predictors import recall_by_layer, recorded
from moestream.errors import RefusedError
from moestream.trace import Trace
from moestream.trace.read import read_trace

ARCHITECTURES = ("olmoe", "deepseek2", "gpt-oss")
STEPS = 40
PROMPT = 7
#: More experts than a bank's choice, so that what is read early can stay until it is wanted.
EXPERT_BYTES = 4 << 20

Tiny = Callable[..., Path]
Stock = Callable[..., Answer]


def run(path: Path, mechanism: str, trace: Path | None = None, seed: int = 0) -> dict[str, Any]:
    """Prompt and greedy steps; the engine's counters."""
    with load(path, mechanism, experts=EXPERT_BYTES, trace=trace) as llama:
        answer(llama, prompt_tokens(PROMPT, llama.n_vocab(), seed), STEPS)
        return dict(llama._engine.counters)


@pytest.fixture(scope="module")
def files(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A trace of an architecture's small model, and a fit to it, that names two experts a layer; made once."""
    directory = tmp_path_factory.mktemp("files")

    def get(arch: str) -> tuple[Path, Path]:
        trace, fitted = directory / f"{arch}.parquet", directory / f"{arch}.npz"
        if not trace.exists():
            run(tiny(arch), "arena+uring:8+lru", trace)
            found = read_trace(trace)
            made = fit.fit([from_trace(found)], found.identity, arch, found.experts, wishes=2)
            fit.write_fit(made, fitted)
        return trace, fitted

    return get


def mechanisms(files: tuple[Path, Path]) -> list[str]:
    trace, fitted = files
    return ["previous:2", "random:3", f"ridge:{fitted}", f"oracle:{trace}", "gate:2x3"]


def recording(path: Path, mechanism: str, trace: Path) -> tuple[Trace, Choices, dict[str, Any]]:
    counters = run(path, mechanism, trace)
    found = read_trace(trace)
    return found, from_trace(found), counters


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("which", range(5), ids=["previous", "random", "ridge", "oracle", "gate"])
def test_no_predictor_changes_the_answer(arch: str, which: int, tiny: Tiny, stock: Stock, files) -> None:
    path = tiny(arch)
    policy = ("lru", "lfu-decay:16", "none", "lru-layer", "sieve")[which]
    with load(
        path, f"arena+uring:8+{policy}+{mechanisms(files(arch))[which]}", experts=EXPERT_BYTES
    ) as llama:
        same_answer(llama, stock, PROMPT, steps=12)
        same_answer(llama, stock, 70, steps=3, seed=1)  # a text the files do not know, in two batches
        assert llama._engine.counters["speculative_issued"] > 0


def test_an_oracle_s_wishes_are_used(tiny: Tiny, files, tmp_path: Path) -> None:
    trace, _ = files("olmoe")
    path = tiny("olmoe")
    plain = run(path, "arena+uring:8+lru")
    found, choices, counters = recording(path, f"arena+uring:8+lru+oracle:{trace}", tmp_path / "a.parquet")
    assert counters["speculative_issued"] > 0
    assert counters["speculative_used"] >= 0.95 * counters["speculative_issued"]
    assert counters["misses"] < plain["misses"] / 4
    told = recorded(found, choices)[1]
    for layer, named in enumerate(told):
        asked = named.ids[:, 0] >= 0
        assert asked.sum() >= STEPS - 1
        assert np.array_equal(np.sort(named.ids[asked]), np.sort(choices.ids[asked, layer]))


def test_an_oracle_of_another_text_says_nothing(tiny: Tiny, files, tmp_path: Path) -> None:
    trace, _ = files("olmoe")
    other = tmp_path / "other.parquet"
    with load(tiny("olmoe"), f"arena+uring:8+lru+oracle:{trace}", experts=EXPERT_BYTES, trace=other) as llama:
        answer(llama, prompt_tokens(5, llama.n_vocab(), seed=3), 10)
    found = read_trace(other)
    expected, seen = read_trace(trace).routes, found.routes
    same = [np.array_equal(np.unique(expected.of(r)), np.unique(seen.of(r))) for r in range(len(seen))]
    # It followed for as long as the routes were the same, and no wish came after the first that was not.
    first = same.index(False)
    assert not np.diff(seen.wish_start)[first:].any()


@pytest.mark.parametrize("wishes", [1, 2])
def test_previous_names_the_token_before(wishes: int, tiny: Tiny, tmp_path: Path) -> None:
    found, choices, _ = recording(
        tiny("olmoe"), f"arena+uring:8+lru+previous:{wishes}", tmp_path / "a.parquet"
    )
    told = recorded(found, choices)[1]
    for layer, named in enumerate(told):
        asked = np.nonzero(named.ids[:, 0] >= 0)[0]
        assert len(asked) >= STEPS - 1
        assert np.array_equal(named.ids[asked], choices.ids[asked - 1, layer, :wishes])


def test_random_draws_distinct_experts_evenly_and_again_the_same(tiny: Tiny, tmp_path: Path) -> None:
    first, choices, _ = recording(tiny("olmoe"), "arena+uring:8+lru+random:3", tmp_path / "a.parquet")
    again, _, _ = recording(tiny("olmoe"), "arena+uring:8+lru+random:3", tmp_path / "b.parquet")
    assert np.array_equal(first.routes.wish_ids, again.routes.wish_ids)
    told = recorded(first, choices)[1]
    ids = np.concatenate([named.ids[named.ids[:, 0] >= 0] for named in told])
    assert len(ids) >= (STEPS - 1) * len(told)
    assert all(len(set(row)) == 3 for row in ids.tolist())
    counts = np.bincount(ids.ravel(), minlength=choices.experts[0])
    # Over 450 draws of 32 experts: 15 each, give or take four standard deviations.
    expected = ids.size / choices.experts[0]
    assert np.abs(counts - expected).max() < 4 * np.sqrt(expected) + 1


def test_ridge_names_what_its_map_scores_highest(tiny: Tiny, files, tmp_path: Path) -> None:
    """The core's scores are those of the file, worked out here by plain matrix products."""
    from moestream.seeds import read_fit

    _, fitted = files("olmoe")
    found, choices, _ = recording(tiny("olmoe"), f"arena+uring:8+lru+ridge:{fitted}", tmp_path / "a.parquet")
    made = read_fit(fitted)
    told = recorded(found, choices)[1]
    for layer, named in enumerate(told):
        linear = made.maps[choices.banks[layer]]
        assert linear is not None
        scores = fit.inputs(choices, layer, 1) @ linear.weights.T.astype(float) + linear.bias
        asked = np.nonzero(named.ids[:, 0] >= 0)[0]
        assert len(asked) >= STEPS - 1
        picked = np.take_along_axis(scores[asked], named.ids[asked], axis=1)
        best = -np.sort(-scores[asked], axis=1)[:, :2]
        # The core adds in float32: of two scores that close either may come first.
        assert np.allclose(picked, best, atol=1e-5)


def test_gate_names_the_same_one_layer_ahead_however_far_it_looks(tiny: Tiny, tmp_path: Path) -> None:
    near, choices, _ = recording(tiny("olmoe"), "arena+uring:8+lru+gate:2", tmp_path / "near.parquet")
    far, _, _ = recording(tiny("olmoe"), "arena+uring:8+lru+gate:2x3", tmp_path / "far.parquet")
    one, three = recorded(near, choices), recorded(far, choices)
    assert list(one) == [1]
    assert list(three) == [1, 2, 3]
    tokens = choices.clock >= PROMPT
    layers = len(choices.layers)
    for layer in range(1, layers):
        a, b = (told[1][layer].ids[:, :2] for told in (one, three))
        both = tokens & (a[:, 0] >= 0) & (b[:, 0] >= 0)
        assert both.sum() >= STEPS // 2
        assert np.array_equal(a[both], b[both])
    # The farther it looks the less it knows, yet more than a guess, which finds two of 32.
    recalls = [
        np.mean([value for value in recall_by_layer(choices, three[ahead], tokens) if value is not None])
        for ahead in (1, 2, 3)
    ]
    assert recalls[0] > recalls[2] > 2 * 2 / 32


def test_another_model_s_files_are_refused_by_identity(tiny: Tiny, files) -> None:
    trace, fitted = files("deepseek2")
    for seeded in (f"lru+ridge:{fitted}", f"lru+oracle:{trace}", f"pinned:{trace}", f"pinned:{fitted}"):
        with pytest.raises(RefusedError, match=r"belongs to model [0-9a-f]{16}.*this is model [0-9a-f]{16}"):
            load(tiny("olmoe"), f"arena+uring:8+{seeded}", experts=EXPERT_BYTES)
