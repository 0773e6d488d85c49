"""What the kernel benchmarks share: timing, ceilings of the device, rows, and their report.

A timing replays one CUDA graph of many calls whose inputs rotate through more memory than the L2
cache holds, so that neither the host's launches nor a warm cache is measured. Calls too long for a
graph are timed one by one (`measure_wall`).
"""

import argparse
import functools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from mtp_research.kernels import checks

ROTATED_BYTES = 512 * 2**20  # ten times the H200's L2
_COPY_BYTES = 4 * 2**30
_MATMUL_SIZE = 8192
_NUM_WARM_UP = 2
_FOLDER = str(Path(__file__).parent)

Result = TypeVar("Result")
Row = dict[str, object]
Rows = list[Row]


class Bench(NamedTuple):
    """One benchmark of `python -m mtp_research.kernels.bench`.

    Attributes:
        measure: rows from the ceilings (none without a GPU) and the options.
        add_options: to the parser.
        words: options under `--all`, where the default takes too long.
        needs_gpu: the others have tiny sizes for a CPU.
    """

    measure: Callable[[dict[str, float], argparse.Namespace], Rows]
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    words: tuple[str, ...] = ()
    needs_gpu: bool = True


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
        elapsed_ms, result = _timed(call, on_gpu=on_gpu)
        times_ms.append(elapsed_ms)
        if on_gpu:
            peak_bytes = torch.cuda.max_memory_allocated() - before
    assert result is not None, "num_repeats must be at least 1"
    return result, Wall(statistics.median(times_ms), max(times_ms) - min(times_ms), peak_bytes)


def _timed(call: Callable[[], Result], *, on_gpu: bool) -> tuple[float, Result]:
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
    row: Row, ours: Timing | None, peer: Timing | None = None, *, copy: float, num_flops: int = 0
) -> Row:
    """Print one line of the table and return its row with the figures.

    Args:
        row: `kernel`, `shape` and `bytes` that must move, and what else belongs to it.
        ours: time of the kernel; None where it could not be run.
        peer: time of the same work elsewhere; None likewise.
        copy: bandwidth of a copy, TB/s.
        num_flops: of the products; 0 leaves their rate out.
    """
    text = f"{row['kernel']:<17}{row['shape']:<50}"
    if ours is not None:
        share = row["bytes"] / ours.median_us / 1e6 / copy
        row |= {"median_us": ours.median_us, "spread_us": ours.spread_us, "share_of_copy": share}
        text += f"{ours.median_us:9.1f} us +- {ours.spread_us:6.1f}  {share:6.1%} of copy"
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
