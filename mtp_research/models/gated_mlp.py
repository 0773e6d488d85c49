"""Gated feed-forward parts whose two projections and activation are one kernel in compiled steps.

Where it sits: `models/merged.py` calls `fuse_gated_mlps` after it has merged the projections. The
library's classes all compute down(silu(gate(x)) * up(x)), but only their code says so; a module is
taken for one if it has these parts and gives the very numbers on a test row. Without
`torch.compile`, and for sizes that the kernel was not measured to be faster at, it runs as before.
"""

import functools
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtp_research.models import few_rows

_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


class FusedMlp:
    """Marks the classes that `fuse_gated_mlps` makes."""


def fuse_gated_mlps(model: nn.Module) -> int:
    """Let gated parts of `model`, merged and frozen, use one kernel, in place; returns how many."""
    count = 0
    for module in list(model.modules()):
        parts = [getattr(module, name, None) for name in _PARTS]
        is_candidate = all(isinstance(part, nn.Module) for part in parts)
        if is_candidate and not isinstance(module, FusedMlp) and _computes_gated_silu(module):
            module.__class__ = _fused(type(module))
            count += 1
    return count


@torch.no_grad()
def _computes_gated_silu(module: nn.Module) -> bool:
    """Whether `module` gives the numbers of a gated silu, with code of its own class."""
    gate = cast(nn.Linear, module.gate_proj)
    group = getattr(gate, "merged", None)
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
    """The class `plain` with the fused forward."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        group = cast(nn.Module, self.gate_proj).merged
        if torch.compiler.is_compiling() and group.may_use_kernel:
            gated = few_rows.gated_linear(x, cast(Tensor, group.weight))
            if gated is not None:
                return cast(nn.Module, self.down_proj)(gated)
        return plain.forward(self, x)

    return type(plain.__name__, (FusedMlp, plain), {"forward": forward, "__doc__": plain.__doc__})
