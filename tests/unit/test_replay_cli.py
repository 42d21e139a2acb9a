"""``moestream replay`` as it is typed: the table, the JSON, the plot, and wrong words in one line."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moestream.cli.main import main
from moestream.errors import RefusedError
from moestream.probe import save_probe
from moestream.probe.saved import SCHEMA, this_box
from moestream.replay import prepare, replay
from moestream.trace.write import TraceWriter
from replay_traces import build, demo_steps, demo_trace, feed


@pytest.fixture(autouse=True)
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace files in the current directory; ``differs`` has not the hits that its mechanism has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.with_name(tmp_path.name + "-cache")))
    for name in ("a", "b", "other", "differs", "pinned"):
        capacity, wishes = 240 if name == "b" else 480, name == "a"
        about, steps = demo_steps(capacity, wishes=wishes)
        done = replay(prepare(build(about, steps)), "lru", (capacity,)).per_step()
        if name == "other":
            about["model"]["identity"] = "feedfacefeedface"
        if name == "pinned":
            about["mechanism"] = "arena+uring:8+pinned:gone.parquet+none+anon"
        done["hits"][3] += name == "differs"
        feed(TraceWriter(f"{name}.parquet"), about, steps, hits=done["hits"], misses=done["misses"])


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
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


def test_a_trace_that_differs_is_warned_of(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("differs.parquet", "--policy", "lru", "--budget", "25%")
    assert code == 0
    assert "warning: replayed as recorded (lru), 1 of 65 steps differ" in out


def test_a_record_whose_seed_is_gone_is_replayed_all_the_same(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, _ = run("pinned.parquet", "--policy", "lru", "--budget", "25%")
    assert code == 0
    assert "warning: not held against its own record: " in out and "gone.parquet" in out
    assert " lru " in out
    code, out, _ = run(
        "pinned.parquet", "--policy", "pinned:a.parquet,pinned", "--budget", "recorded", "--json", "-"
    )
    document = json.loads(out)
    assert document["traces"][0]["recorded"] is None
    assert [point["policy"] for point in document["points"]] == ["pinned:a.parquet", "pinned"]


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


def keep_probe(model: str, **changes: Any) -> None:
    """A probe of this box in the user's cache, made a minute ago for the model of an identity."""
    which = {"model": model, "device": "9:9", **this_box()}
    rates = {"disk_bytes_per_s": 2e9, "compute_s_per_token": 0.05}
    save_probe({"schema": SCHEMA, "measured_at": time.time() - 90, "identity": which, **rates, **changes})


def test_the_kept_probe_of_the_traces_model_gives_the_rates(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    words = ["a.parquet", "--policy", "lru", "--budget", "25%"]
    identity = prepare(demo_trace(480, wishes=True)).identity
    keep_probe("feedfacefeedface")
    _, out, _ = run(*words, "--json", "-")
    assert (json.loads(out)["rates"], json.loads(out)["probe_measured_at"]) == (None, None)
    keep_probe(identity)
    _, out, _ = run(*words, "--json", "-")
    document = json.loads(out)
    assert document["rates"] == {"disk_bytes_per_s": 2e9, "compute_s_per_token": 0.05}
    assert document["probe_measured_at"] == pytest.approx(time.time() - 90, abs=60)
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert "rates: of the probe kept for this model, measured 2 min ago: 2.00 GB/s, 50.0 ms a token" in out
    assert "tok/s" in out
    _, out, _ = run(*words, "--disk", "1GB/s", "--compute", "10ms", "--json", "-")
    assert json.loads(out)["rates"] == {"disk_bytes_per_s": 1e9, "compute_s_per_token": 0.01}
    assert json.loads(out)["probe_measured_at"] is None


def test_a_kept_probe_without_compute_gives_no_speed_and_says_what_is_missing(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    keep_probe(prepare(demo_trace(480, wishes=True)).identity, compute_s_per_token=None)
    code, out, _ = run("a.parquet", "--policy", "lru", "--budget", "25%")
    assert code == 0
    assert "tok/s" not in out
    assert "the kept probe knows only one of the two rates" in out


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
    assert sorted(file.name for file in tmp_path.iterdir() if file.suffix != ".parquet") == [
        "curves.png",
        "curves.svg",
    ]


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
    assert list(lines) == [
        "demand: nothing kept",
        "lru",
        "lfu-decay:16",
        "belady: the fewest reads, none early",
    ]
    ceiling = lines.pop("demand: nothing kept").get_ydata()[0]
    floor = lines["belady: the fewest reads, none early"].get_ydata()
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
        (["a.parquet", "--policy", "lfu-decay:0"], 2, "policy 'lfu-decay:0': "),
        (["a.parquet", "--budget", "0"], 2, "smallest that works is 8389KB"),
        (["a.parquet", "--budget", "-5MB"], 2, "smallest that works is 8389KB"),
        (["a.parquet", "--budget", "5 quarts"], 2, "smallest that works is 8389KB"),
        (["a.parquet", "--budget", "1MB"], 3, "smallest that works is 8389KB"),
        (["a.parquet", "--disk", "1GB/s"], 2, "add --compute"),
        (["a.parquet", "--half", "third"], 2, "first or second"),
        (["a.parquet", "--half", "first", "--warm-half"], 2, "name one of them"),
        (["a.parquet", "--plot", "curves.gif"], 2, "ends in .png, .svg"),
        (["a.parquet", "--json", "/"], 2, "--json /: that is a directory"),
        (["a.parquet", "--json", "/nowhere/x.json"], 2, "no directory /nowhere"),
        (["a.parquet", "--plot", "/nowhere/x.svg"], 2, "--plot /nowhere/x.svg: there is no directory"),
        (["a.parquet", "--json", "a.parquet"], 2, "that is the trace"),
        (["a.parquet", "other.parquet"], 3, "other.parquet is of model feedfacefeedface"),
        (["none.parquet"], 3, "none.parquet"),
        ([], 2, "TRACE"),
    ],
)
def test_wrong_words_are_one_line(
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    words: list[str],
    code: int,
    complaint: str,
) -> None:
    before = sorted(tmp_path.iterdir())
    got, out, err = run(*words)
    assert (got, out) == (code, "")
    assert len(err.splitlines()) == 1 and complaint in err
    assert sorted(tmp_path.iterdir()) == before
