"""Budgets and policies as people name them, what a point adds up to, and the speed it means."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from moestream import _core
from moestream.errors import BudgetError, RefusedError, UsageError
from moestream.geometry import split_budget
from moestream.replay import (
    BELADY,
    Options,
    Point,
    Rates,
    check_same_model,
    curves,
    expected,
    gaps_closed,
    parse_budgets,
    parse_policies,
    parse_rates,
    prepare,
    replay,
)
from moestream.replay.curves import DEFAULT_POLICIES, POOLED
from replay_traces import Route, build, demo_trace, meta

MIB = 1 << 20
#: 1920 experts of 1 MiB.
TOTAL = 1920 * MIB


def no_file(path: str) -> np.ndarray:
    raise AssertionError(f"{path} was read")


def points(
    policies: str, budgets: str | None, options: Options | None = None, **trace: object
) -> list[Point]:
    recording = prepare(demo_trace(**trace), "demo")  # type: ignore[arg-type]
    return list(
        curves(
            [recording],
            parse_policies(policies, no_file),
            parse_budgets(budgets, [recording]),
            options or Options(),
        )
    )


# -- budgets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
def test_a_budget_is_split_as_the_engine_does(parts: int) -> None:
    recording = prepare(demo_trace(parts=parts))
    geometry = recording.geometry
    quarter, size, little = parse_budgets("25%,200MB,20MiB", [recording])
    assert quarter.bytes == geometry.frame_bytes_total // 4
    assert size.bytes == 200_000_000
    # The prompt is a step of 41 tokens, which want all 64 experts of a layer.
    for budget in (quarter, size):
        assert budget.capacities(recording) == tuple(split_budget(geometry, budget.bytes or 0, 41))
    # 20 frames hold what two tokens want, eight each; or in two parts of 1 MiB and half of it, one token.
    assert little.capacities(recording) == tuple(split_budget(geometry, 20 * MIB, 3 - parts))
    assert sum(little.capacities(recording)) == (20 if parts == 1 else 26)


def test_recorded_is_what_the_trace_had() -> None:
    recording = prepare(demo_trace(480, parts=2))
    (budget,) = parse_budgets("recorded", [recording])
    assert budget.capacities(recording) == (240, 240)
    (point,) = points("lru", "recorded")
    assert (point.capacities, point.budget_bytes, point.share) == ((480,), 480 * MIB, 0.25)


def test_default_budgets_are_a_curve_on_which_nothing_is_refused() -> None:
    budgets = parse_budgets(None, [prepare(demo_trace())])
    assert [budget.text for budget in budgets][:3] == ["5%", "10%", "15%"]
    assert 8 <= len(budgets) <= 12
    assert budgets[-1].bytes == TOTAL
    # A prompt that wants every expert of a layer: its width is where the curve begins.
    wide = prepare(build(meta([64, 64], 2, [([0, 1], MIB)], []), [[(0, [[e] for e in range(64)], [])]]))
    starts = parse_budgets(None, [wide])
    assert [budget.text for budget in starts] == ["least", "60%", "75%", "90%", "100%"]
    assert starts[0].bytes == 64 * MIB
    for budget in [*budgets, *starts]:
        recording = wide if budget in starts else prepare(demo_trace())
        assert not replay(recording, "lru", budget.capacities(recording)).refused.any()


@pytest.mark.parametrize("word", ["0", "-5MB", "0%", "101%", "5 quarts", "25%%", "", "nan%", "-25%"])
def test_wrong_budgets_name_the_smallest_that_works(word: str) -> None:
    with pytest.raises(UsageError, match="the smallest that works is 8389KB"):
        parse_budgets(f"50%,{word}", [prepare(demo_trace())])


def test_too_little_names_the_smallest_that_works() -> None:
    recording = prepare(demo_trace())
    for word in ("7MiB", "0.1%"):
        with pytest.raises(BudgetError, match="smallest that works is 8389KB") as refused:
            parse_budgets(word, [recording])
        assert refused.value.smallest_bytes == 8 * MIB
    (smallest,) = parse_budgets("8389KB", [recording])
    assert smallest.capacities(recording) == (8,)


def test_no_recorded_budget_is_said() -> None:
    trace = demo_trace()
    trace.meta["model"]["capacities"] = []
    with pytest.raises(RefusedError, match="has no recorded budget"):
        parse_budgets("recorded", [prepare(trace, "a.parquet")])


# -- policies -------------------------------------------------------------------------------------------------


def test_policies_are_canonical_and_named_once() -> None:
    names = [
        policy.text for policy in parse_policies("lfu-decay, lru,lfu-decay:16,lfu-decay:4,belady", no_file)
    ]
    assert names == ["lfu-decay:16", "lru", "lfu-decay:4", BELADY]
    assert {policy.text.partition(":")[0] for policy in parse_policies("all", no_file)} == {
        *_core.policy_members(),
        BELADY,
    }
    known = (*_core.policy_members(), BELADY)
    assert [policy.text.partition(":")[0] for policy in parse_policies(None, no_file)] == [
        name for name in DEFAULT_POLICIES if name in known
    ]


@pytest.mark.parametrize(
    ("words", "error", "complaint"),
    [
        ("lru,sive", UsageError, "did you mean sieve"),
        ("", UsageError, "no policy ''"),
        ("belady:3", UsageError, "no policy 'belady:3': did you mean belady"),
        ("lru:3", UsageError, "lru takes no number"),
        ("lfu-decay:0", UsageError, "whole number"),
        ("pinned:", UsageError, "needs a file"),
        ("uring:8", UsageError, "no policy"),
    ],
)
def test_wrong_policies_are_told(words: str, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        parse_policies(words, no_file)


def test_pinned_is_seeded_from_a_file_or_the_first_half() -> None:
    recording = prepare(demo_trace())
    seed = np.arange(1920.0)
    read = []

    def load(path: str) -> np.ndarray:
        read.append(path)
        return seed

    from_file, from_half = parse_policies("pinned:old.parquet,pinned", load)
    assert read == ["old.parquet"]
    assert from_file.priority is not None and from_half.priority is not None
    assert from_file.priority(recording) is seed
    counts = from_half.priority(recording)
    chosen = replay(recording, "pinned", (480,), priority=counts)
    assert chosen.counters["misses"] != replay(recording, "pinned", (480,), priority=seed).counters["misses"]
    half = recording.cut(0, recording.middle())
    assert counts.sum() == half.counts.sum()
    assert counts[int(half.experts[0])] == half.counts[half.experts == half.experts[0]].sum()
    with pytest.raises(UsageError, match="pinned needs a trace"):
        replay(recording, "pinned", (480,))


# -- what a point is ------------------------------------------------------------------------------------------


def test_figures_add_up() -> None:
    (point,) = points("lru", "25%", wishes=True)
    done = replay(prepare(demo_trace(wishes=True)), "lru", (480,))
    figures = point.figures
    assert (figures.hits, figures.misses) == (done.counters["hits"], done.counters["misses"])
    assert figures.bytes == figures.misses * MIB
    assert figures.early_bytes == figures.early * MIB > 0
    assert figures.bytes_read == figures.bytes + figures.early_bytes
    assert figures.demand_bytes == (figures.hits + figures.misses) * MIB
    assert figures.decode_tokens == 64
    assert figures.decode_hits + figures.decode_misses == 64 * 30 * 8
    assert figures.decode_bytes == figures.decode_misses * MIB
    assert figures.hit_rate == figures.hits / (figures.hits + figures.misses)


def test_options_choose_what_is_counted() -> None:
    (whole,) = points("lru", "25%", wishes=True)
    (silent,) = points("lru", "25%", Options(speculation=False), wishes=True)
    (first,) = points("lru", "25%", Options(half="first"))
    (second,) = points("lru", "25%", Options(half="second"))
    (warm,) = points("lru", "25%", Options(warm_half=True))
    (plain,) = points("lru", "25%")
    assert whole.figures.early > 0 and silent.figures == plain.figures
    assert first.figures.misses + warm.figures.misses == plain.figures.misses
    assert second.figures.misses > warm.figures.misses
    assert first.figures.decode_tokens + second.figures.decode_tokens == 64
    assert warm.figures.routes == second.figures.routes == plain.figures.routes - first.figures.routes


def test_refused_routes_are_counted_nowhere_else() -> None:
    recording = prepare(demo_trace())
    (point,) = points("lru", "8389KB")
    assert point.capacities == (8,)
    assert point.figures.refused == 30
    assert point.figures.demand_bytes == 64 * 30 * 8 * MIB < int(recording.widths.sum()) * MIB


def test_what_is_not_kept_is_read_again() -> None:
    """dontneed:0 drops every expert after its route, dontneed:64 none: then it is its half-life of 64 tokens."""
    none, all_hot, decay = points("dontneed:0,dontneed:64,lfu-decay:64", "25%")
    assert (none.figures.hits, none.figures.bytes) == (0, none.figures.demand_bytes)
    assert none.figures.evictions == 0
    assert all_hot.figures.misses == decay.figures.misses


def test_gap_closed_is_between_lru_and_belady() -> None:
    rows = points("none,lru,lfu-decay:16,belady", "25%,100%")
    none, lru, decay, belady, *full = gaps_closed(rows)
    assert (lru, belady) == (0, 1)
    assert none is not None and none < 0
    read = [point.figures.bytes_read for point in rows]
    assert decay == (read[1] - read[2]) / (read[1] - read[3])
    assert full == [None] * 4  # everything fits: there is no gap
    assert gaps_closed(points("lru,none", "25%")) == [None, None]


def test_several_traces_have_a_row_each_and_one_together() -> None:
    first, second = prepare(demo_trace(480), "a"), prepare(demo_trace(240), "b")
    policies = parse_policies("lru,belady", no_file)
    rates = Rates(1e9, 0.01)
    rows = list(
        curves([first, second], policies, parse_budgets("25%", [first, second]), Options(rates=rates))
    )
    assert [(row.trace, row.policy) for row in rows] == [
        (trace, policy) for policy in ("lru", BELADY) for trace in ("a", "b", POOLED)
    ]
    assert rows[2].figures == rows[0].figures + rows[1].figures
    assert rows[2].figures.misses == 2 * rows[0].figures.misses
    assert rows[2].speed == rows[0].speed
    own = list(curves([first, second], policies[:1], parse_budgets("recorded", [first, second]), Options()))
    assert [row.capacities for row in own] == [(480,), (240,), ()]
    assert own[2].budget_bytes == 360 * MIB


def test_traces_of_different_models_are_refused() -> None:
    first = prepare(demo_trace(), "a.parquet")
    other = dataclasses.replace(first, name="b.parquet", identity="feedfacefeedface")
    with pytest.raises(RefusedError, match=r"b\.parquet is of model feedfacefeedface and a\.parquet of 0123"):
        check_same_model([first, other])
    with pytest.raises(RefusedError):
        list(curves([first, other], [], [], Options()))


# -- speed ----------------------------------------------------------------------------------------------------


def test_expected_speed() -> None:
    rates = Rates(disk_bytes_per_s=1e9, compute_s_per_token=0.05)
    slow = expected(rates, demand_bytes=100e6, early_bytes=0)
    assert slow.tok_per_s == pytest.approx(1 / 0.15)
    assert slow.ceiling_tok_per_s == pytest.approx(10)
    # Early bytes cost nothing until the disk has no time left for them.
    hidden = expected(rates, demand_bytes=20e6, early_bytes=30e6)
    assert hidden.tok_per_s == pytest.approx(1 / 0.07)
    assert hidden.ceiling_tok_per_s == pytest.approx(20)
    busy = expected(rates, demand_bytes=20e6, early_bytes=180e6)
    assert busy.tok_per_s == busy.ceiling_tok_per_s == pytest.approx(5)


def test_a_speed_is_of_decoded_tokens() -> None:
    (point,) = points("lru", "25%", Options(rates=Rates(2e9, 0.034)))
    assert point.speed is not None
    assert point.speed.tok_per_s == pytest.approx(1 / (0.034 + point.figures.decode_bytes / 64 / 2e9))
    only_prompt: list[list[Route]] = [[(0, [[0, 1]], [])]]
    recording = prepare(build(meta([4], 2, [([0], MIB)], [4]), only_prompt))
    policies = parse_policies("lru", no_file)
    (none,) = curves(
        [recording], policies, parse_budgets("100%", [recording]), Options(rates=Rates(2e9, 0.034))
    )
    assert none.speed is None


def test_rates_are_read_as_people_write_them(tmp_path: Path) -> None:
    assert parse_rates(None, None, None) is None
    assert parse_rates("1.9GB/s", "34ms", None) == Rates(1.9e9, 0.034)
    assert parse_rates("1GiB", "0.5s", None) == Rates(1 << 30, 0.5)
    probe = tmp_path / "probe.json"
    probe.write_text(json.dumps({"disk_bytes_per_s": 2e9, "compute_s_per_token": 0.03, "other": "x"}))
    assert parse_rates(None, None, probe) == Rates(2e9, 0.03)
    assert parse_rates("1GB/s", None, probe) == Rates(1e9, 0.03)


@pytest.mark.parametrize(
    ("disk", "compute", "complaint"),
    [
        ("1.9GB/s", None, "add --compute"),
        (None, "34ms", "add --disk"),
        ("1.9GB/s", "34", "not a time"),
        ("1.9GB/s", "0ms", "not a time"),
        ("1.9GB/s", "-4ms", "not a time"),
        ("fast", "34ms", "not a size"),
        ("0GB/s", "34ms", "above zero"),
    ],
)
def test_wrong_rates_are_told(disk: str | None, compute: str | None, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_rates(disk, compute, None)


@pytest.mark.parametrize(
    ("text", "error", "complaint"),
    [
        (None, RefusedError, "there is no file"),
        ("{", RefusedError, "not JSON"),
        ("[]", RefusedError, "not an object"),
        ('{"disk_bytes_per_s": "2GB"}', RefusedError, 'is "2GB", not a number'),
        ('{"disk_bytes_per_s": true}', RefusedError, "is true, not a number"),
        ('{"disk_bytes_per_s": Infinity}', RefusedError, "Infinity is no number"),
        ('{"disk_bytes_per_s": 1' + "0" * 400 + "}", RefusedError, "not a number"),
        ('{"disk_bytes_per_s": -1}', RefusedError, "must be a number above zero"),
        ("[" * 100_000, RefusedError, "nested too deeply"),
        ("{}", UsageError, "add --disk"),
        ('{"disk_bytes_per_s": 1}', UsageError, "add --compute"),
    ],
)
def test_a_bad_probe_file_is_told(
    tmp_path: Path, text: str | None, error: type[Exception], complaint: str
) -> None:
    probe = tmp_path / "probe.json"
    if text is not None:
        probe.write_text(text)
    with pytest.raises(error, match=complaint):
        parse_rates(None, None, probe)
