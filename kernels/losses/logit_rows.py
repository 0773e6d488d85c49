"""What a step does to whole rows of logits: forbidden tokens get -inf, and the best one is found.

Where it sits: `decode/sampling/grammar.py` masks between the target's logits and verification, and
`models/rank_parts.py` asks for the best token of each row that is verified or drafted. Each is one
pass over the logits and one node for `torch.compile`. Inductor would unpack the bits of a mask
inside the reduction that reads the result, which takes many times as long as a pass of its own. Its
argmax compares index and value in one reduction: 55 instead of 19 us for 128 rows of 151,680.
Maths: out = logits + 0 or -inf, so that NaN stays NaN, and +inf of a forbidden token becomes NaN.
The best token is the largest logit's, of equals the first; NaN counts as the largest.
Layout: one program unpacks a few words of one row, 32 logits each; any strides, nothing is copied.
For the best token, one program walks a part of a row and keeps, for each of its lanes, the best
so far: comparing lanes costs more than reading, and is left for the end. P follows from V alone, so
that code compiled for any number of rows knows it.
Letters: R requests, J verified rows a request, V vocabulary, W = ceil(V / 32) words of a mask, P
parts of a row.
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
BEST_TOKENS, BEST_WARPS = 4096, 4  # read at once: 32 logits a thread
_MOST_PARTS = 16
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


@checks.kernel_jit
def best_tokens_kernel(
    logits,  # [T, V] contiguous
    values,  # [T, P], written
    indices,  # [T, P] int32, written
    vocab_size,
    part_size,
    num_parts,
    TOKENS: tl.constexpr,
):
    """The best token of a part of a row."""
    program = tl.program_id(0)
    row, part = (program // num_parts).to(tl.int64), program % num_parts
    first = part * part_size
    end = tl.minimum(first + part_size, vocab_size)
    lane = tl.arange(0, TOKENS)
    best = tl.full([TOKENS], float("-inf"), tl.float32)
    index = tl.zeros([TOKENS], tl.int32) + first
    for start in range(first, end, TOKENS):
        token = start + lane
        value = tl.load(logits + row * vocab_size + token, mask=token < end, other=float("-inf"))
        value = value.to(tl.float32)
        is_better = (value > best) | (value != value)
        best = tl.where(is_better, value, best)
        index = tl.where(is_better, token, index)
    is_nan = best != best
    largest = tl.max(tl.where(is_nan, float("-inf"), best), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    is_largest = tl.where(has_nan, is_nan, best == largest)
    at = row * num_parts + part
    tl.store(values + at, tl.where(has_nan, float("nan"), largest))
    tl.store(indices + at, tl.min(tl.where(is_largest, index, vocab_size), axis=0))


def best_tokens(logits: Tensor, *, backend: str = "auto") -> Tensor:
    """The best token of each row, the first of equals; no gradient.

    For `torch.compile` one node, and at most 16 numbers a row that are left to compare.

    Args:
        logits: `[..., V]`, bfloat16, float16 or float32, any strides; not changed.
        backend: `auto`, `reference` or `triton`.

    Returns:
        `[...]` int64, ids in 0..V-1; of a row with NaN, that of one.

    Raises:
        ValueError: another dtype, or V = 0.
    """
    values, indices = _best_in_parts(logits, backend)
    part = values.argmax(dim=-1, keepdim=True)  # of equals the first, as within one
    return indices.gather(-1, part)[..., 0].long()


def _parts(vocab_size: int) -> tuple[int, int]:
    """Tokens of a part, and parts of a row."""
    size = ceil_div(ceil_div(vocab_size, _MOST_PARTS), BEST_TOKENS) * BEST_TOKENS
    return size, ceil_div(vocab_size, size)


@torch.library.custom_op("mtp_research::best_in_parts", mutates_args=())
def _best_in_parts(logits: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.shape[-1] == 0:
        raise ValueError("logits must be [..., V] with V > 0, got no token.")
    if logits.dtype not in checks.KERNEL_DTYPES:
        raise ValueError(f"logits dtype must be one of {checks.KERNEL_DTYPES}, got {logits.dtype}.")
    resolved = checks.resolve_backend(backend, tensor=logits, kernel=best_tokens_kernel)
    if resolved == "reference":
        return best_in_parts_ref(logits)
    checks.check_kernel_dtype("logits", logits, kernel=best_tokens_kernel)
    values, indices = _best_in_parts_fake(logits, backend)
    size, num_parts = _parts(logits.shape[-1])
    if values.numel():
        with checks.launch_device(logits):
            best_tokens_kernel[(values.numel(),)](
                logits.contiguous(),
                values,
                indices,
                logits.shape[-1],
                size,
                num_parts,
                TOKENS=BEST_TOKENS,
                num_warps=BEST_WARPS,
            )
    return values, indices


def best_in_parts_ref(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: value `[..., P]` float32 and id int32 of the best token of each part."""
    size, _ = _parts(logits.shape[-1])
    found = [part.max(dim=-1) for part in logits.split(size, dim=-1)]
    values = torch.stack([best.values.float() for best in found], dim=-1)
    indices = [best.indices + number * size for number, best in enumerate(found)]
    return values, torch.stack(indices, dim=-1).int()


@_best_in_parts.register_fake
def _best_in_parts_fake(logits: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], _parts(logits.shape[-1])[1])
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int32),
    )
