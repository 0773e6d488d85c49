"""The frozen target model: loading, and the one forward call that training and decoding share.

Letters: B batch rows (1 when decoding), T packed rows, D hidden, V vocabulary.
"""

import functools
import hashlib
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mtp_research.config.schema import FP8_SUFFIX
from mtp_research.data.prompt_text import ChatTokenizer, Message, chat_ids, completion_ids
from mtp_research.models.attention.attention import ATTENTION_NAME, AttentionContext
from mtp_research.models.attention.paged import route_sparse
from mtp_research.models.block import block_kv_layer, kv_layers
from mtp_research.models.experts import route_experts
from mtp_research.models.families import (
    FAMILIES,
    exact_rotary_tokens,
    family_of,
    fix_rotary,
    require_exact,
)
from mtp_research.models.family import Family, LayerGeometry
from mtp_research.models.fp8_layers import holds_fp8
from mtp_research.models.loading.gguf import unpacked
from mtp_research.models.loading.load_weights import Placing, load_weights, loading
from mtp_research.models.loading.parts import Layers
from mtp_research.models.loading.placement import (
    require_one_device,
    resolve_device,
    resolve_dtype,
)
from mtp_research.models.loading.source import local_file, split_hub_id
from mtp_research.models.rank_parts import RankParts, RowExchange, whole_of
from mtp_research.models.recurrent import mixers_of, route_mixers
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.provenance import resolve_path

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.tiktoken")  # of any kind of tokenizer
_NUM_TEXT_DIMS = 2  # of `[B, T]` positions that are the same on every axis
_NUM_HASHED_ROWS = 1024  # of each matrix; all of a large vocabulary would cost seconds
# Sizes that every version of transformers calls the same. No rotary settings: a longer context
# changes them, and the head stays the model's.
_CONFIG_FIELDS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "rms_norm_eps",
)


class TargetHidden(NamedTuple):
    """Target hidden states of one pass, before and after the final norm, each `[B, T, D]`."""

    pre_norm: Tensor
    post_norm: Tensor


@dataclass(frozen=True, repr=False)
class Target:
    """A frozen causal language model whose attention goes through an `AttentionContext`."""

    model: PreTrainedModel  # Hugging Face causal LM in eval mode, no parameter requires a gradient
    family_name: str  # key of `families.FAMILIES`
    path: str = ""  # folder or hub id it was loaded from; empty for models built in memory
    num_left_out: int = 0  # decoder layers without weights: hidden states come from elsewhere
    split: RankParts | None = None  # how ranks split it; None for a whole one
    # Where the hook on the final norm leaves its input during `forward`: a place for each thread,
    # since decoders of several may share a target, and one for what `torch.compile` traces.
    captured: threading.local = field(default_factory=threading.local, repr=False, compare=False)
    traced: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        """One line; the model's own repr is its whole tree of modules."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"Target({self.path or 'in memory'!r}, {self.family_name}, {count / 1e6:,.1f} M "
            f"parameters, {dtype} on {self.device})"
        )

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

    @functools.cached_property
    def holds_fp8(self) -> bool:
        """Whether some weights are FP8, kept as they were stored."""
        return holds_fp8(self.model)

    @property
    def final_norm(self) -> nn.Module:
        """The norm behind the last decoder layer."""
        return self.model.base_model.get_submodule(self.family.final_norm)

    @property
    def parts(self) -> RankParts | None:
        """How ranks that decode the same requests split it; None where a rank has whole logits."""
        return None if self.exchange is not None else self.split

    @property
    def exchange(self) -> RowExchange | None:
        """What ranks do that share its experts and decode requests of their own; else None."""
        return None if self.split is None else self.split.exchange

    @functools.cached_property
    def kv_layers(self) -> tuple[LayerGeometry, ...]:
        """What each cache layer keeps of a token; layers without attention keep nothing."""
        require_one_device(self.model)
        return kv_layers(self.model, self.family)

    @functools.cached_property
    def draft_kv_layer(self) -> LayerGeometry:
        """What a cache layer of an MTP module keeps of a token."""
        return block_kv_layer(self.model, self.family, parts=self.parts)

    @property
    def max_exact_tokens(self) -> int | None:
        """Longest text that is computed as the model means it; None where there is no limit."""
        limits = [self.config.index_topk] if self.family.sparse_attention else []
        if (by_rotary := exact_rotary_tokens(self.config)) is not None:
            limits.append(by_rotary)
        return min(limits, default=None)

    @property
    def mixers(self) -> dict[int, nn.Module]:
        """Recurrent layers by layer index; empty for targets of attention layers only."""
        return mixers_of(self.model, self.family.mixer)

    @property
    def has_recurrent_state(self) -> bool:
        """Whether some layers keep a state instead of rows: it cannot be shared by prefix."""
        return bool(self.mixers)

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer beside the model, read when it is first used: token ids need none.

        Raises:
            ConfigError: there is none.
        """
        if not self.path:
            raise ConfigError(
                "text needs a tokenizer, got a target that was built in memory, which has none; "
                "pass token ids, or load the target from a folder with load_target(PATH)."
            )
        folder = Path(self.path)
        if folder.is_dir() and not any(any(folder.glob(name)) for name in _TOKENIZER_FILES):
            raise ConfigError(
                f"text needs a tokenizer, got a target without one in {self.path!r}; copy the "
                f"model's tokenizer files ({TOKENIZER_FILE} ...) there, or pass token ids."
            )
        return load_tokenizer(self.path)

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a text that is to be continued, or of messages that are to be answered.

        Raises:
            ConfigError: there is no tokenizer, or none with a chat template that takes these.
        """
        tokenizer = cast(ChatTokenizer, self.tokenizer)  # fields set at run time
        if isinstance(prompt, str):
            return completion_ids(prompt, tokenizer)
        return chat_ids(prompt, tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return cast(
            str,
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
        )

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
        """Weight of `lm_head`, `[V, D]`; of one that ranks split, gathered by all of them."""
        return whole_of(cast(Tensor, self.lm_head.weight), self.parts, dim=0)

    @property
    def embed_weight(self) -> Tensor:
        """Weight of the input embedding, `[V, D]`, likewise."""
        return whole_of(cast(Tensor, self.embed_tokens.weight), self.parts, dim=0)

    def position_embeddings(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cos and sin `[B, T, rotary_dim]` for the block of an MTP module.

        Args:
            hidden: any `[B, T, D]`; gives dtype and device.
            position_ids: `[B, T]` int64, or `[axes, B, T]` where they differ by axis.
        """
        rotary_emb = getattr(self.model.base_model, "rotary_emb", None)
        if rotary_emb is None:  # a family whose attention knows no positions
            nothing = hidden.new_empty(*hidden.shape[:-1], 0)
            return nothing, nothing
        axes, layer_type = self.family.num_position_axes, self.family.block_layer_type
        if axes > 1 and position_ids.dim() == _NUM_TEXT_DIMS:
            position_ids = position_ids.expand(axes, *position_ids.shape)
        if layer_type is None:
            return rotary_emb(hidden, position_ids)
        return rotary_emb(hidden, position_ids, layer_type)

    def forward(
        self, input_ids: Tensor, *, position_ids: Tensor, context: AttentionContext
    ) -> TargetHidden:
        """Run the decoder stack.

        Args:
            input_ids: `[B, T]` int64.
            position_ids: `[B, T]` int64, or `[axes, B, T]` where they differ by axis.
            context: what the rows attend to; a `PagedContext` also receives the new keys and
                values.

        Returns:
            Hidden states before and after the final norm.

        Raises:
            ConfigError: layers were left out when the target was loaded.
        """
        if self.num_left_out:
            raise ConfigError(
                f"hidden states need all layers of the target, got {self.num_left_out} without "
                "weights, as for training from data.hidden_cache; load it with layers='all'."
            )
        output = self.model.base_model(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=context if hasattr(context, "update") else None,
            use_cache=False,
            attention_context=context,
        )
        last = output.last_hidden_state
        seen = self._seen()
        if "pre_norm" not in seen:  # the model alone is compiled, this method is not
            seen = self.traced
        return TargetHidden(seen.pop("pre_norm").to(last.device), last)

    def _seen(self) -> dict[str, Tensor]:
        return self.traced if torch.compiler.is_compiling() else vars(self.captured)

    def logits(self, post_norm: Tensor) -> Tensor:
        """Next-token logits `[..., V]` of hidden states `[..., D]` taken after the final norm."""
        return whole_of(self.own_logits(post_norm), self.parts)

    def own_logits(self, post_norm: Tensor) -> Tensor:
        """As `logits`, of the tokens whose rows of `lm_head` lie on this rank, `[..., V / n]`."""
        return self.lm_head(post_norm)


def wrap_target(
    model: PreTrainedModel,
    *,
    path: str = "",
    family_name: str | None = None,
    experts: str = "auto",
    num_left_out: int = 0,
    split: RankParts | None = None,
) -> Target:
    """Freeze `model`, route its attention through our contexts and wrap it.

    Args:
        model: a causal LM.
        path: where it was loaded from.
        family_name: key of `families.FAMILIES`; None goes by the model type.
        experts: what runs expert layers, see `experts.route_experts`.
        num_left_out: decoder layers without weights.
        split: how ranks split it; None for a whole one.

    Raises:
        ConfigError: the model's family, or a setting of it, is not supported.
    """
    require_exact(model.config.get_text_config())
    model.eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    fix_rotary(model)
    route_experts(model, experts=experts)
    family_name = family_name or family_of(model.config.get_text_config().model_type)
    target = Target(model, family_name, path=path, num_left_out=num_left_out, split=split)
    _keep_pre_norm(target)
    route_mixers(target.mixers.values())
    if target.family.sparse_attention:
        layers = cast(nn.ModuleList, model.base_model.layers)
        attentions = [layer.get_submodule(target.family.attention) for layer in layers]
        route_sparse(attentions, config=target.config)
    return target


def trained_target(model: PreTrainedModel) -> Target:
    """A target that is still being trained: neither frozen nor routed through our contexts."""
    target = Target(model, family_of(model.config.get_text_config().model_type))
    _keep_pre_norm(target)
    return target


def _keep_pre_norm(target: Target) -> None:
    """Let `forward` see what the final norm is given.

    transformers 5.17 returns post-norm states only; a pre-hook gives the raw ones everywhere, and
    one that stays can be compiled.
    """
    norm = target.final_norm
    norm.register_forward_pre_hook(
        lambda _module, inputs: target._seen().update(pre_norm=inputs[0])
    )


def load_target(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    tp_plan: str = "none",
    device_map: str | Mapping[str, int | str] = "none",
    experts: str = "auto",
    layers: Layers = "all",
    weights: str = "stored",
) -> Target:
    """Load a frozen target from a folder, a GGUF file or a hub id.

    Ranks that split it read what they keep of the files, and a fault of one ends all of them.

    Args:
        path: local folder in Hugging Face format, a `.gguf` file, or a hub id. A relative one is
            looked for in the working directory, then among the shipped files
            (`assets/lab_tiny/target`).
        dtype: `auto` (bfloat16 on a GPU, else float32), or a key of `placement.DTYPES` such as
            `bfloat16`, or the dtype itself (`torch.bfloat16`).
        device: `auto`, `cpu` or `cuda`.
        tp_plan: `none`, or `tensor` or `experts` to split it over the processes of torchrun, or
            `data` to share its experts alone among processes with requests of their own.
        device_map: `none`, or `auto` or devices by module name to spread it over one process's.
        experts: `auto`, `fused` or `grouped_mm`; see `experts.route_experts`.
        layers: `all`; for heads that train from cached hidden states `none`, or `last` for those
            that modules can start from. The others then have no weights and `forward` is refused.
            `sharded` spreads all over the processes of torchrun, gathered when they run.
        weights: `stored`, or `random` for a folder that needs no more than a `config.json`: the
            same for any number of ranks, of no use but to rehearse a run.
            `stored_fp8` and `random_fp8` keep what is stored as FP8, on one device: `kept_fp8`.

    Raises:
        ConfigError: nothing is there, or the family or an argument is not supported.
        IntegrityError: a file is damaged, or a tensor is missing or of another shape.
        EnvironmentFault: a GPU was asked for and none is usable.
    """
    path, place = unpacked(resolve_path(str(path))), resolve_device(device)
    source = weights.removesuffix(FP8_SUFFIX)
    placing = Placing(
        place,
        resolve_dtype(dtype, place),
        tp_plan=tp_plan,
        device_map=device_map,
        layers=layers,
        weights=source,
        keep_fp8=source != weights,
    )
    model, family_name, num_left_out, split = load_weights(path, placing=placing)
    return wrap_target(
        model,
        path=path,
        family_name=family_name,
        experts=experts,
        num_left_out=num_left_out,
        split=split,
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Tokenizer of the target at `path` (folder, GGUF file or hub id).

    Raises:
        ConfigError: nothing is there.
        IntegrityError: its files are damaged.
    """
    path = unpacked(resolve_path(str(path)))
    with loading(path):
        name, revision = split_hub_id(path)
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)


def target_hashes(target: Target) -> dict[str, str | None]:
    """sha256 of the target's config, weights and tokenizer, by the names that `head.json` has.

    They survive a change of dtype, files or quantisation. Sizes alone do not tell a model from its
    fine-tuned sibling, on which heads still run and merely draft badly. Seen are other embedding or
    lm_head weights; a model whose training left both alone (LoRA on the attention, say) has the
    same hashes.
    """
    sizes = {name: _size(target.config, name) for name in _CONFIG_FIELDS}
    return {
        "config_sha256": _hash_json(sizes),
        "weights_sha256": _hash_signs(target.embed_weight, target.lm_head_weight),
        "tokenizer_sha256": hash_tokenizer(target.path),
    }


def _size(config: PreTrainedConfig, name: str) -> object:
    """A config field; a list where layers differ, and the library gives no single value."""
    if config.is_heterogeneous:
        return [getattr(layer, name, None) for layer in config.per_layer_config]
    return getattr(config, name, None)


def warn_of_family(target: Target, *, family: str) -> None:
    """Warn of a run whose record will name another `model.family` than the one that was loaded."""
    if target.family_name != family:
        logger.warning(
            "model.path holds a %s model and the run is recorded as model.family=%s; "
            "set model=NAME",
            target.family_name,
            family,
        )


def _hash_signs(*matrices: Tensor) -> str:
    """Hash of spread rows' signs: rounding to another dtype keeps them, training does not."""
    digest = hashlib.sha256()
    for matrix in matrices:
        step = -(-matrix.shape[0] // _NUM_HASHED_ROWS)
        signs = torch.signbit(matrix.detach()[::step]).cpu()
        digest.update(signs.numpy().tobytes())
    return digest.hexdigest()


def hash_tokenizer(path: str) -> str | None:
    """Hash of which token has which id; how a library version writes the file does not matter.

    None for a model, folder or hub id, without a tokenizer at hand.
    """
    file = local_file(path, TOKENIZER_FILE) if path else None
    if file is None:
        return None
    content = _read_tokenizer(file)
    try:
        added = [(token["id"], token["content"]) for token in content.get("added_tokens", [])]
        return _hash_json([content["model"]["vocab"], sorted(added)])
    except (KeyError, TypeError, AttributeError) as fault:
        raise IntegrityError(
            f"{file} must hold model.vocab and added_tokens, got {fault!r}; fetch the model again."
        ) from fault


def _read_tokenizer(file: Path) -> Mapping:
    try:
        return json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError) as fault:
        raise IntegrityError(
            f"{file} must be a tokenizer in JSON, got {fault}; fetch the model again."
        ) from fault


def _hash_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
