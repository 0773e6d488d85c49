"""Projections of one input merged into one product, for compiled decoding.

A product of a few rows is as slow as the bytes of its weight and a few microseconds more; queries,
keys and values of one layer pay these three times. Their weights are laid out behind each other
here, and under `torch.compile` the first projection of a group computes the product for all. With
`few_rows_kernel` every other projection becomes a group of one, and products go through a kernel of
ours for the shapes that it was measured to be faster at. Gated feed-forward parts then run both
projections and the activation in one kernel, for as many rows as that is faster at: the library's
classes all compute down(silu(gate(x)) * up(x)), but only their code says so; a module is taken for
one if it has these parts and gives the very numbers on a test row. FP8 layers are merged with their
scales; their product goes through our kernel in any case, and gated ones are two kernels.

The modules keep their names, parameters and values, and without `torch.compile` they do what they
did. Letters: T rows, N outputs, K depth, F inner size.
"""

import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtp_research.kernels.products.few_rows_choice import (
    choose_config,
    choose_gated_config,
    has_config,
    runs_on,
)
from mtp_research.kernels.products.few_rows_product import FewRowsConfig, few_rows_product
from mtp_research.kernels.products.gemv import GemvConfig
from mtp_research.models.fp8_layers import Fp8Linear, fp8_linear
from mtp_research.runtime.ahead import foresee, foreseen_rows

# Projections of one input in Hugging Face's decoder layers, in the order they are called.
_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def merge_projections(model: nn.Module, *, few_rows_kernel: bool = False) -> int:
    """Merge the groups of `model` in place; returns how many.

    Weights move into shared storage: no memory is added, and `state_dict` keeps names and values.
    Groups whose members differ in input size, bias, dtype or the blocks of scales are left alone.
    So are FP8 groups in which another member than the last ends inside a block, and members whose
    `forward` something has replaced, as libraries do that split or move models.
    """
    count = 0
    for module in list(model.modules()):
        children = dict(module.named_children())
        for names in _GROUPS:
            members = [children.get(name) for name in names]
            for kind in (nn.Linear, Fp8Linear):
                linears = [member for member in members if type(member) is kind]
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


def _can_merge(linears: Sequence[nn.Linear | Fp8Linear]) -> bool:
    kinds = {
        (m.in_features, m.bias is None, m.weight.dtype, m.weight.device, m.weight.requires_grad)
        for m in linears
    }
    blocks = {m.block for m in linears if isinstance(m, Fp8Linear)}
    ends_inside = any(m.out_features % block for block in blocks if block for m in linears[:-1])
    is_hooked = any("forward" in vars(linear) for linear in linears)
    is_alike = len(kinds) == 1 and len(blocks) <= 1 and not ends_inside
    return is_alike and not linears[0].weight.requires_grad and not is_hooked


def _merge(members: Sequence[nn.Linear | Fp8Linear]) -> None:
    weights = [member.weight.data for member in members]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]  # a tied weight stays tied
    biases = [member.bias.data for member in members if member.bias is not None]
    merged = _Merged(weight, torch.cat(biases) if biases else None)
    scaled = [member for member in members if isinstance(member, Fp8Linear)]
    if scaled:
        scales = [member.weight_scale.data for member in scaled]
        merged.scale, merged.block = scale, _ = torch.cat(scales), scaled[0].block
        for member, part in zip(scaled, scale.split([len(s) for s in scales]), strict=True):
            member.weight_scale.data = part
    start = 0
    for index, member in enumerate(members):
        end = start + member.out_features
        member.weight.data = weight[start:end]
        if merged.bias is not None:
            cast(Tensor, member.bias).data = merged.bias[start:end]
        member.__class__ = MergedFp8Linear if scaled else MergedLinear
        merged_member = cast(MergedLinear, member)
        merged_member.merged, merged_member.span = merged, (start, end)
        merged_member.is_first, merged_member.is_last = index == 0, index == len(members) - 1
        start = end


class _Merged:
    """One group: the weights behind each other, and the product while it is being handed out."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.scale: Tensor | None = None  # of an FP8 weight
        self.block = 0
        self.product: Tensor | None = None
        self.may_use_kernel = False

    def compute(self, input: Tensor) -> Tensor:
        if self.scale is not None:
            return fp8_linear(input, self.weight, self.scale, self.bias, self.block)
        if not self.may_use_kernel:
            return nn.functional.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)


class MergedLinear(nn.Linear):
    """A member of a group; `merge_projections` makes them out of `nn.Linear`."""

    merged: _Merged
    span: tuple[int, int]
    is_first: bool
    is_last: bool

    def forward(self, input: Tensor) -> Tensor:
        """`input` times this member's part of the group's weight."""
        return _handed_out(self, input) if torch.compiler.is_compiling() else super().forward(input)


class MergedFp8Linear(Fp8Linear):
    """As `MergedLinear`, made out of `Fp8Linear`."""

    merged: _Merged
    span: tuple[int, int]
    is_first: bool
    is_last: bool

    def forward(self, input: Tensor) -> Tensor:
        """`input` times this member's part of the group's weight."""
        return _handed_out(self, input) if torch.compiler.is_compiling() else super().forward(input)


def _handed_out(member: MergedLinear | MergedFp8Linear, input: Tensor) -> Tensor:
    """A member's part of the product, which the first member of its group computes."""
    group = member.merged
    if member.is_first:
        group.product = group.compute(input)
    assert group.product is not None, "members of a group are called in order"
    output = group.product[..., member.span[0] : member.span[1]]
    if member.is_last:
        group.product = None  # compiled code must leave nothing behind
    return output


class FusedMlp:
    """Marks the classes that `fuse_gated_mlps` makes."""


def fuse_gated_mlps(model: nn.Module) -> int:
    """Let gated parts of `model`, merged and frozen, use one kernel, in place; returns how many."""
    count = 0
    for module in list(model.modules()):
        is_candidate = set(_PARTS) <= dict(module.named_children()).keys()
        if is_candidate and not isinstance(module, FusedMlp) and _computes_gated_silu(module):
            module.__class__ = _fused(type(module))
            count += 1
    return count


@torch.no_grad()
def _computes_gated_silu(module: nn.Module) -> bool:
    gate = cast(nn.Linear, module.gate_proj)
    group = gate.merged if isinstance(gate, MergedLinear) else None
    if group is None or not group.may_use_kernel or group.bias is not None:
        return False
    if "forward" in vars(module) or len(group.weight) != 2 * gate.out_features:
        return False
    # Signs and sizes at which other activations differ from silu; a clamp differs far from zero.
    x = torch.linspace(-3.0, 3.0, gate.in_features, device=gate.weight.device)[None]
    x = torch.cat((x, 300.0 * x)).to(gate.weight.dtype)
    gated = functional.silu(module.gate_proj(x)) * module.up_proj(x)
    plain = module.down_proj(gated)
    return torch.allclose(module(x), plain, rtol=0.0, atol=0.0, equal_nan=True)


@functools.cache
def _fused(plain: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        group = cast(nn.Module, self.gate_proj).merged
        if torch.compiler.is_compiling() and group.may_use_kernel:
            gated = gated_linear(x, cast(Tensor, group.weight))
            if gated is not None:
                return cast(nn.Module, self.down_proj)(gated)
        return plain.forward(self, x)

    return type(plain.__name__, (FusedMlp, plain), {"forward": forward, "__doc__": plain.__doc__})


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`input @ weight.T + bias`, `[..., K]` and `[N, K]`, by whichever product was faster here."""
    if not has_config(*weight.shape, dtype=weight.dtype):
        return functional.linear(input, weight, bias)
    return few_rows_linear(input, weight, bias)


def gated_linear(input: Tensor, weight: Tensor) -> Tensor | None:
    """silu(gate) * up `[..., F]` of input `[..., K]`; None where the kernel is no faster.

    `weight` is `[2F, K]`, rows of `gate` in front of those of `up`.
    """
    num_rows = input.numel() // input.shape[-1]
    if choose_gated_config(num_rows, *weight.shape, dtype=weight.dtype) is None:
        return None
    return few_rows_gated_linear(input, weight)


@torch.library.custom_op("mtp_research::few_rows_linear", mutates_args=())
def few_rows_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Output `[..., N]` of input `[..., K]` and weight `[N, K]`, by the product for so many rows.

    Chosen in the call, so that code compiled for any number of rows has the fastest for each.
    """
    rows = _rows(input)
    config = choose_config(len(rows), *weight.shape, dtype=weight.dtype)
    if config is None:
        return functional.linear(input, weight, bias)
    output = few_rows_product(rows, weight, bias, config=config)
    return output.view(*input.shape[:-1], len(weight))


@few_rows_linear.register_fake
def _fake(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    _foresee(choose_config, input, weight, bias)
    return input.new_empty(*input.shape[:-1], weight.shape[0])


@torch.library.custom_op("mtp_research::few_rows_gated_linear", mutates_args=())
def few_rows_gated_linear(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up `[..., F]` of input `[..., K]` and weight `[2F, K]`, in one kernel."""
    rows = _rows(input)
    config = choose_gated_config(len(rows), *weight.shape, dtype=weight.dtype)
    assert config is not None, "choose_gated_config names a program shape where this op is called"
    output = few_rows_product(rows, weight, config=config, is_gated=True)
    return output.view(*input.shape[:-1], len(weight) // 2)


@few_rows_gated_linear.register_fake
def _fake_gated(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    _foresee(choose_gated_config, input, weight, is_gated=True)
    return input.new_empty(*input.shape[:-1], weight.shape[0] // 2)


def _foresee(
    choose: Callable[..., FewRowsConfig | GemvConfig | None],
    input: Tensor,
    weight: Tensor,
    *bias: Tensor | None,
    **how: object,
) -> None:
    """Say what the op will call for each number of rows that its steps have."""
    for num_rows in foreseen_rows():
        config = choose(num_rows, *weight.shape, dtype=weight.dtype)
        if config is not None:
            args = _rows(input), weight, *bias
            foresee(args[0].shape[0], num_rows, few_rows_product, *args, config=config, **how)


def _rows(input: Tensor) -> Tensor:
    """`input` as `[T, K]` with contiguous rows."""
    rows = input.reshape(-1, input.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
