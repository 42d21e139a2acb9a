"""What `moestream trace` prints and writes, on small traces and on files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moestream.cli.trace import describe
from moestream.errors import RefusedError, UsageError
from moestream.trace.export import expert_rows, export_csv
from moestream.trace.read import read_trace
from trace_steps import META, cut_short, names_in, record, silent, three_steps
from typed import typed


def trace(*words: object) -> Any:
    return typed("trace", *words)


def refused(done: Any, code: int, why: str) -> None:
    assert done.returncode == code, done
    assert len(done.stderr.splitlines()) == 1
    assert why in done.stderr
    assert not done.stdout


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    record(tmp_path / "t.parquet", three_steps())
    return tmp_path / "t.parquet"


def test_the_tables(recorded: Path) -> None:
    whole = read_trace(recorded, silent)
    out = recorded.with_name("o.csv")
    assert export_csv(whole, out) == [out, recorded.with_name("o.experts.csv")]
    steps = whole.steps
    lines = out.read_text().splitlines()
    assert lines[0] == "step,tokens,seconds,bytes,major_faults,pread_s,advice_s"
    names = ("step", "tokens", "seconds", "bytes_read", "majflt", "stall_s", "memory_work_s")
    for number, line in enumerate(lines[1:]):
        assert [float(cell) for cell in line.split(",")] == [float(steps[name][number]) for name in names]
    assert recorded.with_name("o.experts.csv").read_text().split() == [
        "token,layer,expert",
        *("0,0,0", "0,0,1", "1,0,1", "1,0,2", "0,2,7", "0,2,0", "1,2,3", "1,2,3"),
        *("2,0,1", "2,0,0", "2,2,6", "2,2,7", "3,0,1", "3,0,0", "3,2,6", "3,2,7"),
    ]


def test_rows_of_a_prompt_are_its_last_tokens(recorded: Path) -> None:
    whole = read_trace(recorded, silent)
    whole.routes.tokens[1] = 5  # layer 2's two rows are those of tokens 3 and 4
    assert [row for row in expert_rows(whole) if row[1] == 2][:4] == [
        (3, 2, 7),
        (3, 2, 0),
        (4, 2, 3),
        (4, 2, 3),
    ]


def test_a_choice_nobody_saw_is_no_token_s(recorded: Path) -> None:
    whole = read_trace(recorded, silent)
    assert any(layer == 0 for _, layer, _ in expert_rows(whole))
    whole.meta["model"]["used"][0] = 1  # layer 0's routes hold more: it was read whole
    assert not any(layer == 0 for _, layer, _ in expert_rows(whole))


def test_exports_replace_exports_only(recorded: Path) -> None:
    whole = read_trace(recorded, silent)
    out = recorded.with_name("o.csv")
    assert export_csv(whole, out, experts=False) == [out]
    export_csv(whole, out)
    model = recorded.with_name("m.csv")
    model.write_bytes(b"GGUF")
    experts = recorded.with_name("n.experts.csv")
    experts.write_text("token,layer,experts\n")
    directory = recorded.with_name("d.csv")
    directory.mkdir()
    before = names_in(recorded.parent)
    cases = (
        (model, "not an exported"),
        (experts.with_name("n.csv"), "not an exported"),
        (directory, "not a file"),
    )
    for path, why in (
        *cases,
        (recorded.with_name("o.txt"), ".csv"),
        (recorded / "no" / "o.csv", "no directory"),
    ):
        with pytest.raises(UsageError, match=why):
            export_csv(whole, path)
    assert model.read_bytes() == b"GGUF"
    assert names_in(recorded.parent) == before
    with pytest.raises(RefusedError, match="cannot be written"):
        export_csv(whole, Path("/proc/o.csv"), experts=False)


def test_what_is_said_of_a_trace(recorded: Path) -> None:
    said = describe(read_trace(recorded, silent))
    assert (said["steps"], said["routes"], said["slab_events"]) == (3, 6, 3)
    assert said["prefill"]["steps"] == 1 and said["prefill"]["tokens"] == 2
    assert said["decode"]["hits"] == 202 + 302
    assert said["reads"]["demand"] == {"slabs": 1, "bytes": 64, "waited_s": 40e-9}
    assert said["reads"]["speculative"]["bytes"] == 64
    assert [step["step"] for step in said["first"]] == [0, 1, 2]
    assert said["last"] == []


def test_show(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = trace("show", recorded, "--json")
    assert done.returncode == 0 and not done.stderr
    assert json.loads(done.stdout) == describe(read_trace(recorded, silent))
    lines = trace("show", recorded).stdout.splitlines()
    assert any(META["mechanism"] in line for line in lines)
    assert any(line.split()[:3] == ["prefill", "1", "2"] for line in lines)
    assert max(map(len, lines)) <= 80


def test_export(recorded: Path) -> None:
    done = trace("export", recorded, "--csv", recorded.with_name("o.csv"), "-q")
    assert done.returncode == 0
    assert names_in(recorded.parent) == ["o.csv", "t.parquet"]
    refused(trace("export", recorded, "--csv", recorded), 2, "name a .csv file")


def test_recover(tmp_path: Path) -> None:
    cut_short(tmp_path / "t.parquet")
    done = trace("show", tmp_path / "t.parquet")
    assert done.returncode == 0
    assert "cut short: read its first 32 steps" in done.stderr
    done = trace("recover", tmp_path / "t.parquet")
    assert done.stdout == f"{tmp_path / 't.parquet'}: 32 steps recovered\n"
    refused(trace("recover", tmp_path / "t.parquet"), 3, "nothing to recover")
    refused(trace("recover", tmp_path / "u.parquet"), 3, "nothing to recover")


def test_an_empty_trace(tmp_path: Path) -> None:
    record(tmp_path / "t.parquet", [])
    done = trace("show", tmp_path / "t.parquet")
    assert done.returncode == 0 and "it holds no steps" in done.stdout
    refused(trace("export", tmp_path / "t.parquet", "--csv", tmp_path / "o.csv"), 3, "no steps")
    assert names_in(tmp_path) == ["t.parquet"]


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(64))
    for words in (("show",), ("export", "--csv", tmp_path / "o.csv")):
        refused(trace(*words, tmp_path / "m.gguf"), 3, "is not a trace")
        refused(trace(*words, tmp_path / "no.parquet"), 3, "there is no file")
