"""A chain of compiled decode layers' products with the small kernels between, for `bench_few_rows`.

A product alone shows how well it uses the memory while it runs. In a step, memory idles from the
last load of one product to the first of the next; the chain shows that, and what launches give back
that overlap the kernel in front of them: our product's always do, the compiler's where asked for.
Letters: T rows.
"""

from __future__ import annotations

import functools
import sys
from typing import Literal, NamedTuple

import torch
from mtp_research.kernels.bench_timing import time_calls
from mtp_research.kernels.products.few_rows_product import (
    choose_config,
    choose_gated_config,
    few_rows_product,
)
from torch import Tensor
from torch.nn import functional

# MiMo-7B's layer; a chain of three reads more than ten times what the L2 cache holds.
_HIDDEN, _INNER, _QKV = 4096, 11_008, 6144
_NUM_LAYERS = 3


class Variant(NamedTuple):
    """Whose products, and whether the compiler's launches overlap."""

    num_rows: int
    products: Literal["library", "ours", "ours, gated"]
    overlaps: bool


VARIANTS = (
    *(Variant(4, name, overlaps) for name in ("library", "ours") for overlaps in (False, True)),
    Variant(4, "ours, gated", True),
    *(Variant(32, name, True) for name in ("library", "ours")),
    *(Variant(128, "library", overlaps) for overlaps in (False, True)),
)


@torch.library.custom_op("mtp_research::chain_product", mutates_args=())
def chain_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Our product where the table has a program shape, else the library's."""
    config = choose_config(len(x), *weight.shape, dtype=x.dtype)
    if config is None:
        return functional.linear(x, weight)
    return few_rows_product(x, weight, config=config)


@chain_product.register_fake
def _fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("mtp_research::chain_gated", mutates_args=())
def chain_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Our gated product; only for numbers of rows that the table has."""
    config = choose_gated_config(len(x), *weight.shape, dtype=x.dtype)
    assert config is not None, "the chain asks the table first"
    return few_rows_product(x, weight, config=config, is_gated=True)


@chain_gated.register_fake
def _fake_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


def bench_chain(variant: Variant, *, read: float) -> dict[str, object]:
    """Microseconds a layer, and the largest difference from the same chain in plain PyTorch.

    Args:
        variant: what is timed.
        read: read bandwidth, TB/s.
    """
    shapes = ((_QKV, _HIDDEN), (_HIDDEN, _HIDDEN), (2 * _INNER, _HIDDEN), (_HIDDEN, _INNER))
    weights = [
        torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=shape[1] ** -0.5)
        for _ in range(_NUM_LAYERS)
        for shape in shapes
    ]
    x = torch.randn(variant.num_rows, _HIDDEN, device="cuda", dtype=torch.bfloat16)
    row = variant._asdict()
    options = {"triton.enable_pdl": True} if variant.overlaps else {}
    torch.compiler.reset()
    try:
        run = torch.compile(_layers, dynamic=False, options=options)
        timing = time_calls([functools.partial(run, x, weights, variant.products)])
    except RuntimeError as error:
        print(f"failed: {variant} {str(error)[:300]}", file=sys.stderr)
        return row
    us = timing.median_us / _NUM_LAYERS
    limit_us = sum(weight.nbytes for weight in weights) / _NUM_LAYERS / read / 1e6
    difference = run(x, weights, variant.products).float() - _layers(x, weights, "library").float()
    row |= {"us_per_layer": round(us, 2), "share": round(limit_us / us, 3)}
    return row | {"max_difference": round(difference.abs().max().item(), 4)}


def _layers(x: Tensor, weights: list[Tensor], products: str) -> Tensor:
    """Layers without attention: norm, qkv, slice, o, add, norm, gate/up, product, down, add."""
    product = functional.linear if products == "library" else chain_product
    for layer in range(_NUM_LAYERS):
        qkv, o, gate_up, down = weights[4 * layer : 4 * layer + 4]
        rows = product(functional.rms_norm(x, (_HIDDEN,)), qkv)
        x = x + product(rows[:, :_HIDDEN].sin(), o)  # stands for attention
        normed = functional.rms_norm(x, (_HIDDEN,))
        if products == "ours, gated":
            gated = chain_gated(normed, gate_up)
        else:
            rows = product(normed, gate_up)
            gated = functional.silu(rows[:, :_INNER]) * rows[:, _INNER:]
        x = x + product(gated, down)
    return x
