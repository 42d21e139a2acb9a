"""What a caller says of a model in place of its header: ``kv_overrides``, which llama.cpp believes before the file."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from moestream.errors import ModelError, UsageError
from moestream.model.types import Value

#: llama.cpp takes a key and a text in fields of so many bytes, a zero behind them.
MOST_KEY_BYTES = MOST_TEXT_BYTES = 127
#: What each Python type may stand for, as ggml calls the types of a header.
_TAKEN = {
    bool: ("bool",),
    int: ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"),
    float: ("f32",),
    str: ("str",),
}


def check_overrides(overrides: Mapping[str, Value] | None) -> None:
    """Raises UsageError for what llama.cpp cannot be told."""
    for key, value in (overrides or {}).items():
        if not isinstance(key, str) or not 0 < len(key.encode()) <= MOST_KEY_BYTES:
            raise UsageError(f"kv_overrides: {key!r} is no key: a name of at most {MOST_KEY_BYTES} bytes")
        if type(value) not in _TAKEN:
            raise UsageError(f"kv_overrides: {key} is {value!r}: give a bool, an int, a float or a str")
        if isinstance(value, str) and len(value.encode()) > MOST_TEXT_BYTES:
            raise UsageError(f"kv_overrides: {key} has a text of more than {MOST_TEXT_BYTES} bytes")
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            raise UsageError(f"kv_overrides: {key} is {value}, and llama.cpp takes 64 bits")


def overridden(
    metadata: Mapping[str, Value], types: Mapping[str, str], overrides: Mapping[str, Value] | None
) -> dict[str, Value]:
    """A header's values as llama.cpp will have them; it leaves a key of another type as the file has it. Raises what
    ``check_overrides`` does."""
    check_overrides(overrides)
    said = {
        key: _narrowed(value, types.get(key, "i64"))
        for key, value in (overrides or {}).items()
        if types.get(key) in (None, *_TAKEN[type(value)])
    }
    return {**metadata, **said}


def _narrowed(value: Value, type_name: str) -> Value:
    """An integer as a field of the header's type holds it."""
    if type(value) is not int:
        return value
    kind = "uint" if type_name.startswith("u") else "int"
    return int(getattr(ctypes, f"c_{kind}{type_name[1:]}")(value).value)


@contextmanager
def naming(overrides: Mapping[str, Value] | None) -> Iterator[None]:
    """While inside, a model that is refused is refused with what was said in place of its header."""
    try:
        yield
    except ModelError as error:
        if not overrides:
            raise
        said = ", ".join(f"{key}={value!r}" for key, value in overrides.items())
        raise ModelError(f"{error} (or leave out kv_overrides {said})") from None
