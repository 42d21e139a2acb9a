"""docs/mechanisms: a page for each member and none besides, each with its four sections and an example that is one."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import typer

from moestream.cli.run import run
from moestream.mechanism import Mechanism
from moestream.members import FAMILIES, Member

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "mechanisms"
INDEX = PAGES / "README.md"
SECTIONS = ["What it does", "Why one would think it helps", "What it costs", "How we tell that it engaged"]
MEMBERS = [(family, name) for family, members in FAMILIES.items() for name in members]


def file_name(family: str, name: str) -> str:
    """Two families may have a member of the same name."""
    return f"{family}-{name.replace('+', '-')}.md"


def lines(family: str, name: str) -> list[str]:
    return (PAGES / file_name(family, name)).read_text(encoding="utf-8").rstrip("\n").split("\n")


def example(page: list[str]) -> list[str]:
    """The words of the page's one command line."""
    fences = [number for number, line in enumerate(page) if line.startswith("```")]
    assert len(fences) == 2, "one fenced example a page"
    command = page[fences[0] + 1 : fences[1]]
    assert len(command) == 1, command
    return shlex.split(command[0])


def part_of(mechanism: Mechanism, family: str) -> str:
    """The member of a family that a mechanism has; of a reader without what follows it."""
    reader, _, background = mechanism.reader.partition("+background:")
    if family == "background":
        return "background" if background else ""
    part = reader if family == "reader" else str(getattr(mechanism, family))
    return part.partition(":")[0]


def seen_and_needs(member: Member) -> str:
    argument = member.argument
    needs = [*member.needs, *(f"{need} ({word})" for word, need in (argument.needs if argument else ()))]
    return f"Seen in: {member.seen}. Needs: {', '.join(needs) or 'nothing'}."


def test_a_page_for_each_member_and_none_besides() -> None:
    expected = {file_name(family, name) for family, name in MEMBERS}
    assert len(expected) == len(MEMBERS)
    assert {path.name for path in PAGES.iterdir()} == expected | {INDEX.name}


@pytest.mark.parametrize(("family", "name"), MEMBERS)
def test_a_page_is_short_and_complete(family: str, name: str) -> None:
    page, member = lines(family, name), FAMILIES[family][name]
    shown = name + (member.argument.shown if member.argument else "")
    assert page[0] == f"# {family} `{shown}`"
    assert 10 <= len(page) <= 30
    assert [line for line in page if line.startswith("Seen in")] == [seen_and_needs(member)]
    headings = [number for number, line in enumerate(page) if line.startswith("## ")]
    assert [page[number].removeprefix("## ") for number in headings] == SECTIONS
    first = [page[number + 1] for number in headings]
    assert all(line and not line.startswith(("#", "```")) for line in first), "a section without text"
    assert max(map(len, page)) <= 130


@pytest.mark.parametrize(("family", "name"), MEMBERS)
def test_the_example_has_the_member(family: str, name: str) -> None:
    words = example(lines(family, name))
    assert words[:2] == ["moestream", "run"]
    app = typer.Typer()
    app.command()(run)
    options = typer.main.get_command(app).make_context("run", words[2:]).params
    mechanism = Mechanism.parse(options["mechanism"])
    if family == "variant":
        assert mechanism.has(name)
    else:
        assert part_of(mechanism, family) == name
    assert options["i_know"] == (mechanism.store == "cow"), "only what grows without bound needs --i-know"


def test_the_index_has_a_row_for_each_member() -> None:
    rows = re.findall(r"^\| \[.*", INDEX.read_text(encoding="utf-8"), re.MULTILINE)
    expected = []
    for family, name in MEMBERS:
        member = FAMILIES[family][name]
        shown = name + (member.argument.shown if member.argument else "")
        link = f"[`{shown}`]({file_name(family, name)})".replace("|", "\\|")
        expected.append(f"| {link} | {member.help} | {member.seen} |")
    assert sorted(rows) == sorted(expected)


def test_the_index_names_defaults_as_they_are() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\S+)` \|$", INDEX.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows == {store: str(Mechanism.parse(store)) for store in FAMILIES["store"]}


def test_what_pages_point_to_is_there() -> None:
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    core = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "core" / "src").rglob("*.cpp"))
    pointed = Counter[str]()
    for path in PAGES.iterdir():
        text = re.sub("^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for words in re.findall("`([^`]+)`", " ".join(text.split())):
            kind, there = "", True
            if re.fullmatch(r"test_\w+", words):
                kind, there = "test", words in tests
            elif re.fullmatch(r"(tests|tools|docs)/[\w./]+", words):
                kind, there = "file", (ROOT / words).exists()
            elif re.fullmatch("(?!moestream |not as asked)[a-z']+( [a-z']+)+", words):
                kind, there = "counter", f'"{words}"' in core
            assert there, f"{path.name} names the {kind} {words!r}, which there is not"
            pointed[kind] += 1
    assert min(pointed[kind] for kind in ("test", "file", "counter")) > 10
