"""Attention of prompt rows over latents whose keys and values are expanded per head.

Where it sits: `models/attention` calls `attend_latent_rows` for passes that have prompt rows. A
latent can be read in two ways. Absorbed, the key projection W_k moves to the query and W_v behind
the attention, and all heads read one vector of L + P per token: right for decoding, where reading
is the price. Expanded, keys and values of every head are made of the latents first: more bytes,
fewer operations per pair of a row and a key. For a request with C rows behind S tokens of context,
per head and in multiplications,

    absorbed   C L (N + Dv)       + pairs (2 L + P)       pairs = C S + C (C + 1) / 2
    expanded   (S + C) L (N + Dv) + pairs (N + P + Dv)

so that expanding pays where pairs (2 L - N - Dv) > S L (N + Dv): always at S = 0, and behind a long
context from about C = L (N + Dv) / (2 L - N - Dv) rows on (398 for GLM-4.7-Flash, 171 for
DeepSeek-V3). A pass decides for all of its prompts together; rows that decode beside them stay
absorbed. The attention itself is torch's flash attention over packed rows (16-bit types on a GPU)
or its scaled dot product, one request after the other.
Letters: R requests, E of them expanded (the last ones), T packed rows, S keys of the expanded
requests together, H heads, L latent, P rotary key size, N key size without it, Dv value head dim.
Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2; flash attention as in `context_rows`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels.attention.attention_rows import AttentionRows
from mtp_research.kernels.attention.store_kv import NewRows, store_kv
from mtp_research.kernels.latent.latent_attention import attend_latents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_MAX_FLASH_DIM = 256
_CHUNK_BYTES = 512 << 20  # of keys and values that are expanded at a time
_flash_forward = torch.ops.aten._flash_attention_forward


class LatentDims(NamedTuple):
    """Sizes of a layer."""

    latent: int  # L
    rope: int  # P
    nope: int  # N
    value: int  # Dv


class Span(NamedTuple):
    """Rows of one request in a pass, as the host knows them."""

    first: int  # position of the first row: tokens of context before it
    num_rows: int

    @property
    def num_keys(self) -> int:
        """Keys that the last row sees, its own included."""
        return self.first + self.num_rows


class Prompts(NamedTuple):
    """The last requests of a pass, all with prompt rows, and what lies before them."""

    spans: tuple[Span, ...]  # of the E last requests
    num_others: int  # packed rows before theirs
    longest_other: int  # upper bound of these rows a request
    # Rows that the absorbed attention is launched for, at least `num_others`; a pass of a fixed
    # shape gives a fixed number, so that the launch is compiled once.
    num_launched: int


class ExpandedRows(NamedTuple):
    """What all layers of a pass need to read the prompts' latents expanded."""

    slots: Tensor  # [S] int64, where the keys of the expanded requests lie, in the order of texts
    key_start_loc: Tensor  # [E + 1] int32, the keys of request e are [loc[e], loc[e + 1])
    query_start_loc: Tensor  # [E + 1] int32, likewise its rows, counted behind the other rows
    prompts: Prompts


def pays_expanded(spans: Sequence[Span], dims: LatentDims) -> bool:
    """Whether expanding takes fewer operations for these requests together."""
    return products_saved(spans, dims) > 0


def products_saved(spans: Sequence[Span], dims: LatentDims) -> int:
    """Multiplications per head that expanding saves; see the formula. Negative where it costs."""
    width = dims.nope + dims.value
    pairs = sum(s.num_rows * s.first + s.num_rows * (s.num_rows + 1) // 2 for s in spans)
    num_context = sum(s.first for s in spans if s.num_rows)
    return pairs * (2 * dims.latent - width) - num_context * dims.latent * width


def expanded_rows(rows: AttentionRows, prompts: Prompts, *, block_size: int) -> ExpandedRows:
    """Where the keys of the last requests lie; made on the device without waiting for it."""
    count = len(prompts.spans)
    num_keys = sum(span.num_keys for span in prompts.spans)
    lens = rows.seq_lens[-count:].long()
    ends = lens.cumsum(0)
    requests = torch.arange(count, device=lens.device)
    request = torch.repeat_interleave(requests, lens, output_size=num_keys)
    position = torch.arange(num_keys, device=lens.device) - (ends - lens)[request]
    block = rows.block_table[-count:][request, position // block_size].long()
    return ExpandedRows(
        slots=block * block_size + position % block_size,
        key_start_loc=torch.nn.functional.pad(ends, (1, 0)).int(),
        query_start_loc=(rows.query_start_loc[-count - 1 :] - prompts.num_others).int(),
        prompts=prompts,
    )


def attend_latent_rows(
    query: Tensor,
    weight: Tensor,
    latent_cache: Tensor,
    rows: AttentionRows,
    *,
    scale: float,
    new_rows: NewRows,
    backend: str,
    expanded: ExpandedRows | None = None,
) -> Tensor:
    """Attention of packed rows over paged latents, queries and outputs per head.

    Args:
        query: `[H, T, N + P]`, the last P rotated.
        weight: `[H, N + Dv, L]`, which makes keys and values of a latent.
        latent_cache: `[num_blocks, block_size, L + P]`.
        rows: where the rows sit and what they read.
        scale: factor on the logits.
        new_rows: latents `[T, 1, L]` and rotary keys `[T, 1, P]` to store in the pages first.
        backend: kernel backend of the absorbed rows, see `checks.resolve_backend`.
        expanded: of the requests that are read expanded; None: all are read absorbed.

    Returns:
        `[T, H, Dv]`, contiguous.
    """
    if expanded is None:

        def attend(query_latent: Tensor, query_rope: Tensor) -> Tensor:
            return attend_latents(
                query_latent,
                query_rope,
                latent_cache,
                rows,
                scale=scale,
                new_rows=new_rows,
                backend=backend,
            )

        return absorbed(query, weight, attend, rope_dim=new_rows.value.shape[2]).contiguous()
    pages, latent_dim = latent_cache[:, :, None], weight.shape[2]
    store_kv(
        new_rows.key,
        new_rows.value,
        key_cache=pages[..., :latent_dim],
        value_cache=pages[..., latent_dim:],
        slot_mapping=new_rows.slot_mapping,
        backend=backend,
    )
    _, num_others, longest, num_launched = expanded.prompts
    prompts = attend_expanded(
        query[:, num_others:].transpose(0, 1), weight, latent_cache, expanded, scale=scale
    )
    if num_launched == 0:
        return prompts
    # The expanded requests have no rows in this launch.
    others = rows._replace(
        query_start_loc=rows.query_start_loc.clamp(max=num_others),
        max_query_len=longest,
        are_settled=False,
    )

    def attend_others(query_latent: Tensor, query_rope: Tensor) -> Tensor:
        operands = query_latent, query_rope, latent_cache
        return attend_latents(*operands, others, scale=scale, backend=backend)

    rope_dim = new_rows.value.shape[2]
    found = absorbed(query[:, :num_launched], weight, attend_others, rope_dim=rope_dim)
    return torch.cat((found[:num_others], prompts))


def absorbed(
    query: Tensor,
    weight: Tensor,
    attend: Callable[[Tensor, Tensor], Tensor],
    *,
    rope_dim: int,
    product: Callable[[Tensor, Tensor], Tensor] = torch.bmm,
) -> Tensor:
    """Output `[T, H, Dv]` of latent attention on `query` and `weight` as in `attend_latent_rows`.

    `attend` is called with the queries' latent parts `[T, H, L]` and rotary parts `[T, H, P]`, and
    returns attended latents `[T, H, L]`. `product` multiplies rows and weights of each head.
    """
    nope = query.shape[2] - rope_dim
    key_projection, value_projection = weight[:, :nope], weight[:, nope:]  # [H, N or Dv, L]
    query_nope, query_rope = query.split((nope, rope_dim), dim=-1)
    query_latent = product(query_nope, key_projection).transpose(0, 1)
    attended = attend(query_latent, query_rope.transpose(0, 1))
    return product(attended.transpose(0, 1), value_projection.mT).transpose(0, 1)


def attend_expanded(
    query: Tensor, weight: Tensor, latent_cache: Tensor, expanded: ExpandedRows, *, scale: float
) -> Tensor:
    """Causal attention `[T, H, Dv]` of prompt rows `[T, H, N + P]` over their expanded keys.

    As many heads at a time as `_CHUNK_BYTES` hold; other args as in `attend_latent_rows`.
    """
    num_heads, _, latent_dim = weight.shape
    rope_dim = latent_cache.shape[2] - latent_dim
    nope = query.shape[2] - rope_dim
    value_dim = weight.shape[1] - nope
    latents = latent_cache.flatten(0, 1).index_select(0, expanded.slots)  # [S, L + P]
    compressed, rope = latents.split((latent_dim, rope_dim), dim=-1)
    out = query.new_empty(len(query), num_heads, value_dim)
    head_bytes = 2 * len(latents) * query.shape[2] * query.element_size()
    step = max(1, _CHUNK_BYTES // max(head_bytes, 1))
    for start in range(0, num_heads, step):
        heads = slice(start, min(start + step, num_heads))
        parts = (compressed @ weight[heads].flatten(0, 1).mT).unflatten(1, (-1, weight.shape[1]))
        shared = rope[:, None].expand(-1, parts.shape[1], -1)  # [S, h, P]
        keys = torch.cat((parts[..., :nope], shared), dim=-1)
        attended = _attend(query[:, heads], keys, parts[..., nope:], expanded, scale=scale)
        out[:, heads] = attended
    return out


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, expanded: ExpandedRows, *, scale: float
) -> Tensor:
    """`[T, h, Dv]` of `query` `[T, h, N + P]`, `keys` `[S, h, N + P]` and `values` `[S, h, Dv]`."""
    key_dim, value_dim = keys.shape[2], values.shape[2]
    spans = expanded.prompts.spans
    fits_flash = query.is_cuda and query.dtype in _FLASH_DTYPES and key_dim <= _MAX_FLASH_DIM
    is_aligned = key_dim % 8 == values.stride(1) % 8 == values.storage_offset() % 8 == 0
    if not fits_flash or not is_aligned or value_dim > key_dim:
        return _attend_each(query, keys, values, spans, scale=scale)
    if value_dim < key_dim:  # the kernel takes one width
        values = torch.nn.functional.pad(values, (0, key_dim - value_dim))
    longest = max(span.num_rows for span in spans), max(span.num_keys for span in spans)
    starts = expanded.query_start_loc, expanded.key_start_loc
    # Causal from the last row and the last key of each request on, as in flash-attention 2.1.
    output, *_ = _flash_forward(
        query, keys, values, *starts, *longest, 0.0, True, False, scale=scale
    )
    return output[..., :value_dim]


def _attend_each(
    query: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], *, scale: float
) -> Tensor:
    """The same, one request after the other, float32 or wider inside."""
    wide = torch.promote_types(query.dtype, torch.float32)
    parts = [part.to(wide).transpose(0, 1)[None] for part in (query, keys, values)]  # [1, h, *, D]
    row_ends, key_ends = [0], [0]
    for span in spans:
        row_ends.append(row_ends[-1] + span.num_rows)
        key_ends.append(key_ends[-1] + span.num_keys)
    found = []
    for span, rows, among in zip(spans, pairwise(row_ends), pairwise(key_ends), strict=True):
        if span.num_rows == 0:
            continue
        shape = (span.num_rows, span.num_keys)
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(span.first)
        of_rows, of_keys = slice(*rows), slice(*among)
        operands = parts[0][:, :, of_rows], parts[1][:, :, of_keys], parts[2][:, :, of_keys]
        found.append(
            torch.nn.functional.scaled_dot_product_attention(*operands, attn_mask=mask, scale=scale)
        )
    return torch.cat(found, dim=2)[0].transpose(0, 1).to(query.dtype)
