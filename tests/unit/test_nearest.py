"""What was meant by a word or a name that there is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestream.errors import MechanismError, UsageError
from moestream.make.shapes import find_architecture
from moestream.mechanism import Mechanism
from moestream.members import POLICIES
from moestream.nearest import did_you_mean, nearest, nearest_file


def test_the_nearest_comes_first_whatever_its_case() -> None:
    assert nearest("LRU", POLICIES)[0] == "lru"
    assert nearest("lfu-decy", POLICIES)[0] == "lfu-decay"
    assert nearest("zebra", POLICIES) == []
    assert did_you_mean("rnu", ["run", "plan"]) == ": did you mean run?"
    assert did_you_mean("zebra", ["run", "plan"]) == ""


@pytest.mark.parametrize(
    ("asked", "there", "near"),
    [
        ("olmo.gguf", ["olmoe.gguf", "mixtral.gguf"], "olmoe.gguf"),
        ("x.gguf", ["m.gguf"], None),  # the same ending makes nothing alike
        ("t.parquet", ["t.csv"], None),
        ("OLMoE.gguf", ["olmoe.gguf"], "olmoe.gguf"),
        ("olmoe", ["olmoe.gguf"], "olmoe.gguf"),
        ("olmoe.guff", ["olmoe.gguf"], "olmoe.gguf"),
        ("olmo.gguf", ["ol\x1bmo.gguf"], None),
    ],
)
def test_the_nearest_file(asked: str, there: list[str], near: str | None, tmp_path: Path) -> None:
    for name in there:
        (tmp_path / name).touch()
    expected = "" if near is None else f" (did you mean {tmp_path / near}?)"
    assert nearest_file(tmp_path / asked) == expected
    assert nearest_file(tmp_path / "no-such-directory" / asked) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arena+lur", "did you mean lru or lfu? (policy of arena: none, lru, "),
        ("arena+urnig:8", "did you mean uring? (reader of arena: "),
        ("mapped+wilneed", "(reader of mapped: "),
        ("arena+gaet", "did you mean gate? (predictor of arena: "),
        ("arena+mlokc", "did you mean mlock? (dense of arena: "),
        ("mapped+willneed+backgruond:1", "did you mean background?"),
        ("arena+zebra", "(`moestream mechanisms` lists"),
    ],
)
def test_an_unknown_word_of_a_mechanism_names_its_own_kind_alone(text: str, said: str) -> None:
    with pytest.raises(MechanismError) as caught:
        Mechanism.parse(text)
    told = str(caught.value)
    assert said in told
    assert not ("sieve" in told and "uring" in told)


def test_an_unknown_architecture_has_its_nearest() -> None:
    with pytest.raises(UsageError, match="unknown architecture 'qwen3-moe': did you mean qwen3moe"):
        find_architecture("qwen3-moe")
