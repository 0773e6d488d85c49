"""Shapes, inputs and peers of `bench_experts`: the same work in compiled PyTorch.

Letters: T tokens, P pairs, E experts, H hidden size, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_ROTATED_BYTES = 256 * 2**20
_NUM_ROUTINGS = 8


@dataclass(frozen=True)
class ExpertShape:
    """One line of the table: T tokens in an expert layer of E experts `[2I, H]` and `[H, I]`."""

    model: str
    num_tokens: int
    hidden_size: int
    inner_size: int
    num_experts: int
    top_k: int

    def label(self) -> str:
        """The shape as the table prints it."""
        sizes = f"h {self.hidden_size} {self.num_experts}x{self.inner_size} top {self.top_k}"
        return f"{self.model} T={self.num_tokens} {sizes}"

    def num_flops(self) -> int:
        """Operations of both products."""
        return 6 * self.num_tokens * self.top_k * self.hidden_size * self.inner_size

    def num_bytes(self, num_chosen: float) -> float:
        """Bytes of the weights of `num_chosen` experts, of the rows read and of those written."""
        expert = 3 * self.hidden_size * self.inner_size
        return 2 * (num_chosen * expert + 2 * self.num_tokens * self.hidden_size)


SHAPES = (
    *(ExpertShape("glm45_air", count, 4096, 1408, 128, 8) for count in (1, 4, 32, 128, 512, 2048)),
    *(ExpertShape("glm47_flash", count, 2048, 1536, 64, 4) for count in (4, 128)),
    ExpertShape("lab_base", 65_536, 768, 384, 16, 2),
    ExpertShape("lab_small", 65_536, 512, 192, 16, 2),
)


class ExpertInputs(NamedTuple):
    """Arguments of `expert_mlp`."""

    x: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor


def make_inputs(shape: ExpertShape, *, device: str) -> list[ExpertInputs]:
    """Inputs with other routings each, and other weights where a few would stay in L2."""
    num_experts, hidden, inner = shape.num_experts, shape.hidden_size, shape.inner_size
    weight_bytes = 6 * num_experts * hidden * inner
    num_weights = max(1, min(_NUM_ROUTINGS, _ROTATED_BYTES // weight_bytes))
    options = {"device": device, "dtype": torch.bfloat16}
    weights = [
        (
            torch.randn(num_experts, 2 * inner, hidden, **options).mul_(hidden**-0.5),
            torch.randn(num_experts, hidden, inner, **options).mul_(inner**-0.5),
        )
        for _ in range(num_weights)
    ]
    found = []
    for index in range(_NUM_ROUTINGS):
        scores = torch.rand(shape.num_tokens, num_experts, device=device)
        best = scores.topk(shape.top_k, dim=-1)
        share = best.values / best.values.sum(dim=-1, keepdim=True)
        x = torch.randn(shape.num_tokens, hidden, **options)
        found.append(ExpertInputs(x, *weights[index % num_weights], best.indices, share))
    return found


def grouped_mlp(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The peer: sort, gather, PyTorch's grouped products, and back, as transformers does."""
    num_experts, top_k = len(down_proj), top_k_index.shape[1]
    experts, order = torch.sort(top_k_index.flatten())
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=x.device), right=True)
    rows = x[order // top_k]
    gate, up = functional.grouped_mm(rows, gate_up_proj.mT, offs=ends.int()).chunk(2, dim=-1)
    outputs = functional.grouped_mm(functional.silu(gate) * up, down_proj.mT, offs=ends.int())
    weighted = outputs * top_k_weights.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return weighted[back].view(*top_k_index.shape, -1).sum(dim=1).to(x.dtype)


def single_router(x: Tensor, weight: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The router's peer: one group, its two top-k of groups included, as transformers calls it."""
    scores = functional.linear(x.float(), weight.float()).sigmoid()
    choice = scores + bias
    group_score = choice[:, None].topk(2, dim=-1).values.sum(dim=-1)
    group = group_score.topk(1, dim=-1, sorted=False).indices
    is_in_group = torch.zeros_like(group_score).scatter(1, group, 1).bool()
    index = choice.masked_fill(~is_in_group, -torch.inf).topk(top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, index)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` compiled for the shapes of its first call; past eight Dynamo would give up."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)
