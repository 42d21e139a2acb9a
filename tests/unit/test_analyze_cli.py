"""``moestream analyze`` and ``moestream fit`` as typed: tables, JSON, a plot, a fit, wrong words in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moestream.cli.main import main
from moestream.seeds import read_fit
from replay_traces import build, demo_trace, meta, small_trace
from trace_files import save_trace

pytest.importorskip("matplotlib")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("traces")
    save_trace(demo_trace(), where / "demo.parquet")
    save_trace(small_trace(), where / "small.parquet")
    other = demo_trace()
    other.meta["model"]["identity"] = "feedfacefeedface"
    save_trace(other, where / "other.parquet")
    short = build(meta([4], 1, [([0], 4096)], [4]), [[(0, [[expert]], [])] for expert in (0, 1, 2)])
    save_trace(short, where / "short.parquet")
    (where / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    return where


@pytest.fixture
def run(directory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Exit code, what was printed, and what was complained of; words are typed where the traces lie."""
    monkeypatch.chdir(directory)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        printed = capfd.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call


def test_tables_are_whole_at_80_columns(run: Run) -> None:
    code, printed, complaint = run("analyze", "demo.parquet", "--budget", "25%,recorded")
    assert (code, complaint) == (0, "")
    assert "hits nothing below 245 MB (12.1% of the experts)" in printed
    assert "gate: not in this trace" in printed
    assert "At 25% (503 MB), lru" in printed
    assert "At recorded (503 MB), lru" in printed
    # An ellipsis is what a table puts where its columns do not fit.
    assert "…" not in printed
    assert max(len(line) for line in printed.splitlines() if "─" in line) <= 80


def test_json_on_stdout_is_all_that_is_printed(run: Run) -> None:
    code, printed, _ = run("analyze", "demo.parquet", "--json", "-")
    said = json.loads(printed)
    assert code == 0
    assert (said["tokens"], len(said["layers"]), said["trace"]) == (77, 30, "demo.parquet")
    assert said["budgets"][0]["budget"] == "recorded"


def test_json_and_plot_are_written_beside_the_tables(run: Run, tmp_path: Path) -> None:
    out, picture = tmp_path / "a.json", tmp_path / "a.png"
    for _ in range(2):  # the second time over the first
        code, printed, complaint = run("analyze", "small.parquet", "--json", str(out), "--plot", str(picture))
        assert code == 0
        assert "By layer" in printed
        assert complaint.splitlines() == [f"wrote {out}", f"wrote {picture}"]
    assert json.loads(out.read_text())["tokens"] == 48
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png"]


def test_a_fit_is_made_reported_and_readable(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "made.npz"
    code, printed, _ = run("fit", "demo.parquet", "demo.parquet", "--out", str(out), "--wishes", "3")
    assert code == 0
    assert "ridge, held out" in printed
    assert f"--mechanism arena+ridge:{out}" in printed
    made = read_fit(out)
    assert (made.wishes, len(made.maps), made.identity) == (3, 30, "0123456789abcdef")


@pytest.mark.parametrize("command", [["trace", "show"], ["analyze"], ["replay"], ["fit", "--out", "new.npz"]])
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("..", ".. is not a regular file"),
        (".", "'.' is no name of a trace"),
        ("/", "'/' is no name of a trace"),
        ("", "'.' is no name of a trace"),
        ("/dev/null", "/dev/null is not a regular file"),
        ("pipe", "pipe is not a regular file"),
        ("empty", "empty is empty: nothing was recorded in it"),
        ("x" * 300, "cannot be read (File name too long)"),
    ],
)
def test_what_is_no_file_is_no_trace(
    command: list[str], name: str, complaint: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    code, printed, said = run(*command, name)
    assert code in (2, 3) and printed == ""
    assert len(said.splitlines()) == 1 and complaint in said


@pytest.mark.parametrize("name", [".", "/dev/null", "pipe", "empty"])
@pytest.mark.parametrize("option", ["--probe", "--policy"])
def test_what_is_no_file_is_no_probe_and_no_seed(
    option: str, name: str, run: Run, tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    word = name if option == "--probe" else f"pinned:{name}"
    code, printed, said = run("replay", str(directory / "demo.parquet"), option, word)
    assert (code, printed, len(said.splitlines())) == (3, "", 1)
    assert name in said


@pytest.mark.parametrize(
    "words, code, complaint",
    [
        (["analyze", "none.parquet"], 3, "there is no file none.parquet"),
        (["analyze", "model.gguf"], 3, "model.gguf is not a trace"),
        (["analyze", "demo.parquet", "--budget", "0"], 2, "budget '0'"),
        (["analyze", "demo.parquet", "--budget", "-5%"], 2, "budget '-5%'"),
        (["analyze", "demo.parquet", "--budget", "5 parsecs"], 2, "budget '5 parsecs'"),
        (["analyze", "demo.parquet", "--plot", "model.gguf"], 2, "a plot's name ends in .png, .svg, .pdf"),
        (["analyze", "demo.parquet", "--json", "model.gguf"], 2, "model.gguf: that is a model"),
        (["fit", "demo.parquet", "--out", "model.gguf"], 2, "model.gguf exists and is no fit file"),
        (
            ["analyze", "none.parquet", "--json", "new/a.json"],
            2,
            "--json new/a.json: there is no directory new: make",
        ),
        (
            ["analyze", "none.parquet", "--plot", "new/a.png"],
            2,
            "--plot new/a.png: there is no directory new: make",
        ),
        (
            ["fit", "none.parquet", "--out", "new/a.npz"],
            2,
            "--out new/a.npz: there is no directory new: make it",
        ),
        (
            ["replay", "none.parquet", "--plot", "new/a.png"],
            2,
            "--plot new/a.png: there is no directory new: make",
        ),
        (
            ["replay", "none.parquet", "--json", "new/a"],
            2,
            "--json new/a: there is no directory new: make it first",
        ),
        (
            ["trace", "export", "demo.parquet", "--csv", "new/a.csv"],
            2,
            "there is no directory new: make it first",
        ),
        (
            ["make-model", "--arch", "llama", "--shape", "tiny", "--quant", "Q4_K", "--out", "new/a.gguf"],
            2,
            "--out new/a.gguf: there is no directory new: make it first",
        ),
        (
            ["demo-model", "--out", "new/a.gguf"],
            2,
            "--out new/a.gguf: there is no directory new: make it first",
        ),
        (["fit", "demo.parquet", "--out", "."], 2, ". exists and is no fit file"),
        (["fit", "demo.parquet", "--out", "demo.parquet"], 2, "demo.parquet exists and is no fit file"),
        (["fit", "demo.parquet", "other.parquet", "--out", "new.npz"], 3, "feedfacefeedface"),
        (["fit", "short.parquet", "--out", "new.npz"], 3, "a trace of 3 tokens is too short"),
        (["fit", "demo.parquet", "--out", "new.npz", "--wishes", "0"], 2, "--wishes"),
        (["fit", "--out", "new.npz"], 2, "TRACE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_one_line_and_nothing_is_written(
    words: list[str], code: int, complaint: str, run: Run, directory: Path
) -> None:
    before = {path: path.read_bytes() for path in directory.iterdir()}
    ended, printed, said = run(*words)
    assert (ended, printed) == (code, "")
    assert complaint in said
    assert len(said.splitlines()) == 1
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
