"""``moestream replay`` as it is typed: the table, the JSON, the plot, and wrong words in one line."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from moestream.cli.main import main
from moestream.errors import RefusedError
from moestream.replay import prepare, replay
from moestream.trace import Trace
from replay_traces import demo_trace

pytest.importorskip("matplotlib")


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> dict[str, Trace]:
    """What the trace files of a command line hold, by path."""
    files = {"a.parquet": demo_trace(480, wishes=True), "b.parquet": demo_trace(240)}
    for trace in files.values():
        (capacity,) = trace.meta["model"]["capacities"]
        done = replay(prepare(trace), "lru", (capacity,)).per_step()
        trace.steps.update(hits=done["hits"], misses=done["misses"])
    other = demo_trace()
    other.meta["model"]["identity"] = "feedfacefeedface"
    files["other.parquet"] = other

    def read_trace(path: Path) -> Trace:
        if str(path) not in files:
            raise RefusedError(f"{path} is not a trace")
        return files[str(path)]

    module = ModuleType("moestream.trace.read")
    module.read_trace = read_trace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "moestream.trace.read", module)
    return files


@pytest.fixture
def run(traces: dict[str, Trace], capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, what was printed, and what was complained of."""

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["replay", *words])
        printed = capfd.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call


def test_table(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run("a.parquet", "--policy", "lru,lfu-decay,belady", "--budget", "recorded,50%")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "1950 routes" in lines[0] and "arena+uring:8+lru+none+anon" in lines[0]
    assert lines[1].strip().startswith("replayed as recorded (lru): ")
    assert lines[1].endswith("the same in each of 65 steps")
    rows = [line.split() for line in lines if "%" in line and " GB" in line]
    assert [row[-6] for row in rows] == ["lru", "lfu-decay:16", "belady"] * 2
    assert [row[-1] for row in rows if row[-6] in ("lru", "belady")] == ["0%", "100%"] * 2
    assert rows[0][:3] == ["503", "MB", "(25%)"]


def test_a_trace_that_differs_is_warned_of(
    run: Callable[..., tuple[int, str, str]], traces: dict[str, Trace]
) -> None:
    traces["a.parquet"].steps["hits"][3] += 1
    code, out, _ = run("a.parquet", "--policy", "lru", "--budget", "25%")
    assert code == 0
    assert "warning: replayed as recorded (lru), 1 of 65 steps differ" in out


def test_json(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    words = ["a.parquet", "b.parquet", "--policy", "lru,belady", "--budget", "25%"]
    rates = ["--disk", "1.9GB/s", "--compute", "34ms"]
    code, out, err = run(*words, *rates, "--json", "-")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["format"], document["version"]) == ("moestream-replay", 1)
    assert [trace["recorded"]["different_steps"] for trace in document["traces"]] == [0, 0]
    assert document["rates"] == {"disk_bytes_per_s": 1.9e9, "compute_s_per_token": 0.034}
    assert [(p["trace"], p["policy"]) for p in document["points"]] == [
        (trace, policy) for policy in ("lru", "belady") for trace in ("a.parquet", "b.parquet", "all traces")
    ]
    point = document["points"][0]
    done = replay(prepare(demo_trace(480, wishes=True)), "lru", (480,))
    assert point["figures"]["misses"] == done.counters["misses"]
    assert point["bytes_read"] == int(done.bytes.sum() + done.early_bytes.sum())
    assert point["gap_closed"] == 0
    assert 0 < point["speed"]["tok_per_s"] <= point["speed"]["ceiling_tok_per_s"]
    file = tmp_path / "out.json"
    code, out, _ = run(*words, *rates, "--json", str(file))
    assert code == 0 and "all traces" in out
    assert json.loads(file.read_text()) == document


def test_options_reach_the_replay(run: Callable[..., tuple[int, str, str]]) -> None:
    def misses(*words: str) -> tuple[int, int]:
        _, out, _ = run("a.parquet", "--policy", "lru", "--budget", "25%", "--json", "-", *words)
        figures = json.loads(out)["points"][0]["figures"]
        return figures["misses"], figures["early"]

    whole, early = misses()
    first, _ = misses("--half", "first")
    second, _ = misses("--half", "second")
    warm, _ = misses("--warm-half")
    silent, none = misses("--no-speculation")
    assert first + warm == whole < first + second
    assert early > none == 0
    assert silent != whole


def test_plots_are_whole_pictures(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    svg, png = tmp_path / "curves.svg", tmp_path / "curves.png"
    for file in (svg, png):
        code, _, err = run("a.parquet", "--policy", "lru,belady", "--plot", str(file))
        assert (code, err) == (0, "")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    header = png.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[16:20], "big") == 800
    assert sorted(tmp_path.iterdir()) == [png, svg]


def test_a_plot_shows_each_policy_between_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    from moestream.replay import Options, curves, parse_budgets, parse_policies
    from moestream.replay.plot import draw

    drawn: list[Any] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, **_: (drawn.append(self), path.write_bytes(b"x"))
    )
    recording = prepare(demo_trace(wishes=True), "a.parquet")
    policies = parse_policies("lru,lfu-decay,belady", lambda path: np.zeros(0))
    # At 8 experts the prompt is refused: that budget is no point of a curve.
    budgets = parse_budgets("8389KB,10%,50%,100%", [recording])
    points = list(curves([recording], policies, budgets, Options()))
    draw(points, tmp_path / "curves.png", "a title")
    read, hits = drawn[0].axes
    lines = {line.get_label(): line for line in read.lines}
    assert list(lines) == ["demand: nothing kept", "lru", "lfu-decay:16", "belady: the least possible"]
    ceiling = lines.pop("demand: nothing kept").get_ydata()[0]
    floor = lines["belady: the least possible"].get_ydata()
    for policy, line in lines.items():
        of_policy = [p for p in points if policy.startswith(p.policy) and p.figures.refused == 0]
        assert list(line.get_xdata()) == [p.budget_bytes for p in of_policy]
        assert list(line.get_ydata()) == [p.figures.bytes_read for p in of_policy]
        assert (np.asarray(line.get_ydata()) >= np.asarray(floor)).all()
        assert ceiling == of_policy[0].figures.demand_bytes
    assert (read.get_ylabel(), hits.get_ylabel()) == (
        "read from disk, early reads too (GB)",
        "routed experts that were there (%)",
    )
    assert hits.get_xlabel() == "memory for experts (GB)"
    assert read.yaxis.get_major_formatter()(17e9, 0) == "17"
    with pytest.raises(RefusedError, match="nothing to draw"):
        draw([p for p in points if p.figures.refused], tmp_path / "none.png", "a title")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["a.parquet", "--policy", "sive"], 2, "did you mean sieve"),
        (["a.parquet", "--policy", "lfu-decay:0"], 3, "whole number"),
        (["a.parquet", "--budget", "0"], 2, "smallest that works is 8389KB"),
        (["a.parquet", "--budget", "-5MB"], 2, "smallest that works is 8389KB"),
        (["a.parquet", "--budget", "5 quarts"], 2, "smallest that works is 8389KB"),
        (["a.parquet", "--budget", "1MB"], 3, "smallest that works is 8389KB"),
        (["a.parquet", "--disk", "1GB/s"], 2, "add --compute"),
        (["a.parquet", "--half", "third"], 2, "first or second"),
        (["a.parquet", "--half", "first", "--warm-half"], 2, "name one of them"),
        (["a.parquet", "--plot", "curves.gif"], 2, ".svg or .png"),
        (["a.parquet", "--json", "/"], 2, "--json /: that is a directory"),
        (["a.parquet", "--json", "/nowhere/x.json"], 2, "no directory /nowhere"),
        (["a.parquet", "--plot", "/nowhere/x.svg"], 2, "--plot /nowhere/x.svg: there is no directory"),
        (["a.parquet", "--json", "a.parquet"], 2, "that is the trace"),
        (["a.parquet", "other.parquet"], 3, "other.parquet is of model feedfacefeedface"),
        (["none.parquet"], 3, "none.parquet is not a trace"),
        ([], 2, "TRACE"),
    ],
)
def test_wrong_words_are_one_line(
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    got, out, err = run(*words)
    assert (got, out) == (code, "")
    assert len(err.splitlines()) == 1 and complaint in err
    assert list(tmp_path.iterdir()) == []
