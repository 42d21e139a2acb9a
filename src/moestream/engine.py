"""``Llama``: llama.cpp's binding with the experts streamed from disk.

The order of a load: read the header; ask llama.cpp (without allocating) what the context will need; plan; let the
parent's constructor load the model over the store; measure what the process really uses; give the rest of the cap to
experts. Everything else of the parent works unchanged, because only its memory and its eval callback are ours.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moestream.assembly import Progress, build_core, give_budget, load_seeds, over_the_store
from moestream.binding import llama_cpp, only_context, set_abort_callback, unproven
from moestream.box import Box, mapping_refusal
from moestream.callbacks import Drafts, Processors, check_grammar, with_rows, written_rows
from moestream.dryrun import DEFAULT_STEP, kept_logits_bytes, rows_of_logits
from moestream.errors import EngagementError, MoestreamError, UsageError
from moestream.governor import Governor, govern
from moestream.guard import (
    check_arguments,
    check_memory,
    check_names,
    check_row,
    check_rows,
    check_store,
    check_texts,
    check_threads,
    check_tokens,
    check_whole,
)
from moestream.lifetime import Call, Closed, Lifetime, Turn, alone, inside
from moestream.loading import loading
from moestream.mechanism import Mechanism
from moestream.model import Model, check_architecture, read_model
from moestream.plan import Plan
from moestream.plan_load import complete, plan_load
from moestream.recorder import NO_COUNTERS, Recorder
from moestream.stats import Step
from moestream.steps import Steps
from moestream.trace.sink import WORKING_BYTES, TraceSink, open_trace, trace_meta
from moestream.unchanged import Unchanged
from moestream.units import parse_size

#: What of the binding's context computes.
_STEPPING = ("decode", "encode")


@inside(besides=("close", "generate"))
@alone("eval", "sample", "reset", "embed", "load_state", only_look=("save_state",))
class Llama(llama_cpp.Llama):  # type: ignore[misc]
    """A drop-in ``llama_cpp.Llama`` whose routed experts come from disk within a memory cap.

    ``ram`` is the cap of the whole process (``"4GiB"``, bytes; None: what the box has to spare). ``mechanism`` is a
    ``Mechanism`` or its text (None: everything in memory where it fits, else the default arena). With ``strict`` a
    mechanism that does not engage as asked is an EngagementError instead of an entry of ``fallbacks``. ``trace``: a
    Parquet file to write (or a TraceSink), closed with the model. ``i_know`` runs ``cow`` without an enforced cap, and
    a llama.cpp that is not tested. ``governor``: give expert pages back while others need memory (an arena's, and not
    where a trace is recorded, which is of one budget). All other arguments are the parent's. ``n_batch`` is cut when
    the budget cannot hold a batch's experts.

    Raises ModelError, BudgetError, AbiError, UsageError, EngagementError; while running ReadError and Cancelled, whose
    ``tokens`` and ``text`` are what the call had generated. After a ReadError the next call tries again.
    One call at a time: one that goes on after another took the context is a UsageError. From any thread: ``cancel``,
    ``close``.
    """

    n_batch: int  # the parent's, as the next four
    _ctx: Any
    _model: Any
    _batch: Any
    draft_model: Any
    _asked_batch: int = 0  #: tokens a step as the caller named them, where a cap may cut them
    _rows: int = 0  #: of logits, that the last step made

    def __init__(
        self,
        model_path: str | Path,
        ram: str | int | None = None,
        mechanism: str | Mechanism | None = None,
        *,
        strict: bool = False,
        i_know: bool = False,
        trace: str | Path | TraceSink | None = None,
        on_progress: Progress | None = None,
        governor: bool = True,
        _interpose: bool = True,
        _expert_bytes: int | None = None,
        **arguments: Any,
    ) -> None:
        start = time.perf_counter()
        self._engine: Any = None
        self._recorder: Recorder | None = None
        self._steps: Steps | None = None
        self.governor: Governor | None = None
        self._trace: TraceSink | None = None
        self._call = Call(running=False)
        self._processors = Processors(())
        self._lifetime = Lifetime()
        #: Held while llama.cpp computes, and while pages move.
        self._computing = threading.RLock()
        self._turn = Turn(self._computing, self._lifetime)
        self._process = os.getpid()
        self._asked = dict(ram=ram, mechanism=mechanism, strict=strict, i_know=i_know, governor=governor)
        #: At most this much of the cap goes to experts: what a measurement holds fixed while the process varies.
        self._expert_limit = _expert_bytes
        self._governed = governor and trace is None and _expert_bytes is None
        #: Taken after the load, beside what llama.cpp and the core take.
        self._reserved_bytes = WORKING_BYTES if trace is not None else 0
        self.fallbacks: list[str] = unproven(i_know)
        self.model_info: Model = read_model(model_path, arguments.get("kv_overrides"))
        self._files = Unchanged(self.model_info.stamps)
        check_architecture(self.model_info)
        check_names(self.model_info)
        complete(arguments, self.fallbacks)
        self._reserved_bytes += kept_logits_bytes(arguments, self.model_info)
        mechanism = Mechanism.parse(mechanism) if isinstance(mechanism, str) else mechanism
        cap = parse_size(ram) if ram is not None else None
        if mechanism is not None:
            check_store(mechanism, Box(), i_know)
        # Before the memory is measured: what writes a trace takes some.
        sink = open_trace(trace, self.model_info) if trace is not None else None
        try:
            if not self.model_info.is_moe:
                self._load_dense(cap, mechanism, arguments)
            else:
                self._load_streamed(cap, mechanism, strict, on_progress, _interpose, arguments)
            if self.draft_model is not None:
                self.draft_model = Drafts(self.draft_model, self.n_batch)
            self._record_steps(sink)
        except BaseException:
            if sink is not None:
                sink.discard()
            raise
        self.load_stats = {"seconds": time.perf_counter() - start, "bytes_read": self._load_bytes()}

    # -- loading ------------------------------------------------------------------------------------------------

    def _load_dense(self, cap: int | None, mechanism: Mechanism | None, arguments: dict[str, Any]) -> None:
        """A model without experts: the parent's own load, said in ``fallbacks``."""
        self.fallbacks.append(
            "a dense model has no experts to stream: loaded as llama.cpp does, the cap is not used"
        )
        self.plan: Plan | None = None
        self.mechanism: Mechanism | None = None
        refusal = mapping_refusal(self.model_info.paths[0])
        if refusal and arguments.setdefault("use_mmap", False) is False:
            self.fallbacks.append(f"{refusal}: read into memory instead")
        check_threads(arguments)
        with loading(self.model_info.paths[0], echo=arguments["verbose"]):
            super().__init__(str(self.model_info.paths[0]), **arguments)

    def _load_streamed(
        self,
        cap: int | None,
        mechanism: Mechanism | None,
        strict: bool,
        on_progress: Progress | None,
        interpose: bool,
        arguments: dict[str, Any],
    ) -> None:
        check_arguments(arguments)
        self._asked_batch = arguments.get("n_batch", DEFAULT_STEP)
        # Before the memory is measured: reading a trace takes some.
        seeds = load_seeds(mechanism, self.model_info) if mechanism is not None else {}
        self.plan = plan_load(
            self.model_info,
            cap,
            mechanism,
            arguments,
            reserved_bytes=self._reserved_bytes,
            governed=self._governed,
            fallbacks=self.fallbacks,
        )
        check_threads(arguments)
        self._engine, self.plan = build_core(
            self.model_info,
            self.plan,
            seeds,
            strict=strict,
            interpose=interpose,
            on_progress=on_progress,
            fallbacks=self.fallbacks,
        )
        self.mechanism = self.plan.mechanism
        self._load_parent(arguments)
        try:
            n_batch = self.plan.n_batch
            bounds = self._expert_limit, self.fallbacks, self._reserved_bytes
            self.plan = give_budget(self._engine, self.model_info, self.plan, *bounds)
            if self.plan.n_batch < n_batch:  # the parent feeds at most this many tokens a step
                self.n_batch = min(self.n_batch, self.plan.n_batch)
            if strict and self.fallbacks:
                raise EngagementError("not as asked (--strict): " + "; ".join(self.fallbacks))
        except BaseException:
            self.close()
            raise

    def _load_parent(self, arguments: dict[str, Any]) -> None:
        """The parent's constructor with its parameters completed and its mappings answered by the store."""
        engine, path = self._engine, self.model_info.paths[0]
        outputs = rows_of_logits(arguments) if self.plan is not None and self.plan.has_memory else 0
        try:
            # What llama.cpp warns of is in our plan; its errors come as exceptions.
            with over_the_store(engine, outputs), loading(path, echo=arguments["verbose"]):
                super().__init__(str(path), **arguments)
            self._files.check_loaded()
        except BaseException:
            self.close()
            raise
        set_abort_callback(self._ctx.ctx, engine.abort_callback, engine.address)
        if self.mechanism is not None and self.mechanism.cached:
            self._stack.enter_context(only_context(self._model.model))

    # -- running ------------------------------------------------------------------------------------------------

    def _record_steps(self, sink: TraceSink | None) -> None:
        """Have every step, whoever decodes it, go through ``_steps``."""
        engine = self._engine
        self._recorder = Recorder((lambda: engine.counters) if engine is not None else (lambda: NO_COUNTERS))
        self._steps = Steps(engine, self.model_info, self._files, self._recorder)
        if sink is not None and engine is not None:
            assert self.plan is not None
            sink.begin(trace_meta(self.model_info, self.plan, str(self.mechanism), self.fallbacks))
            engine.start_trace()
            self._trace = sink
            self._recorder.on_step = lambda number, phase, step: sink.step(
                number, phase, step, engine.take_trace()
            )
        elif sink is not None:
            sink.discard()
            self.fallbacks.append("a dense model has no routes: no trace is written")
        for name in _STEPPING:
            setattr(self._ctx, name, partial(self._step, getattr(self._ctx, name)))
        if self._governed and engine is not None:
            self.governor = govern(engine, self.model_info, self.plan, self._computing)
            self._steps.governor = self.governor

    def _step(self, run: Callable[[Any], Any], batch: Any) -> Any:
        assert self._steps is not None
        self._rows = check_rows(batch, self.context_params.n_outputs_max)
        self._requires_eval = True  # should it fail: what is left of its logits is no token's
        return self._steps.take(batch.n_tokens(), lambda: run(batch))

    def _begin_call(self) -> None:
        self._lifetime.check()
        if os.getpid() != self._process:  # its threads, llama.cpp's and the reader's, did not come along
            raise UsageError(
                "this model was loaded before the process forked: load it in the child (or spawn it)"
            )
        if self._steps is not None and not self._call.running:
            self.fallbacks += self._steps.begin_call()
            self._lifetime.check()  # it has just forgotten a cancel, which may have been close's

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Iterator[int]:
        with self._turn:
            self._call.running = False  # a generator that was left halfway does not own the next call
            self._begin_call()
            mine = self._call = Call(running=True)
        running = super().generate(tokens, *args, **kwargs)
        sent: Any = None
        generated: list[int] = []
        try:
            while True:
                with self._turn:
                    self._lifetime.check()
                    mine.check()
                    with mine:
                        try:
                            token = running.send(sent)
                        except StopIteration:
                            return
                generated.append(token)
                sent = yield token
        except MoestreamError as error:
            error.tokens, error.text = generated, self._text(tokens, generated)
            raise
        finally:
            running.close()
            mine.running = False

    def _init_sampler(
        self, *args: Any, logits_processor: Any = None, grammar: Any = None, **kwargs: Any
    ) -> Any:
        """The parent's, which calls ``logits_processor`` from C."""
        if grammar is not None:
            check_grammar(self._model, grammar)
        self._processors = Processors(logits_processor or ())
        return super()._init_sampler(
            *args,
            logits_processor=self._processors if logits_processor else None,
            grammar=grammar,
            **kwargs,
        )

    def sample(self, *args: Any, idx: int | None = None, **kwargs: Any) -> int:
        check_row(self, self._rows, idx)
        token = int(super().sample(*args, idx=idx, **kwargs))
        self._processors.reraise()
        return token

    def detokenize(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> bytes:
        check_tokens(tokens, self.n_vocab())
        return bytes(super().detokenize(tokens, *args, **kwargs))

    def _text(self, prompt: Sequence[int], generated: Sequence[int]) -> str:
        """Of a call that ended early; empty where the model is closed by now."""
        try:
            with self._turn:
                self._lifetime.check()
                text: bytes = self.detokenize(list(generated), prev_tokens=list(prompt))
        except UsageError:
            return ""
        return text.decode("utf-8", "ignore")  # as the parent's completions

    def eval(self, tokens: Any) -> None:
        self._begin_call()
        check_memory(self._ctx, self.model_info)
        check_whole(self, tokens, self._asked_batch)
        text = not self._call.running and self.n_tokens > 0 and len(tokens) == 1
        if self._recorder is not None and text:
            self._recorder.reading_prompt = False
        super().eval(tokens)
        # A call reads its prompt in one eval; whatever follows it in the same call makes text.
        if self._recorder is not None:
            self._recorder.reading_prompt = False

    def embed(self, input: str | list[str], *args: Any, **kwargs: Any) -> Any:
        self._begin_call()
        check_texts(self, [input] if isinstance(input, str) else input, self._asked_batch)
        return super().embed(input, *args, **kwargs)

    def save_state(self) -> Any:
        with written_rows(self):
            return super().save_state()

    def load_state(self, state: Any) -> None:
        with written_rows(self):
            super().load_state(with_rows(state, len(self.scores)))

    def cancel(self) -> None:
        """Stop the running call within one layer: it raises Cancelled. From any thread; lasts until the next call."""
        steps = self._steps
        if steps is not None:
            steps.cancel()

    def __getstate__(self) -> dict[str, Any]:
        """What loads it elsewhere as it was asked for here, but for a trace, which has one writer."""
        return {**super().__getstate__(), **self._asked}

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def last_steps(self) -> list[Step]:
        """The steps of the last call, oldest first."""
        return self._recorder.last.steps if self._recorder is not None else []

    def stats(self) -> dict[str, Any]:
        """``load`` {seconds, bytes_read}, and ``since_load`` and ``last_call`` with ``prefill`` and ``decode`` each."""
        recorder = self._recorder
        assert recorder is not None
        return {
            "load": dict(self.load_stats),
            "since_load": recorder.all.summary(),
            "last_call": recorder.last.summary(),
        }

    def engagement(self) -> dict[str, int]:
        """How often each thing the mechanism promises was done since load, by name; empty where it promises none."""
        if self._engine is None:
            return {}
        done = dict(self._engine.engagement)
        if self.mechanism is not None and self.mechanism.predictor != "none":
            done["experts asked for early"] = self._engine.counters["speculative_issued"]
        return done

    def _load_bytes(self) -> int:
        return (
            int(self._engine.counters["dense_bytes"]) if self._engine is not None else self.model_info.bytes
        )

    def close(self) -> None:
        """Free the model, then the store under it; a call that runs in another thread is cancelled first.

        Any use of the model after that is a UsageError. Idempotent; in a forked child nothing is done."""
        if os.getpid() != self._process:
            return
        self._lifetime.end(hurry=self.cancel)
        with self._computing:
            self._free()

    def _free(self) -> None:
        if self._steps is not None:
            self._steps.end()
            for name in _STEPPING:
                if name in vars(self._ctx):
                    delattr(self._ctx, name)
        engine, sink = self._engine, self._trace
        # What takes its steps holds the engine, and its memory with it.
        self._engine = self._trace = self._steps = None
        recorded = engine.take_trace(finish=True) if sink is not None else None
        if hasattr(self, "_stack"):
            super().close()
        # llama.cpp's tensors point into the store's regions: it goes only after them.
        if engine is not None:
            engine.close()
        self._ctx = self._model = self._batch = self.tokenizer_ = Closed()
        # Finishing a file takes memory, which the cap has only now.
        if sink is not None:
            sink.close(recorded)

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
