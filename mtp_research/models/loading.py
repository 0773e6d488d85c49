"""Quiet calls of transformers' loaders, whose faults about files become ours."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from mtp_research.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.models.families import FAMILIES, family_of, require_supported
from mtp_research.models.shard_index import read_weight_map
from mtp_research.models.source import check_source

_REPORTER = logging.getLogger("transformers.modeling_utils")
_NUM_LISTED = 3

logger = logging.getLogger(__name__)


@contextmanager
def loading(path: str) -> Iterator[None]:
    """Load without transformers' progress bar and tensor report; turn its faults into ours.

    The caller checks the tensors itself, with `require_tensors`.

    Raises:
        ConfigError: nothing is at `path`, or the hub does not give it.
        IntegrityError: a file of a local folder is damaged, or its index names others.
    """
    check_source(path)
    read_weight_map(Path(path))
    had_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    _REPORTER.addFilter(_is_no_tensor_report)
    try:
        yield
    except (ConfigError, EnvironmentFault, IntegrityError):  # ours are ValueErrors and such
        raise
    except (KeyError, OSError, ValueError, RuntimeError, SafetensorError) as fault:
        lines = [line.strip() for line in str(fault).strip().splitlines()]
        reason = " ".join(lines[:_NUM_LISTED]) or type(fault).__name__
        if Path(path).is_dir():
            damaged = ", ".join(_unreadable_files(Path(path)))
            raise IntegrityError(
                f"model.path {path!r} must be a whole Hugging Face model, got: {reason}"
                f"{f' (in {damaged})' if damaged else ''}"
            ) from fault
        raise ConfigError(
            f"model.path {path!r} cannot be fetched from the hub: {reason}"
        ) from fault
    finally:
        _REPORTER.removeFilter(_is_no_tensor_report)
        if had_bar:
            transformers_logging.enable_progress_bar()


class PublishedConfig(NamedTuple):
    """Configuration of a published model and the family that it belongs to."""

    config: PreTrainedConfig
    family_name: str


def read_config(path: str) -> PublishedConfig:
    """Configuration of the model at `path` (folder or hub id); no remote code is run.

    A family that the library has no class for is read as the one that its entry names.

    Raises:
        ConfigError: the family is not supported.
    """
    raw, _ = PreTrainedConfig.get_config_dict(path)
    model_type = str(raw.get("model_type"))
    require_supported(model_type)
    loads_as = {
        name: family.loads_as
        for family in FAMILIES.values()
        for name in family.model_types
        if family.loads_as is not None
    }
    if model_type in loads_as:
        foreign = ("architectures", "auto_map", "model_type", "transformers_version")
        fields = {name: value for name, value in raw.items() if name not in foreign}
        config = AutoConfig.for_model(cast(str, loads_as[model_type]), **fields)
        return PublishedConfig(config, family_of(model_type))
    if model_type not in CONFIG_MAPPING:
        family_of(model_type)  # refuses by name what only remote code would know
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return PublishedConfig(config, family_of(config.get_text_config().model_type))


def require_tensors(report: Mapping[str, set], *, path: str) -> None:
    """Refuse a model of which transformers would draw tensors at random.

    Args:
        report: transformers' loading report: names, or (name, shapes) of misshaped tensors.
        path: of the model.

    Raises:
        IntegrityError: names some of the tensors that are missing or of another shape.
    """
    missing = sorted(report["missing_keys"])
    misshaped = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    if missing or misshaped:
        raise IntegrityError(
            f"model.path {path!r} must hold every tensor of the model; {len(missing)} are missing "
            f"{missing[:_NUM_LISTED]}, {len(misshaped)} of another shape "
            f"{misshaped[:_NUM_LISTED]}; fetch the model again."
        )
    if unused := sorted(report["unexpected_keys"]):
        logger.warning(
            "%s: %d tensors are not the target's, such as %s (MTP modules among them are read "
            "where spec.head or head.init=native asks for them)",
            path,
            len(unused),
            ", ".join(unused[:_NUM_LISTED]),
        )


def _unreadable_files(folder: Path) -> list[str]:
    """Names of weight files whose headers cannot be read."""
    damaged = []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            damaged.append(file.name)
    return damaged


def _is_no_tensor_report(record: logging.LogRecord) -> bool:
    return record.module != "loading_report"
