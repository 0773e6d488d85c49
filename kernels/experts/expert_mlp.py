"""A mixture-of-experts MLP, forward only: routing, both products and their epilogues, fused.

Where it sits: `models/experts.py` calls it for frozen experts on a GPU. A library's grouped product
has memory-bound passes around it (sort, gather, activation, weighting, scatter) which cost more
than the product for narrow experts, and at a few tokens a step it leaves bandwidth unused.
Maths: out[t] = sum_j w[t, j] * down[e] (silu(gate[e] x[t]) * (up[e] x[t])), e = index[t, j].
Layout: `[gate; up]` rows of an expert follow each other, as transformers 5 stores them. Pairs of a
token and an expert are sorted into tiles of one expert (`expert_routing`); outputs are scattered
to `[T, top_k, H]` and added up in that order, so results do not depend on the launch.
Letters: T tokens, P pairs, E experts, H hidden size, I inner size of an expert.
Source: fused MoE kernels of serving engines; shapes and epilogues are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.splits import ceil_div
from mtp_research.kernels.experts.expert_mlp_triton import down_kernel, gate_up_kernel
from mtp_research.kernels.experts.expert_routing import MAX_EXPERTS, route_pairs
from torch import Tensor

if TYPE_CHECKING:
    from mtp_research.kernels.products.invariant_matmul import PairTiles

_ALL_TILES = 1 << 20


class ProductConfig(NamedTuple):
    """Compile-time shape of one program of a product."""

    block_n: int  # outputs; of gate and of up as many each
    block_k: int  # depth of a step
    num_warps: int
    num_stages: int
    group_tiles: int = _ALL_TILES  # tiles that walk all outputs together


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


def expert_pairs_ref(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Plain PyTorch, one expert at a time, in the dtype of `x`. As `expert_pairs`."""
    out = x.new_zeros(*top_k_index.shape, x.shape[1])
    for expert in top_k_index.unique().tolist():
        token, choice = torch.where(top_k_index == expert)
        gate_up = x[token] @ gate_up_proj[expert].to(x.dtype).mT
        gate, up = gate_up.chunk(2, dim=-1)
        outputs = (torch.nn.functional.silu(gate) * up) @ down_proj[expert].to(x.dtype).mT
        weights = top_k_weights[token, choice, None]
        out[token, choice] = (outputs * weights).to(x.dtype)
    return out


def expert_mlp(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Output `[T, H]` of the experts; args as in `expert_pairs`.

    The sum over a token's experts is PyTorch's, which adds up in float32 and in the order of
    `top_k_index`: under `torch.compile` it joins the additions that follow.
    """
    pairs = expert_pairs(x, gate_up_proj, down_proj, top_k_index, top_k_weights, backend=backend)
    return pairs.sum(dim=1)


def expert_pairs(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Weighted output of every pair of a token and an expert; one node for `torch.compile`.

    Never synchronises with the device on Triton. No gradient flows back.

    Args:
        x: `[T, H]`, last dimension contiguous.
        gate_up_proj: `[E, 2I, H]`, contiguous, dtype of `x`; rows of gate, then of up.
        down_proj: `[E, H, I]`, contiguous, dtype of `x`.
        top_k_index: `[T, top_k]` int64 in [0, E).
        top_k_weights: `[T, top_k]`, any floating dtype.
        backend: `auto`, `reference` or `triton`.

    Returns:
        `[T, top_k, H]` in the dtype of `x`.
    """
    return _expert_pairs_op(x, gate_up_proj, down_proj, top_k_index, top_k_weights, backend)


@torch.library.custom_op("mtp_research::expert_pairs", mutates_args=())
def _expert_pairs_op(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    backend: str,
) -> torch.Tensor:
    _check_operands(x, gate_up_proj, down_proj, top_k_index, top_k_weights)
    if checks.resolve_backend(backend, tensor=x, kernel=gate_up_kernel) == "reference":
        return expert_pairs_ref(x, gate_up_proj, down_proj, top_k_index, top_k_weights)
    _check_layout(x, gate_up_proj, down_proj)
    out = x.new_empty(*top_k_index.shape, x.shape[1])
    if out.numel():
        launch_expert_pairs(x, gate_up_proj, down_proj, top_k_index, top_k_weights, out=out)
    return out


@_expert_pairs_op.register_fake
def _expert_pairs_fake(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, *_: object
) -> Tensor:
    return x.new_empty(*top_k_index.shape, x.shape[1])


def _check_operands(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> None:
    checks.check_rank("x", x, letters="[T, H]")
    checks.check_rank("down_proj", down_proj, letters="[E, H, I]")
    checks.check_rank("top_k_index", top_k_index, letters="[T, top_k]")
    num_experts, _, inner_size = down_proj.shape
    hidden_size = x.shape[1]
    shape = (num_experts, hidden_size, inner_size)
    checks.check_shape("down_proj", down_proj, shape=shape, letters="[E, H, I]")
    shape = (num_experts, 2 * inner_size, hidden_size)
    checks.check_shape("gate_up_proj", gate_up_proj, shape=shape, letters="[E, 2I, H]")
    shape = (len(x), top_k_index.shape[1])
    checks.check_shape("top_k_index", top_k_index, shape=shape, letters="[T, top_k]")
    checks.check_shape("top_k_weights", top_k_weights, shape=shape, letters="[T, top_k]")
    checks.check_dtype("top_k_index", top_k_index, dtype=torch.int64)
    for name, tensor in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        checks.check_dtype(name, tensor, dtype=x.dtype)
        checks.check_device(name, tensor, device=x.device)
    for name, tensor in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
        checks.check_device(name, tensor, device=x.device)


def _check_layout(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
    checks.check_kernel_dtype("x", x, kernel=gate_up_kernel)
    checks.check_last_dim_contiguous("x", x)
    for name, tensor in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous for backend 'triton', got strides {tensor.stride()}; "
                "call .contiguous() or use backend='reference'."
            )
    if len(down_proj) > MAX_EXPERTS:
        raise ValueError(
            f"E must be <= {MAX_EXPERTS} for backend 'triton', got {len(down_proj)}; "
            "use backend='reference'."
        )
