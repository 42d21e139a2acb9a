"""The commands that a report gives to repeat what it shows: checkout, setup, and the runs with all they were told."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from moestream.reports import read_results, summarize
from moestream.reports.labs import read_labs
from moestream.reports.repeat import commands, lab_commands
from report_records import DEFAULT, outcome, run, save, save_lab

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_bench_without_its_setup_is_repeated_with_what_its_records_were_told(tmp_path: Path) -> None:
    told = {"threads": 3, "ctx": 2048, "limit_s": 12.5, "most_tokens": 64, "prompt": "mine"}
    records = [run("default", **told), run("stock", **{**told, "prompt": "other"}, round=1)]
    (group,) = summarize([read_results(save(tmp_path / "bench", records))])
    assert commands(group) == [
        f"git checkout {COMMIT}",
        "make setup",
        "# prompts.json: an object with the texts of other, mine, which records do not hold",
        f".venv/bin/moestream bench m.gguf --ram 1000000000 --mechanisms {DEFAULT} -n 64 --repeats 2 --threads 3 "
        "--ctx 2048 --seconds 12.5 --prompts prompts.json --out results/scratch/bench-1.00GB",
    ]


def test_what_records_do_not_say_is_not_made_up(tmp_path: Path) -> None:
    records = [run("default", threads=None, ctx=None, commit=None)]
    (group,) = summarize([read_results(save(tmp_path / "bench", records))])
    assert commands(group) == [
        "make setup",
        f".venv/bin/moestream bench m.gguf --ram 1000000000 --mechanisms {DEFAULT} -n 5 --repeats 1 "
        "--out results/scratch/bench-1.00GB",
    ]


def test_an_experiment_is_repeated_from_its_commit(tmp_path: Path) -> None:
    directory = save_lab(
        tmp_path / "lab", [outcome("skew", commit="feed"), outcome("app-lru"), outcome("cliff")]
    )
    (directory / "app-lru/runs.jsonl").write_text(json.dumps(run()) + "\n{")
    (directory / "cliff/runs.jsonl").write_text("{ damaged")
    (lab,) = read_labs(directory)
    made = {one["experiment"]: lab_commands(lab, one) for one in lab.outcomes}
    ending = "--model m.gguf --ram 1000000000 --quick"
    assert made == {
        "skew": ["git checkout feed", "make setup", f".venv/bin/moestream lab run skew {ending}"],
        "app-lru": [f"git checkout {COMMIT}", "make setup", f".venv/bin/moestream lab run app-lru {ending}"],
        "cliff": ["make setup", f".venv/bin/moestream lab run cliff {ending}"],
    }


def test_the_demo_is_the_models_word(tmp_path: Path) -> None:
    demo = outcome("skew", model={"name": "demo-1.gguf"}, quick=False, cap_bytes=None)
    (lab,) = read_labs(save_lab(tmp_path / "lab", [demo]))
    assert lab_commands(lab, lab.outcomes[0])[-1] == ".venv/bin/moestream lab run skew"


def test_what_a_record_says_is_quoted_in_the_commands(tmp_path: Path) -> None:
    odd = "x; touch /tmp/y\nrm z"
    records = [run("default", commit=odd, prompt=odd, model={"name": odd}), run("stock", prompt=odd)]
    (group,) = summarize([read_results(save(tmp_path / "bench", records))])[:1]
    found = commands(group)
    assert shlex.split(found[0]) == ["git", "checkout", odd]
    assert (
        found[2]
        == "# prompts.json: an object with the texts of x; touch /tmp/y rm z, which records do not hold"
    )
    assert shlex.split(found[3])[2] == odd
    setup = {"arms": [{"key": "default"}], "command": "moestream bench demo; touch /tmp/y $(id)"}
    (tmp_path / "bench/setup.json").write_text(json.dumps(setup))
    (group,) = summarize([read_results(tmp_path / "bench")])[:1]
    assert commands(group)[-1].startswith(".venv/bin/moestream bench 'demo;' touch /tmp/y '$(id)' --out ")
