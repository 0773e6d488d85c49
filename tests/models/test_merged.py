"""Merged projections: the same numbers, one product where three were."""

import copy

import pytest
import torch
from mtp_research.kernels.products.scaled_weights import FP8
from torch import nn
from torch._inductor.utils import run_and_get_code

from mtp_research.models.fp8_layers import Fp8Linear
from mtp_research.models.rewrites.products import merge_projections
from tests import tiny


class _Attention(nn.Module):
    """Three projections of one input, as in a decoder layer."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(32, size, bias=bias) for size in (48, 16, 16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Something of all three."""
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return torch.cat([part.sin() for part in parts], dim=-1)


@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.every_case), True])
@torch.inference_mode()
def test_compiled_group_is_one_product_with_the_same_result(bias: bool) -> None:
    module = _Attention(bias=bias).requires_grad_(False)
    plain = copy.deepcopy(module)
    assert merge_projections(module) == 1
    x = torch.randn(1, 4, 32)
    output, code = run_and_get_code(torch.compile(module, dynamic=False), x)
    torch.testing.assert_close(output, plain(x), rtol=1e-5, atol=1e-5)
    calls = code[0].count("extern_kernels.mm(") + code[0].count("extern_kernels.addmm(")
    assert calls == 1
    assert torch.equal(module(x), plain(x))  # without the compiler nothing changes


def _stored(linear: nn.Linear, *, block: int) -> Fp8Linear:
    layer = Fp8Linear(linear, block=block)
    layer.weight.copy_(torch.randn(layer.weight.shape).to(FP8))
    layer.weight_scale.copy_(torch.rand(layer.weight_scale.shape))
    return layer


@pytest.mark.parametrize("block", [16, 0])
@torch.inference_mode()
def test_compiled_group_of_fp8_layers_is_one_product_with_the_same_result(block: int) -> None:
    module = _Attention(bias=True).requires_grad_(False)
    for name, linear in list(module.named_children()):
        setattr(module, name, _stored(linear, block=block))
    plain = copy.deepcopy(module)
    assert merge_projections(module) == 1
    before, after = plain.state_dict(), module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    x = torch.randn(1, 4, 32)
    output, code = run_and_get_code(torch.compile(module, dynamic=False), x)
    torch.testing.assert_close(output, plain(x), rtol=1e-5, atol=1e-5)
    assert code[0].count("torch.ops.mtp_research.fp8_linear.default(") == 1
    assert torch.equal(module(x), plain(x))


def test_fp8_layers_that_end_inside_a_block_are_left_alone() -> None:
    module = _Attention(bias=False)
    for name, linear in list(module.named_children()):
        setattr(module, name, _stored(linear, block=32))  # 48 rows are one block and half of one
    assert merge_projections(module.requires_grad_(False)) == 0


def test_model_keeps_names_values_and_memory() -> None:
    target = tiny.tiny_target("glm4_moe", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    # Attention of both layers, the dense MLP and the shared expert.
    assert merge_projections(target.model) == 4
    after = target.model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert merge_projections(target.model) == 0


def test_trained_projections_are_left_alone() -> None:
    assert merge_projections(_Attention(bias=False)) == 0


def test_projection_with_a_replaced_forward_is_left_alone() -> None:
    module = _Attention(bias=False).requires_grad_(False)
    module.k_proj.forward = module.k_proj.forward  # as a library's hook does
    assert merge_projections(module) == 0
