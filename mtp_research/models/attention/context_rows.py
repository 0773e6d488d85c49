"""Causal attention over packed documents and each row's own draft rows, without an S x S matrix.

Row t attends to the context rows s <= t of its document (of its window), to the draft rows that
belong to t alone, and to a sink. The parts are merged through their log-sum-exp L:

    L = log(e^{L_context} + sum_j e^{s_j} + e^{sink}),    s_j = scale q_t k_jt
    o = e^{L_context - L} o_context + sum_j e^{s_j - L} v_jt

The backward pass of flash attention makes the probabilities e^{s - L} again from a log-sum-exp, and
needs the output only as the row sum of o do. It knows no gradient in L_context, and needs none:
given the *merged* L and o, its probabilities are those of the merged softmax, and what it returns
is the context's share of the exact gradient. Draft rows and sinks are scalar products:

    D = sum o do,   ds_j = p_j (v_jt do - D),   dsink = -p_sink D,   dq += scale sum_j ds_j k_jt

The context runs through torch's flash attention where that fits (`fits_varlen`): half precision on
a GPU. Elsewhere it runs in chunks of query rows, in any dtype and on any device, with the same
formulas. Both keep queries, keys, values, output and one number a row and head.

Letters: B batch rows, S row length, P documents of a row, H / Hkv heads, G = H / Hkv, Dk / Dv head
dims, C rows of a chunk, n keys that a chunk sees.
Source: FlashAttention-2 (arXiv:2307.08691); a backward pass over parts from the merged log-sum-exp
as in ring attention (arXiv:2310.01889).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
# The backward pass pads every document to 128 rows of float32; shorter ones would cost memory.
_MIN_MEAN_TOKENS = 64
_CHUNK_BYTES = 256 << 20  # scores of a chunk
_WHOLE = -1  # window of rows that see all of their document
flash_forward = torch.ops.aten._flash_attention_forward
flash_backward = torch.ops.aten._flash_attention_backward


def attend_rows(
    rows: Sequence[Tensor],
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    document_index: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Attention of every row to its context, its draft rows and a sink; differentiable in all.

    Args:
        rows: query `[B, H, S, Dk]`, key `[B, Hkv, S, Dk]`, value `[B, Hkv, S, Dv]`, then key and
            value of each draft row, shaped alike: row t of them belongs to query t.
        scale: factor of the scalar products.
        window: context rows that a row sees, the one at its own place included; 0 for none, which
            needs draft rows; None for all of the document before it.
        sinks: `[H]`, one more logit per head, which takes weight and gives nothing.
        document_index: `[B, S]` int, the document of each row; None: each batch row is one.
        cu_seqlens: `[B * P + 1]` int32, the same documents' ends in the flattened batch; None does
            without flash attention.

    Returns:
        `[B, S, H, Dv]`.
    """
    assert window != 0 or len(rows) > len(_Parts._fields), "a row must see some key"
    ends = cu_seqlens if cu_seqlens is not None and fits_varlen(rows, cu_seqlens) else None
    bound = _WHOLE if window is None else window
    by_row = [_by_row(part) for part in rows]
    if ends is not None:  # here `torch.compile` lets the kernel that makes them write them so
        by_row = [part.contiguous() for part in by_row]
    return _attend_op(by_row, sinks, document_index, ends, scale, bound)[0]


def fits_varlen(rows: Sequence[Tensor], cu_seqlens: Tensor) -> bool:
    """Whether flash attention takes these rows: half precision on a GPU, documents not too short.

    Values narrower than keys are padded; the kernel takes one width.
    """
    query, head_dim = rows[0], max(rows[0].shape[-1], rows[2].shape[-1])
    return (
        query.is_cuda
        and query.dtype in _DTYPES
        and query.shape[-1] == head_dim
        and head_dim % 8 == 0
        and head_dim <= _MAX_HEAD_DIM
        and len(cu_seqlens) * _MIN_MEAN_TOKENS <= query.shape[0] * query.shape[2]
    )


class _Parts(NamedTuple):
    """Rows of the context."""

    query: Tensor  # [B, H, S, Dk]
    key: Tensor  # [B, Hkv, S, Dk]
    value: Tensor  # [B, Hkv, S, Dv]


class _Seen(NamedTuple):
    """Which context rows a row sees; the last arguments of the two operators."""

    document_index: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    window: int


# Operators of their own, so that `torch.compile` neither traces nor splits them.
@torch.library.custom_op("mtp_research::attend_rows", mutates_args=())
def _attend_op(
    rows: list[Tensor],
    sinks: Tensor | None,
    document_index: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Output `[B, S, H, Dv]` and log-sum-exp `[B, H, S]`, float32 or wider.

    `rows` are those of `attend_rows`, each `[B, S, H, D]`, and so are their gradients.
    """
    rows = [_by_row(part) for part in rows]
    parts, seen = _Parts(*rows[:3]), _Seen(document_index, cu_seqlens, scale, window)
    if window == 0:
        output, lse = _empty_result(parts)
        output.zero_()
        lse.fill_(-torch.inf)
    elif cu_seqlens is None:
        output, lse = _chunked_forward(parts, seen)
    else:
        output, lse = _flash_forward(parts, seen)
    if len(rows) == len(parts) and sinks is None:
        return output, lse
    query = _by_group(parts.query, parts)
    scores = [_row_products(query, key, parts) * scale for key in rows[3::2]]  # [B, H, S]
    logits = [lse, *scores]
    if sinks is not None:
        logits.append(sinks.to(lse.dtype)[None, :, None].expand_as(lse))
    merged = torch.logsumexp(torch.stack(logits), dim=0)
    wide = _by_row(output).to(lse.dtype) * torch.exp(lse - merged)[..., None]
    for score, value in zip(scores, rows[4::2], strict=True):
        weight = _by_group(torch.exp(score - merged), parts)[..., None]
        wide += (weight * value[:, :, None]).flatten(1, 2)
    return _by_row(wide).to(output.dtype).contiguous(), merged


@_attend_op.register_fake
def _attend_fake(rows, sinks, document_index, cu_seqlens, scale, window):
    return _empty_result(_Parts(*(_by_row(part) for part in rows[:3])))


@torch.library.custom_op("mtp_research::attend_rows_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    rows: list[Tensor],
    sinks: Tensor | None,
    document_index: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    window: int,
) -> list[Tensor]:
    """Gradients of all rows, then of the sinks if there are any."""
    rows = [_by_row(part) for part in rows]
    parts, seen = _Parts(*rows[:3]), _Seen(document_index, cu_seqlens, scale, window)
    grad = grad.contiguous()
    if window == 0:
        grads = [torch.zeros_like(part) for part in parts]
    elif cu_seqlens is None:
        grads = _chunked_backward(grad, output, lse, parts, seen)
    else:
        grads = _flash_backward(grad, output, lse, parts, seen)
    if len(rows) > len(parts) or sinks is not None:
        delta = _row_sums(grad, output, lse)
    query, outer = _by_group(parts.query, parts), _by_group(_by_row(grad), parts)
    for key, value in zip(rows[3::2], rows[4::2], strict=True):
        weight = torch.exp(_row_products(query, key, parts) * scale - lse)
        slope = weight * (_row_products(outer, value, parts) - delta) * scale
        weight, slope = (_by_group(part, parts)[..., None] for part in (weight, slope))
        grads[0] += (slope * key[:, :, None]).flatten(1, 2).to(key.dtype)
        grads.append((slope * query).sum(dim=2).to(key.dtype))
        grads.append((weight * outer).sum(dim=2).to(value.dtype))
    grads = [_by_row(part).contiguous() for part in grads]
    if sinks is not None:
        share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
        grads.append(-(share * delta).sum(dim=(0, 2)).to(sinks.dtype))
    return grads


@_backward_op.register_fake
def _backward_fake(grad, output, lse, rows, sinks, *seen):
    every = [*rows] if sinks is None else [*rows, sinks]
    return [row.new_empty(row.shape) for row in every]


def _save(ctx, inputs, output) -> None:
    rows, sinks, document_index, cu_seqlens, *ctx.scalars = inputs
    ctx.num_rows = len(rows)
    ctx.save_for_backward(*output, *rows, sinks, document_index, cu_seqlens)


def _backward(ctx, grad, _grad_lse):
    output, lse, *saved = ctx.saved_tensors
    rows, (sinks, *documents) = saved[: ctx.num_rows], saved[ctx.num_rows :]
    grads = _backward_op(grad, output, lse, rows, sinks, *documents, *ctx.scalars)
    return grads[: len(rows)], None if sinks is None else grads[-1], None, None, None, None


_attend_op.register_autograd(_backward, setup_context=_save)


def _flash_forward(parts: _Parts, seen: _Seen) -> tuple[Tensor, Tensor]:
    batch_size, _, length, _ = parts.query.shape
    value_dim, flat = parts.value.shape[-1], _flat(parts)
    ends = seen.cu_seqlens
    output, lse, *_ = flash_forward(
        *flat, ends, ends, length, length, 0.0, _is_causal(seen), False, **_options(seen)
    )
    output = output[..., :value_dim].contiguous().unflatten(0, (batch_size, length))
    return output, lse.unflatten(1, (batch_size, length)).transpose(0, 1).contiguous()


def _flash_backward(
    grad: Tensor, output: Tensor, lse: Tensor, parts: _Parts, seen: _Seen
) -> list[Tensor]:
    """From the merged `lse` and `output`: the context's share of the gradients."""
    shape, value_dim, flat = parts.query.shape, parts.value.shape[-1], _flat(parts)
    ends, length = seen.cu_seqlens, shape[2]
    outer, padded = (_widened(part, shape[-1]).flatten(0, 1) for part in (grad, output))
    unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # state of a dropout of 0
    flat_lse = lse.transpose(0, 1).flatten(1).contiguous()
    limits = (ends, ends, length, length, 0.0, _is_causal(seen), unused, unused)
    found = flash_backward(outer, *flat, padded, flat_lse, *limits, **_options(seen))
    grads = [_by_row(part.unflatten(0, (shape[0], length))) for part in found]
    return [*grads[:2], grads[2][..., :value_dim]]


def _flat(parts: _Parts) -> list[Tensor]:
    """Each `[B * S, heads, Dk]`, values padded."""
    every = (parts.query, parts.key, _widened(parts.value, parts.key.shape[-1]))
    return [_by_row(part).flatten(0, 1) for part in every]


def _widened(values: Tensor, width: int) -> Tensor:
    """`[..., width]` with zeros behind `[..., Dv]`; `pad` would copy what is wide enough."""
    missing = width - values.shape[-1]
    return pad(values, (0, missing)) if missing else values


def _is_causal(seen: _Seen) -> bool:
    return seen.window == _WHOLE


def _options(seen: _Seen) -> dict[str, float | int]:
    left = -1 if seen.window == _WHOLE else seen.window - 1
    return {"scale": seen.scale, "window_size_left": left, "window_size_right": 0}


class _Chunk(NamedTuple):
    """Some query rows and the keys that any of them sees."""

    rows: slice  # C of S
    keys: slice  # n of S
    allowed: Tensor  # [1 or B, 1, 1, C, n] bool


def _chunks(parts: _Parts, seen: _Seen) -> Iterator[_Chunk]:
    batch_size, num_heads, length, _ = parts.query.shape
    bytes_per_row = batch_size * num_heads * length * _wide(parts).itemsize
    step = max(1, _CHUNK_BYTES // max(bytes_per_row, 1))
    index, documents = torch.arange(length, device=parts.query.device), seen.document_index
    for start in range(0, length, step):
        stop = min(start + step, length)
        first = 0 if seen.window == _WHOLE else max(0, start - seen.window + 1)
        rows, keys = slice(start, stop), slice(first, stop)
        distance = index[rows, None] - index[None, keys]
        allowed = (distance >= 0)[None]
        if seen.window != _WHOLE:
            allowed = allowed & (distance < seen.window)
        if documents is not None:
            allowed = allowed & (documents[:, rows, None] == documents[:, None, keys])
        yield _Chunk(rows, keys, allowed[:, None, None])


def _chunk_scores(chunk: _Chunk, parts: _Parts, seen: _Seen) -> Tensor:
    """`[B, Hkv, G, C, n]`, -inf where not allowed; each row sees itself."""
    query, key = _by_group(parts.query[:, :, chunk.rows], parts), parts.key[:, :, None, chunk.keys]
    scores = (query @ key.transpose(-1, -2)).to(_wide(parts)) * seen.scale
    return scores.masked_fill(~chunk.allowed, -torch.inf)


def _chunked_forward(parts: _Parts, seen: _Seen) -> tuple[Tensor, Tensor]:
    output, lse = _empty_result(parts)
    for chunk in _chunks(parts, seen):
        scores = _chunk_scores(chunk, parts, seen)
        total = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - total[..., None]).to(parts.value.dtype)
        found = weights @ parts.value[:, :, None, chunk.keys]
        _by_row(output)[:, :, chunk.rows] = found.flatten(1, 2)
        lse[:, :, chunk.rows] = total.flatten(1, 2)
    return output, lse


def _chunked_backward(
    grad: Tensor, output: Tensor, lse: Tensor, parts: _Parts, seen: _Seen
) -> list[Tensor]:
    dtype, delta = parts.query.dtype, _row_sums(grad, output, lse)
    grads = [torch.zeros_like(part, dtype=lse.dtype) for part in parts]
    for chunk in _chunks(parts, seen):
        scores = _chunk_scores(chunk, parts, seen)
        rows, keys = chunk.rows, chunk.keys
        query, outer, total, offset = (
            _by_group(part[:, :, rows], parts) for part in (parts.query, _by_row(grad), lse, delta)
        )
        weights = torch.exp(scores - total[..., None])
        inner = (outer @ parts.value[:, :, None, keys].transpose(-1, -2)).to(lse.dtype)
        slope = (weights * (inner - offset[..., None]) * seen.scale).to(dtype)
        grads[0][:, :, rows] = (slope @ parts.key[:, :, None, keys]).flatten(1, 2).to(lse.dtype)
        grads[1][:, :, keys] += (slope.transpose(-1, -2) @ query).sum(dim=2)
        grads[2][:, :, keys] += (weights.to(dtype).transpose(-1, -2) @ outer).sum(dim=2)
    return [part.to(dtype) for part in grads]


def _empty_result(parts: _Parts) -> tuple[Tensor, Tensor]:
    batch_size, num_heads, length, _ = parts.query.shape
    output = parts.value.new_empty(batch_size, length, num_heads, parts.value.shape[-1])
    return output, output.new_empty(batch_size, num_heads, length, dtype=_wide(parts))


def _wide(parts: _Parts) -> torch.dtype:
    return torch.promote_types(parts.query.dtype, torch.float32)


def _by_row(output: Tensor) -> Tensor:
    """`[B, S, H, Dv]` as `[B, H, S, Dv]`, or back; a view."""
    return output.transpose(1, 2)


def _by_group(values: Tensor, parts: _Parts) -> Tensor:
    """`[B, H, ...]` as `[B, Hkv, G, ...]`, a view."""
    return values.unflatten(1, (parts.key.shape[1], -1))


def _row_sums(grad: Tensor, output: Tensor, lse: Tensor) -> Tensor:
    """D of the module's text, `[B, H, S]`."""
    return _by_row((grad.to(lse.dtype) * output).sum(dim=-1))


def _row_products(grouped: Tensor, own: Tensor, parts: _Parts) -> Tensor:
    """Scalar products `[B, H, S]` of `[B, Hkv, G, S, D]` with each row's own `[B, Hkv, S, D]`."""
    products = (grouped * own[:, :, None]).sum(dim=-1, dtype=_wide(parts))
    return products.flatten(1, 2)
