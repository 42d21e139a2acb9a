"""What a context will take, asked of llama.cpp itself: the model is loaded without its weights.

With ``no_alloc`` llama.cpp builds the model, the cache and the graphs but allocates none of their memory;
what it would have allocated it says in its log, which is read here.
"""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestream.binding import binding_version, low, override_array
from moestream.box import allow_files
from moestream.errors import BudgetError, ModelError, UsageError
from moestream.loading import failed_assertion, loading
from moestream.model.overrides import naming
from moestream.plan import ANYWHERE, ContextSizes, MemoryFacts, Plan, make_plan
from moestream.plan_limits import check_before, files_needed, within

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moestream.box import Place
    from moestream.mechanism import Mechanism
    from moestream.model import Model

_MIB = 1 << 20
_BUFFER = re.compile(r"^\S+:\s+(.+?)\s+(compute|output) buffer size =\s*([\d.]+) MiB")
#: The cache's own account: its buffer line says 0.00 when nothing is allocated.
_CACHE = re.compile(r"^\S+: size =\s*([\d.]+) MiB \(")


#: Of the cap, what the compute buffers may take when nobody names a step: a larger step makes prompts cheaper, a
#: smaller one leaves more experts for every token after them.
COMPUTE_SHARE = 1 / 24
#: Tokens a step, before a cap cuts them: llama.cpp's own default.
DEFAULT_STEP = 512
#: Tokens of a context, where nobody names a number: the parent's default.
DEFAULT_CONTEXT = 512
#: Below this many tokens a step every prompt would read the model many times over.
SMALLEST_DEFAULT_STEP = 64


def measure_context(
    path: str | Path,
    n_ctx: int,
    n_batch: int = 512,
    n_ubatch: int = 512,
    *,
    type_k: int | None = None,
    type_v: int | None = None,
    n_outputs_max: int = 0,
    flash_attn: bool = False,
    embeddings: bool = False,
    kv_overrides: Mapping[str, Any] | None = None,
) -> ContextSizes:
    """The sizes of a context of this model (its first shard). 0 for ``n_ctx``: what the model was trained
    with; 0 for ``n_outputs_max``: logits for every token of a step, as llama.cpp does by itself, and always where there
    is no memory. Sizes are rounded up to what llama.cpp prints (0.01 MiB). Raises ModelError with llama.cpp's reason
    when it cannot load the model."""
    start = time.perf_counter()
    with naming(kv_overrides), loading(path) as log:
        params = low.llama_model_default_params()
        params.no_alloc = True
        params.n_gpu_layers = 0
        params.use_extra_bufts = False
        overrides = override_array(kv_overrides or {})
        params.kv_overrides = overrides if kv_overrides else None
        params.load_mode = low.LLAMA_LOAD_MODE_NONE  # with no_alloc there is nothing to map
        model = low.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise ValueError
        try:
            context = low.llama_context_default_params()
            context.n_ctx, context.n_batch, context.n_ubatch = n_ctx, n_batch, n_ubatch
            context.n_outputs_max = n_outputs_max
            context.embeddings = embeddings
            if embeddings:  # as the binding makes one
                context.n_seq_max = min(n_batch, low.llama_max_parallel_sequences())
                context.kv_unified = True
            context.offload_kqv = context.op_offload = False
            context.flash_attn_type = (
                low.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attn else low.LLAMA_FLASH_ATTN_TYPE_DISABLED
            )
            if type_k is not None:
                context.type_k = type_k
            if type_v is not None:
                context.type_v = type_v
            made = low.llama_init_from_model(model, context)
            if not made:
                if failed_assertion():
                    raise ValueError
                raise UsageError(f"llama.cpp cannot make a context of {n_ctx} tokens: {log.reason()}")
            has_memory = bool(low.llama_get_memory(made))
            low.llama_free(made)
            if not has_memory and n_outputs_max:
                context.n_outputs_max = 0
                log.lines.clear()
                low.llama_free(low.llama_init_from_model(model, context))
        finally:
            low.llama_model_free(model)
    return replace(_sizes(log.lines, time.perf_counter() - start), has_memory=has_memory)


def _sizes(lines: list[str], seconds: float) -> ContextSizes:
    """The sums of what the log says. A buffer that is made anew (named again) counts once, as it was last."""
    buffers: dict[tuple[str, str], int] = {}
    cache = 0
    for line in lines:
        if match := _BUFFER.match(line):
            buffers[match[2], match[1]] = _bytes(match[3])
        elif match := _CACHE.match(line):
            cache += _bytes(match[1])
    total = {"compute": 0, "output": 0}
    for (kind, _), size in buffers.items():
        total[kind] += size
    if not any(kind == "compute" for kind, _ in buffers):
        raise ModelError(
            f"llama-cpp-python {binding_version()} did not say how large its compute buffers are: "
            "this version's log is not understood"
        )
    return ContextSizes(cache, total["compute"], total["output"], seconds)


def _bytes(mib: str) -> int:
    """Bytes of a printed size, which was rounded to two places: never less than was meant."""
    return math.ceil((float(mib) + 0.005) * _MIB) if float(mib) else 0


def plan_context(
    model: Model,
    box: MemoryFacts,
    cap_bytes: int | None,
    mechanism: Mechanism | None,
    *,
    n_ctx: int,
    n_ubatch: int = DEFAULT_STEP,
    disk_bytes_per_s: float | None = None,
    compute_s_per_token: float | None = None,
    compute_share: float = 1.0,
    base_bytes: int | None = None,
    held_bytes: int = 0,
    place: Place = ANYWHERE,
    **options: Any,
) -> Plan:
    """``make_plan`` with the context's sizes measured for the step it will really run.

    A smaller step takes smaller compute buffers as well as fewer experts at once, so where ``n_ubatch`` does
    not fit, half of it is measured and planned, and so on: ``plan.n_batch`` is the first that fits whole.
    So is a step whose compute buffers take more than ``compute_share`` of the cap from the experts.
    ``options`` are ``measure_context``'s. Raises what the two raise, the BudgetError being that of single
    tokens, and RefusedError for what else bounds this process (``plan_limits``)."""
    check_before(model, mechanism, box.limits())
    allow_files(files_needed(model))
    step = min(n_ubatch, n_ctx or model.n_ctx_train)
    while True:
        sizes = measure_context(model.paths[0], n_ctx, step, step, **options)
        try:
            plan = make_plan(
                model,
                box,
                cap_bytes,
                mechanism,
                sizes,
                n_ubatch=step,
                base_bytes=base_bytes,
                held_bytes=held_bytes,
                disk_bytes_per_s=disk_bytes_per_s,
                compute_s_per_token=compute_s_per_token,
                place=place,
            )
        except BudgetError:
            if step == 1:
                raise
        else:
            lean = plan.compute_bytes <= compute_share * plan.cap_bytes or step <= SMALLEST_DEFAULT_STEP
            if plan.n_batch == step and lean:
                break
        step //= 2
    plan = replace(plan, has_memory=sizes.has_memory)
    if step < n_ubatch <= (n_ctx or model.n_ctx_train):
        cut = f"prompts run {step} tokens a step, not {n_ubatch}: a larger one would take memory from the experts"
        if compute_share < 1:  # nobody asked for n_ubatch: how it was chosen, not something to warn of
            plan = replace(plan, reasons=(*plan.reasons, cut))
        else:
            plan = replace(plan, warnings=(*plan.warnings, cut))
    # Read again: what was asked has left threads and memory of its own.
    return within(plan, model, box.limits())


def rows_of_logits(arguments: dict[str, Any]) -> int:
    """Most rows of logits a step can ask for, or 0 for llama.cpp's own default (as many as the batch).

    The parent asks for the last row only, unless told otherwise: a compute buffer for every row of a batch would cost
    as much memory as a hundred experts.
    """
    if arguments.get("logits_all") or arguments.get("embedding") or arguments.get("draft_model") is not None:
        return 0
    return 1


def kept_logits_bytes(arguments: dict[str, Any], model: Model) -> int:
    """What the parent keeps of logits beside llama.cpp: with ``logits_all`` a row for each token of the context."""
    if not arguments.get("logits_all"):
        return 0
    return 4 * model.n_vocab * (arguments.get("n_ctx", DEFAULT_CONTEXT) or model.n_ctx_train)
