"""``moestream bench`` as it is typed, with an executor that runs nothing: what is said at its start and its end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench_records import BOX, CAP, MS, Mock, setup
from moestream.box import Box, Cage
from moestream.cli import bench as command
from moestream.cli.main import main
from moestream.lab import bench_ask, bench_session
from moestream.lab.bench_ladder import INERT
from moestream.lab.bench_time import Pace
from moestream.mechanism import DEFAULT as CHOSEN

REASON = "no memory cgroup can be made and systemd-run does not work"


@pytest.fixture
def mock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A box without root and systemd, on which a model that is not there runs in no time."""
    mock = Mock(lambda arm, number: MS.get(arm.key, 500.0))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "locate", Path)
    monkeypatch.setattr(command, "read_model", lambda path: setup(tmp_path).model)
    monkeypatch.setattr(command, "check_architecture", lambda model: None)
    monkeypatch.setattr(command, "saved_probe", lambda model: None)
    monkeypatch.setattr(bench_ask, "check_context", lambda request: None)
    plan = SimpleNamespace(mechanism=CHOSEN, n_batch=64, expert_bytes=500)
    monkeypatch.setattr(bench_ask, "plan_of", lambda model, cap, ctx: plan)
    monkeypatch.setattr(bench_ask, "pace_of", lambda model, plan: Pace(1e9, 0.05, 500))
    monkeypatch.setattr(bench_ask, "fits_in_memory", lambda model, available: True)
    monkeypatch.setattr(bench_session, "Processes", lambda: mock)
    monkeypatch.setattr(Box, "describe", lambda box, path: dict(BOX))
    monkeypatch.setattr(Cage, "available", classmethod(lambda kind: (False, REASON)))
    return mock


def typed(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "far/m.gguf", "--ram", "1GiB", "--repeats", "3", *words])
    return int(ended.value.code or 0)


def test_without_a_cgroup_it_says_what_is_not_enforced_and_goes_on(
    mock: Mock, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my out"
    assert typed("--out", str(out)) == 0
    said, told = capfd.readouterr()[::-1]
    lines = said.splitlines()
    assert lines[0] == f"caps are the engine's own and not enforced: {REASON}"
    assert lines[1].startswith("stock: runs without a cap")
    assert lines[2].startswith(f"{INERT}: runs without a cap")
    assert lines[3].startswith("left out: mapped+willneed+none+none+mlock: only a memory cgroup caps it")
    assert set(mock.runs) == {"stock", INERT, "default", "resident"}
    summary = json.loads((out / "summary.json").read_text())
    assert {arm["key"]: arm["cap_bytes"] for arm in summary["arms"]} == {
        "stock": None,
        INERT: None,
        "default": CAP,
        "resident": None,
    }
    assert summary["valid_runs"] == summary["runs"] == 3 * 3 * 5
    assert summary["best"] == "default"
    assert "| `stock` (no cap)" in told
    assert f"NOT under the cap: `stock`, `{INERT}` had all memory" in told
    again = (
        "moestream bench far/m.gguf --ram 1GiB --mechanisms mapped+willneed+mlock,default -n 96 --repeats 3"
    )
    assert f"next: sudo -E env PATH=\"$PATH\" {again} --out '{out}' --force\n" in told
    assert str(tmp_path) not in (out / "report.md").read_text()


def test_without_a_cgroup_it_goes_on_with_what_there_is(mock: Mock, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert typed("--out", str(out)) == 0
    made = len(mock.runs)
    assert typed("--out", str(out), "--resume", "--repeats", "4") == 0
    assert len(mock.runs) == made // 3 * 4


def test_where_nothing_can_be_held_to_a_cap_there_is_no_benchmark(
    mock: Mock, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert typed("--mechanisms", "mapped+willneed", "--out", str(tmp_path / "out")) == 3
    (line,) = capfd.readouterr().err.splitlines()
    assert "no arm can run under a cap here" in line
    assert "run as root, or in a user session of systemd" in line
    assert not (tmp_path / "out").exists()
    assert mock.runs == []
