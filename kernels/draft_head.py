"""Greedy draft token and its log-probability from hidden rows, without writing the logits.

Where it sits: at the end of a module pass, on the R rows that are sampled. A draft needs the
largest logit, its token and the log-sum-exp (confidence = exp(top_logit - logsumexp)); the [R, V]
logits themselves would cost a write and two reads for R useful numbers.
Maths: logits = rmsnorm(hidden) weight^T, the norm being optional. Row scaling commutes with the
product, so the kernel multiplies by norm_weight on the way in and by 1 / rms at the end, and reads
the weight exactly once.
Letters: R rows (<= 64 in the kernel), D hidden, V vocabulary.
Source: fused linear and softmax statistics as in Liger; RMSNorm as in Llama.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks

try:
    import triton
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    triton = None

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 64
_BLOCK_VOCAB = 64


class DraftHeadOutput(NamedTuple):
    """What a draft step keeps of the logits of its R rows."""

    token_ids: Tensor  # [R] int64, the smallest id among equal largest logits
    top_logits: Tensor  # [R] float32 (float64 for float64 inputs)
    logsumexp: Tensor  # [R] float32 (float64 for float64 inputs); NaN where a logit is NaN


def draft_head_ref(
    hidden: Tensor, *, weight: Tensor, norm_weight: Tensor | None = None, norm_eps: float = 1e-6
) -> DraftHeadOutput:
    """Plain PyTorch, any device, dtype and R; writes the logits. Arguments as in `draft_head`."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if norm_weight is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps) * norm_weight
    logits = (wide.to(weight.dtype) @ weight.T).to(wide.dtype)
    top_logits = logits.amax(-1)
    # argmax leaves the choice among equal logits open.
    token_ids = (logits == top_logits[:, None]).to(torch.uint8).argmax(-1)
    return DraftHeadOutput(token_ids, top_logits, logits.logsumexp(-1))


@checks.kernel_jit
def draft_head_kernel(
    hidden,  # [R, D]
    weight,  # [V, D]
    norm_weight,  # [D] or None
    part_top,  # [R, tiles] float32, written: largest logit of the tile
    part_id,  # [R, tiles] int32, written: its token
    part_sum,  # [R, tiles] float32, written: sum of exp(logit - largest)
    num_rows,
    num_vocab,
    norm_eps,
    stride_hidden,
    stride_weight,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """All rows against one tile of the vocabulary."""
    rows = tl.arange(0, BLOCK_ROWS)
    tokens = tl.program_id(0) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    dims = tl.arange(0, BLOCK_DIM)
    hidden_rows = hidden + rows[:, None] * stride_hidden + dims[None, :]
    weight_rows = weight + tokens[:, None].to(tl.int64) * stride_weight + dims[None, :]
    is_row = (rows < num_rows)[:, None]
    is_token = (tokens < num_vocab)[:, None]
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    logits = tl.zeros([BLOCK_ROWS, BLOCK_VOCAB], tl.float32)
    for start in range(0, DIM, BLOCK_DIM):
        inside = dims[None, :] < DIM - start
        h = tl.load(hidden_rows + start, mask=is_row & inside, other=0.0)
        w = tl.load(weight_rows + start, mask=is_token & inside, other=0.0)
        if norm_weight is not None:
            wide = h.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            gain = tl.load(norm_weight + start + dims, mask=dims < DIM - start, other=0.0)
            h = (wide * gain.to(tl.float32)[None, :]).to(w.dtype)
        logits = tl.dot(h, tl.trans(w), logits, input_precision="ieee")
    if norm_weight is not None:
        logits *= tl.rsqrt(squares / DIM + norm_eps)[:, None]
    logits = tl.where((tokens < num_vocab)[None, :], logits, float("-inf"))
    top = tl.max(logits, 1)
    # With NaN logits nothing may equal the top; the last token keeps the id inside the vocabulary.
    best = tl.min(tl.where(logits == top[:, None], tokens[None, :], num_vocab - 1), 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    at = rows * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_top + at, top, mask=rows < num_rows)
    tl.store(part_id + at, best, mask=rows < num_rows)
    tl.store(part_sum + at, tl.sum(tl.exp(logits - base[:, None]), 1), mask=rows < num_rows)


@checks.kernel_jit
def merge_vocab_kernel(
    part_top,  # [R, tiles] float32
    part_id,  # [R, tiles] int32
    part_sum,  # [R, tiles] float32
    token_ids,  # [R] int64, written
    top_logits,  # [R] float32, written
    logsumexp,  # [R] float32, written
    num_tiles,
    num_vocab,
    PADDED_TILES: tl.constexpr,
):
    """One row: the tiles' largest logits and sums put together."""
    tiles = tl.arange(0, PADDED_TILES)
    at = tl.program_id(0) * num_tiles + tiles
    top = tl.load(part_top + at, mask=tiles < num_tiles, other=float("-inf"))
    token = tl.load(part_id + at, mask=tiles < num_tiles, other=0)
    total = tl.load(part_sum + at, mask=tiles < num_tiles, other=0.0)
    best = tl.max(top, 0)
    base = tl.where(best == float("-inf"), 0.0, best)
    chosen = tl.min(tl.where(top == best, token, num_vocab - 1), 0)
    tl.store(token_ids + tl.program_id(0), chosen.to(tl.int64))
    tl.store(top_logits + tl.program_id(0), best)
    merged = base + tl.log(tl.sum(total * tl.exp(top - base), 0))
    tl.store(logsumexp + tl.program_id(0), merged)


def draft_head(
    hidden: Tensor,
    *,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    backend: str = "auto",
) -> DraftHeadOutput:
    """Largest logit, its token and the log-sum-exp of `rmsnorm(hidden) @ weight.T`.

    Opaque to torch.compile (custom op `mtp_research::draft_head`). The Triton path reads `weight`
    once and never synchronises with the device.

    Args:
        hidden: `[R, D]` rows to draft from. On Triton R <= 64, and float16 `hidden * norm_weight`
            must stay below 65504.
        weight: `[V, D]` the lm_head, dtype of `hidden`.
        norm_weight: `[D]` gain of the final RMSNorm, dtype of `hidden`; None if `hidden` is normed.
        norm_eps: added to the mean square, > 0.
        backend: `auto`, `reference` or `triton`.

    Returns:
        `token_ids [R]`, `top_logits [R]`, `logsumexp [R]`. Ids lie in `[0, V)` even for NaN rows.

    Raises:
        ValueError: shapes, dtypes or devices disagree, or the backend cannot run them.
    """
    return DraftHeadOutput(
        *torch.ops.mtp_research.draft_head(hidden, weight, norm_weight, norm_eps, backend)
    )


@torch.library.custom_op("mtp_research::draft_head", mutates_args=())
def _draft_head_op(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_draft_head(hidden, weight, norm_weight)
    resolved = checks.resolve_backend(backend, tensor=hidden, kernel=draft_head_kernel)
    if resolved == "reference" or hidden.shape[0] == 0:
        return tuple(
            draft_head_ref(hidden, weight=weight, norm_weight=norm_weight, norm_eps=norm_eps)
        )
    return _launch_draft_head(hidden, weight, norm_weight, norm_eps)


@_draft_head_op.register_fake
def _draft_head_fake(hidden: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    shape = hidden.shape[:1]
    return (
        hidden.new_empty(shape, dtype=torch.int64),
        hidden.new_empty(shape, dtype=wide),
        hidden.new_empty(shape, dtype=wide),
    )


def _check_draft_head(hidden: Tensor, weight: Tensor, norm_weight: Tensor | None) -> None:
    checks.check_rank("hidden", hidden, letters="[R, D]")
    checks.check_rank("weight", weight, letters="[V, D]")
    dim = hidden.shape[1]
    checks.check_shape("weight", weight, shape=(weight.shape[0], dim), letters="[V, D]")
    tensors = [("weight", weight)]
    if norm_weight is not None:
        checks.check_shape("norm_weight", norm_weight, shape=(dim,), letters="[D]")
        tensors.append(("norm_weight", norm_weight))
    for name, tensor in tensors:
        checks.check_dtype(name, tensor, dtype=hidden.dtype)
        checks.check_device(name, tensor, device=hidden.device)


def _launch_draft_head(
    hidden: Tensor, weight: Tensor, norm_weight: Tensor | None, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, dim = hidden.shape
    num_vocab = weight.shape[0]
    checks.check_kernel_dtype("hidden", hidden, kernel=draft_head_kernel)
    checks.check_optional_range("R (rows of hidden)", num_rows, low=1, high=MAX_ROWS)
    tensors = {"hidden": hidden, "weight": weight, "norm_weight": norm_weight}
    for name, tensor in tensors.items():
        if tensor is not None:
            checks.check_last_dim_contiguous(name, tensor)
    num_tiles = triton.cdiv(num_vocab, _BLOCK_VOCAB)
    part_top, part_sum = (
        hidden.new_empty(num_rows, num_tiles, dtype=torch.float32) for _ in range(2)
    )
    part_id = hidden.new_empty(num_rows, num_tiles, dtype=torch.int32)
    token_ids = hidden.new_empty(num_rows, dtype=torch.int64)
    top_logits, logsumexp = (hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    with checks.launch_device(hidden):
        draft_head_kernel[(num_tiles,)](
            hidden,
            weight,
            norm_weight,
            part_top,
            part_id,
            part_sum,
            num_rows,
            num_vocab,
            norm_eps,
            hidden.stride(0),
            weight.stride(0),
            **draft_head_constants(num_rows, dim=dim, element_bytes=hidden.element_size()),
            num_warps=4,
            num_stages=4,
        )
        merge_vocab_kernel[(num_rows,)](
            part_top,
            part_id,
            part_sum,
            token_ids,
            top_logits,
            logsumexp,
            num_tiles,
            num_vocab,
            PADDED_TILES=triton.next_power_of_2(num_tiles),
            num_warps=4,
        )
    return token_ids, top_logits, logsumexp


def draft_head_constants(num_rows: int, *, dim: int, element_bytes: int) -> dict[str, int]:
    """The compile-time arguments of the vocabulary kernel, by parameter name."""
    return {
        "DIM": dim,
        "BLOCK_ROWS": max(16, triton.next_power_of_2(num_rows)),
        "BLOCK_VOCAB": _BLOCK_VOCAB,
        "BLOCK_DIM": 256 // element_bytes,  # 256 bytes of a weight row a step
    }
