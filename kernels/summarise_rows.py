"""Log-sum-exp, label logit and argmax of rows of logits, in one read.

Where it sits: the first of the two passes of `distill` over a chunk of logits; the second,
`distill_rows`, needs the log-sum-exp. One program a row, looping over vocabulary tiles with a
running maximum.
Letters: C rows of a chunk, V vocabulary.
Source: online softmax (Milakov and Gimelshein, arXiv:1805.02867).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from mtp_research.kernels import checks
from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None

BLOCK_V = 2048
NUM_WARPS = 8


class RowSummary(NamedTuple):
    """What one look at a chunk of logits gives, each `[C]`.

    Attributes:
        lse: log-sum-exp, dtype of the logits.
        label_logit: logit of the label, dtype of the logits.
        argmax: int64.
    """

    lse: Tensor
    label_logit: Tensor
    argmax: Tensor


def summarise_rows_ref(logits: Tensor, *, labels: Tensor) -> RowSummary:
    """Plain PyTorch, see `summarise_rows`; any float dtype, any device."""
    return RowSummary(
        lse=torch.logsumexp(logits, dim=-1),
        label_logit=logits.gather(1, labels[:, None])[:, 0],
        argmax=logits.argmax(dim=-1),
    )


@checks.kernel_jit
def _summarise_kernel(
    logits,  # [C, V] float32
    labels,  # [C] int64
    lse,  # [C] float32, written
    label_logit,  # [C] float32, written
    argmax,  # [C] int64, written
    vocab_size,
    stride_logits,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride_logits
    # Finite, so that a tile of -inf does not make -inf - (-inf).
    highest = tl.full((), -3.0e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    best = tl.full((), 0, tl.int64)
    for start in range(0, vocab_size, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        inside = columns < vocab_size
        values = tl.load(base + columns, mask=inside, other=float("-inf"))
        tile_max, tile_best = tl.max(values, axis=0, return_indices=True)
        best = tl.where(tile_max > highest, start + tile_best, best)
        new_highest = tl.maximum(highest, tile_max)
        total = total * tl.exp(highest - new_highest)
        total += tl.sum(tl.exp(values - new_highest), axis=0)
        highest = new_highest
    tl.store(lse + row, highest + tl.log(total))
    tl.store(label_logit + row, tl.load(base + tl.load(labels + row)))
    tl.store(argmax + row, best)


def summarise_rows(logits: Tensor, *, labels: Tensor, backend: str = "auto") -> RowSummary:
    """Log-sum-exp, label logit and argmax of each row.

    Args:
        logits: `[C, V]`, contiguous in V; float32 for the kernel.
        labels: `[C]` int64 in [0, V).
        backend: `auto`, `reference` or `triton`.

    Raises:
        ValueError: shapes or dtypes disagree, or the backend cannot run them.
    """
    if checks.resolve_backend(backend, tensor=logits, kernel=_summarise_kernel) == "reference":
        return summarise_rows_ref(logits, labels=labels)
    checks.check_dtype("logits", logits, dtype=torch.float32)
    checks.check_last_dim_contiguous("logits", logits)
    checks.check_shape("labels", labels, shape=(len(logits),), letters="[C]")
    lse, label_logit = logits.new_empty(len(logits)), logits.new_empty(len(logits))
    argmax = torch.empty_like(labels)
    with checks.launch_device(logits):
        _summarise_kernel[(len(logits),)](
            logits,
            labels,
            lse,
            label_logit,
            argmax,
            logits.shape[1],
            logits.stride(0),
            BLOCK_V=BLOCK_V,
            num_warps=NUM_WARPS,
        )
    return RowSummary(lse, label_logit, argmax)
