"""What accelerate's and DeepSpeed's own files say of a training: taken over, or refused by name.

    adopt_launch      `accelerate launch --config_file X train.py`: its settings come as variables
    read_deepspeed    the JSON of `trainer.deepspeed_config`
    merge_deepspeed   the JSON with what the run must set itself; "auto" is filled in

Nothing is ignored: a setting becomes a key of ours, has no effect on the result and is named in a
line, or is refused with the key that does it here. The engine is ours (`training.parallel`), so
accelerate's own wrapping never sees these settings.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.config.training_schema import PARALLEL, TrainerConfig
from mtp_research.runtime.errors import ConfigError, IntegrityError, rule_line

_TRUE = ("1", "true", "yes")
# Variables by which accelerate would wrap the modules itself; `training.setup` hides them from it.
PLUGINS = (
    *("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"),
    *("ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
)
# A variable -> the name in accelerate's YAML, and what it must be here, as values or none.
_FIXED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", ("no",), "trainer.compile=true"),
    "ACCELERATE_USE_MEGATRON_LM": ("megatron_lm_config", ("false",), "trainer.parallel=zero2"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        "parallelism_config", ("false",), "trainer.shard_target=true",
    ),
    "XLA_DOWNCAST_BF16": ("downcast_bf16", ("0",), "trainer.precision=bfloat16"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
        "offload_optimizer_device", ("none",), "trainer.parallel=zero3",
    ),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (
        "offload_param_device", ("none",), "trainer.parallel=zero3",
    ),
    # The heads are built on every rank from the target's last layer, and sharded then.
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": ("zero3_init_flag", ("false",), "trainer.parallel=zero3"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ("deepspeed_moe_layer_cls_names", (), ""),
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", ("false",), "trainer.parallel=fsdp2"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (
        "fsdp_activation_checkpointing_offload", ("false",),
        "trainer.activation_checkpointing=true",
    ),
    "FSDP_IGNORED_MODULES": ("fsdp_ignored_modules", (), "head.freeze=[PATTERN]"),
}  # fmt: skip
_PRECISIONS = {"bf16": "bfloat16"}
_SHARDINGS = {"1": "fsdp2", "FULL_SHARD": "fsdp2", "3": "ddp", "NO_SHARD": "ddp"}
# How shards are laid out, loaded and written: the program decides that, with the same result.
_LAYOUT = (
    *("FSDP_AUTO_WRAP_POLICY", "FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_STATE_DICT_TYPE"),
    *("FSDP_BACKWARD_PREFETCH", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
)


class _Asked(NamedTuple):
    """A key of ours that accelerate's file sets: the value, and how the file says it."""

    key: str
    value: object
    said: str


def adopt_launch(
    config: TrainConfig | EvalConfig, *, typed: Collection[str], environ: Mapping[str, str]
) -> list[str]:
    """Take over what `accelerate launch` was told, in place; returns a line that says so, or none.

    Args:
        config: checked for values, not yet for rules between keys.
        typed: words of the command line. A key that was typed, or that YAML of ours sets to another
            value than the schema's default, must agree with accelerate's file.
        environ: variables of the process.

    Raises:
        ConfigError: one line per setting that has no equivalent here, or that a key contradicts.
    """
    faults = list(_refused(environ))
    asked = list(_asked(environ, faults.append))
    if isinstance(config, EvalConfig):
        names = ", ".join(one.said for one in asked)
        if faults or asked:
            faults.append(f"eval.py takes no settings of accelerate, got {names}; use python.")
            raise ConfigError("\n".join(faults))
        return []
    given = {word.lstrip("+").partition("=")[0] for word in typed}
    if any(word.removeprefix("trainer=") in PARALLEL for word in typed):  # a file of conf/trainer
        given.add("trainer.parallel")
    for key, value, said in asked:
        section, name = key.split(".")
        holder = getattr(config, section)
        ours, default = getattr(holder, name), getattr(type(holder), name)
        if ours != value and (key in given or ours != default):
            expected = f"must be {value}, as accelerate's {said} asks, or that must go"
            faults.append(rule_line(key, expected, ours, f"{key}={value}"))
        else:
            setattr(holder, name, value)
    if faults:
        raise ConfigError("\n".join(faults))
    lines = [f"{one.said}: {one.key}={one.value}" for one in asked]
    layout = [f"{name.lower()}={environ[name]}" for name in _LAYOUT if name in environ]
    if layout and lines:
        lines.append(f"decided by the program: {', '.join(layout)}")
    return [f"accelerate: {'; '.join(lines)}"] if lines else []


def _refused(environ: Mapping[str, str]) -> Iterator[str]:
    for variable, (name, allowed, fix) in _FIXED.items():
        value = environ.get(variable, "").lower()
        if value not in ("", "none", *allowed):
            legal = f"must be {' or '.join(allowed)}" if allowed else "must be left out"
            instead = f" and set {fix}" if fix else ""
            yield f"accelerate's {name} {legal}, got {value}; change its file{instead}."


def _asked(environ: Mapping[str, str], refuse: Callable[[str], object]) -> Iterator[_Asked]:
    """Keys that the variables stand for; what has none is handed to `refuse` as a line."""
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision in _PRECISIONS:
        said = f"mixed_precision={precision}"
        yield _Asked("trainer.precision", _PRECISIONS[precision], said)
    elif precision != "no":
        refuse(
            f"accelerate's mixed_precision must be bf16 or no, got {precision}; change its file "
            "and set trainer.precision=bfloat16."
        )
    if _is_on(environ, "ACCELERATE_USE_CPU"):
        yield _Asked("model.device", "cpu", "use_cpu=true")
    # 1 is what the launcher passes where its file says nothing.
    micro = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if micro not in ("1", "auto"):
        said, key = f"gradient_accumulation_steps={micro}", "gradient_accumulation_steps"
        yield _Asked(f"trainer.{key}", int(micro), said)
    clip = environ.get("ACCELERATE_GRADIENT_CLIPPING", "none").lower()
    if clip not in ("none", "auto"):
        yield _Asked("trainer.grad_clip", float(clip), f"gradient_clipping={clip}")
    if _is_on(environ, "ACCELERATE_USE_DEEPSPEED"):
        yield from _deepspeed_asked(environ)
    if _is_on(environ, "ACCELERATE_USE_FSDP"):
        yield from _fsdp_asked(environ, refuse)


def _deepspeed_asked(environ: Mapping[str, str]) -> Iterator[_Asked]:
    file = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    stage: object = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")  # accelerate's default
    if file.lower() != "none":
        yield _Asked("trainer.deepspeed_config", file, f"deepspeed_config_file={file}")
        zero = read_deepspeed(file).get("zero_optimization")
        stage = zero.get("stage", "auto") if isinstance(zero, dict) else 0
    if stage != "auto":
        parallel = "ddp" if str(stage) == "0" else f"zero{stage}"
        yield _Asked("trainer.parallel", parallel, f"zero_stage={stage}")


def _fsdp_asked(environ: Mapping[str, str], refuse: Callable[[str], object]) -> Iterator[_Asked]:
    said = f"fsdp_version={environ.get('FSDP_VERSION', '1')}"
    parallel: str | None = "fsdp2"
    if environ.get("FSDP_VERSION", "1") == "1":
        strategy = environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
        said, parallel = f"fsdp_sharding_strategy={strategy}", _SHARDINGS.get(strategy.upper())
    elif not _is_on(environ, "FSDP_RESHARD_AFTER_FORWARD", default="true"):
        said, parallel = "fsdp_reshard_after_forward=false", None
    if parallel is None:
        name, _, value = said.partition("=")
        refuse(
            f"accelerate's {name} must shard weights, gradients and moments, got {value}; change "
            "its file, or leave FSDP out and set trainer.parallel=zero2."
        )
    else:
        yield _Asked("trainer.parallel", parallel, said)
    if _is_on(environ, "FSDP_ACTIVATION_CHECKPOINTING"):
        key, said = "trainer.activation_checkpointing", "fsdp_activation_checkpointing=true"
        yield _Asked(key, True, said)


def _is_on(environ: Mapping[str, str], name: str, *, default: str = "false") -> bool:
    return environ.get(name, default).lower() in _TRUE


# What a DeepSpeed file may say beside what we set: nothing of it changes the optimiser's steps.
_FREE_SECTIONS = (
    *("zero_optimization", "bf16", "communication_data_type", "seq_parallel_comm_data_type"),
    *("wall_clock_breakdown", "memory_breakdown", "dump_state", "steps_per_print", "comms_logger"),
    *("flops_profiler", "tensorboard", "csv_monitor", "zero_allow_untested_optimizer"),
)
_INSTEAD = {  # a section that is refused -> the keys that do it here
    "optimizer": "trainer.learning_rate, trainer.betas and trainer.weight_decay",
    "scheduler": "trainer.learning_rate and trainer.warmup_fraction",
    "fp16": "trainer.precision=bfloat16",
    "amp": "trainer.precision=bfloat16",
    "activation_checkpointing": "trainer.activation_checkpointing=true",
    "zero_optimization.offload_optimizer": "trainer.parallel=zero3",
    "zero_optimization.offload_param": "trainer.parallel=zero3",
    "wandb": "logger=wandb",
}
_KEYS = {  # an entry that must agree with a key -> how that key is set to its value
    "train_micro_batch_size_per_gpu": "trainer.batch_size={}",
    "gradient_accumulation_steps": "trainer.gradient_accumulation_steps={}",
    "gradient_clipping": "trainer.grad_clip={}",
    "zero_optimization.stage": "trainer.parallel=zero{}",
    "bf16.enabled": "trainer.precision=bfloat16 or float32",
    "train_batch_size": "trainer.batch_size or trainer.gradient_accumulation_steps",
}


def read_deepspeed(path: str) -> dict[str, object]:
    """The JSON of `trainer.deepspeed_config`.

    Raises:
        ConfigError: there is no such file.
        IntegrityError: it holds no JSON object.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf8"))
    except OSError as fault:
        raise ConfigError(
            f"trainer.deepspeed_config must be a DeepSpeed JSON file, got {path} "
            f"({fault.strerror}); set trainer.deepspeed_config=FILE or null."
        ) from None
    except ValueError as fault:
        raise IntegrityError(f"{path}: expected a JSON object ({fault}); mend the file.") from None
    if not isinstance(found, dict):
        raise IntegrityError(f"{path}: expected a JSON object, got a {type(found).__name__}.")
    return found


def deepspeed_entries(trainer: TrainerConfig, *, num_processes: int) -> dict[str, object]:
    """What the keys of `trainer` are in DeepSpeed's words."""
    num_micro = trainer.gradient_accumulation_steps
    return {
        "train_micro_batch_size_per_gpu": trainer.batch_size,
        "gradient_accumulation_steps": num_micro,
        "train_batch_size": trainer.batch_size * num_micro * num_processes,
        "gradient_clipping": trainer.grad_clip,
        "zero_optimization": {"stage": int(trainer.parallel[-1])},
    }


def merge_deepspeed(theirs: Mapping[str, object], ours: Mapping[str, object]) -> dict[str, object]:
    """A user's settings of DeepSpeed with those that the run sets.

    Args:
        theirs: content of the file. "auto" stands for our value, where there is none for
            DeepSpeed's default.
        ours: see `deepspeed_entries`.

    Raises:
        ConfigError: one line per entry that contradicts a key or is done by another key here.
    """
    faults: list[str] = []
    merged = _merged(theirs, ours, "", faults)
    if faults:
        raise ConfigError("\n".join(faults))
    return merged


def _merged(
    theirs: Mapping[str, object], ours: Mapping[str, object], prefix: str, faults: list[str]
) -> dict[str, object]:
    merged = dict(ours)
    for name, value in theirs.items():
        entry, own = f"{prefix}{name}", ours.get(name)
        if _is_neutral(value) and not (isinstance(value, Mapping) and isinstance(own, Mapping)):
            continue
        if entry in _INSTEAD or (not prefix and name not in (*_FREE_SECTIONS, *ours)):
            instead = f" and set {_INSTEAD[entry]}" if entry in _INSTEAD else ""
            faults.append(f"trainer.deepspeed_config: {entry} is not taken; remove it{instead}.")
        elif isinstance(value, Mapping) and isinstance(own, Mapping | None):
            merged[name] = _merged(value, own or {}, f"{entry}.", faults)
        elif own is None or own == value:
            merged[name] = value
        else:
            fix = _KEYS.get(entry, "").format(value)
            change = f"set {fix}, or {entry} to auto" if fix else f"remove {entry}"
            faults.append(
                f"trainer.deepspeed_config: {entry} must be {own} or auto, got {value}; {change}."
            )
    return merged


def _is_neutral(value: object) -> bool:
    """An entry that says nothing: auto, or a section that is turned off."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or value.get("device") == "none"
    return value == "auto"
