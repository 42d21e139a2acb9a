"""The block device under a file, from directories that stand for /sys, and the layout of extents."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moestream.probe.device import DeviceReads, find_device, layout, summarise_extents

STAT = "  8051  13  4096  100  7 8 9 10 0 11 12 0 0 0 0 2 3\n"


def device_tree(root: Path, number: str = "259:1", stat: str = STAT) -> Path:
    disk = root / "sys/devices/nvme0n1"
    part = disk / "nvme0n1p1"
    part.mkdir(parents=True)
    (part / "stat").write_text(stat)
    (disk / "queue").mkdir()
    (disk / "queue/rotational").write_text("0\n")
    (disk / "queue/max_sectors_kb").write_text("1280\n")
    (disk / "queue/scheduler").write_text("[none] mq-deadline\n")
    by_number = root / "sys/dev/block"
    by_number.mkdir(parents=True)
    (by_number / number).symlink_to(part)
    return part


def test_a_partition_has_its_own_account_and_its_disks_queue(tmp_path: Path) -> None:
    device_tree(tmp_path)
    device = find_device("/anything", tmp_path, "259:1")
    assert device is not None
    assert device.reads() == DeviceReads(8051, 4096 * 512)
    assert device.describe() == {
        "number": "259:1",
        "name": "nvme0n1p1",
        "rotational": 0,
        "max_sectors_kb": 1280,
        "scheduler": "[none] mq-deadline",
    }


@pytest.mark.parametrize("text", ["", "1 2\n", "a b c d\n"])
def test_statistics_that_are_none_are_none(tmp_path: Path, text: str) -> None:
    device_tree(tmp_path, stat=text)
    device = find_device("/anything", tmp_path, "259:1")
    assert device is not None
    assert device.reads() is None


def test_a_file_system_without_a_device_has_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert find_device(tmp_path / "file", tmp_path / "no-root") is None
    assert find_device("/anything", tmp_path, "0:42") is None


def test_extents_that_follow_each_other_on_the_device_are_one_run() -> None:
    mib = 1 << 20
    rows = [(0, 100 * mib, mib), (mib, 101 * mib, mib), (2 * mib, 50 * mib, 2 * mib)]
    assert summarise_extents(rows) == {"extents": 3, "runs": 2, "run_bytes": 2 * mib}


def test_a_hole_in_the_file_ends_a_run() -> None:
    assert summarise_extents([(0, 0, 10), (20, 10, 10)]) == {"extents": 2, "runs": 2, "run_bytes": 10}


def test_no_extents_are_no_layout() -> None:
    assert summarise_extents([]) is None


def test_the_layout_of_a_real_file_covers_it_or_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    found = layout(path)
    if found is None:
        pytest.skip("this file system does not tell where its files lie")
    assert found["run_bytes"] * found["runs"] >= 1 << 20
    assert found["extents"] >= found["runs"] >= 1
