"""A new target from a family's Hugging Face config: build, run for training, generate, save.

The only place where `task=target` touches transformers. The classes are Hugging Face's own;
training swaps in a causal attention without a mask tensor, because under `torch.compile`
transformers always materialises one, which keeps SDPA from its flash kernel.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)

from mtp_research.runtime.errors import ConfigError
from mtp_research.runtime.files import open_to_others

TRAINING_ATTENTION = "mtp_causal"
TargetModel = PreTrainedModel  # for annotations outside models/, which do not import transformers


def new_target(
    family: str,
    architecture: Mapping[str, object],
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> PreTrainedModel:
    """A randomly initialised model of `family`, ready to be trained on continuous rows.

    `family` is the `model_type` of the Hugging Face config, `architecture` its keyword arguments;
    what they refuse is a `ConfigError`. Initialised in fp32 on the CPU and then cast, parameters
    only: buffers such as the router's `e_score_correction_bias` and the rotary frequencies stay
    fp32. The global generator is left as it was.
    """
    try:
        config = AutoConfig.for_model(family, **copy.deepcopy(dict(architecture)))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"expected a family and architecture that transformers builds, got {family!r}: "
            f"{str(error).splitlines()[0]}; change model.family or model.architecture"
        ) from error
    AttentionInterface.register(TRAINING_ATTENTION, _causal_attention)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Experts run by the default `grouped_mm`, which compiles to one graph in bf16.
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=TRAINING_ATTENTION
        )
    cast_parameters(model, dtype)
    return model.to(device)


def next_token_logits(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] of rows [B, S] in the model's dtype, causal over the whole row."""
    return model(input_ids=input_ids, use_cache=False).logits


def routers(model: nn.Module) -> list[nn.Module]:
    """The expert routers that are balanced by a bias, in layer order; empty for dense models."""
    return [
        module
        for module in model.modules()
        if "e_score_correction_bias" in dict(module.named_buffers(recurse=False))
    ]


def finish_training(
    model: PreTrainedModel, *, stop_ids: Sequence[int], bos_id: int, pad_id: int
) -> None:
    """Back to stock attention and eval mode, with the generation settings set, in place."""
    model.set_attn_implementation("sdpa")
    model.eval()
    model.generation_config = GenerationConfig(
        bos_token_id=bos_id, eos_token_id=list(stop_ids), pad_token_id=pad_id, do_sample=False
    )
    model.config.bos_token_id = bos_id
    model.config.eos_token_id = list(stop_ids)
    model.config.pad_token_id = pad_id


def generate_greedy(
    model: PreTrainedModel, prompt_ids: Sequence[int], *, max_new_tokens: int
) -> list[int]:
    """New token ids only, up to and including the stop token."""
    input_ids = torch.tensor([list(prompt_ids)], device=model.device)
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=max_new_tokens
    )
    return output[0, len(prompt_ids) :].tolist()


def save_target(model: PreTrainedModel, folder: str | Path) -> int:
    """Save in bf16 (buffers as they are) with configs; returns the bytes of the weights.

    Parameters are rounded to bf16 in place and keep their dtype, so that what is measured
    afterwards is what was saved.
    """
    dtype = model.dtype
    cast_parameters(model, torch.bfloat16)
    model.save_pretrained(folder)
    cast_parameters(model, dtype)
    files = list(Path(folder).glob("*.safetensors"))
    open_to_others(*files)
    return sum(path.stat().st_size for path in files)


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast parameters only, in place; routers and rotary embeddings need their buffers in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def _causal_attention(
    module: nn.Module,
    query: torch.Tensor,  # [B, H, S, Dk]
    key: torch.Tensor,  # [B, Hkv, S, Dk]
    value: torch.Tensor,  # [B, Hkv, S, Dv]
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    assert attention_mask is None, "training rows have no mask"
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None
