"""Records, setups, verdicts and probes with any value replaced by an odd one: a report or one line, nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moestream.cli.main import main
from moestream.errors import MoestreamError, RefusedError
from moestream.lab.bench_journal import read_runs
from moestream.lab.record_kinds import parse_record
from moestream.reports import read_results, summarize
from odd_values import odd_texts
from report_records import BOX, MODEL, a_bench, failed, outcome, run, save, save_lab

PROBE = {
    "schema": 1,
    "box": BOX,
    "identity": {"model": MODEL["identity"]},
    "disk_bytes_per_s": 1e9,
    "compute_s_per_token": 0.02,
}
SETUP = {
    "arms": [{"key": "stock", "lever": ""}, {"key": "default", "lever": "the default"}],
    "model": {"name": "m.gguf", "bytes": 3_000_000_000, "identity": MODEL["identity"]},
    "box": BOX,
    "out": "mine",
    "ram": "1GB",
    "repeats": 1,
    "ctx": 512,
    "sentinel": "default",
    "caged": True,
    "cap_bytes": 1_000_000_000,
    "tokens": 5,
    "threads": 2,
    "prompts": {"prose": "a text"},
    "command": "moestream bench demo",
    "ladder": True,
}


def reported(capfd: pytest.CaptureFixture[str], what: str, *words: str | Path) -> None:
    """A report, or one line and nothing written."""
    out = Path(words[0]).parent / "out.json"
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words), "--json", str(out)])
    said = capfd.readouterr()
    if ended.value.code == 0:
        json.loads(out.read_text(), parse_constant=lambda text: pytest.fail(f"{what}: {text} is no JSON"))
        out.unlink()
        assert "\x1b" not in said.out, what
    else:
        assert ended.value.code in (2, 3), f"{what}: {said.err}"
        assert said.err.count("\n") == 1, f"{what}: {said.err}"
        assert not out.exists(), what


def test_odd_values_in_a_record(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = run()
    for number, (line, what) in enumerate(odd_texts(whole, 150, seed=1)):
        reported(capfd, what, save(tmp_path / f"mine{number}", a_bench()[:2], line + "\n"))


def test_odd_values_in_a_setup(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    records = a_bench()[:3]
    for record in records:
        record["document"] |= {"n_batch": 1, "prompt_tokens": 1}
        record["cage_anon_peak_bytes"] = None
    mine = save(tmp_path / "mine", records)
    (mine / "setup.json").write_text(json.dumps(SETUP))
    assert len(summarize([read_results(mine)])[0].doubts) > 0
    for text, what in odd_texts(SETUP, 80, seed=2):
        (mine / "setup.json").write_text(text)
        reported(capfd, what, mine)


def test_odd_values_in_a_verdict(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = save_lab(tmp_path / "labs", [outcome()])
    for text, what in odd_texts(outcome(), 120, seed=3):
        (place / "app-lru/verdict.json").write_text(text)
        reported(capfd, what, place)


def test_odd_values_in_a_probe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine, probe = save(tmp_path / "mine", a_bench()[:2]), tmp_path / "p.json"
    for text, what in odd_texts(PROBE, 60, seed=4):
        probe.write_text(text)
        reported(capfd, what, mine, "--probe", probe)


@pytest.mark.parametrize("name", ["runs.jsonl", "setup.json", "probe.json", "verdict.json"])
def test_a_pipe_is_refused_and_not_waited_for(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = save(tmp_path / "mine", a_bench()[:2])
    (mine / name).unlink(missing_ok=True)
    os.mkfifo(mine / name)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(mine)])
    assert ended.value.code == 3
    assert f"{mine / name} is not a regular file" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("null", "is no record: each line is one JSON object"),
        ('{"schema": 0}', "is no record: its schema is 0"),
        ('{"schema": null}', "is no record: its schema is null"),
        ('{"schema": 2}', "is of schema 2, this version knows 1: read it with a newer moestream"),
        ('{"round": 1.5}', "is no record: round is 1.5, no count"),
        ('{"arm": ["stock"]}', 'is no record: arm is ["stock"], no text'),
        ('{"document": {"box": 1}}', "is no record: box is 1, no object"),
        ('{"cap_bytes": 1e999}', "is no record: 1e999 is no number"),
    ],
)
def test_a_line_that_is_no_record_says_what_it_is(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is ") as refused:
        parse_record(line.encode())
    assert str(refused.value) == said
    (tmp_path / "runs.jsonl").write_text(line + "\n" + line + "\n")
    with pytest.raises(RefusedError, match="line 1 is "):
        read_runs(tmp_path / "runs.jsonl")


def test_odd_values_in_the_records_of_a_benchmark_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for line, _ in odd_texts(run(), 100, seed=5):
        path.write_text(line + "\n")
        try:
            read_runs(path)
        except MoestreamError as error:
            assert f"{path}: line 1" in str(error)


@pytest.mark.parametrize("name", ["$x^", "a\u001b[31mb", "\ud800", "$", "\\frac{"])
def test_names_are_drawn_as_they_are(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    records = [*a_bench(), run("arena", arm=name, prompt=name), run(name, prompt="prose")]
    with pytest.raises(SystemExit) as ended:
        main(["report", str(save(tmp_path / "mine", records)), "--html", str(out)])
    assert ended.value.code == 0, capfd.readouterr().err
    assert "\x1b" not in out.read_text()
    assert "\x1b" not in capfd.readouterr().out


def test_without_a_valid_run_what_was_asked_is_still_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(save(tmp_path / "mine", [failed(), failed("stock")])), "--markdown", "-"])
    said = capfd.readouterr().out
    assert "a memory cgroup around the whole process" in said
    assert "2030-01-02 03:04 to 2030-01-02 03:04 UTC, no valid runs" in said
