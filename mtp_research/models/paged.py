"""Paged attention behind Hugging Face layers: context and cache object of a packed forward pass.

Tokens of all requests of a step are packed as one row `[1, T]`. `PagedContext` is passed twice: as
`past_key_values`, so that the layer hands over its new keys and values, and as `attention_context`,
so that the attention function reads pages.

Letters: R requests, T packed rows, M blocks per table, Hkv key-value heads, Dk / Dv head dims.
"""

from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor, nn

from mtp_research.kernels.paged_attention import paged_attention
from mtp_research.kernels.store_kv import store_kv


class PagePool(Protocol):
    """Owner of the pages (`decode.kv_cache.KVCache`)."""

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Key and value pages, `[num_blocks, block_size, Hkv, Dk]` and `[..., Dv]`."""
        ...


@dataclass(frozen=True)
class PagedContext:
    """Where the rows of one packed forward pass are written and what they may read.

    Attributes:
        pool: owner of the pages.
        slot_mapping: `[T]` int64, slot each row is written to (`block_id * block_size + offset`),
            -1 writes nothing.
        block_table: `[R, M]` int32, pages of each request.
        seq_lens: `[R]` int32, KV length including this pass's rows.
        query_start_loc: `[R + 1]` int32, first packed row of each request.
        max_query_len: largest number of rows of one request; sizes the launch grid.
        backend: kernel backend (`auto`, `reference`, `triton`).
        kv_layer: cache layer to use instead of the layer's own index; set for MTP modules, whose KV
            layer depends on the draft step and not on the module alone.
    """

    pool: PagePool
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    backend: str = "auto"
    kv_layer: int | None = None

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        """Cache protocol: write the new rows `[1, Hkv, T, D]` into the pages, hand them back."""
        key_cache, value_cache = self._pages(layer_idx)
        store_kv(
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            key_cache=key_cache,
            value_cache=value_cache,
            slot_mapping=self.slot_mapping,
            backend=self.backend,
        )
        return key, value

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
        """See `models.attention.AttentionContext`; `key` and `value` are read from the pages."""
        key_cache, value_cache = self._pages(cast(int, module.layer_idx))
        output = paged_attention(
            query[0].transpose(0, 1),
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
            max_query_len=self.max_query_len,
            scale=scale,
            sliding_window=sliding_window,
            sinks=sinks,
            backend=self.backend,
        )
        return output[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Cache protocol: positions are passed explicitly, so the cache claims to be empty."""
        return 0

    def _pages(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        return self.pool.pages(layer_idx if self.kv_layer is None else self.kv_layer)
