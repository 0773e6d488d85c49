"""Products of a few rows with a weight of each head, around latent attention in its absorbed form.

Where it sits: `expanded_attention.absorbed` moves a head's key projection to its queries, and its
value projection behind the attention; in layers that are compiled by themselves, of steps with few
rows a request, both go through here. The library's batched product asks for its weights when the
kernel in front has ended, and no sooner.
Maths: out[h, t, n] = sum_k x[h, t, k] * weight[h, k, n], accumulated in float32.
Layout: a program has all of K and BLOCK_N outputs of one head. On Hopper it asks for them before
the kernel in front of it has ended, and waits before it reads `x`.
Letters: H heads, T rows, K depth, N outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.splits import ceil_div, next_power_of_two
from mtp_research.kernels.checks import wait_in_front

if TYPE_CHECKING:
    from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None


@checks.kernel_jit_once("num_rows")
def head_product_kernel(
    x,  # [H, T, K]
    weight,  # [H, K, N]
    out,  # [H, T, N], contiguous; written
    num_rows,
    depth,
    num_outputs,
    stride_x_head,
    stride_x_row,
    stride_weight_head,
    stride_weight_k,
    stride_weight_n,
    BLOCK_T: tl.constexpr,  # 1: multiplied without the matrix instruction
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """BLOCK_N outputs of the rows of a head."""
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_k, is_output = k < depth, n < num_outputs
    weight_at = weight + head * stride_weight_head
    weight_at += k[:, None] * stride_weight_k + n[None, :] * stride_weight_n
    w = tl.load(weight_at, mask=is_k[:, None] & is_output[None, :], other=0.0)
    wait_in_front(OVERLAPS)
    x += head * stride_x_head
    out += head * num_rows * num_outputs + n
    if BLOCK_T == 1:
        a = tl.load(x + k, mask=is_k, other=0.0).to(tl.float32)
        acc = tl.sum(w.to(tl.float32) * a[:, None], 0)
        tl.store(out, acc.to(out.dtype.element_ty), mask=is_output)
    else:
        row = tl.arange(0, BLOCK_T)
        is_row = row < num_rows
        x_at = x + row[:, None] * stride_x_row + k[None, :]
        a = tl.load(x_at, mask=is_row[:, None] & is_k[None, :], other=0.0)
        acc = tl.dot(a, w, input_precision="ieee")
        at = out[None, :] + row[:, None] * num_outputs
        tl.store(at, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


MAX_ROWS = 16  # of a tile: the least of the matrix instruction
_MAX_FASTER_ROWS = 8
_MAX_FASTER_NUMBERS = 4 << 20  # of a weight: 128 heads of DeepSeek-V3 have twice as many
_LEAST_OUTPUTS = 16  # of a program
_SLAB = 16_384  # numbers of a weight that a program holds
_NUM_WARPS = 4
_HOPPER = 9


def head_product_ref(x: Tensor, weight: Tensor) -> Tensor:
    """Plain PyTorch. Arguments and result as in `head_product`."""
    return torch.bmm(x, weight)


def head_product(x: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """`x @ weight` of each head.

    Args:
        x: `[H, T, K]`; for the kernel T is at most 16 and the last dimension contiguous.
        weight: `[H, K, N]`, dtype of `x`, either of the last two dimensions contiguous. Not written
            by kernels shortly in front, whose end is not waited for: see `checks.wait_in_front`.
        backend: `auto` (the kernel for at most 8 rows and 4 Mi numbers of a weight on a Hopper GPU;
            it was faster at 1 and 4 rows of 20 heads, and slower at 16 and of 128 heads),
            `reference` or `triton`.

    Returns:
        `[H, T, N]`, contiguous.
    """
    checks.check_rank("x", x, letters="[H, T, K]")
    checks.check_rank("weight", weight, letters="[H, K, N]")
    num_heads, num_rows, depth = x.shape
    num_outputs = weight.shape[2]
    letters = "[H, K, N]"
    checks.check_shape("weight", weight, shape=(num_heads, depth, num_outputs), letters=letters)
    checks.check_dtype("weight", weight, dtype=x.dtype)
    checks.check_device("weight", weight, device=x.device)
    resolved = checks.resolve_backend(backend, tensor=x, kernel=head_product_kernel)
    if resolved == "reference" or (backend == "auto" and not _is_faster(x, weight)):
        return head_product_ref(x, weight)
    checks.check_kernel_dtype("x", x, kernel=head_product_kernel)
    checks.check_last_dim_contiguous("x", x)
    if num_rows > MAX_ROWS:
        raise ValueError(
            f"x must have at most {MAX_ROWS} rows for backend 'triton', got {num_rows}; use "
            "backend='auto'."
        )
    out = x.new_empty(num_heads, num_rows, num_outputs)
    if out.numel() == 0:
        return out
    blocks = head_product_blocks(num_rows, depth)
    with checks.launch_device(x):
        head_product_kernel[(ceil_div(num_outputs, blocks["BLOCK_N"]), num_heads)](
            x,
            weight,
            out,
            num_rows,
            depth,
            num_outputs,
            *x.stride()[:2],
            *weight.stride(),
            **blocks,
            **checks.overlapping(x.device),
            num_warps=_NUM_WARPS,
        )
    return out


def head_product_blocks(num_rows: int, depth: int) -> dict[str, int]:
    """Compile-time sizes of a program, by parameter name."""
    block_k = max(16, next_power_of_two(depth))
    return {
        "BLOCK_T": 1 if num_rows == 1 else MAX_ROWS,
        "BLOCK_K": block_k,
        "BLOCK_N": max(_LEAST_OUTPUTS, _SLAB // block_k),
    }


def _is_faster(x: Tensor, weight: Tensor) -> bool:
    is_small = x.shape[1] <= _MAX_FASTER_ROWS and weight.numel() <= _MAX_FASTER_NUMBERS
    has_slabs = x.shape[2] * _LEAST_OUTPUTS <= _SLAB and x.stride(2) == 1
    is_known = x.dtype in checks.KERNEL_DTYPES
    is_hopper = torch.cuda.get_device_capability(x.device)[0] == _HOPPER
    return is_small and has_slabs and is_known and is_hopper
