"""Every doubt is raised by what it is about and by nothing else; every reason a run has not to count, likewise."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench_records import ARMS, BOX, CAP, DEFAULT, MS, PROMPTS, SLOW, STOCK_ARM, Mock, Silent, setup
from moestream.lab.bench_arms import Arm
from moestream.lab.bench_doubts import Doubt, Kind, Typed, doubts
from moestream.lab.bench_engaged import MAY_BE_ZERO, broken_promises
from moestream.lab.bench_session import Asked, make_runs
from moestream.lab.schedule import schedule
from moestream.lab.validity import Reason, judge, judge_all
from moestream.mechanism import Mechanism

Record = dict[str, Any]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Record]]:
    """The setup and the records of a benchmark that nothing disturbed, of code as it was committed."""
    out = tmp_path_factory.mktemp("bench") / "out"
    out.mkdir()
    asked = Asked(setup(out), ARMS, 4, "default", CAP, "1GiB", "moestream bench m.gguf --ram 1GiB")
    slots = schedule(ARMS, list(PROMPTS), 4, "default")
    records = make_runs(asked.setup, slots, [], Silent(), Mock())
    return asked.document(BOX), [{**record, "modified": False} for record in records]


def found(
    quiet: tuple[dict[str, Any], list[Record]],
    change: Callable[[int, Record], Record] = lambda number, record: record,
    noise: float | None = 0.01,
    ceiling: bool = True,
    **asked: Any,
) -> list[Doubt]:
    document, records = quiet
    changed = judge_all([change(number, record) for number, record in enumerate(records)])
    return doubts({**document, **asked}, changed, noise, has_ceiling=ceiling)


def conditions(**values: Any) -> Callable[[int, Record], Record]:
    """Every tenth run under other conditions."""

    def change(number: int, record: Record) -> Record:
        return {**record, "conditions": {**record["conditions"], **values}} if number % 10 == 0 else record

    return change


def phase(**values: Any) -> Callable[[int, Record], Record]:
    def change(number: int, record: Record) -> Record:
        document = record["document"]
        return {**record, "document": {**document, "decode": {**document["decode"], **values}}}

    return change


def test_a_quiet_benchmark_has_none(quiet: tuple[dict[str, Any], list[Record]]) -> None:
    assert found(quiet) == []


def assert_can_be_typed(text: str) -> None:
    """A command of a shell, or a sentence with such commands between backticks."""
    for command in text.split("`")[1::2] or [text]:
        first, *words = shlex.split(command)
        assert first in ("moestream", "sudo", "git", "top", "fuser", "iostat")
        assert "bench" not in words or words[words.index("--out") + 1] == "out"
        assert not set(words) & {"or", "and", "then"}


@pytest.mark.parametrize("reason", list(Reason))
def test_a_reason_names_what_to_type(quiet: tuple[dict[str, Any], list[Record]], reason: Reason) -> None:
    typed = Typed(
        "moestream bench '/my models/m.gguf' --out /tmp/out", "'/my models/m.gguf'", "'/my models/m.gguf'"
    )
    record = {**quiet[1][0], "valid": False, "invalid": [reason.of("it broke")]}
    document = {**quiet[0], "out": "/tmp/out"}
    seen = doubts(document, [record, *quiet[1][1:]], 0.01, has_ceiling=True, typed=typed)
    (doubt,) = (doubt for doubt in seen if doubt.kind is Kind.EXCLUDED)
    commands = doubt.next.split("`")[1::2] or [doubt.next]
    for command in commands:
        words = shlex.split(command)
        assert words[0] in ("moestream", "sudo", "fuser")
        assert "bench" not in words or words[words.index("--out") + 1] == "/tmp/out"
        assert "/my models/m.gguf" in words or words == ["moestream", "mechanisms"]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Kind.OTHER_LOAD, conditions(other_cpu_share=0.11)),
        (Kind.STOLEN, conditions(stolen_share=0.03)),
        (Kind.THROTTLED, conditions(throttled=1)),
        (Kind.EXCLUDED, conditions(swapped_bytes=9 << 20)),
        (Kind.DISK_SPREAD, lambda n, record: {**record, "disk_bytes_per_s": 1e9 if n else 1.51e9}),
        (Kind.FILE_SYSTEM, lambda n, record: {**record, "box": {**record["box"], "fs": "zfs"}}),
        (Kind.COLD_UNKNOWN, lambda n, record: {**record, "cached_bytes_before": None}),
        (Kind.COUNTER_STUCK, phase(read_bytes_os=0)),
        (Kind.COUNTER_STUCK, lambda n, record: {**record, "read_source": "device"}),
        (Kind.MODIFIED, lambda n, record: {**record, "modified": n == 3}),
        (Kind.RUN_DRIFT, phase(step_ms=[100.0] * 10 + [150.0] * 6)),
    ],
)
def test_a_disturbed_benchmark_has_the_one_doubt_that_names_it(
    quiet: tuple[dict[str, Any], list[Record]], kind: Kind, change: Callable[[int, Record], Record]
) -> None:
    seen = found(quiet, change)
    assert {doubt.kind for doubt in seen} == {kind}
    for doubt in seen:
        assert doubt.text
        assert_can_be_typed(doubt.next)


@pytest.mark.parametrize(
    "change",
    [
        conditions(other_cpu_share=0.10),
        conditions(stolen_share=0.02),
        conditions(swapped_bytes=8 << 20),
        conditions(**dict.fromkeys(("other_cpu_share", "stolen_share", "throttled", "swapped_bytes"))),
        lambda n, record: {**record, "disk_bytes_per_s": 1e9 if n else 1.5e9},
        phase(step_ms=[100.0] * 10 + [133.0] * 6),
    ],
)
def test_at_the_threshold_there_is_none(
    quiet: tuple[dict[str, Any], list[Record]], change: Callable[[int, Record], Record]
) -> None:
    assert found(quiet, change) == []


def test_noise_and_ceiling(quiet: tuple[dict[str, Any], list[Record]]) -> None:
    assert [doubt.kind for doubt in found(quiet, noise=None)] == [Kind.NO_NOISE_FLOOR]
    assert found(quiet, noise=0.10) == []
    assert [doubt.kind for doubt in found(quiet, noise=0.11)] == [Kind.NOISY]
    (doubt,) = found(quiet, ceiling=False)
    assert (doubt.kind, doubt.next) == (Kind.NO_CEILING, "moestream probe --model m.gguf")


def test_too_little_of_it(quiet: tuple[dict[str, Any], list[Record]]) -> None:
    asked, records = quiet
    few = [record for record in records if record["round"] < 2]
    (doubt,) = found((asked, few))
    assert doubt.kind is Kind.FEW_REPEATS
    assert doubt.next == "moestream bench m.gguf --ram 1GiB --out out --resume --repeats 4"
    one = [record for record in records if record["prompt"] == "one"]
    assert [doubt.kind for doubt in found((asked, one))] == [Kind.FEW_PROMPTS]


def test_a_cap_that_is_not_the_kernels(quiet: tuple[dict[str, Any], list[Record]]) -> None:
    asked, records = quiet
    free = [{**record, "caged": False} for record in records if record["arm"] in ("default", "resident")]
    seen = found((asked, free), caged=False)
    assert Kind.CAP_NOT_ENFORCED in {doubt.kind for doubt in seen}
    assert "24 runs" in seen[0].text


def test_a_default_that_fell_back_does_not_count_and_is_told_once(
    quiet: tuple[dict[str, Any], list[Record]],
) -> None:
    def fallen(number: int, record: Record) -> Record:
        if record["arm"] != "default":
            return record
        document = record["document"]
        said = f"io_uring is refused here (try {number}): threads:4 instead"
        return {
            **record,
            "document": {**document, "mechanism": {**document["mechanism"], "fallbacks": [said]}},
        }

    (doubt,) = found(quiet, fallen)
    assert doubt.kind is Kind.EXCLUDED
    assert doubt.text.startswith("24 runs of default excluded, fell back: io_uring is refused here")
    assert doubt.next == "moestream mechanisms"


def test_one_fault_of_many_arms_is_one_doubt(quiet: tuple[dict[str, Any], list[Record]]) -> None:
    def broken(number: int, record: Record) -> Record:
        if record["prompt"] != "two":
            return record
        return {
            **record,
            "document": None,
            "returncode": 4,
            "error": f"Traceback\n  line\nError {number}: gone",
        }

    seen = [doubt for doubt in found(quiet, broken) if doubt.kind is Kind.EXCLUDED]
    assert len(seen) == 1
    assert seen[0].text == (
        f"20 runs of default, resident, {SLOW.key} and 1 more excluded, failed: exit code 4: Error 5: gone"
    )


def test_tokens_that_nothing_can_be_compared_with(quiet: tuple[dict[str, Any], list[Record]]) -> None:
    def alone(number: int, record: Record) -> Record:
        if record["arm"] != SLOW.key:
            return record
        return {**record, "document": {**record["document"], "n_batch": 4}}

    (doubt,) = found(quiet, alone)
    assert doubt.kind is Kind.NOT_COMPARED
    assert SLOW.key in doubt.text


def one(quiet: tuple[dict[str, Any], list[Record]], arm: Arm, **changes: Any) -> list[str]:
    """The reasons of a run of ``arm``; keys of the document with ``document__`` before them."""
    record = next(record for record in quiet[1] if record["arm"] == arm.key)
    inner = {key.removeprefix("document__"): value for key, value in changes.items() if "__" in key}
    outer = {key: value for key, value in changes.items() if "__" not in key}
    return judge({**record, **({"document": {**record["document"], **inner}} if inner else {}), **outer})


def mechanism(arm: Arm, **changes: Any) -> dict[str, Any]:
    return {"asked": arm.mechanism, "effective": arm.mechanism, "fallbacks": [], "engaged": {}, **changes}


_IDLE = {"bytes_read": 0, "hits": 0, "tokens": 16, "step_ms": [1.0] * 16}


@pytest.mark.parametrize(
    ("arm", "changes", "reason"),
    [
        (DEFAULT, {"cage_peak_bytes": CAP + (2 << 20)}, "lost cap: its cgroup held"),
        (DEFAULT, {"document__box": {**BOX, "limit_bytes": CAP + 1}}, "lost cap: inside its cgroup"),
        (STOCK_ARM, {"caged": False}, "lost cap: no memory cgroup held it"),
        (SLOW, {"caged": False}, "lost cap: no memory cgroup held it"),
        (DEFAULT, {"caged": False, "document__peak_rss_bytes": int(1.2 * CAP)}, "lost cap: 1288490188 bytes"),
        (SLOW, {"document__mechanism": mechanism(SLOW, fallbacks=["no mlock"])}, "fell back: no mlock"),
        (SLOW, {"document__mechanism": mechanism(SLOW, effective="arena")}, "fell back: arena ran"),
        (SLOW, {"document__decode": _IDLE}, "inactive: willneed asked for nothing"),
        (
            SLOW,
            {"document__mechanism": mechanism(SLOW, engaged={"advice calls": 0})},
            "inactive: advice calls: 0",
        ),
        (
            SLOW,
            {"document__mechanism": mechanism(SLOW, engaged={"advice calls": 0, "bytes copied": 5})},
            "inactive: advice calls: 0 of mapped+willneed",
        ),
        (
            SLOW,
            {
                "document__mechanism": mechanism(
                    SLOW, engaged={"advice calls": 5, "experts asked for early": 0}
                )
            },
            "inactive: experts asked for early: 0",
        ),
        (
            DEFAULT,
            {
                "document__mechanism": mechanism(
                    DEFAULT, effective="arena", engaged={"pieces read": 5, "bytes moved": 0}
                )
            },
            "inactive: bytes moved: 0 of arena",
        ),
        (
            DEFAULT,
            {
                "document__mechanism": mechanism(
                    DEFAULT, effective="mapped+fault+dontneed:0", engaged={"bytes dropped after use": 0}
                )
            },
            "inactive: bytes dropped after use: 0 of mapped+fault",
        ),
        (
            DEFAULT,
            {"document__mechanism": mechanism(DEFAULT, effective="arena", fallbacks=["no io_uring"])},
            "fell back: no io_uring",
        ),
        (
            SLOW,
            {
                "document": None,
                "returncode": 3,
                "error": "not as asked: tiered: O_DIRECT is refused on m.gguf",
            },
            "fell back: tiered: O_DIRECT is refused",
        ),
        (
            SLOW,
            {"document": None, "returncode": 3, "error": "load\nnot as asked (--strict): mlock is refused"},
            "fell back: mlock is refused",
        ),
        (SLOW, {"document": None, "returncode": 3, "error": "m.gguf: is truncated"}, "failed: exit code 3"),
        (SLOW, {"cached_bytes_before": CAP}, "not cold: 1074 MB"),
        (SLOW, {"document__tokens": [1, 2]}, "empty output: 2 of 17 tokens"),
        (SLOW, {"conditions": {"swapped_bytes": 10**9}}, "swapped: the machine swapped 1000 MB"),
        (SLOW, {"oom_kills": 1}, "lost cap: the kernel killed 1 process"),
    ],
)
def test_why_a_run_does_not_count(
    quiet: tuple[dict[str, Any], list[Record]], arm: Arm, changes: dict[str, Any], reason: str
) -> None:
    (said,) = one(quiet, arm, **changes)
    assert said.startswith(reason)


@pytest.mark.parametrize(
    ("arm", "changes"),
    [
        (DEFAULT, {"cage_peak_bytes": CAP + (1 << 20)}),
        (DEFAULT, {"caged": False}),
        (DEFAULT, {"cage_peak_bytes": None}),
        (SLOW, {"cached_bytes_before": CAP, "warm": True}),
        (SLOW, {"conditions": {}}),
        (SLOW, {"cached_bytes_before": None}),
        (SLOW, {"document__mechanism": mechanism(SLOW, engaged=dict.fromkeys(MAY_BE_ZERO, 0))}),
        (
            DEFAULT,
            {
                "document__mechanism": mechanism(
                    DEFAULT,
                    effective="arena",
                    engaged={"bytes moved": 5, "bytes dropped": 0, "bytes populated": 0},
                )
            },
        ),
    ],
)
def test_what_is_no_reason(
    quiet: tuple[dict[str, Any], list[Record]], arm: Arm, changes: dict[str, Any]
) -> None:
    assert one(quiet, arm, **changes) == []


@pytest.mark.parametrize(
    ("text", "counter"),
    [
        ("arena", "bytes moved"),
        ("arena", "pieces read"),
        ("arena/populate", "bytes populated"),
        ("arena/thp", "bytes in huge pages at most"),
        ("arena+dontneed:0", "bytes dropped"),
        ("mapped+willneed+dontneed:0", "bytes dropped after use"),
        ("mapped/random+willneed", "bytes of the mapping advised"),
        ("mapped+tiered", "reads past the page cache"),
        ("mapped+hybrid:mincore", "residency questions"),
        ("cow", "bytes copied"),
        ("cow/huge", "huge staging bytes"),
    ],
)
def test_a_promised_counter_that_stays_0_is_a_broken_promise(text: str, counter: str) -> None:
    wanted = Mechanism.parse(text)
    assert broken_promises(wanted, {counter: 0, "another": 1}) == [counter]
    assert broken_promises(wanted, {counter: 1}) == []


@pytest.mark.parametrize(
    ("text", "counter"),
    [("arena/fresh", "bytes moved"), ("arena/fresh", "bytes dropped"), ("cow", "huge staging bytes")],
)
def test_a_counter_that_another_member_moves_promises_nothing(text: str, counter: str) -> None:
    assert broken_promises(Mechanism.parse(text), {counter: 0}) == []


def test_drift_is_told_with_its_direction(quiet: tuple[dict[str, Any], list[Record]], tmp_path: Path) -> None:
    mock = Mock(lambda arm, number: MS[arm.key] * (1.25 if number < 30 else 1.0))
    records = make_runs(setup(tmp_path), schedule(ARMS, list(PROMPTS), 4, "default"), [], Silent(), mock)
    clean = [{**record, "modified": False} for record in records]
    (doubt,) = found((quiet[0], clean))
    assert doubt.kind is Kind.DRIFT
    assert "25 % faster" in doubt.text
