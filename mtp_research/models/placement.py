"""Device and dtype of a model, from the words of the configuration, and maps of several devices."""

from typing import cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.accelerate import get_balanced_memory, infer_auto_device_map

from mtp_research.errors import ConfigError, EnvironmentFault
from mtp_research.models.family import Family

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU when there is one.

    Raises:
        EnvironmentFault: `cuda` was asked for and is not usable.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFault(
            "model.device=cuda needs a CUDA GPU, none is visible; set model.device=cpu."
        )
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 elsewhere.

    Raises:
        ConfigError: `dtype` is neither `auto` nor a key of `DTYPES`.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(
            f"model.dtype must be one of {sorted(['auto', *DTYPES])}, got {dtype!r}; "
            "set model.dtype=auto."
        )
    return DTYPES[dtype]


def auto_map(
    config: PreTrainedConfig, *, family: Family, dtype: torch.dtype
) -> dict[str, int | str]:
    """Devices by module name: layers spread as transformers' `auto` does, what heads read on one.

    Heads share the embedding, the rotary embedding, the final norm and lm_head with the target, so
    these lie together on the first GPU, and what does not fit the GPUs in memory or on the disk.

    Args:
        config: of the target.
        family: its entry.
        dtype: of the weights.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    no_split = model._no_split_modules
    memory = cast(
        dict[int | str, int | str], get_balanced_memory(model, no_split_module_classes=no_split)
    )
    first = next(iter(memory))
    shared = _shared_modules(model, family)
    reserved = sum(p.nbytes for m in shared.values() for p in m.parameters())
    memory[first] = max(cast(int, memory[first]) - reserved, 0)
    spread = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=no_split)
    return cast(dict[str, int | str], spread) | dict.fromkeys(shared, first)


def require_shared_place(model: PreTrainedModel, *, family: Family) -> None:
    """Refuse a map that tears apart, or keeps off the devices, what heads read of the target.

    Raises:
        ConfigError: names the modules and where they are.
    """
    shared = _shared_modules(model, family)
    places = {
        name: str(tensor.device)
        for name, module in shared.items()
        for tensor in [*module.parameters(), *module.buffers()]
    }
    if len(set(places.values())) > 1 or "meta" in places.values():
        raise ConfigError(
            "model.device_map must place what the heads read on one device (meta is none), got "
            f"{places}; give these modules one device in the map."
        )


def require_one_device(model: PreTrainedModel) -> None:
    """Refuse layers that run on several GPUs, for decoding, whose pages lie on one.

    Weights in memory or on the disk run on the GPU, so they count as its.

    Raises:
        ConfigError: names the devices.
    """
    devices = set(getattr(model, "hf_device_map", {}).values()) - {"cpu", "disk"}
    if len(devices) > 1:
        raise ConfigError(
            "decoding keeps the pages of all layers on one device, model.device_map spreads the "
            f"layers over {sorted(map(str, devices))}; set model.tp_plan=tensor and launch with "
            "torchrun, or show one GPU to the process."
        )


def _shared_modules(model: PreTrainedModel, family: Family) -> dict[str, nn.Module]:
    """What heads read of a target, by name."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    norm = getattr(model.base_model, family.final_norm)
    shared = [model.get_input_embeddings(), model.get_output_embeddings(), norm, rotary]
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(module is part for part in shared):
            found[name] = module
    return found
