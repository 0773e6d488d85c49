"""One MTP module of each published family, written from its formulas on its released tensors.

A reference gets what a release has (`config.json`, tensors by published name) and must not use
`mtp_research` or the library: it is what the loaded module is compared with. Every family is

    x = proj(concat(norm_e(embedding), norm_h(hidden)))
    y = decoder layer of the family (x)
    normed = last_norm(y);  logits = head(normed)

Letters: S rows of one sequence from position 0, D hidden size, V vocabulary.
Source: vLLM `*_mtp.py`, SGLang `*_nextn.py`, the vendors' modeling code, DeepSeek-V3's
`README_WEIGHTS.md`; for the MTP layer of EXAONE also TensorRT-LLM and Megatron-Bridge.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.heads.reference_experts import deepseek_moe, hunyuan_moe
from tests.heads.reference_parts import (
    Checkpoint,
    HeadAttention,
    Weights,
    latent_attention,
    linear,
    rms_norm,
    swiglu,
)

Part = Callable[[Tensor, Weights], Tensor]


class Passed(NamedTuple):
    """Result of one pass of a module.

    Attributes:
        normed: `[S, D]` behind the last norm.
        logits: `[S, V]`.
        recycled: `[S, D]`, what the next pass reads as its hidden state.
    """

    normed: Tensor
    logits: Tensor
    recycled: Tensor


class Inputs(NamedTuple):
    """Rows of one pass: embeddings of the next tokens and hidden states, each `[S, D]`."""

    embeddings: Tensor
    hidden: Tensor


Reference = Callable[[Checkpoint, int, Inputs], Passed]


def head(checkpoint: Checkpoint, normed: Tensor, *, recycled: Tensor | None = None) -> Passed:
    """Logits by the target's head, which may be its embedding; `normed` is recycled by default."""
    weight = checkpoint.tensors.get("lm_head.weight", checkpoint.embedding)
    return Passed(normed, normed @ weight.T, normed if recycled is None else recycled)


def decoder_layer(
    rows: Tensor,
    own: Weights,
    *,
    attention: Part,
    mlp: Part,
    eps: float,
    offset: float = 0.0,
    second_norm: str = "post_attention_layernorm",
    mlp_prefix: str = "mlp.",
) -> Tensor:
    """The usual two residual branches, each behind a norm."""
    for norm, prefix, part in (
        ("input_layernorm", "self_attn.", attention),
        (second_norm, mlp_prefix, mlp),
    ):
        part_own = {n.removeprefix(prefix): t for n, t in own.items() if n.startswith(prefix)}
        normed = rms_norm(rows, own[norm + ".weight"], eps, offset=offset)
        rows = rows + part(normed, part_own)
    return rows


def deepseek_wrapped(
    checkpoint: Checkpoint,
    module: int,
    inputs: Inputs,
    *,
    attention: Part,
    mlp: Part,
    last_norm: str = "shared_head.norm",
) -> Passed:
    """Modules that are stored as layers behind the last one."""
    config = checkpoint.config
    eps = config["rms_norm_eps"]
    own = checkpoint.under(f"model.layers.{config['num_hidden_layers'] + module}.")
    embedding = rms_norm(inputs.embeddings, own["enorm.weight"], eps)
    hidden = rms_norm(inputs.hidden, own["hnorm.weight"], eps)
    rows = linear(torch.cat([embedding, hidden], -1), own, "eh_proj")
    raw = decoder_layer(rows, own, attention=attention, mlp=mlp, eps=eps)
    return head(checkpoint, rms_norm(raw, own[last_norm + ".weight"], eps))


def deepseek(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """DeepSeek-V3 and all with its attention and experts.

    V3.2 and GLM-5 choose the best `index_topk` keys first, which are all of them up to that length.
    """
    config = checkpoint.config
    assert inputs.hidden.shape[0] <= config.get("index_topk", inputs.hidden.shape[0])
    return deepseek_wrapped(
        checkpoint,
        module,
        inputs,
        attention=lambda rows, own: latent_attention(rows, own, config),
        mlp=lambda rows, own: deepseek_moe(rows, own, config),
    )


def glm4_moe(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """GLM-4.5: attention per head, half of each head turned; Air has no norms on queries."""
    config = checkpoint.config
    rope = config["rope_parameters"]
    attention = HeadAttention(
        config["head_dim"],
        config["rms_norm_eps"],
        rope,
        num_rotated=int(config["head_dim"] * rope["partial_rotary_factor"]),
    )
    return deepseek_wrapped(
        checkpoint,
        module,
        inputs,
        attention=attention,
        mlp=lambda rows, own: deepseek_moe(rows, own, config),
    )


def hy_v3(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """Hunyuan 3."""
    config = checkpoint.config
    attention = HeadAttention(
        config["head_dim"],
        config["rms_norm_eps"],
        config["rope_parameters"],
        num_rotated=config["head_dim"],
    )
    return deepseek_wrapped(
        checkpoint,
        module,
        inputs,
        attention=attention,
        mlp=lambda rows, own: hunyuan_moe(rows, own, config),
        last_norm="final_layernorm",
    )


def longcat_flash(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """One latent attention and one dense MLP, not the target's double layer."""
    assert module == 0
    config = checkpoint.config
    eps = config["rms_norm_eps"]
    outer = checkpoint.under("model.mtp.")
    own = checkpoint.under("model.mtp.layers.0.")
    embedding = rms_norm(inputs.embeddings, own["enorm.m.weight"], eps)
    hidden = rms_norm(inputs.hidden, own["hnorm.m.weight"], eps)
    raw = decoder_layer(
        linear(torch.cat([embedding, hidden], -1), own, "eh_proj"),
        own,
        attention=lambda rows, own: latent_attention(rows, own, config, scales_latents=True),
        mlp=swiglu,
        eps=eps,
        mlp_prefix="transformer_layer.mlp.",
    )
    return head(checkpoint, rms_norm(raw, outer["norm.weight"], eps))


def mimo(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """MiMo-7B: a Qwen2 layer; the hidden state comes first in the projection's input."""
    config = checkpoint.config
    eps, head_dim = config["rms_norm_eps"], config["hidden_size"] // config["num_attention_heads"]
    own = checkpoint.under(f"model.mtp_layers.{module}.")
    embedding = rms_norm(inputs.embeddings, own["token_layernorm.weight"], eps)
    hidden = rms_norm(inputs.hidden, own["hidden_layernorm.weight"], eps)
    raw = decoder_layer(
        linear(torch.cat([hidden, embedding], -1), own, "input_proj"),
        own,
        attention=HeadAttention(head_dim, eps, config["rope_parameters"], num_rotated=head_dim),
        mlp=swiglu,
        eps=eps,
    )
    return head(checkpoint, rms_norm(raw, own["final_layernorm.weight"], eps))


def mimo_v2(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """MiMo-V2: window, sinks, a third of each head turned, scaled values."""
    config = checkpoint.config
    eps, head_dim = config["rms_norm_eps"], config["head_dim"]
    rope = config["rope_parameters"]["sliding_attention"]
    own = checkpoint.under(f"model.mtp.layers.{module}.")
    embedding = rms_norm(inputs.embeddings, own["enorm.weight"], eps)
    hidden = rms_norm(inputs.hidden, own["hnorm.weight"], eps)
    raw = decoder_layer(
        linear(torch.cat([embedding, hidden], -1), own, "eh_proj"),
        own,
        attention=HeadAttention(
            head_dim,
            eps,
            rope,
            num_rotated=int(head_dim * rope["partial_rotary_factor"]),
            window=config["sliding_window"],
            value_scale=config["attention_value_scale"],
        ),
        mlp=swiglu,
        eps=eps,
        second_norm="pre_mlp_layernorm",
    )
    return head(checkpoint, rms_norm(raw, own["final_layernorm.weight"], eps))


def step3p5(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """Step-3.5: a dense layer with a window and norms of `1 + w`; each module has its own head."""
    config = checkpoint.config
    eps, rope = config["rms_norm_eps"], config["rope_parameters"]["sliding_attention"]
    own = checkpoint.under(f"model.layers.{config['num_hidden_layers'] + module}.")
    embedding = rms_norm(inputs.embeddings, own["enorm.weight"], eps, offset=1.0)
    hidden = rms_norm(inputs.hidden, own["hnorm.weight"], eps, offset=1.0)
    raw = decoder_layer(
        linear(torch.cat([embedding, hidden], -1), own, "eh_proj"),
        own,
        attention=HeadAttention(
            config["head_dim"],
            eps,
            rope,
            num_rotated=int(config["head_dim"] * rope["partial_rotary_factor"]),
            window=config["sliding_window"],
            norm_offset=1.0,
        ),
        mlp=swiglu,
        eps=eps,
        offset=1.0,
    )
    head_own = checkpoint.under(
        f"model.layers.{config['num_hidden_layers'] + module}.transformer.shared_head."
    )
    normed = rms_norm(raw, head_own["norm.weight"], eps, offset=1.0)
    return Passed(normed, linear(normed, head_own, "output"), recycled=raw)
