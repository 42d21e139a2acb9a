"""Commands that work long on a trace say how far they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import pytest

from moestream.cli.banner import Bar
from moestream.cli.main import main
from replay_traces import small_trace
from trace_files import save_trace

LAYERS = 3


@pytest.mark.parametrize(
    ("words", "command", "steps"),
    [
        (["analyze", "t.parquet"], "analyze", LAYERS * 4),
        (["fit", "t.parquet", "--out", "f.npz"], "fit", LAYERS * 2),
        (["replay", "t.parquet", "--policy", "lru,fifo", "--budget", "25%,50%"], "replay", 4),
        (["replay", "t.parquet", "u.parquet", "--policy", "lru", "--budget", "25%"], "replay", 3),
    ],
)
def test_progress_is_told_in_equal_steps_to_the_end(
    words: list[str], command: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    closed: list[bool] = []

    class Listening(Bar):
        def __init__(self, stream: TextIO, what: str) -> None:
            super().__init__(stream, what)

        def update(self, done: int, total: int) -> None:
            told.append((done, total))

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(f"moestream.cli.{command}.Bar", Listening)
    monkeypatch.chdir(tmp_path)
    for name in ("t", "u"):
        save_trace(small_trace(), tmp_path / f"{name}.parquet")
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    assert told == [(done, steps) for done in range(1, steps + 1)]
    assert closed == [True]


def test_a_bar_is_taken_away_when_the_work_fails() -> None:
    class Failing:
        def isatty(self) -> bool:
            return False

    stream: Any = Failing()
    with pytest.raises(ZeroDivisionError), Bar(stream, "work") as bar:
        bar.update(1 // 0, 1)
    assert not bar._wanted
