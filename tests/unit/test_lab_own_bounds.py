"""Numbers and names of an experiment's own file that nothing could be run with: one line that names file and key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moestream.cli.main import main
from moestream.errors import UsageError
from moestream.lab.bench_ladder import bench_arms
from moestream.lab.experiment import experiments
from moestream.lab.experiment_bounds import GROUPS
from moestream.mechanism import Mechanism

RUNS = """\
question = "Is one faster?"
kind = "runs"
source = "me"
found = "not stated"
measures = "tokens a second"
measure = "tok_per_s"
show = ["hit_rate"]

[settings]
prompts = ["prose"]
repeats = 2

[[arms]]
key = "one"
mechanism = "arena"

[[arms]]
key = "two"
mechanism = "arena+threads:4"
budget = "25%"

[[claims]]
says = "one is faster"
figure = "tok_per_s"
of = "one"
over = "two"
at_least = 1.2
"""
PROBE = """\
question = "How fast is it?"
kind = "probe"
source = "me"
found = "not stated"
measures = "bytes a second"
measure = "bytes_per_s"

[probe]
groups = ["random"]
depths = [8]

[[claims]]
says = "it is fast"
figure = "bytes_per_s"
of = "random/uring:8"
at_least = 1.0
"""


def lab_run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["lab", "run", *words])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("text", "old", "new", "said"),
    [
        (RUNS, "repeats = 2", "repeats = 1001", "[settings] repeats cannot be 1001: 1 to 1000"),
        (RUNS, "repeats = 2", "repeats = 1e300", "[settings] repeats cannot be 1e+300"),
        (
            RUNS,
            "repeats = 2",
            "tokens = 0x1" + "0" * 5000,
            "[settings] tokens cannot be a whole number of thousands",
        ),
        (RUNS, "repeats = 2", "repeats = 1" + "0" * 5000, "not a TOML file that can be read"),
        (RUNS, "repeats = 2", "repeats = " + "[" * 5000, "not a TOML file that can be read"),
        (RUNS, "repeats = 2", "cap = inf", "[settings] cap cannot be inf"),
        (RUNS, "repeats = 2", "cap = nan", "[settings] cap cannot be nan"),
        (RUNS, "repeats = 2", "ctx = 1", "[settings] ctx cannot be 1: 64 to"),
        (RUNS, 'budget = "25%"', "threads = 513", "[[arms]] number 2 threads cannot be 513: 1 to 512"),
        (RUNS, 'budget = "25%"', "cap = true", "[[arms]] number 2 cap cannot be True"),
        (RUNS, '"25%"', f'"{"9" * 400}%"', "arm two: budget: no budget"),
        (RUNS, '"25%"', '"0%"', "arm two: budget: no budget"),
        (RUNS, '["hit_rate"]', '[["x"]]', "show must be names of figures"),
        (RUNS, 'key = "one"', 'key = ""', "arm '': its key must be"),
        (RUNS, 'key = "one"', f'key = "{"k" * 81}"', "its key must be 1 to 80"),
        (RUNS, "at_least = 1.2", "at_least = nan", "at_least cannot be nan"),
        (RUNS, "at_least = 1.2", "at_least = 2\nat_most = 1", "at_least is more than at_most"),
        (RUNS, 'over = "two"', 'over = "one"', "of and over are one arm"),
        (
            RUNS,
            '"Is one faster?"',
            '"\\u001b[31m"',
            "question cannot be '\\x1b[31m': it holds control characters",
        ),
        (RUNS, '"one is faster"', '"\\u001b[31m"', "[[claims]] number 1 says cannot be"),
        (PROBE, '"random"', '"randon"', "[probe] groups: there is no 'randon' (known: sequential"),
        (PROBE, "[8]", "[0]", "[probe] depths cannot be 0"),
        (PROBE, "[8]", "[8, -1]", "[probe] depths cannot be -1"),
        (PROBE, "[8]", "[8]\nseconds = 1e9", "[probe] seconds cannot be 1000000000.0"),
        (PROBE, "[8]", '[8]\nadvice = ["x"]', "[probe] advice: there is no 'x'"),
    ],
)
def test_what_cannot_be_run_is_named(
    text: str, old: str, new: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert text.count(old) == 1
    path = tmp_path / "my.toml"
    path.write_text(text.replace(old, new))
    assert lab_run(str(path)) == 3
    told = capfd.readouterr().err.strip()
    assert f"{path}: " in told
    assert said in told
    assert "\n" not in told


def test_a_pipe_is_not_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    assert lab_run(str(tmp_path / "pipe.toml")) == 3
    assert "pipe.toml is not a regular file" in capfd.readouterr().err


def test_all_stands_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert lab_run("all", "skew") == 2
    assert "all is every experiment: write it alone" in capfd.readouterr().err
    for words in ("ladder,all", "all,default", "ladder,"):
        with pytest.raises(UsageError, match="stands alone, without commas"):
            bench_arms(words, 1 << 30, chosen=Mechanism.parse("arena"), fits=False)


def test_the_groups_are_those_that_the_experiments_measure() -> None:
    named = {
        group for one in experiments().values() for group in (*one.probe.groups, *one.quick_probe.groups)
    }
    assert named
    assert named <= set(GROUPS)
