"""A memory cgroup around a child process, so that a cap is the kernel's and not only ours.

Three ways, the first that works: a directory of the version 1 or the version 2 memory controller, or a scope
of the user's systemd. The new directory is made as high in the tree as no existing limit is left behind by
it: a service manager's own groups are then not given children it does not know, and version 2 allows none
beside processes."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from moestream.box.cgroup import Group, groups
from moestream.errors import MoestreamError, RefusedError

#: ``sh`` leaves this code when it cannot enter the group; the program is then not started.
_NOT_CAGED = 125
#: Of a group's name; the maker's process id and a random word follow.
_PREFIX = "moestream-"
_ENTER = f'echo $$ > "$0" || exit {_NOT_CAGED}; exec "$@"'
_REMOVAL_S = 10.0
_POLL_S = 0.01


class Cage:
    """Holds what is started by ``run`` and ``popen`` to ``limit_bytes`` of memory, file cache included, no
    swap.

    A context manager: leaving it kills what still runs inside (only what was started there can be) and
    removes the group. Figures are of all processes in the cage and stay readable until it is left. Raises
    RefusedError, with the reason, where no cage can be had.
    """

    def __init__(self, limit_bytes: int, root: str | Path = "/") -> None:
        self.limit_bytes = limit_bytes
        self._root = Path(root)
        self._group: Group | None = None
        self._systemd = False

    @classmethod
    def available(cls, root: str | Path = "/") -> tuple[bool, str]:
        """Whether a cage can be had here, tried with one that holds ``true``; and how, or why not."""
        try:
            with cls(1 << 30, root) as cage:
                code = cage.run(["true"], stderr=subprocess.DEVNULL).returncode
                return code == 0, cage.kind if code == 0 else f"{cage.kind}: a process could not enter it"
        except RefusedError as error:
            return False, str(error)

    @property
    def kind(self) -> str:
        """``cgroup v1``, ``cgroup v2`` or ``systemd-run``."""
        return "systemd-run" if self._group is None else f"cgroup v{self._group.version}"

    def __enter__(self) -> Cage:
        refusals = []
        for parent in _parents(self._root):
            group = Group(parent.version, parent.path / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
            try:
                _make(group, self.limit_bytes)
            except OSError as error:
                refusals.append(f"{parent.path}: {error.strerror}")
                continue
            self._group = group
            _remove_left_behind(parent.path)
            return self
        if _systemd_works():
            self._systemd = True
            return self
        reasons = "; ".join(refusals) or "no memory controller that can be written to"
        raise RefusedError(
            f"no memory cgroup can be made ({reasons}) and systemd-run --user --scope does not work"
        )

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        group, self._group = self._group, None
        if group is not None:
            _remove(group)

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv`` as it must be started to be inside."""
        if self._group is not None:
            return ["/bin/sh", "-c", _ENTER, str(self._group.path / "cgroup.procs"), *argv]
        if self._systemd:
            limits = ["-p", f"MemoryMax={self.limit_bytes}", "-p", "MemorySwapMax=0"]
            return ["systemd-run", "--user", "--scope", "--quiet", *limits, "--", *argv]
        raise MoestreamError("a cage is used inside its with block")

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """``subprocess.run`` inside the cage. A process the kernel killed for memory has returncode -9."""
        return subprocess.run(self.command(argv), **options)

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """``subprocess.Popen`` inside the cage."""
        return subprocess.Popen(self.command(argv), **options)

    def peak_bytes(self) -> int | None:
        """The most that was charged, page cache included; None when the kernel keeps no such figure."""
        return self._number("memory.max_usage_in_bytes", "memory.peak")

    def oom_kills(self) -> int | None:
        """Processes killed for memory in here; None when it is not known."""
        if self._group is None:
            return None
        name = "memory.oom_control" if self._group.version == 1 else "memory.events"
        return self._group.table(name).get("oom_kill")

    def stat(self) -> dict[str, int]:
        """``anon``, ``cache`` and ``mapped_file`` bytes charged now; {} when not known."""
        if self._group is None:
            return {}
        keys = ("total_rss", "total_cache", "total_mapped_file")
        if self._group.version == 2:
            keys = ("anon", "file", "file_mapped")
        table = self._group.table("memory.stat")
        return {
            name: table.get(key, 0) for name, key in zip(("anon", "cache", "mapped_file"), keys, strict=True)
        }

    def _number(self, v1: str, v2: str) -> int | None:
        return None if self._group is None else self._group.number(v1 if self._group.version == 1 else v2)


def _parents(root: Path) -> list[Group]:
    """Groups a cage can be made in, best first: version 1 before 2, higher ones first, none above a limit."""
    found: list[Group] = []
    for version in (1, 2):
        allowed: list[Group] = []
        for group in groups(root, "memory"):
            if group.version != version:
                continue
            allowed.insert(0, group)
            if group.memory_limits():
                break
        found += [group for group in allowed if _can_hold(group)]
    return found


def _can_hold(group: Group) -> bool:
    """May a child with a memory limit be made here? In version 2 only where the controller is handed down."""
    if not os.access(group.path, os.W_OK | os.X_OK):
        return False
    if group.version == 1:
        return (group.path / "memory.limit_in_bytes").exists()
    try:
        return "memory" in (group.path / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _make(group: Group, limit_bytes: int) -> None:
    """The directory with its limits, or OSError and no directory."""
    group.path.mkdir()
    try:
        if group.version == 1:
            (group.path / "memory.limit_in_bytes").write_text(str(limit_bytes))
            swap = group.path / "memory.memsw.limit_in_bytes"  # memory and swap together
            if swap.exists():
                swap.write_text(str(limit_bytes))
        else:
            (group.path / "memory.max").write_text(str(limit_bytes))
            swap = group.path / "memory.swap.max"
            if swap.exists():
                swap.write_text("0")
    except OSError:
        group.path.rmdir()
        raise


def _remove(group: Group) -> None:
    """Kill what is left inside, wait until it is gone, and remove the directory."""
    deadline = time.monotonic() + _REMOVAL_S
    while True:
        for pid in (group.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            group.path.rmdir()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise MoestreamError(f"{group.path}: {error.strerror}: remove it with rmdir") from None
        time.sleep(_POLL_S)


def _remove_left_behind(parent: Path) -> None:
    """Remove empty groups whose maker was killed. One that still holds a process cannot be removed, and stays."""
    for path in parent.glob(f"{_PREFIX}*"):
        maker = path.name.removeprefix(_PREFIX).partition("-")[0]
        if maker.isdigit() and not _lives(int(maker)):
            with contextlib.suppress(OSError):
                path.rmdir()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _systemd_works() -> bool:
    if shutil.which("systemd-run") is None:
        return False
    probe = ["systemd-run", "--user", "--scope", "--quiet", "-p", "MemoryMax=1G", "--", "true"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
