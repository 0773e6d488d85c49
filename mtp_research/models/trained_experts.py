"""Experts of a trained layer: grouped products between two permutations with backward passes.

    x [T, H] -> rows of pairs sorted by expert -> products and gate -> weighted sum [T, H]

A pair of a token and an expert occurs once, so both permutations can be read by index in either
direction. Autograd does not know that: for an indexed read it fills a tensor with zeros and adds
rows to it by atomics, in float32 for the weighted outputs, which takes longer than the products of
narrow experts. Both steps are pointwise in the rows, so `torch.compile` makes one kernel of each.

Letters: T tokens, P = T top_k pairs, E experts, H hidden size.
Source: permutation and its inverse as in Megatron's token dispatcher.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

_NARROW_IDS = 128  # sorted as one byte: an eighth of the passes of int64


class SortedPairs(NamedTuple):
    """Pairs in the order of their experts.

    Attributes:
        pair: `[P]` int64, which pair is at a place; pair p belongs to token p // top_k.
        place: `[P]` int64, the inverse: where a pair is.
        ends: `[E]` int32, exclusive ends of the experts' places.
    """

    pair: Tensor
    place: Tensor
    ends: Tensor


def sort_pairs(top_k_index: Tensor, *, num_experts: int) -> SortedPairs:
    """Sort `[T, top_k]` experts; nothing waits for the device.

    Example: experts `[[1, 0], [1, 2]]` give the pairs 1 | 0 2 | 3 at the places (1, 0, 2, 3) and
    the ends (1, 3, 4).
    """
    experts = top_k_index.flatten()
    if num_experts <= _NARROW_IDS:
        experts = experts.to(torch.int8)
    ordered, pair = torch.sort(experts, stable=True)
    wanted = torch.arange(num_experts, dtype=ordered.dtype, device=ordered.device)
    ends = torch.searchsorted(ordered, wanted, right=True, out_int32=True)
    place = torch.empty_like(pair)
    place[pair] = torch.arange(len(pair), device=pair.device)
    return SortedPairs(pair, place, ends)


def fits_trained(module: nn.Module, x: Tensor) -> bool:
    """Whether `trained_experts` takes this layer, known to have the usual layout, and these rows.

    torch's grouped product knows bfloat16 alone when it is compiled.
    """
    weight = cast(Tensor, module.gate_up_proj)
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16


def trained_experts(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Output `[T, H]` of an expert layer, as `transformers.integrations.moe` calls it.

    Args:
        module: gated experts without biases, with the library's names and layout of weights, all
            experts on this rank.
        x: `[T, H]`, dtype of the weights.
        index: `[T, top_k]` int64 in [0, E).
        weights: `[T, top_k]`.
    """
    gate_up_proj, down_proj = cast(Tensor, module.gate_up_proj), cast(Tensor, module.down_proj)
    pairs = sort_pairs(index, num_experts=len(down_proj))
    rows = cast(Tensor, _Spread.apply(x, pairs.pair, pairs.place, index.shape[1]))
    inner = _grouped(rows, gate_up_proj, ends=pairs.ends)
    gated = cast(nn.Module, module)._apply_gate(inner)
    outputs = _grouped(gated, down_proj, ends=pairs.ends)
    return cast(Tensor, _Combine.apply(outputs, weights, pairs.pair, pairs.place))


def _grouped(rows: Tensor, weight: Tensor, *, ends: Tensor) -> Tensor:
    """Each expert's rows times its `[out, in]` weight."""
    return nn.functional.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)


class _Spread(torch.autograd.Function):
    """`x` `[T, H]` -> rows `[P, H]` in the order of the experts."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        pair: Tensor,
        place: Tensor,
        top_k: int,
    ) -> Tensor:
        """Read each pair's token."""
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return x[pair // top_k]

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Add the rows of each token's pairs."""
        (place,) = ctx.saved_tensors
        rows = grads[0][place].unflatten(0, (-1, ctx.top_k))
        return rows.sum(dim=1, dtype=_wide(rows)).to(rows.dtype), None, None, None


class _Combine(torch.autograd.Function):
    """Outputs `[P, H]` in the order of the experts -> their weighted sums `[T, H]`."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        outputs: Tensor,
        weights: Tensor,
        pair: Tensor,
        place: Tensor,
    ) -> Tensor:
        """Read the outputs of each token's pairs, weigh and add them."""
        ctx.save_for_backward(outputs, weights, pair, place)
        rows = outputs[place].unflatten(0, weights.shape)
        return (rows * weights[..., None]).sum(dim=1, dtype=_wide(rows)).to(outputs.dtype)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        """Spread the gradient over the pairs; a weight's is a scalar product."""
        outputs, weights, pair, place = ctx.saved_tensors
        rows = grads[0][pair // weights.shape[1]]
        by_pair = weights.flatten()[pair]
        products = (rows.to(_wide(rows)) * outputs).sum(dim=1)
        weight_grad = products[place].view_as(weights).to(weights.dtype)
        return (rows * by_pair[:, None]).to(outputs.dtype), weight_grad, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
