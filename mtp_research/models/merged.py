"""Projections of one input merged into one product, for compiled decoding.

A product of a few rows is as slow as the bytes of its weight and a few microseconds more; queries,
keys and values of one layer pay these three times. Their weights are laid out behind each other
here, and under `torch.compile` the first projection of a group computes the product for all. Where
asked for, every other projection becomes a group of one, and products may go through a kernel of
ours (`models/few_rows.py`). The modules keep their names, parameters and values, and without
`torch.compile` they do what they did.
"""

from typing import cast

import torch
from torch import Tensor, nn

from mtp_research.kernels.few_rows_choice import runs_on
from mtp_research.models import few_rows
from mtp_research.models.gated_mlp import fuse_gated_mlps

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
        self.may_use_kernel = False

    def compute(self, input: Tensor) -> Tensor:
        """The product of all members."""
        if not self.may_use_kernel:
            return nn.functional.linear(input, self.weight, self.bias)
        return few_rows.linear(input, self.weight, self.bias)


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
            group.product = group.compute(input)
        assert group.product is not None, "members of a group are called in order"
        output = group.product[..., self.span[0] : self.span[1]]
        if self.is_last:
            group.product = None  # compiled code must leave nothing behind
        return output


def merge_projections(model: nn.Module, *, few_rows_kernel: bool = False) -> int:
    """Merge the groups of `model` in place; returns how many.

    Weights move into shared storage: no memory is added, and `state_dict` keeps names and values.
    Groups whose members differ in input size, bias or dtype are left alone, and so are members
    whose `forward` something has replaced, as libraries do that split or move models.

    Args:
        model: frozen.
        few_rows_kernel: let compiled products use our kernel, where it was measured to be faster.
    """
    count = 0
    for module in list(model.modules()):
        for names in _GROUPS:
            members = [getattr(module, name, None) for name in names]
            linears = [member for member in members if type(member) is nn.Linear]
            if len(linears) == len(names) and _can_merge(linears):
                _merge(linears)
                count += 1
        if few_rows_kernel and type(module) is nn.Linear and _can_merge([module]):
            _merge([module])
    for module in model.modules():
        if isinstance(module, MergedLinear):
            module.merged.may_use_kernel = few_rows_kernel and _fits_kernel(module.merged.weight)
    if few_rows_kernel:
        fuse_gated_mlps(model)
    return count


def _fits_kernel(weight: Tensor) -> bool:
    """Whether a weight lies where and as the kernel reads it; split ones are no plain `Tensor`."""
    is_plain = type(weight) is Tensor and weight.is_contiguous()
    return is_plain and weight.data_ptr() % 16 == 0 and runs_on(weight.device)


def _can_merge(linears: list[nn.Linear]) -> bool:
    kinds = {
        (m.in_features, m.bias is None, m.weight.dtype, m.weight.device, m.weight.requires_grad)
        for m in linears
    }
    is_hooked = any("forward" in vars(linear) for linear in linears)
    return len(kinds) == 1 and not linears[0].weight.requires_grad and not is_hooked


def _merge(members: list[nn.Linear]) -> None:
    weights = [member.weight.data for member in members]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]  # a tied weight stays tied
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
