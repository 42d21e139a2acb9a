"""Where a cage is made and with which files, in directories that stand for machines; what it does is tested with a real
one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from box_trees import GIB, V1_UNLIMITED, v1, v2, write
from moestream.box import Cage
from moestream.errors import RefusedError


def _children(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob("moestream-*")]


def _no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moestream.box.cage._systemd_works", lambda: False)


def test_no_cage_without_a_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_systemd(monkeypatch)
    with pytest.raises(RefusedError, match="no memory controller"), Cage(GIB, v2(tmp_path)):
        pass
    available, reason = Cage.available(tmp_path)
    assert not available
    assert "systemd-run" in reason


@pytest.mark.parametrize(
    ("limits", "place"),
    [
        ({}, "sys/fs/cgroup"),
        ({"a__memory_max": 8 * GIB}, "sys/fs/cgroup/a"),
        ({"a__b__memory_high": 8 * GIB}, "sys/fs/cgroup/a/b"),
    ],
)
def test_a_v2_cage_leaves_no_limit_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], place: str
) -> None:
    handed_down = {f"{where}cgroup_subtree_control": "cpu memory\n" for where in ("", "a__", "a__b__")}
    root = v2(tmp_path, **handed_down, **limits)
    monkeypatch.setattr("moestream.box.cage._remove", lambda group: None)
    with Cage(GIB, root) as cage:
        assert cage.kind == "cgroup v2"
        (child,) = _children(root)
        assert child.rpartition("/")[0] == place
        assert (root / child / "memory.max").read_text() == str(GIB)
        assert cage.command(["true"])[-2:] == [str(root / child / "cgroup.procs"), "true"]
        write(
            root / child,
            {
                "memory.peak": 12345,
                "memory.events": "low 0\noom 2\noom_kill 1\n",
                "memory.stat": "anon 10\nfile 20\nfile_mapped 5\n",
            },
        )
        assert (cage.peak_bytes(), cage.oom_kills()) == (12345, 1)
        assert cage.stat() == {"anon": 10, "cache": 20, "mapped_file": 5}


def test_a_v2_group_that_hands_nothing_down_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_systemd(monkeypatch)
    root = v2(tmp_path, cgroup_subtree_control="cpu\n", a__cgroup_subtree_control="memory\n")
    monkeypatch.setattr("moestream.box.cage._remove", lambda group: None)
    with Cage(GIB, root):
        assert _children(root)[0].startswith("sys/fs/cgroup/a/moestream-")


@pytest.mark.parametrize(
    ("limits", "place"),
    [
        ({}, ""),
        ({"job/memory.limit_in_bytes": 8 * GIB}, "job/"),
        ({"job/memory.limit_in_bytes": 8 * GIB, "job/step/memory.limit_in_bytes": 4 * GIB}, "job/step/"),
    ],
)
def test_a_v1_cage_leaves_no_limit_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], place: str
) -> None:
    top = "sys/fs/cgroup/memory"
    root = v1(tmp_path, "/job/step")
    unlimited = {f"{where}memory.limit_in_bytes": V1_UNLIMITED for where in ("", "job/", "job/step/")}
    write(root / top, {**unlimited, **limits})
    _kernel_makes(monkeypatch, "memory.memsw.limit_in_bytes")
    monkeypatch.setattr("moestream.box.cage._remove", lambda group: None)
    with Cage(GIB, root) as cage:
        assert cage.kind == "cgroup v1"
        (child,) = _children(root)
        assert child.rpartition("moestream-")[0] == f"{top}/{place}"
        assert (root / child / "memory.limit_in_bytes").read_text() == str(GIB)
        assert (root / child / "memory.memsw.limit_in_bytes").read_text() == str(GIB)
        assert cage.command(["true"])[-2:] == [str(root / child / "cgroup.procs"), "true"]
        write(
            root / child,
            {
                "memory.max_usage_in_bytes": 12345,
                "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
                "memory.stat": "rss 1\ntotal_rss 10\ntotal_cache 20\ntotal_mapped_file 5\n",
            },
        )
        assert (cage.peak_bytes(), cage.oom_kills()) == (12345, 1)
        assert cage.stat() == {"anon": 10, "cache": 20, "mapped_file": 5}


def test_a_v1_cage_whose_limit_is_refused_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_systemd(monkeypatch)
    root = v1(tmp_path, "/")
    write(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED})
    write_text = Path.write_text

    def refuse(path: Path, text: str) -> int:
        if "moestream-" in str(path):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return write_text(path, text)

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(RefusedError, match="memory: Device or resource busy"), Cage(GIB, root):
        pass
    assert _children(root) == []


def _kernel_makes(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """A cage's new directory has this file, as a kernel with the feature would make it."""
    mkdir = Path.mkdir

    def make(path: Path, *words: int, **options: bool) -> None:
        mkdir(path, *words, **options)
        if path.name.startswith("moestream-"):
            (path / file).write_text("")

    monkeypatch.setattr(Path, "mkdir", make)


def test_systemd_is_the_last_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moestream.box.cage._systemd_works", lambda: True)
    with Cage(12345, v2(tmp_path)) as cage:
        assert cage.kind == "systemd-run"
        command = cage.command(["prog", "-x"])
        assert command[:3] == ["systemd-run", "--user", "--scope"]
        assert "MemoryMax=12345" in command
        assert command[-2:] == ["prog", "-x"]
        assert (cage.peak_bytes(), cage.oom_kills(), cage.stat()) == (None, None, {})
