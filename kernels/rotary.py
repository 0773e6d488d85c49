"""Rotary position embedding of the rows that an attention launch reads and stores.

Where it sits: in compiled decoding, where queries and this step's keys come to attention as they
were projected (`new_rows`); the programs rotate them while they load them, a launch a layer less.
Maths: `y = x cos + swapped(x) sin` on the first P dims, `swapped(x) = (-x[P/2:P], x[:P/2])`; dims
from P on stay. Both products and the sum are rounded to the dtype of the rows, as in PyTorch, which
runs one operation after the other: keys have the bits that passes without a compiler store. (Tested
in half precision; float32 is not promised.)
Letters: T packed rows, H heads, D head dim, P rotary dims.
Source: RoFormer (arXiv:2104.09864), in the form with halves instead of pairs (GPT-NeoX).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mtp_research.kernels import checks

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    tl = None

if TYPE_CHECKING:
    from torch import Tensor


def rotate_ref(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated `rows` in plain PyTorch, on any device and dtype.

    Args:
        rows: `[T, H, D]`.
        cos: `[T, P]`, dtype of `rows`; P is even and at most D.
        sin: `[T, P]`.
    """
    turned, kept = rows.split((cos.shape[1], rows.shape[2] - cos.shape[1]), dim=-1)
    low, high = turned.chunk(2, dim=-1)
    swapped = torch.cat((-high, low), dim=-1)
    return torch.cat((turned * cos[:, None] + swapped * sin[:, None], kept), dim=-1)


def check_angles(rows: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Refuses cos and sin that do not fit `rows` `[T, H, D]`.

    Raises:
        ValueError: names the tensor and what was expected of it.
    """
    num_rotary_dims = cos.shape[-1]
    for name, tensor in (("cos", cos), ("sin", sin)):
        shape = (rows.shape[0], num_rotary_dims)
        checks.check_shape(name, tensor, shape=shape, letters="[T, P]")
        checks.check_dtype(name, tensor, dtype=rows.dtype)
        checks.check_device(name, tensor, device=rows.device)
    if num_rotary_dims % 2 or not 0 < num_rotary_dims <= rows.shape[2]:
        raise ValueError(
            f"cos must have an even number of dims in [2, {rows.shape[2]}], got {num_rotary_dims}."
        )


@checks.kernel_jit
def load_rotated(
    source,  # pointers [N, 1] to dim 0 of each row
    cos,  # pointers [N, 1] to dim 0 of the row's cos
    sin,  # likewise
    is_row,  # [N, 1] bool
    dims,  # [1, padded D], from 0 on
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # P
):
    """Part of an attention program: the rotated rows `[N, padded D]`, zero where there is none."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    is_turned = is_row & (dims < ROTARY_DIM)
    # A second load instead of a shuffle: the partner dim belongs to another thread.
    partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
    x = tl.load(source + dims, mask=is_row & (dims < HEAD_DIM), other=0.0)
    swapped = tl.load(source + partner, mask=is_turned, other=0.0)
    c = tl.load(cos + dims, mask=is_turned, other=0.0)
    s = tl.load(sin + dims, mask=is_turned, other=0.0)
    # Each step is rounded to the dtype of the rows; the interpreter needs float32 in between too.
    direct = (x.to(tl.float32) * c.to(tl.float32)).to(x.dtype)
    crossed = (swapped.to(tl.float32) * s.to(tl.float32)).to(x.dtype)
    # A select on either side keeps the compiler from fusing a product with the sum.
    direct = tl.where(is_turned, direct, 0.0)
    crossed = tl.where(dims < HALF, -crossed, crossed)
    rotated = (direct.to(tl.float32) + crossed.to(tl.float32)).to(x.dtype)
    return tl.where(dims < ROTARY_DIM, rotated, x)
