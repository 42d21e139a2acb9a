"""Every member of every family runs, on two architectures, and changes no bit: none can be listed and not be run.

The list is the program's own (``moestream.members``), so that a new member is tried without a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moestream
from answers import answer, prompt_tokens
from conftest import load, same_answer
from moestream.box import abilities
from moestream.lab.bench_engaged import broken_promises
from moestream.mechanism import Mechanism
from moestream.members import FAMILIES, GROUPS, Argument
from typed import typed

ARCHS = ("olmoe", "gpt-oss")
#: Two steps of a prompt and some of decoding, with few enough experts that most routes evict.
PROMPT_TOKENS = 90
#: Stores whose members are tried where a family does not say which store has it.
_STORE_OF = {
    "policy": ("arena", "mapped+willneed", "cow", "shared"),
    "predictor": ("arena", "mapped+willneed"),
    "dense": ("arena", "mapped", "resident"),
    "background": ("mapped+willneed", "mapped+pread"),
}


def _arguments(argument: Argument | None) -> list[str]:
    """What may stand behind a member's name, one of each kind."""
    if argument is None:
        return [""]
    if argument.file:
        return [":FILE"]
    if argument.choices:
        return [f":{choice}" for choice in argument.choices]
    number = str(max(argument.lowest, min(2, argument.highest)))
    return [f":{number}", f":{number}x4"] if argument.pieces else [f":{number}"]


def _texts() -> Iterator[str]:
    yield from ("resident", "mapped+fault", "mapped+willneed", "arena", "cow", "shared")
    for store, groups in GROUPS.items():
        reader = "+pread" if store == "mapped" else ""
        yield from (f"{store}/{word}{reader}" for group in groups for word in group[1:] if word)
    for family, members in FAMILIES.items():
        if family in ("store", "variant"):
            continue
        for name, member in members.items():
            for argument in _arguments(member.argument):
                yield from _placed(family, name + argument)


def _placed(family: str, part: str) -> Iterator[str]:
    stores = ("arena", "cow", "shared", "resident", "mapped") if family == "reader" else _STORE_OF[family]
    for store in stores:
        text = f"{store}+{part}"
        if part.startswith("none") and family == "predictor":
            text = f"{store}+none+none"
        try:
            Mechanism.parse(text.replace("FILE", "x"))
        except moestream.MechanismError:
            continue
        yield text


TEXTS = sorted(set(_texts()))


def test_every_member_is_tried() -> None:
    parsed = [Mechanism.parse(text.replace("FILE", "x")) for text in TEXTS]
    words = {
        "/".join((m.store, *m.variants)) + f"+{m.reader}+{m.policy}+{m.predictor}+{m.dense}" for m in parsed
    }
    for family, members in FAMILIES.items():
        for name in members:
            found = any(
                any(part.split(":")[0] == name for part in word.replace("/", "+").split("+"))
                or name == "pread+willneed"
                for word in words
            ) or any(m.has(name) for m in parsed)
            assert found, f"{family} {name} is listed and never run here"


@pytest.fixture(scope="module")
def seed_file(tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A trace of an architecture's model, or a fit of that trace."""
    directory = tmp_path_factory.mktemp("seeds")

    def get(arch: str, member: str) -> Path:
        trace = directory / f"{arch}.parquet"
        if not trace.exists():
            with load(tiny(arch), "arena+lru", trace=trace) as llama:
                answer(llama, prompt_tokens(20, llama.n_vocab(), 0), 150)
        if member != "ridge":
            return trace
        fit = directory / f"{arch}.npz"
        if not fit.exists():
            done = typed("fit", trace, "--out", fit)
            assert done.returncode == 0, done.stderr
        return fit

    return get


def _lacking(mechanism: Mechanism, directory: Path) -> str:
    tests = abilities.tests(directory)
    for family in ("store", "reader", "policy", "predictor", "dense"):
        name, _, argument = str(getattr(mechanism, family)).partition("+background")[0].partition(":")
        member = FAMILIES[family][name]
        needs = member.needs
        if member.argument is not None:
            needs += tuple(need for word, need in member.argument.needs if word == argument)
        for need in needs:
            if need != "cap" and (why := tests[need]()):
                return why
    return next(
        (
            why
            for word in mechanism.variants
            for need in FAMILIES["variant"][word].needs
            if (why := tests[need]())
        ),
        "",
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("text", TEXTS)
def test_no_bit_differs(text: str, arch: str, tiny, stock, seed_file, tmp_path: Path) -> None:
    path = tiny(arch)
    member = next((part.split(":")[0] for part in text.split("+") if part.endswith(":FILE")), "")
    if member:
        text = text.replace("FILE", str(seed_file(arch, member)))
    mechanism = Mechanism.parse(text)
    if why := _lacking(mechanism, path.parent):
        pytest.skip(why)
    with load(path, str(mechanism), i_know=True) as llama:
        assert llama.mechanism == mechanism
        same_answer(llama, stock, PROMPT_TOKENS)
        broken = set(broken_promises(mechanism, llama.engagement()))
        # A slab of the small models holds no whole 2 MiB page.
        assert broken <= {"bytes in huge pages at most"}
