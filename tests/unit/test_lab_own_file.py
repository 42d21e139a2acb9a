"""`lab run my.toml`, `lab clean`, and a disk too small: what is refused leaves nothing and has run nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab_fakes import Fake
from moestream.cli.main import main
from moestream.errors import RefusedError, UsageError
from moestream.lab import files, session
from moestream.lab.bench_progress import Lines
from moestream.lab.experiment import find
from moestream.lab.experiment_plan import Job
from moestream.lab.runs import RUNS, append
from moestream.lab.session import Asked, run_all
from moestream.model import read_model

MINE = """\
question = "Is one reader faster than the other on my disk?"
kind = "runs"
source = "me"
found = "not stated"
measures = "tokens a second"
measure = "tok_per_s"

[settings]
prompts = ["prose"]
repeats = 2

[[arms]]
key = "one"
mechanism = "arena"

[[arms]]
key = "two"
mechanism = "arena+threads:4"

[[claims]]
says = "one is faster"
figure = "tok_per_s"
of = "one"
over = "two"
at_least = 1.2
"""


class Writing(Fake):
    """Keeps its records as the real one does."""

    def __init__(self, model: Any, out: Path) -> None:
        super().__init__({"one": 20.0, "two": 10.0})
        self._out = out

    def run(self, job: Job, earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
        record = {**super().run(job, earlier), "schema": 1, "experiment": job.experiment}
        append(self._out / RUNS, record)
        return record


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(session, "BoxExecutor", Writing)
    monkeypatch.setattr(session, "end_on_sigterm", lambda: None)
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def typed(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["lab", *words])
    return int(ended.value.code or 0)


def test_a_file_of_ones_own_is_run_and_its_directory_says_which_it_was(
    here: Path, tiny: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "my.toml").write_text(MINE)
    words = ("run", "my.toml", "--model", str(tiny("olmoe")), "--out", "out")
    assert typed(*words) == 0
    assert "verdict: agrees" in capfd.readouterr().out
    verdict = json.loads((here / "out/verdict.json").read_text())
    assert (verdict["experiment"], verdict["verdict"]) == ("my", "agrees")
    assert {"commit", "modified", "versions", "kernel"} <= set(verdict) and verdict["kernel"]
    assert json.loads((here / "out/setup.json").read_text())["file"] == "my.toml"
    assert typed(*words, "--resume") == 0
    (here / "my.toml").write_text(MINE.replace("threads:4", "threads:2"))
    capfd.readouterr()
    assert typed(*words, "--resume") == 3
    assert "begun with another setup: sha256" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("[settings]", "[settings]\nrepeat = 2"),
            "unknown key 'repeat' in [settings]: did you mean repeats?",
        ),
        (
            ('found = "not', 'colour = 1\nfound = "not'),
            "unknown key 'colour' in the experiment (known: arms, claims",
        ),
        (
            ("at_least = 1.2", "atleast = 1.2"),
            "unknown key 'atleast' in [[claims]] number 1: did you mean at_least?",
        ),
        (("at_least = 1.2", 'at_least = "much"'), "[[claims]] number 1 at_least cannot be 'much'"),
        (('figure = "tok_per_s"', "figure = 3"), "[[claims]] number 1 figure cannot be 3"),
        (('key = "one"', "key = true"), "[[arms]] number 1 key cannot be True"),
        (("[settings]", "[settings]\ntokens = 1.5"), "[settings] tokens cannot be 1.5"),
        (("[settings]", "[settings]\nthreads = true"), "[settings] threads cannot be True"),
        (('prompts = ["prose"]', "prompts = [1]"), "[settings] prompts cannot be (1,)"),
        (('measure = "tok_per_s"', 'measure = "tok_per_s"\nshow = "hit_rate"'), "show must be a list"),
        (("question =", "question"), "not a TOML file that can be read"),
        ((MINE, ""), "found is missing or no text"),
    ],
)
def test_a_wrong_file_of_ones_own_is_one_line_and_code_3(
    here: Path, capfd: pytest.CaptureFixture[str], change: tuple[str, str], said: str
) -> None:
    (here / "my.toml").write_text(MINE.replace(*change, 1))
    assert typed("run", "my.toml") == 3
    told = capfd.readouterr().err.strip()
    assert "my.toml: " in told and said in told and "\n" not in told
    assert [path.name for path in here.iterdir()] == ["my.toml"]


def test_a_file_that_is_not_there_is_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "folder.toml").mkdir()
    assert typed("run", "no.toml") == 3
    assert "there is no file no.toml: name one of your own, FILE.toml" in capfd.readouterr().err
    assert typed("run", "folder.toml") == 3
    assert "folder.toml is not a regular file" in capfd.readouterr().err


def test_two_experiments_of_one_name_are_refused(
    here: Path, tiny: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "skew.toml").write_text(MINE)
    assert typed("run", "skew", "skew.toml", "--model", str(tiny("olmoe"))) == 2
    assert "two experiments are called skew: rename skew.toml" in capfd.readouterr().err
    assert [path.name for path in here.iterdir()] == ["skew.toml"]


def test_what_makes_it_again_names_no_place(tiny: Callable[..., Path], here: Path) -> None:
    (here / "my.toml").write_text(MINE)
    path = tiny("olmoe")
    asked = Asked(read_model(path), 10**9, True, None, False, False, str(path))
    again = f"moestream lab run my.toml --model {path.name} --ram 1000000000 --quick"
    assert asked.again(find(str(here / "my.toml"))) == again
    plain = Asked(read_model(path), None, False, None, False, False)
    assert plain.again(find("recycling")) == "moestream lab run recycling --model demo"


def test_clean_removes_what_experiments_made_and_nothing_else(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert typed("clean") == 0
    assert capfd.readouterr().out.strip() == f"nothing to remove in {files.directory()}"
    files.directory().mkdir(parents=True)
    made = [files.directory() / "0a1b-aligned.gguf", files.directory() / ".0a1b-requantized.gguf.7.partial"]
    kept = [files.directory() / "notes.txt", files.directory().parent / "demo.gguf"]
    for path in (*made, *kept):
        path.write_bytes(b"x" * 1000)
    assert typed("clean", "--json") == 0
    removed = json.loads(capfd.readouterr().out)
    assert sorted(removed, key=str) == sorted(({"path": str(path), "bytes": 1000} for path in made), key=str)
    assert [path.exists() for path in (*made, *kept)] == [False, False, True, True]
    made[0].write_bytes(b"x" * 2000)
    assert typed("clean") == 0
    assert capfd.readouterr().out.strip() == f"removed {made[0]} (2.00 kB)"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize("name", ["two-quants", "four-ways"])
def test_a_disk_too_small_is_refused_before_anything_has_run(
    here: Path, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of a copy in another quantisation, and of one that is written in place; with another experiment before it."""
    monkeypatch.setattr(session, "BoxExecutor", lambda *_: pytest.fail("something was to be run"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, 1 << 20))
    asked = Asked(read_model(tiny("olmoe")), None, True, here / "out", False, False)
    told = here / "told.txt"
    with told.open("w") as told_to, pytest.raises(RefusedError, match=r"1\.05 MB free: free some space"):
        run_all([find("recycling"), find(name)], asked, tell=None, show=Lines(told_to))
    assert told.read_text() == ""
    assert not (here / "out").exists() and not files.directory().exists()


def test_larger_needs_two_arms() -> None:
    from moestream.lab.experiment import parse

    document = {
        "question": "Is it?", "kind": "runs", "source": "me", "found": "not stated", "measures": "it",
        "measure": "tok_per_s", "arms": [{"key": "one", "mechanism": "arena"}],
        "claims": [{"says": "so", "figure": "hit_rate", "of": "one", "larger": "expert_bytes", "at_least": 1}],
    }  # fmt: skip
    with pytest.raises(UsageError, match="claim 'so': larger says which of two arms stands above: name both"):
        parse(document, "it")
