"""File systems that a model may lie on, mounted for one child process and gone with it, however it ends."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fuse_file
import ground_child
from moestream.model import read_model


@dataclass(frozen=True)
class Ground:
    """``mount``: a shell's words that put the model $FILE below $AT as m.gguf, with $SPARE for images and $DISK
    for what is to lie on the tests' disk; '' for a file system in user space, which behaves as ``how`` says."""

    name: str
    mount: str = ""
    tools: tuple[str, ...] = ("mount",)
    how: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def _image(size: str, make: str, options: str = "loop") -> str:
    return f"truncate -s {size} $SPARE/image; {make} $SPARE/image; mount -o {options} $SPARE/image $AT; "


_COPY = "cp $FILE $AT/m.gguf; sync $AT/m.gguf"
_PACK = "mkdir $SPARE/tree; cp $FILE $SPARE/tree/m.gguf; "

EXT4_4K = Ground(
    "ext4 of 4096-byte sectors",
    "truncate -s 64M $SPARE/image; mkfs.ext4 -q -b 4096 $SPARE/image; "
    "LOOP=$(losetup -b 4096 -f --show $SPARE/image); mount $LOOP $AT || { losetup -d $LOOP; false; }; "
    f"losetup -d $LOOP; {_COPY}",
    ("mkfs.ext4", "losetup"),
)
EXT4_READ_ONLY = Ground(
    "ext4, read-only",
    _image("96M", "mkfs.ext4 -q") + f"{_COPY}; mount -o remount,ro $AT",
    ("mkfs.ext4",),
)
RAMFS = Ground("ramfs", f"mount -t ramfs none $AT; {_COPY}")
TMPFS = Ground("tmpfs", f"mount -t tmpfs none $AT; {_COPY}")
OVERLAY = Ground(
    "overlay",
    "mkdir $DISK/tree $DISK/upper $DISK/work; cp $FILE $DISK/tree/m.gguf; "
    "mount -t overlay -o lowerdir=$DISK/tree,upperdir=$DISK/upper,workdir=$DISK/work none $AT",
)
SQUASHFS = Ground(
    "squashfs",
    f"{_PACK} mksquashfs $SPARE/tree $SPARE/image -quiet -no-progress; mount -o loop $SPARE/image $AT",
    ("mksquashfs",),
)
EROFS = Ground(
    "erofs",
    f"{_PACK} mkfs.erofs --quiet $SPARE/image $SPARE/tree; mount -t erofs -o loop $SPARE/image $AT",
    ("mkfs.erofs",),
)
BTRFS = Ground("btrfs", _image("512M", "mkfs.btrfs -q") + _COPY, ("mkfs.btrfs",))
BTRFS_PACKED = Ground(
    "btrfs, compressed",
    _image("512M", "mkfs.btrfs -q", "loop,compress-force=zstd") + _COPY,
    ("mkfs.btrfs",),
)
XFS = Ground("xfs", _image("512M", "mkfs.xfs -q -m reflink=1") + _COPY, ("mkfs.xfs",))
FUSE = Ground("FUSE", how={"kind": "fuse.test"})
FUSE_UNMAPPABLE = Ground("FUSE that shares no mapping", how={"kind": "fuse.sshfs", "direct_io": True})
FUSE_BAD_ADDRESS = Ground("FUSE without direct reads", how={"kind": "fuse.mergerfs", "no_direct": 14})
GROUNDS = (
    EXT4_4K, EXT4_READ_ONLY, RAMFS, TMPFS, OVERLAY, SQUASHFS, EROFS, BTRFS, BTRFS_PACKED, XFS,
    FUSE, FUSE_UNMAPPABLE, FUSE_BAD_ADDRESS,
)  # fmt: skip


def expert_bytes(path: Path) -> tuple[int, int]:
    """From the first byte of an expert to the last."""
    tensors = [tensor for bank in read_model(path).banks for tensor in bank.tensors]
    return min(t.offset for t in tensors), max(t.offset + t.count * t.slab_bytes for t in tensors)


@dataclass(frozen=True)
class Visit:
    """What is done on one ground: ``mechanisms`` to answer with, ``commands`` of ours (MODEL stands for the model).
    ``cancelled``: mechanisms with which a long step is stopped, on a file system in user space that keeps a ``tally``.
    ``cache_there``: the user's cache directory lies on it too; ``look``: as the probe sees the file."""

    ground: Ground
    mechanisms: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    cache_there: bool = False
    look: bool = False
    cancelled: tuple[str, ...] = ()


def visit_all(visits: Sequence[Visit], model: Path, work: Path) -> list[dict[str, Any] | str]:
    """What one child makes of the visits, each with a copy of ``model`` (see ``ground_child``); for those that cannot
    be made here the reason. ``work``: an empty directory; the n-th model is ``work/N/at/m.gguf``."""
    found: list[dict[str, Any] | str] = [_lacks(visit.ground) for visit in visits]
    wanted = [number for number, reason in enumerate(found) if not reason]
    images = work / "images"
    images.mkdir()
    # In memory: a busy disk would be waited for at each sync.
    tasks, script = [], f"FILE={shlex.quote(str(model))}; mount -t tmpfs none {shlex.quote(str(images))}; "
    command = [sys.executable, ground_child.__file__]
    for number in wanted:
        visit, at, disk = visits[number], work / str(number) / "at", work / str(number) / "disk"
        at.mkdir(parents=True)
        disk.mkdir()
        (disk / "m.gguf").symlink_to(model)
        spare = images / str(number)
        tasks.append(
            {
                "model": str(at / "m.gguf"),
                "failed": str(disk / "failed"),
                "mechanisms": visit.mechanisms,
                "commands": visit.commands,
                "cancelled": visit.cancelled,
                "tally": visit.ground.how.get("tally"),
                "look": visit.look,
                "cache": str((at if visit.cache_there else disk) / "cache"),
            }
        )
        if visit.ground.mount:
            script += (
                f"AT={shlex.quote(str(at))}; DISK={shlex.quote(str(disk))}; SPARE={shlex.quote(str(spare))}; "
                f"( set -e; mkdir $SPARE; {visit.ground.mount} ) >$DISK/said 2>&1 || mv $DISK/said $DISK/failed; "
            )
        else:
            how = json.dumps(visit.ground.how)
            command = [sys.executable, fuse_file.__file__, str(disk / "m.gguf"), str(at), how, *command]
    for number, result in zip(wanted, _alone(script, command, tasks), strict=True):
        found[number] = result
    return found


def _lacks(ground: Ground) -> str:
    missing = [tool for tool in ("unshare", *ground.tools) if shutil.which(tool) is None]
    if missing:
        return f"no {missing[0]} on this box"
    return "" if ground.mount or Path("/dev/fuse").exists() else "no /dev/fuse on this box"


def _alone(script: str, command: list[str], tasks: list[dict[str, Any]]) -> list[dict[str, Any] | str]:
    """The child's results, in mount and process namespaces of its own: what it mounts and starts ends with it."""
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words = [*alone, "sh", "-c", script + 'exec "$@"', "sh", *command, json.dumps(tasks)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if not done.stdout and done.returncode == 1 and done.stderr.startswith("unshare:"):
        return [f"no mounts of our own can be had: {done.stderr.strip()}"] * len(tasks)
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any] | str] = json.loads(done.stdout.splitlines()[-1])
    return results
