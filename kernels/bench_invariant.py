"""What batch-invariant arithmetic costs: products and attention against the usual ones.

    python -m mtp_research.kernels.bench_invariant [--json PATH]

A line per shape: median time of ours, of the library's product (cuBLAS) or of our usual attention,
their ratio, and the share of the copy bandwidth. These kernels are there to be reproducible: the
ratio is the price of `engine.deterministic`. Without a CUDA device it exits with 4.
Letters: M rows, N outputs, K depth.
"""

from __future__ import annotations

import argparse
import sys

import torch
from mtp_research.kernels.attention.paged_attention import paged_attention
from mtp_research.kernels.bench import AttentionShape, make_attention_inputs
from mtp_research.kernels.bench_entry import Rows, make_bench_parser, run_bench
from mtp_research.kernels.bench_timing import time_calls
from mtp_research.kernels.products.invariant_matmul import invariant_matmul
from torch.nn import functional

NUM_ROWS = (1, 4, 32, 128, 2048)
WEIGHTS = ((2048, 2048), (4096, 4096), (22_016, 4096), (151_552, 4096))  # N, K
ATTENTION = (AttentionShape(1, 1024, 1), AttentionShape(1, 1024, 4), AttentionShape(32, 1024, 4))
_ROTATED_BYTES = 512 * 2**20


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_bench(measure, make_parser(), arguments)


def make_parser() -> argparse.ArgumentParser:
    """Options of this benchmark."""
    return make_bench_parser("bench_invariant")


def measure(ceilings: dict[str, float], options: argparse.Namespace) -> Rows:
    """A row a shape."""
    copy = ceilings["copy_tb_per_s"]
    rows = [
        bench_product(num_rows, num_outputs, depth, copy)
        for num_outputs, depth in WEIGHTS
        for num_rows in NUM_ROWS
    ]
    return [*rows, *(bench_attention(shape, copy) for shape in ATTENTION)]


def bench_product(num_rows: int, num_outputs: int, depth: int, copy: float) -> dict[str, object]:
    """One row: bf16 `[M, K]` times `[N, K]`, weights rotated through more than the L2 holds."""
    num_bytes = 2 * (num_outputs * depth + num_rows * (depth + num_outputs))
    num_sets = max(2, min(64, _ROTATED_BYTES // num_bytes))
    x = torch.randn(num_rows, depth, device="cuda", dtype=torch.bfloat16)
    shape = (num_outputs, depth)
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(num_sets)]
    expected = functional.linear(x, weights[0])
    torch.testing.assert_close(invariant_matmul(x, weights[0]), expected, atol=2.0, rtol=2e-2)
    ours = time_calls([lambda w=w: invariant_matmul(x, w) for w in weights])
    theirs = time_calls([lambda w=w: functional.linear(x, w) for w in weights])
    label = f"M={num_rows} N={num_outputs} K={depth}"
    return _row("invariant_matmul", label, num_bytes, ours.median_us, theirs.median_us, copy)


def bench_attention(shape: AttentionShape, copy: float) -> dict[str, object]:
    """One row: paged attention with fixed tiles and splits, and as it is usually launched."""
    num_sets = max(2, min(128, _ROTATED_BYTES // shape.num_bytes()))
    sets = make_attention_inputs(shape, num_sets=num_sets, device="cuda")
    fixed = {"max_query_len": shape.query_len, "scale": shape.head_dim**-0.5}
    times = [
        time_calls([lambda s=s, b=backend: paged_attention(**s, **fixed, backend=b) for s in sets])
        for backend in ("invariant", "triton")
    ]
    ours, theirs = (timing.median_us for timing in times)
    return _row("invariant_attn", shape.label(), shape.num_bytes(), ours, theirs, copy)


def _row(
    name: str, label: str, num_bytes: int, ours_us: float, usual_us: float, copy: float
) -> dict[str, object]:
    share = num_bytes / ours_us / 1e6 / copy
    print(
        f"{name:<18}{label:<46}{ours_us:9.1f} us  {share:6.1%} of copy  "
        f"usual {usual_us:9.1f} us  {ours_us / usual_us:6.2f}x",
        flush=True,
    )
    return {
        "kernel": name,
        "shape": label,
        "bytes": num_bytes,
        "median_us": ours_us,
        "usual_us": usual_us,
        "share_of_copy": share,
    }


if __name__ == "__main__":
    sys.exit(main())
