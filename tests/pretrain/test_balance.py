import pytest
import torch
from torch import nn
from torch.nn import functional

from mtp_research.pretrain.pretrain_report import ExpertBalancer


class Router(nn.Module):
    """Chooses one of three experts by fixed score plus bias."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = torch.tensor(scores)
        self.e_score_correction_bias = nn.Buffer(torch.zeros(len(scores)))

    def forward(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.scores + noise
        indices = (logits + self.e_score_correction_bias).topk(1, dim=-1).indices
        return logits, functional.softmax(logits, dim=-1).gather(1, indices), indices


def test_update_moves_biases_towards_equal_loads() -> None:
    router = Router([0.5, 0.2, 0.0])
    balancer = ExpertBalancer([router], rate=0.01)
    router(torch.zeros(6, 3))
    assert balancer.loads[0].tolist() == [6.0, 0.0, 0.0]
    imbalance = balancer.update()
    assert imbalance is not None
    assert imbalance.item() == pytest.approx(3.0)
    assert router.e_score_correction_bias.tolist() == pytest.approx([-0.01, 0.01, 0.01])
    assert balancer.loads[0].tolist() == [0.0, 0.0, 0.0]


def test_update_scale_shrinks_the_step() -> None:
    router = Router([0.5, 0.2, 0.0])
    balancer = ExpertBalancer([router], rate=0.01)
    router(torch.zeros(6, 3))
    balancer.update(scale=0.1)
    assert router.e_score_correction_bias.tolist() == pytest.approx([-0.001, 0.001, 0.001])


def test_repeated_updates_balance_a_skewed_router() -> None:
    router = Router([1.0, 0.2, 0.0])
    balancer = ExpertBalancer([router], rate=0.02)
    generator = torch.Generator().manual_seed(0)
    imbalances = []
    for _ in range(200):
        router(0.3 * torch.randn(300, 3, generator=generator))
        imbalance = balancer.update()
        assert imbalance is not None
        imbalances.append(imbalance.item())
    assert imbalances[0] > 2.5
    assert sum(imbalances[-20:]) / 20 < 1.3


def test_eval_mode_and_close_stop_counting() -> None:
    router = Router([0.0, 0.0, 0.0])
    balancer = ExpertBalancer([router], rate=0.01)
    router.eval()
    router(torch.zeros(4, 3))
    assert balancer.loads[0].sum() == 0
    router.train()
    balancer.close()
    router(torch.zeros(4, 3))
    assert balancer.loads[0].sum() == 0


def test_dense_models_have_nothing_to_balance() -> None:
    assert ExpertBalancer([], rate=0.01).update() is None
