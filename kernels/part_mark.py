"""A copy that marks a place in a captured step: its kernel's name is found in a trace of the step.

Where it sits: `bench_decode --split` puts one between the parts of a step and cuts the replay's
trace at them. It is an instrument; a step that is not measured in this way has none.
"""

from __future__ import annotations

import torch
from mtp_research.kernels import checks
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    triton = tl = None

KERNEL_NAME = "_part_mark_kernel"
BLOCK = 4096
NUM_WARPS = 4


def part_mark_ref(values: Tensor) -> Tensor:
    """Plain PyTorch, see `part_mark`; any dtype, any device."""
    return values.clone()


@checks.kernel_jit
def _part_mark_kernel(
    values,  # [num_values]
    out,  # [num_values], written
    num_values,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num_values
    tl.store(out + place, tl.load(values + place, mask=mask), mask=mask)


def part_mark(values: Tensor, *, backend: str = "auto") -> Tensor:
    """A copy of `values`, of any shape; by a kernel named `KERNEL_NAME` on a GPU.

    Args:
        values: copied whole, so that nothing that reads the result can start before the mark.
        backend: `auto`, `reference` or `triton`.
    """
    if checks.resolve_backend(backend, tensor=values, kernel=_part_mark_kernel) == "reference":
        return part_mark_ref(values)
    values = values.contiguous()
    out = torch.empty_like(values)
    if values.numel():
        with checks.launch_device(values):
            grid = (triton.cdiv(values.numel(), BLOCK),)
            _part_mark_kernel[grid](values, out, values.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out
