"""One arm of the engine, in a process of its own: ``python -m moestream.lab.worker MODEL ... --json FILE``.

The document is that of ``run --json`` with ``n_batch``, ``prompt_tokens``, ``memory`` (at the end) and the kernel's
accounts of what was read and written beside it. A mechanism that does not engage as asked is an error.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from moestream.box import process_memory
from moestream.engine import Llama
from moestream.errors import MoestreamError
from moestream.lab.arm import arguments, die_with_parent, generate
from moestream.lab.bench_reads import Accounts
from moestream.report import run_document, write_json
from moestream.units import parse_size


def measure(options: Any) -> dict[str, Any]:
    """Load, generate, and the document of it."""
    cap = parse_size(options.ram) if options.ram is not None else None
    accounts, begun = Accounts(options.model), time.process_time()
    with Llama(
        options.model,
        ram=cap,
        mechanism=options.mechanism,
        strict=options.mechanism is not None,
        trace=options.trace,
        governor=False,
        _expert_bytes=options.expert_bytes,
        n_ctx=options.ctx,
        n_batch=options.batch,
        n_threads=options.threads,
        n_threads_batch=options.threads,
    ) as llama:
        load_cpu = time.process_time() - begun
        accounts.end("load")
        generated = generate(llama, options, accounts.end)
        generated.cpu_s["load"] = load_cpu
        document = run_document(llama, generated, options.mechanism, cap)
        accounts.put_into(document)
        document["n_batch"] = llama.n_batch
        document["prompt_tokens"] = generated.prompt_tokens
        memory = process_memory()
        document["memory"] = {"anon": memory.anon_bytes, "locked": memory.locked_bytes}
    return document


def main() -> int:
    parser = arguments("One run of the engine for the lab.")
    parser.add_argument("--ram", help="the cap; left out: what the box has to spare")
    parser.add_argument("--mechanism", help="left out: the default, with its fallbacks")
    parser.add_argument("--expert-bytes", type=int, help="at most this much of the cap goes to experts")
    parser.add_argument("--trace", type=Path, help="record routes, reads and steps in this Parquet file")
    options = parser.parse_args()
    die_with_parent()
    try:
        write_json(options.json, measure(options))
    except MoestreamError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
