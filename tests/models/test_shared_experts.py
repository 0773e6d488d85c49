"""A shared expert in the launches of the routed ones: the same layer, in every form of weights."""

import copy
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE

from mtp_research.models.experts import EXPERTS_NAME, expert_stacks, fuse_routers
from mtp_research.models.rewrites.products import merge_projections
from mtp_research.models.rewrites.shared_experts import (
    join_shared_experts,
    joined_experts,
)
from mtp_research.models.target import load_target
from tests.models.test_experts import make_model
from tests.models.test_fp8_layers import KEPT
from tests.models.test_loading import BLOCK, LAYOUTS, quantise, save

SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "routed_scaling_factor": 1.8}


def frozen_model(device: str = "cpu", **changes: int) -> PreTrainedModel:
    """One expert layer in bfloat16, routed and run by the kernels' ops, and merged."""
    model = make_model("glm4_moe", **SIZES | changes).to(device, torch.bfloat16)
    model.requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight *= 8  # the library draws them so small that a missing expert would not show
    (stack,) = expert_stacks(model)
    cast(nn.Module, stack).config._experts_implementation = EXPERTS_NAME
    assert fuse_routers(model) == 1
    return model


def layer_of(model: nn.Module) -> nn.Module:
    (layer,) = [module for module in model.modules() if hasattr(module, "shared_experts")]
    return layer


def rows_of(device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 5, 64, generator=generator).to(device, torch.bfloat16)


@torch.inference_mode()
def test_joined_layer_gives_what_both_kinds_give() -> None:
    model = frozen_model()
    layer, rows = layer_of(model), rows_of()
    expected = layer(rows)
    merge_projections(model)
    assert join_shared_experts(model) == 1
    assert join_shared_experts(model) == 1, "a later engine finds it joined"
    found = joined_experts(layer, rows)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    without = layer.experts(rows.flatten(0, 1), *reversed(layer.gate(rows)[1:])).view_as(rows)
    assert (found - without).abs().max() > 0.1, "the shared expert is a part of it"
    assert torch.equal(layer(rows), expected), "without the compiler nothing changes"
    assert type(copy.deepcopy(layer)) is Glm4MoeMoE


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_joined_fp8_layer_gives_what_both_kinds_give(layout: str, tmp_path: Path) -> None:
    # Whole blocks: matrices that end inside one are not merged.
    quantise(save(tmp_path, "glm4_moe", moe_intermediate_size=2 * BLOCK), layout=layout)
    target = load_target(tmp_path, **KEPT)
    layer = next(m for m in target.model.modules() if hasattr(m, "shared_experts"))
    rows = torch.randn(6, target.config.hidden_size, generator=torch.Generator().manual_seed(4))
    expected = layer(rows[None])
    merge_projections(target.model)
    count = sum(hasattr(module, "shared_experts") for module in target.model.modules())
    assert join_shared_experts(target.model) == count
    torch.testing.assert_close(joined_experts(layer, rows[None]), expected, atol=1e-4, rtol=1e-4)


def unmerged(model: PreTrainedModel) -> None:
    pass


def by_the_library(model: PreTrainedModel) -> None:
    merge_projections(model)
    expert_stacks(model)[0].config._experts_implementation = "grouped_mm"


def renumbered(model: PreTrainedModel) -> None:
    merge_projections(model)
    expert_stacks(model)[0].register_forward_pre_hook(lambda _, args: args)


def patched(model: PreTrainedModel) -> None:
    merge_projections(model)
    (stack,) = expert_stacks(model)
    vars(stack)["forward"] = stack.forward


def wrapped(model: PreTrainedModel) -> None:
    merge_projections(model)
    down = cast(nn.Module, cast(nn.Module, layer_of(model).shared_experts).down_proj)
    down.__class__ = type("Adapted", (type(down),), {})


def dealt(model: PreTrainedModel) -> None:
    merge_projections(model)
    split = DistributedConfig(tp_size=2, enable_expert_parallel=True)
    vars(expert_stacks(model)[0].config)["distributed_config"] = split


@pytest.mark.parametrize("spoil", [unmerged, by_the_library, renumbered, patched, wrapped, dealt])
def test_layers_that_something_else_runs_are_left_alone(spoil) -> None:
    model = frozen_model()
    spoil(model)
    assert join_shared_experts(model) == 0


def test_layer_whose_experts_something_reads_later_is_put_back() -> None:
    model = frozen_model()
    merge_projections(model)
    assert join_shared_experts(model) == 1
    renumbered(model)
    assert join_shared_experts(model) == 0
    assert type(layer_of(model)) is Glm4MoeMoE


def test_shared_expert_of_another_size_is_left_alone() -> None:
    model = frozen_model(n_shared_experts=2)
    merge_projections(model)
    assert join_shared_experts(model) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 32, 33])
@torch.inference_mode()
def test_compiled_layer_on_gpu_of_few_rows_has_one_product_of_each_kind(num_rows: int) -> None:
    model = frozen_model("cuda", hidden_size=128, moe_intermediate_size=64)
    layer = layer_of(model)
    rows = torch.randn(1, num_rows, 128, device="cuda", dtype=torch.bfloat16)
    expected = layer(rows)
    merge_projections(model)
    assert join_shared_experts(model) == 1
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    found = torch.compile(layer, backend=backend, dynamic=False)(rows)
    # Each kind's sum is rounded to bfloat16 before they are added, or their common one is.
    assert (found - expected).norm() < 1e-2 * expected.norm()
    assert sum("expert_pairs" in name for name in names) == 1
    assert any("linear" in name for name in names) == (num_rows > 32)
