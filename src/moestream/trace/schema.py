"""The table a trace file is: its columns and its version. docs/formats/trace.md says the same in prose.

pyarrow is imported when a trace is first touched, never with the package: only traces need it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moestream.errors import RefusedError
from moestream.extras import lacking

SCHEMA_NAME = "moestream-trace"
SCHEMA_VERSION = 1
#: The key of the metadata in the Arrow schema and in the Parquet footer.
META_KEY = b"moestream"
#: What a file is called while it is being written: this behind its name.
PARTIAL_SUFFIX = ".partial"

STEP, ROUTE, SLAB = "step", "route", "slab"

#: Every column: its Arrow type and the kinds of row that have it; in all other rows it is null. Kinds marked with a
#: question mark have it in some of their rows only.
COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "event": ("string", (STEP, ROUTE, SLAB)),
    "step": ("int64", (STEP, ROUTE, SLAB)),
    "phase": ("string", (STEP,)),
    "tokens": ("int64", (STEP, ROUTE)),
    "seconds": ("float64", (STEP,)),
    "hits": ("int64", (STEP,)),
    "misses": ("int64", (STEP,)),
    "bytes_read": ("int64", (STEP,)),
    "stall_s": ("float64", (STEP,)),
    "memory_work_s": ("float64", (STEP,)),
    "speculative_issued": ("int64", (STEP,)),
    "speculative_used": ("int64", (STEP,)),
    "speculative_wasted_bytes": ("int64", (STEP,)),
    "majflt": ("int64", (STEP,)),
    "minflt": ("int64", (STEP,)),
    "read_bytes_os": ("int64", (STEP,)),
    "route": ("int64", (ROUTE, SLAB + "?")),
    "bank": ("int32", (ROUTE, SLAB)),
    "layer": ("int32", (ROUTE, SLAB)),
    "token": ("int64", (ROUTE,)),
    "position": ("int32", (ROUTE,)),
    "ids": ("list<int32>", (ROUTE,)),
    "wish": ("list<int32>", (ROUTE + "?",)),
    "expert": ("int32", (SLAB,)),
    "slot": ("int32", (SLAB,)),
    "kind": ("string", (SLAB,)),
    "bytes": ("int64", (SLAB,)),
    "issued_ns": ("int64", (SLAB + "?",)),
    "ready_ns": ("int64", (SLAB + "?",)),
    "needed_ns": ("int64", (SLAB + "?",)),
    "waited_ns": ("int64", (SLAB,)),
}


def columns_of(event: str) -> dict[str, bool]:
    """The columns of one kind of row; True: in each of its rows."""
    return {
        name: event in kinds for name, (_, kinds) in COLUMNS.items() if event in kinds or f"{event}?" in kinds
    }


def load_arrow() -> Any:
    """pyarrow with the parts traces use. RefusedError, with the command that installs it, where there is none."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise lacking(error, "traces", "pyarrow") from None
    return pyarrow


def arrow_type(name: str) -> Any:
    """The Arrow type of a column."""
    pa = load_arrow()
    text = COLUMNS[name][0]
    return pa.list_(pa.int32()) if text == "list<int32>" else pa.type_for_alias(text)


def arrow_schema(meta: Mapping[str, Any]) -> Any:
    """The schema of a file with this metadata."""
    pa = load_arrow()
    fields = [pa.field(name, arrow_type(name)) for name in COLUMNS]
    return pa.schema(fields, metadata={META_KEY: json.dumps(meta).encode()})


def damaged(path: Path, why: str) -> RefusedError:
    return RefusedError(f"{path} is damaged or cut short ({why}): record it again")
