"""A whole benchmark without a process: the mock executor's clock is exact, and so is all that follows from it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_records import ARMS, BOX, CAP, MS, PROMPTS, SLOW, Mock, Silent, setup
from moestream.errors import RefusedError, UsageError
from moestream.lab import validity
from moestream.lab.bench_arms import Arm
from moestream.lab.bench_doubts import Typed
from moestream.lab.bench_figures import bytes_per_token
from moestream.lab.bench_journal import drop_torn_line, open_journal, read_runs
from moestream.lab.bench_paths import without_paths
from moestream.lab.bench_session import Asked, conclude, make_runs
from moestream.lab.bench_summary import as_typed
from moestream.lab.bench_text import report, share
from moestream.lab.runs import run_arm
from moestream.lab.schedule import schedule


def asked(out: Path, **changes: Any) -> Asked:
    found = {
        "setup": setup(out),
        "arms": ARMS,
        "repeats": 4,
        "sentinel": "default",
        "cap_bytes": CAP,
        "ram": "1GiB",
        "command": "moestream bench m.gguf --ram 1GiB",
    }
    return Asked(**{**found, **changes})


def bench(
    out: Path, mock: Mock, resume: bool = False, show: Silent | None = None, **changes: Any
) -> dict[str, Any]:
    """Everything that ``moestream bench`` does after its arms are known; the summary."""
    what = asked(out, **changes)
    records = open_journal(out, what.document(BOX), resume=resume, force=False)
    slots = schedule(what.arms, list(PROMPTS), what.repeats, what.sentinel)
    return conclude(out, make_runs(what.setup, slots, records, show or Silent(), mock), None)


def arm(summary: dict[str, Any], key: str) -> dict[str, Any]:
    return next(found for found in summary["arms"] if found["key"] == key)


def kinds(summary: dict[str, Any]) -> list[str]:
    """The doubts, without that about a checkout with changes, which is the developer's."""
    return [doubt["kind"] for doubt in summary["doubts"] if doubt["kind"] != "modified code"]


def test_a_quiet_benchmark_is_exact_and_without_doubt(tmp_path: Path) -> None:
    mock = Mock()
    summary = bench(tmp_path / "out", mock)
    assert summary["valid_runs"] == summary["runs"] == 4 * 3 * 5
    for key, ms in MS.items():
        assert arm(summary, key)["tok_per_s"]["value"] == pytest.approx(1000 / ms)
        assert arm(summary, key)["p99_ms"] == pytest.approx(ms)
    assert arm(summary, "default")["against_stock"]["value"] == pytest.approx(10)
    assert arm(summary, "default")["against_stock"]["verdict"] == "faster"
    assert arm(summary, SLOW.key)["against_sentinel"]["verdict"] == "slower"
    assert "against_sentinel" not in arm(summary, "default")
    assert summary["best"] == "default"
    assert summary["noise_floor"] == pytest.approx(0.01)
    assert summary["session_drift"] == pytest.approx(0)
    assert summary["ceilings"]["compute_s"] == pytest.approx(0.05)
    # 10 MB a token at 1 GB/s take less than computing it does.
    assert arm(summary, "default")["floor_share"] == pytest.approx(0.5)
    assert arm(summary, "default")["hit_rate"] == 0.5
    assert arm(summary, "stock")["bytes_per_token"] == {"read": 20_000_000, "asked": None, "wasted": None}
    assert arm(summary, "stock")["read_source"] == "process"
    assert kinds(summary) == []
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary


def test_the_order_is_the_schedules_and_records_say_where_they_stand(tmp_path: Path) -> None:
    mock = Mock()
    bench(tmp_path / "out", mock, repeats=2)
    records = read_runs(tmp_path / "out/runs.jsonl")
    slots = schedule(ARMS, list(PROMPTS), 2, "default")
    assert mock.runs == [slot.arm.key for slot in slots]
    assert [(r["round"], r["position"], r["prompt"], r["again"]) for r in records] == [
        (s.round, s.position, s.prompt, s.again) for s in slots
    ]
    stock = next(record for record in records if record["arm"] == "stock")
    assert (stock["schema"], stock["kind"], stock["valid"], stock["invalid"]) == (1, "stock", True, [])
    assert stock["box"] == stock["document"]["box"]
    assert stock["experiment"] is None
    assert stock["seconds"] == pytest.approx(9.0)


def test_time_left_follows_the_clock(tmp_path: Path) -> None:
    show = Silent()
    bench(tmp_path / "out", Mock(), repeats=1, show=show, arms=(ARMS[2],))
    # One second to prepare, 17 tokens of 0.1 s.
    assert show.left[0] is None
    assert show.left[1:] == pytest.approx([2.7 * left for left in (5, 4, 3, 2, 1)])


def test_a_planted_slow_down_in_the_second_half_is_drift(tmp_path: Path) -> None:
    mock = Mock(lambda arm, number: MS[arm.key] * (1.0 if number < 30 else 1.25))
    summary = bench(tmp_path / "out", mock)
    assert kinds(summary) == ["drift"]
    assert "20 % slower" in summary["doubts"][0]["text"]
    # Rounds whose order turns round: what drifts does not change who is faster.
    assert arm(summary, "default")["against_stock"]["value"] == pytest.approx(10)


def test_an_arm_whose_advice_fails_does_not_count_and_is_given_up(tmp_path: Path) -> None:
    def einval(one: Arm, number: int, ending: dict[str, Any], made: dict[str, Any]) -> dict[str, Any] | None:
        if one is not SLOW:
            return made
        ending |= {"returncode": 4, "error": "m.gguf at byte 4096 (blk.0): MADV_WILLNEED: Invalid argument"}
        return None

    show, mock = Silent(), Mock(change=einval)
    summary = bench(tmp_path / "out", mock, show=show)
    slow = arm(summary, SLOW.key)
    assert (slow["runs"], slow["excluded"], slow["tok_per_s"]) == (0, 3, None)
    assert slow["against_stock"] is None
    assert mock.runs.count(SLOW.key) == 3
    assert show.notes == [f"{SLOW.key}: its first 3 runs failed, it is given up"]
    assert kinds(summary) == ["runs excluded"]
    doubt = summary["doubts"][0]
    assert "Invalid argument" in doubt["text"]
    assert doubt["next"] == f"moestream run m.gguf --ram 1GiB --mechanism {SLOW.key} --strict -p test -n 8"


def test_an_arm_that_the_box_refuses_fell_back_and_is_given_up(tmp_path: Path) -> None:
    def refused(one: Arm, number: int, ending: dict[str, Any], made: dict[str, Any]) -> dict[str, Any] | None:
        if one is not SLOW:
            return made
        ending |= {"returncode": 3, "error": "not as asked (--strict): mlock of 5 dense bytes is refused"}
        return None

    mock = Mock(change=refused)
    summary = bench(tmp_path / "out", mock)
    assert mock.runs.count(SLOW.key) == 3
    (doubt,) = (doubt for doubt in summary["doubts"] if doubt["kind"] == "runs excluded")
    assert doubt["text"] == f"3 runs of {SLOW.key} excluded, fell back: mlock of 5 dense bytes is refused"


def test_empty_output_is_no_output_that_is_equal(tmp_path: Path) -> None:
    def nothing(one: Arm, number: int, ending: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        return {**made, "tokens": [], "text": ""} if one is SLOW else made

    summary = bench(tmp_path / "out", Mock(change=nothing))
    assert arm(summary, SLOW.key)["runs"] == 0
    assert "empty output: no token came out" in summary["doubts"][0]["text"]


def test_an_arm_of_other_tokens_does_not_count(tmp_path: Path) -> None:
    def other(one: Arm, number: int, ending: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        return {**made, "tokens": [*made["tokens"][:-1], 7]} if one.key == "default" else made

    summary = bench(tmp_path / "out", Mock(change=other), arms=(SLOW, ARMS[2], ARMS[3]))
    assert arm(summary, "default")["runs"] == 0
    assert arm(summary, SLOW.key)["runs"] == 12
    assert summary["best"] is None
    assert "no noise floor" in kinds(summary)


class Killed(BaseException):
    pass


def test_a_benchmark_that_is_killed_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    def killed(one: Arm, number: int, ending: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        if number == 7:
            raise Killed
        return made

    whole = bench(tmp_path / "whole", Mock(), repeats=2)
    out = tmp_path / "out"
    with pytest.raises(Killed):
        bench(out, Mock(change=killed), repeats=2)
    assert len(read_runs(out / "runs.jsonl")) == 7
    mock = Mock()
    resumed = bench(out, mock, resume=True, repeats=2)
    assert len(mock.runs) == whole["runs"] - 7
    for name in ("arms", "runs", "valid_runs", "noise_floor", "best"):
        assert resumed[name] == whole[name]
    again = Mock()
    bench(out, again, resume=True, repeats=3)
    assert len(again.runs) == whole["runs"] // 2


@pytest.mark.parametrize("torn", ['{"arm": "sto', '{"arm": "stock"}', '{"arm": "sto\n'])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    out = tmp_path / "out"
    bench(out, Mock(), repeats=1)
    path = out / "runs.jsonl"
    whole = path.read_text()
    path.write_text(whole + torn)
    assert len(read_runs(path)) == 15
    drop_torn_line(path)
    assert path.read_text() == whole


def test_damage_before_the_last_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"arm": "a"}\n{"arm": \n{"arm": "b"}\n')
    with pytest.raises(RefusedError, match="line 2 is not JSON"):
        read_runs(path)
    path.write_text('{"schema": 2}\n')
    with pytest.raises(RefusedError, match="of schema 2, this version knows 1: read it with a newer"):
        read_runs(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sentinel": SLOW.key}, "sentinel"),
        ({"cap_bytes": 2 * CAP}, f"cap_bytes was {CAP}, is {2 * CAP}"),
        ({"arms": ARMS[:3]}, "arms"),
    ],
)
def test_another_setup_is_refused_and_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    bench(tmp_path / "out", Mock(), repeats=1)
    before = (tmp_path / "out/setup.json").read_text()
    with pytest.raises(RefusedError, match=says):
        bench(tmp_path / "out", Mock(), resume=True, repeats=1, **changes)
    assert (tmp_path / "out/setup.json").read_text() == before


def test_two_boxes_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bench(out, Mock(), repeats=1)
    document = asked(out, repeats=1).document({**BOX, "cpus": 64})
    with pytest.raises(RefusedError, match="two boxes cannot be put together"):
        open_journal(out, document, resume=True, force=False)
    records = read_runs(out / "runs.jsonl")
    elsewhere = [{**records[0], "box": {**BOX, "ram_bytes": 1}}]
    with pytest.raises(RefusedError, match="ram_bytes"):
        validity.check_one_box(records + elsewhere)
    # A cap, and what is free, are no other box.
    validity.check_one_box(
        [{**record, "box": {**record["box"], "available_bytes": n}} for n, record in enumerate(records)]
    )


def test_two_cannot_measure_into_one_directory(tmp_path: Path) -> None:
    """The second is told so before it touches anything."""
    out = tmp_path / "out"
    bench(out, Mock(), repeats=1)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    code = (
        "import sys\nfrom pathlib import Path\nfrom moestream.errors import UsageError\n"
        "from moestream.lab.bench_journal import open_journal\n"
        "try:\n    open_journal(Path(sys.argv[1]), {}, resume=False, force=True)\n"
        "except UsageError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, out], capture_output=True, text=True)
    assert run.stdout == f"--out {out}: another run is writing there: name another directory\n"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_an_existing_directory_needs_a_word(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bench(out, Mock(), repeats=1)
    document = asked(out, repeats=1).document(BOX)
    with pytest.raises(UsageError, match="--resume goes on with it, --force begins anew"):
        open_journal(out, document, resume=False, force=False)
    with pytest.raises(UsageError, match="one of the two"):
        open_journal(out, document, resume=True, force=True)
    (out / "notes.txt").write_text("mine")
    # Of a run that was killed: no record names it.
    (out / "default-one-9.0.parquet.partial").write_text("half")
    assert len(open_journal(out, document, resume=True, force=False)) == 15
    assert not (out / "default-one-9.0.parquet.partial").exists()
    assert open_journal(out, document, resume=False, force=True) == []
    assert sorted(path.name for path in out.iterdir()) == ["notes.txt", "setup.json"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    for words in ({"resume": False, "force": True}, {"resume": True, "force": False}):
        with pytest.raises(RefusedError, match="no benchmark's"):
            open_journal(other, document, **words)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_the_report_and_what_is_shared(tmp_path: Path) -> None:
    seeds = Arm("arena+pinned:/home/me/t.parquet", CAP, "arena+pinned:/home/me/t.parquet")
    mock = Mock(lambda arm, number: MS.get(arm.key, 80.0))
    summary = bench(tmp_path / "out", mock, arms=(*ARMS, seeds), ladder=True)
    text = report(summary)
    assert (tmp_path / "out/report.md").read_text() == text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == 2 * 5
    assert (
        "To use under this cap: --mechanism arena+pinned:/home/me/t.parquet (1.25 times `default`)." in text
    )
    assert "stock llama.cpp: 1.00 tok/s" in text
    (work,) = (line for line in rows[5:] if line.startswith("| `default = "))
    assert [cell.strip() for cell in work.split("|")][8] == "compute, 60%"
    shared = share(summary)
    assert "/home" not in shared
    assert str(tmp_path) not in shared
    assert "arena+pinned:t.parquet" in shared
    assert "next:" not in shared


@pytest.mark.parametrize(
    ("text", "without"),
    [
        (
            "`arena/fresh+uring:8+pinned:/a/b/t.parquet+anon` 3 MB/s: x",
            "`arena/fresh+uring:8+pinned:t.parquet+anon` 3 MB/s: x",
        ),
        ("pinned:my/t.parquet,arena/fresh+uring 2.1 tok/s", "pinned:t.parquet,arena/fresh+uring 2.1 tok/s"),
        (
            "failed: exit code 3: /home/me/m.gguf: is truncated (see '/tmp/x y' or ~/log/a)",
            "failed: exit code 3: m.gguf: is truncated (see 'x y' or a)",
        ),
        ("O_DIRECT is refused on ../far/m.gguf: 1/2 of it", "O_DIRECT is refused on m.gguf: 1/2 of it"),
        ("https://example.org/a/b and/or 3 / 4", "https://example.org/a/b and/or 3 / 4"),
    ],
)
def test_paths_are_taken_out_and_nothing_else(text: str, without: str) -> None:
    assert without_paths(text) == without


def test_neither_records_nor_what_is_shared_say_where_files_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path("/home/some body")
    monkeypatch.setattr(Path, "home", lambda: home)

    def telling(one: Arm, number: int, ending: dict[str, Any], made: dict[str, Any]) -> dict[str, Any] | None:
        if one is SLOW:
            ending |= {"returncode": 3, "error": "/somewhere/m.gguf: is truncated: download it again"}
            return None
        if one.key == "default":
            said = f"O_DIRECT is refused on /somewhere/m.gguf, see {home}/log and {tmp_path}/out/x: buffered reads"
            made["mechanism"]["fallbacks"] = [said]
        return made

    out = tmp_path / "out"
    summary = bench(out, Mock(change=telling))
    assert "exit code 3: m.gguf: is truncated" in report(summary)
    assert "O_DIRECT is refused on m.gguf, see log and x" in report(summary)
    texts = [share(summary), *(path.read_text() for path in out.iterdir())]
    assert len(texts) == 5
    for place in ("/somewhere", "some body", str(tmp_path)):
        assert not [text for text in texts if place in text]


def test_what_is_told_on_the_terminal_can_be_typed_there(tmp_path: Path) -> None:
    out = tmp_path / "my out"
    summary = bench(out, Mock(), repeats=2)
    (doubt,) = (doubt for doubt in summary["doubts"] if doubt["kind"] == "few repeats")
    assert doubt["next"] == "moestream bench m.gguf --ram 1GiB --out 'my out' --resume --repeats 4"
    typed = Typed(f"moestream bench /far/m.gguf --ram 1GiB --out '{out}'", "/far/m.gguf", "/far/m.gguf")
    told = report(as_typed(summary, read_runs(out / "runs.jsonl"), typed))
    assert f"next: {typed.again} --resume --repeats 4\n" in told
    assert str(tmp_path) not in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("accounts", "source", "read"),
    [
        # 5 MB a token by the account that moves; each of 16 steps makes one.
        ({"process": 80_000_000, "device": 99_000_000}, "process", 20_000_000),  # as the phase has it
        ({"process": 0, "cgroup": 80_000_000, "device": 160_000_000}, "cgroup", 5_000_000),
        ({"process": 0, "cgroup": 0, "device": 80_000_000}, "device", 5_000_000),
        ({"device": 80_000_000}, "device", 5_000_000),
        # Less than anybody may have read meanwhile tells nothing, and a mapped arm's own account neither.
        ({"process": 0, "device": 1 << 20}, None, None),
        ({}, None, None),
    ],
)
def test_where_the_processes_account_does_not_move_the_next_is_named(
    tmp_path: Path, accounts: dict[str, int], source: str | None, read: int | None
) -> None:
    def counted(one: Arm, number: int, ending: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        moves = bool(accounts.get("process"))
        made["load"] = {"read_bytes_os": 0}
        made["prefill"]["read_bytes_os"] = 0
        made["decode"]["read_bytes_os"] *= moves
        made["read_accounts"] = {"load": {}, "prefill": {}, "decode": accounts}
        return made

    record = run_arm(setup(tmp_path), SLOW, "one", executor=Mock(change=counted))
    assert record["valid"]
    assert record["read_source"] == source
    assert bytes_per_token(record) == read
    # One that reads past the page cache keeps an account of its own.
    engine = run_arm(setup(tmp_path), ARMS[2], "one", executor=Mock(change=counted))
    assert engine["read_source"] == (source or "engine")
    assert bytes_per_token(engine) == (read or 10_000_000)
    # What began warm may well have read nothing: others' reads are not its own.
    warm = run_arm(setup(tmp_path), replace(SLOW, warm=True), "one", executor=Mock(change=counted))
    assert warm["read_source"] == ("process" if source == "process" else None)


def test_what_was_written_is_told_and_much_of_it_doubted(tmp_path: Path) -> None:
    def writing(amount: int) -> Mock:
        def change(one: Arm, number: int, ending: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
            return {**made, "write_bytes_os": amount if one is SLOW else 0}

        return Mock(change=change)

    none = bench(tmp_path / "none", writing(0))
    assert "written to the disk" not in report(none)
    little = bench(tmp_path / "little", writing(64 << 20))
    assert kinds(little) == []
    assert (little["written_bytes"], arm(little, SLOW.key)["written_bytes_run"]) == (
        12 * (64 << 20),
        64 << 20,
    )
    assert "0.81 GB written to the disk by the runs' processes." in report(little)
    much = bench(tmp_path / "much", writing((64 << 20) + 1))
    assert kinds(much) == ["disk written"]
    assert SLOW.key in next(d["text"] for d in much["doubts"] if d["kind"] == "disk written")


def test_one_run_alone_is_judged_and_appended(tmp_path: Path) -> None:
    record = run_arm(setup(tmp_path), SLOW, "one", experiment="alone", executor=Mock())
    assert (record["experiment"], record["round"], record["valid"]) == ("alone", 0, True)
    assert read_runs(tmp_path / "runs.jsonl") == [record]


def test_a_report_says_how_runs_that_decode_for_long_end(tmp_path: Path) -> None:
    summary = bench(tmp_path / "out", Mock(), repeats=1)
    assert "ends with fewer" not in report(summary)
    summary["setup"]["limit_s"] = 15.0
    assert "; a run that decodes for 15 s ends with fewer, but never fewer than 11." in report(summary)
