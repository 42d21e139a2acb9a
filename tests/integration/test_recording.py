"""What a trace records is what happened: every route as the router gave it, every slab that was read, every step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moestream
from answers import answer, prompt_tokens
from conftest import load
from moestream.trace import Trace, TraceBuilder

MECHANISMS = ("arena+lru", "arena+uring:4+lfu-decay:16+gate:2", "arena/buffered+sync+lru")


def recorded(path: Path, mechanism: str, prompt: int = 90, steps: int = 12) -> tuple[Trace, moestream.Llama]:
    builder = TraceBuilder()
    with load(path, mechanism, trace=builder) as llama:
        answer(llama, prompt_tokens(prompt, llama.n_vocab(), 0), steps)
    return builder.build(), llama


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_bank_is_routed_once_a_step_with_k_distinct_ids(mechanism: str, tiny) -> None:
    trace, llama = recorded(tiny("olmoe"), mechanism)
    routes, model = trace.routes, llama.model_info
    assert len(trace.steps["tokens"]) == len(np.unique(routes.step))
    for step in np.unique(routes.step):
        mine = routes.bank[routes.step == step]
        passes = len(mine) // len(model.banks)
        assert mine.tolist() == list(range(len(model.banks))) * passes
    for route in range(len(routes)):
        ids = routes.of(route)
        bank = model.banks[int(routes.bank[route])]
        # The last layer computes only the rows whose logits are wanted.
        rows = routes.tokens[route] if bank.index < len(model.banks) - 1 else 1
        assert ids.shape == (rows, bank.used)
        assert all(len(set(row)) == bank.used for row in ids.tolist())
        assert ids.min() >= 0
        assert ids.max() < bank.count


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_recorded_bytes_are_the_readers(mechanism: str, tiny) -> None:
    trace, llama = recorded(tiny("olmoe"), mechanism)
    assert int(trace.slabs.bytes.sum()) == int(trace.steps["bytes_read"].sum())
    demand = trace.slabs.kind == 0
    assert (trace.slabs.needed_ns[demand] > 0).all()
    assert (trace.slabs.ready_ns[demand] >= trace.slabs.issued_ns[demand]).all()
    stalled = trace.slabs.waited_ns.sum() * 1e-9
    assert stalled == pytest.approx(trace.steps["stall_s"].sum(), rel=1e-6)
    slots = [len(bank.tensors) for bank in llama.model_info.banks]
    misses = int(trace.steps["misses"].sum())
    assert int(demand.sum()) >= misses * min(slots)  # a slab read early and lost is demanded without a miss


def test_the_first_slabs_of_a_route_name_it(tiny) -> None:
    trace, _ = recorded(tiny("olmoe"), "arena+lru")
    first = trace.first_expert
    for at in range(len(trace.slabs)):
        route = int(trace.slabs.route[at])
        bank = int(trace.routes.bank[route])
        local = int(trace.slabs.expert[at]) - int(first[bank])
        assert local in trace.routes.of(route)


def test_a_predictor_s_wishes_are_kept_in_order(tiny) -> None:
    trace, _ = recorded(tiny("olmoe"), "arena+lru+gate:2")
    asked = np.diff(trace.routes.wish_start)
    assert asked.max() >= 2
    first = trace.first_expert
    for route in np.flatnonzero(asked):
        wishes = trace.routes.wish_ids[trace.routes.wish_start[route] : trace.routes.wish_start[route + 1]]
        next_bank = int(trace.routes.bank[route]) + 1
        assert ((wishes >= first[next_bank]) & (wishes < first[next_bank + 1])).all()


def test_recording_changes_no_bit(tiny, stock) -> None:
    from conftest import same_answer

    with load(tiny("olmoe"), "arena+lru", trace=TraceBuilder()) as llama:
        same_answer(llama, stock, 90)


def test_phases_and_numbers(tiny) -> None:
    trace, _ = recorded(tiny("olmoe"), "arena+lru", prompt=90, steps=5)
    assert trace.steps["step"].tolist() == list(range(len(trace.steps["step"])))
    prefill = trace.steps["phase"] == 0
    assert trace.steps["tokens"][prefill].sum() == 90
    assert (trace.steps["tokens"][~prefill] == 1).all()
    assert trace.routes.token[-1] == 90 + (~prefill).sum() - 1


def test_a_closed_engine_says_so(tiny) -> None:
    llama = load(tiny("olmoe"), "arena+lru")
    engine = llama._engine
    llama.close()
    for call in (lambda: engine.counters, engine.start_trace, engine.end_step, lambda: engine.engagement):
        with pytest.raises(Exception, match="closed"):
            call()
    engine.close()  # again: nothing
