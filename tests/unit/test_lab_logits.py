"""How two answers differ, told by values made for it."""

from __future__ import annotations

import numpy as np

from moestream.lab.logits import Logits, difference


def rows(**changed: float) -> list[Logits]:
    """Three rows of four values; ``r1v2=5.0``: another value there."""
    made = [np.array([0.0, 1.0, np.nan, -3.0], np.float32) + number for number in range(3)]
    for place, value in changed.items():
        made[int(place[1])][int(place[3])] = value
    return made


def test_equal_is_the_same_bits() -> None:
    assert difference(rows(), rows()) is None  # also of what is no number
    assert (
        difference(rows(r0v0=-0.0), rows())
        == "from row 0 of 3, 1 of 4 values, the first at 0, 1 of them no numbers"
    )
    assert difference(rows(r0v2=1.0, r0v0=-0.0), rows(r0v2=1.0)) == (
        "from row 0 of 3, 1 of 4 values, the first at 0, by at most 0"
    )


def test_the_first_row_that_differs_is_looked_into() -> None:
    numbers = {"r0v2": 1.0, "r1v2": 1.0, "r2v2": 1.0}
    got = rows(**numbers | {"r1v1": 2.25, "r1v3": -2.5, "r2v0": 9.0})
    assert (
        difference(got, rows(**numbers)) == "from row 1 of 3, 2 of 4 values, the first at 1, by at most 0.5"
    )
