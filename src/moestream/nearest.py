"""What somebody may have meant who typed a word, or a file's name, that there is not."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

#: How alike a name is that may have been meant: 0 nothing, 1 everything.
_ALIKE = 0.6
#: Other endings are other kinds of files: such a name must be nearly the same.
_ALIKE_WHOLE = 0.8
#: Of a directory of more files, these.
_MOST_FILES = 2000


def nearest(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The words of ``known`` most like ``word``, the best first, whatever their case."""
    spelled = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), spelled, n=most, cutoff=_ALIKE)
    return [spelled[name] for name in near]


def did_you_mean(word: str, known: Iterable[str], most: int = 3) -> str:
    """``: did you mean lru or lru-layer?``, or nothing where no word is near."""
    near = nearest(word, known, most)
    return f": did you mean {' or '.join(near)}?" if near else ""


def nearest_file(path: Path, words: Iterable[str] = ()) -> str:
    """`` (did you mean ./olmoe.gguf?)`` where a file beside ``path``, or one of ``words`` that stand for files, is
    called nearly the same; else nothing."""
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in islice(entries, _MOST_FILES) if entry.name.isprintable()]
    except (OSError, ValueError):
        names = []
    scores = {str(path.with_name(name)): _likeness(path, Path(name)) for name in names}
    if str(path) == path.name:
        scores.update({word: _ratio(path.name, word) for word in words})
    best = max(sorted(scores), key=scores.__getitem__, default="")
    return f" (did you mean {best}?)" if scores.get(best, 0.0) >= _ALIKE else ""


def _likeness(asked: Path, there: Path) -> float:
    """Of two names: of what stands before the same ending, or of one that was left away."""
    if asked.suffix in ("", there.suffix):
        return _ratio(asked.stem, there.stem)
    whole = _ratio(asked.name, there.name)
    return whole if whole >= _ALIKE_WHOLE else 0.0


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()
