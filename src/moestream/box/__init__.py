"""The machine under the engine: its limits, its disk, what a process uses, and a cage to hold one to a
cap."""

from __future__ import annotations

from moestream.box.cage import Cage
from moestream.box.cgroup import Mount
from moestream.box.disk import (
    DirectIo,
    DiskRate,
    cache_directory,
    device_name,
    direct_io_alignment,
    disk_rate,
    mapping_refusal,
)
from moestream.box.facts import MACHINE, MOST_THREADS, Box, Limit, Threads
from moestream.box.filesystems import Place, hindrance, place_of
from moestream.box.limits import Bound, ProcessLimits, allow_files
from moestream.box.process import (
    Faults,
    ProcessMemory,
    faults,
    peak_rss_bytes,
    process_io,
    process_memory,
)

__all__ = [
    "MACHINE",
    "MOST_THREADS",
    "Bound",
    "Box",
    "Cage",
    "DirectIo",
    "DiskRate",
    "Faults",
    "Limit",
    "Mount",
    "Place",
    "ProcessLimits",
    "ProcessMemory",
    "Threads",
    "allow_files",
    "cache_directory",
    "device_name",
    "direct_io_alignment",
    "disk_rate",
    "faults",
    "hindrance",
    "mapping_refusal",
    "peak_rss_bytes",
    "place_of",
    "process_io",
    "process_memory",
]
