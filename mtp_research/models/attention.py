"""One attention function for every model, in training and in decoding.

Hugging Face's layers call the registered function; it hands the projected tensors to the
`AttentionContext` that the caller passed to the model as `attention_context=`. Decoding passes a
`PagedContext` (models/paged.py), training a `DenseContext` (here) or an unroll's own context. Model
code stays unmodified, and there is no attention mask to build: transformers makes none for a name
it does not know.

Letters: B batch rows, S row length, H / Hkv heads, Dk / Dv head dims.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from mtp_research.models.varlen import attend_documents, fits_varlen

ATTENTION_NAME = "mtp_research"


class AttentionContext(Protocol):
    """What one forward pass attends to."""

    def attend(
        self,
        module: nn.Module,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sliding_window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention output `[B, S, H, Dv]` of `query` `[B, H, S, Dk]` and this pass's new rows."""
        ...


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attention_context: AttentionContext,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls by the name `mtp_research`; the signature is the library's."""
    assert attention_mask is None, (
        "transformers built a mask although our attention name is not in its mask interface"
    )
    output = attention_context.attend(
        module,
        query=query,
        key=key,
        value=value,
        scale=scaling,
        sliding_window=sliding_window,
        sinks=s_aux,
    )
    return output, None


AttentionInterface.register(ATTENTION_NAME, attention_forward)


@dataclass
class DenseContext:
    """Causal attention over padded or packed rows, for training and for dense references.

    Attributes:
        document_index: `[B, S]` int, the document each token belongs to, -1 for padding; None when
            every row is one document, in which case the fused causal kernel is used.
        cu_seqlens: `[documents + 1]` int32, the same documents in the flattened batch, see
            `varlen.flat_ends`; None does without the kernel that reads them.
    """

    document_index: Tensor | None = None
    cu_seqlens: Tensor | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict, repr=False)

    def mask(self, sliding_window: int | None, *, length: int, device: torch.device) -> Tensor:
        """`[B, 1, S, S]` bool: query row i may read key row j (document, j <= i, window)."""
        if sliding_window not in self._masks:
            index = torch.arange(length, device=device)
            allowed = index[:, None] >= index[None, :]
            if sliding_window is not None:
                allowed = allowed & (index[:, None] - index[None, :] < sliding_window)
            allowed = allowed[None]
            if self.document_index is not None:
                allowed = allowed & (
                    self.document_index[:, :, None] == self.document_index[:, None, :]
                )
            self._masks[sliding_window] = allowed[:, None]
        return self._masks[sliding_window]

    def attend(
        self,
        module: nn.Module,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sliding_window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionContext.attend`; padding rows attend to padding only."""
        ends = self.cu_seqlens
        if ends is not None and fits_varlen(
            query, key=key, value=value, sinks=sinks, cu_seqlens=ends
        ):
            return attend_documents(
                query,
                key=key,
                value=value,
                cu_seqlens=ends,
                scale=scale,
                sliding_window=sliding_window,
            )
        fused = self.document_index is None and sliding_window is None and sinks is None
        mask = (
            None if fused else self.mask(sliding_window, length=query.shape[2], device=query.device)
        )
        if sinks is not None:
            assert mask is not None, "the fused kernel knows no sinks"
            key, value, mask = with_sinks(key, value, mask, sinks)
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
    """Keys and values with one more row, and an additive mask that holds the sinks in its column.

    Attributes:
        key: `[B, Hkv, S + 1, Dk]`.
        value: `[B, Hkv, S + 1, Dv]`.
        mask: `[B, H, rows, S + 1]` in the dtype of `key`.
    """

    key: Tensor
    value: Tensor
    mask: Tensor


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
