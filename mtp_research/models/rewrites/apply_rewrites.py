"""Everything that edits a library's modules in place, or the library: one door, `apply_rewrites`.

Models are loaded as Hugging Face builds them. Compiled decoding then rewrites them; each rewrite
keeps names, parameters and values, so that the same modules without `torch.compile` do what they
did. Figures are of one H200 (docs/decisions.md, docs/benchmarks.md).

**Merged projections** (products.py). Queries, keys and values of a layer, and gate and up of an
MLP, become one product: 13.6 instead of 26 us for the first three of a layer of the 7B shape at 4
rows. `engine.compile=false` turns it off, and all that follows up to overlapping launches.

**Products of few rows** (products.py). Products of up to 16 rows, and of lm_heads, go through our
kernel, gated MLPs of one row and of 9 to 16 with their activation: 97.9 instead of 109.3 us for
all products of a layer of the 7B shape at 4 rows, with the small kernels between them.
`engine.few_rows_kernel=false` turns it off.

**Rotation inside attention** (rotary.py). An attention class gets a second forward that leaves the
rotary embedding to the launch which reads and stores the rows: MiMo-7B takes 5.751 ms instead of
5.830 at batch 1 (371 launches instead of 441), 8.436 instead of 8.699 at 32. It is taken only where
a probe gives the very bits. `engine.rotary_in_attention=false` turns it off.

**Regions** (regions.py). A step calls its layers through an op, and the op runs code that was
compiled once, for every layer and number of rows: a 135M model with K = 0 and four conditions is
ready 128 s after the command, where K = 0 and one batch size of one condition took 143 before; a
step has one launch a layer more. `engine.layer_regions=false` turns it off.

**Overlapping launches** (`compile_options`, below). Inductor's code generator lets a kernel start
before the one in front has ended, and ours moves its wait to the front: MiMo-7B takes 5.674 ms
instead of 5.763 at batch 1, 8.474 instead of 8.527 at 32. A kernel lets the next one start before
it waits, so that a product asks for its weight while the norm in front of it, and what is in front
of that, still run: 3.877 ms instead of 3.917 at batch 1. `engine.overlap_launches=false` turns it
off, but for kernels of ours that wait by themselves (products of few rows, of heads, expert layers,
attention).

**Routers and experts** (models/experts.py, when a target is wrapped, compiled
or not). The choice of experts is one kernel instead of a dozen calls: 26.9 instead of 33.7 ms for
the target forward of a training step of lab_base. `model.experts=grouped_mm` keeps the library's.

**Shared experts** (shared_experts.py). A shared expert of an expert's size becomes one more pair of
every token, in the two launches of the routed ones. `engine.compile=false` turns it off.

**Layers on a CPU** (cpu_layers.py, when a decoder is built). Weights that come from memory become
the left operand: 4 rows of a 30-layer 135M model take 87 instead of 186 ms on two cores; those of
few inputs lie in memory by their columns. Norms take four calls instead of eight, and small experts
run as two products: a step of 16 small MoE layers takes 16.4 to 17.7 instead of 20.4 ms on one core
at batch 4. `engine.few_rows_kernel=false` turns all of these off.

**Batch-invariant products** (invariant.py). Products are kernels whose rows do not depend on the
rows beside them: all of 200 texts are the same for K = 0 and 3, where 51 are without; K = 0 takes 8
to 36 % longer. Uncompiled steps enter a mode that replaces products and sums, compiled ones call
regions alone, of layers, norms and rotary embeddings. On only with `engine.deterministic=true`; of
the rewrites above those stay that choose nothing by the number of rows.
"""

from typing import Any

import torch
from torch import nn

from mtp_research.config.schema import EngineConfig
from mtp_research.models.rewrites.products import merge_projections
from mtp_research.models.rewrites.regions import (
    DETERMINISTIC,
    CompileOptions,
    compile_layers_once,
)
from mtp_research.models.rewrites.rotary import leave_rotary_to_attention
from mtp_research.models.rewrites.row_modules import compile_row_modules
from mtp_research.models.rewrites.shared_experts import join_shared_experts
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError

_WRAPPED = ("_filter_pdl", "_enable_pdl_codegen", "GDC_WAIT", "GDC_LAUNCH")
_HOPPER = (9, 0)
_CACHE_TAG = "mtp_research: kernels start the next one, then wait"


def apply_rewrites(target: Target, heads: nn.Module | None, engine: EngineConfig) -> None:
    """Rewrite target and heads for compiled steps, in place; nothing without `engine.compile`.

    `engine` says which rewrites; a later call with others changes what an earlier one did.
    """
    if not engine.compile:
        return
    for model in (target.model, heads):
        if model is None:
            continue
        usual = not engine.deterministic  # else the number of rows would choose kernels
        merge_projections(model, few_rows_kernel=engine.few_rows_kernel and usual)
        join_shared_experts(model, always=not usual)
        leave_rotary_to_attention(target, model, enabled=engine.rotary_in_attention and usual)
        options = options_of(engine)
        compile_layers_once(target, model, enabled=engine.layer_regions, options=options)
        compile_row_modules(target, model, options=options)


def options_of(engine: EngineConfig) -> CompileOptions:
    """`compile_options` of an engine's steps."""
    options = compile_options(overlaps=engine.overlap_launches)
    if engine.deterministic:  # no kernel chosen by a race, and the roundings of separate calls
        options |= {DETERMINISTIC: True, "emulate_precision_casts": True}
    return options


def compile_options(*, overlaps: bool) -> CompileOptions:
    """Options of `torch.compile`, from here on with kernels that wait at once where they overlap.

    With Inductor's programmatic dependent launch a kernel waits where it first touches what the one
    in front of it wrote. Between kernels A, B, C that is not enough: a B that touches nothing of
    A's (it fills a tensor, say) never waits and may end before A does, and C, which waits for B,
    then reads what A has not written yet. Here every generated kernel waits before it touches
    memory: it knows that the one in front has ended, which had waited too, and so on. That is the
    order of a stream, with the launches themselves hidden; kernels launched the ordinary way fit
    into the chain, NCCL's among them: it runs what ranks wait for on the stream of the step.

    Before it waits a kernel lets the next one begin (`checks.start_next_and_wait`);
    `checks.wait_in_front` says what kernels of ours may then read before they wait.
    """
    return {"triton.enable_pdl": overlaps and _start_next_and_wait()}


def _start_next_and_wait() -> bool:
    """Have Inductor's kernels do so in their first lines, once and for all in this process.

    Returns False where that cannot be done and nothing would overlap anyway.
    """
    from torch._inductor.codegen.triton import TritonKernel

    known = [hasattr(TritonKernel, name) for name in _WRAPPED]
    if not all(known):
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < _HOPPER:
            return False
        raise ConfigError(
            f"engine.overlap_launches: expected a PyTorch whose TritonKernel has {_WRAPPED} (2.11 "
            f"to 2.13 do), got {torch.__version__}; set engine.overlap_launches=false."
        )
    keep_one = TritonKernel._filter_pdl
    if hasattr(keep_one, "moves_the_wait"):
        return True
    start_next, wait = TritonKernel.GDC_LAUNCH, TritonKernel.GDC_WAIT

    def is_either(line: object) -> bool:
        return isinstance(line, str) and (wait in line or start_next in line)

    def filter_then_move(kernel: TritonKernel, code: Any) -> None:
        keep_one(kernel, code)
        if kernel._enable_pdl_codegen():
            code._lines = [start_next, wait, *(line for line in code._lines if not is_either(line))]

    filter_then_move.moves_the_wait = True
    TritonKernel._filter_pdl = filter_then_move
    # Kernels that an earlier process left in the disk cache have their waits elsewhere.
    torch.compiler.config.cache_key_tag += _CACHE_TAG
    return True
