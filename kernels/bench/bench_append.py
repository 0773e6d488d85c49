"""Attention that stores the step's rows against a store in front of it, and where rows are rotated.

Where it sits: the benchmark `append` of `kernels.bench`. A line per shape: store, attention and
merge as launches of their own (`two`), and with the store inside the attention programs (`one`).
Each is first compared with float32 over pages whose new rows hold NaN. `--rotary` times rotary
embeddings instead, always with the store inside: in a compiled launch in front (`apart`), in the
attention programs (`inside`), and none at all (`none`).
Letters: B requests, q rows a request, P rotary dims.
"""

import argparse
import functools
from collections.abc import Callable

import torch
from mtp_research.kernels.attention.attention_launch import LaunchConfig
from mtp_research.kernels.attention.store_kv import NewRows, rotate_ref, store_kv
from mtp_research.kernels.bench import bench_runner as runner
from mtp_research.kernels.bench.bench_attention import (
    AttentionShape,
    LatentShape,
    attend_latents,
    attend_pages,
    latent_attention_ref,
    launch_paged_attention,
    make_attention_inputs,
    make_latent_inputs,
    paged_attention_ref,
)
from torch import Tensor

Calls = dict[str, list[Callable[[], Tensor]]]

_GROUP_12 = AttentionShape(8, 8192, 4, num_heads=96, block_size=64)
# Launch shapes and splits that fill the SMs with one, two or three programs each.
CANDIDATES = [
    *((LaunchConfig(64, 64, 4, 3), None), (LaunchConfig(64, 64, 8, 2), None)),
    *((LaunchConfig(64, 32, 8, 4), None), (LaunchConfig(64, 64, 4, 2), None)),
    *((LaunchConfig(64, 32, 4, 3), 6), (LaunchConfig(64, 64, 8, 3), 2)),
    (LaunchConfig(64, 128, 8, 3), 2),
]
_PAIRS = [AttentionShape(8, 8192, q, 96, block_size=size) for size in (16, 64) for q in (1, 4)]
SHAPES = [
    *(AttentionShape(*size, q) for size in ((1, 1024), (32, 1024), (8, 8192)) for q in (1, 4, 8)),
    *_PAIRS,
]
LATENT_SHAPES = [
    *(LatentShape(1, 1024, 4, num_heads) for num_heads in (16, 20, 64, 128)),
    *(LatentShape(32, 8192, 4, num_heads) for num_heads in (16, 20, 64, 128)),
    *(LatentShape(32, 8192, q, 16, 16) for q in (1, 2, 4)),
    *(LatentShape(32, 8192, 4, num_heads, 16) for num_heads in (64, 128)),
    *(LatentShape(batch, 1024, q, 20, 16) for batch in (1, 32) for q in (1, 4)),
]
# MiMo-7B's and the dense 1B's layers, then GLM-4.5-Air's.
ROTARY_SHAPES = [
    *((AttentionShape(batch, 1024, q), 128) for batch in (1, 32) for q in (1, 4)),
    *((AttentionShape(batch, 1024, 4, num_heads=96), 64) for batch in (1, 32)),
]


def _measure_append(ceilings: dict[str, float], options: argparse.Namespace) -> runner.Rows:
    copy = ceilings["copy_tb_per_s"]
    if options.candidates:
        return [time_candidate(_GROUP_12, *candidate, copy) for candidate in CANDIDATES]
    if options.rotary:
        return [
            _report(shape, rotary_calls(shape, num_dims), copy, note=f" P={num_dims}")
            for shape, num_dims in ROTARY_SHAPES
        ]
    rows = [_report(shape, store_calls(shape), copy) for shape in SHAPES]
    for one, four in zip(_PAIRS[::2], _PAIRS[1::2], strict=True):
        times = [row["one_us"] for row in rows if row["shape"] in (one.label(), four.label())]
        rows.append({"shape": four.label(), "time_to_one_row": times[1] / times[0]})
        print(f"{four.label()}: {times[1] / times[0]:.3f} of the time of q=1", flush=True)
    return rows + [_report(shape, store_calls(shape), copy) for shape in LATENT_SHAPES]


def _add_append_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--candidates", action="store_true", help="launch shapes for 96/8 heads")
    parser.add_argument("--rotary", action="store_true", help="where rows are rotated")


APPEND = runner.Bench(_measure_append, _add_append_options)


def time_candidate(
    shape: AttentionShape, config: LaunchConfig, num_splits: int | None, copy: float
) -> runner.Row:
    """Times attention alone in one launch shape, with its merge."""
    fixed = shape.options() | dict.fromkeys(("sliding_window", "sinks", "positions", "kv_start"))
    calls = [
        functools.partial(
            launch_paged_attention, **inputs, **fixed, num_splits=num_splits, config=config
        )
        for inputs in make_attention_inputs(shape, num_sets=2, device="cuda")
    ]
    row: runner.Row = {"kernel": f"{tuple(config)} splits={num_splits}", "shape": shape.label()}
    row |= {"config": tuple(config), "num_splits": num_splits, "bytes": shape.num_bytes()}
    return runner.show_row(row, runner.time_calls(calls), copy=copy)


def store_calls(shape: AttentionShape | LatentShape) -> Calls:
    """Calls over rotating inputs, by number of launches before the merge; checked."""
    is_latent = isinstance(shape, LatentShape)
    make, attention, reference = (
        (make_latent_inputs, attend_latents, latent_attention_ref)
        if is_latent
        else (make_attention_inputs, attend_pages, paged_attention_ref)
    )
    num_sets, fixed = runner.num_rotated(shape.num_bytes(), most=64), shape.options()
    calls: Calls = {"two": [], "one": []}
    for inputs in make(shape, num_sets=num_sets, device="cuda"):
        if is_latent:
            width, cache = inputs["query_latent"].shape[2], inputs["latent_cache"][:, :, None]
            pools = (cache[..., :width], cache[..., width:])
        else:
            pools = (inputs["key_cache"], inputs["value_cache"])
        num_rows = shape.num_requests * shape.query_len
        rows = [(num_rows, *pool.shape[2:]) for pool in pools]
        new = NewRows(*_random_rows(*rows), _new_slots(inputs, shape))
        attend = functools.partial(attention, **inputs, **fixed, backend="triton")
        expected = functools.partial(reference, **inputs, **fixed)
        _add_calls(calls, attend, expected, new, pools)
    return calls


def rotary_calls(shape: AttentionShape, num_dims: int) -> Calls:
    """Calls over rotating inputs, by where their rows are rotated; checked."""
    num_sets = runner.num_rotated(shape.num_bytes(), most=64)
    fixed = shape.options() | {"backend": "triton"}
    num_rows = shape.num_requests * shape.query_len
    sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    calls: Calls = {"apart": [], "inside": [], "none": []}
    rotate = torch.compile(_rotate_both, dynamic=False)
    for inputs in make_attention_inputs(shape, num_sets=num_sets, device="cuda"):
        (product,) = _random_rows((num_rows, sum(sizes), shape.head_dim))
        query, key, value = product.split(sizes, dim=1)
        angle = torch.randn(num_rows, num_dims, device="cuda")
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        slots = _new_slots(inputs, shape)
        inputs.pop("query")
        attend = functools.partial(attend_pages, **inputs, **fixed)

        def apart(attend=attend, rows=(query, key, cos, sin), value=value, slots=slots) -> Tensor:
            query, key = rotate(*rows)
            return attend(query, new_rows=NewRows(key, value, slots))

        rows = NewRows(key, value, slots)
        rotated_inside = functools.partial(attend, query, new_rows=rows._replace(cos=cos, sin=sin))
        if not calls["apart"]:  # the first set is compared
            torch.testing.assert_close(rotated_inside(), apart(), atol=2e-2, rtol=2e-2)
        calls["apart"].append(apart)
        calls["inside"].append(rotated_inside)
        calls["none"].append(functools.partial(attend, query, new_rows=rows))
    return calls


def _rotate_both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate_ref(query, cos, sin), rotate_ref(key, cos, sin)


def _new_slots(inputs: dict[str, Tensor], shape: AttentionShape | LatentShape) -> Tensor:
    """Slots `[T]` of the last positions of each request."""
    pos = inputs["seq_lens"].long()[:, None] - shape.query_len
    pos = pos + torch.arange(shape.query_len, device=pos.device)
    block_size = shape.block_size
    slots = inputs["block_table"].gather(1, pos // block_size).long() * block_size
    return (slots + pos % block_size).flatten()


def _random_rows(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def _add_calls(
    calls: Calls,
    attend: Callable[..., Tensor],
    expected: Callable[[], Tensor],
    new: NewRows,
    pools: tuple[Tensor, Tensor],
) -> None:
    def store_then_attend() -> Tensor:
        key_cache, value_cache = pools
        store_kv(*new[:2], key_cache=key_cache, value_cache=value_cache, slot_mapping=new[2])
        return attend()

    both = {"two": store_then_attend, "one": functools.partial(attend, new_rows=new)}
    for name, call in both.items():
        if not calls[name]:  # the first set is compared
            for pool in pools:
                pool[new[2] // pool.shape[1], new[2] % pool.shape[1]] = torch.nan
            torch.testing.assert_close(call(), expected(), atol=2e-2, rtol=2e-2)
        calls[name].append(call)


def _report(
    shape: AttentionShape | LatentShape, calls: Calls, copy: float, *, note: str = ""
) -> runner.Row:
    """One row: time and share of the copy bandwidth of every way."""
    is_latent = isinstance(shape, LatentShape)
    row: runner.Row = {"shape": f"{'MLA ' * is_latent}{shape.label()}{note}"}
    parts = []
    for name, variants in calls.items():
        timing = runner.time_calls(variants)
        share = shape.num_bytes() / timing.median_us / 1e6 / copy
        row |= {f"{name}_us": timing.median_us, f"{name}_spread_us": timing.spread_us}
        row[f"{name}_share_of_copy"] = share
        text = f"{name} {timing.median_us:8.2f} us +- {timing.spread_us:5.2f} {share:6.1%}"
        if is_latent:
            row[f"{name}_tflop_per_s"] = shape.num_flops() / timing.median_us / 1e6
            text += f" {row[f'{name}_tflop_per_s']:6.1f} TFLOP/s"
        parts.append(text)
    print(f"{row['shape']:<50}{'  '.join(parts)}", flush=True)
    return row
