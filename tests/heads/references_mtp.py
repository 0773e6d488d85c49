"""References of the families that keep one module apart, under `mtp.*` or `model.mtp_*`.

See tests/heads/references.py for what a reference is.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from tests.heads.reference_experts import nemotron_moe, qwen_moe
from tests.heads.reference_parts import (
    Checkpoint,
    HeadAttention,
    linear,
    rms_norm,
    swiglu,
)
from tests.heads.references import Inputs, Part, Passed, decoder_layer, head


def qwen_wrapped(
    checkpoint: Checkpoint,
    inputs: Inputs,
    *,
    attention: Part,
    mlp: Part = swiglu,
    offset: float = 0.0,
) -> Passed:
    """One module under Qwen's names."""
    eps = checkpoint.config["rms_norm_eps"]
    own = checkpoint.under("mtp.")
    embedding = rms_norm(inputs.embeddings, own["pre_fc_norm_embedding.weight"], eps, offset=offset)
    hidden = rms_norm(inputs.hidden, own["pre_fc_norm_hidden.weight"], eps, offset=offset)
    raw = decoder_layer(
        linear(torch.cat([embedding, hidden], -1), own, "fc"),
        checkpoint.under("mtp.layers.0."),
        attention=attention,
        mlp=mlp,
        eps=eps,
        offset=offset,
    )
    return head(checkpoint, rms_norm(raw, own["norm.weight"], eps, offset=offset))


def qwen3(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """The neutral layout on a Qwen3 layer: plain norms, a whole head turned."""
    assert module == 0
    config = checkpoint.config
    attention = HeadAttention(
        config["head_dim"],
        config["rms_norm_eps"],
        config["rope_parameters"],
        num_rotated=config["head_dim"],
    )
    return qwen_wrapped(checkpoint, inputs, attention=attention)


def qwen_gated(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """Qwen3-Next and Qwen3.5: full attention with an output gate, norms of `1 + w`.

    Text rows have the same position on each of Qwen3.5's three axes, so its rotation is the plain
    one. The MLP is dense or a mixture, as the checkpoint has it.
    """
    assert module == 0
    config = checkpoint.config
    rope = config["rope_parameters"]
    attention = HeadAttention(
        config["head_dim"],
        config["rms_norm_eps"],
        rope,
        num_rotated=int(config["head_dim"] * rope["partial_rotary_factor"]),
        norm_offset=1.0,
        gated=True,
    )
    is_dense = "mtp.layers.0.mlp.gate_proj.weight" in checkpoint.tensors
    return qwen_wrapped(
        checkpoint,
        inputs,
        attention=attention,
        mlp=swiglu if is_dense else lambda rows, own: qwen_moe(rows, own, config),
        offset=1.0,
    )


def gemma3(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """The neutral layout on a Gemma3 layer: each branch between two norms of `1 + w`."""
    assert module == 0
    config = checkpoint.config
    eps, own = config["rms_norm_eps"], checkpoint.under("mtp.")
    scaled = inputs.embeddings * config["hidden_size"] ** 0.5  # by the target's embedding layer

    def norm(rows: Tensor, name: str) -> Tensor:
        return rms_norm(rows, own[name + ".weight"], eps, offset=1.0)

    attention = HeadAttention(
        config["head_dim"],
        eps,
        config["rope_parameters"]["full_attention"],
        num_rotated=config["head_dim"],
        norm_offset=1.0,
    )
    assert config["query_pre_attn_scalar"] == config["head_dim"]
    embedding = norm(scaled, "pre_fc_norm_embedding")
    rows = linear(torch.cat([embedding, norm(inputs.hidden, "pre_fc_norm_hidden")], -1), own, "fc")
    normed = norm(rows, "layers.0.input_layernorm")
    attended = attention(normed, checkpoint.under("mtp.layers.0.self_attn."))
    rows = rows + norm(attended, "layers.0.post_attention_layernorm")
    normed = norm(rows, "layers.0.pre_feedforward_layernorm")
    gate = gelu(linear(normed, own, "layers.0.mlp.gate_proj"), approximate="tanh")
    product = gate * linear(normed, own, "layers.0.mlp.up_proj")
    fed = linear(product, own, "layers.0.mlp.down_proj")
    return head(checkpoint, norm(rows + norm(fed, "layers.0.post_feedforward_layernorm"), "norm"))


def exaone_moe(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """K-EXAONE: a dense layer of its own type, by default full attention.

    As in the target, only layers with a window have rotary embedding, unless none has a window.
    """
    assert module == 0
    config = checkpoint.config
    is_sliding = config.get("mtp_layer_types", ["full_attention"])[0] == "sliding_attention"
    is_rotary = is_sliding or "sliding_attention" not in config["layer_types"]
    window = config.get("mtp_sliding_windows", [config["sliding_window"]])[0]
    head_dim = config["head_dim"]
    attention = HeadAttention(
        head_dim,
        config["rms_norm_eps"],
        config["rope_parameters"] if is_rotary else None,
        num_rotated=head_dim,
        window=window if is_sliding else None,
    )
    return qwen_wrapped(checkpoint, inputs, attention=attention)


def ernie4_5_moe(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """ERNIE-4.5: a dense Llama layer, neighbours turned; the last norm is the target's."""
    config = checkpoint.config
    eps, head_dim = config["rms_norm_eps"], config["hidden_size"] // config["num_attention_heads"]
    norms = checkpoint.under("model.mtp_")
    embedding = rms_norm(inputs.embeddings, norms[f"emb_norm.{module}.weight"], eps)
    hidden = rms_norm(inputs.hidden, norms[f"hidden_norm.{module}.weight"], eps)
    raw = decoder_layer(
        linear(torch.cat([embedding, hidden], -1), norms, f"linear_proj.{module}"),
        checkpoint.under(f"model.mtp_block.{module}."),
        attention=HeadAttention(
            head_dim, eps, config["rope_parameters"], num_rotated=head_dim, pairs=True
        ),
        mlp=swiglu,
        eps=eps,
    )
    normed = rms_norm(raw, checkpoint.tensors["model.norm.weight"], eps)
    return head(checkpoint, normed, recycled=raw)


def nemotron_h(checkpoint: Checkpoint, module: int, inputs: Inputs) -> Passed:
    """Nemotron 3: two layers of one part each, attention without rotary embedding and a mixture."""
    assert module == 0
    config = checkpoint.config
    eps = config["layer_norm_epsilon"]
    first, second = checkpoint.under("mtp.layers.0."), checkpoint.under("mtp.layers.1.")
    embedding = rms_norm(inputs.embeddings, first["enorm.weight"], eps)
    hidden = rms_norm(inputs.hidden, first["hnorm.weight"], eps)
    rows = linear(torch.cat([embedding, hidden], -1), first, "eh_proj")
    attention = HeadAttention(config["head_dim"], eps, rope=None)
    rows = rows + attention(
        rms_norm(rows, first["norm.weight"], eps), checkpoint.under("mtp.layers.0.mixer.")
    )
    raw = rows + nemotron_moe(
        rms_norm(rows, second["norm.weight"], eps),
        checkpoint.under("mtp.layers.1.mixer."),
        config,
    )
    return head(checkpoint, rms_norm(raw, second["final_layernorm.weight"], eps))
