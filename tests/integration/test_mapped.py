"""The mapped store's members as a user runs them: the answer is stock's, what was asked for was done, and a file that
shrinks or a system that refuses ends in one clear line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import moestream
from answers import answer, prompt_tokens
from conftest import load, same_answer
from moestream.box import abilities
from moestream.trace import TraceBuilder

#: Three steps of 64 and some of decoding.
PROMPT_TOKENS = 150
READERS = (
    "willneed",
    "readahead",
    "fadvise",
    "pread",
    "pread:2x4",
    "pread+willneed:4x2",
    "hybrid:mincore",
    "hybrid:cachestat",
    "tiered",
    "memcpy",
    "memcpy:2x3",
    "willneed+background:1",
    "pread:2x2+background:2",
    "memcpy+background:2",
    "hybrid+background:3",
)
#: What of each reader's counters must have moved.
ENGAGED = {
    "willneed": "advice calls",
    "readahead": "advice calls",
    "fadvise": "advice calls",
    "pread": "preads",
    "pread+willneed": "advice calls",
    "hybrid": "residency questions",
    "tiered": "reads past the page cache",
    "memcpy": "copies",
}


def skip_unless_able(text: str, path: Path) -> None:
    tests = abilities.tests(path.parent)
    for word, need in (("cachestat", "cachestat"), ("tiered", "o_direct"), ("huge", "huge")):
        if word in text and (why := tests[need]()):
            pytest.skip(why)


@pytest.fixture
def copy(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny("olmoe"), tmp_path / "model.gguf"))


@pytest.mark.parametrize("reader", READERS)
def test_the_answer_is_stock_s_and_the_reader_did_it(reader: str, tiny, stock) -> None:
    path = tiny("olmoe")
    skip_unless_able(reader, path)
    with load(path, f"mapped+{reader}", strict=True) as llama:
        same_answer(llama, stock, PROMPT_TOKENS)
        engagement = llama._engine.engagement
        assert engagement[ENGAGED[reader.partition("+background")[0].partition(":")[0]]] > 0
        if "background" in reader:
            assert engagement["slabs asked for in the background"] > 0
        assert not llama.fallbacks


@pytest.mark.parametrize("dense", ["mapped", "mlock", "anon"])
@pytest.mark.parametrize("reader", ["fault", "pread:2x2", "tiered", "memcpy+background:1"])
def test_pages_dropped_after_use_change_nothing(reader: str, dense: str, tiny, stock) -> None:
    path = tiny("olmoe")
    skip_unless_able(reader, path)
    with load(path, f"mapped/random+{reader}+dontneed:2+{dense}") as llama:
        same_answer(llama, stock, PROMPT_TOKENS)
        assert llama._engine.engagement["bytes dropped after use"] > 0


@pytest.mark.parametrize(
    "reader", ["willneed", "pread", "tiered", "hybrid", "memcpy:2", "pread+background:2"]
)
def test_what_a_predictor_names_is_asked_for(reader: str, tiny, stock) -> None:
    path = tiny("olmoe")
    skip_unless_able(reader, path)
    with load(path, f"mapped+{reader}+previous:4") as llama:
        same_answer(llama, stock, PROMPT_TOKENS, steps=12)
        counters = llama._engine.counters
        assert 0 < counters["speculative_used"] <= counters["speculative_issued"]
        wasted = counters["speculative_issued"] - counters["speculative_used"]
        assert (counters["speculative_wasted_bytes"] > 0) == (wasted > 0)


@pytest.mark.parametrize(
    "text",
    ["mapped/random+pread", "mapped/sequential+willneed", "mapped/align2m+pread:2", "mapped/huge+memcpy:2"],
)
def test_variants_engage(text: str, tiny, stock) -> None:
    path = tiny("olmoe")
    skip_unless_able(text, path)
    with load(path, text) as llama:
        same_answer(llama, stock, PROMPT_TOKENS)
        engagement = llama._engine.engagement
        if "random" in text or "sequential" in text:
            experts = sum(t.slab_bytes * t.count for bank in llama.model_info.banks for t in bank.tensors)
            assert engagement["bytes of the mapping advised"] == experts
        if "huge" in text and not llama.fallbacks:
            assert engagement["huge scratch bytes"] == 2 * (2 << 20)


@pytest.mark.parametrize(
    "text", ["mapped/huge+willneed", "mapped/align16k+fadvise", "mapped+tiered+background:1"]
)
def test_what_cannot_engage_is_refused_in_one_line(text: str, tiny) -> None:
    with pytest.raises(moestream.RefusedError, match="leave out") as refused:
        load(tiny("olmoe"), text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("reader", [reader for reader in READERS if "memcpy+background" not in reader])
def test_a_file_that_shrinks_is_a_read_error(reader: str, copy: Path, stock) -> None:
    skip_unless_able(reader, copy)
    whole = copy.read_bytes()
    # Dense bytes in memory of our own: a matmul on others that are gone ends the process, as stock's does.
    with load(copy, f"mapped+{reader}+anon") as llama:
        running = llama.generate(prompt_tokens(40, llama.n_vocab()), temp=0.0)
        next(running)
        os.truncate(copy, len(whole) // 3)
        with pytest.raises(moestream.ReadError) as raised:
            for _ in range(20):
                next(running)
        text = str(raised.value)
        assert text.startswith(f"{copy} at byte ")
        assert "_exps.weight, expert " in text
        assert text.endswith("the file ends early")
        assert "\n" not in text
    copy.write_bytes(whole)
    with load(copy, f"mapped+{reader}+anon") as llama:
        same_answer(llama, stock, 7)


@pytest.mark.parametrize(
    ("reader", "kind"), [("pread:2", 0), ("hybrid", 0), ("willneed", 2), ("pread+background:1", 2)]
)
def test_what_a_trace_says_of_a_mapped_store(reader: str, kind: int, tiny) -> None:
    builder = TraceBuilder()
    with load(tiny("olmoe"), f"mapped+{reader}+previous:2", trace=builder) as llama:
        answer(llama, prompt_tokens(PROMPT_TOKENS, llama.n_vocab()), 12)
    trace = builder.build()
    assert int(trace.slabs.bytes.sum()) == int(trace.steps["bytes_read"].sum())
    assert set(trace.slabs.kind.tolist()) <= {
        kind,
        1,
    }  # demand where it is waited for, else advised; speculative
    waited_for = trace.slabs.kind == 0
    assert (trace.slabs.ready_ns[waited_for] >= trace.slabs.issued_ns[waited_for]).all()
    assert (trace.slabs.ready_ns[trace.slabs.kind == 2] == 0).all()
    if reader != "hybrid":  # which finds all of it in memory
        assert (trace.slabs.kind == kind).any()
        assert (trace.slabs.kind == 1).any()
