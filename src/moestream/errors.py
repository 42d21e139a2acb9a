"""The exception tree and the exit codes; only ``cli.main`` prints errors and exits.

MoestreamError            4  something failed that should have worked (a read, a broken invariant)
├── ReadError             4  bytes of the model could not be read; the text names shard, offset and tensor
├── Cancelled             4  the running call was stopped by ``Llama.cancel``
├── UsageError            2  the caller's words are wrong: an option, a size
│   └── MechanismError    3  a mechanism string that names no mechanism; the text has the nearest words
└── RefusedError          3  this model, file, box or llama.cpp cannot do what was asked; the text names the remedy
    ├── ModelError        3  the file is not a model this engine can run
    ├── BudgetError       3  the memory named is too little (``smallest_bytes`` says what works)
    ├── AbiError          3  the llama.cpp found is not one this version is proven with
    └── EngagementError   3  ``strict``: a mechanism that was asked for did not engage

The rule for files: whatever is to be read (a model, a trace, a record, a probe, a seed, an experiment, a directory of
them) and is missing, unreadable or not what it should be is refused, 3. A place to write to that cannot be is a wrong
word, 2, told before any work; a disk that takes no more is 3.
"""

from __future__ import annotations

from collections.abc import Sequence


class MoestreamError(Exception):
    """Base of every error this package raises on purpose. The text is one line that names the thing and the remedy.

    ``tokens`` and ``text``: what the call that it ended had generated before."""

    exit_code = 4
    tokens: Sequence[int] = ()
    text: str = ""


class ReadError(MoestreamError):
    """Bytes of the model could not be read while it ran. Nothing was computed on them."""


class Cancelled(MoestreamError):
    """The running call was stopped by ``Llama.cancel``."""


class UsageError(MoestreamError):
    """The caller's words are wrong."""

    exit_code = 2


class MechanismError(UsageError):
    """A mechanism string names an unknown member, or members that do not go together."""

    #: Like whatever else cannot be run as asked: which words are known depends on the version.
    exit_code = 3


class RefusedError(MoestreamError):
    """What was asked cannot be done with this model, box or llama.cpp."""

    exit_code = 3


class ModelError(RefusedError):
    """The file is not a model this engine can run."""


class BudgetError(RefusedError):
    """The memory named is too little. ``smallest_bytes`` is the smallest cap that works, or None when unknown."""

    def __init__(self, message: str, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class AbiError(RefusedError):
    """The llama.cpp in this process is not one this version is proven with."""


class EngagementError(RefusedError):
    """A mechanism that was asked for did not engage and ``strict`` was set."""
