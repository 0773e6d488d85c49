"""Attention over packed documents by their ends, without a mask: the GPU path of `DenseContext`.

A mask makes the fused kernels of torch compute all S x S scores of a row, repeat keys per head
group and read the mask for every head. Flash attention takes the ends of the documents instead and
computes only what lies below the diagonal of each. It knows half precision, equal head dims and no
sinks; everything else goes through the mask.

Letters: B batch rows, S row length, P documents of a row, H / Hkv heads, Dk / Dv head dims.
Source: FlashAttention-2 (arXiv:2307.08691) through torch.nn.attention.varlen.
"""

import inspect

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
# The backward pass pads every document to 128 rows of float32; shorter ones would cost memory.
_MIN_MEAN_TOKENS = 64
# torch 2.11 takes fewer key heads as they are; from 2.12 on they must be announced.
_ANNOUNCES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def document_ends(document_index: np.ndarray) -> np.ndarray:
    """Where the documents of each row end.

    Example: the rows `0 0 1 -` and `2 2 2 2` give the ends (2, 3, 4) and (4, 4, 4): padding counts
    as a document, and empty ones fill a row up.

    Args:
        document_index: `[rows, S]` int, -1 for padding.

    Returns:
        `[rows, P]` int32, exclusive ends in rising order.
    """
    num_rows, length = document_index.shape
    is_end = np.ones((num_rows, length), dtype=bool)
    is_end[:, :-1] = document_index[:, 1:] != document_index[:, :-1]
    counts = is_end.sum(axis=1)
    ends = np.full((num_rows, counts.max()), length, dtype=np.int32)
    rows, columns = np.nonzero(is_end)
    rank = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    ends[rows, rank] = columns + 1
    return ends


def flat_ends(ends: Tensor, *, length: int) -> Tensor:
    """`[B * P + 1]` int32 starts and ends in the flattened batch, from `ends` `[B, P]`, no sync."""
    first = torch.arange(len(ends), dtype=torch.int32, device=ends.device) * length
    return torch.nn.functional.pad((ends + first[:, None]).flatten(), (1, 0))


def fits_varlen(
    query: Tensor, *, key: Tensor, value: Tensor, sinks: Tensor | None, cu_seqlens: Tensor
) -> bool:
    """Whether `attend_documents` takes these tensors, shaped as there."""
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in _DTYPES
        and sinks is None
        and head_dim == key.shape[-1] == value.shape[-1]
        and head_dim % 8 == 0
        and head_dim <= _MAX_HEAD_DIM
        and len(cu_seqlens) * _MIN_MEAN_TOKENS <= query.shape[0] * query.shape[2]
    )


def attend_documents(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """Causal attention inside each document, `[B, S, H, Dv]`.

    Args:
        query: `[B, H, S, Dk]`.
        key: `[B, Hkv, S, Dk]`.
        value: `[B, Hkv, S, Dv]`.
        cu_seqlens: `[documents + 1]` int32 of `flat_ends`; a fixed number for all batches of a run,
            so that compiled layers are compiled once.
        scale: factor of the scalar products.
        sliding_window: keys that a row sees, its own included; None for all.
    """
    batch_size, _, length, _ = query.shape
    flat = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]
    is_grouped = query.shape[1] != key.shape[1]
    announced = {"enable_gqa": True} if is_grouped and _ANNOUNCES_GROUPS else {}
    output = varlen_attn(
        *flat,
        cu_seqlens,
        cu_seqlens,
        length,
        length,
        scale=scale,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **announced,
    )
    assert isinstance(output, Tensor), "the log-sum-exp was not asked for"
    return output.unflatten(0, (batch_size, length))
