"""What the kernel benchmarks share: timing, ceilings, rows, their report, and other libraries.

A timing replays one CUDA graph of many calls whose inputs rotate through more memory than the L2
cache holds, so that neither the host's launches nor a warm cache is measured. Calls too long for a
graph are timed one by one (`measure_wall`). Other libraries' attention over pages is timed in the
same run where they can be imported: one that is not installed is named once, one that refuses a
shape gives its reason as the row.
Letters: B requests, M pages a request.
"""

import argparse
import functools
import importlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeVar

import torch
from mtp_research.kernels import checks
from torch import Tensor

ROTATED_BYTES = 512 * 2**20  # ten times the H200's L2
_COPY_BYTES = 4 * 2**30
_MATMUL_SIZE = 8192
_NUM_WARM_UP = 2
PEERS = {"flashinfer": "flashinfer", "vllm": "vllm.vllm_flash_attn"}
_WORKSPACE_BYTES = 128 * 2**20
_NUM_SETS = 8  # a plan has buffers of its own
_REFUSALS = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
_FOLDER = str(Path(__file__).parent)

Result = TypeVar("Result")
Row = dict[str, object]
Rows = list[Row]


class Bench(NamedTuple):
    """One benchmark of `python -m mtp_research.kernels.bench`."""

    # Rows from the ceilings (none without a GPU) and the options.
    measure: Callable[[dict[str, float], argparse.Namespace], Rows]
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    words: tuple[str, ...] = ()  # options under `--all`, where the default takes too long
    needs_gpu: bool = True  # the others have tiny sizes for a CPU


class Timing(NamedTuple):
    """Time of one call, from replays of a graph of many."""

    median_us: float
    spread_us: float  # slowest minus fastest replay


class Wall(NamedTuple):
    """Time of a call, and the memory it needed above what was allocated before; None on a CPU."""

    median_ms: float
    spread_ms: float  # slowest minus fastest
    peak_bytes: int | None


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


def try_calls(calls: list[Callable[[], object]]) -> Timing | None:
    """`time_calls`, or None for a variant that this machine cannot build or capture."""
    try:
        return time_calls(calls)
    except (RuntimeError, ValueError) as error:
        print(f"skipped: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def num_rotated(num_bytes: int, *, most: int = 128) -> int:
    """Sets of inputs of `num_bytes` that are more than the L2 cache holds."""
    return max(2, min(most, ROTATED_BYTES // num_bytes))


def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """`function` compiled for the shapes of its first call; past eight Dynamo would go eager."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def measure_wall(
    call: Callable[[], Result], *, device: torch.device, num_repeats: int
) -> tuple[Result, Wall]:
    """The call's last result and its figures, after two calls that are not counted."""
    on_gpu = device.type == "cuda"
    for _ in range(_NUM_WARM_UP):
        call()
    times_ms, peak_bytes = [], None
    for _ in range(num_repeats):
        result = None  # its memory is not the next call's
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        elapsed_ms, result = timed(call, on_gpu=on_gpu)
        times_ms.append(elapsed_ms)
        if on_gpu:
            peak_bytes = torch.cuda.max_memory_allocated() - before
    assert result is not None, "num_repeats must be at least 1"
    return result, Wall(statistics.median(times_ms), max(times_ms) - min(times_ms), peak_bytes)


def drain() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[[], Result], *, on_gpu: bool) -> tuple[float, Result]:
    """Milliseconds of one call, and its result."""
    if not on_gpu:
        started_s = time.perf_counter()
        result = call()
        return (time.perf_counter() - started_s) * 1e3, result
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), result


def measure_ceilings() -> dict[str, float]:
    """Bandwidth in TB/s of a copy (read + write) and of a read, TFLOP/s of a bf16 matmul."""
    source = torch.randn(_COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    # A kernel: a captured `copy_` becomes a copy-engine node, which reaches 2.7 of 4.3 TB/s.
    copy = time_calls([functools.partial(torch.mul, source, 1.0, out=target)])
    read = time_calls([source.amax])
    shape = (_MATMUL_SIZE, _MATMUL_SIZE)
    left, right = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = time_calls([functools.partial(torch.matmul, left, right)])
    return {
        "copy_tb_per_s": round(2 * _COPY_BYTES / copy.median_us / 1e6, 3),
        "read_tb_per_s": round(_COPY_BYTES / read.median_us / 1e6, 3),
        "bf16_tflop_per_s": round(2 * _MATMUL_SIZE**3 / matmul.median_us / 1e6, 1),
    }


def describe_machine() -> dict[str, object]:
    """Device, driver, versions and commit that the figures belong to; also without a GPU.

    `dirty` says whether tracked files differ from the commit; None where there is no repository.
    """
    on_gpu = torch.cuda.is_available()
    changes = _words_of("git", "-C", _FOLDER, "status", "--porcelain", "--untracked-files=no")
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    driver = _words_of("nvidia-smi", *query) if on_gpu else None
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "driver": driver.splitlines()[0] if driver else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": checks.triton_version(),
        "transformers": _version_of("transformers"),
        "commit": _words_of("git", "-C", _FOLDER, "rev-parse", "--short", "HEAD") or "unknown",
        "dirty": None if changes is None else bool(changes),
    }


def _words_of(*command: str) -> str | None:
    """What a command prints; None where it cannot be run."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def show_row(
    row: Row,
    ours: Timing | None,
    peer: Timing | None = None,
    *,
    copy: float,
    num_flops: int = 0,
    ceiling: str = "copy",
) -> Row:
    """Print one line of the table and return its row with the figures.

    `row` has `kernel`, `shape`, the `bytes` that must move, and what else belongs to it; `ours` and
    `peer` are None where the kernel or the same work elsewhere could not be run; `copy` is the
    bandwidth of a copy in TB/s, or of what `ceiling` names; `num_flops` of 0 leaves the products'
    rate out.
    """
    text = f"{row['kernel']:<17}{row['shape']:<50}"
    if ours is not None:
        share = row["bytes"] / ours.median_us / 1e6 / copy
        row |= {
            "median_us": ours.median_us,
            "spread_us": ours.spread_us,
            f"share_of_{ceiling}": share,
        }
        text += f"{ours.median_us:9.1f} us +- {ours.spread_us:6.1f}  {share:6.1%} of {ceiling}"
        if num_flops:
            row["tflop_per_s"] = num_flops / ours.median_us / 1e6
            text += f"  {row['tflop_per_s']:6.1f} TFLOP/s"
    if ours is not None and peer is not None:
        row |= {"peer_us": peer.median_us, "speedup": peer.median_us / ours.median_us}
        text += f"  peer {peer.median_us:9.1f} us  {row['speedup']:6.2f}x"
    print(text, flush=True)
    return row


def write_report(path: Path | None, report: dict[str, object]) -> None:
    """Everything that was measured, where a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1, default=str))


def import_peers() -> dict[str, ModuleType]:
    """The libraries that are here; the others are named."""
    found = {}
    for name, module in PEERS.items():
        try:
            found[name] = importlib.import_module(module)
        except (ImportError, OSError, RuntimeError):
            print(f"{name}: not importable", flush=True)
    return found


def time_peers(
    peers: dict[str, ModuleType],
    sets: list[dict[str, Tensor]],
    expected: Tensor,
    *,
    scale: float,
    max_query_len: int,
) -> dict[str, float | str]:
    """Microseconds of each library over the same inputs, or why there are none.

    `sets` are arguments of `paged_attention` or `latent_attention`, of equal lengths; `expected` is
    the output of the first.
    """
    makers = {"flashinfer": flashinfer_call, "vllm": vllm_call}
    if "latent_cache" in sets[0]:
        makers = {"flashinfer": flashinfer_latent_call}
    found: dict[str, float | str] = {}
    for name, module in peers.items():
        if name not in makers:
            continue
        make = functools.partial(makers[name], module, scale=scale)
        try:
            calls = [make(inputs, max_query_len=max_query_len) for inputs in sets[:_NUM_SETS]]
            torch.testing.assert_close(calls[0](), expected, atol=2e-2, rtol=2e-2)
            found[name] = time_calls(calls).median_us
        except _REFUSALS as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        print(f"    {name} us: {found[name]}", flush=True)
    return found


def flashinfer_call(
    module: ModuleType, inputs: dict[str, Tensor], *, scale: float, max_query_len: int
) -> Callable[[], Tensor]:
    """FlashInfer's prefill over pages, planned outside the timing."""
    _, num_heads, head_dim = inputs["query"].shape
    cache = inputs["key_cache"]
    page_size, num_kv_heads = cache.shape[1:3]
    starts, pages, last = _pages(inputs, page_size)
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(_workspace(cache), "NHD")
    tables = (inputs["query_start_loc"], starts, pages, last)
    sizes = (num_heads, num_kv_heads, head_dim, page_size)
    dtypes = {"q_data_type": inputs["query"].dtype, "kv_data_type": cache.dtype}
    wrapper.plan(*tables, *sizes, causal=True, sm_scale=scale, **dtypes)
    return functools.partial(wrapper.run, inputs["query"], (cache, inputs["value_cache"]))


def flashinfer_latent_call(
    module: ModuleType, inputs: dict[str, Tensor], *, scale: float, max_query_len: int
) -> Callable[[], Tensor]:
    """FlashInfer's attention over latents, planned outside the timing."""
    latent, rope = inputs["query_latent"], inputs["query_rope"]
    cache = inputs["latent_cache"]
    parts = cache.split((latent.shape[2], rope.shape[2]), dim=-1)
    starts, pages, _ = _pages(inputs, cache.shape[1])
    wrapper = module.mla.BatchMLAPagedAttentionWrapper(_workspace(cache))
    tables = (inputs["query_start_loc"], starts, pages, inputs["seq_lens"])
    sizes = (*latent.shape[1:], rope.shape[2], cache.shape[1])
    is_causal = True
    wrapper.plan(*tables, *sizes, is_causal, scale, latent.dtype, cache.dtype)
    return functools.partial(wrapper.run, latent, rope, *parts)


def vllm_call(
    module: ModuleType, inputs: dict[str, Tensor], *, scale: float, max_query_len: int
) -> Callable[[], Tensor]:
    """The FlashAttention of vLLM, over block tables like ours."""
    table = inputs["block_table"]
    return functools.partial(
        module.flash_attn_varlen_func,
        q=inputs["query"],
        k=inputs["key_cache"],
        v=inputs["value_cache"],
        max_seqlen_q=max_query_len,
        cu_seqlens_q=inputs["query_start_loc"],
        max_seqlen_k=table.shape[1] * inputs["key_cache"].shape[1],
        seqused_k=inputs["seq_lens"],
        softmax_scale=scale,
        causal=True,
        block_table=table,
    )


def _pages(inputs: dict[str, Tensor], page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """First page of each request `[B + 1]`, pages `[B * M]`, tokens in the last page `[B]`."""
    table, seq_lens = inputs["block_table"], inputs["seq_lens"]
    num_pages = table.shape[1]
    starts = torch.arange(0, table.numel() + 1, num_pages, device=table.device, dtype=torch.int32)
    return starts, table.flatten(), seq_lens - (num_pages - 1) * page_size


def _workspace(like: Tensor) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=like.device)
