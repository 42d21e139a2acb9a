"""File systems by name: what is said of a model that lies on each, on boxes that stand for machines with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from box_trees import GIB, ROOT_MOUNT, write
from ggufs import moe_tensors, write_gguf
from moestream.box import Box, Limit, hindrance, place_of
from moestream.box.filesystems import Kind, known, look_up
from moestream.mechanism import Mechanism
from moestream.model import Model, read_model
from moestream.plan import IN_PLACE, ContextSizes, Plan, make_plan
from moestream.probe.run import doubts
from probe_documents import document

PAGE = Path(__file__).parents[2] / "docs/filesystems.md"
WSL = "5.15.167.4-microsoft-standard-WSL2"
MODEL = Path("/models/m.gguf")


def machine(root: Path, name: str, kernel: str = "6.1.0") -> Box:
    """A machine that has a file system of that name at /models."""
    mounts = f"{ROOT_MOUNT}28 27 0:50 / /models rw,relatime - {name} somewhere rw\n"
    return Box(write(root, {"proc/self/mountinfo": mounts, "proc/sys/kernel/osrelease": f"{kernel}\n"}))


@pytest.mark.parametrize("name", sorted(known()))
def test_each_name_is_said_with_its_remedy_or_not_at_all(name: str, tmp_path: Path) -> None:
    place = place_of([MODEL], machine(tmp_path, name))
    found = known()[name]
    if found.kind is Kind.DISK:
        assert place.warnings == ()
    else:
        assert place.warnings == (f"{MODEL} lies on {name}, {found.follows}; {found.advice}",)
        assert found.follows and found.advice
    assert place.in_memory == (name if found.kind is Kind.MEMORY else "")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tmpfs", Kind.MEMORY),
        ("squashfs", Kind.PACKED),
        ("zfs", Kind.TWO_CACHES),
        ("nfs4", Kind.NETWORK),
        ("cifs", Kind.NETWORK),
        ("ceph", Kind.NETWORK),
        ("fuse.sshfs", Kind.NETWORK),
        ("fuse.s3fs", Kind.NETWORK),
        ("9p", Kind.HOST),
        ("virtiofs", Kind.HOST),
        ("ecryptfs", Kind.LAYER),
        ("fuse.mergerfs", Kind.LAYER),
        ("fuseblk", Kind.DAEMON),
        ("fuse.of-somebodys-own", Kind.DAEMON),
        ("btrfs", Kind.DISK),
        ("overlay", Kind.DISK),
    ],
)
def test_of_what_kind_a_name_is(name: str, kind: Kind) -> None:
    found = look_up(name)
    assert found is not None
    assert found.kind is kind


def test_an_unknown_name_is_not_judged(tmp_path: Path) -> None:
    assert look_up("newfs") is None
    assert hindrance("newfs") == hindrance("") == ""
    assert place_of([MODEL], machine(tmp_path, "newfs")).warnings == ()
    assert place_of([MODEL], Box(tmp_path / "without proc")).warnings == ()


@pytest.mark.parametrize("name", ["9p", "drvfs", "virtiofs"])
def test_a_windows_drive_in_wsl_is_named(name: str, tmp_path: Path) -> None:
    (line,) = place_of([MODEL], machine(tmp_path / "wsl", name, WSL)).warnings
    assert "a Windows drive seen from WSL" in line
    assert "ext4 in a vhdx" in line
    (line,) = place_of([MODEL], machine(tmp_path / "other", name)).warnings
    assert "Windows" not in line
    assert place_of([MODEL], machine(tmp_path / "own", "ext4", WSL)).warnings == ()


def test_each_file_system_of_a_split_model_is_said_once(tmp_path: Path) -> None:
    mounts = ROOT_MOUNT + "".join(
        f"{30 + n} 27 0:{50 + n} / /{name} rw - {name} x rw\n" for n, name in enumerate(("nfs4", "tmpfs"))
    )
    box = Box(write(tmp_path, {"proc/self/mountinfo": mounts}))
    paths = [Path(f"/{name}/m-{n}.gguf") for n in range(3) for name in ("nfs4", "tmpfs")]
    place = place_of(paths, box)
    assert [line.split(",")[0] for line in place.warnings] == [
        "/nfs4/m-0.gguf lies on nfs4",
        "/tmpfs/m-0.gguf lies on tmpfs",
    ]
    assert place.in_memory == "", "only a part of it is"
    assert place_of([paths[1]], box).in_memory == "tmpfs"


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return read_model(write_gguf(tmp_path / "m.gguf", moe_tensors()))


class Roomy:
    def room(self) -> Limit:
        return Limit(64 * GIB, "MemAvailable")


def planned(model: Model, root: Path, name: str, mechanism: str | None = None) -> Plan:
    sizes = ContextSizes(kv_bytes=10 << 20, compute_bytes=4 << 20, output_bytes=1 << 20)
    asked = Mechanism.parse(mechanism) if mechanism is not None else None
    place = place_of([MODEL], machine(root, name))
    return make_plan(model, Roomy(), 4 * GIB, asked, sizes, place=place)


def test_a_plan_carries_the_warning_and_leaves_memory_where_it_is(model: Model, tmp_path: Path) -> None:
    plan = planned(model, tmp_path / "nfs", "nfs4")
    assert plan.warnings[0] == f"{MODEL} lies on {hindrance('nfs4')}"
    assert plan.mechanism == Mechanism.parse("resident")
    plan = planned(model, tmp_path / "tmpfs", "tmpfs")
    assert plan.mechanism == IN_PLACE
    assert f"mechanism {IN_PLACE}: the model lies on tmpfs, which is memory" in plan.reasons
    assert planned(model, tmp_path / "asked", "tmpfs", "arena").mechanism == Mechanism.parse("arena")
    assert planned(model, tmp_path / "disk", "xfs").warnings == ()


def test_a_probe_doubts_what_it_measured_there() -> None:
    made = document()
    made["box"] |= {"fs": "zfs"}
    assert doubts(made) == [f"the file lies on {hindrance('zfs')}"]
    made["box"] |= {"fs": "9p", "kernel": WSL}
    assert "a Windows drive seen from WSL" in doubts(made)[0]


def test_the_page_names_each_of_them() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    named = set(re.findall(r"`([^`]+)`", " ".join(row.split("|")[1] for row in rows)))
    assert set(known()) <= named
