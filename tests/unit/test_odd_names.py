"""Any name a file can have is a name for a trace, a fit, a plot and a table: bytes that are no UTF-8 too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moestream.cli.main import main
from moestream.trace.write import TraceWriter
from replay_traces import small_trace
from trace_files import save_trace
from trace_steps import META, a_step, cut_short, events

ODD = [os.fsdecode(b"a\xff $x$ [b]\n\xe6\x97"), "a,b+c:d", "日本", "-"]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command that must end well printed."""

    def call(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(words)
        printed = capfd.readouterr()
        assert not ended.value.code, printed.err
        return printed.out + printed.err

    return call


@pytest.fixture(params=ODD, ids=ascii)
def odd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A trace's name without its ending, in the current directory."""
    monkeypatch.chdir(tmp_path)
    # A trace keeps the words it was recorded by.
    monkeypatch.setattr("sys.argv", ["moestream", "run", "--trace", f"{request.param}.parquet"])
    save_trace(small_trace(), tmp_path / f"{request.param}.parquet")
    return str(request.param)


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font:UserWarning")
def test_commands_on_traces_of_any_name(odd: str, run: Callable[..., str], tmp_path: Path) -> None:
    trace = f"./{odd}.parquet"
    assert "steps" in run("trace", "show", trace)
    run("trace", "show", trace, "--json")
    run("trace", "export", trace, "--csv", f"{odd}.csv")
    run("analyze", trace, "--json", f"./{odd}.a.json", "--plot", f"./{odd}.a.png")
    run("replay", trace, "--policy", "lru,pinned", "--json", f"./{odd}.r.json", "--plot", f"./{odd}.svg")
    run("fit", trace, "--out", f"./{odd}.npz")
    made = {".csv", ".experts.csv", ".a.json", ".a.png", ".r.json", ".svg", ".npz", ".parquet"}
    assert {path.name for path in tmp_path.iterdir()} == {odd + ending for ending in made}


def test_seeds_of_any_name(odd: str, run: Callable[..., str]) -> None:
    if "," in odd:
        return  # the comma is --policy's own
    run("fit", f"./{odd}.parquet", "--out", f"./{odd}.npz")
    for name in (f"./{odd}.parquet", f"./{odd}.npz"):
        assert "pinned:" in run("replay", f"./{odd}.parquet", "--budget", "25%", "--policy", f"pinned:{name}")


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_a_broken_trace_of_any_name(name: str, run: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / f"{name}.parquet"
    cut_short(path)
    run("trace", "show", str(path))
    run("trace", "recover", str(path))
    with TraceWriter(path, meta=META) as writer:
        writer.step(0, "decode", a_step(0), events([], 0))
    assert os.listdir(tmp_path) == [path.name]  # noqa: PTH208
