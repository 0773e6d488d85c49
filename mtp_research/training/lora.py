"""Low-rank updates of MTP modules through peft: train few numbers, export plain weights.

`head.lora_rank=r` adds `SCALE * B A` to every linear layer of the modules, B `[out, r]` and A
`[r, in]`, and trains these alone; norms, routers and stacked experts stay as they start. A
checkpoint keeps base and update apart, so that a run resumes exactly; the exported head adds them
up, so that decoding knows nothing of it. Letters: r rank.

Source: Hu et al. 2021, "LoRA" (arXiv:2106.09685).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mtp_research.errors import EnvironmentFault
from mtp_research.heads.stack import MTPHeads

SCALE = 2.0  # alpha / r: updates keep their size when the rank changes
_ADAPTER = "default"  # peft's own name for the only one


def add_lora(heads: MTPHeads, *, rank: int) -> None:
    """Put trainable updates on all linear layers and freeze everything else, in place.

    The updates start at zero: the heads compute what they did.

    Args:
        heads: with the weights that they start from.
        rank: r, at least 1.

    Raises:
        EnvironmentFault: peft is not installed.
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
    """Plain weights from the tensors of heads with updates; those of plain heads stay as they are.

    Args:
        tensors: `state_dict` of the heads.
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
