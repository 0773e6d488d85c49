"""From a command line to a checked configuration, and from a failure to one line and an exit code.

`train.py` and `eval.py` are one call of `run_entry` each. Hydra composes the YAML groups under
`conf/` on the schema of `mtp_research.config`; below this file there is no DictConfig. Sweeps are
left to `wandb sweep`, so `--multirun` is not offered.
"""

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from mtp_research.config import EvalConfig, TrainConfig
from mtp_research.launch import submit
from mtp_research.overrides import CONF_DIR, ENTRIES, check_overrides, help_text
from mtp_research.preflight import SPECIAL_HEADS, check_inputs
from mtp_research.runtime.errors import (
    ConfigError,
    EnvironmentFault,
    IntegrityError,
    Interrupted,
    NumericFault,
)
from mtp_research.runtime.files import run_lock
from mtp_research.runtime.provenance import redact, resolve_path, write_run_folder
from mtp_research.validation import fault_line, schema_keys, validate

FLAGS = {"--traceback", "--cfg", "job"}
CTRL_C_EXIT_CODE = 130

ConfigT = TypeVar("ConfigT", TrainConfig, EvalConfig)


def run_entry(
    schema: type[ConfigT],
    run: Callable[[ConfigT, Path], None],
    *,
    argv: Sequence[str] | None = None,
) -> int:
    """Run one command of the project.

    Args:
        schema: `TrainConfig` or `EvalConfig`.
        run: the work; takes the checked configuration and the run folder, prints its own result.
        argv: command-line words; those of the process by default.

    Returns:
        The process exit code: 0 fine, 2 configuration, 3 integrity, 4 environment, 5 numeric,
        75 interrupted but resumable, 130 Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        sys.stdout.write(f"{help_text(schema)}\n")
        return 0
    try:
        config = compose_config(schema, [word for word in words if word not in FLAGS])
        if "--cfg" in words:
            sys.stdout.write(f"{json.dumps(dataclasses.asdict(config), indent=2)}\n")
            return 0
        check_inputs(config)
        output_dir = _output_dir(config)
        if isinstance(config, TrainConfig) and config.launcher.kind == "slurm":
            job_id = submit(config.launcher, words=words, output_dir=output_dir)
            sys.stdout.write(f"{json.dumps({'job_id': job_id, 'output_dir': str(output_dir)})}\n")
            return 0
        rank = os.environ.get("RANK", "0")  # set by torchrun and accelerate launch
        is_writer = rank == "0"
        if isinstance(config, EvalConfig) and not is_writer:  # with model.tp_plan all ranks decode
            output_dir = output_dir / f"rank_{rank}"
            output_dir.mkdir(parents=True, exist_ok=True)
        with run_lock(output_dir) if is_writer else nullcontext():
            if is_writer:
                _check_unfinished(config, output_dir)
                write_run_folder(output_dir, config)
            run(config, output_dir)
    except (ConfigError, IntegrityError, EnvironmentFault, NumericFault, Interrupted) as fault:
        if "--traceback" in words:
            traceback.print_exc()
        for line in redact(str(fault)).splitlines():
            sys.stderr.write(f"error: {line}\n")
        return fault.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("error: stopped by Ctrl-C.\n")
        return CTRL_C_EXIT_CODE
    return 0


def compose_config(schema: type[ConfigT], words: Sequence[str]) -> ConfigT:
    """Compose, type and check a configuration; relative paths also count from the repository root.

    Args:
        schema: `TrainConfig` or `EvalConfig`.
        words: overrides as typed, such as `spec.k=3` or `model=lab_tiny`.

    Returns:
        A plain dataclass.

    Raises:
        ConfigError: one line per fault.
    """
    overrides = check_overrides(schema, words)
    # Imported here: Hydra costs more than the whole of --help.
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    entry = ENTRIES[schema]
    ConfigStore.instance().store(name=f"{entry}_schema", node=schema)
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            config = OmegaConf.to_object(compose(entry, overrides=overrides))
    except (HydraException, OmegaConfBaseException) as fault:
        raise ConfigError(_compose_fault(schema, fault, overrides)) from fault
    assert isinstance(config, schema), f"compose must give {schema.__name__}, got {type(config)}"
    _resolve_paths(config)
    if isinstance(config, TrainConfig) and config.head.init == "native":
        _adopt_conventions(config, overrides)
    validate(config)
    return config


def _adopt_conventions(config: TrainConfig, words: Sequence[str]) -> None:
    """Take what the target's own modules need from its files, unless it was typed, in place."""
    from mtp_research.heads.record import adopt_conventions  # imports torch

    keys = [word.lstrip("+").partition("=")[0] for word in words]
    typed = {key.removeprefix("head.") for key in keys if key.startswith("head.")}
    if "head" in keys:  # a file of the group, which is chosen for its number of modules
        typed.add("num_mtp_modules")
    adopt_conventions(config.head, path=config.model.path, typed=typed)


def _compose_fault(schema: type, fault: Exception, overrides: Sequence[str]) -> str:
    """Say what a key takes when a value of the wrong type was given; else Hydra's first line."""
    cause: BaseException = fault
    while cause.__cause__ is not None:
        cause = cause.__cause__
    key = str(getattr(cause, "full_key", None) or "").split("[")[0]
    item = schema_keys(schema).get(key)
    if item is None:
        return f"conf/ and overrides must compose, got: {str(cause).splitlines()[0]}"
    values = [word.partition("=")[2] for word in overrides if word.partition("=")[0] == key]
    return fault_line(key, item, values[-1] if values else f"a wrong type in conf/ ({cause})")


def _resolve_paths(config: TrainConfig | EvalConfig) -> None:
    """Make configured paths independent of the working directory, in place."""
    config.model.path = resolve_path(config.model.path)
    config.model.pretrain.corpus_dir = resolve_path(config.model.pretrain.corpus_dir)
    if isinstance(config, TrainConfig):
        config.data.path = resolve_path(config.data.path)
        config.data.hidden_cache = config.data.hidden_cache and resolve_path(
            config.data.hidden_cache
        )
        config.head.path = config.head.path and resolve_path(config.head.path)
    else:
        config.prompts.path = config.prompts.path and resolve_path(config.prompts.path)
        config.spec.head = _resolve_head(config.spec.head)
        config.grid.head = [_resolve_head(head) for head in config.grid.head]


def _check_unfinished(config: TrainConfig | EvalConfig, output_dir: Path) -> None:
    """Refuse a folder with an unfinished evaluation of other settings while its record is whole."""
    if isinstance(config, EvalConfig):
        from mtp_research.evaluation.run.journal import check_resumable  # imports torch

        check_resumable(output_dir, config)


def _resolve_head(head: str | None) -> str | None:
    return head if head in SPECIAL_HEADS else resolve_path(str(head))


def _output_dir(config: TrainConfig | EvalConfig) -> Path:
    if config.output_dir is not None:
        return Path(config.output_dir)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    if isinstance(config, TrainConfig):
        return Path("runs") / f"{config.task}-{config.model.name}-{stamp}"
    return Path("results") / f"eval-{config.model.name}-{stamp}"
