"""Pieces of the MTP references in float64: plain torch on released tensors, one row at a time.

Independent of `mtp_research` and of the library's modules on purpose: only a checkpoint's
`config.json` and tensors, by their published names, go in. Letters: S rows of one sequence, D
hidden size, H / Hkv heads, Dk / Dv their sizes.

Source: the formulas of DeepSeek-V3 (arXiv 2412.19437, MLA, router, MTP), RoFormer (2104.09864),
YaRN (2309.00071), and of the families' published modeling code.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

Weights = dict[str, Tensor]
LATENT_EPS = 1e-6  # of the norms inside latent attention, whatever `rms_norm_eps` is


@dataclass(frozen=True)
class Checkpoint:
    """`config.json` of a release and all its tensors, as float64."""

    config: dict
    tensors: Weights

    def under(self, prefix: str) -> Weights:
        """Tensors whose name begins with `prefix`, by the rest of it."""
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}

    @property
    def embedding(self) -> Tensor:
        """The target's, `[V, D]`."""
        names = ("model.embed_tokens.weight", "backbone.embeddings.weight")
        return next(self.tensors[name] for name in names if name in self.tensors)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Every shard of `folder`."""
    tensors: Weights = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= {name: tensor.double() for name, tensor in load_file(shard).items()}
    return Checkpoint(json.loads((folder / "config.json").read_text()), tensors)


def rms_norm(rows: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """`rows / rms(rows) * (offset + weight)` over the last axis."""
    mean_square = (rows * rows).sum(-1, keepdim=True) / rows.shape[-1]
    return rows / (mean_square + eps).sqrt() * (offset + weight)


def linear(rows: Tensor, own: Weights, name: str) -> Tensor:
    """A projection, with its bias where the checkpoint has one."""
    product = rows @ own[name + ".weight"].T
    return product + own[name + ".bias"] if name + ".bias" in own else product


def frequencies(rope: dict, num_dims: int) -> Tensor:
    """Angle per position of each rotated pair `[num_dims / 2]`, YaRN's where `rope` says so."""
    theta = rope["rope_theta"]
    plain = torch.tensor([theta ** (-2 * i / num_dims) for i in range(num_dims // 2)]).double()
    if rope["rope_type"] != "yarn":
        return plain

    def pair_with(num_turns: float) -> float:
        wavelength = rope["original_max_position_embeddings"] / (num_turns * 2 * math.pi)
        return num_dims * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(pair_with(rope["beta_fast"])), 0)
    high = min(math.ceil(pair_with(rope["beta_slow"])), num_dims - 1)
    for pair in range(num_dims // 2):
        stretched = min(max((pair - low) / max(high - low, 1e-3), 0.0), 1.0)
        plain[pair] *= (1 - stretched) + stretched / rope["factor"]
    return plain


def softmax_factor(rope: dict) -> float:
    """What YaRN multiplies attention scores by; its cosines stay 1 while both mscales are equal."""
    if rope["rope_type"] != "yarn":
        return 1.0
    assert rope["mscale"] == rope["mscale_all_dim"]
    return (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0) ** 2


def rotate(rows: Tensor, angles: Tensor, *, pairs: bool) -> Tensor:
    """Turn the first `2 n` numbers of each head `[S, H, Dk]` by `angles` `[S, n]`.

    Neighbours form a pair when `pairs`, else number i and number i + n do.
    """
    num_pairs = angles.shape[-1]
    turned, rest = rows[..., : 2 * num_pairs], rows[..., 2 * num_pairs :]
    if pairs:
        points = torch.view_as_complex(turned.unflatten(-1, (num_pairs, 2)).contiguous())
    else:
        points = torch.complex(turned[..., :num_pairs], turned[..., num_pairs:])
    points = points * torch.polar(torch.ones_like(angles), angles)[:, None]
    if pairs:
        turned = torch.view_as_real(points).flatten(-2)
    else:
        turned = torch.cat([points.real, points.imag], -1)
    return torch.cat([turned, rest], -1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one sequence, `[S, H * Dv]`.

    Args:
        query: `[S, H, Dk]`.
        key: `[S, Hkv, Dk]`, each shared by H / Hkv neighbouring query heads.
        value: `[S, Hkv, Dv]`.
        scale: factor on the scores.
        window: rows that are seen, the own one included; None for all.
        sinks: a score per head `[H]` that takes weight and gives no value.
    """
    num_rows, num_heads, _ = query.shape
    num_sharing = num_heads // key.shape[1]
    outputs = []
    for row in range(num_rows):
        seen = slice(0 if window is None else max(0, row + 1 - window), row + 1)
        for head in range(num_heads):
            scores = scale * key[seen, head // num_sharing] @ query[row, head]
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            values = value[seen, head // num_sharing]
            outputs.append(scores.softmax(0)[: values.shape[0]] @ values)
    return torch.stack(outputs).view(num_rows, -1)


@dataclass(frozen=True)
class HeadAttention:
    """Attention with keys and values per head.

    Attributes:
        head_dim: Dk.
        eps: of the norms on queries and keys, which are there when the checkpoint has them.
        rope: rotary parameters, None without rotary embedding.
        num_rotated: numbers of a head that are turned.
        pairs: whether neighbours are turned together.
        window: rows that are seen, None for all.
        norm_offset: what those norms add to their weights.
        value_scale: factor on values.
        gated: whether `q_proj` holds a gate behind each head's query.
    """

    head_dim: int
    eps: float
    rope: dict | None
    num_rotated: int = 0
    pairs: bool = False
    window: int | None = None
    norm_offset: float = 0.0
    value_scale: float = 1.0
    gated: bool = False

    def __call__(self, rows: Tensor, own: Weights) -> Tensor:
        query = linear(rows, own, "q_proj")
        query = query.unflatten(-1, (-1, self.head_dim * (2 if self.gated else 1)))
        query, gate = query[..., : self.head_dim], query[..., self.head_dim :]
        key = linear(rows, own, "k_proj").unflatten(-1, (-1, self.head_dim))
        value = linear(rows, own, "v_proj").unflatten(-1, (key.shape[1], -1)) * self.value_scale
        if "q_norm.weight" in own:
            query = rms_norm(query, own["q_norm.weight"], self.eps, offset=self.norm_offset)
            key = rms_norm(key, own["k_norm.weight"], self.eps, offset=self.norm_offset)
        if self.rope is not None:
            turns = frequencies(self.rope, self.num_rotated)
            angles = torch.arange(rows.shape[0]).double()[:, None] * turns
            query, key = (rotate(part, angles, pairs=self.pairs) for part in (query, key))
        output = attend(
            query,
            key,
            value,
            scale=self.head_dim**-0.5,
            window=self.window,
            sinks=own.get("attention_sink_bias"),
        )
        if self.gated:
            output = output * gate.flatten(1).sigmoid()
        if "g_proj.weight" in own:  # one gate for a whole head
            gate = linear(rows, own, "g_proj").sigmoid()
            output = (output.unflatten(-1, (gate.shape[1], -1)) * gate[..., None]).flatten(1)
        return linear(output, own, "o_proj")


def latent_attention(
    rows: Tensor, own: Weights, config: dict, *, scales_latents: bool = False
) -> Tensor:
    """DeepSeek's multi-head latent attention; LongCat also scales the two latents."""
    nope, rope_dim = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    rope, rank = config["rope_parameters"], config["kv_lora_rank"]
    query_latent = rms_norm(linear(rows, own, "q_a_proj"), own["q_a_layernorm.weight"], LATENT_EPS)
    query = linear(query_latent, own, "q_b_proj").unflatten(-1, (-1, nope + rope_dim))
    joint = linear(rows, own, "kv_a_proj_with_mqa")
    latent = rms_norm(joint[:, :rank], own["kv_a_layernorm.weight"], LATENT_EPS)
    if scales_latents:
        query = query * (rows.shape[1] / config["q_lora_rank"]) ** 0.5
        latent = latent * (rows.shape[1] / rank) ** 0.5
    angles = torch.arange(rows.shape[0]).double()[:, None] * frequencies(rope, rope_dim)
    pairs = config.get("rope_interleave", True)
    query_turned = rotate(query[..., nope:], angles, pairs=pairs)
    key_turned = rotate(joint[:, None, rank:], angles, pairs=pairs)
    expanded = linear(latent, own, "kv_b_proj").unflatten(-1, (query.shape[1], -1))
    key = torch.cat([expanded[..., :nope], key_turned.expand(-1, query.shape[1], -1)], -1)
    output = attend(
        torch.cat([query[..., :nope], query_turned], -1),
        key,
        expanded[..., nope:],
        scale=(nope + rope_dim) ** -0.5 * softmax_factor(rope),
    )
    return linear(output, own, "o_proj")


def swiglu(rows: Tensor, own: Weights, prefix: str = "") -> Tensor:
    """Gated MLP."""
    gate = linear(rows, own, prefix + "gate_proj")
    return linear(
        gate * gate.sigmoid() * linear(rows, own, prefix + "up_proj"), own, prefix + "down_proj"
    )


def squared_relu(rows: Tensor, own: Weights, prefix: str = "") -> Tensor:
    """MLP of two matrices."""
    return linear(
        linear(rows, own, prefix + "up_proj").clamp(min=0) ** 2, own, prefix + "down_proj"
    )
