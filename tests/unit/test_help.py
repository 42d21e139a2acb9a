"""What every command's help shows: words a user knows, in 80 columns."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from moestream.cli import main as cli


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


def found(name: str) -> Any:
    return typer.main.get_command(cli.app).get_command(None, name)


EVERY = [words for name in cli.COMMANDS for words in commands(found(name), (name,))]


def shown(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--help"])
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_a_function_of_its_name(name: str) -> None:
    function = name.replace("-", "_")
    assert callable(getattr(importlib.import_module(f"moestream.cli.{function}"), function))


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_shows_no_type_and_no_inequality(
    words: tuple[str, ...], columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = shown(words, capsys)
    assert f"Usage: moestream {' '.join(words)} [OPTIONS]" in text
    assert not re.search(r"[<>{}]|\bstr\b|\bPath\b|\bINTEGER\b|\bTEXT range\b", text), text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_value_has_a_word(words: tuple[str, ...]) -> None:
    command = found(words[0])
    for name in words[1:]:
        command = command.commands[name]
    for param in command.params:
        if not getattr(param, "is_flag", False) and not getattr(param, "hidden", False):
            assert re.fullmatch(r"[A-Z]+(\|-)?", param.metavar or ""), param.name


def test_ranges_are_words(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown(("run",), capsys).split())
    assert "Usage: moestream run [OPTIONS] MODEL" in text
    assert "--threads N Compute threads. Left out: one for each CPU. [1 to 512]" in text
    assert "[default: 4096; 0 or more]" in text
    assert "[default: 128; 0 or more]" in text
    assert "TRACE Traces of one model" in " ".join(shown(("fit",), capsys).split())
