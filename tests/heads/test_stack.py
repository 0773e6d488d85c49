"""What a head owns, how it starts, and that each convention changes what it computes."""

import pytest
import torch

from mtp_research.heads.init import init_heads
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError
from tests.tiny import tiny_heads, tiny_target


@pytest.fixture(scope="module", params=["qwen3", "glm4_moe"])
def target(request: pytest.FixtureRequest) -> Target:
    return tiny_target(request.param, dtype=torch.float32)


def run_first_module(heads: MTPHeads, *, first_position: int = 0) -> torch.Tensor:
    token_ids = torch.tensor([[5, 6, 7, 8]])
    hidden = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return heads.run_module(
            heads.mtp_modules[0],
            token_ids=token_ids,
            prev_hidden_states=hidden,
            position_ids=torch.arange(4)[None] + first_position,
            context=DenseContext(),
        ).post_norm


def test_fresh_heads_copy_the_target_s_last_layer_and_average_their_inputs(
    target: Target,
) -> None:
    heads = MTPHeads(target, spec=HeadSpec(num_mtp_modules=2))
    init_heads(heads, init="target_last_layer")
    last_layer = target.model.base_model.layers[-1].state_dict()
    for module in heads.mtp_modules:
        for name, tensor in module.block.state_dict().items():
            assert torch.equal(tensor, last_layer[name]), name
        left, right = module.eh_proj.weight.chunk(2, dim=1)
        assert torch.equal(left, torch.eye(64) / 2)
        assert torch.equal(left, right)


def test_random_heads_share_nothing_with_the_last_layer(target: Target) -> None:
    heads = MTPHeads(target, spec=HeadSpec(num_mtp_modules=1))
    init_heads(heads, init="random")
    last = target.model.base_model.layers[-1].self_attn.q_proj.weight
    assert not torch.equal(heads.mtp_modules[0].block.self_attn.q_proj.weight, last)


@pytest.mark.parametrize(
    "convention", [{"concat_order": "hidden_first"}, {"zero_position_0": True}], ids=str
)
def test_each_convention_changes_the_output(
    target: Target, convention: dict[str, str | bool]
) -> None:
    plain = run_first_module(tiny_heads(target))
    assert not torch.allclose(plain, run_first_module(tiny_heads(target, **convention)))
    assert torch.equal(plain, run_first_module(tiny_heads(target)))


def test_zero_position_0_leaves_every_other_position_alone(target: Target) -> None:
    outputs = [
        run_first_module(tiny_heads(target, zero_position_0=zero), first_position=1)
        for zero in (False, True)
    ]
    assert torch.equal(*outputs)


def test_heads_need_a_module(target: Target) -> None:
    with pytest.raises(ConfigError, match="must be >= 1, got 0"):
        MTPHeads(target, spec=HeadSpec(num_mtp_modules=0))
