"""Forbidden tokens of a step's logits: -inf where the bit of a packed mask is 0.

Where it sits: `decode/sampling/grammar.py` calls it between the target's logits and verification.
One pass over the logits and one node for `torch.compile`: Inductor would unpack the bits inside the
reduction that reads the result, which takes many times as long as a pass of its own.
Maths: out = logits + 0 or -inf, so that NaN stays NaN, and +inf of a forbidden token becomes NaN.
Layout: one program unpacks a few words of one row, 32 logits each; any strides, nothing is copied.
Letters: R requests, J verified rows a request, V vocabulary, W = ceil(V / 32) words of a mask.
Source: the bit layout of xgrammar: token 32 w + b is bit b of word w, counted from the lowest.
"""

from __future__ import annotations

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.splits import ceil_div
from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None

BITS_PER_WORD = 32
MASK_WORDS, MASK_WARPS = 128, 4  # a program's words: 32 logits a thread


@checks.kernel_jit
def mask_logits_kernel(
    logits,  # [R, J, V]
    bitmask,  # [R, at least J, W] int32
    out,  # [R, J, V] contiguous, written
    num_rows,  # J
    vocab_size,
    num_blocks,  # programs a row
    stride_logits_request,
    stride_logits_row,
    stride_logits_token,
    stride_mask_request,
    stride_mask_row,
    stride_mask_word,
    WORDS: tl.constexpr,
):
    """Masks up to 32 WORDS logits of one row."""
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)  # of [R J]: offsets may pass 2^31
    request, column = row // num_rows, row % num_rows
    word = (program % num_blocks) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)[None, :]
    token = word[:, None] * 32 + bit
    inside = token < vocab_size
    mask_at = bitmask + request * stride_mask_request + column * stride_mask_row
    bits = tl.load(mask_at + word * stride_mask_word, mask=word * 32 < vocab_size, other=0)
    logits_at = logits + request * stride_logits_request + column * stride_logits_row
    value = tl.load(logits_at + token * stride_logits_token, mask=inside, other=0.0)
    masked = value + tl.where((bits[:, None] >> bit) & 1 != 0, 0.0, float("-inf"))
    tl.store(out + row * vocab_size + token, masked.to(value.dtype), mask=inside)


def mask_logits_ref(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Plain PyTorch. Arguments and result as in `mask_logits`."""
    bit = torch.arange(BITS_PER_WORD, dtype=torch.int32, device=bitmask.device)
    allowed = (bitmask[:, : logits.shape[1], :, None] >> bit) & 1  # [R, J, W, 32]
    allowed = allowed.flatten(-2)[..., : logits.shape[-1]].bool()
    return logits + torch.where(allowed, 0.0, -torch.inf).to(logits.dtype)


def mask_logits(logits: Tensor, bitmask: Tensor, *, backend: str = "auto") -> Tensor:
    """Logits with -inf at tokens whose bit is 0; one node for `torch.compile`, no gradient.

    Args:
        logits: `[R, J, V]`, any float dtype and strides; not changed.
        bitmask: `[R, J or more, W]` int32, any strides; the first J masks of a request are read.
        backend: `auto`, `reference` or `triton`.

    Returns:
        `[R, J, V]` contiguous, dtype of `logits`. NaN stays NaN.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    return _mask_logits_op(logits, bitmask, backend)


@torch.library.custom_op("mtp_research::mask_logits", mutates_args=())
def _mask_logits_op(logits: torch.Tensor, bitmask: torch.Tensor, backend: str) -> torch.Tensor:
    checks.check_rank("logits", logits, letters="[R, J, V]")
    checks.check_rank("bitmask", bitmask, letters="[R, J or more, W]")
    num_requests, num_rows, vocab_size = logits.shape
    shape = (num_requests, max(num_rows, bitmask.shape[1]), ceil_div(vocab_size, BITS_PER_WORD))
    checks.check_shape("bitmask", bitmask, shape=shape, letters="[R, J or more, W]")
    checks.check_dtype("bitmask", bitmask, dtype=torch.int32)
    checks.check_device("bitmask", bitmask, device=logits.device)
    if checks.resolve_backend(backend, tensor=logits, kernel=mask_logits_kernel) == "reference":
        return mask_logits_ref(logits, bitmask).contiguous()  # as the compiled step is told
    out = logits.new_empty(logits.shape)
    num_blocks = ceil_div(shape[2], MASK_WORDS)
    if out.numel():
        with checks.launch_device(logits):
            mask_logits_kernel[(num_requests * num_rows * num_blocks,)](
                logits,
                bitmask,
                out,
                num_rows,
                vocab_size,
                num_blocks,
                *logits.stride(),
                *bitmask.stride(),
                WORDS=MASK_WORDS,
                num_warps=MASK_WARPS,
            )
    return out


@_mask_logits_op.register_fake
def _mask_logits_fake(logits: Tensor, bitmask: Tensor, backend: str) -> Tensor:
    return logits.new_empty(logits.shape)
