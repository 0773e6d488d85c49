"""Device state of the decode loop: the page pool, and the per-slot texts and recent hidden states.

Letters: L cache layers, S request slots, K drafts per step, D hidden, Hkv key-value heads.
"""

import torch
from torch import Tensor


class KVCache:
    """Pages of every attention layer: the target's layers first, then the draft layers.

    Args:
        num_layers: L, target layers plus draft layers.
        num_blocks: pages per layer.
        block_size: tokens a page.
        num_kv_heads: Hkv.
        head_dims: Dk and Dv.
        dtype: dtype of the pages.
        device: where they live.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        shape = (num_layers, num_blocks, block_size, num_kv_heads)
        self.keys = torch.zeros(*shape, head_dims[0], dtype=dtype, device=device)
        self.values = torch.zeros(*shape, head_dims[1], dtype=dtype, device=device)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Key and value pages of one layer, each `[num_blocks, block_size, Hkv, D*]`, writable."""
        return self.keys[layer], self.values[layer]

    @property
    def num_bytes(self) -> int:
        """Size of the pool in bytes."""
        return sum(pool.numel() * pool.element_size() for pool in (self.keys, self.values))


class HiddenRing:
    """What the next step needs of the text, by request slot so that batch order cannot matter.

    `text[slot, j]` is the token at absolute position j: accepted tokens, then the current drafts.
    `hidden[slot, q mod K]` is the target hidden state of row q for the last K rows.

    Args:
        num_slots: S.
        max_model_len: longest text in tokens.
        num_speculative_tokens: K.
        hidden_size: D.
        vocab_size: V.
        keep_draft_probs: drafts are sampled, and their distributions must be kept for verification.
        dtype: dtype of the hidden states.
        device: where they live.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_model_len: int,
        num_speculative_tokens: int,
        hidden_size: int,
        vocab_size: int,
        keep_draft_probs: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_rows = max(num_speculative_tokens, 1)
        self.text = torch.zeros(
            num_slots, max_model_len + num_speculative_tokens + 1, dtype=torch.int64, device=device
        )
        self.hidden = torch.zeros(num_slots, self.num_rows, hidden_size, dtype=dtype, device=device)
        self.draft_probs: Tensor | None = None
        self._vocab_size = vocab_size
        if keep_draft_probs:
            self.draft_probs = torch.zeros(
                num_slots, num_speculative_tokens, vocab_size, dtype=torch.float64, device=device
            )

    def write_text(
        self, slots: Tensor, *, positions: Tensor, token_ids: Tensor, keep: Tensor
    ) -> None:
        """Write `token_ids` at `positions` where `keep`, all `[R, J]`; slots `[R]`.

        Ids outside the vocabulary (drafts that must be rejected) are stored as 0: the verifier
        knows them from the request, and every lookup in an embedding stays in range.
        """
        token_ids = token_ids.masked_fill((token_ids < 0) | (token_ids >= self._vocab_size), 0)
        rows = slots[:, None].expand_as(positions)[keep]
        self.text[rows, positions[keep]] = token_ids[keep]

    def read_text(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Tokens at absolute positions, `[T]`; outside the table, its first or last entry."""
        return self.text[slots, positions.clamp(0, self.text.shape[1] - 1)]

    def write_hidden(
        self, slots: Tensor, *, positions: Tensor, hidden: Tensor, keep: Tensor
    ) -> None:
        """Store `hidden` `[R, J, D]` of rows `positions` where `keep`; at most K rows a request."""
        rows = slots[:, None].expand_as(positions)[keep]
        self.hidden[rows, positions[keep] % self.num_rows] = hidden[keep]

    def read_hidden(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Hidden states `[T, D]` of rows that are among the last K of their request."""
        return self.hidden[slots, positions % self.num_rows]

    def write_draft_probs(self, slots: Tensor, *, draft_step: int, probs: Tensor) -> None:
        """Keep the distributions `[R, V]` that the drafts of `draft_step` were drawn from."""
        assert self.draft_probs is not None, (
            "draft distributions are kept only when drafts are sampled"
        )
        self.draft_probs[slots, draft_step] = probs

    def read_draft_probs(self, slots: Tensor) -> Tensor | None:
        """Distributions `[R, K, V]` of the current drafts; None when drafts are one-hot."""
        return None if self.draft_probs is None else self.draft_probs[slots]
