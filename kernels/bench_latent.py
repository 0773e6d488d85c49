"""Measure latent attention against the ceilings of the device and against PyTorch, in one run.

    python -m mtp_research.kernels.bench_latent [--json PATH]

Prints a line per shape: median time, share of the copy bandwidth and of the matmul rate, and the
same work in compiled PyTorch (pages gathered, then fused attention), and in FlashInfer where it is
installed; without the store of new rows, which `bench_append` has. Timings as in `bench`. Few
heads are bound by bandwidth, many by the tensor cores. Without a CUDA device it exits with 4.
Letters: B requests, H heads, q rows a request, L latent, P rotary key size.
"""

from __future__ import annotations

import argparse
import sys
from types import ModuleType
from typing import NamedTuple

import torch
from mtp_research.kernels.bench_entry import Rows, make_bench_parser, run_bench
from mtp_research.kernels.bench_peers import import_peers, time_peers
from mtp_research.kernels.bench_timing import time_calls
from mtp_research.kernels.latent.latent_attention import latent_attention, latent_attention_ref
from torch import Tensor
from torch.nn import functional

_ROTATED_BYTES = 512 * 2**20  # ten times the H200's L2
_LATENT_DIM, _ROPE_DIM = 512, 64


class LatentShape(NamedTuple):
    """One verify or decode batch whose requests all have the same lengths."""

    num_requests: int
    context: int
    query_len: int
    num_heads: int
    block_size: int = 64

    def label(self) -> str:
        """The shape in words for the table."""
        return (
            f"B={self.num_requests} ctx={self.context} q={self.query_len} H={self.num_heads} "
            f"page={self.block_size}"
        )

    def num_bytes(self) -> int:
        """Bytes that must move: latents once, queries and output once (bf16)."""
        width = _LATENT_DIM + _ROPE_DIM
        rows = self.num_requests * self.query_len * self.num_heads * (width + _LATENT_DIM)
        return 2 * (self.num_requests * self.context * width + rows)

    def num_flops(self) -> int:
        """Multiplications and additions of the two products."""
        rows = self.num_requests * self.query_len * self.num_heads
        return 2 * rows * self.context * (2 * _LATENT_DIM + _ROPE_DIM)


SHAPES = [
    LatentShape(batch, context, query_len, num_heads)
    for batch, context in ((1, 8192), (32, 8192))
    for num_heads in (16, 20, 128)
    for query_len in (1, 4)
]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_bench(measure, make_parser(), arguments)


def make_parser() -> argparse.ArgumentParser:
    """Options of this benchmark."""
    return make_bench_parser("bench_latent")


def measure(ceilings: dict[str, float], options: argparse.Namespace) -> Rows:
    """A row a shape."""
    peers = import_peers()
    return [bench_latent(shape, ceilings, peers) for shape in SHAPES]


def make_latent_inputs(
    shape: LatentShape, *, num_sets: int, device: str
) -> list[dict[str, Tensor]]:
    """`num_sets` batches over one shuffled random pool, named as arguments of latent_attention."""
    num_columns = shape.context // shape.block_size
    num_blocks = num_sets * shape.num_requests * num_columns
    width = _LATENT_DIM + _ROPE_DIM
    cache = torch.randn(num_blocks, shape.block_size, width, device=device, dtype=torch.bfloat16)
    tables = torch.randperm(num_blocks, device=device).to(torch.int32)
    num_rows = shape.num_requests * shape.query_len
    starts = torch.arange(0, num_rows + 1, shape.query_len, device=device, dtype=torch.int32)
    seq_lens = torch.full((shape.num_requests,), shape.context, device=device, dtype=torch.int32)
    inputs = []
    for table in tables.view(num_sets, shape.num_requests, num_columns):
        query = torch.randn(num_rows, shape.num_heads, width, device=device, dtype=torch.bfloat16)
        latent, rope = query.split((_LATENT_DIM, _ROPE_DIM), dim=-1)
        inputs.append(
            {
                "query_latent": latent.contiguous(),
                "query_rope": rope.contiguous(),
                "latent_cache": cache,
                "block_table": table,
                "seq_lens": seq_lens,
                "query_start_loc": starts,
            }
        )
    return inputs


def bench_latent(
    shape: LatentShape, ceilings: dict[str, float], peers: dict[str, ModuleType]
) -> dict[str, object]:
    """One table row: the kernel, and gather + SDPA compiled; checks the result first."""
    num_sets = max(2, min(128, _ROTATED_BYTES // shape.num_bytes()))
    sets = make_latent_inputs(shape, num_sets=num_sets, device="cuda")
    options = {"max_query_len": shape.query_len, "scale": (128 + _ROPE_DIM) ** -0.5}
    expected = latent_attention_ref(**sets[0], **options)
    torch.testing.assert_close(
        latent_attention(**sets[0], **options), expected, atol=2e-2, rtol=2e-2
    )
    ours = time_calls([lambda s=s: latent_attention(**s, **options) for s in sets])
    torch.compiler.reset()  # past eight shapes Dynamo would fall back to eager
    compiled = torch.compile(gather_sdpa, dynamic=False)
    peer = time_calls([lambda s=s: compiled(**s, scale=options["scale"]) for s in sets])
    seconds = ours.median_us / 1e6
    row = {
        "shape": shape.label(),
        "median_us": ours.median_us,
        "spread_us": ours.spread_us,
        "share_of_copy": shape.num_bytes() / seconds / 1e12 / ceilings["copy_tb_per_s"],
        "tflop_per_s": shape.num_flops() / seconds / 1e12,
        "peer_us": peer.median_us,
    }
    print(
        f"{row['shape']:<36}{ours.median_us:9.1f} us +- {ours.spread_us:6.1f}  "
        f"{row['share_of_copy']:6.1%} of copy  {row['tflop_per_s']:6.1f} TFLOP/s  "
        f"peer {peer.median_us:9.1f} us",
        flush=True,
    )
    return row | {"peers": time_peers(peers, sets, expected, **options)}


def gather_sdpa(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The peer: pages gathered by PyTorch, then its fused attention; equal lengths only."""
    num_requests = seq_lens.shape[0]
    query = torch.cat((query_latent, query_rope), dim=-1)
    rows = query.view(num_requests, -1, *query.shape[1:]).transpose(1, 2)
    keys = latent_cache[block_table].flatten(1, 2)[:, None]
    query_len, context = rows.shape[2], keys.shape[2]
    mask = torch.ones(query_len, context, dtype=torch.bool, device=query.device)
    out = functional.scaled_dot_product_attention(
        rows,
        keys,
        keys[..., :_LATENT_DIM],
        attn_mask=mask.tril(context - query_len),
        scale=scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2).reshape(query_latent.shape)


if __name__ == "__main__":
    sys.exit(main())
