"""Attention over pages of keys and values or of latents, stores into pages, gathers of rows.

Where it sits: the benchmarks `attention` (the default) and `latent` of `kernels.bench`; the peer is
compiled PyTorch, which gathers the pages and then runs its fused attention. Few latent heads are
bound by bandwidth, many by the tensor cores; the store of new rows is `append`'s.
Letters: B requests, H / Hkv heads, D head dim, q rows a request.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from mtp_research.kernels.attention import attention_launch
from mtp_research.kernels.attention import paged_attention as pages
from mtp_research.kernels.attention.attention_launch import LaunchConfig
from mtp_research.kernels.attention.attention_rows import AttentionRows, PagedKV, Scoring
from mtp_research.kernels.attention.store_kv import NewRows, store_kv
from mtp_research.kernels.bench import bench_runner as runner
from mtp_research.kernels.latent import expanded_attention as expanded
from mtp_research.kernels.latent import latent_attention as latents
from mtp_research.kernels.latent.expanded_attention import Prompts, Span
from mtp_research.kernels.losses.cross_entropy import gather_rows, gather_rows_ref
from torch import Tensor
from torch.nn import functional

_LATENT_DIM, _ROPE_DIM = 512, 64
Inputs = list[dict[str, Tensor]]


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
        return _label(self, f"{self.num_heads}/{self.num_kv_heads} d{self.head_dim}")

    def num_bytes(self) -> int:
        """Bytes that must move: K and V once, query and output once (bf16)."""
        kv = 2 * self.num_requests * self.context * self.num_kv_heads * self.head_dim
        rows = 2 * self.num_requests * self.query_len * self.num_heads * self.head_dim
        return 2 * (kv + rows)

    def options(self) -> dict[str, float]:
        """Arguments of the attention that are no tensors."""
        return {"max_query_len": self.query_len, "scale": self.head_dim**-0.5}


class LatentShape(NamedTuple):
    """Likewise, over latents of 512 and rotary keys of 64."""

    num_requests: int
    context: int
    query_len: int
    num_heads: int
    block_size: int = 64

    def label(self) -> str:
        """The shape in words for the table."""
        return _label(self, f"H={self.num_heads}")

    def num_bytes(self) -> int:
        """Bytes that must move: latents once, queries and output once (bf16)."""
        width = _LATENT_DIM + _ROPE_DIM
        rows = self.num_requests * self.query_len * self.num_heads * (width + _LATENT_DIM)
        return 2 * (self.num_requests * self.context * width + rows)

    def num_flops(self) -> int:
        """Multiplications and additions of the two products."""
        rows = self.num_requests * self.query_len * self.num_heads
        return 2 * rows * self.context * (2 * _LATENT_DIM + _ROPE_DIM)

    def options(self) -> dict[str, float]:
        """Arguments of the attention that are no tensors."""
        return {"max_query_len": self.query_len, "scale": (128 + _ROPE_DIM) ** -0.5}


class PromptShape(NamedTuple):
    """One prompt chunk of a latent layer of GLM-4.7-Flash."""

    num_rows: int
    context: int  # tokens before the chunk
    num_heads: int = 20
    nope_dim: int = 192
    value_dim: int = 256
    block_size: int = 16

    def label(self) -> str:
        """The shape in words for the table."""
        return f"chunk={self.num_rows} ctx={self.context} H={self.num_heads}"

    def num_flops(self) -> int:
        """Multiplications and additions of the expanded way, expansion included."""
        width, pairs = self.nope_dim + self.value_dim, self.num_rows * self.context
        pairs += self.num_rows * (self.num_rows + 1) // 2
        expansion = (self.context + self.num_rows) * _LATENT_DIM * width
        return 2 * self.num_heads * (expansion + pairs * (width + _ROPE_DIM))


def _label(shape: AttentionShape | LatentShape, heads: str) -> str:
    sizes = f"B={shape.num_requests} ctx={shape.context} q={shape.query_len}"
    return f"{sizes} {heads} page={shape.block_size}"


FULL_SHAPES = [
    *(AttentionShape(8, 8192, q, block_size=size) for size in (16, 64) for q in (1, 4, 8)),
    *(AttentionShape(batch, 1024, q) for batch in (1, 32) for q in (1, 4)),
    *(AttentionShape(8, 8192, q, 96, block_size=size) for size in (16, 64) for q in (1, 4)),
    *(AttentionShape(batch, 131_072, 4) for batch in (1, 4)),
    *(AttentionShape(1, 131_072, 4, 4 * kv_heads, kv_heads) for kv_heads in (1, 2)),
]
QUICK_SHAPES = [AttentionShape(8, 8192, 1), AttentionShape(8, 8192, 4), AttentionShape(1, 1024, 4)]
SWEEP_SHAPES = [AttentionShape(8, 8192, 4), AttentionShape(8, 8192, 4, num_heads=96)]
_LATENT_SIZES = itertools.product((1, 32), (16, 20, 128), (1, 4))
PROMPT_SHAPES = [PromptShape(*sizes) for sizes in itertools.product((1024, 4096), (0, 8192))]
LATENT_SHAPES = [LatentShape(batch, 8192, q, num_heads) for batch, num_heads, q in _LATENT_SIZES]


def measure_attention(ceilings: dict[str, float], options: argparse.Namespace) -> runner.Rows:
    """Rows of stores, gathers and attention."""
    copy, peers = ceilings["copy_tb_per_s"], runner.import_peers()
    rows = [*(bench_store_kv(count, copy) for count in (32, 8192)), bench_gather_rows(copy)]
    shapes = QUICK_SHAPES if options.quick else FULL_SHAPES
    rows += [bench_attention(shape, copy, peers) for shape in shapes]
    if options.sweep:
        rows += [row for shape in SWEEP_SHAPES for row in sweep_attention(shape, copy)]
    return rows


def _add_attention_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="three attention shapes only")
    parser.add_argument("--sweep", action="store_true", help="try launch shapes of the attention")


def _measure_latent(ceilings: dict[str, float], options: argparse.Namespace) -> runner.Rows:
    copy, peers = ceilings["copy_tb_per_s"], runner.import_peers()
    rows = [bench_attention(shape, copy, peers) for shape in LATENT_SHAPES]
    return rows + [bench_prompt(shape, copy) for shape in PROMPT_SHAPES]


ATTENTION = runner.Bench(measure_attention, _add_attention_options)
LATENT = runner.Bench(_measure_latent)


def bench_store_kv(num_rows: int, copy: float) -> runner.Row:
    """A row for a verify step (32 rows) or a prefill step (8192 rows), 8 heads of 128."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    key, value = (torch.randn(num_rows, 8, 128, **options) for _ in range(2))
    num_bytes = 4 * key.nbytes  # both are read and written
    num_blocks = max(2 * num_rows // 16, runner.ROTATED_BYTES // (16 * key[0].nbytes))
    caches = [key.new_zeros(num_blocks, 16, 8, 128) for _ in range(2)]
    slots = torch.randperm(num_blocks * 16, device="cuda").split(num_rows)[:64]

    def run(slot_mapping: Tensor) -> None:
        store_kv(key, value, key_cache=caches[0], value_cache=caches[1], slot_mapping=slot_mapping)

    # Not compiled: Inductor would copy the captured caches whole at every call.
    def peer(slot_mapping: Tensor) -> None:
        caches[0].view(-1, 8, 128).index_copy_(0, slot_mapping, key)
        caches[1].view(-1, 8, 128).index_copy_(0, slot_mapping, value)

    ours = runner.time_calls([lambda s=s: run(s) for s in slots])
    theirs = runner.try_calls([lambda s=s: peer(s) for s in slots])
    row = {"kernel": "store_kv", "shape": f"T={num_rows} 8 d128", "bytes": num_bytes}
    return runner.show_row(row, ours, theirs, copy=copy)


def bench_gather_rows(copy: float) -> runner.Row:
    """One row: the gradients of 8192 drafts' rows back to their anchors, a quarter without any."""
    num_rows, hidden_size = 8192, 4096
    sources = runner.ROTATED_BYTES // (2 * hidden_size)
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
    ours = runner.time_calls([lambda i=i: gather_rows(values, index=i, **fixed) for i in indices])
    peer = runner.compiled(gather_rows_ref)
    theirs = runner.try_calls([lambda i=i: peer(values, index=i, **fixed) for i in indices])
    num_bytes = out.nbytes + out.nbytes * 3 // 4  # written whole, three quarters read
    label = f"R={num_rows} D={hidden_size} scaled"
    row = {"kernel": "gather_rows", "shape": label, "bytes": num_bytes}
    return runner.show_row(row, ours, theirs, copy=copy)


def bench_prompt(shape: PromptShape, copy: float) -> runner.Row:
    """One row: a prompt chunk expanded, and as its peer absorbed, which was the only way before."""
    prompt = make_prompt(shape, device="cuda")
    expected = prompt.attend(expands=False)
    torch.testing.assert_close(prompt.attend(expands=True), expected, atol=5e-2, rtol=2e-2)
    ours, theirs = (
        runner.try_calls([functools.partial(prompt.attend, expands=expands)] * 2)
        for expands in (True, False)
    )
    num_bytes = 2 * (shape.context + shape.num_rows) * (_LATENT_DIM + _ROPE_DIM)
    row = {"kernel": "expanded_prompt", "shape": shape.label(), "bytes": num_bytes}
    return runner.show_row(row, ours, theirs, copy=copy, num_flops=shape.num_flops())


class PromptInputs(NamedTuple):
    """A chunk and its pages; arguments as in `attend_latent_rows`."""

    query: Tensor
    weight: Tensor
    latent_cache: Tensor
    rows: AttentionRows
    new_rows: NewRows
    plan: expanded.ExpandedRows

    def attend(self, *, expands: bool) -> Tensor:
        """Output of the chunk, read in one of the two ways."""
        return expanded.attend_latent_rows(
            *self[:4],
            scale=self.query.shape[2] ** -0.5,
            new_rows=self.new_rows,
            backend="auto",
            expanded=self.plan if expands else None,
        )


def make_prompt(shape: PromptShape, *, device: str) -> PromptInputs:
    """A random chunk over shuffled random pages."""
    options = {"device": device, "dtype": torch.bfloat16}
    span = Span(shape.context, shape.num_rows)
    width, num_blocks = _LATENT_DIM + _ROPE_DIM, -(-span.num_keys // shape.block_size)
    query = torch.randn(shape.num_heads, shape.num_rows, shape.nope_dim + _ROPE_DIM, **options)
    weight = torch.randn(shape.num_heads, shape.nope_dim + shape.value_dim, _LATENT_DIM, **options)
    cache = torch.randn(num_blocks, shape.block_size, width, **options)
    table = torch.randperm(num_blocks, device=device)
    starts, lens = (
        torch.tensor(values, device=device, dtype=torch.int32)
        for values in ([0, shape.num_rows], [span.num_keys])
    )
    rows = AttentionRows(table.int()[None], lens, starts, shape.num_rows)
    position = torch.arange(span.first, span.num_keys, device=device)
    slots = table[position // shape.block_size] * shape.block_size + position % shape.block_size
    new = torch.randn(shape.num_rows, 1, width, **options)
    prompts = Prompts((span,), num_others=0, longest_other=0, num_launched=0)
    return PromptInputs(
        query,
        weight / _LATENT_DIM**0.5,
        cache,
        rows,
        NewRows(*new.split((_LATENT_DIM, _ROPE_DIM), dim=-1), slots),
        expanded.expanded_rows(rows, prompts, block_size=shape.block_size),
    )


def bench_attention(
    shape: AttentionShape | LatentShape, copy: float, peers: dict[str, ModuleType]
) -> runner.Row:
    """One table row: the kernel, and gather + SDPA compiled; checks the result first."""
    options, num_sets = shape.options(), runner.num_rotated(shape.num_bytes())
    num_flops, fixed = 0, {}
    if isinstance(shape, LatentShape):
        make, attend, reference = make_latent_inputs, latent_attention, latent_attention_ref
        gather, num_flops = gather_latent_sdpa, shape.num_flops()
        fixed = {"scale": options["scale"]}
    else:
        make, attend, reference = make_attention_inputs, paged_attention, paged_attention_ref
        gather = gather_sdpa
    sets = make(shape, num_sets=num_sets, device="cuda")
    expected = reference(**sets[0], **options)
    torch.testing.assert_close(attend(**sets[0], **options), expected, atol=2e-2, rtol=2e-2)
    ours = runner.time_calls([lambda s=s: attend(**s, **options) for s in sets])
    peer = runner.compiled(gather)
    theirs = runner.try_calls([lambda s=s: peer(**s, **fixed) for s in sets])
    row = {"kernel": attend.__name__, "shape": shape.label(), "bytes": shape.num_bytes()}
    row = runner.show_row(row, ours, theirs, copy=copy, num_flops=num_flops)
    return row | {"peers": runner.time_peers(peers, sets, expected, **options)}


def sweep_attention(shape: AttentionShape, copy: float) -> runner.Rows:
    """Rows for other tile sizes, warps, stages and splits of the same shape."""
    sets = make_attention_inputs(shape, num_sets=2, device="cuda")
    block_m = 16 if shape.query_len * shape.num_heads // shape.num_kv_heads <= 16 else 64
    fixed = shape.options() | dict.fromkeys(("sliding_window", "sinks", "positions", "kv_start"))
    rows = []
    for block_n, warps, stages in [(32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 8, 2)]:
        for num_splits in (2, 4, 6, 8):
            config = LaunchConfig(block_m, block_n, warps, stages)
            launch = functools.partial(launch_paged_attention, **fixed, config=config)
            calls = [functools.partial(launch, **s, num_splits=num_splits) for s in sets]
            label = f"{shape.label()} {tuple(config)} splits={num_splits}"
            row = {"kernel": "sweep", "shape": label, "bytes": shape.num_bytes()}
            rows.append(runner.show_row(row, runner.try_calls(calls), copy=copy))
    return rows


def make_attention_inputs(shape: AttentionShape, *, num_sets: int, device: str) -> Inputs:
    """`num_sets` batches over one shuffled random pool, named as arguments of paged_attention."""
    tables = _page_tables(shape, num_sets=num_sets, device=device)
    num_blocks = sum(table["block_table"].numel() for table in tables)
    pool = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    options = {"device": device, "dtype": torch.bfloat16}
    caches = {name: torch.randn(pool, **options) for name in ("key_cache", "value_cache")}
    rows = (shape.num_requests * shape.query_len, shape.num_heads, shape.head_dim)
    return [{"query": torch.randn(rows, **options), **caches, **table} for table in tables]


def make_latent_inputs(shape: LatentShape, *, num_sets: int, device: str) -> Inputs:
    """Likewise, named as arguments of latent_attention."""
    tables, width = _page_tables(shape, num_sets=num_sets, device=device), _LATENT_DIM + _ROPE_DIM
    num_blocks = sum(table["block_table"].numel() for table in tables)
    cache = torch.randn(num_blocks, shape.block_size, width, device=device, dtype=torch.bfloat16)
    rows = (shape.num_requests * shape.query_len, shape.num_heads, width)
    inputs = []
    for table in tables:
        query = torch.randn(rows, device=device, dtype=torch.bfloat16)
        latent, rope = query.split((_LATENT_DIM, _ROPE_DIM), dim=-1)
        queries = {"query_latent": latent.contiguous(), "query_rope": rope.contiguous()}
        inputs.append(queries | {"latent_cache": cache} | table)
    return inputs


def _page_tables(
    shape: AttentionShape | LatentShape, *, num_sets: int, device: str
) -> list[dict[str, Tensor]]:
    """Block tables that share no page, lengths and row starts of `num_sets` batches."""
    num_columns = shape.context // shape.block_size
    num_blocks = num_sets * shape.num_requests * num_columns
    tables = torch.randperm(num_blocks, device=device).to(torch.int32)
    num_rows = shape.num_requests * shape.query_len
    starts = torch.arange(0, num_rows + 1, shape.query_len, device=device, dtype=torch.int32)
    seq_lens = torch.full((shape.num_requests,), shape.context, device=device, dtype=torch.int32)
    return [
        {"block_table": table, "seq_lens": seq_lens, "query_start_loc": starts}
        for table in tables.view(num_sets, shape.num_requests, num_columns)
    ]


def gather_sdpa(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """The peer: pages gathered by PyTorch, then its fused attention; equal lengths only."""
    rows = query.view(seq_lens.shape[0], -1, *query.shape[1:]).transpose(1, 2)
    keys, values = (
        cache[block_table].flatten(1, 2).transpose(1, 2) for cache in (key_cache, value_cache)
    )
    mask = _causal_mask(rows, keys) if rows.shape[2] > 1 else None
    out = functional.scaled_dot_product_attention(
        rows, keys, values, attn_mask=mask, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(query.shape)


def gather_latent_sdpa(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Likewise, over latents."""
    query = torch.cat((query_latent, query_rope), dim=-1)
    rows = query.view(seq_lens.shape[0], -1, *query.shape[1:]).transpose(1, 2)
    keys = latent_cache[block_table].flatten(1, 2)[:, None]
    mask, values = _causal_mask(rows, keys), keys[..., :_LATENT_DIM]
    out = functional.scaled_dot_product_attention(
        rows, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(query_latent.shape)


def _causal_mask(rows: Tensor, keys: Tensor) -> Tensor:
    """`[q, context]`, where the last row sees every key."""
    query_len, context = rows.shape[2], keys.shape[2]
    visible = torch.ones(query_len, context, dtype=torch.bool, device=rows.device)
    return visible.tril(context - query_len)


def _flat(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` with one dictionary of tensors, as its reference and its peers take them."""

    @functools.wraps(function)
    def call(*operands: Tensor, **keywords: Any) -> Tensor:
        def taken(fields: tuple[str, ...]) -> dict[str, Any]:
            return {name: keywords.pop(name) for name in fields if name in keywords}

        keywords["rows"] = AttentionRows(**taken(AttentionRows._fields))
        if "key_cache" in keywords:
            keywords["kv"] = PagedKV(keywords.pop("key_cache"), keywords.pop("value_cache"))
            keywords["scoring"] = Scoring(**taken(Scoring._fields))
        return function(*operands, **keywords)

    return call


paged_attention = _flat(pages.paged_attention)
paged_attention_ref = _flat(pages.paged_attention_ref)
attend_pages = _flat(pages.attend_pages)
launch_paged_attention = _flat(attention_launch.launch_paged_attention)
latent_attention = _flat(latents.latent_attention)
latent_attention_ref = _flat(latents.latent_attention_ref)
attend_latents = _flat(latents.attend_latents)
