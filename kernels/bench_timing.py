"""Timing of GPU calls and the ceilings that kernel figures are compared with.

Where it sits: used by the benchmarks and the tools. A timing replays one CUDA graph of many
calls, so that the host's launch overhead is not measured; the caller rotates inputs through more
memory than the L2 holds.
"""

from __future__ import annotations

import functools
import platform
import statistics
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from mtp_research.kernels import checks

_COPY_BYTES = 4 * 2**30
_MATMUL_SIZE = 8192
_FOLDER = str(Path(__file__).parent)


class Timing(NamedTuple):
    """Time of one call, from replays of a graph of many."""

    median_us: float
    spread_us: float  # slowest minus fastest replay


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
