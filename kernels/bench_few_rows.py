"""Time `few_rows_product` against the library's product, one decode layer's weights at a time.

    python -m mtp_research.kernels.bench_few_rows [--quick] [--json PATH]

Shapes are the products of a decode step of three models; each is tried with a few program shapes
for every number of rows, checked against float32 first. Every timing replays a CUDA graph of calls
whose weights rotate through more memory than the L2 cache holds; our calls overlap the one before.
Then a chain of whole layers' products with the small kernels in between (`bench_few_rows_chain`).
The last lines are a table: microseconds of the library and of ours, share of the read bandwidth.
Without a CUDA device it exits with 4.
Letters: T rows, N outputs, K depth.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels.bench_entry import Rows, make_bench_parser, run_bench, write_report
from mtp_research.kernels.bench_few_rows_chain import VARIANTS, bench_chain
from mtp_research.kernels.bench_timing import time_calls
from mtp_research.kernels.products.few_rows_product import (
    FewRowsConfig,
    choose_num_splits,
    few_rows_constants,
    few_rows_product,
)
from torch.nn import functional
from triton.errors import TritonError

if TYPE_CHECKING:
    from torch import Tensor

NUM_ROWS = (1, 4, 8, 16, 32, 64, 128)
# N, K of the products of a step; equal ones are listed once.
SHAPES = {
    "mimo qkv": (6144, 4096),
    "mimo o": (4096, 4096),
    "mimo gate_up": (22_016, 4096),
    "mimo down": (4096, 11_008),
    "mimo eh_proj": (4096, 8192),
    "mimo lm_head": (151_680, 4096),
    "1b qkv": (4096, 2048),
    "1b o": (2048, 2048),
    "1b gate_up": (11_264, 2048),
    "1b down": (2048, 5632),
    "1b eh_proj": (2048, 4096),
    "1b lm_head": (32_000, 2048),
    "glm qkv": (14_336, 4096),
    "glm o": (4096, 12_288),
    "glm shared": (2816, 4096),
    "glm shared_down": (4096, 1408),
}
QUICK_SHAPES = ("mimo qkv", "mimo o", "mimo gate_up", "mimo down", "mimo lm_head")
# Program shapes by the padded number of rows: block_n, block_k, warps, stages, programs_per_sm,
# descriptor.
CONFIGS = {
    8: (
        (16, 256, 1, 6, 0, True),
        (32, 256, 2, 5, 0),
        (32, 256, 2, 5, 0, True),
        (64, 128, 4, 6, 2),
        (64, 128, 4, 6, 2, True),
        (64, 256, 4, 5, 1, True),
    ),
    16: (
        (16, 256, 1, 5, 0),
        (32, 256, 2, 5, 0),
        (32, 256, 2, 5, 0, True),
        (64, 128, 4, 5, 2),
        (64, 128, 4, 5, 2, True),
        (128, 128, 8, 5, 1, True),
    ),
    32: (
        (64, 128, 4, 7, 1),
        (64, 128, 4, 7, 1, True),
        (32, 256, 2, 5, 0, True),
        (64, 128, 4, 4, 2, True),
        (128, 128, 4, 4, 1, True),
    ),
    64: (
        (64, 128, 4, 6, 1, True),
        (128, 64, 4, 4, 2, True),
        (128, 128, 8, 4, 1, True),
    ),
    128: ((128, 64, 8, 6, 1, True),),
}
_ROTATED_BYTES = 512 * 2**20
# What a program shape may end in that this device or this compiler cannot run.
_FAILURES = (AssertionError, RuntimeError, TypeError, ValueError, TritonError)


class Case(NamedTuple):
    """One product to compile and check."""

    num_rows: int
    num_outputs: int
    depth: int
    config: FewRowsConfig

    def variant(self) -> tuple[object, ...]:
        """What a launch is compiled for."""
        tiles = -(-self.num_outputs // self.config.block_n)
        is_split = choose_num_splits(tiles, self.depth, config=self.config) > 1
        constants = few_rows_constants(
            self.num_rows,
            self.depth,
            dtype=torch.bfloat16,
            config=self.config,
            overlaps=True,
            is_gated=False,
        )
        kind = (self.num_rows == 1, self.num_rows % 16 == 0, is_split)
        return (*kind, self.config, *constants.items())


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_bench(measure, make_parser(), arguments)


def make_parser() -> argparse.ArgumentParser:
    """Options of this benchmark."""
    parser = make_bench_parser("bench_few_rows")
    parser.add_argument("--quick", action="store_true", help="five shapes at 4 and 128 rows")
    return parser


def measure(ceilings: dict[str, float], options: argparse.Namespace) -> Rows:
    """A row a product and number of rows, then one a chain."""
    names = QUICK_SHAPES if options.quick else tuple(SHAPES)
    num_rows = (4, 128) if options.quick else NUM_ROWS
    read = ceilings["read_tb_per_s"]
    compile_all([case for name in names for case in cases_of(SHAPES[name], num_rows)])
    rows = [row for name in names for row in bench_shape(name, num_rows, read)]
    write_report(options.json, {"ceilings": ceilings, "rows": rows})
    chain = [
        bench_chain(variant, read=read) for variant in VARIANTS if variant.num_rows in num_rows
    ]
    print_table(rows, chain)
    return [*rows, *chain]


def cases_of(shape: tuple[int, int], num_rows: tuple[int, ...]) -> list[Case]:
    """Every program shape that is tried for a weight `[N, K]`."""
    return [
        Case(count, *shape, FewRowsConfig(*config))
        for count in num_rows
        for config in CONFIGS[max(8, 1 << (count - 1).bit_length())]
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


def bench_shape(name: str, num_rows: tuple[int, ...], read: float) -> list[dict[str, object]]:
    """A row per number of rows: the library, and every program shape, in microseconds."""
    num_outputs, depth = SHAPES[name]
    num_sets = max(3, min(128, _ROTATED_BYTES // (2 * num_outputs * depth) + 1))
    x = torch.randn(max(num_rows), depth, device="cuda", dtype=torch.bfloat16)
    weights = [
        torch.empty(num_outputs, depth, device="cuda", dtype=torch.bfloat16).normal_(
            std=depth**-0.5
        )
        for _ in range(num_sets)
    ]
    expected = functional.linear(x.float(), weights[0].float())
    return [_bench_rows(name, x[:count], weights, expected[:count], read) for count in num_rows]


def _bench_rows(
    name: str, x: Tensor, weights: list[Tensor], expected: Tensor, read: float
) -> dict[str, object]:
    """The row of one number of rows."""
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
    x: Tensor, weights: list[Tensor], expected: Tensor, config: FewRowsConfig
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


if __name__ == "__main__":
    sys.exit(main())
