"""Sums along rows whose bits do not depend on the number of rows, for deterministic decoding.

Where it sits: `models/invariant.py` calls it for the means inside norms and the weights of routers.
PyTorch's CUDA reduction shares a row among more threads when there are fewer rows, so that the
order of the additions follows the batch. Here one program walks each row in blocks of one size.
Letters: M rows, D columns.
Source: batch invariance as in thinking-machines-lab/batch_invariant_ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mtp_research.kernels import checks

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_D = 1024
NUM_WARPS = 4


def row_sum_ref(x: Tensor) -> Tensor:
    """Plain PyTorch, one row at a time. Arguments and result as in `row_sum`."""
    return torch.stack([row.clone().sum() for row in x]) if len(x) else x.new_empty(0)


@checks.kernel_jit
def _row_sum_kernel(
    x,  # [M, D], rows contiguous
    out,  # [M], written
    num_columns,
    stride_row,
    BLOCK_D: tl.constexpr,
):
    """The sum of one row, accumulated in float32."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_columns, BLOCK_D):
        column = start + lanes
        at = x + row * stride_row + column
        acc += tl.load(at, mask=column < num_columns, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(acc, 0).to(out.dtype.element_ty))


def row_sum(x: Tensor, *, backend: str = "auto") -> Tensor:
    """Sum of every row, with the bits it would have alone.

    Args:
        x: `[M, D]`, any strides.
        backend: `auto`, `reference` or `triton`.

    Returns:
        `[M]` in the dtype of `x`.

    Raises:
        ValueError: `x` is no matrix, or the backend cannot run its dtype.
    """
    checks.check_rank("x", x, letters="[M, D]")
    if checks.resolve_backend(backend, tensor=x, kernel=_row_sum_kernel) == "reference":
        return row_sum_ref(x)
    checks.check_kernel_dtype("x", x, kernel=_row_sum_kernel)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(len(x))
    if len(x) > 0:
        with checks.launch_device(x):
            _row_sum_kernel[(len(x),)](
                x, out, x.shape[1], x.stride(0), BLOCK_D=BLOCK_D, num_warps=NUM_WARPS
            )
    return out
