"""Of which kind each value of a record is (docs/formats/runs.md), for whoever reads one: it may have been edited."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from moestream.errors import RefusedError
from moestream.values import parse_json, shown, without_controls

SCHEMA = 1
#: What is said of a line that was cut short, among others.
NOT_JSON = "is not JSON"
#: Records of a bench are some ten thousand bytes each.
MOST_BYTES = 1 << 30
_TEXTS = ("arm", "asked", "prompt", "kind")
_TEXTS_OR_NONE = ("commit", "trace", "experiment", "date", "error")
_COUNTS = ("round", "position")
_NUMBERS_OR_NONE = (
    "cap_bytes", "threads", "ctx", "batch", "tokens", "most_tokens", "limit_s", "cached_bytes_before", "seconds",
    "disk_bytes_per_s", "cage_peak_bytes", "cage_anon_peak_bytes", "oom_kills",
)  # fmt: skip
_FLAGS = ("valid", "caged", "again", "warm", "modified")
_OBJECTS_OR_NONE = ("document", "box", "conditions", "model", "versions")
_OF_DOCUMENT_OR_NONE = ("model", "box", "budget", "cpu_s", "memory", "prefill", "decode", "mechanism", "load")
_WRONG = (TypeError, KeyError, ValueError, AttributeError, ArithmeticError, RecursionError, IndexError)


def parse_record(line: bytes) -> dict[str, Any]:
    """One line of a ``runs.jsonl``. ValueError that says what is wrong with it."""
    try:
        found = parse_json(line)
    except ValueError as error:
        raise ValueError(NOT_JSON if str(error) == "it is not JSON" else f"is no record: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("is no record: each line is one JSON object")
    schema = found.get("schema", SCHEMA)
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise ValueError(f"is no record: its schema is {shown(schema)}")
    if schema > SCHEMA:
        raise ValueError(
            f"is of schema {shown(schema)}, this version knows {SCHEMA}: read it with a newer moestream"
        )
    try:
        record: dict[str, Any] = without_controls(found)
        _check_kinds(record)
    except ValueError as error:
        raise ValueError(f"is no record: {error}") from None
    return record


def is_number(value: Any) -> bool:
    """A count, a size or a time."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value >= 0
        and math.isfinite(value)
    )


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turns what goes wrong over a value that nothing here ever wrote into a RefusedError that names the file."""
    try:
        yield
    except _WRONG as error:
        detail = " ".join(str(error).split())[:120]
        raise RefusedError(
            f"{what} holds what this program never writes ({type(error).__name__}: {detail}): "
            "restore it, or make the runs again"
        ) from error


def _check_kinds(record: Mapping[str, Any]) -> None:
    _check(record, _TEXTS, lambda value: isinstance(value, str), "no text")
    _check(record, _TEXTS_OR_NONE, lambda value: value is None or isinstance(value, str), "no text")
    _check(record, _COUNTS, lambda value: is_number(value) and isinstance(value, int), "no count")
    _check(
        record, _NUMBERS_OR_NONE, lambda value: value is None or is_number(value), "no number from zero up"
    )
    _check(record, _FLAGS, lambda value: isinstance(value, bool), "neither true nor false")
    _check(record, _OBJECTS_OR_NONE, lambda value: value is None or isinstance(value, dict), "no object")
    _check(record, ("returncode",), lambda value: value is None or type(value) is int, "no exit code")
    _check(record, ("invalid",), _is_texts, "no list of texts")
    _check(
        record["document"] if record.get("document") else {},
        _OF_DOCUMENT_OR_NONE,
        _is_object_or_none,
        "no object",
    )


def _is_texts(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(text, str) for text in value))


def _is_object_or_none(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _check(of: Mapping[str, Any], names: tuple[str, ...], right: Any, lack: str) -> None:
    for name in names:
        if name in of and not right(of[name]):
            raise ValueError(f"{name} is {shown(of[name])}, {lack}")
