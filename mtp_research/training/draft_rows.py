"""Attention of the `ttt` unroll: context rows shared by all anchors, draft rows owned by each.

The mask of this attention is causal over the context and diagonal over every earlier draft pass.
Building it would cost S x kS; the diagonal parts are scalar products instead, and the two are
merged through their log-sum-exp.

Letters: B batch rows, S row length, H / Hkv heads, G = H / Hkv, Dk / Dv head dims.
Source: training-time test of EAGLE-3 (arXiv:2503.01840); the merge is that of split-KV attention.
"""

import torch
from torch import Tensor, nn

from mtp_research.models.attention import DenseContext


class ModuleRows:
    """Keys and values of one module: its context rows, and one draft row per anchor and step.

    An `AttentionContext`. Row t of the n-th draft pass sees context rows s <= t of its document and
    the draft rows 1..n of the same anchor. Two attentions, merged by log-sum-exp: only the first is
    quadratic in S, and it is the one a fused kernel can take over.

    Args:
        document_index: `[B, S]` int, document of each token, -1 for padding.
        cu_seqlens: of `DenseContext`, for the context rows.
    """

    def __init__(self, document_index: Tensor, cu_seqlens: Tensor | None = None) -> None:
        """Start without rows."""
        self._dense = DenseContext(document_index, cu_seqlens)
        self._document_index = document_index
        self._context: tuple[Tensor, Tensor] | None = None
        self._drafts: list[tuple[Tensor, Tensor]] = []
        self.num_draft_rows = 0

    def begin_draft_row(self) -> None:
        """Declare that the next pass runs draft rows rather than context rows."""
        self.num_draft_rows += 1

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
        """See `AttentionContext.attend`."""
        if self.num_draft_rows == 0:
            self._context = (key, value)
            return self._dense.attend(
                module,
                query=query,
                key=key,
                value=value,
                scale=scale,
                sliding_window=sliding_window,
                sinks=sinks,
            )
        assert self._context is not None, "draft rows were run before the module's context rows"
        self._drafts.append((key, value))
        assert len(self._drafts) == self.num_draft_rows, "begin_draft_row once per draft pass"
        groups = query.shape[1] // key.shape[1]
        query = query.unflatten(1, (key.shape[1], groups))  # [B, Hkv, H / Hkv, S, Dk]
        allowed = self._context_mask(sliding_window)
        output, lse = masked_attention(query, *self._context, allowed=allowed, scale=scale)
        window = (
            self.num_draft_rows
            if sliding_window is None
            else min(sliding_window, self.num_draft_rows)
        )
        output = merge_draft_rows(
            output, lse, query=query, drafts=self._drafts[-window:], scale=scale, sinks=sinks
        )
        return output.flatten(1, 2).transpose(1, 2)

    def _context_mask(self, sliding_window: int | None) -> Tensor:
        """`[B, 1, 1, S, S]`; a query sits `num_draft_rows` above its anchor: a narrower window."""
        if sliding_window is not None:
            sliding_window = max(sliding_window - self.num_draft_rows, 0)
        length, device = self._document_index.shape[1], self._document_index.device
        return self._dense.mask(sliding_window, length=length, device=device)[:, :, None]


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, *, allowed: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over the allowed keys, with its log-sum-exp.

    Args:
        query: `[B, Hkv, G, S, Dk]`.
        key: `[B, Hkv, S, Dk]`.
        value: `[B, Hkv, S, Dv]`.
        allowed: `[B, 1, 1, S, S]` bool.
        scale: factor of the scalar products.

    Returns:
        Output `[B, Hkv, G, S, Dv]` and log-sum-exp `[B, Hkv, G, S]`, -inf where no key is allowed.
    """
    scores = _wide(query @ key[:, :, None].transpose(-1, -2)) * scale
    # Not -inf: a row without keys would make NaN gradients. Its weight in the merge is exactly 0.
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min / 2)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    return weights.to(value.dtype) @ value[:, :, None], lse


def merge_draft_rows(
    output: Tensor,
    lse: Tensor,
    *,
    query: Tensor,
    drafts: list[tuple[Tensor, Tensor]],
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Add each anchor's own draft rows to a finished attention over its context.

    Args:
        output: `[B, Hkv, G, S, Dv]` attention over the context.
        lse: `[B, Hkv, G, S]` its log-sum-exp.
        query: `[B, Hkv, G, S, Dk]`.
        drafts: keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]`, one pair per draft row.
        scale: factor of the scalar products.
        sinks: `[H]`, one more logit per head, which takes weight and gives nothing; None for none.

    Returns:
        `[B, Hkv, G, S, Dv]`.
    """
    scores = [_wide((query * key[:, :, None]).sum(dim=-1)) * scale for key, _ in drafts]
    logits = [lse, *scores]
    if sinks is not None:
        logits.append(sinks.to(lse.dtype).view(1, *lse.shape[1:3], 1).expand_as(lse))
    merged_lse = torch.logsumexp(torch.stack(logits, dim=-1), dim=-1)
    merged = torch.exp(lse - merged_lse)[..., None] * output
    for score, (_, value) in zip(scores, drafts, strict=True):
        merged = merged + torch.exp(score - merged_lse)[..., None] * value[:, :, None]
    return merged.to(output.dtype)


def _wide(scores: Tensor) -> Tensor:
    """At least float32."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
