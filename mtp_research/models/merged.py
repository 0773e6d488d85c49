"""Projections of one input merged into one product, for compiled decoding.

A product of a few rows is as slow as the bytes of its weight and a few microseconds more; queries,
keys and values of one layer pay these three times. Their weights are laid out behind each other
here, and under `torch.compile` the first projection of a group computes the product for all. The
modules keep their names, parameters and values, and without `torch.compile` they do what they did.
"""

from typing import cast

import torch
from torch import Tensor, nn

# Projections of one input in Hugging Face's decoder layers, in the order they are called.
_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


class _Merged:
    """One group: the weights behind each other, and the product while it is being handed out."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.product: Tensor | None = None


class MergedLinear(nn.Linear):
    """A member of a group; `merge_projections` makes them out of `nn.Linear`."""

    merged: _Merged
    span: tuple[int, int]
    is_first: bool
    is_last: bool

    def forward(self, input: Tensor) -> Tensor:
        """`input` times this member's part of the group's weight."""
        if not torch.compiler.is_compiling():
            return super().forward(input)
        group = self.merged
        if self.is_first:
            group.product = nn.functional.linear(input, group.weight, group.bias)
        assert group.product is not None, "members of a group are called in order"
        output = group.product[..., self.span[0] : self.span[1]]
        if self.is_last:
            group.product = None  # compiled code must leave nothing behind
        return output


def merge_projections(model: nn.Module) -> int:
    """Merge the groups of `model` in place; returns how many.

    Weights move into shared storage: no memory is added, and `state_dict` keeps names and values.
    Groups whose members differ in input size, bias or dtype are left alone, and so are members
    whose `forward` something has replaced, as libraries do that split or move models.
    """
    count = 0
    for module in list(model.modules()):
        for names in _GROUPS:
            members = [getattr(module, name, None) for name in names]
            linears = [member for member in members if type(member) is nn.Linear]
            if len(linears) == len(names) and _can_merge(linears):
                _merge(linears)
                count += 1
    return count


def _can_merge(linears: list[nn.Linear]) -> bool:
    kinds = {
        (m.in_features, m.bias is None, m.weight.dtype, m.weight.device, m.weight.requires_grad)
        for m in linears
    }
    is_hooked = any("forward" in vars(linear) for linear in linears)
    return len(kinds) == 1 and not linears[0].weight.requires_grad and not is_hooked


def _merge(members: list[nn.Linear]) -> None:
    weight = torch.cat([member.weight.data for member in members])
    biases = [member.bias.data for member in members if member.bias is not None]
    merged = _Merged(weight, torch.cat(biases) if biases else None)
    start = 0
    for index, member in enumerate(members):
        end = start + member.out_features
        member.weight.data = weight[start:end]
        if merged.bias is not None:
            member.bias.data = merged.bias[start:end]
        member.__class__ = MergedLinear
        merged_member = cast(MergedLinear, member)
        merged_member.merged, merged_member.span = merged, (start, end)
        merged_member.is_first, merged_member.is_last = index == 0, index == len(members) - 1
        start = end
