"""Cross-entropy of many rows through one frozen lm_head, in chunks, gradient made on the way.

    per chunk   logits = rows @ lm_head.T;  loss, hit and gradient in the logits' own memory
                grads  = gradient @ lm_head                                   4 D V FLOPs a row

Rows of all depths are one list, so that no chunk is cut short by the end of a depth. Chunks fill
whole waves of the second product: it has few tiles, D / 256 for 128 rows, and a last wave with few
of them costs as much as a full one.

With `half_logits` the products run in float16 and logits and their gradient take two bytes instead
of four: for D below some thousands the product is as slow as what it writes. float16 and not
bfloat16, because a logit below 16 is then off by at most 2^-8 instead of 2^-5. Relative error of
the gradient at D = 768, V = 16384, label probabilities .5, .95 and .98: float32 logits and a
bfloat16 gradient 2.0e-3, 2.2e-3, 2.5e-3; float16 1.2e-3, 2.2e-3, 4.9e-3; bfloat16 logits 9e-3,
17e-3, 44e-3. Logits beyond 65,504 give a loss that is not finite.
Letters: R rows, C rows of a chunk, D hidden, V vocabulary.
Source: gradient made in the forward pass as in Liger's fused linear cross-entropy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.cross_entropy_rows import cross_entropy_rows
from mtp_research.kernels.distill import (
    LOGITS_BYTES,
    _gradient_view,
    _project,
    _wide_weight,
    default_chunk_rows,
)
from torch import Tensor

_TILE_ROWS, _TILE_COLUMNS = 128, 256  # of the library's product on one multiprocessor


class CrossEntropyResult(NamedTuple):
    """Statistics and gradients of every row.

    Attributes:
        nll: `[R]` -log q(label), float32 or wider; 0 where not valid.
        is_hit: `[R]` bool, the argmax is the label.
        grads: `[R, D]` of `weight` times the plain sum of the losses, in the dtype of the products;
            None when not asked for.
    """

    nll: Tensor
    is_hit: Tensor
    grads: Tensor | None


@torch.no_grad()
def cross_entropy(
    rows: Tensor,
    *,
    labels: Tensor,
    valid: Tensor,
    lm_head: Tensor,
    weight: float | None = None,
    half_logits: bool = False,
    chunk_rows: int | None = None,
    backend: str = "auto",
) -> CrossEntropyResult:
    """Loss of each row, and its gradient in the row.

    Args:
        rows: `[R, D]` hidden states after the last norm.
        labels: `[R]` int64 in [0, V).
        valid: `[R]` bool; other rows count nothing and have gradient 0.
        lm_head: `[V, D]` frozen output embedding.
        weight: of the loss in the gradient; None for statistics alone.
        half_logits: products, logits and gradients in float16; for rows of half precision on a GPU
            (and any float16 row). It costs a copy of `lm_head` unless that is float16.
        chunk_rows: C; None: what `wave_rows` says.
        backend: of the row kernel: `auto`, `reference` or `triton`.

    Raises:
        ValueError: shapes disagree, or the backend cannot run the tensors.
    """
    checks.check_rank("rows", rows, letters="[R, D]")
    is_narrow = half_logits and (rows.is_cuda or rows.dtype == torch.float16)
    if is_narrow:
        lm_head = lm_head.to(torch.float16)
    wide = torch.promote_types(lm_head.dtype, torch.float32)
    itemsize = lm_head.dtype.itemsize if is_narrow else wide.itemsize
    chunk = chunk_rows or wave_rows(lm_head, bytes_per_logit=itemsize)
    nll, is_hit = rows.new_empty(len(rows), dtype=wide), torch.empty_like(valid)
    grads = None if weight is None else torch.empty_like(rows, dtype=lm_head.dtype)
    projection = lm_head if is_narrow else _wide_weight(lm_head)
    for start in range(0, len(rows), chunk):
        part = slice(start, min(start + chunk, len(rows)))
        chunk_of_rows = rows[part].to(lm_head.dtype)
        if is_narrow:
            logits = chunk_of_rows @ projection.T
        else:
            logits = _project(chunk_of_rows, weight=projection)
        grad = None if grads is None else _gradient_view(logits, dtype=lm_head.dtype)
        cross_entropy_rows(
            logits,
            labels=labels[part],
            valid=valid[part],
            nll=nll[part],
            is_hit=is_hit[part],
            grad=grad,
            weight=1.0 if weight is None else weight,
            backend=backend,
        )
        if grads is not None and grad is not None:
            torch.mm(grad, lm_head, out=grads[part])
        del logits, grad  # before the next chunk's are made
    return CrossEntropyResult(nll, is_hit, grads)


def wave_rows(lm_head: Tensor, *, bytes_per_logit: int) -> int:
    """Rows of a chunk: whole waves of tiles of the product with `[V, D]`, in `LOGITS_BYTES`.

    Example: D = 768 has 3 tiles for 128 rows, so 132 multiprocessors take 44 of them at a time,
    5,632 rows.
    """
    if not lm_head.is_cuda:
        return default_chunk_rows(lm_head)
    vocab_size, hidden_size = lm_head.shape
    tiles = -(-hidden_size // _TILE_COLUMNS)
    num_processors = checks.num_multiprocessors(lm_head.device)
    wave = max(1, num_processors // tiles) * _TILE_ROWS
    fitting = LOGITS_BYTES // (bytes_per_logit * vocab_size)
    if fitting >= wave:
        return fitting // wave * wave
    return max(_TILE_ROWS, fitting // _TILE_ROWS * _TILE_ROWS)
