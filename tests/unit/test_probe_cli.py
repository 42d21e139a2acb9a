"""``moestream probe``'s words: what it measures with when nobody says, and what it prints. Nothing is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ggufs import moe_tensors, write_gguf
from moestream.cli.main import main
from moestream.model import Model
from probe_documents import document

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Model | None, Path | None]]:
    """What the probe was asked to measure with; the document is one made by hand, and nothing is kept."""
    asked: list[tuple[Model | None, Path | None]] = []

    def run_probe(model: Model | None, directory: Path | None, **_: Any) -> dict[str, Any]:
        asked.append((model, directory))
        return document(disk={"expert_read": []})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moestream.probe.run.run_probe", run_probe)
    monkeypatch.setattr("moestream.cli.probe.save_probe", lambda document: Path("kept"))
    monkeypatch.setattr("moestream.make.demo_path", lambda: tmp_path / "demo.gguf")
    return asked


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["probe", *words])
        printed = capfd.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def test_bare_it_measures_with_the_demo_and_says_so(
    measured: list[tuple[Model | None, Path | None]], call: Call, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "demo.gguf", moe_tensors(2, n_embd=256, n_ff=256))
    code, out, err = call()
    assert code == 0
    ((model, directory),) = measured
    assert model is not None
    assert (model.paths, directory) == ((path,), None)
    assert "measuring with the demo model" in err
    assert len(out.splitlines()) == 10


def test_bare_without_a_demo_it_measures_here_and_says_so(
    measured: list[tuple[Model | None, Path | None]], call: Call, tmp_path: Path
) -> None:
    code, _, err = call()
    assert code == 0
    ((model, directory),) = measured
    assert model is None
    assert directory is not None
    assert directory.resolve() == tmp_path
    assert f"a file made in {tmp_path}: the demo model is not made yet" in err


def test_what_is_named_is_measured_without_a_word(
    measured: list[tuple[Model | None, Path | None]], call: Call, tmp_path: Path
) -> None:
    assert call("--dir", str(tmp_path))[2] == ""
    assert measured == [(None, tmp_path)]
    code, out, err = call("--dir", str(tmp_path), "--model", "demo")
    assert (code, out) == (2, "")
    assert "name one of the two" in err


def test_tables_come_below_the_lines(
    measured: list[tuple[Model | None, Path | None]], call: Call, tmp_path: Path
) -> None:
    plain = call("--dir", str(tmp_path))[1].splitlines()
    more = call("--dir", str(tmp_path), "--tables")[1].splitlines()
    assert len(plain) == 10
    assert more[:10] == plain
    assert more[11] == "Slabs from the page cache, by threads and pieces of a slab"
