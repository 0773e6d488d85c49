"""Mixtures of experts of the MTP references: one row and one expert at a time, in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.heads.reference_parts import Weights, linear, squared_relu, swiglu


@dataclass(frozen=True)
class SigmoidRouter:
    """DeepSeek-V3's router without auxiliary loss.

    Attributes:
        num_chosen: experts a row is sent to.
        scale: factor on their weights.
        num_groups: groups of neighbouring experts.
        num_kept_groups: groups whose experts can be chosen, by the sum of their two best.
        normalises: whether the weights of a row are divided by their sum.
    """

    num_chosen: int
    scale: float
    num_groups: int = 1
    num_kept_groups: int = 1
    normalises: bool = True

    def __call__(self, row: Tensor, gate: Tensor, bias: Tensor) -> list[tuple[int, float]]:
        scores = [1 / (1 + float(torch.exp(-(expert @ row)))) for expert in gate]
        biased = [score + float(extra) for score, extra in zip(scores, bias, strict=True)]
        size = len(scores) // self.num_groups
        groups = [range(start, start + size) for start in range(0, len(scores), size)]
        groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2]))
        allowed = [expert for group in groups[: self.num_kept_groups] for expert in group]
        chosen = sorted(allowed, key=lambda expert: -biased[expert])[: self.num_chosen]
        total = sum(scores[expert] for expert in chosen) if self.normalises else 1.0
        return [(expert, self.scale * scores[expert] / total) for expert in chosen]


@dataclass(frozen=True)
class SoftmaxRouter:
    """Qwen's router: the most probable experts, their probabilities normalised or not."""

    num_chosen: int
    normalises: bool

    def __call__(self, row: Tensor, gate: Tensor, bias: Tensor) -> list[tuple[int, float]]:
        del bias
        probs = (gate @ row).softmax(0).tolist()
        chosen = sorted(range(len(probs)), key=lambda expert: -probs[expert])[: self.num_chosen]
        total = sum(probs[expert] for expert in chosen) if self.normalises else 1.0
        return [(expert, probs[expert] / total) for expert in chosen]


def routed(
    rows: Tensor,
    own: Weights,
    router: SigmoidRouter | SoftmaxRouter,
    *,
    gate: str = "gate.weight",
    bias: str = "gate.e_score_correction_bias",
    expert_mlp: Callable[[Tensor, Weights, str], Tensor] = swiglu,
    inputs: Tensor | None = None,
) -> Tensor:
    """Weighted sum of the chosen experts' outputs.

    Args:
        rows: what the router sees `[S, D]`.
        own: tensors of the MLP.
        router: which experts, with which weights.
        gate: name of the router's matrix.
        bias: name of its correction.
        expert_mlp: an expert.
        inputs: what the experts see, `rows` when None.
    """
    correction = own.get(bias, torch.zeros(own[gate].shape[0]))
    inputs = rows if inputs is None else inputs
    outputs = []
    for row, fed in zip(rows, inputs, strict=True):
        chosen = router(row, own[gate], correction)
        outputs.append(sum(w * expert_mlp(fed, own, f"experts.{e}.") for e, w in chosen))
    return torch.stack(outputs)


def deepseek_moe(rows: Tensor, own: Weights, config: dict) -> Tensor:
    """Routed experts and the shared one, under DeepSeek's names."""
    router = SigmoidRouter(
        num_chosen=config["num_experts_per_tok"],
        scale=config["routed_scaling_factor"],
        num_groups=config["n_group"],
        num_kept_groups=config["topk_group"],
        normalises=config["norm_topk_prob"],
    )
    return routed(rows, own, router) + swiglu(rows, own, "shared_experts.")


def hunyuan_moe(rows: Tensor, own: Weights, config: dict) -> Tensor:
    """hy_v3: DeepSeek's rule without groups, under other names."""
    router = SigmoidRouter(config["num_experts_per_tok"], config["router_scaling_factor"])
    chosen = routed(rows, own, router, gate="router.gate.weight", bias="expert_bias")
    return chosen + swiglu(rows, own, "shared_mlp.")


def qwen_moe(rows: Tensor, own: Weights, config: dict) -> Tensor:
    """Softmax router, and a shared expert behind a sigmoid gate."""
    router = SoftmaxRouter(config["num_experts_per_tok"], config.get("norm_topk_prob", True))
    share = linear(rows, own, "shared_expert_gate").sigmoid()
    return routed(rows, own, router) + share * swiglu(rows, own, "shared_expert.")


def nemotron_moe(rows: Tensor, own: Weights, config: dict) -> Tensor:
    """Experts of two matrices in a latent space; the router and the shared expert see the rows."""
    router = SigmoidRouter(
        num_chosen=config["num_experts_per_tok"],
        scale=config["routed_scaling_factor"],
        num_groups=config["n_group"],
        num_kept_groups=config["topk_group"],
        normalises=config["norm_topk_prob"],
    )
    latent = linear(rows, own, "fc1_latent_proj")
    chosen = routed(rows, own, router, expert_mlp=squared_relu, inputs=latent)
    return linear(chosen, own, "fc2_latent_proj") + squared_relu(rows, own, "shared_experts.")
