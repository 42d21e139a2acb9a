"""The mechanism's text form: canonical, its own inverse, and helpful about words it does not know."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestream.errors import MechanismError
from moestream.mechanism import DEFAULT, Mechanism, members

_QUEUES = st.one_of(
    st.integers(1, 1024).map("uring:{}".format), st.integers(1, 64).map("threads:{}".format), st.just("sync")
)
_ARENAS = st.builds(
    Mechanism,
    st.just("arena"),
    st.sampled_from(["direct", "buffered"]),
    _QUEUES,
    st.one_of(st.sampled_from(["none", "lru", "lru-layer"]), st.integers(1, 999).map("lfu-decay:{}".format)),
    st.one_of(st.just("none"), st.integers(1, 64).map("gate:{}".format)),
    st.sampled_from(["anon", "mlock"]),
)
_RESIDENTS = st.builds(
    Mechanism,
    st.just("resident"),
    st.just(""),
    _QUEUES,
    st.just("none"),
    st.just("none"),
    st.sampled_from(["anon", "mlock"]),
)
_MAPPED = st.builds(
    Mechanism,
    st.just("mapped"),
    st.just(""),
    st.sampled_from(["fault", "willneed", "pread", "pread+willneed"]),
    st.just("none"),
    st.just("none"),
    st.sampled_from(["mapped", "mlock", "anon"]),
)
_MECHANISMS = st.one_of(_ARENAS, _RESIDENTS, _MAPPED)


@given(_MECHANISMS)
def test_text_is_its_own_inverse(mechanism: Mechanism) -> None:
    assert Mechanism.parse(str(mechanism)) == mechanism
    assert str(Mechanism.parse(str(mechanism))) == str(mechanism)


@given(_ARENAS.filter(lambda m: "none" not in (m.policy, m.predictor)), st.randoms())
def test_parts_come_in_any_order(mechanism: Mechanism, random: object) -> None:
    store, *parts = str(mechanism).split("+")
    random.shuffle(parts)  # type: ignore[attr-defined]
    assert Mechanism.parse("+".join([store, *parts])) == mechanism


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("arena", "arena+uring:8+lfu-decay:16+none+anon"),
        ("arena/direct", "arena+uring:8+lfu-decay:16+none+anon"),
        ("arena/buffered + threads + lru", "arena/buffered+threads:4+lru+none+anon"),
        ("arena+gate", "arena+uring:8+lfu-decay:16+gate:1+anon"),
        ("arena+lru+none", "arena+uring:8+lru+none+anon"),
        ("arena+none", "arena+uring:8+none+none+anon"),
        ("arena+uring:08", "arena+uring:8+lfu-decay:16+none+anon"),
        ("mapped", "mapped+fault+none+none+mapped"),
        ("mapped+mlock+willneed", "mapped+willneed+none+none+mlock"),
        ("mapped+pread", "mapped+pread+none+none+mapped"),
        ("mapped+pread+willneed", "mapped+pread+willneed+none+none+mapped"),
        ("mapped+willneed+pread+anon", "mapped+pread+willneed+none+none+anon"),
        ("resident+sync", "resident+sync+none+none+anon"),
    ],
)
def test_left_out_parts_take_the_stores_defaults(text: str, canonical: str) -> None:
    assert str(Mechanism.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arean", "did you mean arena"),
        ("", "unknown store"),
        ("arena+urng:24", "did you mean uring"),
        ("arena+lfu-decy", "did you mean lfu-decay"),
        ("arena/bufered", "did you mean buffered"),
        ("mapped/direct", "no variants"),
        ("mapped+wilneed", "did you mean willneed"),
        ("arena+mapped", "anonymous memory"),
        ("arena+willneed", "another store"),
        ("mapped+uring", "another store"),
        ("mapped+lru", "page cache decides"),
        ("mapped+gate", "reads nothing of its own early"),
        ("resident+lru", "nothing ever leaves"),
        ("resident+gate:1", "nothing is read after the load"),
        ("arena+uring:0", "1 to 1024"),
        ("arena+uring:2000", "1 to 1024"),
        ("arena+uring:", "1 to 1024"),
        ("arena+uring:-1", "1 to 1024"),
        ("arena+uring:1e3", "1 to 1024"),
        ("arena+uring:" + "9" * 5000, "1 to 1024"),
        ("arena+threads:65", "1 to 64"),
        ("arena+gate:0", "1 to 64"),
        ("arena+sync:4", "takes no number"),
        ("arena+lru+lfu-decay", "two members for policy"),
        ("arena+sync+arena", "once and first"),
        ("arena+none+none+none", "too many"),
        ("arena+", "unknown part ''"),
    ],
)
def test_wrong_words_are_named(text: str, says: str) -> None:
    with pytest.raises(MechanismError, match=says) as caught:
        Mechanism.parse(text)
    assert "\n" not in str(caught.value)


def test_a_value_built_by_hand_is_held_to_the_same_rules() -> None:
    assert Mechanism("arena", "direct", "uring", "lfu-decay", "none", "anon") == DEFAULT
    with pytest.raises(MechanismError, match="page cache decides"):
        Mechanism("mapped", "", "fault", "lru", "none", "mapped")
    with pytest.raises(MechanismError, match="unknown variant ''"):
        Mechanism("arena", "", "uring", "lru", "none", "anon")


@given(st.text(max_size=40))
def test_any_text_is_a_mechanism_or_a_mechanism_error(text: str) -> None:
    with contextlib.suppress(MechanismError):
        Mechanism.parse(text)


def test_members_document_every_family() -> None:
    table = members()
    assert list(table) == ["store", "variant", "reader", "policy", "predictor", "dense"]
    assert all(member.help for family in table.values() for member in family.values())
    assert {part.partition(":")[0] for part in str(DEFAULT).split("+")} <= {
        name for family in table.values() for name in family
    }
