"""File systems by name: what follows for a model that lies on one, and what would be better. Nothing here opens a file:
whether direct reads work, and in which multiples, is tried (``disk.direct_io_alignment``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from moestream.box.cgroup import Mount


class Kind(str, Enum):
    """What a file system is to whoever reads a model from it."""

    DISK = "disk"
    MEMORY = "memory"
    PACKED = "packed image"
    TWO_CACHES = "a cache of its own"
    NETWORK = "network"
    HOST = "host's share"
    LAYER = "layer"
    DAEMON = "user space"


@dataclass(frozen=True)
class FileSystem:
    """``follows``: after "lies on NAME, "; ``advice``: what to do about it. Both are empty for a plain disk."""

    kind: Kind
    follows: str = ""
    advice: str = ""


_DISK = FileSystem(Kind.DISK)
_MEMORY = FileSystem(
    Kind.MEMORY,
    "which is memory: there is nothing to stream, and an arena would hold its experts twice",
    "mapped+fault uses it in place; to save memory, put it on a disk",
)
_PACKED = FileSystem(
    Kind.PACKED,
    "an image that is unpacked as it is read: each slab costs the processor and passes the page cache",
    "copy the model out of it, to ext4 or xfs",
)
_ZFS = FileSystem(
    Kind.TWO_CACHES,
    "which has a cache of its own (ARC), and what drops the page cache does not empty it: what is mapped is held "
    "twice, and what is measured cold may be warm",
    "use arena, and bound the cache (zfs_arc_max, or primarycache=metadata for the model's dataset)",
)
_NETWORK = FileSystem(
    Kind.NETWORK,
    "a network file system: every read waits for a round trip, and the rate is the network's",
    "copy the model to a disk of this machine; else prefer arena, whose reads are few and large",
)
_HOST = FileSystem(
    Kind.HOST,
    "a share of the host's files: every read crosses into the host, whose page cache keeps a copy too",
    "copy the model to a disk of this machine",
)
_WINDOWS = FileSystem(
    Kind.HOST,
    "a Windows drive seen from WSL, at a fraction of its disk's rate",
    "copy the model into Linux's own file system, below ~ (an ext4 in a vhdx)",
)
_ENCRYPTED = FileSystem(
    Kind.LAYER,
    "which decrypts each page on its way through the page cache",
    "if the model need not be secret, keep it on the file system below",
)
_UNION = FileSystem(
    Kind.LAYER,
    "which passes each read on to a file system below through a daemon, and may refuse to map files",
    "name the model by its path on the disk below",
)
_DAEMON = FileSystem(
    Kind.DAEMON,
    "a file system in user space: each read passes a daemon, which may refuse direct reads and mappings",
    "copy the model to ext4, xfs or btrfs",
)
_NTFS_DAEMON = FileSystem(
    Kind.DAEMON,
    "a disk read by a daemon in user space (ntfs-3g and its like)",
    "mount it by the kernel's driver (ntfs3, exfat), or copy the model to ext4",
)

_NAMES: dict[str, FileSystem] = {
    name: what
    for names, what in (
        ("ext2 ext3 ext4 xfs btrfs f2fs bcachefs jfs reiserfs nilfs2 gfs2 ocfs2", _DISK),
        ("overlay erofs lxfs wslfs vfat msdos exfat ntfs ntfs3 hfsplus iso9660 udf", _DISK),
        ("tmpfs ramfs devtmpfs hugetlbfs", _MEMORY),
        ("squashfs cramfs fuse.squashfuse fuse.squashfuse_ll fuse.archivemount fuse.fuse-archive", _PACKED),
        ("zfs fuse.zfs", _ZFS),
        ("nfs nfs4 cifs smb3 smbfs ceph afs lustre gpfs beegfs orangefs pvfs2 coda ncpfs", _NETWORK),
        ("fuse.sshfs fuse.s3fs fuse.rclone fuse.gcsfuse fuse.goofys fuse.mount-s3 fuse.davfs fuse.curlftpfs", _NETWORK),
        ("fuse.glusterfs fuse.ceph fuse.ceph-fuse fuse.cephfs fuse.juicefs fuse.JuiceFS fuse.moosefs", _NETWORK),
        ("fuse.blobfuse fuse.blobfuse2 fuse.gvfsd-fuse fuse.seaweedfs fuse.smbnetfs fuse.lizardfs", _NETWORK),
        ("9p virtiofs drvfs vboxsf prl_fs fuse.vmhgfs-fuse fuse.grpcfuse fakeowner osxfs", _HOST),
        ("ecryptfs fuse.encfs fuse.gocryptfs fuse.cryfs fuse.securefs fuse.veracrypt", _ENCRYPTED),
        ("aufs fuse.mergerfs fuse.unionfs fuse.unionfs-fuse fuse.mhddfs fuse.bindfs fuse.fuse-overlayfs", _UNION),
        ("fuse", _DAEMON),
        ("fuseblk", _NTFS_DAEMON),
    )
    for name in names.split()
}  # fmt: skip
#: By which Windows drives are mounted in WSL: version 1, and version 2 before and after virtiofs.
_DRIVES = ("drvfs", "9p", "virtiofs")


class MachineFacts(Protocol):
    """What is asked of a box."""

    def filesystem(self, path: str | Path) -> Mount | None:
        """The mount a file lies in."""
        ...

    def kernel(self) -> str:
        """The kernel's release, which in WSL names Microsoft."""
        ...


def known() -> dict[str, FileSystem]:
    """Every name that is known, as mountinfo writes it."""
    return dict(_NAMES)


def look_up(name: str, kernel: str = "") -> FileSystem | None:
    """The file system of a name, on a kernel of that release; None for one that is not known."""
    if name in _DRIVES and "microsoft" in kernel.lower():
        return _WINDOWS
    return _NAMES.get(name, _DAEMON if name.startswith("fuse.") else None)


def hindrance(name: str, kernel: str = "") -> str:
    """``NAME, what follows; advice``; '' where there is nothing to say."""
    found = look_up(name, kernel)
    return f"{name}, {found.follows}; {found.advice}" if found is not None and found.follows else ""


@dataclass(frozen=True)
class Place:
    """Where a model's files lie. ``in_memory``: the name of the file system in memory that holds all of them, or '';
    ``warnings``: a line for each file system that hinders."""

    in_memory: str = ""
    warnings: tuple[str, ...] = ()


def place_of(paths: Iterable[Path], box: MachineFacts) -> Place:
    """Where files lie, of which the first on each file system is named."""
    kernel = box.kernel()
    first: dict[str, Path] = {}
    for path in paths:
        mount = box.filesystem(path)
        first.setdefault(mount.kind if mount is not None else "", path)
    kinds = {look_up(name, kernel) for name in first}
    said = [(path, hindrance(name, kernel)) for name, path in first.items()]
    return Place(
        in_memory=next(iter(first)) if kinds == {_MEMORY} else "",
        warnings=tuple(f"{path} lies on {text}" for path, text in said if text),
    )
