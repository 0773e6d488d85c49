"""Stages of a head training step: each timed alone, and the kernels that it spends its time in.

Letters: k depths, B rows, S row length.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import yaml
from accelerate import Accelerator
from torch.profiler import ProfilerActivity, profile
from training_bench_parts import time_of

from mtp_research.config.schema import TrainConfig
from mtp_research.training.losses.losses import HeadObjective, depth_labels, label_counts, run_heads
from mtp_research.training.setup import RunParts

NUM_SPLITS = 5
NUM_PROFILED = 2
NAME_WIDTH = 84

Stages = dict[str, Callable[[], object]]


def stages_of(parts: RunParts, config: TrainConfig, *, learning_rate: float) -> Stages:
    """What a step consists of, in order; `modules_forward` is a part of the one after it."""
    engine, spec = parts.engine, parts.unroll_spec
    indices = list(range(config.trainer.batch_size))
    batch = parts.rows.batch(indices)
    hidden = parts.rows.hidden(indices)
    labels = depth_labels(
        batch.input_ids,
        document_index=batch.document_index,
        loss_mask=batch.loss_mask,
        num_depths=spec.num_depths,
    )
    counts = label_counts(labels)
    losses: list[torch.Tensor] = []
    return {
        "target_forward": lambda: parts.rows.hidden(indices),
        "modules_forward": lambda: run_heads(parts.heads, batch, hidden=hidden, spec=spec),
        "modules_and_loss_forward": lambda: losses.append(
            engine.objective(batch, hidden, labels, counts).loss
        ),
        "backward": lambda: engine.backward(losses.pop()),
        "optimizer": lambda: engine.step(learning_rate=learning_rate),
    }


@contextmanager
def loss_fields(parts: RunParts, fields: str) -> Iterator[None]:
    """Fields of the run's `LossSpec` changed for a while: `chunk_rows=4864,half_logits=true`."""
    objective = next(m for m in parts.engine.objective.modules() if isinstance(m, HeadObjective))
    before = objective.loss_spec
    pairs = [field.split("=") for field in fields.split(",") if field]
    changes = {name: yaml.safe_load(value) for name, value in pairs}
    objective.loss_spec = dataclasses.replace(before, **changes)
    try:
        yield
    finally:
        objective.loss_spec = before


def split(stages: Stages, ranks: Accelerator) -> dict[str, float]:
    """Milliseconds of each stage, drained before and after; median of five."""
    times: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(NUM_SPLITS):
        for name, call in stages.items():
            times[name].append(1e3 * time_of(call, ranks.device))
    found = {name: statistics.median(values) for name, values in times.items()}
    found["loss"] = found.pop("modules_and_loss_forward") - found["modules_forward"]
    return found


def kernels_of(stages: Stages, *, limit: int) -> dict[str, list[dict[str, object]]]:
    """The `limit` longest kernels of each stage: name, launches and milliseconds of one run.

    The profiler slows the host down, so its times are of use for shares of a stage only.
    """
    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    found: dict[str, dict[str, list[float]]] = {name: {} for name in stages}
    for _ in range(NUM_PROFILED):
        for name, call in stages.items():
            with profile(activities=[activity]) as run:
                call()
                if on_gpu:
                    torch.cuda.synchronize()
            for event in run.key_averages():
                micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
                entry = found[name].setdefault(event.key, [0.0, 0.0])
                entry[0] += event.count / NUM_PROFILED
                entry[1] += micros / 1e3 / NUM_PROFILED
    return {
        name: [
            {"kernel": key, "launches": count, "ms": round(ms, 3)}
            for key, (count, ms) in sorted(kernels.items(), key=lambda item: -item[1][1])[:limit]
        ]
        for name, kernels in found.items()
    }


def show_kernels(found: dict[str, list[dict[str, object]]]) -> None:
    """A table a stage."""
    for stage, kernels in found.items():
        print(f"  {stage}")
        for row in kernels:
            print(
                f"    {row['ms']:8.3f} ms {row['launches']:6.0f} x  {row['kernel']:.{NAME_WIDTH}}"
            )
