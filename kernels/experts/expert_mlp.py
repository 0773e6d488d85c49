"""A mixture-of-experts MLP, forward only: routing, both products and their epilogues, fused.

Where it sits: `models/experts.py` calls it for frozen experts on a GPU. A library's grouped product
has memory-bound passes around it (sort, gather, activation, weighting, scatter) which cost more
than the product for narrow experts, and at a few tokens a step it leaves bandwidth unused.
Maths: out[t] = sum_j w[t, j] * down[e] (silu(gate[e] x[t]) * (up[e] x[t])), e = index[t, j].
Layout: `[gate; up]` rows of an expert follow each other, as transformers 5 stores them. Pairs of a
token and an expert are sorted into tiles of one expert (`expert_routing`), but for a single token
(`expert_gemv`); outputs are scattered to `[T, top_k, H]` and added up in that order, so results do
not depend on the launch. Weights may be FP8 with scales (`scaled_weights`), also where pairs are
many: plain copies of a layer of GLM-4.5-Air would take 4.4 GB.
Letters: T tokens, P pairs, E experts, H hidden size, I inner size of an expert, B edge of a scale's
block.
Source: fused MoE kernels of serving engines; shapes and epilogues are ours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.splits import ceil_div
from mtp_research.kernels.experts import expert_gemv
from mtp_research.kernels.experts.expert_mlp_triton import down_kernel, gate_up_kernel
from mtp_research.kernels.experts.expert_routing import MAX_EXPERTS, route_pairs
from mtp_research.kernels.products.few_rows_product import LINE_BYTES, NUM_EARLY_LINES
from mtp_research.kernels.products.gemv import slab_of
from mtp_research.kernels.products.scaled_weights import check_scale, dequantise, fitting_depth
from torch import Tensor

if TYPE_CHECKING:
    from mtp_research.kernels.products.invariant_matmul import PairTiles

_SMALLEST_TILE = 16  # pairs
# Pairs from which on the instruction is Hopper's, whose right operand lies in shared memory.
_WARP_GROUP_TILE = 64


class ProductConfig(NamedTuple):
    """Compile-time shape of one program of a product."""

    block_n: int  # outputs; of gate and of up as many each
    block_k: int  # depth of a step
    num_warps: int
    num_stages: int
    group_tiles: int = 1  # tiles that walk all outputs together


class ExpertConfig(NamedTuple):
    """Shapes of both products, which share the tiles of pairs."""

    block_m: int
    gate_up: ProductConfig
    down: ProductConfig


# Of FP8 weights, by the most pairs an expert. A step has half the bytes on their way, so there are
# more of them; numbers are converted once a tile, which other shapes repeat in each warp. Measured
# at GLM-4.5-Air's sizes: up to 24 pairs the fastest of ten shapes a product on one H200; more (32
# to 128 pairs, the weight on the left) the fastest of some forty on one H100, for `down` of those
# that spill no registers beside a shared expert (128 outputs a program are 2 to 11 % faster).
# Tiles of 128 pairs were no faster.
_FP8_CONFIGS = {
    10: ExpertConfig(16, ProductConfig(32, 128, 4, 5), ProductConfig(64, 128, 4, 5)),
    24: ExpertConfig(32, ProductConfig(64, 128, 4, 5), ProductConfig(64, 128, 4, 5)),
    math.inf: ExpertConfig(64, ProductConfig(64, 128, 4, 3, 8), ProductConfig(64, 128, 4, 4, 8)),
}


class ExpertScales(NamedTuple):
    """float32 scales of FP8 experts; see `scaled_weights`."""

    gate_up: Tensor  # [E, 2 ceil(I / B), ceil(H / B)]: those of gate, then of up; [E, 2I, 1], B = 0
    down: Tensor  # [E, ceil(H / B), ceil(I / B)]; [E, H, 1] for B = 0
    block: int  # B


class SharedExpert(NamedTuple):
    """Another expert of the same sizes, which pairs name by E; scales as those of one expert."""

    gate_up: Tensor  # [2I, H]
    down: Tensor  # [H, I]
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None


_NO_SHARED = (None, None, None, None)
# For any number of pairs, on which a pair's bits then do not depend: the fastest for few of them.
_INVARIANT = ExpertConfig(
    16,
    ProductConfig(32, 128, num_warps=4, num_stages=4),
    ProductConfig(64, 128, num_warps=4, num_stages=4),
)
# By the most pairs an expert; for more see `choose_expert_config`. The last one is the fastest of
# ten shapes a product at GLM-4.5-Air's and GLM-4.7-Flash's sizes on one H100. Programs that run
# beside each other take all outputs of a tile or of a few, so that weights they read lie beside
# each other: in the other order (first outputs of all tiles, then second ones) `down` was up to
# 37 % slower, the more pairs the more, and gate and up up to 4 %.
_CONFIGS = {
    10: _INVARIANT,
    24: _INVARIANT._replace(block_m=32),
    56: ExpertConfig(64, ProductConfig(64, 128, 4, 2, 8), ProductConfig(128, 128, 4, 2, 8)),
}


def choose_expert_config(
    num_pairs: int, *, num_experts: int, inner_size: int, element_bytes: int, is_fp8: bool = False
) -> ExpertConfig:
    """Tile shapes by the pairs that an expert has on average; `element_bytes` are those of rows.

    Few pairs: weights are streamed once, and blocks are small so that enough programs are in
    flight. Many pairs: tiles of wgmma size. float32 multiplies without tensor cores.
    """
    if element_bytes == 4:
        small = ProductConfig(32, 32, num_warps=4, num_stages=2)
        return ExpertConfig(16, small, small)
    pairs_an_expert = num_pairs / num_experts
    for most, config in (_FP8_CONFIGS if is_fp8 else _CONFIGS).items():
        if pairs_an_expert <= most:
            return config
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
    scales: ExpertScales | None = None,
    shared: SharedExpert | None = None,
    config: ExpertConfig | None = None,
) -> None:
    """Both products, after routing; arguments as in `expert_mlp.expert_pairs`, writes `out`.

    One token needs no routing, unless a `config` asks for tiles.
    """
    if config is None and len(x) == 1:
        operands = (x, gate_up_proj, down_proj, top_k_index, top_k_weights)
        launch_single_token(*operands, out=out, scales=scales, shared=shared)
        return
    num_experts, _, inner_size = down_proj.shape
    config = config or choose_expert_config(
        top_k_index.numel(),
        num_experts=num_experts,
        inner_size=inner_size,
        element_bytes=x.element_size(),
        is_fp8=scales is not None,
    )
    tiles = route_pairs(
        top_k_index.reshape(-1),
        num_experts=num_experts + (shared is not None),
        block_m=config.block_m,
        backend="triton",
    )
    both = {"tiles": tiles, "scales": scales, "shared": shared, "config": config}
    inner = launch_gate_up(x, gate_up_proj, top_k=top_k_index.shape[1], **both)
    launch_down(inner, down_proj, top_k_weights.reshape(-1).contiguous(), out=out, **both)


def launch_single_token(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    out: Tensor,
    scales: ExpertScales | None = None,
    shared: SharedExpert | None = None,
) -> None:
    """Both products of one token; arguments as in `expert_pairs`, writes `out`."""
    num_experts, hidden_size, inner_size = down_proj.shape
    index = top_k_index.reshape(-1).contiguous()
    inner = x.new_empty(len(index), inner_size)
    sizes = {"HIDDEN": hidden_size, "INNER": inner_size, **checks.overlapping(x.device)}
    scale_block = 0 if scales is None else scales.block
    with checks.launch_device(x):
        slab = slab_of(hidden_size, config=expert_gemv.GATE_UP, scale_block=scale_block)
        expert_gemv.gate_up_gemv_kernel[(len(index) * ceil_div(inner_size, slab["BLOCK_N"]),)](
            x,
            gate_up_proj,
            None if scales is None else scales.gate_up,
            None if shared is None else shared.gate_up,
            None if shared is None else shared.gate_up_scale,
            inner,
            index,
            num_experts,
            **sizes,
            **slab,
            num_warps=expert_gemv.GATE_UP.num_warps,
        )
        slab = slab_of(inner_size, config=expert_gemv.DOWN, scale_block=scale_block)
        expert_gemv.down_gemv_kernel[(len(index) * ceil_div(hidden_size, slab["BLOCK_N"]),)](
            inner,
            down_proj,
            None if scales is None else scales.down,
            None if shared is None else shared.down,
            None if shared is None else shared.down_scale,
            top_k_weights.reshape(-1).contiguous(),
            out,
            index,
            num_experts,
            **sizes,
            **slab,
            num_warps=expert_gemv.DOWN.num_warps,
        )


def launch_gate_up(
    x: Tensor,
    weight: Tensor,
    *,
    tiles: PairTiles,
    top_k: int,
    config: ExpertConfig,
    scales: ExpertScales | None = None,
    shared: SharedExpert | None = None,
) -> Tensor:
    """Activated inner rows `[tiles x block_m, I]` in the order of `tiles`; padding is undefined."""
    num_tiles, inner_size = len(tiles.tile_group), weight.shape[1] // 2
    inner = x.new_empty(num_tiles * config.block_m, inner_size)
    product = config.gate_up
    with checks.launch_device(x):
        gate_up_kernel[(num_tiles * ceil_div(inner_size, product.block_n),)](
            x,
            weight,
            None if scales is None else scales.gate_up,
            None if shared is None else shared.gate_up,
            None if shared is None else shared.gate_up_scale,
            inner,
            *tiles,
            num_tiles,
            len(weight),
            x.stride(0),
            TOP_K=top_k,
            **product_constants(weight.shape[2], inner_size, config.block_m, product, scales),
            **checks.overlapping(x.device),
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
    scales: ExpertScales | None = None,
    shared: SharedExpert | None = None,
) -> None:
    """Weighted outputs of `inner`, scattered to their pairs in `out` `[T, top_k, H]`.

    `launch_gate_up` must have run between the making of `tiles` and this.
    """
    num_tiles, product = len(tiles.tile_group), config.down
    with checks.launch_device(inner):
        down_kernel[(num_tiles * ceil_div(weight.shape[1], product.block_n),)](
            inner,
            weight,
            None if scales is None else scales.down,
            None if shared is None else shared.down,
            None if shared is None else shared.down_scale,
            router_weights,
            out,
            *tiles,
            num_tiles,
            len(weight),
            **product_constants(*weight.shape[1:], config.block_m, product, scales),
            **early_lines(weight.dtype, block_m=config.block_m),
            **checks.overlapping(inner.device),
            num_warps=product.num_warps,
            num_stages=product.num_stages,
        )


def product_constants(
    hidden_size: int,
    inner_size: int,
    block_m: int,
    product: ProductConfig,
    scales: ExpertScales | None = None,
) -> dict[str, int | bool]:
    """The compile-time arguments that both kernels have, by parameter name."""
    scale_block = 0 if scales is None else scales.block
    return {
        "HIDDEN": hidden_size,
        "INNER": inner_size,
        "BLOCK_M": block_m,
        "BLOCK_N": product.block_n,
        "BLOCK_K": fitting_depth(product.block_k, scale_block),
        "GROUP_TILES": product.group_tiles,
        "SCALE_BLOCK": scale_block,
        "IS_LEFT": scales is not None and block_m >= _WARP_GROUP_TILE,
    }


def early_lines(dtype: torch.dtype, *, block_m: int) -> dict[str, int]:
    """What programs of `down_kernel` ask for while `gate_up_kernel` ends, by parameter name.

    Nothing where tiles are large: of many programs only the first few start that early.
    """
    most = NUM_EARLY_LINES if block_m == _SMALLEST_TILE else 0
    return {"NUM_EARLY_LINES": most, "LINE": LINE_BYTES // dtype.itemsize}


def expert_pairs_ref(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    scales: ExpertScales | None = None,
    shared: SharedExpert | None = None,
) -> Tensor:
    """Plain PyTorch, one expert at a time, in the dtype of `x`. As `expert_pairs`."""

    def plain(weight: Tensor, scale: Tensor | None, *, num_parts: int) -> Tensor:
        parts = (
            one if one is None else one.unflatten(0, (num_parts, -1)) for one in (weight, scale)
        )
        block = 0 if scales is None else scales.block
        return dequantise(*parts, block=block, dtype=x.dtype).flatten(0, 1)

    def matrices(expert: int) -> SharedExpert:
        if shared is not None and expert == len(down_proj):
            return shared
        of_expert = (None, None) if scales is None else (s[expert] for s in scales[:2])
        return SharedExpert(gate_up_proj[expert], down_proj[expert], *of_expert)

    out = x.new_zeros(*top_k_index.shape, x.shape[1])
    num_here = len(down_proj) + (shared is not None)
    for expert in top_k_index[top_k_index < num_here].unique().tolist():
        token, choice = torch.where(top_k_index == expert)
        gate_up, down, of_gate_up, of_down = matrices(expert)
        gate, up = (x[token] @ plain(gate_up, of_gate_up, num_parts=2).mT).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        outputs = inner @ plain(down, of_down, num_parts=1).mT
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
    scales: ExpertScales | None = None,
    shared: SharedExpert | None = None,
    some_are_away: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Output `[T, H]` of the experts; args as in `expert_pairs`.

    With `some_are_away`, pairs of expert E, which lies elsewhere, count as zeros; `shared`, which
    is expert E too, does not go with it.

    The sum over a token's experts is PyTorch's, which adds up in float32 and in the order of
    `top_k_index`: under `torch.compile` it joins the additions that follow, and is written as
    additions (for 512 tokens of 8 experts the reduction took 161 us on an H100, they take 16).
    """
    if some_are_away and shared is not None:
        raise ValueError("some_are_away=True excludes shared, got both; leave one out.")
    operands = (x, gate_up_proj, down_proj, top_k_index, top_k_weights)
    outputs = expert_pairs(*operands, scales=scales, shared=shared, backend=backend)
    if some_are_away:
        outputs = outputs.masked_fill((top_k_index == len(down_proj))[..., None], 0.0)
    if not torch.compiler.is_compiling():
        return outputs.sum(dim=1)
    wide = torch.promote_types(outputs.dtype, torch.float32)
    first, *others = outputs.unbind(1)
    total = first.to(wide)
    for other in others:
        total = total + other.to(wide)
    return total.to(outputs.dtype)


def expert_pairs(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    scales: ExpertScales | None = None,
    shared: SharedExpert | None = None,
    backend: str = "auto",
) -> Tensor:
    """Weighted output of every pair of a token and an expert; one node for `torch.compile`.

    Never synchronises with the device on Triton. No gradient flows back.

    Args:
        x: `[T, H]`, last dimension contiguous.
        gate_up_proj: `[E, 2I, H]`, contiguous, dtype of `x` or FP8; rows of gate, then of up.
        down_proj: `[E, H, I]`, contiguous, dtype of `gate_up_proj`.
        top_k_index: `[T, top_k]` int64 in [0, E), or E: the shared expert's pair, which each token
            has last, and without one of undefined output.
        top_k_weights: `[T, top_k]`, any floating dtype.
        scales: of FP8 weights; None for plain ones.
        shared: expert E, FP8 with scales where the others are.
        backend: `auto`, `reference`, `triton`, or `invariant`: as `auto`, and on Triton a pair's
            bits do not depend on the others; without scales.

    Returns:
        `[T, top_k, H]` in the dtype of `x`.
    """
    operands = (x, gate_up_proj, down_proj, top_k_index, top_k_weights)
    scaled = scales or (None, None, 0)
    return _expert_pairs_op(*operands, *scaled, *(shared or _NO_SHARED), backend)


@torch.library.custom_op("mtp_research::expert_pairs", mutates_args=())
def _expert_pairs_op(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    scale_block: int,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    shared_gate_up_scale: torch.Tensor | None,
    shared_down_scale: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    operands, scales, shared = (x, gate_up_proj, down_proj, top_k_index, top_k_weights), None, None
    if gate_up_scale is not None and down_scale is not None:
        scales = ExpertScales(gate_up_scale, down_scale, scale_block)
    _check_operands(*operands, scales=scales)
    if shared_gate_up is not None and shared_down is not None:
        shared = SharedExpert(shared_gate_up, shared_down, shared_gate_up_scale, shared_down_scale)
        _check_shared(shared, gate_up_proj, down_proj, scales=scales)
    if checks.resolve_backend(backend, tensor=x, kernel=gate_up_kernel) == "reference":
        return expert_pairs_ref(*operands, scales=scales, shared=shared)
    _check_layout(x, gate_up_proj, down_proj, *(scales or ())[:2])
    out = x.new_empty(*top_k_index.shape, x.shape[1])
    if out.numel():
        config = _INVARIANT if backend == checks.INVARIANT else None
        launch_expert_pairs(*operands, scales=scales, shared=shared, out=out, config=config)
    return out


@_expert_pairs_op.register_fake
def _expert_pairs_fake(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, *_: object
) -> Tensor:
    return x.new_empty(*top_k_index.shape, x.shape[1])


def _check_operands(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    scales: ExpertScales | None,
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
    if scales is not None:
        fits = {"block": scales.block}
        check_scale("gate_up_proj", gate_up_proj, scales.gate_up, num_parts=2, **fits)
        check_scale("down_proj", down_proj, scales.down, **fits)
    for name, tensor in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        checks.check_dtype(name, tensor, dtype=x.dtype if scales is None else tensor.dtype)
        checks.check_device(name, tensor, device=x.device)
    for name, tensor in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
        checks.check_device(name, tensor, device=x.device)


def _check_shared(
    shared: SharedExpert, gate_up_proj: Tensor, down_proj: Tensor, *, scales: ExpertScales | None
) -> None:
    """Each tensor of a shared expert is like one expert's of the others."""
    wanted = (gate_up_proj, down_proj, *((None, None) if scales is None else scales[:2]))
    for name, tensor, others in zip(shared._fields, shared, wanted, strict=True):
        if (tensor is None) != (others is None):
            raise ValueError(f"shared.{name} must be given if and only if experts have scales.")
        if tensor is None or others is None:
            continue
        shape = tuple(others.shape[1:])
        checks.check_shape(f"shared.{name}", tensor, shape=shape, letters=str(list(shape)))
        checks.check_dtype(f"shared.{name}", tensor, dtype=others.dtype)
        checks.check_device(f"shared.{name}", tensor, device=others.device)
        if not tensor.is_contiguous():
            raise ValueError(f"shared.{name} must be contiguous, got strides {tensor.stride()}.")


def _check_layout(x: Tensor, *weights: Tensor) -> None:
    checks.check_kernel_dtype("x", x, kernel=gate_up_kernel)
    checks.check_last_dim_contiguous("x", x)
    names = ("gate_up_proj", "down_proj", "gate_up_proj_scale", "down_proj_scale")
    for name, tensor in zip(names, weights, strict=False):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous for backend 'triton', got strides {tensor.stride()}; "
                "call .contiguous() or use backend='reference'."
            )
    if len(weights[0]) > MAX_EXPERTS:
        raise ValueError(
            f"E must be <= {MAX_EXPERTS} for backend 'triton', got {len(weights[0])}; "
            "use backend='reference'."
        )
