"""Expert load balance without an auxiliary loss, for routers that choose by score plus bias.

After each optimiser step the bias of an expert that got less than its share rises by `rate` and
that of one that got more falls by it. The bias only enters the choice, not the weights, so it has
no gradient. Letters: E experts. Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing",
algorithm 1.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

RouterHook = Callable[
    [nn.Module, tuple[torch.Tensor, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]], None
]


class ExpertBalancer:
    """Counts how many tokens each expert gets and moves the routers' biases.

    Must be made before the model is compiled: the counters are forward hooks, which become part of
    the compiled graph.

    Attributes:
        routers: modules with a buffer `e_score_correction_bias` [E] whose forward returns
            (logits, weights, indices), all with the same E.
        loads: per router [E] fp32, tokens seen by each expert since the last `update`.
    """

    def __init__(self, routers: Sequence[nn.Module], *, rate: float) -> None:
        """Start counting.

        Args:
            routers: see the class; may be empty for a dense model.
            rate: step of the bias per update, in units of a sigmoid score, >= 0.
        """
        self.routers = list(routers)
        self.rate = rate
        self.loads = [torch.zeros_like(_bias(router)) for router in self.routers]
        self._hooks = [
            router.register_forward_hook(_count_into(load))
            for router, load in zip(self.routers, self.loads, strict=True)
        ]

    @torch.no_grad()
    def update(self, *, scale: float = 1.0) -> torch.Tensor | None:
        """Move every bias by one step and clear the counters, in place, without a sync.

        Args:
            scale: factor on the rate; following the learning rate lets the biases settle with it.

        Returns:
            0-dim fp32 imbalance, largest load / mean load of the worst router (1 is perfect), on
            the device; None without routers.
        """
        if not self.routers:
            return None
        loads = torch.stack(self.loads)  # [routers, E]
        mean = loads.mean(dim=1, keepdim=True)
        steps = (mean - loads).sign()
        biases = [_bias(router) for router in self.routers]
        torch._foreach_add_(biases, list(steps.unbind()), alpha=self.rate * scale)
        torch._foreach_zero_(self.loads)
        return (loads.amax(dim=1) / mean.squeeze(1).clamp(min=1.0)).amax()

    def close(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()


def _bias(router: nn.Module) -> torch.Tensor:
    return router.get_buffer("e_score_correction_bias")


def _count_into(load: torch.Tensor) -> RouterHook:
    num_experts = load.shape[0]

    def count(
        module: nn.Module,
        inputs: tuple[torch.Tensor, ...],
        output: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        if module.training:
            experts = torch.arange(num_experts, device=load.device)
            chosen = output[2].detach().reshape(-1, 1)  # [tokens * top_k, 1]
            load.add_((chosen == experts).sum(dim=0))

    return count
