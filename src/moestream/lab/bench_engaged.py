"""Did a mechanism do what it promises? By the counters that its store, its reader and its predictor keep."""

from __future__ import annotations

from collections.abc import Mapping

from moestream.mechanism import Mechanism

#: Counters that may end at 0 although all that was promised was done, and why. A 0 in any other is a broken promise.
MAY_BE_ZERO = {
    "bytes found resident": "nothing that was routed was in the page cache",
    "bytes read": "all that was routed was in the page cache: what is there is not read again",
    "reads through the page cache": "no slab was routed a second time",
    "slabs left out of a full queue": "workers that keep up leave none out",
    "reflinks": "a file system without them writes the copy out",
}
#: Counters that every store of a kind keeps and only one member moves: without that member 0 is right.
MOVED_BY = {
    "bytes moved": "recycle",
    "bytes populated": "populate",
    "bytes in huge pages at most": "thp",
    "bytes dropped": "dontneed",
    "huge staging bytes": "huge",
}


def broken_promises(mechanism: Mechanism, engaged: Mapping[str, int]) -> list[str]:
    """The names of counters that are 0 and that this mechanism promises to move."""
    return [name for name, count in engaged.items() if not count and _promised(mechanism, name)]


def _promised(mechanism: Mechanism, name: str) -> bool:
    if name in MAY_BE_ZERO:
        return False
    member = MOVED_BY.get(name)
    return member is None or mechanism.has(member) or mechanism.policy.partition(":")[0] == member
