"""Which account says what a run read from its device: that of the process, and where it never moves the next best.

Accounts are looked at where phases end and not at each step: those of a cgroup and of a device cost files to open.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moestream.box import process_io
from moestream.box.accounts import ReadAccounts
from moestream.lab import bench_figures as figures

#: The kernel's accounts, the one first that counts nobody else's reads.
ACCOUNTS = ("process", "cgroup", "device")
#: An account that counts others' reads too is taken only where it moved by more: a run's own cold start reads more.
OTHERS_BYTES = 1 << 20


class Accounts:
    """What each account counted in ``load``, ``prefill`` and ``decode`` of this process, from now on."""

    def __init__(self, path: Path, root: str | Path = "/") -> None:
        self._now, self._root = ReadAccounts(path, root).now, root
        self._before, self._written = self._now(), self._writes()
        self.counted: dict[str, dict[str, int]] = {}

    def end(self, phase: str) -> None:
        """The phase is over, and the next one begins."""
        after = self._now()
        self.counted[phase] = {
            name: max(0, after[name] - before) for name, before in self._before.items() if name in after
        }
        self._before = after

    def put_into(self, document: dict[str, Any]) -> None:
        """All of it, and what the process wrote to the disk; ``read_bytes_os`` of the load, as phases have it."""
        document["read_accounts"] = self.counted
        document["load"]["read_bytes_os"] = self.counted["load"].get("process", 0)
        written = self._writes()
        known = written is not None and self._written is not None
        document["write_bytes_os"] = (written or 0) - (self._written or 0) if known else None

    def _writes(self) -> int | None:
        return process_io(root=self._root).get("write_bytes")


def name_source(record: dict[str, Any]) -> None:
    """Put the best account's bytes into ``read_bytes_os`` of the phases, and ``read_source`` into the record.

    A run that began warm may have read nothing, so that only the account of the process tells."""
    document = record.get("document")
    if document is None:
        record["read_source"] = None
        return
    counted = document.get("read_accounts") or {}
    source = "process" if record["warm"] else _moved(counted)
    if source in ("cgroup", "device"):
        record["read_source"] = source
        for phase, bytes_by in counted.items():
            document[phase]["read_bytes_os"] = bytes_by.get(source, 0)
    record["read_source"] = figures.read_source(record)


def _moved(counted: Mapping[str, Mapping[str, int]]) -> str | None:
    for name in ACCOUNTS:
        bytes_read = sum(bytes_by.get(name, 0) for bytes_by in counted.values())
        if bytes_read > (0 if name == "process" else OTHERS_BYTES):
            return name
    return None
