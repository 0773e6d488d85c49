"""The ops that compiled code sees of the pages: write the new rows, then attend.

`torch.compile` turns an op that writes into its argument into one that returns a new value, and may
copy the whole pool to do so. These ops therefore do not declare their write. That is safe because
every reader of a written row is such an op again, and each call depends on the one before it: a
layer's input on the layer below, a later pass on the token that the earlier one drafted.

Letters: R requests, T packed rows, M blocks per table, H / Hkv heads, Dk / Dv head dims, L latent,
P rotary key size.
"""

import torch

from mtp_research.kernels.latent_attention import latent_attention
from mtp_research.kernels.paged_attention import paged_attention
from mtp_research.kernels.store_kv import store_kv


@torch.library.custom_op("mtp_research::store_and_attend", mutates_args=())
def store_and_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """Attention output `[T, H, Dv]` of `query` `[T, H, Dk]` after `key` and `value` were stored.

    Args as in `kernels.store_kv.store_kv` and `kernels.paged_attention.paged_attention`.
    """
    store_kv(
        key,
        value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        backend=backend,
    )
    return paged_attention(
        query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        scale=scale,
        sliding_window=sliding_window,
        sinks=sinks,
        backend=backend,
    )


@store_and_attend.register_fake
def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


@torch.library.custom_op("mtp_research::store_and_attend_latents", mutates_args=())
def store_and_attend_latents(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    latent_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    backend: str,
) -> torch.Tensor:
    """Attended latents `[T, H, L]` after `latent` `[T, 1, L]` and `rope` `[T, 1, P]` were stored.

    They lie behind each other in a slot of `latent_cache` `[num_blocks, block_size, L + P]`. Other
    args as in `kernels.latent_attention.latent_attention`.
    """
    latent_dim = latent.shape[2]
    store_kv(
        latent,
        rope,
        key_cache=latent_cache[:, :, None, :latent_dim],
        value_cache=latent_cache[:, :, None, latent_dim:],
        slot_mapping=slot_mapping,
        backend=backend,
    )
    return latent_attention(
        query_latent,
        query_rope=query_rope,
        latent_cache=latent_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        scale=scale,
        backend=backend,
    )


@store_and_attend_latents.register_fake
def _fake_latents(query_latent: torch.Tensor, *_: object) -> torch.Tensor:
    return query_latent.new_empty(query_latent.shape)
