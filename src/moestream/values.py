"""JSON that others wrote, taken apart: each value as it is asked for, or a ValueError that says in one clause what is
wrong with which."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

#: No count, size or time here is larger; sums of them stay exact.
MOST = (1 << 53) - 1
_SHOWN = 40
#: Identities and marks such as "no limit" may take 64 bits.
_LARGEST = 1 << 64


def parse_json(text: str | bytes) -> Any:
    """The document. ValueError for what is no JSON, for numbers that are none and for nesting without end."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError("it is not JSON") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def without_controls(value: Any) -> Any:
    """The same document with what no terminal, font or file takes escaped in every text: control characters but ends
    of lines and tabs, and halves of pairs. ValueError for whole numbers that nothing has so many of, and for nesting
    without end."""
    try:
        return _without_controls(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_controls(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isprintable() else "".join(map(_shown_character, value))
    if isinstance(value, dict):
        return {_without_controls(key): _without_controls(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_controls(inner) for inner in value]
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError("a whole number in it is too large")
    return value


def _shown_character(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    return character.encode("unicode_escape").decode()


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN]} is no number")
    return value


class Object:
    """A JSON object; ``where`` is what the names of its members begin with when one is complained of."""

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where.rstrip('.') or 'it'} is {shown(value)}, not an object")
        self.members: dict[str, Any] = value
        self.where = where

    def __contains__(self, name: str) -> bool:
        return name in self.members

    def get(self, name: str) -> Any:
        if name not in self.members:
            raise ValueError(f"{self.where}{name} is missing")
        return self.members[name]

    def inner(self, name: str) -> Object:
        return Object(self.get(name), f"{self.where}{name}.")

    def items(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list):
            raise ValueError(f"{self.where}{name} is {shown(value)}, not a list")
        return value

    def objects(self, name: str) -> list[Object]:
        return [Object(value, f"{self.where}{name}[{i}].") for i, value in enumerate(self.items(name))]

    def text(self, name: str) -> str:
        return _text(self.get(name), self.where + name)

    def texts(self, name: str) -> list[str]:
        return [_text(value, f"{self.where}{name}[{i}]") for i, value in enumerate(self.items(name))]

    def number(self, name: str) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > MOST:
            raise ValueError(f"{self.where}{name} is {shown(value)}, not a number")
        return value

    def integer(self, name: str, least: int = 0, most: int = MOST) -> int:
        return whole_number(self.get(name), self.where + name, least, most)

    def integers(self, name: str, least: int = 0, most: int = MOST) -> list[int]:
        return whole_numbers(self.items(name), self.where + name, least, most)


def whole_number(value: Any, name: str, least: int = 0, most: int = MOST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {shown(value)}, not a whole number from {least} to {most}")
    return value


def whole_numbers(values: Iterable[Any], name: str, least: int = 0, most: int = MOST) -> list[int]:
    return [whole_number(value, f"{name}[{i}]", least, most) for i, value in enumerate(values)]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {shown(value)}, not a text")
    return value


def shown(value: Any) -> str:
    """A value in a complaint, cut where it is long."""
    try:
        text = json.dumps(value)
    except ValueError:
        text = f"a {type(value).__name__}"  # a whole number of thousands of digits
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
