"""What a model answers, as logits, and how two answers differ. Knows neither mechanisms nor files."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]

#: A prompt of several batches, and the greedy tokens after it.
PROMPT, STEPS = 150, 6


def answer(llama: Any) -> list[Logits]:
    """All logits after the prompt, in steps of ``llama.n_batch`` tokens, and after each greedy token.

    A model without a memory (a diffusion model, an encoder) takes each batch for itself.
    """
    llama._ctx.kv_cache_clear()
    remembered = remembers(llama)
    feed = [int(token) for token in np.random.RandomState(0).randint(1, 256, PROMPT)]
    position, rows = 0, []
    for _ in range(STEPS + 1):
        for start in range(0, len(feed), llama.n_batch):
            part = feed[start : start + llama.n_batch]
            llama._batch.set_batch(part, n_past=position, logits_all=False)
            llama._ctx.decode(llama._batch)
            position += len(part) if remembered else 0
        rows.append(_last_logits(llama))
        feed = [int(rows[-1].argmax())]
    return rows


def remembers(llama: Any) -> bool:
    """Whether the model has a memory of earlier tokens."""
    from moestream.binding import low

    return low.llama_get_memory(llama._ctx.ctx) is not None


def _last_logits(llama: Any) -> Logits:
    from moestream.binding import low

    row = low.llama_get_logits_ith(llama._ctx.ctx, -1)
    return np.ctypeslib.as_array(ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (llama.n_vocab(),)).copy()


def difference(got: Sequence[Logits], expected: Sequence[Logits]) -> str | None:
    """In which row two answers differ first, and how; None where they are the same bit for bit. Row 0 follows the
    prompt; after a row that differs the next ones may be of other tokens, so only the first is looked into."""
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if mine.tobytes() == theirs.tobytes():
            continue
        other = np.flatnonzero(mine.view(np.uint32) != theirs.view(np.uint32))
        said = f"from row {number} of {len(expected)}, {len(other)} of {len(theirs)} values, the first at {other[0]}"
        finite = np.isfinite(mine)
        if not finite.all():
            return f"{said}, {np.count_nonzero(~finite)} of them no numbers"
        apart = np.abs(mine.astype(float) - theirs.astype(float)).max()
        return f"{said}, by at most {apart:.3g}"
    return None
