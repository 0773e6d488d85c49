"""Tiny random targets with recurrent layers, computed in float64 throughout.

The library's recurrent layers, norms and routers drop to float32 inside, which would hide small
faults of the state. `float64_library` executes the library's own source with its float32 names
replaced, as a module of its own; nothing is patched in place.
"""

import functools
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import torch
from transformers import CONFIG_MAPPING

from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.target import Target, wrap_target
from tests.recipes import RECURRENT_RECIPES
from tests.tiny import randomise

_BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
_MOE = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
DECAY_LOG = -1.8
# name -> model type, package of the library, class, config arguments
RECIPES: dict[str, tuple[str, str, str, dict]] = {
    "qwen3_next": (
        "qwen3_next",
        "qwen3_next",
        "Qwen3NextForCausalLM",
        dict(_BASE, **_MOE, intermediate_size=96, norm_topk_prob=True, decoder_sparse_step=1),
    ),
    "nemotron_h": (
        "nemotron_h",
        "nemotron_h",
        "NemotronHForCausalLM",
        RECURRENT_RECIPES["nemotron_h"][1],
    ),
    "qwen3_5": (
        "qwen3_5_text",
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        dict(_BASE, **_MROPE, intermediate_size=96),
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
        dict(_BASE, **_MROPE, **_MOE),
    ),
}


def tiny_target(recipe: str, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Target:
    """A random target with matrices N(0, 0.15): a wrong state moves its logits by about one."""
    torch.manual_seed(seed)
    model_type, package, class_name, kwargs = RECIPES[recipe]
    name = f"transformers.models.{package}.modeling_{package}"
    library = float64_library(name) if dtype is torch.float64 else importlib.import_module(name)
    model = getattr(library, class_name)._from_config(
        CONFIG_MAPPING[model_type](**kwargs), attn_implementation="eager"
    )
    randomise(model, seed=seed + 1)
    target = wrap_target(model.to(dtype))
    for mixer in target.mixers.values():
        # About 0.8 a token; drawn like the other weights it would forget within two tokens.
        mixer.A_log.fill_(DECAY_LOG)
    return target


def tiny_heads(target: Target, *, num_mtp_modules: int = 3, seed: int = 7) -> MTPHeads:
    """Random heads on `target`."""
    heads = MTPHeads(target, spec=HeadSpec(num_mtp_modules=num_mtp_modules))
    randomise(heads, seed=seed)
    return heads.eval().requires_grad_(False)


@functools.cache
def float64_library(name: str) -> ModuleType:
    """The library's module `name` with float64 in the place of float32."""
    found = importlib.util.find_spec(name)
    assert found is not None, f"no module {name}"
    assert found.origin is not None, f"{name} has no source"
    source = Path(found.origin).read_text(encoding="utf8")
    source = re.sub(r"torch\.float(32)?\b", "torch.float64", source)
    source = source.replace(".float()", ".double()")
    module = ModuleType(f"{name}_float64")
    module.__file__ = found.origin
    module.__package__ = name.rpartition(".")[0]
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source, found.origin, "exec"), module.__dict__)
    return module
