"""Records as they are read: what is completed, what is judged, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moestream.errors import RefusedError
from moestream.reports import read_results
from moestream.reports.records import BoxName, box_names
from report_records import BOX, OTHER_BOX, a_bench, failed, run, save


def test_an_old_record_gets_every_key(tmp_path: Path) -> None:
    old = run("stock")
    for name in ("schema", "threads", "oom_kills"):
        del old[name]
    record = read_results(save(tmp_path, [run(), old])).records[1]
    assert record["round"] == 0
    assert record["position"] == 1
    assert record["kind"] == "stock"
    assert record["valid"] is True
    assert record["box"] == BOX
    assert record["threads"] is None


def test_what_a_new_record_says_of_itself_stands(tmp_path: Path) -> None:
    record = run(valid=False, invalid=["the cap was lost"], round=2, position=5)
    found = read_results(save(tmp_path, [record])).records[0]
    assert (found["valid"], found["invalid"]) == (False, ["the cap was lost"])
    assert (found["round"], found["position"]) == (2, 5)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (failed(), "failed with code 4: the disk went away"),
        (run(oom_kills=1), "the kernel killed 1 process for memory"),
        (run(cached_bytes_before=1_500_000_000), "began with 1.50 GB of the model in the page cache"),
        (run(ms=[]), "decoded nothing"),
    ],
)
def test_a_record_without_a_judgement_is_judged(tmp_path: Path, record: dict[str, Any], why: str) -> None:
    found = read_results(save(tmp_path, [record])).records[0]
    assert found["invalid"] == [why]
    assert found["valid"] is False


def test_a_fallback_counts_against_what_was_asked_for_by_name_only(tmp_path: Path) -> None:
    records = [run("default"), run("arena+sync")]
    for record in records:
        record["document"]["mechanism"]["fallbacks"] = ["uring refused"]
    found = read_results(save(tmp_path, records)).records
    assert [record["valid"] for record in found] == [True, False]
    assert found[1]["invalid"] == ["not as asked: uring refused"]


def test_a_warm_file_is_no_fault_without_a_cap(tmp_path: Path) -> None:
    record = run("stock", cap=None, cached_bytes_before=3_000_000_000)
    assert read_results(save(tmp_path, [record])).records[0]["valid"] is True


def test_a_record_without_a_document_is_never_valid(tmp_path: Path) -> None:
    assert read_results(save(tmp_path, [failed(valid=True)])).records[0]["valid"] is False


def test_a_failed_run_is_of_its_neighbours_box(tmp_path: Path) -> None:
    found = read_results(save(tmp_path, [failed(), run(box=OTHER_BOX), failed()])).records
    assert [record["box"] for record in found] == [OTHER_BOX] * 3


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    results = read_results(save(tmp_path, [run()], tail='{"arm": "def'))
    assert len(results.records) == 1
    assert "killed while writing" in results.notes[0]


def test_a_whole_file_has_no_notes(tmp_path: Path) -> None:
    assert read_results(save(tmp_path, a_bench())).notes == ()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is no record"),
        (json.dumps(run(schema=2)), "line 2 is of schema 2, this version knows 1"),
        (json.dumps({"arm": "a", "asked": "stock"}), "it lacks prompt, document"),
        (json.dumps(run(document={"decode": {}})), "no decode.step_ms"),
        (json.dumps(run(document=[])), "document is [], no object"),
    ],
)
def test_what_is_no_record_is_refused_by_its_line(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(RefusedError) as refused:
        read_results(save(tmp_path, [run()], tail=line + "\n"))
    assert words in str(refused.value)
    assert "runs.jsonl" in str(refused.value)


@pytest.mark.parametrize("name", ["hits", "stall_s", "bytes_read"])
@pytest.mark.parametrize("value", [None, "7", True, -1])
def test_figures_that_are_no_numbers_are_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    record = run()
    record["document"]["decode"][name] = value
    with pytest.raises(RefusedError, match=f"no number for {name}"):
        read_results(save(tmp_path, [record]))


def test_directories_that_hold_nothing_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no such directory"):
        read_results(tmp_path / "nowhere")
    with pytest.raises(RefusedError, match="moestream bench"):
        read_results(tmp_path)
    with pytest.raises(RefusedError, match="no whole record"):
        read_results(save(tmp_path, []))


def test_boxes_differ_by_anything_that_a_speed_depends_on() -> None:
    assert BoxName.of(BOX) == BoxName.of({**BOX, "available_bytes": 5, "limit_bytes": 7})
    for name in ("cpus", "ram_bytes", "kernel", "fs", "device", "machine"):
        assert BoxName.of(BOX) != BoxName.of({**BOX, name: 3})
    assert str(BoxName.of(BOX)) == "2 CPUs (x86_64), 8.00 GB, Linux 6.1, ext4 on /dev/vda"
    assert "unknown memory" in str(BoxName.of({}))


ONE = {**BOX, "cpu_model": "Xeon 1", "machine_id": "0123456789ab"}
TWO = {**BOX, "cpu_model": "Xeon 1", "machine_id": "ba9876543210"}


def test_boxes_of_one_size_are_told_apart_by_machine_and_processor() -> None:
    assert BoxName.of(ONE) != BoxName.of(TWO)
    assert not BoxName.of(ONE).agrees(BoxName.of(TWO))
    assert not BoxName.of(ONE).agrees(BoxName.of({**ONE, "cpu_model": "Xeon 2"}))
    assert str(BoxName.of(ONE)) == (
        "2 CPUs (Xeon 1, x86_64), 8.00 GB, Linux 6.1, ext4 on /dev/vda, machine 012345"
    )


def test_old_records_are_compared_by_the_size_they_tell() -> None:
    old, other = BoxName.of(BOX), BoxName.of(OTHER_BOX)
    assert old.agrees(BoxName.of(ONE)) and BoxName.of(ONE).agrees(old)
    assert not other.agrees(BoxName.of(ONE))
    assert box_names([BOX, OTHER_BOX, ONE]) == [BoxName.of(ONE), other, BoxName.of(ONE)]
    # Of which of two it is nobody can say: it stays by itself.
    assert box_names([BOX, ONE, TWO]) == [old, BoxName.of(ONE), BoxName.of(TWO)]
