"""What an optimizer step updates: fp32 masters under AdamW, a schedule, low-rank updates.

A step of 1e-4 relative size vanishes in bf16 (8 bits of mantissa), so the compute parameters are
bf16 copies of fp32 masters, and the masters alone are optimised.

`head.lora_rank=r` adds `SCALE * B A` to every linear layer of the modules, B `[out, r]` and A
`[r, in]`, and trains these alone; norms, routers and stacked experts stay as they start. A
checkpoint keeps base and update apart, so that a run resumes exactly. The exported head adds them
up, so that decoding needs no peft.

Source: masters Micikevicius et al. 2018, section 3.1; Hu et al. 2021, "LoRA" (arXiv:2106.09685).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mtp_research.heads.stack import MTPHeads
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError

NamedTensors = dict[str, Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
SCALE = 2.0  # alpha / r: updates keep their size when the rank changes
_ADAPTER = "default"  # peft's own name for the only one


class TrainedBytes(NamedTuple):
    """Device memory of trained parameters under `MasterWeights`, in bytes a parameter."""

    weights: int  # in the dtype that computes
    gradients: int  # of backward, and their fp32 copies, which stay
    optimizer: int  # fp32 masters and both moments


def trained_bytes(dtype: torch.dtype) -> TrainedBytes:
    """What a trained parameter of `dtype` takes at the most, in the update of a step."""
    fp32 = torch.float32.itemsize
    return TrainedBytes(dtype.itemsize, gradients=dtype.itemsize + fp32, optimizer=3 * fp32)


class MasterWeights:
    """fp32 masters of the parameters that require gradients, with AdamW; one call is one step.

    Nothing in `step` waits for the device: the clip factor and the decision to skip a step with
    non-finite gradients stay on it.

    Args:
        parameters: of any floating dtype, written in place by `step`.
        learning_rate: peak rate, > 0; `step` may override it.
        betas: decay of first and second moments.
        weight_decay: for tensors of two or more dimensions, per step times the rate.
        grad_clip: largest global gradient norm, > 0.
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
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise ConfigError("expected parameters that require gradients, got none")
        # fp32 copies in the order of `parameters`; checkpoints save these
        self.masters = [p.detach().to(torch.float32, copy=True) for p in self.parameters]
        self.grad_clip = grad_clip
        self.optimizer = make_adamw(
            self.masters, learning_rate=learning_rate, betas=betas, weight_decay=weight_decay
        )
        # 0-dim fp32: steps skipped because of non-finite gradients
        self.num_skipped = torch.zeros((), device=self.masters[0].device)

    @torch.no_grad()
    def step(self, *, learning_rate: float | None = None) -> Tensor:
        """Clip, update the masters, copy them to the parameters and clear the gradients, in place.

        A non-finite gradient norm leaves masters, moments and parameters as they were. A
        `learning_rate` of None keeps the last one.

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
        torch._foreach_copy_(list[Tensor](self.parameters), self.masters)
        for parameter in self.parameters:
            parameter.grad = None
        return grad_norm

    def tensors(self, names: Sequence[str]) -> NamedTensors:
        """Masters and moments after one step or more; `names` are those of `parameters`."""
        found: NamedTensors = {}
        for name, master in zip(names, self.masters, strict=True):
            found |= moment_tensors(name, master=master, moments=self.optimizer.state[master])
        return found

    def restore(self, tensors: Mapping[str, Tensor], *, names: Sequence[str]) -> None:
        """Put back what `tensors` gave, in place, and copy the masters to the parameters."""
        shapes = {name: m.shape for name, m in zip(names, self.masters, strict=True)}
        check_optimizer_tensors(tensors, shapes=shapes)
        for name, parameter, master in zip(names, self.parameters, self.masters, strict=True):
            master.copy_(tensors[f"master.{name}"])
            self.optimizer.state[master] = {
                moment: tensors[f"{moment}.{name}"].to(master.device) for moment in MOMENTS
            }
            parameter.data.copy_(master)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def make_adamw(
    masters: Sequence[Tensor],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.AdamW:
    """Fused AdamW over fp32 tensors; vectors get no weight decay."""
    decayed = [master for master in masters if master.ndim >= 2]
    plain = [master for master in masters if master.ndim < 2]
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((decayed, weight_decay), (plain, 0.0))
        if members
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=1e-8, fused=True)


def guarded_update(
    optimizer: torch.optim.AdamW,
    *,
    grad_norm: Tensor,
    grad_clip: float,
    learning_rate: float | None,
) -> Tensor:
    """Clip and step, unless the norm is not finite; 0-dim fp32, 1 when the step was skipped.

    The fused kernel divides gradients by `grad_scale` and skips the step where `found_inf` is 1:
    the seam that torch's GradScaler uses, which saves a pass over the gradients and a sync.
    `grad_norm` is the 0-dim global norm of the gradients; a `learning_rate` of None keeps the last.
    """
    is_bad = (~torch.isfinite(grad_norm)).float()
    if learning_rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
    optimizer.grad_scale = (grad_norm / grad_clip).clamp(min=1.0)
    optimizer.found_inf = is_bad
    optimizer.step()
    return is_bad


def moment_tensors(
    name: str, *, master: Tensor, moments: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Master and moments of one parameter as `<what>.<parameter name>`."""
    return {f"master.{name}": master, **{f"{what}.{name}": moments[what] for what in MOMENTS}}


def check_optimizer_tensors(
    tensors: Mapping[str, Tensor], *, shapes: Mapping[str, torch.Size]
) -> None:
    """Refuse masters and moments (`moment_tensors`) that are not those of these parameters."""
    expected = {f"{what}.{name}" for what in ("master", *MOMENTS) for name in shapes}
    if expected != tensors.keys():
        odd = sorted(expected ^ tensors.keys())
        raise IntegrityError(f"optimizer state: missing or extra tensors {odd[:5]}")
    for name, shape in shapes.items():
        saved = tensors[f"master.{name}"].shape
        if saved != shape:
            raise IntegrityError(
                f"optimizer state: {name} must be {list(shape)}, got {list(saved)}"
            )


def cosine_learning_rate(
    fraction: float, *, step: int, peak: float, warmup_steps: int, min_ratio: float
) -> float:
    """Linear warm-up over `warmup_steps`, times a cosine from `peak` to `min_ratio` of it.

    The cosine follows the spent `fraction` of the budget, clamped to [0, 1], not the `step`s done
    before, so that a run that ends by the clock still reaches the smallest rate.
    """
    fraction = min(max(fraction, 0.0), 1.0)
    cosine = min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * fraction))
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0
    return peak * cosine * warmup


def add_lora(heads: MTPHeads, *, rank: int) -> None:
    """Put trainable updates on all linear layers and freeze everything else, in place.

    The updates start at zero: the heads compute what they did.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as fault:
        raise EnvironmentFault(
            f"head.lora_rank={rank} needs peft ({fault}); install mtp-research[lora] or set "
            "head.lora_rank=0."
        ) from fault
    names = [name for name, module in heads.named_modules() if type(module) is nn.Linear]
    config = LoraConfig(r=rank, lora_alpha=round(SCALE * rank), target_modules=names)
    heads.requires_grad_(False)
    inject_adapter_in_model(config, heads)
    for name, parameter in heads.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        parameter.data = parameter.data.to(heads.target.device, heads.target.dtype)


def merged_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain weights from a `state_dict` of heads with updates; plain heads stay as they are.

    On tensors and not by peft's `merge_and_unload`: those of sharded modules are whole only here.
    """
    merged: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, is_base, part = name.partition(".base_layer.")
        if ".lora_" in name:
            continue
        if is_base and part == "weight":
            up, down = (tensors[f"{layer}.lora_{half}.{_ADAPTER}.weight"] for half in "BA")
            wide = torch.promote_types(tensor.dtype, torch.float32)
            tensor = (tensor.to(wide) + SCALE * (up.to(wide) @ down.to(wide))).to(tensor.dtype)
        merged[f"{layer}.{part}" if is_base else name] = tensor
    return merged
