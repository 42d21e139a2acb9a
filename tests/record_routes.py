"""Writes ``golden/demo_routes.npz``: which experts the demo model takes, for tests that replay them.

Run ``python tests/record_routes.py`` after a change of the demo model, then work the golden hit counts out
again (``test_recorded_routes.py`` says how).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moestream.make import demo_path, make_demo
from moestream.make.demo import EXPERTS, EXPERTS_USED
from moestream.make.dense import TracedModel
from moestream.make.ggml import ggml_base

RECORDED = Path(__file__).parent / "golden" / "demo_routes.npz"
PROMPT = "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
#: Steps of one token after the prompt.
DECODED = 64


def record(path: Path) -> tuple[npt.NDArray[np.uint8], int]:
    """The experts taken, (tokens, layers, used), likeliest first, and how many of the tokens are the prompt."""
    taken: dict[int, list[npt.NDArray[np.uint8]]] = {}
    ggml = ggml_base()

    def take(name: str, tensor: int) -> None:
        rows = ggml.ggml_nrows(tensor)
        # A view of the full sort: the next token's row is as far as there are experts.
        count = (rows - 1) * EXPERTS + EXPERTS_USED
        ids = np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(ggml.ggml_get_data(tensor)))
        chosen = np.stack([ids[row * EXPERTS :][:EXPERTS_USED] for row in range(rows)])
        taken.setdefault(int(name.rsplit("-", 1)[1]), []).append(chosen.astype(np.uint8))

    with TracedModel(path, "ffn_moe_topk-", take, threads=2) as model:
        prompt = model.tokenize(PROMPT)
        # The last token it makes is not fed back.
        model.continue_greedily(prompt, DECODED + 1)
    layers = [np.concatenate(taken[layer]) for layer in sorted(taken)]
    return np.stack(layers, axis=1), len(prompt)


if __name__ == "__main__":
    chosen, prompt = record(demo_path() if demo_path().exists() else make_demo())
    np.savez_compressed(RECORDED, chosen=chosen, prompt=prompt, experts=EXPERTS)
    print(f"{RECORDED}: {chosen.shape}, a prompt of {prompt}, {RECORDED.stat().st_size} bytes")
