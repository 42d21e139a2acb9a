"""Every architecture of the pinned llama.cpp: a tiny model of each is streamed and compared with stock bit for bit.

``python -m moestream.lab.models docs/models.md`` writes the page; ``make models`` calls it. A row is measured in a
process of its own, because llama.cpp ends its process over what it cannot run. Nothing here is timed.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from moestream.box import Box
from moestream.errors import BudgetError, MoestreamError
from moestream.geometry import slab_geometry
from moestream.lab.logits import PROMPT, STEPS, Logits, answer, difference, remembers
from moestream.make import ARCHITECTURES, make_model
from moestream.make.ask import refusal
from moestream.make.census import look, without_entry
from moestream.make.random_model import MIXTURES, QUANTS
from moestream.model import Model, read_model
from moestream.model.ggml import binding_version

#: More experts of fewer pages than the usual tiny model: the smallest budget holds a few of them.
SHAPE = "tiny,experts=32"
MECHANISMS = ("arena", "mapped+willneed")
#: What a row is measured with: a mechanism with a share of the experts, and an arena with as few as there may be.
FEWEST = "arena, fewest experts"
ARMS = (*MECHANISMS, FEWEST)
EQUAL = "equal"
#: The architecture that is tried in every quantization.
PLAIN = "llama"
_COLUMNS = (
    "| architecture | type | tensors of an expert | beside them | "
    + " | ".join((*(f"`{mechanism}`" for mechanism in MECHANISMS), f"`{FEWEST.replace(',', '`,', 1)}"))
    + " |"
)
_PAGE = """# Models that stream

Every mixture-of-experts architecture of the llama.cpp in {binding}. Each row is a tiny model with random
weights (`moestream make-model --arch ARCHITECTURE --shape tiny,experts=32 --quant TYPE`) that llama.cpp itself runs
first: a prompt of {prompt} tokens in several batches, then {steps} greedy tokens. *equal*: under this mechanism all
logits of every step are llama.cpp's own bit for bit, and `arena` had to evict experts. *fewest experts*: under the
smallest cap that `moestream plan` names for the model, with no more experts than a step of {fewest} tokens needs at
once. Anything else is the reason in the words of the program that gave it, or how the logits differ. `make models`
writes this page; CI makes every row again.

## Architectures

{head}
{architectures}

`refact` is refused because llama.cpp loads its experts and never multiplies them: the graph of `src/models/refact.cpp`
has a dense feed-forward block only. Names that end in `-apart` and `-merged` are another layout of the architecture
before the hyphen.

## Architectures without a row

Of all that llama.cpp has a name for, these have no row. Its own loader was asked for their tensors, with keys that
would give them experts, and made *no experts*, or no model, for the reason that follows. `graniteswitch` multiplies by
id what are adapters.

{others}

## Types

Every type that ggml's quantizer makes, and a mixture of two across layers and roles.

{head}
{quants}
"""
_BATCH, _FEWEST_BATCH = 32, 2
#: At the smallest cap.
_ATTEMPTS = 4
_SETTINGS: dict[str, Any] = {
    "n_ctx": 256, "n_batch": _BATCH, "n_ubatch": _BATCH, "n_threads": 1, "n_threads_batch": 1,
}  # fmt: skip
#: Of all experts, what the cache may hold: about one layer of four.
_SHARE = 0.3
#: Above what any of the tiny models needs beside its experts, of which only ``_expert_bytes`` are kept.
_RAM = 2 << 30


@dataclass(frozen=True)
class Row:
    """One model: what its layers are like, and for each mechanism ``equal`` or why not."""

    name: str
    quant: str
    experts: str
    beside: str
    outcomes: tuple[str, ...]

    @property
    def line(self) -> str:
        """Its line of the page."""
        return (
            f"| `{self.name}` | {self.quant} | {self.experts} | {self.beside} | {' | '.join(self.outcomes)} |"
        )


def quant_of(arch: str) -> str:
    """The quantization an architecture is tried in."""
    return "MXFP4" if arch == "gpt-oss" else "Q4_K"


def measure(arch: str, quant: str) -> Row:
    """The row of one model, made, run and thrown away in a fresh process."""
    command = [sys.executable, "-m", "moestream.lab.models", "--one", arch, quant]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        # Who has killed it (for its memory, say) is not who ends himself over what he cannot run.
        ended = f", ended by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else ""
        reason = f"llama.cpp{ended}: {_short(refusal(done.stderr))}"
        return Row(arch, quant, "", "", tuple(reason for _ in ARMS))
    found = json.loads(done.stdout.splitlines()[-1])
    return Row(**{**found, "outcomes": tuple(found["outcomes"])})


@contextmanager
def measuring(models: Sequence[tuple[str, str]]) -> Iterator[dict[tuple[str, str], Future[Row]]]:
    """While inside, these models are measured, as many at a time as there are processors: each computes with one
    thread. What has not been begun by the end is not."""
    pool = ThreadPoolExecutor(Box().cpus())
    try:
        yield {model: pool.submit(measure, *model) for model in dict.fromkeys(models)}
    finally:
        pool.shutdown(cancel_futures=True)


def _short(reason: str) -> str:
    """A line of llama.cpp's log without the path of its source, fit for a table."""
    return re.sub(r"/\S*/", "", reason).replace("|", "/")


def _measure_here(arch: str, quant: str) -> Row:
    with tempfile.TemporaryDirectory() as directory:
        path = make_model(arch, SHAPE, quant, Path(directory, "model.gguf"))
        model = read_model(path)
        _stock(path, _BATCH)  # what stock cannot run is its own reason, not a mechanism's
        outcomes = tuple(_outcome(path, model, arm) for arm in ARMS)
    return Row(arch, quant, _experts(model), _beside(model), outcomes)


@dataclass(frozen=True)
class _Stock:
    """What llama.cpp itself answers, and whether the model has a memory."""

    rows: list[Logits]
    remembers: bool


@cache
def _stock(path: Path, n_batch: int) -> _Stock:
    """In steps of ``n_batch`` tokens."""
    return _ask_stock(path, n_batch)


def _ask_stock(path: Path, n_batch: int) -> _Stock:
    from moestream.binding import llama_cpp, wrapped_defaults

    def change(params: Any) -> None:
        params.use_extra_bufts = False

    settings = {**_SETTINGS, "n_batch": n_batch, "n_ubatch": n_batch, "verbose": True}
    with wrapped_defaults(model=change):
        llama = llama_cpp.Llama(str(path), **settings)
    try:
        found = _Stock(answer(llama), remembers(llama))
    finally:
        llama.close()
    if not all(np.isfinite(row).all() for row in found.rows):
        raise MoestreamError("the logits are not numbers")
    return found


def _load(path: Path, model: Model, arm: str) -> Any:
    """Our ``Llama`` as an arm has it."""
    import moestream

    geometry = slab_geometry(model)
    smallest = geometry.bytes_of(geometry.smallest(1))
    # Without a memory llama.cpp computes all rows of a batch, whichever are asked for.
    settings = {**_SETTINGS, "logits_all": not _stock(path, _BATCH).remembers}
    if arm != FEWEST:
        everything = geometry.bytes_of([part.experts for part in geometry.parts])
        limit = max(int(_SHARE * everything), smallest)
        return moestream.Llama(path, ram=_RAM, mechanism=arm, _expert_bytes=limit, **settings)
    llama = _load_in_fewest(path, smallest, settings)
    llama.n_batch = min(llama.n_batch, _FEWEST_BATCH)
    # The budget's pages are of 2 MiB, in which more of these small experts would find room.
    fewest = geometry.smallest(llama.n_batch)
    if list(llama._engine.resize(fewest)) != fewest:
        llama.close()
        raise MoestreamError(f"the budget does not shrink to {fewest} experts")
    return llama


def _load_in_fewest(path: Path, expert_bytes: int, settings: dict[str, Any]) -> Any:
    """Within the smallest cap, which a plan that is refused names. Asked until it does, for this process has run other
    arms, and what it holds of them moves by a megabyte."""
    import moestream

    cap = 1
    for _ in range(_ATTEMPTS):
        try:
            return moestream.Llama(path, ram=cap, mechanism="arena", _expert_bytes=expert_bytes, **settings)
        except BudgetError as error:
            if error.smallest_bytes is None:
                raise
            cap = error.smallest_bytes
    raise MoestreamError(f"a cap of {cap} bytes, named as one that works, is refused")


def _outcome(path: Path, model: Model, arm: str) -> str:
    """``equal``, or in what way the arm does not do what stock does."""
    try:
        with _load(path, model, arm) as llama:
            n_batch = llama.n_batch
            expected = _stock(path, n_batch).rows
            found = difference(answer(llama), expected)
            if found is None:
                unmoved = arm.startswith("arena") and not _evicted(llama)
                return "**nothing was evicted**" if unmoved else EQUAL
            repeated = _repeated(lambda: answer(llama), expected)
    except MoestreamError as error:
        return f"refused: {error}"
    anew = _repeated(lambda: _answer_anew(path, model, arm), expected)
    stock = _repeated(lambda: _ask_stock(path, n_batch).rows, expected)
    return f"**differs** {found}; again: {repeated}; loaded anew: {anew}; llama.cpp again: {stock}"


def _repeated(run: Callable[[], list[Logits]], expected: list[Logits]) -> str:
    """What an answer that differed is when it is asked for once more: a fault of the moment, of a load or for ever."""
    try:
        found = difference(run(), expected)
    except MoestreamError as error:
        return f"refused: {error}"
    return EQUAL if found is None else f"differs {found}"


def _answer_anew(path: Path, model: Model, arm: str) -> list[Logits]:
    with _load(path, model, arm) as llama:
        return answer(llama)


def _evicted(llama: Any) -> bool:
    counters = llama._engine.counters
    return bool(counters["misses"] + counters["speculative_issued"] > sum(llama.plan.capacities))


def _experts(model: Model) -> str:
    """The tensors a route reads: ``gate up down``, and the same of a second bank in the layer."""
    kinds: dict[str, None] = {}
    for bank in model.banks:
        kinds[" ".join(tensor.role for tensor in bank.tensors)] = None
    return ", ".join(kinds)


_ROUTED_BEFORE_ATTENTION = ("smallthinker",)
#: What a layer may have beside its experts: how the names of its tensors tell.
_TRAITS = {
    "shared experts": r"_shexp\.weight",
    "expert biases": r"_exps\.bias",
    "expert scales": r"_exps\.scale",
    "latent experts": r"ffn_latent_down|ffn_routed_down",
    "token table": r"tid2eid",
    "selection bias": r"exp_probs_b",
    "recurrent layers": r"\.ssm_|shortconv|attn_norm_2",
    "next-token prediction": r"\.nextn\.",
}


def _beside(model: Model) -> str:
    names = "\n".join(tensor.name for tensor in model.tensors)
    traits = [trait for trait, pattern in _TRAITS.items() if re.search(pattern, names)]
    layers = {bank.layer for bank in model.banks}
    if layers and len(layers) < model.n_layers - min(layers):
        traits.insert(0, "layers without experts between")
    if layers and min(layers) > 0:
        traits.insert(0, "leading layers without experts")
    if model.arch in _ROUTED_BEFORE_ATTENTION:
        traits.append("routed before attention")
    groups = model.metadata.get(f"{model.arch}.expert_group_count")
    if isinstance(groups, int) and groups > 1:
        traits.append("grouped top-k")
    return ", ".join(traits) or "-"


def wanted() -> list[tuple[str, str]]:
    """What the page has a row for: every architecture, then one of them in every quantization."""
    rows = [(arch, quant_of(arch)) for arch in ARCHITECTURES]
    return rows + [(PLAIN, quant) for quant in (*QUANTS, *MIXTURES)]


def others(names: Sequence[str]) -> dict[str, str]:
    """What llama.cpp makes of architectures that have no row."""
    with ThreadPoolExecutor(Box().cpus()) as pool:
        return dict(zip(names, map(_short, pool.map(look, names)), strict=True))


def page(rows: Iterable[Row], others: Mapping[str, str]) -> str:
    """docs/models.md. ``others``: what ``census.look`` says of the architectures without a row."""
    lines = [row.line for row in rows]
    head = "\n".join((_COLUMNS, re.sub(r"[^|]+", "---", _COLUMNS)))
    architectures, quants = lines[: len(ARCHITECTURES)], lines[len(ARCHITECTURES) :]
    return _PAGE.format(
        binding=binding_version(), prompt=PROMPT, steps=STEPS, fewest=_FEWEST_BATCH, head=head,
        architectures="\n".join(architectures), quants="\n".join(quants),
        others="\n".join(f"- `{arch}`: {found}" for arch, found in others.items()),
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--one"]:
        print(json.dumps(asdict(_measure_here(*arguments[1:]))))
        return 0
    if len(arguments) != 1:
        print("usage: python -m moestream.lab.models docs/models.md", file=sys.stderr)
        return 2
    rows = []
    with measuring(wanted()) as under_way:
        for model in wanted():
            rows.append(under_way[model].result())
            print(rows[-1].line, flush=True)
    Path(arguments[0]).write_text(page(rows, others(without_entry())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
