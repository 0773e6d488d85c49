"""The one door to rewrites of library modules: what the engine's keys let through."""

import copy

import pytest
import torch
from torch import nn

from mtp_research.config.schema import EngineConfig
from mtp_research.models.rewrites.apply_rewrites import apply_rewrites, compile_options
from mtp_research.models.rewrites.products import MergedLinear
from mtp_research.models.rewrites.rotary import RotaryInAttention
from tests import tiny


def num_merged(model: nn.Module) -> int:
    return sum(isinstance(module, MergedLinear) for module in model.modules())


def num_leaving_rotary(model: nn.Module) -> int:
    return sum(
        module.leaves_rotary for module in model.modules() if isinstance(module, RotaryInAttention)
    )


@pytest.fixture
def target():
    return tiny.tiny_target("qwen3", dtype=torch.float32)


def test_engine_without_compile_rewrites_nothing(target):
    before = [type(module) for module in target.model.modules()]
    apply_rewrites(target, None, EngineConfig(compile=False))
    assert [type(module) for module in target.model.modules()] == before


def test_engine_with_compile_rewrites_target_and_heads_and_keeps_weights(target):
    heads = tiny.tiny_heads(target, num_mtp_modules=2).requires_grad_(False)
    names = copy.deepcopy(heads.state_dict())
    apply_rewrites(target, heads, EngineConfig(compile=True, cuda_graphs=True))
    for model in (target.model, heads):
        assert num_merged(model) > 0
        assert num_leaving_rotary(model) > 0
    assert heads.state_dict().keys() == names.keys()
    assert all(torch.equal(heads.state_dict()[name], value) for name, value in names.items())


def test_later_engine_puts_the_rotation_back(target):
    apply_rewrites(target, None, EngineConfig(compile=True, cuda_graphs=True))
    assert num_leaving_rotary(target.model) == len(target.kv_layers)
    engine = EngineConfig(compile=True, cuda_graphs=True, rotary_in_attention=False)
    apply_rewrites(target, None, engine)
    assert num_leaving_rotary(target.model) == 0


def test_target_split_over_ranks_is_changed_like_a_whole_one(target, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    apply_rewrites(target, None, EngineConfig(compile=True, cuda_graphs=True))
    assert num_leaving_rotary(target.model) == len(target.kv_layers)
    options = compile_options(overlaps=True)
    monkeypatch.delenv("WORLD_SIZE")
    assert options == compile_options(overlaps=True)
