"""One attention function for every model, in training and in decoding.

Hugging Face's layers call the registered function; it hands the projected tensors to the
`AttentionContext` that the caller passed to the model as `attention_context=`. Decoding passes a
`PagedContext` (models/attention/paged.py), training a `DenseContext` (here) or an unroll's own
context. There is no attention mask to build: transformers makes none for a name it does not know.

On a GPU `DenseContext` attends to packed documents by their ends, without a mask: `context_rows`. A
mask makes the fused kernels of torch compute all S x S scores of a row, repeat keys per head group
and read the mask for every head; flash attention takes the ends instead and computes only what lies
below the diagonal of each document. Where it does not fit, and there are no sinks, torch's kernels
take the mask.

Letters: B batch rows, S row length, P documents of a row, H / Hkv heads, Dk / Dv head dims.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from mtp_research.models.attention.context_rows import attend_rows, fits_varlen

ATTENTION_NAME = "mtp_research"


class AttentionCall(NamedTuple):
    """What a layer hands to its attention: the projected rows, and how keys are weighed."""

    query: Tensor  # [B, H, S, Dk]
    key: Tensor  # [B, Hkv, S, Dk]
    value: Tensor  # [B, Hkv, S, Dv]
    scale: float  # factor of the scalar products
    sliding_window: int | None = None  # keys that a row sees, its own included; None for all
    sinks: Tensor | None = None  # [H], one more softmax logit per head; None for none


class AttentionContext(Protocol):
    """What one forward pass attends to."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """Attention output `[B, S, H, Dv]` of the layer `module`."""
        ...


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_context: AttentionContext,
    **options: object,
) -> tuple[Tensor, None]:
    """What transformers calls by the name `mtp_research`; names and order are the library's.

    Of its options `scaling`, `sliding_window` and `s_aux` (sinks) are read.
    """
    assert attention_mask is None, (
        "transformers built a mask although our attention name is not in its mask interface"
    )
    scale = cast(float, options["scaling"])
    sliding_window = cast(int | None, options.get("sliding_window"))
    sinks = cast(Tensor | None, options.get("s_aux"))
    call = AttentionCall(query, key, value, scale, sliding_window, sinks)
    return attention_context.attend(module, call), None


AttentionInterface.register(ATTENTION_NAME, attention_forward)


@dataclass
class DenseContext:
    """Causal attention over padded or packed rows, for training and for dense references.

    Attributes:
        document_index: `[B, S]` int, the document each token belongs to, -1 for padding; None when
            every row is one document, in which case the fused causal kernel is used.
        cu_seqlens: `[documents + 1]` int32, the same documents in the flattened batch, see
            `flat_ends`; None does without the kernel that reads them.
    """

    document_index: Tensor | None = None
    cu_seqlens: Tensor | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict, repr=False)

    def mask(self, sliding_window: int | None, *, length: int, device: torch.device) -> Tensor:
        """`[B, 1, S, S]` bool: query row i may read key row j (document, j <= i, window).

        Kept for the next layer, but not in compiled code: a layer that finds one and a layer that
        makes one would be compiled apart.
        """
        if (kept := self._masks.get(sliding_window)) is not None:
            return kept
        index = torch.arange(length, device=device)
        allowed = index[:, None] >= index[None, :]
        if sliding_window is not None:
            allowed = allowed & (index[:, None] - index[None, :] < sliding_window)
        allowed = allowed[None]
        if (document := self.document_index) is not None:
            allowed = allowed & (document[:, :, None] == document[:, None, :])
        if not torch.compiler.is_compiling():
            self._masks[sliding_window] = allowed[:, None]
        return allowed[:, None]

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """See `AttentionContext`; padding rows attend to padding only."""
        query, key, value, scale, sliding_window, sinks = call
        ends = self.cu_seqlens
        if sinks is not None or (ends is not None and fits_varlen(call[:3], ends)):
            return attend_rows(
                call[:3],
                scale=scale,
                window=sliding_window,
                sinks=sinks,
                document_index=self.document_index,
                cu_seqlens=ends,
            )
        fused = self.document_index is None and sliding_window is None
        mask = (
            None if fused else self.mask(sliding_window, length=query.shape[2], device=query.device)
        )
        if mask is not None and query.is_cuda and key.shape[1] != query.shape[1]:
            # The fused kernels that take a mask know no head groups; what is left writes [S, S].
            groups = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        output = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=fused,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2)


class SinkInputs(NamedTuple):
    """Keys and values with one more row; the additive mask holds the sinks in its column."""

    key: Tensor  # [B, Hkv, S + 1, Dk]
    value: Tensor  # [B, Hkv, S + 1, Dv]
    mask: Tensor  # [B, H, rows, S + 1] in the dtype of key


def with_sinks(key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor) -> SinkInputs:
    """Express attention sinks as one more key, so that any attention with a mask computes them.

    The key is zero, so that its score is what the mask adds: the sink, one logit per head. Its
    value is zero, so that it takes weight and gives nothing.

    Args:
        key: `[B, Hkv, S, Dk]`.
        value: `[B, Hkv, S, Dv]`.
        mask: `[B, 1, rows, S]` bool, True where a row may read a key.
        sinks: `[H]`.
    """
    batch, _, num_rows, num_keys = mask.shape
    scores = torch.zeros(mask.shape, dtype=key.dtype, device=key.device)
    scores = scores.masked_fill(~mask, -math.inf).expand(batch, len(sinks), num_rows, num_keys)
    column = sinks.to(key.dtype)[None, :, None, None].expand(batch, -1, num_rows, 1)
    return SinkInputs(
        nn.functional.pad(key, (0, 0, 0, 1)),
        nn.functional.pad(value, (0, 0, 0, 1)),
        torch.cat((scores, column), dim=-1),
    )


def document_ends(document_index: np.ndarray) -> np.ndarray:
    """Exclusive ends `[rows, P]` int32 of the documents of each row, in rising order.

    Example: the rows `0 0 1 -` and `2 2 2 2` give the ends (2, 3, 4) and (4, 4, 4): padding (-1)
    counts as a document, and empty ones fill a row up.
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
