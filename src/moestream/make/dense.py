"""The dense model run through llama.cpp: what it says, and what its feed-forward layers are fed with.

Only llama.cpp's and ggml's exported functions are used (no struct layouts), so any build the binding loads
will do. Results are deterministic: one thread, fixed batch, greedy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from moestream.binding import llama_cpp
from moestream.binding import low as lc
from moestream.errors import ModelError, MoestreamError
from moestream.make.ggml import ggml_base

_CONTEXT = 1024
_BATCH = 512
_LISTENERS = 2

#: ``take(name, tensor)``: a wanted node, just computed; the pointer is only for ggml's functions.
Take = Callable[[str, int], None]


class TracedModel:
    """A model under stock llama.cpp, memory-mapped and never repacked, whose graph nodes can be read as they
    are computed.

    ``prefix`` names the nodes ``take`` is called for (``ffn_norm-``, ``ffn_moe_topk-``). Context manager.
    Raises ModelError when llama.cpp does not load the file.
    """

    def __init__(self, path: Path, prefix: str, take: Take, threads: int = 1) -> None:
        llama_cpp.llama_backend_init()
        llama_cpp._logger.set_verbose(False)
        ggml = ggml_base()
        wanted = prefix.encode()

        def callback(tensor: int, ask: bool, _user: int) -> bool:
            name = ggml.ggml_get_name(tensor)
            if not name.startswith(wanted):
                return not ask
            if not ask:
                take(name.decode(), tensor)
            return True

        self._callback = lc.ggml_backend_sched_eval_callback(callback)
        params = lc.llama_model_default_params()
        params.use_extra_bufts = False
        self._model = lc.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ModelError(f"{path}: llama.cpp does not load it")
        context = lc.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = _CONTEXT, _BATCH, _BATCH
        context.n_threads = context.n_threads_batch = threads
        context.cb_eval = self._callback
        self._context = lc.llama_init_from_model(self._model, context)
        if not self._context:
            lc.llama_model_free(self._model)
            raise ModelError(f"{path}: llama.cpp makes no context for it")
        self._vocab = lc.llama_model_get_vocab(self._model)

    def __enter__(self) -> TracedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lc.llama_free(self._context)
        lc.llama_model_free(self._model)

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Token ids of ``text``; control words such as ``<|im_start|>`` are one token each when
        ``special``."""
        raw = text.encode()
        room = len(raw) + 8
        tokens = (lc.llama_token * room)()
        count = lc.llama_tokenize(self._vocab, raw, len(raw), tokens, room, False, special)
        if count < 0:
            raise MoestreamError("llama.cpp's tokenizer made more tokens than there are bytes")
        return list(tokens[:count])

    def restart(self) -> None:
        """Forget all tokens."""
        lc.llama_memory_clear(lc.llama_get_memory(self._context), True)

    def feed(self, tokens: Sequence[int], position: int = 0) -> npt.NDArray[np.float32]:
        """Decode ``tokens`` from ``position`` on and return the logits after the last of them, (n_vocab,).

        All rows are asked for, because llama.cpp drops the rows nobody asked for before its last feed-forward
        layer.
        """
        for start in range(0, len(tokens), _BATCH):
            self._feed_batch(tokens[start : start + _BATCH], position + start)
        n_vocab = lc.llama_vocab_n_tokens(self._vocab)
        return np.ctypeslib.as_array(lc.llama_get_logits_ith(self._context, -1), shape=(n_vocab,)).copy()

    def _feed_batch(self, tokens: Sequence[int], position: int) -> None:
        batch: Any = lc.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for index, token in enumerate(tokens):
                batch.token[index] = token
                batch.pos[index] = position + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = 1
            status = lc.llama_decode(self._context, batch)
        finally:
            lc.llama_batch_free(batch)
        if status != 0:
            raise MoestreamError(f"llama_decode returned {status} on {len(tokens)} tokens")

    def continue_greedily(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` tokens after ``tokens``, each the likeliest; end-of-text tokens are not special here."""
        self.restart()
        logits = self.feed(tokens)
        made: list[int] = []
        while True:
            made.append(int(np.argmax(logits)))
            if len(made) == count:
                return made
            logits = self.feed(made[-1:], len(tokens) + len(made) - 1)


def router_inputs(
    path: Path,
    text: str,
    prompts: Sequence[str],
    tokens_each: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[npt.NDArray[np.float32]]:
    """What each layer's feed-forward block is fed with, over ``text`` and over the model's own replies to
    ``prompts``.

    Returns one (n_tokens, n_embd) array a layer, rows of ``ffn_norm-<layer>`` in the order of the tokens. Two passages
    are heard at a time, each by a model of its own on one thread: none depends on another.
    """
    asked = [(part, 0) for part in text.split("\n\n\n")] + [(prompt, tokens_each) for prompt in prompts]
    with ExitStack() as open_models, ThreadPoolExecutor(_LISTENERS) as threads:
        free = [open_models.push(_Listener(path)) for _ in range(_LISTENERS)]

        def hear(passage: tuple[str, int]) -> dict[int, npt.NDArray[np.float32]]:
            listener = free.pop()
            try:
                return listener.hear(*passage)
            finally:
                free.append(listener)

        heard = []
        for states in threads.map(hear, asked):
            heard.append(states)
            if progress is not None:
                progress(len(heard), len(asked))
    return [np.concatenate([states.pop(layer) for states in heard]) for layer in sorted(heard[0])]


class _Listener(TracedModel):
    """The dense model, and what its feed-forward blocks are fed with."""

    def __init__(self, path: Path) -> None:
        self._heard: dict[int, list[npt.NDArray[np.float32]]] | None = None
        super().__init__(path, "ffn_norm-", self._take)

    def hear(self, passage: str, reply: int) -> dict[int, npt.NDArray[np.float32]]:
        """One array a layer, over ``passage`` and ``reply`` tokens that the model goes on with."""
        ids = self.tokenize(passage)
        if reply:
            ids += self.continue_greedily(ids, reply)
        heard: dict[int, list[npt.NDArray[np.float32]]] = {}
        self._heard = heard
        self.restart()
        self.feed(ids[:_CONTEXT])
        self._heard = None
        return {layer: np.concatenate(rows) for layer, rows in heard.items()}

    def _take(self, name: str, tensor: int) -> None:
        if self._heard is None:
            return
        ggml = ggml_base()
        count, rows = ggml.ggml_nelements(tensor), ggml.ggml_nrows(tensor)
        values = np.ctypeslib.as_array((ctypes.c_float * count).from_address(ggml.ggml_get_data(tensor)))
        states = values.reshape(rows, count // rows).copy()
        self._heard.setdefault(int(name.rsplit("-", 1)[1]), []).append(states)
