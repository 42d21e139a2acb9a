"""Texts without what says where on somebody's machine a file lies: records and reports are read elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

#: Behind a member's colon: ``pinned:traces/t.parquet``.
_OF_MEMBER = re.compile(r"(?<=:)(?!//)[^+,\s]*/(?=[^/+,\s]+)")
#: From the root, from home or from here; neither ``tok/s`` nor ``arena/fresh`` nor an address of the web.
_DIRECTORY = re.compile(r"(?<![\w/.~-])(?!//)(?:~|\.\.?)?(?:/[^/\s+,:;`'\"()<>|]*)*/(?=[^/\s])")


def without_paths(text: str) -> str:
    """The text with every directory before a file's name left out."""
    return _DIRECTORY.sub("", _OF_MEMBER.sub("", text))


def places(paths: Iterable[Path], out: Path) -> list[str]:
    """Directories that only this machine has: the model's, the records', home, and where the command was typed; the
    longer ones first, each also as it is once links are followed."""
    named = [*(path.parent for path in paths), out, Path.home(), Path.cwd()]
    found = {str(one) for place in named for one in (place.absolute(), place.resolve())}
    return sorted(found - {"/"}, key=len, reverse=True)


def without_places(text: str, directories: Iterable[str]) -> str:
    """The text with files in these directories named from there, and the directories by their last name."""
    for place in directories:
        text = re.sub(rf"(?<![\w/.-]){re.escape(place)}/", "", text)
        text = re.sub(rf"(?<![\w/.-]){re.escape(place)}(?![\w/-])", Path(place).name, text)
    return text
