"""What must not be run unguarded: a mechanism whose memory grows without bound."""

from __future__ import annotations

from moestream.box import Box
from moestream.errors import RefusedError
from moestream.mechanism import Mechanism


def check_cow(mechanism: Mechanism, box: Box, i_know: bool) -> None:
    """Raises RefusedError for ``cow`` where no memory cap is enforced on this process, unless ``i_know``."""
    if mechanism.store != "cow" or i_know or box.memory_limit().bytes < box.ram_bytes():
        return
    raise RefusedError(
        "cow keeps every page it has ever written, so its memory grows without bound: run it inside a memory cgroup "
        "(systemd-run --user --scope -p MemoryMax=4G ...), or say --i-know (i_know=True); it stops itself at the "
        "cap named"
    )
