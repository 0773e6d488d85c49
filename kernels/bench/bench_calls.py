"""Attention over pages with flat keywords, as libraries beside ours take them.

Where it sits: benchmarks and tests keep one dictionary of tensors for our kernels, their references
and their peers; these functions put ours into the tuples of `attention_rows`. `key_cache` and
`value_cache`, the fields of `AttentionRows` and those of `Scoring` are keywords.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mtp_research.kernels.attention import attention_launch
from mtp_research.kernels.attention import paged_attention as pages
from mtp_research.kernels.attention.attention_rows import AttentionRows, PagedKV, Scoring
from mtp_research.kernels.latent import latent_attention as latents

if TYPE_CHECKING:
    from torch import Tensor


def _flat(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def call(*operands: Tensor, **keywords: Any) -> Tensor:
        def taken(fields: tuple[str, ...]) -> dict[str, Any]:
            return {name: keywords.pop(name) for name in fields if name in keywords}

        keywords["rows"] = AttentionRows(**taken(AttentionRows._fields))
        if "key_cache" in keywords:
            keywords["kv"] = PagedKV(keywords.pop("key_cache"), keywords.pop("value_cache"))
            keywords["scoring"] = Scoring(**taken(Scoring._fields))
        return function(*operands, **keywords)

    return call


paged_attention = _flat(pages.paged_attention)
paged_attention_ref = _flat(pages.paged_attention_ref)
attend_pages = _flat(pages.attend_pages)
launch_paged_attention = _flat(attention_launch.launch_paged_attention)
latent_attention = _flat(latents.latent_attention)
latent_attention_ref = _flat(latents.latent_attention_ref)
attend_latents = _flat(latents.attend_latents)
