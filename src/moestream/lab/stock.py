"""Plain llama.cpp as an arm: ``python -m moestream.lab.stock MODEL -p TEXT -n N --json FILE``.

The binding's own ``Llama`` with its own mapping of the file and OpenMP as the user's environment has it. The
one parameter that differs from the binding's defaults is ``use_extra_bufts=False``: repacked experts would
be another computation. The document has the keys of ``run --json`` that mean something here.
"""

from __future__ import annotations

import sys
import time
from typing import Any

# Before anything of ours imports it: ours sets OpenMP's spin count, and stock is to have its own.
import llama_cpp

from moestream.binding import wrapped_defaults
from moestream.box import Box, peak_rss_bytes, process_memory
from moestream.lab.arm import arguments, die_with_parent, generate
from moestream.lab.bench_reads import Accounts
from moestream.recorder import NO_COUNTERS, Recorder
from moestream.report import Generated, split_steps, write_json
from moestream.stats import phase_summary
from moestream.version import __version__


def load(options: Any) -> Any:
    """The binding's model, as a user of the binding would load it."""

    def without_repacking(params: Any) -> None:
        params.use_extra_bufts = False

    with wrapped_defaults(without_repacking):
        return llama_cpp.Llama(
            str(options.model),
            n_ctx=options.ctx,
            n_batch=options.batch,
            n_ubatch=options.batch,
            n_threads=options.threads,
            n_threads_batch=options.threads,
            verbose=False,
        )


def record_steps(llama: Any) -> Recorder:
    """A recorder of every ``llama_decode`` from now on; only the kernel's figures mean something."""
    recorder = Recorder(lambda: NO_COUNTERS)
    decode = llama._ctx.decode
    llama._ctx.decode = lambda batch: recorder.measure(batch.n_tokens(), lambda: decode(batch))
    return recorder


def document(
    options: Any, generated: Generated, recorder: Recorder, accounts: Accounts, load_s: float
) -> dict[str, Any]:
    prefill, decode = split_steps(recorder.last.steps, generated.prompt_tokens)
    memory = process_memory()
    made = {
        "version": __version__,
        "box": Box().describe(options.model),
        "mechanism": {"asked": "stock", "effective": "stock", "fallbacks": [], "engaged": {}},
        "load": {"seconds": load_s},
        "prefill": phase_summary(prefill),
        "decode": phase_summary(decode),
        "cpu_s": generated.cpu_s,
        "peak_rss_bytes": peak_rss_bytes(),
        "memory": {"anon": memory.anon_bytes, "locked": memory.locked_bytes},
        "n_batch": options.batch,
        "prompt_tokens": generated.prompt_tokens,
        "ended": generated.ended,
        "tokens": generated.tokens,
        "text": generated.text.decode("utf-8", "replace"),
    }
    accounts.put_into(made)
    # What stock's load reads the kernel reads for it.
    made["load"]["bytes_read"] = made["load"]["read_bytes_os"]
    return made


def main() -> int:
    options = arguments("One run of plain llama.cpp for the lab.").parse_args()
    die_with_parent()
    accounts, begun, cpu = Accounts(options.model), time.perf_counter(), time.process_time()
    llama = load(options)
    accounts.end("load")
    seconds = time.perf_counter() - begun
    cpu = time.process_time() - cpu
    recorder = record_steps(llama)
    generated = generate(llama, options, accounts.end)
    generated.cpu_s["load"] = cpu
    write_json(options.json, document(options, generated, recorder, accounts, seconds))
    llama.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
