"""Ops that compiled code takes as they are: where its kernels end, and the pages.

The ops of the pages write the new rows, then attend. `torch.compile` turns an op that writes into
its argument into one that returns a new value, and may copy the whole pool to do so. These ops
therefore do not declare their write. That is safe because every reader of a written row is such an
op again, and each call depends on the one before it: a layer's input on the layer below, a later
pass on the token that the earlier one drafted.

Letters: R requests, T packed rows, M blocks per table, H / Hkv heads, Dk / Dv head dims, L latent,
P rotary dims.
"""

import torch

from mtp_research.kernels.latent_attention import attend_latents
from mtp_research.kernels.new_rows import NewRows
from mtp_research.kernels.paged_attention import attend_pages


@torch.library.custom_op("mtp_research::kept", mutates_args=())
def kept(values: torch.Tensor) -> torch.Tensor:
    """A copy of `values`, which many layers hand to the ops below.

    Compiled code would compute such a value anew for every few of the ops that read it, in launches
    of their own; the output of an op it keeps.
    """
    return values + 0  # not `clone`, which would be captured as a node of the copy engine


@kept.register_fake
def _fake_kept(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


@torch.library.custom_op("mtp_research::end_kernel", mutates_args=("values",))
def _end_kernel(values: torch.Tensor) -> None:
    """Nothing. The compiler, to which it writes `values`, lets no kernel reach over it."""


@_end_kernel.register_fake
def _fake_end_kernel(values: torch.Tensor) -> None:
    pass


def settled(values: torch.Tensor) -> torch.Tensor:
    """The same `values`; in compiled code, what reads them is not in the kernel that makes them.

    For results of reductions over a vocabulary: Triton 3.6 gives up (`PassManager::run failed`) on
    a kernel that reduces and then does the bookkeeping of a step. Launches nothing; nothing may
    have read the values before.
    """
    if torch.compiler.is_compiling():
        _end_kernel(values)
    return values


@torch.library.custom_op("mtp_research::store_and_attend", mutates_args=())
def store_and_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: torch.Tensor | None,
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

    Args as in `kernels.store_kv.store_kv` and `kernels.paged_attention.attend_pages`, and:
        angles: `[2, T, P]`, rotary cos and sin for `query` and `key`; None if they are rotated.
    """
    cos_sin = () if angles is None else angles.unbind()
    return attend_pages(
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
        new_rows=NewRows(key, value, slot_mapping, *cos_sin),
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
    return attend_latents(
        query_latent,
        query_rope=query_rope,
        latent_cache=latent_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        scale=scale,
        new_rows=NewRows(latent, rope, slot_mapping),
        backend=backend,
    )


@store_and_attend_latents.register_fake
def _fake_latents(query_latent: torch.Tensor, *_: object) -> torch.Tensor:
    return query_latent.new_empty(query_latent.shape)
