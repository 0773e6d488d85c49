"""The frozen target model: loading, and the one forward call that training and decoding share.

Letters: B batch rows (1 when decoding), T packed rows, D hidden, V vocabulary.
"""

import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mtp_research.errors import ConfigError, EnvironmentFault
from mtp_research.models.attention import ATTENTION_NAME, AttentionContext
from mtp_research.models.families import FAMILIES, Family, family_of

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_HUB_HOST = ("huggingface.co", 443)
_HUB_TIMEOUT_S = 2.0


class TargetHidden(NamedTuple):
    """Target hidden states of one pass, before and after the final norm, each `[B, T, D]`."""

    pre_norm: Tensor
    post_norm: Tensor


@dataclass(frozen=True)
class Target:
    """A frozen causal language model whose attention goes through an `AttentionContext`.

    Attributes:
        model: Hugging Face causal LM in eval mode, no parameter requires a gradient.
        family_name: key of `families.FAMILIES`.
        path: folder or hub id it was loaded from, for provenance; empty for models built in memory.
    """

    model: PreTrainedModel
    family_name: str
    path: str = ""

    @property
    def family(self) -> Family:
        """The family entry of this model."""
        return FAMILIES[self.family_name]

    @property
    def config(self) -> PreTrainedConfig:
        """The text config."""
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Device of the embedding table."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding table."""
        return self.embed_tokens.weight.dtype

    @property
    def kv_geometry(self) -> tuple[int, int, int]:
        """Key-value heads, key head size and value head size of a cache layer."""
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_key_value_heads, head_dim, head_dim

    @property
    def embed_tokens(self) -> nn.Module:
        """Input embedding, shared with the MTP modules."""
        return self.model.get_input_embeddings()

    @property
    def rotary_emb(self) -> nn.Module:
        """Rotary embedding module: `(x, position_ids) -> (cos, sin)`."""
        return self.model.base_model.rotary_emb

    def forward(self, input_ids: Tensor, *, position_ids: Tensor, context: AttentionContext) -> TargetHidden:
        """Run the decoder stack.

        Args:
            input_ids: `[B, T]` int64.
            position_ids: `[B, T]` int64.
            context: what the rows attend to; a `PagedContext` also receives the new keys and values.

        Returns:
            Hidden states before and after the final norm.
        """
        base = self.model.base_model
        captured: list[Tensor] = []
        norm = getattr(base, self.family.final_norm)
        # transformers 5.17 returns post-norm states only; a pre-hook is the portable way to the raw ones.
        handle = norm.register_forward_pre_hook(lambda _module, inputs: captured.append(inputs[0]))
        try:
            output = base(
                input_ids=input_ids,
                position_ids=position_ids,
                past_key_values=context if hasattr(context, "update") else None,
                use_cache=False,
                attention_context=context,
            )
        finally:
            handle.remove()
        return TargetHidden(pre_norm=captured[0], post_norm=output.last_hidden_state)

    def logits(self, post_norm: Tensor) -> Tensor:
        """Next-token logits `[..., V]` of hidden states `[..., D]` taken after the final norm."""
        return self.model.get_output_embeddings()(post_norm)


def wrap_target(model: PreTrainedModel, *, path: str = "") -> Target:
    """Freeze `model`, route its attention through our contexts and wrap it.

    Raises:
        ConfigError: the model's family is not supported.
    """
    model.eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    if model.device.type == "cpu" or model.dtype != torch.bfloat16:
        # grouped_mm brings nothing on a CPU and knows bfloat16 only on a GPU; the exactness tests run in float64.
        model.set_experts_implementation("eager")
    return Target(model=model, family_name=family_of(model.config.get_text_config()), path=path)


def load_target(path: str | Path, *, dtype: str = "auto", device: str = "auto") -> Target:
    """Load a frozen target from a folder or a hub id.

    Args:
        path: local folder in Hugging Face format, or a hub id.
        dtype: `auto` (bfloat16 on a GPU, else float32) or a key of `DTYPES`.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: nothing is there, the family is not supported, or `dtype` is unknown.
        EnvironmentFault: a GPU was asked for and none is usable.
    """
    place = resolve_device(device)
    check_source(str(path))
    model = AutoModelForCausalLM.from_pretrained(
        str(path), dtype=resolve_dtype(dtype, place), trust_remote_code=False, attn_implementation="eager"
    )
    return wrap_target(model.to(place), path=str(path))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Tokenizer of the target at `path` (folder or hub id)."""
    check_source(str(path))
    return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU when there is one.

    Raises:
        EnvironmentFault: `cuda` was asked for and is not usable.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFault("model.device=cuda needs a CUDA GPU, none is visible; set model.device=cpu.")
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
        raise ConfigError(f"model.dtype must be one of {['auto', *sorted(DTYPES)]}, got {dtype!r}; set model.dtype=auto.")
    return DTYPES[dtype]


def check_source(path: str) -> None:
    """Fail fast when `path` is neither a model folder, nor a cached hub id, nor reachable.

    Raises:
        ConfigError: says which of the three was tried.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path {path!r} must hold a config.json, it has none; point it at a model folder.")
        return
    looks_local = folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
    if looks_local:
        raise ConfigError(f"model.path must be a local folder or a hub id, {path!r} does not exist; set model.path.")
    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return
    try:
        socket.create_connection(_HUB_HOST, timeout=_HUB_TIMEOUT_S).close()
    except OSError as fault:
        raise ConfigError(
            f"model.path {path!r} is no local folder, is not in the hub cache, and the hub cannot be reached (offline); "
            "download it where there is a network and set model.path to the folder."
        ) from fault
