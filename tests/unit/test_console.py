"""What commands print in a pipe and on terminals of several widths: no blanks at ends of lines, no row cut."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moestream.cli.main import main
from moestream.console import console, print_facts, table
from moestream.lab.experiment import experiments
from replay_traces import small_trace
from report_records import a_bench, save
from trace_files import save_trace

PRINTING = [
    ["inspect", "m.gguf"],
    ["plan", "m.gguf", "--ram", "1GB"],
    ["mechanisms"],
    ["lab", "list"],
    ["trace", "show", "t.parquet"],
    ["analyze", "t.parquet"],
    ["fit", "t.parquet", "--out", "f.npz"],
    ["replay", "t.parquet", "--policy", "lru,belady", "--budget", "25%,50%"],
    ["report", "bench"],
]


@pytest.fixture
def here(tmp_path: Path, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "m.gguf").symlink_to(tiny("olmoe"))
    save_trace(small_trace(), tmp_path / "t.parquet")
    save(tmp_path / "bench", a_bench())
    return tmp_path


def printed(words: list[str], capfd: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capfd.readouterr()
    assert not ended.value.code, told.err
    return told.out.splitlines()


@pytest.mark.parametrize("columns", ["", "80"])
@pytest.mark.parametrize("words", PRINTING, ids=lambda words: " ".join(words[:2]))
def test_no_line_ends_in_blanks(
    words: list[str],
    columns: str,
    here: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    lines = printed(words, capfd)
    assert len(lines) > 5
    assert [line for line in lines if line != line.rstrip()] == []


def test_in_a_pipe_each_row_is_one_line(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = printed(["lab", "list"], capfd)
    assert [line.split()[0] for line in lines[1:-2]] == list(experiments())


def test_on_a_terminal_rows_fit_it(here: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "moestream", "inspect", "m.gguf"],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "80", "TERM": "dumb"},
    ) as child:
        os.close(theirs)
        said = b""
        while piece := _read(ours):
            said += piece
        assert child.wait(60) == 0
    os.close(ours)
    lines = said.decode().replace("\r", "").splitlines()
    assert any("slab bytes" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end is closed
        return b""


def test_a_table_of_words_and_figures() -> None:
    out = io.StringIO()
    made = table("Sizes", "name", "bytes")
    made.add_row("a", "1")
    made.add_row("longer", "100")
    console(out).print(made)
    assert out.getvalue() == (
        "Sizes\n\n name     bytes\n ──────────────\n a            1\n longer     100\n\n"
    )


def test_facts_fold_where_there_is_a_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = [("model", "m " * 30), ("path", "x")]
    monkeypatch.delenv("COLUMNS", raising=False)
    print_facts(facts)
    assert capsys.readouterr().out == f"model  {('m ' * 30).rstrip()}\npath   x\n"
    monkeypatch.setenv("COLUMNS", "47")
    print_facts(facts)
    assert capsys.readouterr().out == f"model  {'m ' * 19}m\n       {'m ' * 9}m\npath   x\n"
