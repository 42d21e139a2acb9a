"""Directories that stand for machines: their proc and their cgroups, of version 1 and 2."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712
MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {12 * GIB // 1024} kB\nSwapTotal: 0 kB\n"
ROOT_MOUNT = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def v2(root: Path, own: str = "/a/b", **files: object) -> Path:
    """A machine with version 2 at /sys/fs/cgroup. Files' names: ``a__b__memory_max`` is a/b/memory.max."""
    top = root / "sys/fs/cgroup"
    top.joinpath(*own.strip("/").split("/")).mkdir(parents=True, exist_ok=True)
    write(
        root,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": f"0::{own}\n",
            "proc/self/mountinfo": ROOT_MOUNT
            + "31 27 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n",
        },
    )
    for name, value in files.items():
        *directories, file = name.split("__")
        write(top, {"/".join([*directories, file.replace("_", ".", 1)]): value})
    return root


def v1(root: Path, own: str, mounted: str = "/") -> Path:
    """A machine with version 1 at /sys/fs/cgroup/memory, of which ``mounted`` is visible."""
    return write(
        root,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": f"5:cpu,cpuacct:/\n4:memory:{own}\n1:name=systemd:/\n0::/\n",
            "proc/self/mountinfo": ROOT_MOUNT
            + f"35 31 0:32 {mounted} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            + "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        },
    )
