"""One attention function for every model, in training and in decoding.

Hugging Face's layers call the registered function; it hands the projected tensors to the
`AttentionContext` that the caller passed to the model as `attention_context=`. Decoding passes a
`PagedContext` (models/paged.py), training a `DenseContext` (here) or an unroll's own context. Model
code stays unmodified, and there is no attention mask to build: transformers makes none for a name
it does not know.

Letters: B batch rows, S row length, H / Hkv heads, Dk / Dv head dims.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

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
    """

    document_index: Tensor | None = None
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
        """See `AttentionContext.attend`; padding rows attend to padding only.

        Raises:
            NotImplementedError: attention sinks, which no family supported in training uses yet.
        """
        if sinks is not None:
            raise NotImplementedError("attention sinks are not supported by DenseContext")
        fused = self.document_index is None and sliding_window is None
        mask = (
            None if fused else self.mask(sliding_window, length=query.shape[2], device=query.device)
        )
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
