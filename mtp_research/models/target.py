"""The frozen target model: loading, and the one forward call that training and decoding share.

Letters: B batch rows (1 when decoding), T packed rows, D hidden, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mtp_research.errors import ConfigError, EnvironmentFault
from mtp_research.models.attention import ATTENTION_NAME, AttentionContext
from mtp_research.models.families import FAMILIES, Family, family_of
from mtp_research.models.loading import loading, require_tensors

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


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
        return cast(Tensor, self.embed_tokens.weight).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding table."""
        return cast(Tensor, self.embed_tokens.weight).dtype

    @property
    def kv_geometry(self) -> tuple[int, int, int]:
        """Key-value heads, key head size and value head size of a cache layer."""
        config = self.config
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        return config.num_key_value_heads, head_dim, head_dim

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation, by the model's generation config."""
        settings = self.model.generation_config
        ends = None if settings is None else settings.eos_token_id
        if ends is None:
            return ()
        return tuple(ends) if isinstance(ends, list) else (ends,)

    @property
    def embed_tokens(self) -> nn.Module:
        """Input embedding, shared with the MTP modules."""
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Module:
        """Output projection `[D] -> [V]`, shared with the MTP modules."""
        lm_head = self.model.get_output_embeddings()
        assert lm_head is not None, f"{type(self.model).__name__} must be a causal LM with lm_head"
        return lm_head

    @property
    def lm_head_weight(self) -> Tensor:
        """Weight of `lm_head`, `[V, D]`."""
        return cast(Tensor, self.lm_head.weight)

    @property
    def rotary_emb(self) -> nn.Module:
        """Rotary embedding module: `(x, position_ids) -> (cos, sin)`."""
        return cast(nn.Module, self.model.base_model.rotary_emb)

    def forward(
        self, input_ids: Tensor, *, position_ids: Tensor, context: AttentionContext
    ) -> TargetHidden:
        """Run the decoder stack.

        Args:
            input_ids: `[B, T]` int64.
            position_ids: `[B, T]` int64.
            context: what the rows attend to; a `PagedContext` also receives the new keys and
                values.

        Returns:
            Hidden states before and after the final norm.
        """
        base = self.model.base_model
        captured: list[Tensor] = []
        norm = getattr(base, self.family.final_norm)
        # transformers 5.17 returns post-norm states only; a pre-hook gives the raw ones everywhere.
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
        return self.lm_head(post_norm)


def wrap_target(model: PreTrainedModel, *, path: str = "") -> Target:
    """Freeze `model`, route its attention through our contexts and wrap it.

    Raises:
        ConfigError: the model's family is not supported.
    """
    model.eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    if model.device.type == "cpu" or model.dtype != torch.bfloat16:
        # grouped_mm brings nothing on a CPU and knows bfloat16 only on a GPU; the exactness tests
        # run in float64.
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
        IntegrityError: a file is damaged, or a tensor is missing or of another shape.
        EnvironmentFault: a GPU was asked for and none is usable.
    """
    place = resolve_device(device)
    with loading(str(path)):
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        family_of(config.get_text_config())  # refuses before gigabytes are read
        loaded = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=resolve_dtype(dtype, place),
            trust_remote_code=False,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    model, report = cast(tuple[Any, dict[str, set[str]]], loaded)
    require_tensors(report, path=str(path))
    return wrap_target(model.to(place), path=str(path))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Tokenizer of the target at `path` (folder or hub id).

    Raises:
        ConfigError: nothing is there.
        IntegrityError: its files are damaged.
    """
    with loading(str(path)):
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)


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
