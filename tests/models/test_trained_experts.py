"""Experts of a trained layer against the library's loop over experts, gradients included."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import Glm4MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE

from mtp_research.models.experts import fits_trained, sort_pairs, trained_experts

NAME = "trained_experts_test"


@pytest.fixture(autouse=True)
def registered():
    ALL_EXPERTS_FUNCTIONS.register(NAME, trained_experts)
    yield
    del ALL_EXPERTS_FUNCTIONS._global_mapping[NAME]


def make_layer(*, num_experts: int = 6, hidden: int = 16) -> Glm4MoeMoE:
    config = Glm4MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=hidden,
        n_routed_experts=num_experts,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
    )
    torch.manual_seed(0)
    layer = Glm4MoeMoE(config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        layer.gate.e_score_correction_bias[3] = -10.0  # an expert without tokens
    return layer


def outcome(layer: nn.Module, x: Tensor, implementation: str, *, is_compiled: bool = False):
    """Output and all gradients of a layer."""
    layer = copy.deepcopy(layer)
    layer.experts.config._experts_implementation = implementation
    rows = x.clone().requires_grad_()
    call = torch.compile(layer, dynamic=False, fullgraph=True) if is_compiled else layer
    output = call(rows)
    weight = torch.linspace(-1, 1, output.numel(), device=x.device).view_as(output)
    (output.float() * weight).sum().backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "x": rows.grad, **grads}


def compare(got, wanted, *, tolerance: float) -> None:
    for name, tensor in wanted.items():
        assert tensor.abs().max() > 0, name
        error = (got[name].float() - tensor.float()).abs().max() / tensor.float().abs().max()
        assert error < tolerance, f"{name}: {error:.2g}"


def test_trained_experts_match_the_loop_over_experts():
    layer, x = make_layer(), torch.randn(2, 13, 16)
    compare(outcome(layer, x, NAME), outcome(layer, x, "eager"), tolerance=1e-5)


def test_trained_experts_need_bfloat16_on_a_gpu():
    assert not fits_trained(make_layer().bfloat16().experts, torch.zeros(3, 16).bfloat16())


@pytest.mark.parametrize("num_experts", [3, 300])
def test_sorted_pairs_invert_each_other(num_experts):
    index = torch.tensor([[1, 0], [1, 2], [0, 1]])
    pairs = sort_pairs(index, num_experts=num_experts)
    assert pairs.pair.tolist() == [1, 4, 0, 2, 5, 3]
    assert pairs.place.tolist() == [2, 0, 3, 5, 1, 4]
    assert pairs.ends.tolist()[:3] == [2, 5, 6]
    assert pairs.ends.tolist()[3:] == [6] * (num_experts - 3)
    assert pairs.ends.dtype == torch.int32


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
def test_trained_experts_on_gpu_match_the_library(is_compiled):
    layer = make_layer(num_experts=16, hidden=64)
    bias = layer.gate.e_score_correction_bias.cuda()
    layer = layer.to(device="cuda", dtype=torch.bfloat16)
    layer.gate.e_score_correction_bias = bias
    x = torch.randn(4, 128, 64, device="cuda").bfloat16()
    assert fits_trained(layer.experts, x)
    wanted = outcome(layer, x, "grouped_mm")
    compare(outcome(layer, x, NAME, is_compiled=is_compiled), wanted, tolerance=2e-2)
