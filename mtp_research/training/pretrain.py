"""`task=target`: train a small target from scratch on the corpus, evaluate it, save a model folder.

Flow: documents -> token streams on the device -> the loop of `pretrain_loop.py` -> dev losses,
samples, Hugging Face folder and PROVENANCE.json. SIGTERM during the loop saves a step folder, from
which the same command goes on; it is removed when the target is written.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

from mtp_research.config import ModelConfig
from mtp_research.data.tokenizer import BOS_ID, PAD_ID, STOP_IDS
from mtp_research.errors import ConfigError
from mtp_research.models.fresh import (
    finish_training,
    new_target,
    save_target,
)
from mtp_research.models.placement import resolve_device, resolve_dtype
from mtp_research.provenance import run_record
from mtp_research.training.pretrain_data import (
    data_record,
    describe_data,
    prepare_data,
)
from mtp_research.training.pretrain_log import Report
from mtp_research.training.pretrain_loop import train_target
from mtp_research.training.pretrain_report import evaluate_target
from mtp_research.training.pretrain_state import remove_progress, run_settings
from mtp_research.training.signals import StopRequest

TARGET_FOLDER = "target"


def _write_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def pretrain_target(
    model: ModelConfig, *, output_dir: Path, seed: int, report: Report = _write_line
) -> dict[str, object]:
    """Train `model.architecture` on `model.pretrain` and save the result as a target folder.

    Args:
        model: `family`, `architecture` and `pretrain` are read, and `device` and `dtype`.
        output_dir: run folder; `target` in it becomes the Hugging Face folder, and a tokenizer that
            is already there is reused.
        seed: of initialisation and data order.
        report: takes progress lines; standard output by default.

    Returns:
        The content of PROVENANCE.json: command, versions, data hashes, losses, figures, samples.

    Raises:
        ConfigError: architecture, corpus or domain weights are wrong, or `output_dir` holds an
            interrupted run with other settings; names the key.
        EnvironmentFault: `device=cuda` without a GPU.
        Interrupted: SIGTERM or SIGINT; the state is saved, and the same call goes on.
        IntegrityError: what an interrupted run saved is damaged.
        NumericFault: a whole log interval had non-finite gradients.
    """
    started = time.monotonic()
    record = run_record()
    device = resolve_device(model.device)
    target_dir = output_dir / TARGET_FOLDER
    target_dir.mkdir(parents=True, exist_ok=True)
    architecture, dtype = _architecture(model), _dtype(model, device)
    data = prepare_data(model.pretrain, tokenizer_dir=target_dir)
    report("\n".join(describe_data(data)))
    target = new_target(model.family, architecture, dtype=dtype, device=device, seed=seed)
    report(f"{model.name}: {target.num_parameters():,} parameters, {dtype} on {device}")
    prepared = time.monotonic()
    with StopRequest() as stop:  # after the last step a signal only waits for the end
        result = train_target(
            target,
            data,
            model.pretrain,
            seed=seed,
            root=output_dir,
            settings=run_settings(model, data, seed=seed, dtype=dtype, device=device),
            stop=stop,
            report=report,
        )
        finish_training(target, stop_ids=STOP_IDS, bos_id=BOS_ID, pad_id=PAD_ID)
        num_bytes = save_target(target, target_dir)
        losses, samples = evaluate_target(
            target,
            data.dev_documents,
            tokenizer=data.tokenizer,
            seq_len=model.pretrain.seq_len,
            report=report,
        )
    provenance = record | {
        "model": dataclasses.asdict(model),
        "path": str(target_dir),
        "seed": seed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "num_parameters": target.num_parameters(),
        "weights_bytes": num_bytes,
        "training": dataclasses.asdict(result),
        "setup_seconds": prepared - started,
        "total_seconds": time.monotonic() - started,
        "dev": losses,
        "samples": samples,
        **data_record(data),
    }
    text = json.dumps(provenance, indent=2)
    (target_dir / "PROVENANCE.json").write_text(f"{text}\n", encoding="utf8")
    remove_progress(output_dir)
    return provenance


def _dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    dtype = resolve_dtype(model.dtype, device)
    if dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"task=target trains in bfloat16 or float32, got model.dtype={model.dtype}; "
            "set model.dtype=auto"
        )
    return dtype


def _architecture(model: ModelConfig) -> dict[str, object]:
    """Architecture with the tokenizer's vocabulary, checked against the row length."""
    vocab_size = model.pretrain.vocab_size
    architecture: dict[str, object] = {"vocab_size": vocab_size, **model.architecture}
    if architecture["vocab_size"] != vocab_size:
        raise ConfigError(
            f"model.architecture.vocab_size={architecture['vocab_size']} must equal "
            f"model.pretrain.vocab_size={vocab_size}; set only the latter"
        )
    limit = architecture.get("max_position_embeddings")
    if isinstance(limit, int) and limit < model.pretrain.seq_len:
        raise ConfigError(
            f"model.pretrain.seq_len={model.pretrain.seq_len} exceeds "
            f"model.architecture.max_position_embeddings={limit}; lower seq_len"
        )
    return architecture
