"""Weights of a target from its files: on one device, over those of a map, or split over ranks.

First the config is read, and what cannot work is refused; then transformers loads, quietly and with
its faults about files turned into ours, and what is not whole is refused.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from mtp_research.models.families import FAMILIES, family_of, require_supported
from mtp_research.models.loading.parts import LayerFilter, Layers
from mtp_research.models.loading.placement import (
    auto_map,
    distribution,
    keep_local_parts,
    num_ranks,
    require_shared_place,
)
from mtp_research.models.loading.quantised import dequantising, quantisation_of, require_scales
from mtp_research.models.loading.sizes import check_sizes
from mtp_research.models.loading.source import check_source, read_weight_map, split_hub_id
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError

logger = logging.getLogger(__name__)
_REPORTER = logging.getLogger("transformers.modeling_utils")
_NUM_LISTED = 3
# What transformers raises about configurations and files that it does not expect.
_LIBRARY_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    KeyError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Placing:
    """Where weights go; see `models/loading/placement.py`."""

    device: torch.device  # of a target that lies on one
    dtype: torch.dtype
    tp_plan: str = "none"  # or how ranks split the target
    device_map: str | Mapping[str, int | str] = "none"  # or `auto`, or devices by module name
    layers: Layers = "all"  # decoder layers that are loaded, on one device; see `parts`


class LoadedModel(NamedTuple):
    """A causal LM and the family that its files belong to."""

    model: PreTrainedModel
    family_name: str
    num_left_out: int = 0  # decoder layers without weights


class PublishedConfig(NamedTuple):
    """Configuration of a published model and the family that it belongs to."""

    config: PreTrainedConfig
    family_name: str


def load_weights(path: str, *, placing: Placing) -> LoadedModel:
    """Load the causal LM at `path` (folder or hub id); no remote code is run.

    Raises what `load_target` does, and `ConfigError` where quantisation and placing do not agree.
    """
    with loading(path):
        published = read_config(path)  # refuses before gigabytes are read
        method = quantisation_of(published.config)
        if method != "bitsandbytes" and Path(path).is_dir():  # which packs numbers
            check_sizes(Path(path), published.config)
        if method == "fp8":
            require_scales(Path(path))
        parts = _layer_filter(published, placing)
        load = AutoModelForCausalLM.from_pretrained if parts is None else parts.loader()
        with dequantising(published.config) as config:
            hub_id = split_hub_id(path)
            loaded = load(
                hub_id.name,
                revision=hub_id.revision,
                config=config,
                dtype=placing.dtype,
                trust_remote_code=False,
                use_safetensors=True,  # nothing pickled
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
                **_arguments(published, placing),
            )
    model, report = cast(tuple[Any, dict[str, set[str]]], loaded)
    if parts is not None:
        unexpected = report["unexpected_keys"]
        report["unexpected_keys"] = {name for name in unexpected if not parts.is_left_out(name)}
    require_tensors(report, path=path)
    if parts is not None:
        model = parts.put_back(model.to(placing.device))
        return LoadedModel(model, published.family_name, len(parts.left_out))
    if placing.tp_plan != "none":
        keep_local_parts(model)
    elif placing.device_map != "none":
        require_shared_place(model, family=FAMILIES[published.family_name])
    elif method != "bitsandbytes":  # whose loader has placed them
        model = model.to(placing.device)
    return LoadedModel(model, published.family_name)


def _layer_filter(published: PublishedConfig, placing: Placing) -> LayerFilter | None:
    """What leaves layers out; None for whole models.

    Those are also models of images and text and ones that stay quantised, whose loaders want to see
    every layer.
    """
    config, family_name = published
    is_plain = config.get_text_config() is config and quantisation_of(config) in (None, "fp8")
    if placing.layers == "all" or not is_plain:
        return None
    return LayerFilter(config, FAMILIES[family_name], placing.layers)


def _arguments(published: PublishedConfig, placing: Placing) -> dict[str, object]:
    config, family_name = published
    method = quantisation_of(config)
    if placing.tp_plan != "none":
        if placing.device_map != "none" or method is not None:
            other = "model.device_map" if method is None else f"a checkpoint stored as {method}"
            raise ConfigError(
                f"model.tp_plan={placing.tp_plan} does not go with {other}; set model.tp_plan=none."
            )
        text, family = config.get_text_config(), FAMILIES[family_name]
        plan, device = placing.tp_plan, placing.device
        return {"distributed_config": distribution(plan, config=text, family=family, device=device)}
    if placing.device_map == "none":
        return {"device_map": {"": placing.device}} if method == "bitsandbytes" else {}
    if num_ranks() > 1:
        raise ConfigError(
            f"model.device_map spreads a target over the devices of one process, got {num_ranks()} "
            "processes; launch one, or set model.device_map=none."
        )
    if isinstance(placing.device_map, Mapping):
        return {"device_map": dict(placing.device_map)}
    if placing.device_map != "auto":
        raise ConfigError(
            f"model.device_map must be auto or none, got {placing.device_map!r}; "
            "set model.device_map=auto."
        )
    family = FAMILIES[family_name]
    return {"device_map": auto_map(config, family=family, dtype=placing.dtype)}


@contextmanager
def loading(path: str) -> Iterator[None]:
    """Load quietly; turn transformers' faults into ours.

    The caller checks the tensors itself, with `require_tensors`.
    """
    check_source(path)
    read_weight_map(Path(path))
    try:
        with quiet_loading():
            yield
    except (ConfigError, EnvironmentFault, IntegrityError):  # ours are ValueErrors and such
        raise
    except (*_LIBRARY_FAULTS, SafetensorError) as fault:
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


@contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bar and no tensor report of transformers."""
    had_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    _REPORTER.addFilter(_is_no_tensor_report)
    try:
        yield
    finally:
        _REPORTER.removeFilter(_is_no_tensor_report)
        if had_bar:
            transformers_logging.enable_progress_bar()


def read_config(path: str) -> PublishedConfig:
    """Configuration of the model at `path` (folder or hub id); no remote code is run.

    A family that the library has no class for is read as the one that its entry names; one that is
    not supported is refused (`ConfigError`).
    """
    name, revision = split_hub_id(path)
    raw, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
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
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    return PublishedConfig(config, family_of(config.get_text_config().model_type))


def require_tensors(report: Mapping[str, set], *, path: str) -> None:
    """Refuse a model of which transformers would draw tensors at random (`IntegrityError`).

    Its loading report holds names, or (name, shapes) of misshaped tensors.
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
