"""AdamW on fp32 master copies of low-precision parameters, and the learning-rate schedule.

A step of 1e-4 relative size vanishes in bf16 (8 bits of mantissa), so the compute parameters are
bf16 copies of fp32 masters that alone are optimised. Source: Micikevicius et al. 2018, section 3.1.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from mtp_research.errors import ConfigError


class MasterWeights:
    """fp32 masters of a set of parameters with AdamW behind them; one call is one step.

    Nothing in `step` waits for the device: the clip factor and the decision to skip a step with
    non-finite gradients stay on it.

    Attributes:
        parameters: compute parameters, any floating dtype, written in place by `step`.
        masters: fp32 copies in the same order; checkpoints save these.
        optimizer: AdamW over the masters.
        num_skipped: 0-dim fp32 tensor, steps skipped because of non-finite gradients.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
    ) -> None:
        """Copy the parameters to fp32 and set up AdamW; vectors get no weight decay.

        Args:
            parameters: those that require gradients are trained, the others ignored.
            learning_rate: peak rate, > 0; `step` may override it.
            betas: decay of first and second moments.
            weight_decay: for tensors of two or more dimensions, per step times the rate.
            grad_clip: largest global gradient norm, > 0.

        Raises:
            ConfigError: no parameter requires gradients.
        """
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise ConfigError("expected parameters that require gradients, got none")
        self.masters = [p.detach().to(torch.float32, copy=True) for p in self.parameters]
        self.grad_clip = grad_clip
        self.optimizer = make_adamw(
            self.masters, learning_rate=learning_rate, betas=betas, weight_decay=weight_decay
        )
        self.num_skipped = torch.zeros((), device=self.masters[0].device)

    @torch.no_grad()
    def step(self, *, learning_rate: float | None = None) -> torch.Tensor:
        """Clip, update the masters, copy them to the parameters and clear the gradients, in place.

        A non-finite gradient norm leaves masters, moments and parameters as they were.

        Args:
            learning_rate: rate of this step; None keeps the last one.

        Returns:
            0-dim fp32 gradient norm before clipping, on the device.
        """
        grads, new_grads = [], []
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None, "a trained parameter took no part in the loss"
            master.grad = torch.empty_like(master) if master.grad is None else master.grad
            grads.append(master.grad)
            new_grads.append(parameter.grad)
        torch._foreach_copy_(grads, new_grads)
        grad_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        self.num_skipped += guarded_update(
            self.optimizer,
            grad_norm=grad_norm,
            grad_clip=self.grad_clip,
            learning_rate=learning_rate,
        )
        torch._foreach_copy_(list[torch.Tensor](self.parameters), self.masters)
        for parameter in self.parameters:
            parameter.grad = None
        return grad_norm


def make_adamw(
    masters: Sequence[torch.Tensor],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.AdamW:
    """Fused AdamW over fp32 tensors; vectors get no weight decay."""
    decayed = [master for master in masters if master.ndim >= 2]
    plain = [master for master in masters if master.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        betas=betas,
        eps=1e-8,
        fused=True,
    )


def guarded_update(
    optimizer: torch.optim.AdamW,
    *,
    grad_norm: torch.Tensor,
    grad_clip: float,
    learning_rate: float | None,
) -> torch.Tensor:
    """Clip and step, unless the norm is not finite; decided on the device.

    The fused kernel divides gradients by `grad_scale` and skips the step where `found_inf` is 1:
    the seam that torch's GradScaler uses, which saves a pass over the gradients and a sync.

    Args:
        optimizer: of `make_adamw`, whose tensors hold gradients.
        grad_norm: 0-dim global norm of these gradients.
        grad_clip: largest global norm.
        learning_rate: rate of this step; None keeps the last one.

    Returns:
        0-dim fp32, 1 when the step was skipped.
    """
    is_bad = (~torch.isfinite(grad_norm)).float()
    if learning_rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
    optimizer.grad_scale = (grad_norm / grad_clip).clamp(min=1.0)
    optimizer.found_inf = is_bad
    optimizer.step()
    return is_bad


def cosine_learning_rate(
    fraction: float,
    *,
    step: int,
    peak: float,
    warmup_steps: int,
    min_ratio: float,
) -> float:
    """Linear warm-up over `warmup_steps`, times a cosine from 1 to `min_ratio` over the budget.

    The cosine follows the spent fraction of the budget, not the step, so that a run that ends by
    the clock still reaches the smallest rate.

    Args:
        fraction: spent part of the budget; clamped to [0, 1].
        step: steps done before this one, >= 0.
        peak: largest rate.
        warmup_steps: steps until the warm-up factor is 1.
        min_ratio: last rate / peak, in [0, 1].
    """
    fraction = min(max(fraction, 0.0), 1.0)
    cosine = min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * fraction))
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0
    return peak * cosine * warmup
