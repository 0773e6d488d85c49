"""What torch's flash attention computes over packed documents, in plain PyTorch for a CPU.

The two functions take the arguments of `aten::_flash_attention_forward` and `_backward`, check them
against the installed schema, and read their inputs as the kernels do: the backward pass makes the
probabilities from the log-sum-exp that it is given, and their offset from the output.
"""

import torch
from torch import Tensor

NUM_LIMITS = 6  # cu_seqlens twice, longest document twice, dropout, is_causal


def flash_forward(query, key, value, *limits, scale, window_size_left, window_size_right):
    """Output `[T, H, D]`, log-sum-exp `[H, T]` float32 or wider, and three unused values."""
    *limits, debug = limits
    window = (window_size_left, window_size_right)
    _check(torch.ops.aten._flash_attention_forward, 3, [*limits, debug])
    output, lse = torch.full_like(query, torch.nan), _lse(query)
    for span, allowed in _documents(limits, window, query):
        scores = _scores(query[span], key[span], scale).masked_fill(~allowed, -torch.inf)
        lse[:, span] = torch.logsumexp(scores, dim=-1)
        output[span] = (torch.softmax(scores, dim=-1) @ _heads(value[span], query)).transpose(0, 1)
    return output, lse, torch.empty(0), torch.empty(0), torch.empty(0)


def flash_backward(
    grad, query, key, value, output, lse, *limits, scale, window_size_left, window_size_right
):
    """Gradients of query, key and value."""
    *limits, state, _ = limits
    assert (state.dtype, state.shape) == (torch.uint64, (2,))
    assert lse.is_contiguous()
    assert lse.shape == _lse(query).shape
    assert grad.shape == output.shape == query.shape == (*query.shape[:2], value.shape[-1])
    _check(torch.ops.aten._flash_attention_backward, 6, [*limits, state, _])
    grads = [torch.zeros_like(part) for part in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    for span, allowed in _documents(limits, (window_size_left, window_size_right), query):
        scores = _scores(query[span], key[span], scale).masked_fill(~allowed, -torch.inf)
        weights = torch.exp(scores - lse[:, span, None])
        outer = grad[span].transpose(0, 1)  # [H, n, D]
        offset = (outer * output[span].transpose(0, 1)).sum(-1, keepdim=True)
        inner = outer @ _heads(value[span], query).transpose(-1, -2)
        slope = weights * (inner - offset) * scale
        grads[0][span] = (slope @ _heads(key[span], query)).transpose(0, 1)
        for found, each in (
            (grads[1], slope.transpose(-1, -2) @ query[span].transpose(0, 1)),
            (grads[2], weights.transpose(-1, -2) @ outer),
        ):
            found[span] = each.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return tuple(grads)


def _check(operator, num_tensors, limits):
    """The names that these positions have in the installed torch."""
    names = [argument.name for argument in operator.default._schema.arguments]
    tail = names[num_tensors : num_tensors + len(limits)]
    assert tail[:NUM_LIMITS] == [
        "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
    ]  # fmt: skip
    assert {"scale", "window_size_left", "window_size_right"} <= set(names)


def _documents(limits, window, query):
    """Rows of each document and `[n, n]` bool of what they see."""
    starts, ends, longest, longest_key, dropout, is_causal = limits
    (left, right), total = window, len(query)
    assert torch.equal(starts, ends)
    assert (starts.dtype, int(starts[-1]), longest, dropout) == (
        torch.int32, total, longest_key, 0.0,
    )  # fmt: skip
    assert right == 0
    assert is_causal == (left < 0)
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert end - start <= longest
        if end > start:
            index = torch.arange(end - start)
            distance = index[:, None] - index[None, :]
            yield slice(start, end), (distance >= 0) & ((left < 0) | (distance <= left))


def _lse(query: Tensor) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.full((query.shape[1], len(query)), torch.nan, dtype=dtype)


def _heads(rows: Tensor, query: Tensor) -> Tensor:
    """`[n, Hkv, D]` as `[H, n, D]`."""
    return rows.transpose(0, 1).repeat_interleave(query.shape[1] // rows.shape[1], dim=0)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return query.transpose(0, 1) @ _heads(key, query).transpose(-1, -2) * scale
