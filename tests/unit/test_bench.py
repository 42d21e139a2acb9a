"""The benchmark's arithmetic on records made by hand: figures, doubts, verdicts, the table."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moestream.box import page_cache
from moestream.box.page_cache import cached_bytes, drop, fill
from moestream.lab import bench_figures as figures
from moestream.lab.bench import todo
from moestream.lab.bench_arms import PROMPTS, Arm, arms
from moestream.lab.bench_table import Results, report, verdicts
from moestream.lab.runs import Setup, command
from moestream.lab.validity import judge, judge_all
from moestream.mechanism import Mechanism
from moestream.model import Model

PAGE = os.sysconf("SC_PAGE_SIZE")
ARMS = arms(small=1_000, large=2_000, everything=9_000, smallest=300, stock_tokens=4)


def record(
    arm: str, prompt: str = "prose", *, ms: float = 100.0, tokens: int = 10, **changes: Any
) -> dict[str, Any]:
    """A record of an arm whose every step takes ``ms``; its engine reads 10 MB a token and hits half."""
    chosen = next(a for a in ARMS if a.key == arm)
    streams = not chosen.is_stock and arm not in ("resident-free", "willneed-small")
    steps = tokens - 1
    seconds = ms * steps / 1e3
    phase = {
        "tokens": steps,
        "seconds": seconds,
        "step_ms": [ms] * steps,
        "hits": 4 * steps * streams,
        "misses": 4 * steps * streams,
        "bytes_read": 10_000_000 * steps * (streams or arm == "willneed-small"),
        "read_bytes_os": 20_000_000 * steps if chosen.is_stock else 10_000_000 * steps * streams,
        "stall_s": 0.3 * seconds,
        "compute_s": 0.6 * seconds,
        "memory_work_s": 0.1 * seconds,
    }
    effective = (
        "resident"
        if arm == "resident-free"
        else "stock"
        if chosen.is_stock
        else str(Mechanism.parse(chosen.mechanism or "arena"))
    )
    anon = (chosen.cap_bytes or 1_000) * 8 // 10
    budget = {"dense_bytes": 80, "boundary_bytes": 20, "other_bytes": 50_000_000, "margin_bytes": 20_000_000}
    document = {
        "box": {"cpus": 2, "ram_bytes": 8_000_000_000, "kernel": "6.1", "fs": "ext4"},
        "mechanism": {"effective": effective, "fallbacks": []},
        "decode": phase,
        "cpu_s": {"decode": 0.1 * steps},
        "load": {"bytes_read": 100, "read_bytes_os": 103},
        "memory": {"anon": anon - 1, "locked": 100},
        "peak_rss_bytes": 950,
        "n_batch": 512,
        "prompt_tokens": 40,
        "tokens": list(range(tokens)),
    }
    made = {
        "arm": arm,
        "asked": chosen.label,
        "cap_bytes": chosen.cap_bytes,
        "caged": chosen.cap_bytes is not None,
        "prompt": prompt,
        "threads": 2,
        "ctx": 512,
        "tokens": tokens,
        "commit": "0123456789abcdef",
        "modified": False,
        "date": "2030-01-02T03:04:05+00:00",
        "versions": {"llama-cpp-python": "1.2.3"},
        "model": {"name": "m.gguf", "bytes": 1_000_000},
        "cached_bytes_before": 0,
        "disk_bytes_per_s": 1e9,
        "returncode": 0,
        "error": "",
        "cage_peak_bytes": 990 if chosen.cap_bytes else None,
        "cage_anon_peak_bytes": anon if chosen.cap_bytes else None,
        "oom_kills": 0 if chosen.cap_bytes else None,
        "document": document if chosen.is_stock else document | {"budget": budget},
    }
    return made | changes


def test_figures_of_one_record() -> None:
    one = record("arena-small")
    assert figures.rate(one) == pytest.approx(10)
    assert figures.hit_rate(one) == 0.5
    assert figures.bytes_per_token(one) == 10_000_000
    assert figures.split_per_token("stall_s")(one) == pytest.approx(0.03)
    assert figures.cpu_per_token(one) == pytest.approx(0.1)
    assert figures.memory_work_per_gb(one) == pytest.approx(1.0)
    assert figures.cpu_beyond_compute_per_gb(one, 0.06) == pytest.approx(4.0)
    assert figures.own_bytes(one) == 70_000_000


@pytest.mark.parametrize(
    ("arm", "effective", "kernels", "read", "asked"),
    [
        ("stock-small", "stock", 20, 20, None),
        ("stock-small", "stock", None, None, None),
        ("willneed-small", "mapped+willneed", 4, 4, 10),
        ("willneed-small", "mapped+willneed", 0, 0, 10),
        # The counter does not move: what was asked for may have been cached.
        ("willneed-small", "mapped+willneed", None, None, 10),
        ("arena-small", "arena+uring:8", 11, 11, 10),
        ("arena-small", "arena+uring:8", None, 10, 10),
        ("arena-small", "arena/buffered+uring:8", None, None, 10),
        ("resident-free", "resident", None, 0, 0),
    ],
)
def test_read_is_what_the_device_gave_and_asked_is_another_figure(
    arm: str, effective: str, kernels: int | None, read: int | None, asked: int | None
) -> None:
    one = record(arm)
    document = one["document"]
    document["mechanism"]["effective"] = effective
    # Over nine tokens; a counter that moves has moved while the model was loaded.
    document["decode"]["read_bytes_os"] = (kernels or 0) * 9_000_000
    document["load"]["read_bytes_os"] = 0 if kernels is None else 103
    assert figures.bytes_per_token(one) == (None if read is None else read * 1_000_000)
    assert figures.asked_per_token(one) == (None if asked is None else asked * 1_000_000)


def test_stock_has_no_figure_of_an_engine() -> None:
    stock = record("stock-small")
    for nothing in (
        figures.hit_rate,
        figures.memory_work_per_gb,
        figures.split_per_token("stall_s"),
        figures.asked_per_token,
        figures.own_bytes,
    ):
        assert nothing(stock) is None
    assert figures.load_share(stock) is None


def test_a_rate_of_the_first_steps_only() -> None:
    one = record("arena-small")
    one["document"]["decode"]["step_ms"] = [200.0, 200.0, 50.0]
    assert figures.rate(one, 2) == pytest.approx(5)


def test_load_is_the_larger_of_two_accounts_and_only_judged_where_experts_stay_on_disk() -> None:
    one = record("arena-small")
    assert figures.load_share(one) == pytest.approx(1.03)
    one["document"]["load"]["read_bytes_os"] = 0
    assert figures.load_share(one) == pytest.approx(1.0)
    assert figures.load_share(record("resident-free")) is None


def test_held_memory_leaves_out_what_the_kernel_can_take_back() -> None:
    assert figures.held_bytes(record("arena-small")) == 800
    assert figures.held_bytes(record("willneed-small")) == 900
    assert figures.held_bytes(record("arena-small", cage_anon_peak_bytes=None)) == 950
    # What ran decides, not what was asked: locked pages of an arena are in its anonymous ones.
    fallen = record("willneed-small")
    fallen["document"]["mechanism"]["effective"] = "arena+sync"
    assert figures.held_bytes(fallen) == 800


@pytest.mark.parametrize(("compute_s", "floor"), [(0.005, 0.01), (0.05, 0.05)])
def test_the_floor_is_the_slower_of_compute_and_disk(compute_s: float, floor: float) -> None:
    assert figures.floor_s(record("arena-small"), compute_s, 1e9) == pytest.approx(floor)


def test_good_runs_are_valid() -> None:
    runs = judge_all([record("stock-small", tokens=4), record("arena-small"), record("stock-free")])
    assert [run["invalid"] for run in runs] == [[], [], []]
    assert all(run["valid"] for run in runs)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"document": None, "returncode": 3, "error": "too little"}, "failed: exit code 3: too little"),
        ({"oom_kills": 1}, "lost cap: the kernel killed 1 process"),
        ({"cached_bytes_before": 20_000_000}, "not cold: 20 MB of the model were cached"),
    ],
)
def test_one_run_is_not_valid(changes: dict[str, Any], says: str) -> None:
    (reason,) = judge(record("arena-small", **changes))
    assert says in reason


def test_an_uncapped_run_may_begin_warm() -> None:
    assert judge(record("stock-free", cached_bytes_before=10**9)) == []


def invalid(*records: dict[str, Any]) -> list[int]:
    """How many reasons each run has not to count."""
    return [len(run["invalid"]) for run in judge_all(records)]


def test_other_tokens_than_stocks_do_not_count_within_the_common_length_of_one_prompt() -> None:
    one, other, elsewhere = (
        record("stock-small", tokens=4),
        record("arena-small"),
        record("gate-small", "code"),
    )
    elsewhere["document"]["tokens"][0] = 99
    other["document"]["tokens"][5] = 99  # beyond what the first has
    assert invalid(one, other, elsewhere) == [0, 0, 0]
    other["document"]["tokens"][3] = 99
    assert invalid(other, one, elsewhere) == [1, 0, 0]
    (reason,) = judge_all([other, one])[0]["invalid"]
    assert reason == "other tokens: token 4 of prose differs from that of stock-small"


def test_without_stock_the_tokens_of_most_arms_are_right() -> None:
    odd, one, other = record("gate-small"), record("arena-small"), record("arena-large")
    odd["document"]["tokens"][2] = 99
    assert invalid(odd, one, other) == [1, 0, 0]


def test_a_prompt_in_other_steps_is_compared_with_its_like_only() -> None:
    one, other = record("arena-small"), record("arena-smallest")
    other["document"]["tokens"][0] = 99
    assert invalid(one, other) == [0, 1]
    other["document"]["n_batch"] = 8
    assert invalid(one, other) == [0, 0]


def complete(**ms: float) -> list[dict[str, Any]]:
    """Two prompts of every arm, with other times where given."""
    return [
        record(arm.key, prompt, ms=ms.get(arm.key.replace("-", "_"), 100.0), tokens=arm.tokens or 10)
        for prompt in ("prose", "code")
        for arm in ARMS
        if arm.prompts is None or prompt in arm.prompts
    ]


def met(records: list[dict[str, Any]]) -> list[bool | None]:
    return [verdict.met for verdict in verdicts(Results(records))]


def test_every_requirement_is_judged() -> None:
    good = complete(stock_small=1500.0, willneed_small=141.0, resident_free=40.0, stock_free=39.0)
    for one in good:
        one["document"]["decode"]["memory_work_s"] = 0.0
    assert met(good) == [True] * 9
    assert (
        met(complete(stock_small=1490.0, willneed_small=139.0, resident_free=32.0, stock_free=31.0))[:4]
        == [False] * 4
    )


def test_what_was_not_measured_is_not_judged() -> None:
    assert met([]) == [None] * 9
    assert met([record("arena-small")])[:4] == [None] * 4


def test_ratios_pair_the_prompts() -> None:
    slow = [record("stock-small", "prose", ms=1000), record("stock-small", "code", ms=3000)]
    fast = [
        record("arena-small", "prose", ms=100),
        record("arena-small", "code", ms=100),
        record("arena-small", "chat"),
    ]
    assert Results(slow + fast).ratio("arena-small", "stock-small") == pytest.approx(20)


def test_the_report_has_a_row_for_each_arm_that_ran() -> None:
    text, valid = report(ARMS, complete())
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert valid
    assert len(rows) == 1 + len(ARMS)
    assert len({line.count("|") for line in rows}) == 1
    assert "tokens are identical" in text.lower()
    text, valid = report(ARMS, [*complete(), record("arena-small", document=None, returncode=-9)])
    assert not valid
    assert "INVALID" in text


def test_a_report_of_nothing_is_not_valid() -> None:
    text, valid = report(ARMS, [])
    assert not valid
    assert "no run has a result" in text


def setup(tmp_path: Path, caged: bool = True) -> Setup:
    model = Model((), "llama", "", {}, (), (), 1, 1, 1, 1, 1, 1)
    return Setup(model, threads=2, ctx=512, batch=64, tokens=10, caged=caged, out=tmp_path)


def test_the_second_prompt_runs_in_reversed_order(tmp_path: Path) -> None:
    slots, left_out = todo(ARMS, setup(tmp_path), 10**12, "")
    keys = [slot.arm.key for slot in slots]
    only_prose = [arm.key for arm in ARMS]
    others = [key for key in only_prose if key != "arena-smallest"]
    assert keys == only_prose + others[::-1] + others
    assert [slot.position for slot in slots] == list(range(len(slots)))
    assert left_out == []


def test_arms_that_cannot_run_say_why(tmp_path: Path) -> None:
    slots, left_out = todo(ARMS, setup(tmp_path, caged=False), 10**12, "no cgroup")
    assert left_out == [
        "stock-small: only a memory cgroup caps it, no cgroup",
        "willneed-small: only a memory cgroup caps it, no cgroup",
    ]
    assert "arena-small" in {slot.arm.key for slot in slots}
    slots, left_out = todo(ARMS, setup(tmp_path), 1000, "")
    assert len(left_out) == 3
    assert all("does not fit" in text for text in left_out)
    assert all(slot.arm.cap_bytes is not None for slot in slots)


def test_prompts_fit_the_context_and_arms_have_names_of_their_own() -> None:
    assert all(len(text) < 512 for text in PROMPTS.values())
    assert len({arm.key for arm in ARMS}) == len(ARMS)


def test_the_page_cache_is_filled_and_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    fill([path])
    full = cached_bytes([path])
    if full is None:
        pytest.skip("this kernel does not tell what is cached (cachestat, Linux 6.5)")
    assert full == 1 << 20
    drop([path])
    after = cached_bytes([path])
    if after == full:
        pytest.skip("this file system keeps its pages (tmpfs)")
    assert after == 0


@pytest.fixture
def no_cachestat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel before 6.5."""

    def refuse(descriptor: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(page_cache._core, "cached_bytes", refuse)


@pytest.mark.usefixtures("no_cachestat")
def test_an_older_kernel_is_asked_page_by_page(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.write_bytes(bytes(1 << 20))
    fill(paths)
    assert cached_bytes(paths) == 2 << 20
    drop(paths)
    after = cached_bytes(paths)
    if after == 2 << 20:
        pytest.skip("this file system keeps its pages (tmpfs)")
    assert after == 0


@pytest.mark.usefixtures("no_cachestat")
def test_what_no_kernel_tells_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))

    def refused(path: Path, ranges: object) -> int:
        raise OSError(38, f"mincore of {path}")

    with monkeypatch.context() as patched:
        patched.setattr(page_cache, "resident_bytes", refused)
        assert cached_bytes([path]) is None
    # Of another user's file, mincore says that every page is there.
    monkeypatch.setattr(page_cache.os, "geteuid", lambda: path.stat().st_uid + 1)
    monkeypatch.setattr(page_cache.os, "access", lambda path, mode: False)
    assert cached_bytes([path]) is None


def test_the_engine_is_told_the_cap_and_stock_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "paths", property(lambda self: (Path("m.gguf"),)))
    words = {arm.key: command(setup(tmp_path), arm, "text", Path("out")) for arm in ARMS}
    capped = command(setup(tmp_path), Arm("capped", 1_000_000, None), "text", Path("out"))
    assert capped[capped.index("--ram") + 1] == str(1_000_000 // PAGE * PAGE)  # as a cgroup rounds it
    assert words["arena-free"][words["arena-free"].index("--ram") + 1] == "9000"
    assert "--ram" not in words["resident-free"]
    assert "--ram" not in words["stock-small"]
    assert words["stock-small"][words["stock-small"].index("-n") + 1] == "4"
    assert words["gate-small"][-1] == "arena+gate:1"


def test_a_run_ends_with_the_benchmark_that_is_stopped() -> None:
    # It names itself when it is first waited for: before that nobody watches it.
    script = (
        "import subprocess\n"
        "from moestream.lab import runs\n"
        "class Child(subprocess.Popen):\n"
        "    def wait(self, timeout=None):\n"
        "        print(self.pid, flush=True)\n"
        "        return super().wait(timeout)\n"
        "runs.end_on_sigterm()\n"
        "runs._watch(Child(['sleep', '600']), None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        child = Path("/proc") / bench.stdout.readline().strip()
        assert child.exists()
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(60) == 128 + signal.SIGTERM
    assert not child.exists()
