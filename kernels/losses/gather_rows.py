"""Rows picked by index, scaled and cast in one pass: both ways between anchors and positions.

    out[r] = scale[r] * values[index[r]],  0 where index[r] < 0

Where it sits: the multi-depth loss picks the drafts' rows that have a label, and its backward pass
brings their gradients back to the anchors; an anchor has at most one row at a depth, so both are
reads by index, and nothing is added by atomics.
Letters: R rows written, U rows read, D hidden.
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

ROWS_PER_PROGRAM = 4
MAX_BLOCK_D = 2048
NUM_WARPS = 4


def gather_rows_ref(
    values: Tensor, *, index: Tensor, out: Tensor, scale: Tensor | None = None
) -> None:
    """Plain PyTorch, see `gather_rows`; any float dtype, any device."""
    if not len(values):
        out.zero_()
        return
    found = values.index_select(0, index.clamp(min=0))
    if scale is not None:
        found = found * scale[:, None]
    out.copy_(found.masked_fill_(index[:, None] < 0, 0))


@checks.kernel_jit
def _gather_kernel(
    values,  # [U, D]
    index,  # [R] int64
    scale,  # [R] float32; not read without HAS_SCALE
    out,  # [R, D], written
    num_rows,
    hidden_size,
    stride_values,
    HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    exists = rows < num_rows
    source = tl.load(index + rows, mask=exists, other=-1)
    inside = columns < hidden_size
    mask = (source >= 0)[:, None] & inside[None, :]
    found = tl.load(values + source[:, None] * stride_values + columns[None, :], mask=mask, other=0)
    if HAS_SCALE:
        factor = tl.load(scale + rows, mask=exists & (source >= 0), other=0.0)
        found = found.to(tl.float32) * factor[:, None]
    target = out + rows[:, None] * hidden_size + columns[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=exists[:, None] & inside[None, :])


def gather_rows(
    values: Tensor,
    *,
    index: Tensor,
    out: Tensor,
    scale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write the picked rows of `values`, scaled, to `out`.

    Args:
        values: `[U, D]`, contiguous in D.
        index: `[R]` int64 below U; negative ones give zeros, whatever `values` and `scale` hold.
        out: `[R, D]`, contiguous, any float dtype, written.
        scale: `[R]` float32, or the dtype of `values` for the reference; None for 1.
        backend: `auto`, `reference` or `triton`.

    Raises:
        ValueError: shapes or dtypes disagree, or the backend cannot run the tensors.
    """
    checks.check_rank("values", values, letters="[U, D]")
    checks.check_rank("index", index, letters="[R]")
    shape = (len(index), values.shape[1])
    checks.check_shape("out", out, shape=shape, letters="[R, D]")
    if scale is not None:
        checks.check_shape("scale", scale, shape=shape[:1], letters="[R]")
    if checks.resolve_backend(backend, tensor=values, kernel=_gather_kernel) == "reference":
        gather_rows_ref(values, index=index, out=out, scale=scale)
        return
    _check_kernel_tensors(values, index=index, out=out, scale=scale)
    if not out.numel():
        return
    block = min(MAX_BLOCK_D, triton.next_power_of_2(shape[1]))
    grid = (triton.cdiv(shape[0], ROWS_PER_PROGRAM), triton.cdiv(shape[1], block))
    with checks.launch_device(values):
        _gather_kernel[grid](
            values,
            index,
            index if scale is None else scale,
            out,
            *shape,
            values.stride(0),
            HAS_SCALE=scale is not None,
            ROWS=ROWS_PER_PROGRAM,
            BLOCK_D=block,
            num_warps=NUM_WARPS,
        )


def _check_kernel_tensors(
    values: Tensor, *, index: Tensor, out: Tensor, scale: Tensor | None
) -> None:
    checks.check_dtype("index", index, dtype=torch.int64)
    for name, tensor in (("values", values), ("out", out)):
        checks.check_kernel_dtype(name, tensor, kernel=_gather_kernel)
    for name, tensor in {"values": values, "index": index, "out": out, "scale": scale}.items():
        if tensor is not None:
            checks.check_device(name, tensor, device=values.device)
            checks.check_last_dim_contiguous(name, tensor)
    if scale is not None:
        checks.check_dtype("scale", scale, dtype=torch.float32)
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}.")
