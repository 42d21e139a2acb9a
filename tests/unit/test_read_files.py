"""Whatever a command is to read: missing or of another kind it is refused, exit code 3, one line, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from moestream.cli import main as cli
from moestream.cli.main import main
from replay_traces import small_trace
from report_records import a_bench, save
from trace_files import save_trace

#: Each command and option that reads a file or a directory, as ``@``; t.parquet, m.gguf and bench/ are there.
READ = [
    ["run", "@", "-p", "a"],
    ["run", "m.gguf", "-p", "a", "--mechanism", "arena+ridge:@"],
    ["plan", "@"],
    ["plan", "m.gguf", "--mechanism", "arena+pinned:@"],
    ["probe", "--model", "@"],
    ["bench", "@", "--ram", "1GiB", "--dry-run"],
    ["bench", "m.gguf", "--ram", "1GiB", "--prompts", "@"],
    ["lab", "run", "skew", "--model", "@", "--out", "out"],
    ["lab", "run", "@.toml", "--out", "out"],
    ["inspect", "@"],
    ["inspect", "@", "--check"],
    ["trace", "show", "@"],
    ["trace", "export", "@", "--csv", "x.csv"],
    ["trace", "recover", "@"],
    ["replay", "@", "--json", "x.json"],
    ["replay", "t.parquet", "@"],
    ["replay", "t.parquet", "--probe", "@"],
    ["replay", "t.parquet", "--policy", "pinned:@"],
    ["analyze", "@", "--json", "x.json"],
    ["fit", "@", "--out", "x.npz"],
    ["report", "@", "--html", "x.html"],
    ["report", "bench", "--probe", "@"],
]


@pytest.fixture
def here(tmp_path: Path, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").symlink_to(tiny("olmoe"))
    save_trace(small_trace(), tmp_path / "t.parquet")
    save(tmp_path / "bench", a_bench())
    return tmp_path


@pytest.mark.parametrize("there", ["nothing", "a directory", "a text"])
@pytest.mark.parametrize("words", READ, ids=" ".join)
def test_what_cannot_be_read_is_refused(
    words: list[str], there: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "given.toml" if "@.toml" in words else "given"
    if there == "a directory":
        (here / name).mkdir()
    elif there == "a text":
        (here / name).write_text("Once upon a time, in a village by the sea.\n")
    before = sorted(here.iterdir())
    with pytest.raises(SystemExit) as ended:
        main([word.replace("@.toml", "@").replace("@", name) for word in words])
    printed, said = capfd.readouterr()
    assert (ended.value.code, printed) == (3, ""), said
    assert said.startswith("moestream: ") and said.count("\n") == 1
    assert name in said
    assert sorted(here.iterdir()) == before


def commands(group: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Of each command with an argument, its words."""
    found = []
    for name, command in getattr(group, "commands", {}).items():
        found += commands(command, (*path, name))
    if any(param.param_type_name == "argument" for param in getattr(group, "params", ())):
        found.append(path)
    return found


def test_no_command_that_takes_a_file_is_left_out() -> None:
    group = typer.main.get_command(cli.app)
    taking = [words for name in cli.COMMANDS for words in commands(group.get_command(None, name), (name,))]
    assert len(taking) >= 10
    for words in taking:
        assert any(tuple(read[: len(words)]) == words for read in READ), words


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["run", "n.gguf", "-p", "a"], None),
        (["inspect", "olmo.gguf"], "olmoe.gguf"),
        (["inspect", "olmoe"], "olmoe.gguf"),
        (["inspect", "models/olmoe"], None),
        (["plan", "dmeo"], "demo"),
        (["trace", "show", "prsoe.parquet"], "prose.parquet"),
        (["replay", "prose.paruqet"], "prose.parquet"),
        (["lab", "run", "mien.toml"], "mine.toml"),
        (["report", "bensh"], "bench"),
    ],
)
def test_the_nearest_name_is_told(
    words: list[str], near: str | None, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "m.gguf").rename(here / "olmoe.gguf")
    (here / "t.parquet").rename(here / "prose.parquet")
    (here / "mine.toml").touch()
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capfd.readouterr().err
    assert ended.value.code == 3
    assert (f" (did you mean {near}?)" in said) if near else ("did you mean" not in said), said
