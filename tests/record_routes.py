"""Records which experts the demo model takes, for tests and tools that replay them.

``python tests/record_routes.py`` writes ``golden/demo_routes.npz``: run it after a change of the demo model, then
work the golden hit counts out again (``test_recorded_routes.py`` says how). With a directory as its argument it
writes one larger file for each of PROMPTS there, which ``tools/policy_gap.py`` compares policies on.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moestream.make import demo_path, make_demo
from moestream.make.demo import EXPERTS, EXPERTS_USED
from moestream.make.dense import TracedModel
from moestream.make.ggml import ggml_base

RECORDED = Path(__file__).parent / "golden" / "demo_routes.npz"
PROMPT = "What is gravity?"
#: Steps of one token after the prompt.
DECODED = 64

#: By name ``family-number``. Even numbers are for choosing a policy's constants, odd ones for judging them.
PROMPTS = {
    "prose-0": "Write a long story about a lighthouse keeper who finds a letter in a bottle.",
    "prose-1": "Explain in a long essay how the Roman roads changed trade and daily life in Europe.",
    "prose-2": "Describe the life of a river from its spring in the mountains to the sea, in great detail.",
    "prose-3": "Write a chapter of a novel in which two sisters return to the house they grew up in.",
    "code-0": "Write a Python class for a binary search tree with insert, delete, search and all traversals.",
    "code-1": "Write a C program that parses a CSV file into an array of structs and sorts it by a column.",
    "code-2": "Write a JavaScript module that implements an LRU cache with tests for each method.",
    "code-3": "Write Python functions for matrix addition, multiplication, transposition and inversion.",
    "dialogue-0": "Write a dialogue between a teacher and a curious student about why the sky is blue.",
    "dialogue-1": "Write a scene of a play: a detective questions the cook, the maid and the gardener.",
    "list-0": "List forty capital cities with their country and one famous sight each.",
    "list-1": "List thirty tips for a person who moves into a first flat, with a sentence about each.",
}
PROMPT_DECODED = 400
#: Sampled, not greedy: a small model that takes the likeliest token for long repeats itself.
TEMPERATURE = 0.8


def record(
    path: Path, prompt: str, decoded: int, temperature: float = 0.0
) -> tuple[npt.NDArray[np.uint8], int]:
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
        tokens = model.tokenize(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
        # The last token it makes is not fed back.
        if temperature == 0.0:
            model.continue_greedily(tokens, decoded + 1)
        else:
            _continue_by_chance(model, tokens, decoded, temperature)
    layers = [np.concatenate(taken[layer]) for layer in sorted(taken)]
    return np.stack(layers, axis=1), len(tokens)


def _continue_by_chance(model: TracedModel, tokens: list[int], count: int, temperature: float) -> None:
    chance = np.random.default_rng(0)
    logits = model.feed(tokens)
    for position in range(len(tokens), len(tokens) + count):
        # The likeliest of the logits plus Gumbel noise is a draw from their softmax.
        noisy = logits / temperature + chance.gumbel(size=logits.shape)
        logits = model.feed([int(np.argmax(noisy))], position)


def _write(path: Path, chosen: npt.NDArray[np.uint8], prompt: int) -> None:
    np.savez_compressed(path, chosen=chosen, prompt=prompt, experts=EXPERTS)
    print(f"{path}: {chosen.shape}, a prompt of {prompt}, {path.stat().st_size} bytes", flush=True)


def main() -> None:
    demo = demo_path() if demo_path().exists() else make_demo()
    if len(sys.argv) == 1:
        _write(RECORDED, *record(demo, PROMPT, DECODED))
        return
    for name, prompt in PROMPTS.items():
        _write(Path(sys.argv[1]) / f"{name}.npz", *record(demo, prompt, PROMPT_DECODED, TEMPERATURE))


if __name__ == "__main__":
    main()
