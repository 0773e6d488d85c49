"""Measure the kernels against the ceilings of the device and against PyTorch, in one run.

    python -m mtp_research.kernels.bench [--quick] [--sweep] [--all [NAME ...]] [--json PATH]

Prints the ceilings (copy, read, bf16 matmul), then a line per kernel and shape: median time, share
of the copy bandwidth, the same work in compiled PyTorch, and in FlashInfer and vLLM where they are
installed. `--sweep` tries other launch shapes, `--all` runs every benchmark of this folder.
Every timing replays a CUDA graph of calls whose inputs rotate through more memory than the L2 cache
holds, so neither the host nor a warm cache is measured. Without a CUDA device it exits with 4.
Letters: B requests, H / Hkv heads, D head dim, q rows a request.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from mtp_research.kernels.attention.attention_launch import LaunchConfig, launch_paged_attention
from mtp_research.kernels.attention.paged_attention import paged_attention, paged_attention_ref
from mtp_research.kernels.attention.store_kv import store_kv
from mtp_research.kernels.bench_entry import Rows, make_bench_parser, run_bench
from mtp_research.kernels.bench_peers import import_peers, time_peers
from mtp_research.kernels.bench_timing import Timing, time_calls
from mtp_research.kernels.losses.gather_rows import gather_rows, gather_rows_ref
from torch import Tensor
from torch.nn import functional

_ROTATED_BYTES = 512 * 2**20  # ten times the H200's L2


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
    *(
        AttentionShape(8, 8192, q, num_heads=96, block_size=size)
        for size in (16, 64)
        for q in (1, 4)
    ),
]
QUICK_SHAPES = [AttentionShape(8, 8192, 1), AttentionShape(8, 8192, 4), AttentionShape(1, 1024, 4)]
SWEEP_SHAPES = [AttentionShape(8, 8192, 4), AttentionShape(8, 8192, 4, num_heads=96)]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_bench(measure, make_parser(), arguments)


def make_parser() -> argparse.ArgumentParser:
    """Options of this benchmark."""
    parser = make_bench_parser("bench")
    parser.add_argument("--quick", action="store_true", help="three attention shapes only")
    parser.add_argument("--sweep", action="store_true", help="try launch shapes of the attention")
    parser.add_argument("--all", nargs="*", help="rows of every bench_* module, or of these")
    return parser


def measure(ceilings: dict[str, float], options: argparse.Namespace) -> Rows:
    """Rows of stores, gathers and attention; with `--all` those of every module."""
    if options.all is not None:
        from mtp_research.kernels.bench_all import MODULES, measure_all

        return measure_all(ceilings, options.json, names=options.all or list(MODULES))
    copy, peers = ceilings["copy_tb_per_s"], import_peers()
    rows = [*bench_store_kv(copy), bench_gather_rows(copy)]
    shapes = QUICK_SHAPES if options.quick else FULL_SHAPES
    rows += [bench_attention(shape, copy, peers) for shape in shapes]
    if options.sweep:
        for shape in SWEEP_SHAPES:
            rows += sweep_attention(shape, copy)
    return rows


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

        # Not compiled: Inductor would copy the captured caches whole at every call.
        def peer(slot_mapping: Tensor, key=key, value=value, caches=caches) -> None:
            caches[0].view(-1, 8, 128).index_copy_(0, slot_mapping, key)
            caches[1].view(-1, 8, 128).index_copy_(0, slot_mapping, value)

        ours = time_calls([lambda s=s, run=run: run(s) for s in slots])
        theirs = _time_peer([lambda s=s, peer=peer: peer(s) for s in slots])
        rows.append(_row("store_kv", f"T={num_rows} 8 d128", num_bytes, ours, theirs, copy))
    return rows


def bench_gather_rows(copy: float) -> dict[str, object]:
    """One row: the gradients of 8192 drafts' rows back to their anchors, a quarter without any."""
    num_rows, hidden_size = 8192, 4096
    sources = _ROTATED_BYTES // (2 * hidden_size)
    values = torch.randn(sources, hidden_size, device="cuda", dtype=torch.bfloat16)
    scale = torch.rand(num_rows, device="cuda")
    out = values.new_empty(num_rows, hidden_size)
    places = torch.randperm(sources, device="cuda").split(num_rows)
    has_none = torch.arange(num_rows, device="cuda") % 4 == 0
    indices = [place.masked_fill(has_none, -1) for place in places]
    fixed = {"out": out, "scale": scale}
    gather_rows(values, index=indices[0], **fixed)
    expected = torch.empty_like(out)
    gather_rows_ref(values, index=indices[0], out=expected, scale=scale)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    ours = time_calls([lambda i=i: gather_rows(values, index=i, **fixed) for i in indices])
    torch.compiler.reset()
    compiled = torch.compile(gather_rows_ref, dynamic=False)
    theirs = _time_peer([lambda i=i: compiled(values, index=i, **fixed) for i in indices])
    num_bytes = out.nbytes + out.nbytes * 3 // 4  # written whole, three quarters read
    label = f"R={num_rows} D={hidden_size} scaled"
    return _row("gather_rows", label, num_bytes, ours, theirs, copy)


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


def bench_attention(
    shape: AttentionShape, copy: float, peers: dict[str, ModuleType]
) -> dict[str, object]:
    """One table row: the kernel, and gather + SDPA compiled; checks the result first."""
    num_sets = max(2, min(128, _ROTATED_BYTES // shape.num_bytes()))
    sets = make_attention_inputs(shape, num_sets=num_sets, device="cuda")
    options = {"max_query_len": shape.query_len, "scale": shape.head_dim**-0.5}
    expected = paged_attention_ref(**sets[0], **options)
    torch.testing.assert_close(
        paged_attention(**sets[0], **options), expected, atol=2e-2, rtol=2e-2
    )
    ours = time_calls([lambda s=s: paged_attention(**s, **options) for s in sets])
    torch.compiler.reset()  # past eight shapes Dynamo would fall back to eager
    compiled = torch.compile(gather_sdpa, dynamic=False)
    theirs = _time_peer([lambda s=s: compiled(**s) for s in sets])
    row = _row("paged_attention", shape.label(), shape.num_bytes(), ours, theirs, copy)
    return row | {"peers": time_peers(peers, sets, expected, **options)}


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
