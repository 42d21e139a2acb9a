"""What must hold of every run: bytes are accounted for, the cap is kept, what was asked for engaged, the file
is only read, and a model whose routes are not seen is an error."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import moestream
from answers import answer, prompt_tokens
from children import child_command, child_result, run_child
from conftest import load, same_answer, smallest_cap, told_otherwise
from moestream.box import Cage, process_memory
from moestream.geometry import slab_geometry

QUEUES = ("uring:1", "uring:8", "threads:2", "sync")


def model_descriptors(path: Path) -> dict[int, int]:
    """This process's open descriptors of a file, with their flags."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if entry.readlink() == path.resolve():
                found[int(entry.name)] = fcntl.fcntl(int(entry.name), fcntl.F_GETFL)
        except OSError:  # the descriptor that lists the directory
            continue
    return found


@pytest.mark.parametrize("reader", QUEUES)
@pytest.mark.parametrize("policy", ["none", "lru", "lru-layer", "lfu-decay:16"])
def test_bytes_read_are_the_misses(reader: str, policy: str, tiny) -> None:
    path = tiny("olmoe")
    with load(path, f"arena+{reader}+{policy}+none") as llama:
        answer(llama, prompt_tokens(40, llama.n_vocab()), 10)
        parts = slab_geometry(llama.model_info).parts
        assert len(parts) == 1
        counters = llama._engine.counters
        assert counters["misses"] > sum(llama.plan.capacities)
        assert counters["bytes"] == counters["misses"] * parts[0].frame_bytes
        steps = llama.stats()["since_load"]
        for name, counter in (("misses", "misses"), ("hits", "hits"), ("bytes_read", "bytes")):
            assert steps["prefill"][name] + steps["decode"][name] == counters[counter]


@pytest.mark.parametrize("reader", ["uring:8", "threads:2", "sync"])
def test_bytes_read_are_the_misses_of_two_parts(reader: str, tiny) -> None:
    path = tiny("olmoe", quant="Q4_K_M")
    with load(path, f"arena+{reader}+lru+none") as llama:
        answer(llama, prompt_tokens(40, llama.n_vocab()), 10)
        small, large = sorted(part.frame_bytes for part in slab_geometry(llama.model_info).parts)
        counters = llama._engine.counters
        # Two sizes and two unknowns: how many misses were of the larger size is then a whole number.
        of_large, rest = divmod(counters["bytes"] - counters["misses"] * small, large - small)
        assert rest == 0
        assert max(llama.plan.capacities) < of_large < counters["misses"] - max(llama.plan.capacities)


def test_the_device_read_what_the_engine_says(tiny) -> None:
    with load(tiny("olmoe"), "arena+uring:8+lru") as llama:
        fallbacks = [line for line in llama.fallbacks if "O_DIRECT" in line]
        if fallbacks:
            pytest.skip(fallbacks[0])
        answer(llama, prompt_tokens(40, llama.n_vocab()), 10)
        total = llama.stats()["since_load"]
        for name in ("bytes_read", "read_bytes_os"):
            total[name] = total["prefill"][name] + total["decode"][name]
        if total["read_bytes_os"] == 0:
            pytest.skip("this kernel keeps no account of a process's reads")
        assert total["bytes_read"] <= total["read_bytes_os"] <= 1.05 * total["bytes_read"] + (1 << 20)


def test_speculation_is_accounted(tiny) -> None:
    with load(tiny("olmoe"), "arena+uring:8+lru+gate:3", experts=8 << 20) as llama:
        answer(llama, prompt_tokens(20, llama.n_vocab()), 40)
        counters = llama._engine.counters
        frame = slab_geometry(llama.model_info).parts[0].frame_bytes
        assert counters["speculative_issued"] > 0
        assert 0 < counters["speculative_used"] <= counters["speculative_issued"]
        most = (counters["misses"] + counters["speculative_issued"]) * frame
        assert counters["misses"] * frame <= counters["bytes"] <= most


@pytest.mark.parametrize("mechanism", ["arena", "arena+sync+lru", "arena/buffered+threads:2+none"])
def test_a_step_of_a_prompt_reads_no_expert_twice(mechanism: str, tiny) -> None:
    """Its tokens want nearly all experts of each layer and the budget holds a part of them: one pass over the model."""
    with load(tiny("olmoe"), mechanism, experts=16 << 20) as llama:
        everything = sum(part.experts for part in slab_geometry(llama.model_info).parts)
        most = 0
        for seed in range(3):
            before = read_so_far(llama)
            llama.reset()
            llama.eval(prompt_tokens(llama.n_batch, llama.n_vocab(), seed))
            most = max(most, read_so_far(llama) - before)
        assert sum(llama.plan.capacities) < most <= everything


def read_so_far(llama: moestream.Llama) -> int:
    """Experts, on demand or early."""
    counters = llama._engine.counters
    return int(counters["misses"] + counters["speculative_issued"])


@pytest.mark.parametrize("store", ["arena", "mapped+willneed+anon", "resident"])
def test_load_reads_no_more_than_it_must(store: str, tiny) -> None:
    with load(tiny("olmoe"), store) as llama:
        geometry = slab_geometry(llama.model_info)
        whole = llama.model_info.bytes
        expected = whole if store == "resident" else geometry.resident_bytes
        assert llama.stats()["load"]["bytes_read"] == expected
        assert store == "resident" or expected < whole / 4


@cache
def smallest_alone(path: Path, mechanism: str) -> int:
    """The least cap of a process that does nothing else."""
    return int(run_child(path, 1, mechanism)["smallest_bytes"])


@pytest.mark.parametrize("share", [1.0, 1.2])
@pytest.mark.parametrize(
    "mechanism",
    [
        "arena+uring:8+lfu-decay:16+gate:1",
        "arena+threads:2+lru",
        "arena/buffered",
        "arena/fresh",
        "arena/populate+sync",
        "arena/thp/align2m+threads:2",
    ],
)
def test_cap_is_kept(mechanism: str, share: float, tiny, stock) -> None:
    available, why = Cage.available()
    if not available:
        pytest.skip(f"no memory cgroup: {why}")
    path = tiny("olmoe", "tiny,experts=64,layers=8,ff=1024")
    cap = int(smallest_alone(path, mechanism) * share)
    with Cage(cap) as cage:
        command = child_command(path, cap, mechanism, length=40)
        done = cage.run(command, capture_output=True, text=True, check=False)
        assert cage.oom_kills() in (0, None)
    result = child_result(done)
    assert "error" not in result, result
    assert result["counters"]["misses"] > sum(result["capacities"])
    assert result["peak_anon_bytes"] <= cap
    expected = stock(path, prompt_tokens(40, 320), 6, 2, result["n_batch"], result["n_batch"])
    assert tuple(result["digests"]) == expected.digests


@pytest.mark.parametrize("reader", ["sync", "uring:32"])
def test_cow_stops_before_an_enforced_cap(reader: str, tiny) -> None:
    """What it wrote stays, so memory grows past every budget: it ends by itself, and nothing has to be killed."""
    available, why = Cage.available()
    if not available:
        pytest.skip(f"no memory cgroup: {why}")
    path = tiny("olmoe", "tiny,experts=64,layers=8,ff=1024")
    mechanism = f"cow+{reader}+lru"
    with Cage(1 << 30) as cage:
        asked = cage.run(child_command(path, 1, mechanism), capture_output=True, text=True)
    cap = int(child_result(asked)["smallest_bytes"] * 1.1)
    with Cage(cap) as cage:
        done = cage.run(
            child_command(path, cap, mechanism, length=100, steps=200), capture_output=True, text=True
        )
        assert cage.oom_kills() in (0, None)
        peak = cage.peak_bytes()
    assert "keeps every page it has written" in child_result(done)["text"]
    assert peak is None or peak <= cap


def test_shared_keeps_an_enforced_cap(tiny, stock) -> None:
    available, why = Cage.available()
    if not available:
        pytest.skip(f"no memory cgroup: {why}")
    path = tiny("olmoe", "tiny,experts=64,layers=8,ff=1024")
    cap = int(smallest_alone(path, "shared+sync+lru") * 1.2)
    with Cage(cap) as cage:
        done = cage.run(
            child_command(path, cap, "shared+sync+lru", length=40), capture_output=True, text=True
        )
        assert cage.oom_kills() in (0, None)
    result = child_result(done)
    assert "error" not in result, result
    expected = stock(path, prompt_tokens(40, 320), 6, 2, result["n_batch"], result["n_batch"])
    assert tuple(result["digests"]) == expected.digests


def test_cap_is_kept_while_a_trace_is_recorded(tiny, tmp_path: Path) -> None:
    available, why = Cage.available()
    if not available:
        pytest.skip(f"no memory cgroup: {why}")
    path = tiny("olmoe", "tiny,experts=64,layers=8,ff=1024")
    words = [sys.executable, "-m", "moestream", "run", str(path), "-p", "Once", "-n", "200", "--ctx", "512"]
    words += ["--mechanism", "arena", "--trace", str(tmp_path / "t.parquet"), "--quiet"]
    refused = subprocess.run([*words, "--ram", "1MB"], capture_output=True, text=True, check=False)
    smallest = re.search(r"the smallest cap that works is (\d+)MB", refused.stderr)
    assert smallest is not None, refused.stderr
    with Cage(int(smallest[1]) * 10**6) as cage:
        done = cage.run(
            [*words, "--ram", f"{smallest[1]}MB"], capture_output=True, text=True, errors="replace"
        )
        assert cage.oom_kills() in (0, None)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t.parquet").exists()


def test_below_the_smallest_cap_is_refused_with_the_number(tiny) -> None:
    path = tiny("olmoe")
    smallest = smallest_cap(path, "arena")
    with pytest.raises(moestream.BudgetError, match="smallest cap that works is"):
        moestream.Llama(path, ram=smallest - 1_000_000, mechanism="arena")


def test_close_gives_the_memory_back(tiny) -> None:
    path = tiny("olmoe")
    load(path, "arena", experts=32 << 20).close()
    before = process_memory().anon_bytes
    for _ in range(3):
        llama = load(path, "arena", experts=32 << 20)
        assert process_memory().anon_bytes - before > 24 << 20
        llama.close()
    assert process_memory().anon_bytes - before < 4 << 20
    assert not model_descriptors(path)


def test_io_uring_engages(tiny) -> None:
    def rings() -> int:
        count = 0
        for entry in Path("/proc/self/fd").iterdir():
            if entry.is_symlink():
                count += "io_uring" in str(entry.readlink())
        return count

    before = rings()
    with load(tiny("olmoe"), "arena+uring:8") as llama:
        if any("io_uring" in line for line in llama.fallbacks):
            pytest.skip(llama.fallbacks[0])
        assert rings() == before + 1
    with load(tiny("olmoe"), "arena+threads:2"):
        assert rings() == before


def test_direct_and_buffered_engage(tiny) -> None:
    path = tiny("olmoe")
    with load(path, "arena") as llama:
        if any("O_DIRECT" in line for line in llama.fallbacks):
            pytest.skip(llama.fallbacks[0])
        assert any(flags & os.O_DIRECT for flags in model_descriptors(path).values())
    with load(path, "arena/buffered"):
        assert not any(flags & os.O_DIRECT for flags in model_descriptors(path).values())


def test_threads_engage(tiny) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    path = tiny("olmoe")
    with load(path, "arena+sync"):
        before = count()
    with load(path, "arena+threads:7"):
        assert count() == before + 7


@pytest.mark.parametrize("store", ["arena", "mapped+willneed", "resident"])
def test_mlock_engages(store: str, tiny) -> None:
    with load(tiny("olmoe"), f"{store}+mlock") as llama:
        if any("mlock" in line for line in llama.fallbacks):
            pytest.skip(llama.fallbacks[0])
        resident = slab_geometry(llama.model_info).resident_bytes
        locked = process_memory().locked_bytes
        assert locked >= (llama.model_info.bytes if store == "resident" else resident)


@pytest.mark.parametrize("reader", ["willneed", "pread", "pread+willneed"])
def test_warmers_spare_the_faults(reader: str, tiny, tmp_path: Path) -> None:
    """Started from an empty page cache, a warmed slab's pages are found in it; faults find none."""

    def faults(mechanism: str) -> int:
        path = tmp_path / "cold.gguf"
        shutil.copy(tiny("olmoe"), path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with load(path, mechanism) as llama:
            answer(llama, prompt_tokens(1, llama.n_vocab()), 8)
            return sum(step.majflt for step in llama._recorder.all.steps)

    assert faults(f"mapped+{reader}+anon") <= faults("mapped+fault+anon") // 2


@pytest.mark.parametrize(
    "mechanism",
    ["resident", "mapped+fault", "mapped+pread+willneed+anon", "arena", "cow+sync+lru", "shared+sync+lru"],
)
def test_the_file_is_only_read(mechanism: str, tiny) -> None:
    path = tiny("olmoe")
    before = hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns
    with load(path, mechanism, i_know=True) as llama:
        answer(llama, prompt_tokens(9, llama.n_vocab()), 3)
        descriptors = model_descriptors(path)
        assert descriptors
        assert all(flags & os.O_ACCMODE == os.O_RDONLY for flags in descriptors.values())
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
        assert not any("w" in line.split()[1] and "s" in line.split()[1] for line in mapped)
        assert bool(mapped) == mechanism.startswith(("mapped", "cow"))
    assert before == (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns)


@pytest.mark.parametrize("mechanism", ["arena", "mapped+willneed", "resident"])
def test_no_weight_is_repacked(mechanism: str, tiny, capfd: pytest.CaptureFixture[str]) -> None:
    """A repacked expert would be a copy in memory. llama.cpp's log names its buffers; stock's own default repacks."""
    from moestream.binding import llama_cpp

    path = tiny("olmoe")
    llama_cpp.Llama(str(path), n_ctx=64, verbose=True).close()
    if "CPU_REPACK model buffer" not in capfd.readouterr().err:
        pytest.skip("this llama.cpp repacks nothing on this processor")
    with load(path, mechanism, verbose=True):
        buffers = re.findall(r"(\S+) model buffer size", capfd.readouterr().err)
    assert set(buffers) == {"CPU_Mapped"}


def test_a_layer_that_is_never_routed_is_an_error(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def ghost(arguments: dict[str, Any]) -> None:
        arguments["layers"].append(99)
        arguments["optional_banks"].append(False)
        arguments["tensors"].append(("ghost", len(arguments["layers"]) - 1, 0, 0, 16, 2))

    told_otherwise(monkeypatch, ghost)
    with load(tiny("olmoe"), "arena+lru") as llama, pytest.raises(moestream.MoestreamError) as raised:
        llama.eval([1, 2, 3])
    assert "layer 99 was routed 0 times" in str(raised.value)


@pytest.mark.parametrize("experts_mb", [2, 16])
def test_routes_that_are_not_seen_read_the_layer_whole_or_fail(
    experts_mb: int, tiny, stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename_layers(arguments: dict[str, Any]) -> None:
        arguments["layers"] = [layer + 100 for layer in arguments["layers"]]
        arguments["optional_banks"] = [True] * len(arguments["layers"])

    told_otherwise(monkeypatch, rename_layers)
    with load(tiny("olmoe"), "arena+lru", experts=experts_mb << 20) as llama:
        if experts_mb == 16:
            same_answer(llama, stock, 7)
            return
        with pytest.raises(moestream.MoestreamError, match="needs 32 experts at once and the budget holds"):
            llama.eval([1, 2, 3])


def test_a_plan_says_what_it_gave(tiny) -> None:
    with load(tiny("olmoe"), "arena", experts=8 << 20) as llama:
        plan = llama.plan
        assert plan.expert_bytes == slab_geometry(llama.model_info).bytes_of(plan.capacities)
        split = dataclasses.asdict(plan)
        parts = ("dense", "boundary", "kv", "compute", "other", "margin", "expert")
        assert sum(split[f"{part}_bytes"] for part in parts) <= plan.cap_bytes
