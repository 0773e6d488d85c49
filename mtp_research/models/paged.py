"""Paged attention behind Hugging Face layers: context and cache object of a packed forward pass.

Tokens of all requests of a step are packed as one row `[1, T]`. `PagedContext` is passed twice: as
`past_key_values`, so that the layer hands over its new keys and values, and as `attention_context`,
so that the attention function reads pages.

Letters: R requests, T packed rows, M blocks per table, Hkv key-value heads, Dk / Dv head dims.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from mtp_research.kernels.new_rows import MAX_STORED_ROWS
from mtp_research.kernels.paged_attention import paged_attention
from mtp_research.kernels.store_kv import store_kv
from mtp_research.models.compiled import kept, store_and_attend, store_and_attend_latents
from mtp_research.models.geometry import KVPages
from mtp_research.models.latent import absorb_query, expand_output


class PagePool(Protocol):
    """Owner of the pages (`decode.kv_cache.KVCache`)."""

    def pages(self, layer: int) -> KVPages:
        """Pages of a cache layer, writable."""
        ...


class Angles(NamedTuple):
    """Rotary cos and sin of the rows of a pass, each `[1, T, P]`, P the dims that are rotated."""

    cos: Tensor
    sin: Tensor


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
    _new_latents: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _kept_angles: list[tuple[Tensor, Tensor]] = field(
        default_factory=list, repr=False, compare=False
    )

    @property
    def stores_in_launch(self) -> bool:
        """Whether attention of compiled code may store the new rows in its own launch."""
        return self.max_query_len <= MAX_STORED_ROWS and self.backend in ("auto", "triton")

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        """Cache protocol: write the new rows `[1, Hkv, T, D]` into the pages, hand them back.

        Latent layers hand over the latent and the rotary key here, and `attend` gets what was
        expanded from them: the two are kept for it.
        """
        pages = self._pages(layer_idx)
        if pages.kind == "latent":
            self._new_latents[layer_idx] = (key, value)
            return key, value
        if torch.compiler.is_compiling():
            return key, value  # `attend` stores them
        store_kv(
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            key_cache=pages.keys,
            value_cache=pages.values,
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
        angles: Angles | None = None,
    ) -> Tensor:
        """See `models.attention.AttentionContext`; `key` and `value` are read from the pages.

        With `angles`, in compiled passes, `query` and `key` come before their rotary embedding.
        """
        pages = self._pages(cast(int, module.layer_idx))
        is_compiling = torch.compiler.is_compiling()
        assert angles is None or (is_compiling and pages.kind != "latent"), "rows come rotated here"
        if pages.kind == "latent":
            return self._attend_latents(module, query, pages, scale=scale)[None]
        sinks = None if sinks is None else sinks.float()
        if is_compiling:
            output = store_and_attend(
                query[0].transpose(0, 1),
                key[0].transpose(0, 1),
                value[0].transpose(0, 1),
                None if angles is None else self._angles_of_pass(angles),
                pages.keys,
                pages.values,
                self.slot_mapping,
                self.block_table,
                self.seq_lens,
                self.query_start_loc,
                self.max_query_len,
                scale,
                sliding_window,
                sinks,
                self.backend,
            )
            return output[None]
        output = paged_attention(
            query[0].transpose(0, 1),
            key_cache=pages.keys,
            value_cache=pages.values,
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

    def _angles_of_pass(self, angles: Angles) -> Tensor:
        """Cos and sin as `[2, T, P]`, the same for all layers of the pass that share them."""
        for cos, both in self._kept_angles:
            if cos is angles.cos:
                return both
        both = kept(torch.stack((angles.cos[0], angles.sin[0])))
        self._kept_angles.append((angles.cos, both))
        return both

    def _attend_latents(
        self, module: nn.Module, query: Tensor, pages: KVPages, *, scale: float
    ) -> Tensor:
        """Output `[T, H, Dv]` of `query` `[1, H, T, nope + P]`."""
        absorbed = absorb_query(module, query[0])
        latent, rope = self._new_latents.pop(cast(int, module.layer_idx))
        attended = store_and_attend_latents(
            absorbed.latent,
            absorbed.rope,
            latent[0].transpose(0, 1),
            rope[0].transpose(0, 1),
            pages.keys[:, :, 0],
            self.slot_mapping,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.max_query_len,
            scale,
            self.backend,
        )
        return expand_output(module, attended)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Cache protocol: positions are passed explicitly, so the cache claims to be empty."""
        return 0

    def _pages(self, layer_idx: int) -> KVPages:
        return self.pool.pages(layer_idx if self.kv_layer is None else self.kv_layer)
