"""A benchmark that goes on with records that were edited: refused before its first run, in one line that names them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench_records import ARMS, BOX, CAP, PROMPTS, Mock, Silent, setup
from moestream.errors import MoestreamError
from moestream.lab.bench_journal import open_journal, read_runs
from moestream.lab.bench_session import Asked, check_earlier, conclude, make_runs
from moestream.lab.schedule import schedule
from odd_values import odd_texts


def test_odd_values_of_earlier_records_are_found_before_the_first_run(tmp_path: Path) -> None:
    what = Asked(setup(tmp_path), ARMS, 1, "default", CAP, "1GiB", "moestream bench m.gguf --ram 1GiB")
    slots = schedule(ARMS, list(PROMPTS), 1, "default")
    asked, runs = what.document(BOX), tmp_path / "runs.jsonl"
    records = make_runs(what.setup, slots[:4], [], Silent(), Mock())
    check_earlier(tmp_path, asked, read_runs(runs))
    (tmp_path / "setup.json").write_text(json.dumps(asked))
    first = runs.read_text().splitlines()[0] + "\n"
    refused = 0
    for line, what_odd in odd_texts(records[-1], 120, seed=6):
        runs.write_text(first + line + "\n")
        try:
            found = read_runs(runs)
            check_earlier(tmp_path, asked, found)
        except MoestreamError as error:
            refused += 1
            assert str(runs) in str(error) or "two boxes" in str(error), what_odd
            assert "\n" not in str(error), what_odd
        else:
            # What was let through carries to the end.
            conclude(tmp_path, make_runs(what.setup, slots[4:6], found, Silent(), Mock()), None)
    assert 0 < refused < 120


@pytest.mark.parametrize("name", ["setup.json", "runs.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "deep"])
def test_what_is_no_file_of_records_is_refused_when_a_benchmark_goes_on(
    name: str, kind: str, tmp_path: Path
) -> None:
    what = Asked(setup(tmp_path), ARMS, 1, "default", CAP, "1GiB", "moestream bench m.gguf --ram 1GiB")
    asked = what.document(BOX)
    (tmp_path / "setup.json").write_text(json.dumps(asked))
    (tmp_path / "runs.jsonl").write_text("")
    (tmp_path / name).unlink()
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "directory":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("[" * 5000 + "\n\n")
    with pytest.raises(MoestreamError, match=name):
        open_journal(tmp_path, asked, resume=True, force=False)
