"""Documents in which any one value is replaced by an odd one, for tests of whoever reads them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

#: As they stand in a file: not all of them can be made by a JSON writer.
ODD = [
    "null", "true", "0", "-1", "1.5", "1e308", "1" + "0" * 400, "1" + "0" * 5000, "NaN", "-Infinity", '""', '"$x^"',
    '"\\u001b[31m\\ud800"', "[]", "{}", "[[1]]", '{"a": null}', "[" * 3000 + "]" * 3000,
]  # fmt: skip
_MARK = "what stands here is replaced"


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a document."""
    if way:
        yield way
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*way, key))


def odd_texts(document: dict[str, Any], count: int, seed: int) -> Iterator[tuple[str, str]]:
    """The document as text with one value replaced, and what was replaced by what."""
    chosen = random.Random(seed)
    ways = list(places(document))
    for _ in range(count):
        way, odd = chosen.choice(ways), chosen.choice(ODD)
        changed = copy.deepcopy(document)
        at: Any = changed
        for key in way[:-1]:
            at = at[key]
        at[way[-1]] = _MARK
        yield json.dumps(changed).replace(json.dumps(_MARK), odd), f"{way} = {odd[:40]}"
