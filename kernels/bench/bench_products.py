"""Products of few rows, alone and in a chain of layers, and what batch-invariant arithmetic costs.

Where it sits: the benchmarks `few_rows` and `invariant` of `kernels.bench`. `few_rows` tries the
products of a decode step of three models with a few program shapes for every number of rows, each
checked against float32 first. Then comes a chain of whole layers' products with the small kernels
in between: it shows how long memory idles from one product to the next, and what launches give back
that overlap the kernel in front of them (our product's always do, the compiler's where asked for).
`invariant` times products and attention of `engine.deterministic` beside the usual ones.
Letters: T or M rows, N outputs, K depth.
"""

import argparse
import contextlib
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import torch
from mtp_research.kernels.bench.bench_attention import (
    AttentionShape,
    make_attention_inputs,
    paged_attention,
)
from mtp_research.kernels.bench.bench_runner import (
    ROTATED_BYTES,
    Bench,
    Row,
    Rows,
    num_rotated,
    show_row,
    time_calls,
    write_report,
)
from mtp_research.kernels.products.few_rows_choice import choose_config, choose_gated_config
from mtp_research.kernels.products.few_rows_product import (
    FewRowsConfig,
    choose_num_splits,
    few_rows_constants,
    few_rows_product,
)
from mtp_research.kernels.products.gemv import GemvConfig
from mtp_research.kernels.products.invariant_matmul import invariant_matmul
from torch import Tensor
from torch.nn import functional
from triton.errors import TritonError

NUM_ROWS = (1, 4, 8, 16, 32, 64, 128)
# N, K of the products of a step; equal ones are listed once.
SHAPES = {
    **{"mimo qkv": (6144, 4096), "mimo o": (4096, 4096), "mimo gate_up": (22_016, 4096)},
    **{"mimo down": (4096, 11_008), "mimo eh_proj": (4096, 8192), "mimo lm_head": (151_680, 4096)},
    **{"1b qkv": (4096, 2048), "1b o": (2048, 2048), "1b gate_up": (11_264, 2048)},
    **{"1b down": (2048, 5632), "1b eh_proj": (2048, 4096), "1b lm_head": (32_000, 2048)},
    **{"glm qkv": (14_336, 4096), "glm o": (4096, 12_288), "glm shared": (2816, 4096)},
    "glm shared_down": (4096, 1408),
    **{"flash q_a": (1344, 2048), "flash q_b": (5120, 768), "flash o": (2048, 5120)},
    **{"flash gate_up": (3072, 2048), "flash down": (2048, 1536), "mimo k": (1024, 4096)},
}
QUICK_SHAPES = ("mimo qkv", "mimo o", "mimo gate_up", "mimo down", "mimo lm_head")
# Program shapes by the padded number of rows: block_n, block_k, warps, stages, programs_per_sm,
# descriptor.
CONFIGS = {
    8: (
        *((16, 256, 1, 6, 0, True), (32, 256, 2, 5, 0), (32, 256, 2, 5, 0, True)),
        *((64, 128, 4, 6, 2), (64, 128, 4, 6, 2, True), (64, 256, 4, 5, 1, True)),
    ),
    16: (
        *((16, 256, 1, 5, 0), (32, 256, 2, 5, 0), (32, 256, 2, 5, 0, True)),
        *((64, 128, 4, 5, 2), (64, 128, 4, 5, 2, True), (128, 128, 8, 5, 1, True)),
    ),
    32: (
        *((64, 128, 4, 7, 1), (64, 128, 4, 7, 1, True), (32, 256, 2, 5, 0, True)),
        *((64, 128, 4, 4, 2, True), (128, 128, 4, 4, 1, True)),
    ),
    64: ((64, 128, 4, 6, 1, True), (128, 64, 4, 4, 2, True), (128, 128, 8, 4, 1, True)),
    128: ((128, 64, 8, 6, 1, True),),
}
# Of one row without the matrix instruction: block_n, block_k, warps.
ONE_ROW = ((4, 4096, 4), (4, 2048, 4), (8, 2048, 4), (8, 1024, 4), (2, 4096, 2), (16, 512, 4))
INVARIANT_ROWS = (1, 4, 32, 128, 2048)
INVARIANT_WEIGHTS = ((2048, 2048), (4096, 4096), (22_016, 4096), (151_552, 4096))  # N, K
INVARIANT_ATTENTION = [
    AttentionShape(*size) for size in ((1, 1024, 1), (1, 1024, 4), (32, 1024, 4))
]
# MiMo-7B's layer; a chain of three reads more than ten times what the L2 cache holds.
_HIDDEN, _INNER, _QKV = 4096, 11_008, 6144
_NUM_LAYERS = 3
_GATED = FewRowsConfig(32, 256, 2, 5)  # where the table has none
# What a program shape may end in that this device or this compiler cannot run.
_FAILURES = (AssertionError, RuntimeError, TypeError, ValueError, TritonError)


class Case(NamedTuple):
    """One product to compile and check."""

    num_rows: int
    num_outputs: int
    depth: int
    config: FewRowsConfig | GemvConfig

    def variant(self) -> tuple[object, ...]:
        """What a launch is compiled for."""
        if isinstance(self.config, GemvConfig):
            return (self.depth, self.config)
        tiles = -(-self.num_outputs // self.config.block_n)
        is_split = choose_num_splits(tiles, self.depth, config=self.config) > 1
        how = {"dtype": torch.bfloat16, "config": self.config, "is_gated": False}
        constants = few_rows_constants(self.num_rows, self.depth, **how)
        kind = (self.num_rows == 1, self.num_rows % 16 == 0, is_split)
        return (*kind, self.config, *constants.items())


class Variant(NamedTuple):
    """Whose products a chain has, and whether the compiler's launches overlap."""

    num_rows: int
    products: Literal["library", "ours", "ours, gated"]
    overlaps: bool


VARIANTS = (
    *(Variant(4, name, overlaps) for name in ("library", "ours") for overlaps in (False, True)),
    Variant(4, "ours, gated", True),
    *(Variant(1, products, True) for products in ("ours", "ours, gated")),
    *(Variant(16, products, True) for products in ("ours", "ours, gated")),
    *(Variant(32, name, True) for name in ("library", "ours")),
    *(Variant(128, "library", overlaps) for overlaps in (False, True)),
)


def measure_few_rows(ceilings: dict[str, float], options: argparse.Namespace) -> Rows:
    """A row a product and number of rows, then one a chain."""
    names, num_rows = (QUICK_SHAPES, (4, 128)) if options.quick else (tuple(SHAPES), NUM_ROWS)
    names, num_rows = options.shapes or names, tuple(options.rows or num_rows)
    read = ceilings["read_tb_per_s"]
    compile_all([case for name in names for case in cases_of(SHAPES[name], num_rows)])
    rows = [row for name in names for row in bench_shape(name, num_rows, read)]
    write_report(options.json, {"ceilings": ceilings, "rows": rows})
    chain = [
        bench_chain(variant, read=read) for variant in VARIANTS if variant.num_rows in num_rows
    ]
    print_table(rows, chain)
    return [*rows, *chain]


def _add_few_rows_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="five shapes at 4 and 128 rows")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="only these")
    parser.add_argument("--rows", nargs="+", type=int, help="only these numbers of rows")


def _measure_invariant(ceilings: dict[str, float], options: argparse.Namespace) -> Rows:
    copy = ceilings["copy_tb_per_s"]
    rows = [
        bench_invariant_product(num_rows, num_outputs, depth, copy)
        for num_outputs, depth in INVARIANT_WEIGHTS
        for num_rows in INVARIANT_ROWS
    ]
    return rows + [bench_invariant_attention(shape, copy) for shape in INVARIANT_ATTENTION]


# Under --all: every program shape of every product takes minutes to compile.
FEW_ROWS = Bench(measure_few_rows, _add_few_rows_options, words=("--quick",))
INVARIANT = Bench(_measure_invariant)


def cases_of(shape: tuple[int, int], num_rows: tuple[int, ...]) -> list[Case]:
    """Every program shape that is tried for a weight `[N, K]`."""
    return [
        Case(count, *shape, config)
        for count in num_rows
        for config in (
            *(GemvConfig(*config) for config in ONE_ROW if count == 1),
            *(FewRowsConfig(*c) for c in CONFIGS[max(8, 1 << (count - 1).bit_length())]),
        )
    ]


def compile_all(cases: list[Case]) -> None:
    """Launch one case of every variant, in threads: most of the time is the compiler's."""
    variants = {case.variant(): case for case in cases}
    with ThreadPoolExecutor(max_workers=12) as pool:
        list(pool.map(_launch_once, variants.values()))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _launch_once(case: Case) -> None:
    x = torch.zeros(case.num_rows, case.depth, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(case.num_outputs, case.depth, device="cuda", dtype=torch.bfloat16)
    with contextlib.suppress(*_FAILURES):  # told when it is timed
        few_rows_product(x, weight, config=case.config)


def bench_shape(name: str, num_rows: tuple[int, ...], read: float) -> Rows:
    """A row per number of rows: the library, and every program shape, in microseconds."""
    num_outputs, depth = SHAPES[name]
    num_sets = max(3, min(128, ROTATED_BYTES // (2 * num_outputs * depth) + 1))
    x = torch.randn(max(num_rows), depth, device="cuda", dtype=torch.bfloat16)
    weights = [_random_weight(num_outputs, depth) for _ in range(num_sets)]
    expected = functional.linear(x.float(), weights[0].float())
    return [_bench_rows(name, x[:count], weights, expected[:count], read) for count in num_rows]


def _random_weight(num_outputs: int, depth: int) -> Tensor:
    weight = torch.empty(num_outputs, depth, device="cuda", dtype=torch.bfloat16)
    return weight.normal_(std=depth**-0.5)


def _bench_rows(name: str, x: Tensor, weights: list[Tensor], expected: Tensor, read: float) -> Row:
    usual = time_calls([lambda w=w: functional.linear(x, w) for w in weights])
    cases = cases_of(SHAPES[name], (len(x),))
    times = {case.config: _time_config(x, weights, expected, case.config) for case in cases}
    best = min(times, key=lambda config: times[config])
    num_bytes = 2 * (weights[0].numel() + x.numel() + expected.numel())
    print(
        f"{name} T={len(x)} library {usual.median_us:.2f} +- {usual.spread_us:.2f};",
        ", ".join(f"{'.'.join(str(int(n)) for n in c)} {us:.2f}" for c, us in times.items()),
        flush=True,
    )
    return {
        "shape": name,
        "num_rows": len(x),
        "usual_us": round(usual.median_us, 2),
        "usual_share": round(num_bytes / usual.median_us / 1e6 / read, 3),
        "best": tuple(best),
        "best_us": times[best],
        "share": round(num_bytes / times[best] / 1e6 / read, 3),
        "ours_us": [[*config, us] for config, us in times.items()],
    }


def _time_config(
    x: Tensor, weights: list[Tensor], expected: Tensor, config: FewRowsConfig | GemvConfig
) -> float:
    """Microseconds of one program shape, infinite for one that does not run or is wrong."""
    try:
        out = few_rows_product(x, weights[0], config=config)
        torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)
        again = few_rows_product(x, weights[0], config=config)
        assert torch.equal(out, again), "two calls gave different bits"
        timing = time_calls([lambda w=w: few_rows_product(x, w, config=config) for w in weights])
    except _FAILURES as error:
        print(f"failed: {config} {str(error)[:300]}", file=sys.stderr)
        return float("inf")
    return round(timing.median_us, 2)


def print_table(rows: Rows, chain: Rows) -> None:
    """The best program shape of every product, beside the library's time."""
    print("us of the library / ours (share of read bandwidth) by number of rows:")
    for name in dict.fromkeys(row["shape"] for row in rows):
        cells = [
            f"T{row['num_rows']} {row['usual_us']:.1f}/{row['best_us']:.1f} ({row['share']:.0%})"
            for row in rows
            if row["shape"] == name
        ]
        print(f"{name:<16}", "  ".join(cells))
    for line in chain:
        print(line)


def bench_chain(variant: Variant, *, read: float) -> Row:
    """Microseconds a layer, and the largest difference from the same chain in plain PyTorch."""
    shapes = ((_QKV, _HIDDEN), (_HIDDEN, _HIDDEN), (2 * _INNER, _HIDDEN), (_HIDDEN, _INNER))
    weights = [_random_weight(*shape) for _ in range(_NUM_LAYERS) for shape in shapes]
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
    """Our gated product, of up to 16 rows."""
    config = choose_gated_config(len(x), *weight.shape, dtype=x.dtype) or _GATED
    return few_rows_product(x, weight, config=config, is_gated=True)


@chain_gated.register_fake
def _fake_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


def bench_invariant_product(num_rows: int, num_outputs: int, depth: int, copy: float) -> Row:
    """One row: bf16 `[M, K]` times `[N, K]`, weights rotated through more than the L2 holds."""
    num_bytes = 2 * (num_outputs * depth + num_rows * (depth + num_outputs))
    x = torch.randn(num_rows, depth, device="cuda", dtype=torch.bfloat16)
    shape, num_sets = (num_outputs, depth), num_rotated(num_bytes, most=64)
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(num_sets)]
    expected = functional.linear(x, weights[0])
    torch.testing.assert_close(invariant_matmul(x, weights[0]), expected, atol=2.0, rtol=2e-2)
    ours = time_calls([lambda w=w: invariant_matmul(x, w) for w in weights])
    usual = time_calls([lambda w=w: functional.linear(x, w) for w in weights])
    row: Row = {"kernel": "invariant_matmul", "shape": f"M={num_rows} N={num_outputs} K={depth}"}
    row |= {"bytes": num_bytes, "usual_us": usual.median_us}
    return show_row(row, ours, usual, copy=copy)


def bench_invariant_attention(shape: AttentionShape, copy: float) -> Row:
    """One row: paged attention with fixed tiles and splits, and as it is usually launched."""
    sets = make_attention_inputs(shape, num_sets=num_rotated(shape.num_bytes()), device="cuda")
    fixed = shape.options()
    ours, usual = (
        time_calls([lambda s=s, b=backend: paged_attention(**s, **fixed, backend=b) for s in sets])
        for backend in ("invariant", "triton")
    )
    row: Row = {"kernel": "invariant_attn", "shape": shape.label()}
    row |= {"bytes": shape.num_bytes(), "usual_us": usual.median_us}
    return show_row(row, ours, usual, copy=copy)
