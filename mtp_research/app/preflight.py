"""What the configuration points to, checked before the run folder is made and torch is imported.

Values and rules between keys were checked by `config.rules`; here are the files. A fault that shows
only in tensors, or in a model still to be downloaded, is left to the loaders.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from mtp_research.config.launched import deepspeed_entries, merge_deepspeed, read_deepspeed
from mtp_research.config.rules import expand
from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.config.training_schema import TrainerConfig
from mtp_research.data.rows import check_source_exists
from mtp_research.evaluation.run.prompt_files import read_prompt_files
from mtp_research.evaluation.run.settings_check import check_settings
from mtp_research.heads.record import (
    RECORD_FILE,
    check_head_fits,
    decoded_schedule,
    read_head_record,
    recorded_schedule,
    refuse_run_folder,
)
from mtp_research.models.loading.source import (
    CONFIG_FILE,
    check_source,
    looks_like_hub_id,
    read_sizes,
    split_hub_id,
)
from mtp_research.policy.fields import ModuleSchedule
from mtp_research.runtime.errors import ConfigError, EnvironmentFault

SPECIAL_HEADS = (None, "oracle")
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4096 - 256  # the system's limit, and room for our own files
_NUM_SHOWN = 60
# Behind the target's name, what the defaults of data.path and spec.head end with.
_SHIPPED_ANSWERS, _SHIPPED_HEADS = "regenerated.jsonl.xz", "heads/chain_n3"
_NO_NAME = re.compile(r"[^\w.+-]+")  # what a name of a run folder does not hold


def check_inputs(config: TrainConfig | EvalConfig) -> None:
    """Refuse files that are missing, damaged or do not fit each other; paths are resolved."""
    if isinstance(config, TrainConfig):
        if config.task == "target":  # model.path and data.path are not read
            return
        prompts = config.matrix.prompts if config.task == "matrix" else []
        _require_paths(
            ("head.path", config.head.path), ("data.import_hidden", config.data.import_hidden)
        )
        config_file = check_source(config.model.path)
        _check_answers(config)
        check_source_exists(config.data.path, key="data.path")
        for path in prompts:
            check_source_exists(path, key="matrix.prompts")
        _check_cache(config)
        _check_deepspeed(config.trainer)
        if config.trainer.cuda_graphs:
            key = "trainer.cuda_graphs"
            _require_gpu(config.model.device, key=key, fix=f"{key}=false")
        _check_head(config.head.path, key="head.path", config_file=config_file)
        return
    check_settings(config)
    cells = [cell for cell in expand(config).cells if cell.spec.num_speculative_tokens > 0]
    heads = dict.fromkeys(cell.spec.head for cell in cells if cell.spec.head not in SPECIAL_HEADS)
    local = [head for head in heads if head is not None and not looks_like_hub_id(head)]
    config_file = check_source(config.model.path)
    for head in local:
        _check_default_head(config, head)
    _require_paths(*(("spec.head", head) for head in local))
    for head in heads:
        if head is not None and not Path(head).exists():
            check_source(head, key="spec.head")  # a checkpoint on the hub
        else:
            schedule = config.spec.module_schedule
            _check_head(head, key="spec.head", config_file=config_file, schedule=schedule)
    if config.prompts.path is not None:
        read_prompt_files(config.prompts.path)
    if config.engine.cuda_graphs:
        _require_gpu(config.model.device, key="engine.cuda_graphs", fix="engine=auto")


def _check_answers(config: TrainConfig) -> None:
    if _is_unset(config.data.path, f"{config.model.name}/{_SHIPPED_ANSWERS}"):
        raise ConfigError(
            f"data.path must be an existing path, got {config.data.path}, the default of models "
            f"whose answers are shipped; mtp regenerate --target {config.model.path} --source "
            "QUESTIONS --output FILE writes those of this one; set data.path."
        )


def _check_default_head(config: EvalConfig, head: str) -> None:
    if _is_unset(head, f"{config.model.name}/{_SHIPPED_HEADS}"):
        raise ConfigError(
            f"spec.head must be an existing path, got {head}, the default of models whose heads "
            f"are shipped; set spec.head=RUN/head for trained ones, spec.head={config.model.path} "
            "for modules that the model itself ships, spec.head=null for none."
        )


def described_target(path: str) -> tuple[str, str]:
    """Name and family of the model at a path, which `model=NAME` says for the models of `conf/`.

    Imports torch, fetches the `config.json` of a hub id, and unpacks a GGUF file.
    """
    from mtp_research.models.loading.gguf import unpacked
    from mtp_research.models.loading.load_weights import loading, read_config

    folder = unpacked(path)
    with loading(folder):
        family = read_config(folder).family_name
    return target_name(path) or family, family


def target_name(path: str) -> str:
    """Name of the model at a path or hub id, from the words alone; may be empty."""
    return _NO_NAME.sub("-", Path(split_hub_id(path).name).name).strip("-.+")


def require_possible_paths(config: TrainConfig | EvalConfig) -> None:
    """Refuse paths that no system call takes, before the first one does."""
    paths = {
        "output_dir": config.output_dir,
        "model.path": config.model.path,
        "model.pretrain.corpus_dir": config.model.pretrain.corpus_dir,
    }
    if isinstance(config, TrainConfig):
        paths |= {
            "data.path": config.data.path,
            "data.hidden_cache": config.data.hidden_cache,
            "data.import_hidden": config.data.import_hidden,
            "head.path": config.head.path,
            "trainer.resume": config.trainer.resume,
            "trainer.deepspeed_config": config.trainer.deepspeed_config,
        }
    else:
        paths |= {"prompts.path": config.prompts.path, "spec.head": config.spec.head}
        paths |= {"spec.synthetic_profile": config.spec.synthetic_profile}
        paths |= {f"grid.head.{number}": path for number, path in enumerate(config.grid.head)}
    for key, path in paths.items():
        if path is not None:
            require_possible(key, path)


def require_possible(key: str, path: str) -> None:
    """Refuse a path with a NUL, or one that is too long with the names of our files behind it."""
    try:
        names = os.fsencode(Path(path).absolute()).split(b"/")
        longest, total = max(map(len, names)), sum(map(len, names)) + len(names)
        is_possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair
        is_possible, longest, total = False, 0, 0
    if not is_possible or longest > _MAX_NAME_BYTES or total > _MAX_PATH_BYTES:
        shown = path if len(path) <= _NUM_SHOWN else f"{path[:_NUM_SHOWN]}..."
        raise ConfigError(
            f"{key} must be text without NUL, at most {_MAX_NAME_BYTES} bytes a name and "
            f"{_MAX_PATH_BYTES} in all, got {shown!r} ({len(path)} characters); set {key}=PATH."
        )


def require_file_name(key: str, name: str) -> None:
    """Refuse a name that would lead out of the folder that is called after it."""
    if not re.fullmatch(r"\w[\w.+ -]{0,99}", name):
        raise ConfigError(
            f"{key} must be at most 100 letters, digits, spaces, . _ + and - for the default "
            f"output_dir, got {name[:_NUM_SHOWN]!r}; set {key}=NAME or output_dir=FOLDER."
        )


def require_inside(root: str, folder: str) -> None:
    """Refuse a job's folder outside that of the sweep, as `hydra.sweep.subdir` can make it."""
    if not Path(folder).resolve().is_relative_to(Path(root).resolve()):
        raise ConfigError(
            f"hydra.sweep.subdir must stay below output_dir {root!r}, got {folder!r}; "
            "leave it out, or set output_dir=A,B."
        )


def _require_gpu(device: str, *, key: str, fix: str) -> None:
    """Refuse captured steps where they cannot run; imports torch, which is what knows."""
    missing = [] if device != "cpu" else ["model.device=cuda (got cpu)"]
    if find_spec("triton") is None:
        missing.append("the triton package (not installed)")
    import torch  # after what needs no second to find out

    if not torch.cuda.is_available():
        missing.append("a CUDA GPU that torch can use (none is visible)")
    if missing:
        raise EnvironmentFault(f"{key}=true needs {' and '.join(missing)}; set {fix}.")


def _is_unset(path: str, default: str) -> bool:
    """Whether a path is a default that is shipped for other targets alone."""
    wanted = Path(default).parts
    return Path(path).parts[-len(wanted) :] == wanted and not Path(path).exists()


def _require_paths(*paths: tuple[str, str | None]) -> None:
    faults = [
        f"{key} must be an existing path, got {path} (from {Path.cwd()}); set {key}=PATH."
        for key, path in paths
        if path is not None and not Path(path).exists()
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def _check_cache(config: TrainConfig) -> None:
    folder = config.data.hidden_cache
    if config.task == "heads" and folder is not None and not Path(folder).is_dir():
        raise ConfigError(
            f"data.hidden_cache must be a folder of cached hidden states, {folder!r} does not "
            f"exist (from {Path.cwd()}); write it with the same command and task=cache."
        )


def _check_deepspeed(trainer: TrainerConfig) -> None:
    """Read the file before a model is loaded; what depends on the model's dtype is left out."""
    if trainer.deepspeed_config is not None:
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        entries = deepspeed_entries(trainer, num_processes=num_processes)
        merge_deepspeed(read_deepspeed(trainer.deepspeed_config), entries)


def _check_head(
    folder: str | None, *, key: str, config_file: Path | None, schedule: str | None = None
) -> None:
    """Compare a head's target with the model's sizes, if its `config.json` is at hand.

    `schedule`, spec.module_schedule, must be the one that the head was trained with.

    A folder with a `config.json` in place of `head.json` is a published checkpoint, whose MTP
    modules the loader checks against the target.
    """
    if folder is None:
        return
    refuse_run_folder(Path(folder), key=key)
    if not (Path(folder) / RECORD_FILE).exists() and (Path(folder) / CONFIG_FILE).is_file():
        return
    record = read_head_record(Path(folder), key=key)
    asked = cast(ModuleSchedule | None, schedule)
    decoded_schedule(asked, recorded=recorded_schedule(record))
    if config_file is not None:
        sizes = read_sizes(config_file)._asdict()
        check_head_fits(record, folder=Path(folder), target=sizes, key=key)
