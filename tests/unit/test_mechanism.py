"""The mechanism's text form: canonical, its own inverse, and helpful about words it does not know."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestream.errors import MechanismError
from moestream.mechanism import DEFAULT, Mechanism
from moestream.members import FAMILIES, GROUPS, STORES, VARIANTS

_QUEUES = st.one_of(
    st.integers(1, 1024).map("uring:{}".format),
    st.tuples(st.integers(1, 64), st.integers(2, 8)).map(lambda both: f"threads:{both[0]}x{both[1]}"),
    st.just("sync"),
)
_PATHS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=20).filter(
    lambda text: text == text.strip()
)


def _variants(store: str) -> st.SearchStrategy[tuple[str, ...]]:
    """One word of each group, or none."""
    groups = [st.sampled_from([(), *((word,) for word in group if word)]) for group in GROUPS[store]]
    return st.tuples(*groups).map(lambda words: sum(words, ()))


_CACHE_POLICIES = st.one_of(
    st.sampled_from(["none", "lru", "lru-layer", "fifo", "lfu", "lfu-adapt", "sieve", "s3fifo"]),
    st.integers(1, 999).map("lfu-decay:{}".format),
    _PATHS.map("pinned:{}".format),
)
_PREDICTORS = st.one_of(
    st.just("none"),
    *(st.integers(1, 64).map((name + ":{}").format) for name in ("gate", "previous", "random")),
    *(_PATHS.map((name + ":{}").format) for name in ("ridge", "oracle")),
)
_ARENAS = st.builds(
    Mechanism,
    st.just("arena"),
    _variants("arena"),
    _QUEUES,
    st.one_of(_CACHE_POLICIES, st.integers(0, 99).map("dontneed:{}".format)),
    _PREDICTORS,
    st.sampled_from(["anon", "mlock"]),
)
_RESIDENTS = st.builds(
    Mechanism,
    st.just("resident"),
    st.just(()),
    _QUEUES,
    st.just("none"),
    st.just("none"),
    st.sampled_from(["anon", "mlock"]),
)
_MAPPED = st.builds(
    Mechanism,
    st.just("mapped"),
    _variants("mapped"),
    st.tuples(
        st.sampled_from(
            ["willneed", "pread", "pread:4x2", "pread+willneed", "pread+willneed:2x4", "readahead"]
        )
        | st.sampled_from(["fadvise", "hybrid:mincore", "hybrid:cachestat", "tiered", "memcpy:8"]),
        st.sampled_from(["", "+background:1", "+background:3"]),
    ).map("".join),
    st.sampled_from(["none", "dontneed:0", "dontneed:4"]),
    _PREDICTORS,
    st.sampled_from(["mapped", "mlock", "anon"]),
)
_FILE_BACKED = st.builds(
    Mechanism,
    st.sampled_from(["cow", "shared"]),
    _variants("cow"),
    _QUEUES,
    _CACHE_POLICIES,
    st.just("none"),
    st.sampled_from(["mapped", "mlock"]),
)
_MECHANISMS = st.one_of(_ARENAS, _RESIDENTS, _MAPPED, _FILE_BACKED)


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
        ("arena", "arena+uring:8+lfu-adapt+none+anon"),
        ("arena/direct", "arena+uring:8+lfu-adapt+none+anon"),
        ("arena/buffered + threads + lru", "arena/buffered+threads:4+lru+none+anon"),
        ("arena+gate", "arena+uring:8+lfu-adapt+gate:1+anon"),
        ("arena+lru+none", "arena+uring:8+lru+none+anon"),
        ("arena+none", "arena+uring:8+none+none+anon"),
        ("arena+uring:08", "arena+uring:8+lfu-adapt+none+anon"),
        ("mapped", "mapped+fault+none+none+mapped"),
        ("mapped+mlock+willneed", "mapped+willneed+none+none+mlock"),
        ("mapped+pread", "mapped+pread+none+none+mapped"),
        ("mapped+pread+willneed", "mapped+pread+willneed+none+none+mapped"),
        ("mapped+willneed+pread+anon", "mapped+pread+willneed+none+none+anon"),
        ("resident+sync", "resident+sync+none+none+anon"),
        ("arena/recycle/align4k", "arena+uring:8+lfu-adapt+none+anon"),
        ("arena/cached", "arena/cached+uring:8+lfu-adapt+none+anon"),
        ("arena/thp/cached+sync", "arena/cached/thp+sync+lfu-adapt+none+anon"),
        ("arena/align2m/thp/buffered", "arena/buffered/thp/align2m+uring:8+lfu-adapt+none+anon"),
        ("arena+uring:8x1", "arena+uring:8+lfu-adapt+none+anon"),
        ("arena+threads:2x4", "arena+threads:2x4+lfu-adapt+none+anon"),
        ("mapped/random+willneed+background", "mapped/random+willneed+background:1+none+none+mapped"),
        ("mapped+background:2+pread:4x2+willneed", "mapped+pread+willneed:4x2+background:2+none+none+mapped"),
        ("mapped+hybrid", "mapped+hybrid:mincore+none+none+mapped"),
        ("mapped+willneed+dontneed", "mapped+willneed+dontneed:0+none+mapped"),
        ("cow", "cow+sync+lru+none+mapped"),
        ("shared+mlock", "shared+sync+lru+none+mlock"),
        ("arena+pinned:a%2Bb.parquet", "arena+uring:8+pinned:a%2Bb.parquet+none+anon"),
        ("mapped+pread:1x1", "mapped+pread+none+none+mapped"),
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
        ("resident/direct", "no variants"),
        ("mapped/direct", "known: normal"),
        ("arena/fresh/thp", "cannot be both fresh and thp"),
        ("arena+fresh", "after a slash"),
        ("arena+belady", "moestream replay TRACE --policy belady"),
        ("arena+willneed+background:2", "another store"),
        ("arena+background:2", "mapped store that asks"),
        ("mapped+fault+background:2", "mapped store that asks"),
        ("mapped+willneed+background:99", "1 to 16"),
        ("mapped+hybrid:guess", "mincore, cachestat"),
        ("arena+pinned", "needs a file"),
        ("arena+ridge:", "needs a file"),
        ("arena+uring:8x9", "S pieces, 1 to 8"),
        ("arena+gate:2x4", "NxL: of each of the next L layers, 1 to 3"),
        ("arena+previous:2x2", "1 to 64"),
        ("cow+dontneed", "what was copied stays"),
        ("cow+gate", "not before"),
        ("mapped+wilneed", "did you mean willneed"),
        ("arena+mapped", "anonymous memory"),
        ("arena+willneed", "another store"),
        ("mapped+uring", "another store"),
        ("mapped+lru", "page cache decides"),
        ("mapped+gate", "asks for nothing"),
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
    assert Mechanism("arena", ("direct",), "uring", "lfu-adapt", "none", "anon") == DEFAULT
    with pytest.raises(MechanismError, match="page cache decides"):
        Mechanism("mapped", (), "fault", "lru", "none", "mapped")
    with pytest.raises(MechanismError, match="unknown variant ''"):
        Mechanism("arena", ("",), "uring", "lru", "none", "anon")


@given(st.text(max_size=40))
def test_any_text_is_a_mechanism_or_a_mechanism_error(text: str) -> None:
    with contextlib.suppress(MechanismError):
        Mechanism.parse(text)


def test_members_document_every_family() -> None:
    assert list(FAMILIES) == ["store", "variant", "reader", "background", "policy", "predictor", "dense"]
    assert all(member.help and member.seen for family in FAMILIES.values() for member in family.values())
    assert {part.partition(":")[0] for part in str(DEFAULT).split("+")} <= {
        name for family in FAMILIES.values() for name in family
    }


def test_every_variant_is_in_a_group_and_documented() -> None:
    assert {word for groups in GROUPS.values() for group in groups for word in group if word} == set(VARIANTS)
    assert set(GROUPS) == set(STORES)


def test_a_variant_left_unsaid_is_the_default() -> None:
    assert Mechanism.parse("arena/fresh").has("fresh")
    assert not Mechanism.parse("arena/fresh").has("recycle")
    assert Mechanism.parse("arena").has("recycle")
    assert not Mechanism.parse("mapped").has("recycle")
    assert Mechanism.parse("mapped/align2m").one_of("align4k", "align16k", "align2m") == "align2m"
    assert Mechanism.parse("arena+pinned:a%2Bb").file_of("policy") == "a+b"
    assert Mechanism.parse("arena").file_of("policy") is None
