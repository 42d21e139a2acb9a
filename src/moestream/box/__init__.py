"""The machine under the engine: its limits, its disk, what a process uses, and a cage to hold one to a
cap."""

from __future__ import annotations

from moestream.box.cgroup import Mount
from moestream.box.facts import Box, Limit
from moestream.box.process import (
    Faults,
    ProcessMemory,
    faults,
    peak_rss_bytes,
    process_io,
    process_memory,
)

__all__ = [
    "Box",
    "Faults",
    "Limit",
    "Mount",
    "ProcessMemory",
    "faults",
    "peak_rss_bytes",
    "process_io",
    "process_memory",
]
