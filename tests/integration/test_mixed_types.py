"""Expert tensors whose types differ from tensor to tensor and layer to layer: slabs of every size, no bit different."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from conftest import evicted, load, same_answer
from ggufs import TensorSource, rewrite, tensor_sources, write_split
from moestream.make.kinds import named
from moestream.make.output import TensorSpec
from moestream.make.quantize import RandomWeights

#: A shape, and the types that its expert tensors take in turns; of the second, slabs are smaller than a page and no
#: multiples of a sector.
MIXED = {
    "wide": ("tiny,experts=16", ("F32", "Q2_K", "MXFP4", "BF16")),
    "narrow": ("tiny,experts=256,embd=64,ff=32,heads=1,kv_heads=1", ("Q4_0", "IQ4_NL", "MXFP4", "Q5_1")),
    "one layer": ("tiny,experts=16,layers=1", ("IQ4_NL", "BF16", "Q8_0")),
}
MECHANISMS = ("arena", "arena+threads:2", "arena+sync+lru", "mapped+willneed", "cow+sync+lru")


def mixed(base: Path, kinds: tuple[str, ...], out: Path) -> Path:
    turns, weights = itertools.cycle(kinds), RandomWeights(0)

    def source(number: int, old: TensorSource) -> TensorSource:
        spec = old[0]
        if "_exps.weight" not in spec.name:
            return old
        new = TensorSpec(spec.name, spec.shape, named(next(turns)).number)
        return new, partial(weights.tensor, new, spec.shape[0] ** -0.5, number)

    return rewrite(base, out, tensors=[source(*each) for each in enumerate(tensor_sources(base))])


@pytest.fixture(scope="module", params=MIXED)
def model(
    request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    shape, kinds = MIXED[request.param]
    path = mixed(tiny("olmoe", shape, "F16"), kinds, tmp_path_factory.mktemp("mixed") / "model.gguf")
    return write_split(path, path.with_name("split.gguf"), 2)[0]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_types_that_take_turns_change_no_bit(mechanism: str, model: Path, stock) -> None:
    with load(model, mechanism, i_know=True, verbose=False) as llama:
        tensors = [tensor for bank in llama.model_info.banks for tensor in bank.tensors]
        assert len({tensor.type_name for tensor in tensors}) > 2
        same_answer(llama, stock, 40)
        assert llama.plan is not None
        if max(tensor.slab_bytes for tensor in tensors) < mmap.PAGESIZE:
            assert not llama.plan.capacities  # nothing can move alone: all of it stays
        else:
            assert mechanism.startswith("mapped") or evicted(llama)
