"""What the report says of a bench's directory is what the bench itself said of the same runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_records import ARMS, BOX, CAP, DEFAULT, PROMPTS, Mock, Silent, setup
from moestream.lab.bench_arms import Arm
from moestream.lab.bench_journal import open_journal
from moestream.lab.bench_session import Asked, conclude, make_runs
from moestream.lab.schedule import schedule
from moestream.reports import read_results, summarize
from moestream.reports.document import document


def a_bench(out: Path, mock: Mock) -> dict[str, Any]:
    """A ladder whose default is its sentinel, as `moestream bench` leaves it; the summary."""
    arms = tuple(replace(arm, lever=f"lever {number}") for number, arm in enumerate(ARMS))
    asked = Asked(
        setup(out), arms, 1, DEFAULT.key, CAP, "1GiB", "moestream bench m.gguf --ram 1GiB", ladder=True
    )
    records = open_journal(out, asked.document(BOX), resume=False, force=False)
    slots = schedule(asked.arms, list(PROMPTS), asked.repeats, asked.sentinel)
    return conclude(out, make_runs(asked.setup, slots, records, Silent(), mock), None)


def test_arms_figures_ceilings_and_doubts_are_the_same(tmp_path: Path) -> None:
    def ms(arm: Arm, number: int) -> float:
        return 100.0 + 7 * number + 900 * arm.is_stock

    def spend(arm: Arm, number: int, ending: Any, document: dict[str, Any]) -> dict[str, Any]:
        ending["conditions"]["energy_j"] = 10.0 + number
        ending["cage_anon_peak_bytes"] = 500_000_000 + number * 1_000_000 if arm.cap_bytes else None
        document["decode"]["speculative"]["wasted_bytes"] = 1000 * number
        return document

    said = a_bench(tmp_path / "out", Mock(ms, spend))
    (group,) = document(summarize([read_results(tmp_path / "out")]), [None], [])["groups"]
    assert [arm["name"] for arm in group["arms"]] == [arm["key"] for arm in said["arms"]]
    assert group["ceilings"]["compute_s"] == pytest.approx(said["ceilings"]["compute_s"])
    assert said["doubts"]
    assert group["doubts"] == said["doubts"]
    for ours, theirs in zip(group["arms"], said["arms"], strict=True):
        assert ours["tok_per_s"] == theirs["tok_per_s"]
        assert ours["p95_s"] == pytest.approx(theirs["p95_ms"] / 1e3)
        assert ours["bytes_per_token"] == theirs["bytes_per_token"]
        for name in ("majflt", "minflt", "energy_j_per_token"):
            assert ours[name] == theirs[name] is not None, name
        assert ours["floor_s"] == pytest.approx(theirs["floor_s"])
        assert ours["peak_bytes"] == theirs["peak_bytes"]
        assert ours["cpu_s_per_token"] == theirs["cpu_s_per_token"]
        if ours["cap_bytes"] is not None:
            assert ours["cpu_s_per_gb"] == pytest.approx(theirs["cpu_s_per_gb"])
            against = theirs.get("against_stock")
            assert ours["against_stock"] == (
                against and {name: against[name] for name in ours["against_stock"]}
            )


def test_runs_are_judged_by_what_all_of_them_show(tmp_path: Path) -> None:
    def other_tokens(arm: Arm, number: int, ending: Any, document: dict[str, Any]) -> dict[str, Any]:
        # The sentinel's first run, which nothing could be held against when its line was written.
        return {**document, "tokens": [99] * len(document["tokens"])} if number == 0 else document

    said = a_bench(tmp_path / "out", Mock(change=other_tokens))
    (group,) = summarize([read_results(tmp_path / "out")])
    default = next(arm for arm in group.arms if arm.default)
    assert len(group.runs) == said["valid_runs"] == said["runs"] - 1
    assert [record["invalid"][0].partition(":")[0] for record in default.excluded] == ["other tokens"]
