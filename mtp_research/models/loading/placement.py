"""Where a target lies: one device, a map of several, or a part on each process of torchrun.

Of a split target each process has a rank, by the plan that transformers keeps for its class:

    tensor    columns and rows of projections, so heads of attention, and every expert's inside
    experts   whole experts; with transformers 5.17 nothing else of a layer is split
    data      whole experts, and the requests: all else of the model is whole on each rank

transformers reads each rank's part only; what layers do with parts is in `split_layers`. What
follows for the decode loop: a rank's pages hold the key-value heads that its layers have, MTP
modules are cut by the same plan, and `lm_head` and the embedding by rows. What decides a token is
exchanged (`rank_parts`), so that all ranks see the same bits and take the same decisions. By `data`
ranks decode different requests and exchange rows alone, in expert layers.
"""

import dataclasses
import os
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.integrations.accelerate import get_balanced_memory, infer_auto_device_map

from mtp_research.models.family import Family
from mtp_research.models.loading.split_layers import EXPERT_STYLES, layer_plan
from mtp_research.models.rank_parts import RankParts, RowExchange
from mtp_research.runtime.errors import ConfigError, EnvironmentFault

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU when there is one; `cuda` without one is an `EnvironmentFault`."""
    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFault(
            "model.device=cuda needs a CUDA GPU, none is visible; set model.device=cpu."
        )
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 elsewhere; else a key or value of `DTYPES`."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if name not in DTYPES:
        raise ConfigError(
            f"model.dtype must be one of {sorted(['auto', *DTYPES])}, got {dtype!r}; "
            "set model.dtype=auto."
        )
    return DTYPES[name]


def auto_map(
    config: PreTrainedConfig, *, family: Family, dtype: torch.dtype
) -> dict[str, int | str]:
    """Devices by module name: layers spread as transformers' `auto` does, what heads read on one.

    Heads share the embedding, the rotary embedding, the final norm and lm_head with the target, so
    these lie together on the first GPU, and what does not fit the GPUs in memory or on the disk.
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
    """Refuse (`ConfigError`) a map that tears apart, or keeps off devices, what heads read."""
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
    """Refuse layers that run on several GPUs, for decoding, whose pages lie on one (`ConfigError`).

    Weights in memory or on the disk run on the GPU, so they count as its.
    """
    devices = set(getattr(model, "hf_device_map", {}).values()) - {"cpu", "disk"}
    if len(devices) > 1:
        raise ConfigError(
            "decoding keeps the pages of all layers on one device, model.device_map spreads the "
            f"layers over {sorted(map(str, devices))}; set model.tp_plan=tensor and launch with "
            "torchrun, or show one GPU to the process."
        )


def _shared_modules(model: PreTrainedModel, family: Family) -> dict[str, nn.Module]:
    rotary = getattr(model.base_model, "rotary_emb", None)
    norm = model.base_model.get_submodule(family.final_norm)
    shared = [model.get_input_embeddings(), model.get_output_embeddings(), norm, rotary]
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(module is part for part in shared):
            found[name] = module
    return found


TPPlan = Literal["none", "data", "experts", "tensor"]
TP_PLANS: tuple[TPPlan, ...] = get_args(TPPlan)
DATA = "data"

# Config fields that the ranks must divide; transformers would split them unevenly, heads included.
_SPLIT_FIELDS = ("num_attention_heads", "num_key_value_heads")
_EXPERT_FIELDS = ("n_routed_experts", "num_experts", "moe_num_experts", "num_local_experts")
EXPERTS_DIM = 3  # of weights `[experts, output, input]`
LAYER_MESH = "layers"  # of ranks that share decoder layers by `trainer.shard_target`


def num_ranks() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def require_gpus(device: torch.device) -> None:
    """Refuse (`EnvironmentFault`) more ranks on this machine than it has GPUs."""
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda" and num_here > torch.cuda.device_count():
        num_gpus = torch.cuda.device_count()
        raise EnvironmentFault(
            f"each process of torchrun needs a GPU of its own, got {num_here} processes and "
            f"{num_gpus} GPUs on this machine; launch torchrun with --nproc-per-node {num_gpus}."
        )


def distribution(
    tp_plan: str, *, config: PreTrainedConfig, family: Family, device: torch.device
) -> DistributedConfig:
    """What `from_pretrained` takes to load a rank's part; the ranks are to run on `device`."""
    ranks = num_ranks()
    if tp_plan not in TP_PLANS:
        raise ConfigError(f"model.tp_plan must be one of {sorted(TP_PLANS)}, got {tp_plan!r}.")
    if ranks < 2:
        raise ConfigError(
            f"model.tp_plan={tp_plan} needs 2 or more processes, got {ranks}; launch with torchrun "
            "--nproc-per-node N, or set model.tp_plan=none."
        )
    if device.type == "cpu" and torch.cuda.is_available():
        raise EnvironmentFault(
            f"model.tp_plan={tp_plan} on the CPU needs a machine without visible GPUs, got "
            f"{torch.cuda.device_count()}; set CUDA_VISIBLE_DEVICES= or model.device=cuda."
        )
    _require_divisible(config, tp_plan, ranks, family=family)
    require_gpus(device)
    if tp_plan == "tensor":
        return DistributedConfig(tp_size=ranks, tp_plan="auto")
    if "ep_size" in {field.name for field in dataclasses.fields(DistributedConfig)}:
        return DistributedConfig(tp_size=ranks, ep_size=ranks)
    return DistributedConfig(tp_size=ranks, enable_expert_parallel=True)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be split; every rank must call."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.dtype.itemsize > 1:
        return tensor.full_tensor()
    # Bytes: not every way to gather knows FP8.
    parts, shape, stride = tensor.to_local().view(torch.uint8), tensor.shape, tensor.stride()
    mesh, places = tensor.device_mesh, tensor.placements
    split = DTensor.from_local(parts, mesh, places, shape=shape, stride=stride)
    return split.full_tensor().view(tensor.dtype)


def has_split_experts(config: PreTrainedConfig) -> bool:
    """Whether ranks own whole experts: pairs of a token and an expert may be another rank's."""
    settings = cast(DistributedConfig | None, getattr(config, "distributed_config", None))
    return settings is not None and settings.enable_expert_parallel


def parts_of(
    model: PreTrainedModel, tp_plan: str, *, family: Family, rank: int, num_ranks: int
) -> RankParts:
    """A rank's parts of a model; refuses (`ConfigError`) one that cannot be split so."""
    config = model.config.get_text_config()
    _require_divisible(config, tp_plan, num_ranks, family=family)
    exchange = None
    if tp_plan == DATA:
        sizes = {"hidden_size": config.hidden_size, "top_k": config.num_experts_per_tok}
        exchange = RowExchange(num_ranks=num_ranks, **sizes)
    return RankParts(rank, num_ranks, layer_plan(model), exchange)


def _require_divisible(
    config: PreTrainedConfig, tp_plan: str, ranks: int, *, family: Family
) -> None:
    if tp_plan != DATA and (family.mixer is not None or family.sparse_attention):
        kind = "recurrent layers" if family.mixer is not None else "sparse attention"
        raise ConfigError(
            f"model.tp_plan must be none for a model with {kind}, whose states are not split; set "
            "model.tp_plan=none."
        )
    fields = _SPLIT_FIELDS if tp_plan == "tensor" else _EXPERT_FIELDS
    sizes = {name: getattr(config, name) for name in fields if getattr(config, name, None)}
    if tp_plan != "tensor" and not sizes:
        raise ConfigError(
            f"model.tp_plan={tp_plan} needs a model with experts, got {config.model_type}; set "
            "model.tp_plan=tensor."
        )
    if tp_plan != DATA:
        sizes["vocab_size"] = config.vocab_size
    elif set((config.base_model_ep_plan or {}).values()) != EXPERT_STYLES:
        raise ConfigError(
            f"model.tp_plan=data needs routed experts that transformers deals to ranks, and no "
            f"others, got {config.model_type}; set model.tp_plan=tensor."
        )
    uneven = {name: size for name, size in sizes.items() if size % ranks}
    if uneven:
        raise ConfigError(
            f"model.tp_plan={tp_plan} needs a number of processes that divides {uneven}, got "
            f"{ranks}; launch torchrun with another --nproc-per-node."
        )
