"""Tile shapes of the mixture-of-experts products, and their launches.

Where it sits: between `expert_mlp` (checks, reference) and `expert_mlp_triton` (programs).
Letters: T tokens, P pairs of a token and an expert, E experts, H hidden size, I inner size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mtp_research.kernels import checks
from mtp_research.kernels.expert_mlp_triton import down_kernel, gate_up_kernel
from mtp_research.kernels.expert_routing import route_pairs
from mtp_research.kernels.splits import ceil_div

if TYPE_CHECKING:
    from mtp_research.kernels.invariant_matmul import PairTiles
    from torch import Tensor

_ALL_TILES = 1 << 20


class ProductConfig(NamedTuple):
    """Compile-time shape of one program of a product.

    Attributes:
        block_n: outputs; of gate and of up as many each.
        block_k: depth of a step.
        num_warps: warps.
        num_stages: pipeline buffers.
        group_tiles: tiles that walk all outputs together.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_tiles: int = _ALL_TILES


class ExpertConfig(NamedTuple):
    """Shapes of both products, which share the tiles of pairs."""

    block_m: int
    gate_up: ProductConfig
    down: ProductConfig


def choose_expert_config(
    num_pairs: int, *, num_experts: int, inner_size: int, element_bytes: int
) -> ExpertConfig:
    """Tile shapes by the pairs that an expert has on average.

    Few pairs: weights are streamed once, and blocks are small so that enough programs are in
    flight. Many pairs: tiles of wgmma size. float32 multiplies without tensor cores.

    Args:
        num_pairs: P.
        num_experts: E.
        inner_size: I.
        element_bytes: bytes of an element, 2 or 4.
    """
    if element_bytes == 4:
        small = ProductConfig(32, 32, num_warps=4, num_stages=2)
        return ExpertConfig(16, small, small)
    pairs_an_expert = num_pairs / num_experts
    if pairs_an_expert <= 24:
        return ExpertConfig(
            16 if pairs_an_expert <= 10 else 32,
            ProductConfig(32, 128, num_warps=4, num_stages=4),
            ProductConfig(64, 128, num_warps=4, num_stages=4),
        )
    if pairs_an_expert <= 96:
        return ExpertConfig(
            64,
            ProductConfig(64, 64, num_warps=4, num_stages=4),
            ProductConfig(128, 64, num_warps=4, num_stages=4),
        )
    wide = inner_size % 128 == 0
    return ExpertConfig(
        128,
        ProductConfig(128 if wide else 64, 64, num_warps=8 if wide else 4, num_stages=3)._replace(
            group_tiles=8
        ),
        ProductConfig(128, 64, num_warps=4, num_stages=3, group_tiles=8),
    )


def launch_expert_pairs(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    out: Tensor,
    config: ExpertConfig | None = None,
) -> None:
    """Route, then both products; arguments as in `expert_mlp.expert_pairs`, writes `out`."""
    num_experts, _, inner_size = down_proj.shape
    config = config or choose_expert_config(
        top_k_index.numel(),
        num_experts=num_experts,
        inner_size=inner_size,
        element_bytes=x.element_size(),
    )
    tiles = route_pairs(
        top_k_index.reshape(-1), num_experts=num_experts, block_m=config.block_m, backend="triton"
    )
    inner = launch_gate_up(x, gate_up_proj, tiles=tiles, top_k=top_k_index.shape[1], config=config)
    launch_down(inner, down_proj, top_k_weights.reshape(-1), tiles=tiles, out=out, config=config)


def launch_gate_up(
    x: Tensor, weight: Tensor, *, tiles: PairTiles, top_k: int, config: ExpertConfig
) -> Tensor:
    """Activated inner rows `[tiles x block_m, I]` in the order of `tiles`; padding is undefined."""
    num_tiles, inner_size = len(tiles.tile_group), weight.shape[1] // 2
    inner = x.new_empty(num_tiles * config.block_m, inner_size)
    product = config.gate_up
    with checks.launch_device(x):
        gate_up_kernel[(num_tiles * ceil_div(inner_size, product.block_n),)](
            x,
            weight,
            inner,
            *tiles,
            num_tiles,
            x.stride(0),
            TOP_K=top_k,
            **product_constants(weight.shape[2], inner_size, config.block_m, product),
            num_warps=product.num_warps,
            num_stages=product.num_stages,
        )
    return inner


def launch_down(
    inner: Tensor,
    weight: Tensor,
    router_weights: Tensor,
    *,
    tiles: PairTiles,
    out: Tensor,
    config: ExpertConfig,
) -> None:
    """Weighted outputs of `inner`, scattered to their pairs in `out` `[T, top_k, H]`."""
    num_tiles, product = len(tiles.tile_group), config.down
    with checks.launch_device(inner):
        down_kernel[(num_tiles * ceil_div(weight.shape[1], product.block_n),)](
            inner,
            weight,
            router_weights,
            out,
            *tiles,
            num_tiles,
            **product_constants(*weight.shape[1:], config.block_m, product),
            num_warps=product.num_warps,
            num_stages=product.num_stages,
        )


def product_constants(
    hidden_size: int, inner_size: int, block_m: int, product: ProductConfig
) -> dict[str, int]:
    """The compile-time arguments that both kernels have, by parameter name."""
    return {
        "HIDDEN": hidden_size,
        "INNER": inner_size,
        "BLOCK_M": block_m,
        "BLOCK_N": product.block_n,
        "BLOCK_K": product.block_k,
        "GROUP_TILES": product.group_tiles,
    }
