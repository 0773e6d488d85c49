"""Measure the kernels against the ceilings of the device and against PyTorch, in one run.

    python -m mtp_research.kernels.bench [--quick] [--sweep] [--json PATH]

Prints the ceilings (copy, read, bf16 matmul), then a line per kernel and shape: median time, share
of the copy bandwidth, and the same work in compiled PyTorch. `--sweep` tries other launch shapes.
Every timing replays a CUDA graph of calls whose inputs rotate through more memory than the L2 cache
holds, so neither the host nor a warm cache is measured. Without a CUDA device it exits with 4.
Letters: B requests, H / Hkv heads, D head dim, q rows a request.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention_launch import LaunchConfig, launch_paged_attention
from mtp_research.kernels.draft_head import draft_head, draft_head_ref
from mtp_research.kernels.paged_attention import paged_attention, paged_attention_ref
from mtp_research.kernels.store_kv import store_kv
from torch import Tensor
from torch.nn import functional

EXIT_NO_DEVICE = 4
_ROTATED_BYTES = 512 * 2**20  # ten times the H200's L2
_COPY_BYTES = 4 * 2**30
_MATMUL_SIZE = 8192


class Timing(NamedTuple):
    """Time of one call, from replays of a graph of many."""

    median_us: float
    spread_us: float  # slowest minus fastest replay


class AttentionShape(NamedTuple):
    """One verify or decode batch whose requests all have the same lengths."""

    num_requests: int
    context: int
    query_len: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    def label(self) -> str:
        """The shape in words for the table."""
        heads = f"{self.num_heads}/{self.num_kv_heads} d{self.head_dim}"
        return (
            f"B={self.num_requests} ctx={self.context} q={self.query_len} {heads} "
            f"page={self.block_size}"
        )

    def num_bytes(self) -> int:
        """Bytes that must move: K and V once, query and output once (bf16)."""
        kv = 2 * self.num_requests * self.context * self.num_kv_heads * self.head_dim
        rows = 2 * self.num_requests * self.query_len * self.num_heads * self.head_dim
        return 2 * (kv + rows)


FULL_SHAPES = [
    *(AttentionShape(8, 8192, q, block_size=size) for size in (16, 64) for q in (1, 4, 8)),
    *(AttentionShape(batch, 1024, q) for batch in (1, 32) for q in (1, 4)),
    *(AttentionShape(8, 8192, q, num_heads=96, block_size=64) for q in (1, 4)),
]
QUICK_SHAPES = [AttentionShape(8, 8192, 1), AttentionShape(8, 8192, 4), AttentionShape(1, 1024, 4)]
SWEEP_SHAPES = [AttentionShape(8, 8192, 4), AttentionShape(8, 8192, 4, num_heads=96)]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mtp_research.kernels.bench")
    parser.add_argument("--quick", action="store_true", help="three attention shapes only")
    parser.add_argument("--sweep", action="store_true", help="try launch shapes of the attention")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: the kernel benchmark needs a CUDA device; none is visible.", file=sys.stderr)
        return EXIT_NO_DEVICE
    report: dict[str, object] = {"machine": describe_machine(), "ceilings": measure_ceilings()}
    for name, value in [*report["machine"].items(), *report["ceilings"].items()]:
        print(f"{name:<16}{value}")
    copy = report["ceilings"]["copy_tb_per_s"]
    rows = bench_store_kv(copy) + bench_draft_head(copy)
    shapes = QUICK_SHAPES if options.quick else FULL_SHAPES
    rows += [bench_attention(shape, copy) for shape in shapes]
    if options.sweep:
        for shape in SWEEP_SHAPES:
            rows += sweep_attention(shape, copy)
    report["rows"] = rows
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    return 0


def describe_machine() -> dict[str, str]:
    """Device, versions and commit that the figures belong to."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": checks.triton_version(),
        "commit": git.stdout.strip() or "unknown",
    }


def measure_ceilings() -> dict[str, float]:
    """Bandwidth in TB/s of a copy (read + write) and of a read, TFLOP/s of a bf16 matmul."""
    source = torch.randn(_COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    copy = time_calls([functools.partial(target.copy_, source)])
    read = time_calls([source.amax])
    shape = (_MATMUL_SIZE, _MATMUL_SIZE)
    left, right = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = time_calls([functools.partial(torch.matmul, left, right)])
    return {
        "copy_tb_per_s": round(2 * _COPY_BYTES / copy.median_us / 1e6, 3),
        "read_tb_per_s": round(_COPY_BYTES / read.median_us / 1e6, 3),
        "bf16_tflop_per_s": round(2 * _MATMUL_SIZE**3 / matmul.median_us / 1e6, 1),
    }


def time_calls(calls: list[Callable[[], object]], *, num_replays: int = 15) -> Timing:
    """Median time of one of `calls`, captured together as one CUDA graph."""
    for call in calls[:2] * 2:  # compile, and allocate what the first call allocates
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times_us = []
    for replay in range(num_replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 3:  # clocks settle
            times_us.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return Timing(statistics.median(times_us), max(times_us) - min(times_us))


def bench_store_kv(copy: float) -> list[dict[str, object]]:
    """Rows for a verify step (32 rows) and a prefill step (8192 rows), 8 heads of 128."""
    rows = []
    for num_rows in (32, 8192):
        key, value = (
            torch.randn(num_rows, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        num_bytes = 4 * key.nbytes  # both are read and written
        num_blocks = max(2 * num_rows // 16, _ROTATED_BYTES // (16 * key[0].nbytes))
        caches = [key.new_zeros(num_blocks, 16, 8, 128) for _ in range(2)]
        slots = torch.randperm(num_blocks * 16, device="cuda").split(num_rows)[:64]

        def run(slot_mapping: Tensor, key=key, value=value, caches=caches) -> None:
            store_kv(
                key, value, key_cache=caches[0], value_cache=caches[1], slot_mapping=slot_mapping
            )

        @torch.compile(dynamic=False)
        def peer(slot_mapping: Tensor, key=key, value=value, caches=caches) -> None:
            caches[0].view(-1, 8, 128)[slot_mapping] = key
            caches[1].view(-1, 8, 128)[slot_mapping] = value

        ours = time_calls([lambda s=s, run=run: run(s) for s in slots])
        theirs = _time_peer([lambda s=s, peer=peer: peer(s) for s in slots])
        rows.append(_row("store_kv", f"T={num_rows} 8 d128", num_bytes, ours, theirs, copy))
    return rows


def bench_draft_head(copy: float) -> list[dict[str, object]]:
    """Rows for the lm_head of a 7B model and of a 1B model with a small vocabulary."""
    rows = []
    for num_vocab, dim in ((151_680, 4096), (32_000, 2048)):
        num_sets = max(1, _ROTATED_BYTES // (2 * num_vocab * dim))
        weights = [
            torch.randn(num_vocab, dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(num_sets)
        ]
        norm_weight = torch.ones(dim, device="cuda", dtype=torch.bfloat16)
        for num_rows in (1, 8, 32):
            hidden = torch.randn(num_rows, dim, device="cuda", dtype=torch.bfloat16)
            head = functools.partial(draft_head, hidden, norm_weight=norm_weight)
            reference = functools.partial(draft_head_ref, hidden, norm_weight=norm_weight)
            peer = torch.compile(reference, dynamic=False)
            ours = time_calls([functools.partial(head, weight=w) for w in weights])
            theirs = _time_peer([functools.partial(peer, weight=w) for w in weights])
            label = f"R={num_rows} V={num_vocab} D={dim}"
            rows.append(_row("draft_head", label, weights[0].nbytes, ours, theirs, copy))
    return rows


def make_attention_inputs(
    shape: AttentionShape, *, num_sets: int, device: str
) -> list[dict[str, Tensor]]:
    """`num_sets` batches over one shuffled random pool, named as arguments of paged_attention."""
    num_columns = shape.context // shape.block_size
    num_blocks = num_sets * shape.num_requests * num_columns
    pool = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    caches = [torch.randn(pool, device=device, dtype=torch.bfloat16) for _ in range(2)]
    tables = torch.randperm(num_blocks, device=device).to(torch.int32)
    num_rows = shape.num_requests * shape.query_len
    starts = torch.arange(0, num_rows + 1, shape.query_len, device=device, dtype=torch.int32)
    seq_lens = torch.full((shape.num_requests,), shape.context, device=device, dtype=torch.int32)
    return [
        {
            "query": torch.randn(
                num_rows, shape.num_heads, shape.head_dim, device=device, dtype=torch.bfloat16
            ),
            "key_cache": caches[0],
            "value_cache": caches[1],
            "block_table": table,
            "seq_lens": seq_lens,
            "query_start_loc": starts,
        }
        for table in tables.view(num_sets, shape.num_requests, num_columns)
    ]


def bench_attention(shape: AttentionShape, copy: float) -> dict[str, object]:
    """One table row: the kernel, and gather + SDPA compiled; checks the result first."""
    num_sets = max(2, min(128, _ROTATED_BYTES // shape.num_bytes()))
    sets = make_attention_inputs(shape, num_sets=num_sets, device="cuda")
    options = {"max_query_len": shape.query_len, "scale": shape.head_dim**-0.5}
    expected = paged_attention_ref(**sets[0], **options)
    torch.testing.assert_close(
        paged_attention(**sets[0], **options), expected, atol=2e-2, rtol=2e-2
    )
    ours = time_calls([lambda s=s: paged_attention(**s, **options) for s in sets])
    compiled = torch.compile(gather_sdpa, dynamic=False)
    theirs = _time_peer([lambda s=s: compiled(**s) for s in sets])
    return _row("paged_attention", shape.label(), shape.num_bytes(), ours, theirs, copy)


def gather_sdpa(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """The peer: pages gathered by PyTorch, then its fused attention; equal lengths only."""
    num_requests = seq_lens.shape[0]
    rows = query.view(num_requests, -1, *query.shape[1:]).transpose(1, 2)
    keys, values = (
        cache[block_table].flatten(1, 2).transpose(1, 2) for cache in (key_cache, value_cache)
    )
    query_len, context = rows.shape[2], keys.shape[2]
    visible = torch.ones(query_len, context, dtype=torch.bool, device=query.device)
    mask = visible.tril(context - query_len) if query_len > 1 else None
    out = functional.scaled_dot_product_attention(
        rows, keys, values, attn_mask=mask, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(query.shape)


def sweep_attention(shape: AttentionShape, copy: float) -> list[dict[str, object]]:
    """Rows for other tile sizes, warps, stages and splits of the same shape."""
    sets = make_attention_inputs(shape, num_sets=2, device="cuda")
    block_m = 16 if shape.query_len * shape.num_heads // shape.num_kv_heads <= 16 else 64
    fixed = {"max_query_len": shape.query_len, "scale": shape.head_dim**-0.5}
    fixed |= dict.fromkeys(("sliding_window", "sinks", "positions", "kv_start"))
    rows = []
    for block_n, warps, stages in [(32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 8, 2)]:
        for num_splits in (2, 4, 6, 8):
            config = LaunchConfig(block_m, block_n, warps, stages)
            calls = [
                lambda s=s, n=num_splits, c=config: launch_paged_attention(
                    **s, **fixed, num_splits=n, config=c
                )
                for s in sets
            ]
            label = f"{shape.label()} {tuple(config)} splits={num_splits}"
            rows.append(_row("sweep", label, shape.num_bytes(), _time_peer(calls), None, copy))
    return rows


def _time_peer(calls: list[Callable[[], object]]) -> Timing | None:
    """A timing, or None for a variant that this machine cannot build or capture."""
    try:
        return time_calls(calls)
    except (RuntimeError, ValueError) as error:
        print(f"skipped: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def _row(
    name: str, label: str, num_bytes: int, ours: Timing | None, peer: Timing | None, copy: float
) -> dict[str, object]:
    row: dict[str, object] = {"kernel": name, "shape": label, "bytes": num_bytes}
    text = f"{name:<16}{label:<46}"
    if ours is not None:
        share = num_bytes / ours.median_us / 1e6 / copy
        row |= {"median_us": ours.median_us, "spread_us": ours.spread_us, "share_of_copy": share}
        text += f"{ours.median_us:9.1f} us +- {ours.spread_us:6.1f}  {share:6.1%} of copy"
    if ours is not None and peer is not None:
        row |= {"peer_us": peer.median_us, "speedup": peer.median_us / ours.median_us}
        text += f"  peer {peer.median_us:9.1f} us  {row['speedup']:6.2f}x"
    print(text, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
