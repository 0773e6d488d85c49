"""Everything a head-training run needs before its first step, built from the configuration.

build_run      parts of a run, restored from a checkpoint or not
build_heads    modules to start from: fresh, read from a folder, or copies of one module
cache_hidden   `task=cache`, which stops before there are heads
"""

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from accelerate import Accelerator

from mtp_research.config.launched import PLUGINS
from mtp_research.config.rules import is_valid
from mtp_research.config.schema import TrainConfig
from mtp_research.config.training_schema import has_teacher
from mtp_research.heads.init import Init, choose_start, freeze_parts, init_heads
from mtp_research.heads.native import adopt_conventions
from mtp_research.heads.record import check_weights, read_head_record, recorded_schedule
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.heads.weights import load_head_state
from mtp_research.models.experts import ExpertLoads
from mtp_research.models.family import ConcatOrder, NormPoint
from mtp_research.models.loading.placement import require_gpus, resolve_device
from mtp_research.models.loading.source import CONFIG_FILE, local_file
from mtp_research.models.target import Target, load_target, warn_of_family
from mtp_research.policy.fields import ModuleSchedule
from mtp_research.runtime.compiling import start_compilers
from mtp_research.runtime.errors import ConfigError
from mtp_research.training.cache_rows import write_hidden_cache
from mtp_research.training.checkpoint import (
    Checkpoint,
    check_same_run,
    load_checkpoint,
    newest_checkpoint,
    run_settings,
    step_folders,
)
from mtp_research.training.documents import (
    HeadDocuments,
    load_head_documents,
    mark_words,
    read_head_documents,
    warn_of_writer,
)
from mtp_research.training.losses.loss_terms import loss_spec
from mtp_research.training.losses.losses import HeadObjective, UnrollSpec
from mtp_research.training.optim import add_lora
from mtp_research.training.packed_rows import TrainingRows, build_rows
from mtp_research.training.parallel.parallel import Engine, make_engine, prepare_target
from mtp_research.training.step_costs import StepCosts, flops_per_token

_LARGE_TARGET = 50_000_000  # parameters; lab_tiny has 3.9 M, lab_small 47 M
_LONG_RUN = 1_000  # steps; compiling costs some hundred of a small model
_FEW_TOKENS = 1_500_000  # lab_base's heads, of 202 M parameters, saw 1.6 M


@dataclass(frozen=True)
class RunParts:
    """Parts of a run; their tensors change during training, the parts do not."""

    heads: MTPHeads  # the modules that are trained
    engine: Engine  # forward, backward and update, over one rank or many
    documents: HeadDocuments  # encoded documents and their split
    rows: TrainingRows  # packed training rows
    held_out_rows: TrainingRows  # packed held-out rows
    unroll_spec: UnrollSpec  # how the heads are run
    settings: dict[str, object]  # what a resumed run must share, see `checkpoint.run_settings`
    loaded: str  # which part of the target was loaded beside hidden states; empty without them
    costs: StepCosts  # speed of the steps, memory by part
    expert_loads: ExpertLoads | None = None  # of the modules' routers; None for dense modules


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The process group and device of this rank.

    What `accelerate launch` was told is in `config` by now, see `config.launched`: modules that it
    wrapped as well would be wrapped twice.
    """
    device = resolve_device(config.model.device)
    require_gpus(device)
    hidden = {name: os.environ.pop(name) for name in PLUGINS if name in os.environ}
    try:
        return Accelerator(cpu=device.type == "cpu")
    finally:
        os.environ.update(hidden)


def build_run(
    config: TrainConfig, *, accelerator: Accelerator, checkpoint: Checkpoint | None = None
) -> RunParts:
    """Load target and documents, build heads and engine, go on from a checkpoint."""
    if checkpoint is not None and "head.init_noise" not in checkpoint.state["settings"]:
        config.head.init_noise = 0.0  # begun before the key: from exact copies
    if config.trainer.compile and accelerator.device.type == "cuda":
        start_compilers()
    costs = StepCosts(accelerator.device, num_ranks=accelerator.num_processes)
    target, documents = load_inputs(config, is_whole=needs_layers(config) is not None)
    costs.mark("target")
    num_depths = depths_of(config)
    spec = UnrollSpec(
        num_depths, config.objective.unroll, cast(ModuleSchedule, config.head.module_schedule)
    )
    heads = build_heads(config, target=target)
    prepare_target(target, trainer=config.trainer)
    settings = run_settings(
        config,
        heads=heads,
        num_depths=num_depths,
        data_sha256=documents.data_sha256,
        world_size=accelerator.num_processes,
    )
    if checkpoint is not None:
        drift = config.trainer.allow_drift
        check_same_run(checkpoint.state["settings"], settings, allow_drift=drift)
        load_head_state(heads, checkpoint.folder / "head.safetensors")
    objective = HeadObjective(heads, unroll_spec=spec, loss_spec=loss_spec(config.objective))
    loads = ExpertLoads(heads)
    rows = build_rows(config, documents=documents, target=target, num_depths=num_depths)
    costs.know(_operations(config, heads=heads, rows=rows.train))
    engine = make_engine(objective, trainer=config.trainer, ranks=accelerator)
    if checkpoint is not None:
        engine.restore(checkpoint.tensors("optimizer"))
    costs.mark("modules")
    return RunParts(
        heads=heads,
        engine=engine,
        documents=documents,
        rows=rows.train,
        held_out_rows=rows.held_out,
        unroll_spec=spec,
        settings=settings,
        loaded=_loaded_line(config, target=target, rows=rows.train),
        costs=costs,
        expert_loads=loads if loads.counts else None,
    )


def _operations(config: TrainConfig, *, heads: MTPHeads, rows: TrainingRows) -> float:
    """Floating-point operations of a token; those of states that are kept are not counted."""
    parts = flops_per_token(
        heads,
        seq_len=config.data.seq_len,
        num_depths=depths_of(config),
        has_teacher=has_teacher(config.objective.loss),
        runs_target=_states_from(config) is None and not rows.keeps_hidden,
    )
    return sum(parts.values())


def build_heads(config: TrainConfig, *, target: Target) -> MTPHeads:
    """Heads to start from, with `head.lora_rank` and the parts of `head.freeze` frozen.

    `head.init=auto` becomes what it stands for, in place, so that records name the start.
    """
    head = config.head
    torch.manual_seed(config.seed)
    heads = MTPHeads(target, spec=_head_spec(config))
    path = None if head.path is None else Path(head.path)
    if path is not None:
        _check_conventions(heads.spec, path=path, is_copied=head.init == "replicate")
    if path is not None and head.init != "replicate":
        load_head_state(heads, path / "model.safetensors")
        started_from = f"head.path {path}"
    else:
        start = choose_start(target, heads.spec, init=cast(Init, head.init))
        head = config.head = dataclasses.replace(head, init=start.init)
        init_heads(heads, init=start.init, path=path, noise=head.init_noise, seed=config.seed)
        started_from = start.phrase
    heads.provenance = {"started_from": started_from}
    if head.lora_rank:
        add_lora(heads, rank=head.lora_rank)
    freeze_parts(heads, patterns=head.freeze)
    return heads.train()


def _head_spec(config: TrainConfig) -> HeadSpec:
    head = config.head
    return HeadSpec(
        num_mtp_modules=head.num_mtp_modules,
        hidden_source=cast(NormPoint, head.hidden_source),
        recycle_norm=cast(NormPoint, head.recycle_norm),
        concat_order=cast(ConcatOrder, head.concat_order),
        zero_position_0=head.zero_position_0,
        unroll=config.objective.unroll,
        module_schedule=cast(ModuleSchedule, head.module_schedule),
    )


def _check_conventions(spec: HeadSpec, *, path: Path, is_copied: bool) -> None:
    """A head read under other conventions trains on, and nothing but acceptance shows it."""
    record = read_head_record(path)
    check_weights(path, record, file="model.safetensors")
    saved = dataclasses.asdict(HeadSpec(**record["spec"]))
    saved["module_schedule"] = recorded_schedule(record) or spec.module_schedule
    if saved["owns_lm_head"]:
        raise ConfigError(
            f"head.path {str(path)!r} has output projections of its own, which are decoded with "
            "and not trained; set head.path to heads that share the target's lm_head."
        )
    free = {"unroll", "num_mtp_modules", "module_schedule"} if is_copied else {"unroll"}
    for name, new in dataclasses.asdict(spec).items():
        if name not in free and saved[name] != new:
            raise ConfigError(
                f"head.path {str(path)!r} has {name}={saved[name]!r}, the configuration {new!r}; "
                f"set head.{name}={saved[name]}."
            )


class RunInputs(NamedTuple):
    """The frozen target and the documents it is trained on."""

    target: Target
    documents: HeadDocuments


def load_inputs(config: TrainConfig, *, is_whole: bool = True) -> RunInputs:
    """Load target and documents; a fault of the documents costs no loading.

    A target that is not whole lacks its decoder layers, but for the one that modules start from.
    """
    model, found = config.model, read_head_documents(config.data)
    mark_words(config.data, found)
    is_fetched = local_file(model.path, CONFIG_FILE) is None
    load = functools.partial(
        load_target,
        model.path,
        dtype=_dtype(config),
        device=model.device,
        device_map=model.device_map,
        experts=model.experts,
        weights=model.weights_form,
    )
    whole = "sharded" if config.trainer.shard_target else "all"
    target = load(layers=whole if is_whole else "none")
    if config.task != "cache" and target.num_left_out and _starts_from_layer(config, target=target):
        target = load(layers="last")
    warn_of_family(target, family=model.family)
    if target.split is None:
        warn_of_writer(config.data.path, target=target)
    if is_fetched and config.head.init in ("auto", "native") and config.head.path is None:
        adopt_conventions(config.head, path=model.path, typed=())  # its files were not here before
    documents = load_head_documents(
        config.data,
        found,
        model_path=config.model.path,
        vocab_size=target.config.vocab_size,
        num_depths=depths_of(config),
    )
    return RunInputs(target, documents)


def needs_layers(config: TrainConfig) -> str | None:
    """What runs the target's layers; None where hidden states from disk are all that is needed."""
    reasons = {
        "data.hidden_cache=null": _states_from(config) is None,
        f"task={config.task}": config.task != "heads",
        "data.check_hidden_cache": config.data.check_hidden_cache,
        "trainer.decode_eval_prompts": config.trainer.decode_eval_prompts > 0,
        "trainer.shard_target": config.trainer.shard_target,
        f"model.device_map={config.model.device_map}": config.model.device_map != "none",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def schedule_note(config: TrainConfig, *, num_parameters: int, num_processes: int) -> str | None:
    """A line on a schedule that is too short for the target; the defaults are those of lab_tiny."""
    trainer = config.trainer
    num_rows = trainer.batch_size * trainer.gradient_accumulation_steps * num_processes
    num_tokens = trainer.max_steps * num_rows * config.data.seq_len
    if num_parameters < _LARGE_TARGET or num_tokens >= _FEW_TOKENS:
        return None
    return (
        f"trainer.max_steps={trainer.max_steps} reads {num_tokens / 1e6:.2g} M tokens at a peak "
        f"rate of {trainer.learning_rate:g}, which fits lab_tiny; heads of a target of "
        f"{num_parameters / 1e6:.0f} M parameters want about 100 M tokens (docs/recipes.md, "
        "Schedule by size)"
    )


def export_note(heads: MTPHeads) -> str | None:
    """A line on more modules than the published names of the target's family hold."""
    num_modules, family = heads.spec.num_mtp_modules, heads.target.family
    if num_modules == 1 or family.native.numbers_modules:
        return None
    return (
        f"head.num_mtp_modules={num_modules}: checkpoints of family {heads.target.family_name} "
        "hold one module, so these heads decode here and are not exported; head=shared_n1 trains "
        "one"
    )


def graphs_note(config: TrainConfig, *, device: torch.device, num_processes: int) -> str | None:
    """A line for long runs on one GPU whose steps Python launches, where they need not be."""
    trainer = config.trainer
    wanted = dataclasses.replace(trainer, compile=True, cuda_graphs=True)
    if device.type != "cuda" or num_processes > 1 or trainer.max_steps < _LONG_RUN:
        return None
    if trainer == wanted or not is_valid(dataclasses.replace(config, trainer=wanted)):
        return None
    return (
        "trainer.compile=true trainer.cuda_graphs=true (trainer=one_gpu) compile the layers in the "
        "first step and replay the others, which makes those of small models faster "
        "(docs/recipes.md, Schedule by size)"
    )


def _starts_from_layer(config: TrainConfig, *, target: Target) -> bool:
    """Whether modules start from a decoder layer of the target."""
    head = config.head
    if head.path is not None:
        return False
    start = choose_start(target, _head_spec(config), init=cast(Init, head.init))
    return start.init == "target_last_layer"


def _states_from(config: TrainConfig) -> str | None:
    """The key that hidden states come from; None where the target computes them."""
    keys = {
        "hidden_cache": config.data.hidden_cache,
        "states_endpoint": config.data.states_endpoint,
    }
    return next((f"data.{key}" for key, value in keys.items() if value is not None), None)


def _loaded_line(config: TrainConfig, *, target: Target, rows: TrainingRows) -> str:
    key = _states_from(config)
    if key is None:
        return ""
    if reason := needs_layers(config):
        return f"target: loaded whole beside {key}, for {reason}"
    if not target.num_left_out:
        return f"target: loaded whole beside {key}, as its checkpoint asks for"
    line = f"target: {target.num_left_out} layers not loaded, hidden states from {key}"
    if config.data.states_endpoint is None:
        return line
    # Nothing in a file says which layer it is of.
    return f"{line}; by them its own tokens of a row have {rows.own_nll(0):.4f} nats each"


def depths_of(config: TrainConfig) -> int:
    """k, depths that are trained."""
    return config.objective.num_depths or max(config.head.num_mtp_modules, 3)


def cache_hidden(config: TrainConfig) -> dict[str, object]:
    """`task=cache`: write the hidden states of all rows of a run, see `write_hidden_cache`."""
    num_processes = make_accelerator(config).num_processes
    if num_processes > 1:
        raise ConfigError(f"task=cache runs in one process, got {num_processes}; launch one.")
    target, documents = load_inputs(config, is_whole=config.data.import_hidden is None)
    return write_hidden_cache(
        config, documents=documents, target=target, num_depths=depths_of(config)
    )


def find_checkpoint(config: TrainConfig, *, output_dir: Path) -> Checkpoint | None:
    """The checkpoint to continue from, None to start at step 0."""
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
