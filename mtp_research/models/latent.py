"""Multi-head latent attention over latent pages, with the projections absorbed.

Hugging Face's layer hands the cache one latent and one rotary key per token, and afterwards calls
the attention function with keys and values of every head, expanded for this pass's rows only. We
keep the former and ignore the latter: head h's key projection is applied to the query and its value
projection to the output, so that the pages hold what all heads share. The unused expansion of the
new rows is a small product that torch.compile drops.

Letters: R requests, T packed rows, H heads, L latent, P rotary key size, Dv value head dim.
Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2, "absorbed".
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn


class AbsorbedQuery(NamedTuple):
    """Queries against a page: `[T, H, L]` for the latent, `[T, H, P]` for the rotary key."""

    latent: Tensor
    rope: Tensor


def absorb_query(module: nn.Module, query: Tensor) -> AbsorbedQuery:
    """Multiply the queries by the key projections of their heads.

    Args:
        module: attention layer with `kv_b_proj` and the head dims of its parts.
        query: `[H, T, nope + P]`, the second part rotated.
    """
    key_projection, _ = _projections(module)
    nope, rope = query.split(
        (key_projection.shape[1], query.shape[2] - key_projection.shape[1]), dim=-1
    )
    return AbsorbedQuery(torch.bmm(nope, key_projection).transpose(0, 1), rope.transpose(0, 1))


def expand_output(module: nn.Module, attended: Tensor) -> Tensor:
    """Values `[T, H, Dv]` of attended latents `[T, H, L]`."""
    _, value_projection = _projections(module)
    return torch.bmm(attended.transpose(0, 1), value_projection.mT).transpose(0, 1)


def _projections(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Key and value projections `[H, nope, L]`, `[H, Dv, L]`, views of `kv_b_proj`'s weight."""
    nope, value_dim = cast(int, module.qk_nope_head_dim), cast(int, module.v_head_dim)
    weight = cast(nn.Linear, module.kv_b_proj).weight.unflatten(0, (-1, nope + value_dim))
    return weight[:, :nope], weight[:, nope:]
