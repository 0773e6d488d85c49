import math

import pytest
import torch
from torch import nn

from mtp_research.runtime.errors import ConfigError
from mtp_research.training.optim import MasterWeights, cosine_learning_rate, trained_bytes


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (4,))
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter], *, step: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        gradient = size * torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.dtype)


@pytest.mark.parametrize("size", [0.01, 30.0], ids=["below the clip", "clipped"])
def test_step_equals_clipped_adamw(size: float) -> None:
    ours, plain = make_parameters(), make_parameters()
    masters = MasterWeights(ours, learning_rate=1e-2, weight_decay=0.1, grad_clip=0.7)
    groups = [
        {"params": plain[:1], "weight_decay": 0.1},
        {"params": plain[1:], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(6):
        set_gradients(ours, step=step, size=size)
        set_gradients(plain, step=step, size=size)
        expected_norm = nn.utils.clip_grad_norm_(plain, 0.7)
        reference.step()
        norm = masters.step()
        torch.testing.assert_close(norm, expected_norm)
    # clip_grad_norm_ adds 1e-6 to the norm before it divides.
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_step_keeps_updates_that_bf16_would_lose() -> None:
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    masters = MasterWeights([parameter], learning_rate=1e-4)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        masters.step()
    assert masters.masters[0].dtype == torch.float32
    torch.testing.assert_close(masters.masters[0], torch.full((8,), 0.99), atol=1e-4, rtol=0)
    torch.testing.assert_close(parameter.float(), masters.masters[0], atol=4e-3, rtol=0)
    assert parameter.dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_step_with_non_finite_gradient_changes_nothing(bad: float) -> None:
    parameters = make_parameters()
    masters = MasterWeights(parameters, learning_rate=1e-2, weight_decay=0.1)
    set_gradients(parameters, step=0)
    masters.step()
    before = [parameter.detach().clone() for parameter in parameters]
    moments = [masters.optimizer.state[m]["exp_avg"].clone() for m in masters.masters]
    set_gradients(parameters, step=1)
    assert parameters[0].grad is not None
    parameters[0].grad[0, 0] = bad
    assert not torch.isfinite(masters.step())
    assert masters.num_skipped.item() == 1
    torch.testing.assert_close([p.detach() for p in parameters], before, rtol=0, atol=0)
    after = [masters.optimizer.state[m]["exp_avg"] for m in masters.masters]
    torch.testing.assert_close(after, moments, rtol=0, atol=0)
    set_gradients(parameters, step=2)
    masters.step()
    assert not torch.equal(parameters[0], before[0])
    assert masters.num_skipped.item() == 1


def test_step_clears_gradients_and_ignores_frozen_parameters() -> None:
    trained, frozen = make_parameters()
    frozen.requires_grad_(False)
    before = frozen.clone()
    masters = MasterWeights([trained, frozen], learning_rate=0.1)
    trained.grad = torch.ones_like(trained)
    masters.step()
    assert trained.grad is None
    assert len(masters.masters) == 1
    torch.testing.assert_close(frozen, before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_a_trained_parameter_is_what_a_step_holds(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(100, 3, dtype=dtype))
    masters = MasterWeights([parameter], learning_rate=0.1)
    parameter.grad = torch.ones_like(parameter)
    own = parameter.grad.nbytes  # until the update is done
    masters.step()
    (master,) = masters.masters
    assert master.grad is not None
    state = masters.optimizer.state[master]
    moments = [tensor.nbytes for tensor in state.values() if tensor.numel() > 1]
    held = (parameter.nbytes, own + master.grad.nbytes, master.nbytes + sum(moments))
    assert tuple(300 * size for size in trained_bytes(dtype)) == held


def test_all_frozen_is_refused() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    with pytest.raises(ConfigError, match="require gradients"):
        MasterWeights([frozen], learning_rate=0.1)


@pytest.mark.parametrize(
    ("fraction", "step", "expected"),
    [
        (0.0, 0, 0.2),
        (0.0, 4, 1.0),
        (0.5, 100, 2.0 * (0.1 + 0.9 * 0.5)),
        (1.0, 100, 0.2),
        (1.7, 100, 0.2),
    ],
)
def test_cosine_learning_rate_values(fraction: float, step: int, expected: float) -> None:
    rate = cosine_learning_rate(fraction, step=step, peak=2.0, warmup_steps=10, min_ratio=0.1)
    assert rate == pytest.approx(expected)


def test_cosine_learning_rate_without_warmup_starts_at_the_peak() -> None:
    rate = cosine_learning_rate(0.0, step=0, peak=0.5, warmup_steps=0, min_ratio=0.0)
    assert rate == 0.5
