"""The core, ``_core``: refused where it was built from other sources than those that lie beside the package.

In a clone that is used in place (``make setup``) a ``git pull`` brings new sources and leaves the core as it was built.
What is installed from a package has no sources beside it, and came with its core.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import moestream._core as _core
from moestream.errors import RefusedError

__all__ = ["_core"]

_CLONE = Path(__file__).parents[2]
#: Of the clone: everything the core is built from. CMakeLists.txt makes the same digest of the same files.
_SOURCES = ("core/bind", "core/include", "core/src")


def digest(clone: Path) -> str | None:
    """What a core that is built from this clone calls its sources; None where there are none."""
    files = {
        path.relative_to(clone).as_posix(): path
        for folder in _SOURCES
        for path in (clone / folder).rglob("*")
        if path.suffix in (".cpp", ".h") and path.is_file()
    }
    told = "".join(f"{sha256(files[name].read_bytes()).hexdigest()} {name}\n" for name in sorted(files))
    return sha256(told.encode()).hexdigest() if files else None


def check_sources(built_from: str | None, clone: Path) -> None:
    """Raises RefusedError where ``clone`` has sources, and not those that the core was ``built_from``."""
    if digest(clone) not in (None, built_from):
        raise RefusedError(
            f"moestream's core was built from other sources than those in {clone / 'core'}: build it again with "
            "`make setup` there"
        )


if Path(__file__).parents[1].name == "src":  # else what lies above the package is somebody else's
    check_sources(getattr(_core, "SOURCES", None), _CLONE)
