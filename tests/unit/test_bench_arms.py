"""Which arms are run for which words, the prompts of a file, what is shown meanwhile, and the machine's counters."""

from __future__ import annotations

import io
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_records import CAP, DEFAULT, SLOW, Mock, setup
from moestream.errors import MechanismError, RefusedError, UsageError
from moestream.lab.bench_arms import FEWEST_TOKENS, Arm, read_prompts
from moestream.lab.bench_ask import able_arms
from moestream.lab.bench_ladder import RUNGS, bench_arms, everything, sentinel_of
from moestream.lab.bench_progress import Lines, Live, display, duration
from moestream.lab.bench_watch import Snapshot, between, snapshot
from moestream.lab.runs import command, run_arm
from moestream.lab.schedule import Slot
from moestream.lab.statistics import warm_up
from moestream.mechanism import DEFAULT as CHOSEN
from moestream.mechanism import Mechanism
from moestream.members import POLICIES, PREDICTORS, QUEUE, WARMERS


def keys(which: str, **changes: Any) -> list[str]:
    return [arm.key for arm in made(which, **changes)]


def made(which: str, **changes: Any) -> list[Arm]:
    settings = {"chosen": CHOSEN, "fits": True, **changes}
    return bench_arms(which, CAP, **settings)


INERT = "mapped+fault+none+none+mapped"


def test_stock_the_inert_hook_and_the_ceiling_are_always_there() -> None:
    assert keys("mapped+willneed+mlock,default") == ["stock", INERT, SLOW.key, "default", "resident"]
    assert keys("arena", fits=False) == ["stock", INERT, "default"]
    # What is there anyhow is not run twice.
    assert keys("stock,arena,mapped+fault,default") == ["stock", INERT, "default", "resident"]


def test_what_the_engine_takes_by_itself_is_not_told_a_mechanism() -> None:
    default = next(arm for arm in made("default") if arm.key == "default")
    assert (default.mechanism, default.cap_bytes) == (None, CAP)
    resident = Mechanism.parse("resident")
    fitting = made("arena,default", chosen=resident)
    assert [arm.mechanism for arm in fitting] == ["stock", INERT, str(CHOSEN), None, str(resident)]


def test_arms_whose_experts_come_by_page_faults_are_known() -> None:
    faults = {
        arm.key for arm in made("mapped+fault+mlock,mapped/random+fault,mapped+willneed,arena") if arm.faults
    }
    assert faults == {"stock", INERT, "mapped+fault+none+none+mlock", "mapped/random+fault+none+none+mapped"}


def test_the_fewest_tokens_leave_eight_steps_without_the_warm_up() -> None:
    steps = FEWEST_TOKENS - 1
    assert steps - warm_up(steps) == 8
    assert steps - 1 - warm_up(steps - 1) < 8


@pytest.mark.parametrize(
    ("limit", "own", "fewest", "words"),
    [
        (None, None, 17, []),
        (None, 5, 5, []),
        (30.0, None, FEWEST_TOKENS, ["--seconds", "30.0", "--fewest", "11"]),
        (30.0, 5, 5, ["--seconds", "30.0", "--fewest", "5"]),
    ],
)
def test_a_time_limit_leaves_the_fewest_tokens(
    tmp_path: Path, limit: float | None, own: int | None, fewest: int, words: list[str]
) -> None:
    asked, arm = replace(setup(tmp_path), limit_s=limit), replace(DEFAULT, tokens=own)
    assert asked.tokens_of(arm) == (fewest, own or 17)
    typed = command(asked, arm, "text", tmp_path / "document.json")
    assert ("--seconds" in typed) == bool(words)
    if words:
        at = typed.index("--seconds")
        assert typed[at : at + 4] == words
    record = run_arm(asked, arm, "one", executor=Mock())
    assert (record["tokens"], record["most_tokens"], record["limit_s"]) == (fewest, own or 17, limit)
    assert record["valid"]


def test_the_ladder_pulls_one_lever_at_a_time_from_stock_to_the_default() -> None:
    arms = made("ladder")
    assert [arm.key for arm in arms[:2]] == ["stock", INERT]
    assert [arm.key for arm in arms[-2:]] == ["default", "resident"]
    assert all(arm.lever for arm in arms[1:-1])
    rungs = [Mechanism.parse(text) for _, text in RUNGS]
    if rungs[-1] != CHOSEN:
        rungs.append(CHOSEN)
    for before, after in itertools.pairwise(rungs):
        parts = ("variants", "reader", "policy", "predictor", "dense")
        changed = [part for part in parts if getattr(before, part) != getattr(after, part)]
        # The step into own memory is the one that cannot be one part alone.
        assert len(changed) == 1 or before.store != after.store


def test_all_has_each_member_that_needs_no_file() -> None:
    found = everything()
    assert len(found) == len(set(found))
    readers = {mechanism.reader.partition(":")[0] for mechanism in found}
    assert readers >= set(QUEUE) | set(WARMERS)
    assert {mechanism.policy.partition(":")[0] for mechanism in found} == set(POLICIES) - {"pinned"}
    assert {mechanism.predictor.partition(":")[0] for mechanism in found} == set(PREDICTORS) - {
        "ridge",
        "oracle",
    }
    assert len(keys("all")) >= len(found) + 1


@pytest.mark.parametrize(
    ("words", "error"), [("", UsageError), (" , ", UsageError), ("aren", MechanismError)]
)
def test_words_that_name_no_arm(words: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        made(words)


def test_the_sentinel_is_the_default_or_the_last_that_is_quick() -> None:
    assert sentinel_of(made("ladder")) == "default"
    assert sentinel_of(made("arena+lru,arena+fifo")) == "arena+uring:8+fifo+none+anon"
    assert sentinel_of(made("mapped+fault+mlock", fits=False)) == "mapped+fault+none+none+mlock"


def test_without_a_cgroup_what_the_kernel_keeps_is_left_out_by_name() -> None:
    able, left_out = able_arms(made("mapped+willneed+mlock,default"), False, "no cgroup")
    assert [arm.key for arm in able] == ["default", "resident"]
    assert left_out[0] == "stock: only a memory cgroup caps it, no cgroup"
    assert len(left_out) == 3


def test_prompts_of_a_file(tmp_path: Path) -> None:
    plain, named = tmp_path / "p.txt", tmp_path / "p.json"
    plain.write_text("First\n\nof two parts.\n---\nSecond\n--- \nThird --- no end\n")
    assert read_prompts(plain) == {"1": "First\n\nof two parts.", "2": "Second", "3": "Third --- no end"}
    named.write_text('{"a": "x", "b-2": "y", "c": "z"}')
    assert read_prompts(named) == {"a": "x", "b-2": "y", "c": "z"}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.txt", b"one\n---\ntwo", "2 prompts, at least 3"),
        ("p.txt", b"", "0 prompts"),
        ("p.txt", b"\xff\xfe\x00", "no UTF-8"),
        ("p.txt", b"a\n---\nb\0\n---\nc", "zero byte"),
        ("p.json", b"{", "not JSON"),
        ("p.json", b"[" * 5000, "nested too deeply"),
        ("p.json", b'{"a": "\\ud800", "b": "x", "c": "y"}', "half a character"),
        ("p.json", b'["a", "b", "c"]', "one object of names and texts"),
        ("p.json", b'{"a": 1, "b": "x", "c": "y"}', "one object of names and texts"),
        ("p.json", b'{"../a": "x", "b": "x", "c": "y"}', "names a file later"),
        ("p.json", b'{"a": " ", "b": "x", "c": "y"}', "is empty"),
    ],
)
def test_files_that_are_no_prompts(tmp_path: Path, name: str, text: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(text)
    with pytest.raises(RefusedError, match=says):
        read_prompts(path)
    with pytest.raises(RefusedError, match="there is no file"):
        read_prompts(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedError, match="is not a regular file"):
        read_prompts(tmp_path / "pipe")


def test_elsewhere_than_on_a_terminal_a_line_says_what_begins_and_how_it_ended(tmp_path: Path) -> None:
    out = io.StringIO()
    slot = Slot(1, 4, "one", DEFAULT, again=True)
    with display(out) as show:
        assert isinstance(show, Lines)
        show.begin(slot, 2, 9, 3700.0)
        show.end(slot, run_arm(setup(tmp_path), DEFAULT, "one", executor=Mock()))
    assert out.getvalue().splitlines() == [
        "[2/9] round 2, one, default again: begins, about 1 h 02 min left",
        "[2/9] round 2, one, default again: 10.00 tok/s (2 s)",
    ]


def test_on_a_terminal_the_line_stays_and_excluded_runs_say_why(tmp_path: Path) -> None:
    from rich.console import Console
    from rich.progress import Progress

    out = io.StringIO()
    with Progress(console=Console(file=out, width=200), auto_refresh=False) as progress:
        show = Live(progress)
        slot = Slot(0, 0, "one", Arm("a[b]", CAP, SLOW.mechanism))
        show.begin(slot, 3, 9, 42.0)
        assert progress.tasks[0].completed == 2
        assert progress.tasks[0].fields["left"] == "about 42 s left"
        show.end(slot, {"valid": False, "invalid": ["swapped: much"]})
        assert progress.tasks[0].completed == 3
    assert "round 1, one, a[b]: EXCLUDED, swapped: much" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (89, "89 s"), (90, "2 min"), (3570, "1 h 00 min"), (7300, "2 h 02 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def tree(root: Path, **files: str) -> Path:
    """A machine's ``proc`` and ``sys``; in a name ``__`` stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_a_machines_counters(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        proc__stat="cpu 100 10 40 900 50 5 5 20 0 0\ncpu0 50 0 0 0\ncpu1 50 0 0 0\nintr 5",
        proc__vmstat="nr_free_pages 7\npswpin 3\npswpout 4",
    )
    for zone, used in (("intel-rapl:0", "5000000"), ("intel-rapl:0:0", "99"), ("intel-rapl:1", "7")):
        tree(root / "sys/class/powercap" / zone, energy_uj=used, max_energy_range_uj="1000")
    tree(root / "sys/dev/block/254:0", stat=" 10 0 2048 7 0 0 0 0 0 0 0")
    tree(root / "sys/devices/system/cpu/cpu0/thermal_throttle", core_throttle_count="4")
    tree(
        root / "sys/devices/system/cpu/cpu1/thermal_throttle",
        core_throttle_count="5",
        package_throttle_count="1",
    )
    found = snapshot("254:0", root)
    assert (found.cpus, found.busy_s, found.stolen_s) == pytest.approx((2, 1.6, 0.2))
    assert found.swapped_bytes == 7 * 4096
    assert found.throttled == 10
    assert found.device_read_bytes == 1 << 20
    assert found.energy_uj == ((5000000, 1000), (7, 1000))


def test_a_machine_that_counts_nothing(tmp_path: Path) -> None:
    before, after = snapshot("1:2", tmp_path), snapshot("", tmp_path)
    assert between(before, after) == dict.fromkeys(
        ("swapped_bytes", "throttled", "device_read_bytes", "other_cpu_share", "stolen_share", "energy_j")
    )


def test_what_happened_between_two_moments() -> None:
    before = Snapshot(10.0, 2, 100.0, 5.0, 7.0, 4096, 3, 1000, ((900, 1000), (50, 1000)))
    after = Snapshot(20.0, 2, 112.0, 6.0, 17.0, 8192, 3, 5000, ((100, 1000), (80, 1000)))
    assert between(before, after) == {
        "swapped_bytes": 4096,
        "throttled": 0,
        "device_read_bytes": 4000,
        "other_cpu_share": 0.1,  # 12 s busy, 10 of them ours, of 20
        "stolen_share": 0.05,
        "energy_j": pytest.approx(230e-6),  # the first counter wrapped at 1000
    }
