"""A disk whose reads take their time, or come back out of order: stock's logits, and a step that can be stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from answers import prompt_tokens
from ground_child import LONG, QUESTION
from grounds import Ground, Visit, expert_bytes, visit_all
from moestream.model import read_model

MECHANISMS = ("arena+uring", "arena+threads", "mapped+willneed")
#: Of a read, as over a network.
DELAY_S = 0.02


LAYERS, EXPERTS, SLABS = 4, 16, 3


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("olmoe", f"tiny,layers={LAYERS},experts={EXPERTS}")


@pytest.fixture(scope="module")
def expected(model: Path, stock: Any) -> tuple[list[str], list[str]]:
    """Stock's logits of the usual question, and those after a long step."""

    def ask(length: int, steps: int) -> list[str]:
        tokens = prompt_tokens(length, read_model(model).n_vocab)
        return list(stock(model, tokens, steps, 2, 64, 64).digests)

    return ask(QUESTION["length"], QUESTION["steps"]), ask(LONG, 0)


def test_a_slow_disk_and_one_that_answers_out_of_order(model: Path, expected: Any, tmp_path: Path) -> None:
    """Each read 20 ms late, then every third: others overtake it. A step that is stopped waits for no more than the
    layer it is in."""
    tally, overtaken, work = tmp_path / "reads", tmp_path / "overtaken", tmp_path / "grounds"
    work.mkdir()
    slow = {"watched": expert_bytes(model), "delay_s": DELAY_S}
    disks = (
        Ground("slow", how={**slow, "tally": str(tally)}),
        Ground("out of order", how={**slow, "every": 3, "overtaken": str(overtaken)}),
    )
    visits = [Visit(disks[0], MECHANISMS, cancelled=MECHANISMS), Visit(disks[1], MECHANISMS)]
    results = visit_all(visits, model, work)
    answered, long = expected
    for result in results:
        if isinstance(result, str):
            pytest.skip(result)
        for mechanism in MECHANISMS:
            assert result["answers"][mechanism].get("digests") == answered, (mechanism, result)
    assert int(overtaken.read_text()) > 0
    late = results[0]
    for mechanism in MECHANISMS[:2]:
        assert late["answers"][mechanism]["counters"]["stall_ns"] >= LAYERS * DELAY_S * 1e9
    for mechanism, found in late["cancelled"].items():
        stopped, ended, whole = found["reads"]
        assert found["ended"] == "Cancelled", mechanism
        assert ended - stopped <= EXPERTS * SLABS, (mechanism, found)
        assert whole - ended > EXPERTS * SLABS, (mechanism, found)
        assert found["digests"] == long, mechanism
