"""What the configuration points to, checked before the run folder is made and torch is imported.

Values and rules between keys were checked by `validation`; here are the files. A fault that shows
only in tensors, or in a model still to be downloaded, is left to the loaders.
"""

from pathlib import Path

from mtp_research.config import EvalConfig, TrainConfig
from mtp_research.errors import ConfigError
from mtp_research.evaluation.prompt_files import read_prompt_files
from mtp_research.evaluation.settings import check_settings
from mtp_research.heads.record import RECORD_FILE, check_head_fits, read_head_record
from mtp_research.models.source import CONFIG_FILE, check_source, read_sizes

SPECIAL_HEADS = (None, "oracle")


def check_inputs(config: TrainConfig | EvalConfig) -> None:
    """Refuse files that are missing, damaged or do not fit each other.

    Args:
        config: checked configuration with resolved paths.

    Raises:
        ConfigError: a path does not exist, the head belongs to another target, or a setting of a
            rule is out of range or would be ignored.
        IntegrityError: a prompt file, `head.json` or `config.json` is damaged; names file and line.
    """
    if isinstance(config, TrainConfig):
        if config.task == "target":  # model.path and data.path are not read
            return
        _require_paths({"data.path": config.data.path, "head.path": config.head.path})
        _check_cache(config)
        config_file = check_source(config.model.path)
        _check_head(config.head.path, key="head.path", config_file=config_file)
        return
    check_settings(config)
    head = config.spec.head if config.spec.num_speculative_tokens > 0 else None
    head = None if head in SPECIAL_HEADS else head
    _require_paths({"spec.head": head, "prompts.path": config.prompts.path})
    config_file = check_source(config.model.path)
    _check_head(head, key="spec.head", config_file=config_file)
    if config.prompts.path is not None:
        read_prompt_files(Path(config.prompts.path))


def _require_paths(paths: dict[str, str | None]) -> None:
    faults = [
        f"{key} must be an existing path, got {path} (from {Path.cwd()}); set {key}=PATH."
        for key, path in paths.items()
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


def _check_head(folder: str | None, *, key: str, config_file: Path | None) -> None:
    """Compare a head's target with the model's sizes, if its `config.json` is at hand.

    A folder with a `config.json` in place of `head.json` is a published checkpoint, whose MTP
    modules the loader checks against the target.
    """
    if folder is None:
        return
    if not (Path(folder) / RECORD_FILE).exists() and (Path(folder) / CONFIG_FILE).is_file():
        return
    record = read_head_record(Path(folder), key=key)
    if config_file is not None:
        sizes = read_sizes(config_file)._asdict()
        check_head_fits(record, folder=Path(folder), target=sizes, key=key)
