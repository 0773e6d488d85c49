"""Products and experts with FP8 weights: which share of the read bandwidth their bytes come at.

Where it sits: the benchmark `fp8` of `kernels.bench`. Every row is checked against plain weights in
float32 first. It holds the shape that the tables choose, with `--variants` others as well, and as
the peer the same work on bfloat16 weights: the library's product, and our experts. Products of many
rows are the library's with a plain copy of the weight, which is made each time. Both layouts of
scales: a block of 128 x 128, and a row.
Letters: T rows, N outputs, K depth, E experts, I inner size of an expert.
"""

import argparse
import functools
from typing import NamedTuple

import torch
from mtp_research.kernels.bench.bench_experts import ExpertInputs, ExpertShape, make_inputs
from mtp_research.kernels.bench.bench_runner import (
    ROTATED_BYTES,
    Bench,
    Row,
    Rows,
    show_row,
    time_calls,
)
from mtp_research.kernels.experts.expert_mlp import (
    ExpertConfig,
    ExpertScales,
    ProductConfig,
    choose_expert_config,
    expert_mlp,
    expert_pairs_ref,
    launch_expert_pairs,
)
from mtp_research.kernels.products.few_rows_choice import choose_fp8_config
from mtp_research.kernels.products.few_rows_product import FewRowsConfig, few_rows_product
from mtp_research.kernels.products.gemv import GemvConfig
from mtp_research.kernels.products.scaled_weights import FP8, dequantise, scale_shape
from torch import Tensor
from torch.nn import functional

# N, K of the products of GLM-4.5-Air's layers, and numbers of rows of a decode step.
PRODUCTS = {"qkv": (14_336, 4096), "o": (4096, 12_288), "shared": (2816, 4096)}
PRODUCTS |= {"shared_down": (4096, 1408)}
NUM_ROWS = (1, 4, 32, 128, 512)
EXPERTS = tuple(
    ExpertShape("glm45_air", n, 4096, 1408, 128, 8) for n in (1, 4, 32, 128, 512, 1024, 2048)
)
LAYOUTS = {"blocks": 128, "rows": 0}
_RANGE = 448.0  # largest FP8 number
PRODUCT_VARIANTS = {
    8: ((32, 128, 2, 6, 2), (32, 128, 4, 6, 4), (64, 128, 4, 6, 4), (64, 128, 4, 6, 2, True)),
    32: ((64, 128, 4, 5, 1), (64, 128, 4, 4, 3), (32, 128, 2, 5, 2), (64, 128, 4, 5, 2, True)),
    128: ((64, 128, 4, 3, 2), (128, 128, 8, 3, 1), (64, 64, 4, 5, 2), (128, 64, 8, 4, 1, True)),
}
MOST_VARIED = 128  # tokens
EXPERT_VARIANTS = (
    ExpertConfig(16, ProductConfig(32, 128, 4, 4), ProductConfig(64, 128, 4, 4)),
    ExpertConfig(16, ProductConfig(32, 128, 4, 7), ProductConfig(64, 128, 4, 7)),
    ExpertConfig(16, ProductConfig(64, 128, 8, 4), ProductConfig(32, 128, 4, 6)),
    ExpertConfig(16, ProductConfig(32, 128, 2, 6), ProductConfig(64, 128, 2, 6)),
    ExpertConfig(32, ProductConfig(64, 128, 8, 4), ProductConfig(64, 128, 4, 5)),
)


class Stored(NamedTuple):
    """FP8 numbers and their scales."""

    weight: Tensor
    scale: Tensor


def measure_fp8(ceilings: dict[str, float], options: argparse.Namespace) -> Rows:
    """Rows of the products, then of the experts."""
    read, rows = ceilings["read_tb_per_s"], []
    layouts = {name: LAYOUTS[name] for name in options.layouts}
    for layout, block in layouts.items():
        for name in PRODUCTS:
            rows += [_bench_product(name, n, layout, block, read, options) for n in NUM_ROWS]
            torch.cuda.empty_cache()
    for layout, block in layouts.items():
        for shape in EXPERTS:
            rows.append(_bench_experts(shape, layout, block, read, options))
            torch.cuda.empty_cache()
    return rows


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", action="store_true", help="try other program shapes")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))


FP8_WEIGHTS = Bench(measure_fp8, _add_options)


def quantise(plain: Tensor, *, block: int, num_parts: int = 1) -> Stored:
    """FP8 numbers of weights `[..., O, C]` whose largest number is about the same everywhere.

    The rows of `num_parts` matrices follow each other in `plain`.
    """
    scale = plain.abs().max().float() / _RANGE
    rows, columns = scale_shape(plain.shape[-2] // num_parts, plain.shape[-1], block=block)
    shape = (*plain.shape[:-2], num_parts * rows, columns)
    return Stored((plain / scale).to(FP8), scale.expand(shape).contiguous())


def _bench_product(
    name: str, num_rows: int, layout: str, block: int, read: float, options: argparse.Namespace
) -> Row:
    num_outputs, depth = PRODUCTS[name]
    num_sets = ROTATED_BYTES // (num_outputs * depth) + 1
    x = torch.randn(num_rows, depth, device="cuda", dtype=torch.bfloat16)
    plain = torch.randn(num_outputs, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5
    stored = quantise(plain, block=block)
    sets = [Stored(stored.weight.clone(), stored.scale) for _ in range(num_sets)]
    expected = x.float() @ dequantise(*stored, block=block, dtype=torch.float32).T
    chosen = choose_fp8_config(num_rows, depth)
    times = {}
    tried = _variants(num_rows) if options.variants and chosen is not None else []
    for config in (chosen, *tried):
        product = functools.partial(_product, x, config=config, block=block)
        found = product(*stored).float()
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
        times[config] = time_calls([functools.partial(product, *s) for s in sets])
    weights = [plain.clone() for _ in range(num_sets // 2 + 1)]
    peer = time_calls([functools.partial(functional.linear, x, w) for w in weights])
    moved = stored.weight.nbytes + stored.scale.nbytes + x.nbytes + 2 * expected.numel()
    row: Row = {"kernel": "few_rows fp8", "shape": f"{name} {layout} T={num_rows}"}
    shapes = {"a plain copy" if c is None else str(tuple(c)): t for c, t in times.items()}
    row |= {"bytes": moved, "variants": {name: time.median_us for name, time in shapes.items()}}
    show_row(row, times[chosen], peer, copy=read, ceiling="read")
    _show_variants({name: time.median_us for name, time in shapes.items()})
    return row


def _product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    block: int,
    config: FewRowsConfig | GemvConfig | None,
) -> Tensor:
    if config is None:
        return functional.linear(x, dequantise(weight, scale, block=block, dtype=x.dtype))
    return few_rows_product(x, weight, config=config, scale=scale, scale_block=block)


def _variants(num_rows: int) -> list[FewRowsConfig]:
    shapes = next((found for most, found in PRODUCT_VARIANTS.items() if num_rows <= most), ())
    return [FewRowsConfig(*shape) for shape in shapes]


def _bench_experts(
    shape: ExpertShape, layout: str, block: int, read: float, options: argparse.Namespace
) -> Row:
    sets = make_inputs(shape, device="cuda")
    gate_up = quantise(sets[0].gate_up_proj, block=block, num_parts=2)
    down = quantise(sets[0].down_proj, block=block)
    scales = ExpertScales(gate_up.scale, down.scale, block)
    stored = [s._replace(gate_up_proj=gate_up.weight, down_proj=down.weight) for s in sets]
    x, *rest = stored[0]
    expected = expert_pairs_ref(x.float(), *rest, scales=scales).sum(dim=1)
    found = expert_mlp(*stored[0], scales=scales).float()
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < 2e-2, f"the kernel's outputs differ from float32 by {error:.3f}"
    ours = time_calls([functools.partial(expert_mlp, *s, scales=scales) for s in stored])
    peer = time_calls([functools.partial(expert_mlp, *s) for s in sets])
    num_chosen = sum(len(s.top_k_index.unique()) for s in sets) / len(sets)
    expert = 3 * shape.hidden_size * shape.inner_size
    moved = num_chosen * expert + 4 * shape.num_tokens * shape.hidden_size
    row: Row = {"kernel": "experts fp8", "shape": f"{shape.model} {layout} T={shape.num_tokens}"}
    row |= {"bytes": moved, "experts": num_chosen, "error": error}
    show_row(row, ours, peer, copy=read, num_flops=shape.num_flops(), ceiling="read")
    if options.variants and shape.num_tokens <= MOST_VARIED:
        sizes = {"num_experts": shape.num_experts, "inner_size": shape.inner_size}
        num_pairs = shape.num_tokens * shape.top_k
        chosen = choose_expert_config(num_pairs, **sizes, element_bytes=2, is_fp8=True)
        times = {c: _time_pairs(stored, scales, c) for c in (chosen, *EXPERT_VARIANTS)}
        row["variants"] = {str(config): us for config, us in times.items()}
        _show_variants({f"{c.block_m} {c.gate_up[:4]} {c.down[:4]}": t for c, t in times.items()})
    return row


def _time_pairs(sets: list[ExpertInputs], scales: ExpertScales, config: ExpertConfig) -> float:
    """Microseconds of routing and both products, without the sum."""
    out = sets[0].x.new_empty(*sets[0].top_k_index.shape, sets[0].x.shape[1])
    launch = functools.partial(launch_expert_pairs, out=out, scales=scales, config=config)
    return time_calls([functools.partial(launch, *s) for s in sets]).median_us


def _show_variants(times: dict[str, float]) -> None:
    if len(times) > 1:
        print("    " + "  ".join(f"{name} {us:.1f}" for name, us in times.items()), flush=True)
