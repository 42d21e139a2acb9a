"""What a process holds that a closed model must have given back."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from pathlib import Path

from moestream.box import process_memory


@dataclass(frozen=True)
class Holdings:
    descriptors: int
    mappings: int
    threads: int
    anon_bytes: int

    def grown_from(self, before: Holdings, room: Holdings) -> list[str]:
        """A line for each thing of which there is more than before and ``room``."""
        return [
            f"{name}: {now}, before {was}"
            for name, now in vars(self).items()
            if now > (was := getattr(before, name)) + getattr(room, name)
        ]


def holdings() -> Holdings:
    """Of this process, once what nothing refers to any more is gone."""
    gc.collect()
    return Holdings(
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        mappings=len(Path("/proc/self/maps").read_text().splitlines()),
        threads=_threads(),
        anon_bytes=process_memory().anon_bytes,
    )


#: A thread that was joined is in the kernel's list for some moments yet; one that was leaked stays there.
_LEAVES_WITHIN_S = 0.3


def _threads() -> int:
    """The fewest of a short time."""
    ends = time.monotonic() + _LEAVES_WITHIN_S
    fewest = _threads_listed()
    while time.monotonic() < ends:
        time.sleep(0.01)
        fewest = min(fewest, _threads_listed())
    return fewest


def _threads_listed() -> int:
    return sum(not _of_the_kernel(task) for task in Path("/proc/self/task").iterdir())


def _of_the_kernel(task: Path) -> bool:
    """A worker of io_uring, which the kernel ends some time after the ring; or a thread that has ended since."""
    try:
        return (task / "comm").read_text().startswith("iou-")
    except OSError:
        return True
