"""Everything a head-training run needs before its first step, built from the configuration.

Letters: N modules, k depths.
"""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator

from mtp_research.config import TrainConfig
from mtp_research.data.packing import pack_first_fit
from mtp_research.errors import ConfigError
from mtp_research.heads.stack import HeadSpec, Init, MTPHeads, init_heads
from mtp_research.heads.weights import load_head_state, read_head_record
from mtp_research.models.families import ConcatOrder, NormPoint
from mtp_research.models.target import Target, load_target, resolve_device
from mtp_research.policy import ModuleSchedule
from mtp_research.training.checkpoint import (
    Checkpoint,
    check_same_run,
    load_checkpoint,
    newest_checkpoint,
    step_folders,
)
from mtp_research.training.documents import HeadDocuments, load_head_documents
from mtp_research.training.losses import LossSpec
from mtp_research.training.objective import HeadObjective, UnrollSpec
from mtp_research.training.optim import MasterWeights
from mtp_research.training.rows import TrainingRows
from mtp_research.training.state import restore_optimizer, run_settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunParts:
    """Parts of a run; their tensors change during training, the parts do not.

    Attributes:
        heads: the modules that are trained.
        objective: heads with unroll and loss, wrapped for data parallelism.
        optimizer: AdamW over the head parameters.
        names: names of the optimizer's parameters, in order.
        documents: encoded documents and their split.
        rows: packed training rows.
        held_out_rows: packed held-out rows.
        unroll_spec: how the heads are run.
        settings: what a resumed run must share, see `state.run_settings`.
    """

    heads: MTPHeads
    objective: torch.nn.Module
    optimizer: MasterWeights
    names: list[str]
    documents: HeadDocuments
    rows: TrainingRows
    held_out_rows: TrainingRows
    unroll_spec: UnrollSpec
    settings: dict[str, object]


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The process group and device of this rank."""
    return Accelerator(cpu=resolve_device(config.model.device).type == "cpu")


def build_run(config: TrainConfig, *, accelerator: Accelerator) -> RunParts:
    """Load target and documents, build heads and optimizer.

    Raises:
        ConfigError: settings that do not fit each other, the target or the data.
        IntegrityError: a damaged data or head file.
    """
    num_depths = config.objective.num_depths or max(config.head.num_mtp_modules, 3)
    spec = UnrollSpec(
        num_depths, config.objective.unroll, cast(ModuleSchedule, config.head.module_schedule)
    )
    loss_spec = LossSpec(config.objective.loss, config.objective.depth_decay)
    target = load_target(config.model.path, dtype=_dtype(config), device=config.model.device)
    documents = load_head_documents(
        config.data,
        model_path=config.model.path,
        vocab_size=target.config.vocab_size,
        num_depths=num_depths,
    )
    heads = build_heads(config, target=target)
    rows, held_out_rows = _pack(config, documents=documents, target=target, num_depths=num_depths)
    named = [(name, p) for name, p in heads.named_parameters() if p.requires_grad]
    trainer = config.trainer
    optimizer = MasterWeights(
        [parameter for _, parameter in named],
        learning_rate=trainer.learning_rate,
        betas=(trainer.betas[0], trainer.betas[1]),
        weight_decay=trainer.weight_decay,
        grad_clip=trainer.grad_clip,
    )
    return RunParts(
        heads=heads,
        objective=accelerator.prepare_model(
            HeadObjective(heads, unroll_spec=spec, loss_spec=loss_spec), device_placement=False
        ),
        optimizer=optimizer,
        names=[name for name, _ in named],
        documents=documents,
        rows=rows,
        held_out_rows=held_out_rows,
        unroll_spec=spec,
        settings=run_settings(
            config,
            heads=heads,
            num_depths=num_depths,
            data_sha256=documents.data_sha256,
            world_size=accelerator.num_processes,
        ),
    )


def build_heads(config: TrainConfig, *, target: Target) -> MTPHeads:
    """Heads to start from: fresh and initialised, or those of `head.path`."""
    head = config.head
    torch.manual_seed(config.seed)
    heads = MTPHeads(
        target,
        spec=HeadSpec(
            num_mtp_modules=head.num_mtp_modules,
            hidden_source=cast(NormPoint, head.hidden_source),
            recycle_norm=cast(NormPoint, head.recycle_norm),
            concat_order=cast(ConcatOrder, head.concat_order),
            zero_position_0=head.zero_position_0,
            unroll=config.objective.unroll,
        ),
    )
    if head.path is not None:
        _check_conventions(heads.spec, path=Path(head.path))
        load_head_state(heads, Path(head.path) / "model.safetensors")
    elif head.init == "native":
        raise ConfigError(
            "head.init=native needs a target with MTP layers of its own, which are not read yet; "
            "set head.init=target_last_layer."
        )
    else:
        init_heads(heads, init=cast(Init, head.init))
    return heads.train()


def find_checkpoint(config: TrainConfig, *, output_dir: Path) -> Checkpoint | None:
    """The checkpoint to continue from, None to start at step 0.

    Raises:
        ConfigError: `resume=never` in a folder with steps, or a step folder that does not exist.
        IntegrityError: the step that was asked for, or every step, is damaged.
    """
    resume = config.trainer.resume
    if resume == "auto":
        return newest_checkpoint(output_dir)
    if resume == "never":
        if step_folders(output_dir):
            raise ConfigError(
                f"output_dir {str(output_dir)!r} holds steps of an earlier run and trainer.resume "
                "is never; set trainer.resume=auto or another output_dir."
            )
        return None
    if not Path(resume).is_dir():
        raise ConfigError(
            f"trainer.resume must be auto, never or a step folder, got {resume!r}, no folder."
        )
    return load_checkpoint(Path(resume))


def restore_run(parts: RunParts, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights and moments into `parts`, in place.

    Raises:
        ConfigError: the run's settings differ from the checkpoint's; lists them.
        IntegrityError: tensors do not fit.
    """
    check_same_run(checkpoint.state["settings"], parts.settings)
    load_head_state(parts.heads, checkpoint.folder / "head.safetensors")
    restore_optimizer(parts.optimizer, names=parts.names, tensors=checkpoint.tensors("optimizer"))


def _dtype(config: TrainConfig) -> str:
    """Dtype of target and heads; `trainer.precision` and `model.dtype` must agree."""
    precision, dtype = config.trainer.precision, config.model.dtype
    if precision == "auto":
        return dtype
    if dtype not in ("auto", precision):
        raise ConfigError(
            f"trainer.precision must be auto or model.dtype={dtype}, got {precision}; "
            f"set model.dtype={precision}."
        )
    return precision


def _pack(
    config: TrainConfig, *, documents: HeadDocuments, target: Target, num_depths: int
) -> tuple[TrainingRows, TrainingRows]:
    """Training rows of `data.seq_len`; held-out rows long enough for the longest document."""
    if not documents.train:
        raise ConfigError(
            f"data.path must hold documents of {num_depths + 2} or more tokens beside the held-out "
            "ones, got none; set data.path."
        )
    pad_id = target.config.pad_token_id or 0
    packed = pack_first_fit(documents.train, seq_len=config.data.seq_len, pad_id=pad_id)
    logger.info(
        "%d rows of %d tokens; %d documents cut (%d tokens), %d shorter than %d tokens left out",
        len(packed.token_ids),
        config.data.seq_len,
        packed.num_cut,
        packed.num_cut_tokens,
        documents.num_short,
        num_depths + 2,
    )
    longest = max(len(document.token_ids) for document in documents.held_out)
    limit = target.config.max_position_embeddings
    held_out = pack_first_fit(documents.held_out, seq_len=min(longest, limit), pad_id=pad_id)
    trainer = config.trainer
    rows_read = trainer.max_steps * trainer.batch_size * trainer.gradient_accumulation_steps
    source = cast(NormPoint, config.head.hidden_source)
    return (
        TrainingRows(
            packed,
            target=target,
            hidden_source=source,
            keep_hidden=rows_read > len(packed.token_ids),
        ),
        TrainingRows(held_out, target=target, hidden_source=source, keep_hidden=True),
    )


def _check_conventions(spec: HeadSpec, *, path: Path) -> None:
    """A head read under other conventions trains on, and nothing but acceptance shows it."""
    saved = HeadSpec(**read_head_record(path)["spec"])
    for field in dataclasses.fields(HeadSpec):
        old, new = getattr(saved, field.name), getattr(spec, field.name)
        if field.name != "unroll" and old != new:
            raise ConfigError(
                f"head.path {str(path)!r} has {field.name}={old!r}, the configuration {new!r}; "
                f"set head.{field.name}={old}."
            )
