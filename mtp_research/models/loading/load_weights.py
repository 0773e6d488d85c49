"""Weights of a target from its files: on one device, over those of a map, or split over ranks.

First the config is read, and what cannot work is refused; then transformers loads, quietly and with
its faults about files turned into ours, and what is not whole is refused. Ranks read what they keep
of the files: the model is cut before it has weights (`parts`), and tensors that are no plain ones
are made when a part of them is asked for (`lazy_tensors`).
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_utils,
)
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from mtp_research.config.schema import WEIGHTS
from mtp_research.models.families import FAMILIES, family_of, require_supported
from mtp_research.models.fp8_layers import keep_fp8, require_fp8
from mtp_research.models.loading.parts import (
    LayerFilter,
    Layers,
    cut_layers,
    fail_together,
    join_ranks,
    layer_mesh,
    own_device,
)
from mtp_research.models.loading.placement import (
    auto_map,
    distribution,
    num_ranks,
    parts_of,
    require_gpus,
    require_shared_place,
)
from mtp_research.models.loading.quantised import (
    FP8_METHODS,
    dequantising,
    plain_config,
    quantisation_of,
    require_scales,
)
from mtp_research.models.loading.sizes import check_sizes
from mtp_research.models.loading.source import (
    check_source,
    local_file,
    read_weight_map,
    split_hub_id,
)
from mtp_research.models.loading.split_layers import run_on_parts
from mtp_research.models.rank_parts import RankParts
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
    layers: Layers = "all"  # decoder layers that are loaded; see `parts`
    weights: str = "stored"  # or random
    keep_fp8: bool = False  # see `kept_fp8`

    @property
    def is_split(self) -> bool:
        """Whether each rank keeps a part."""
        return self.tp_plan != "none" or self.layers == "sharded"


class LoadedModel(NamedTuple):
    """A causal LM and the family that its files belong to."""

    model: PreTrainedModel
    family_name: str
    num_left_out: int = 0  # decoder layers without weights
    split: RankParts | None = None  # None for a whole one


class PublishedConfig(NamedTuple):
    """Configuration of a published model and the family that it belongs to."""

    config: PreTrainedConfig
    family_name: str


def load_weights(path: str, *, placing: Placing) -> LoadedModel:
    """Load the causal LM at `path` (folder or hub id); no remote code is run.

    Raises what `load_target` does, and `ConfigError` where quantisation and placing do not agree.
    """
    with loading(path):
        published = read_config(path)  # refuses before gigabytes are read, or ranks wait
        arguments = _arguments(published, placing)
    if placing.is_split:
        join_ranks(placing.device)
    placing, arguments = _on_own_device(placing, arguments)
    parts = _layer_filter(published, placing)
    changes = [] if parts is None else [parts.take_out]
    if placing.layers == "sharded":
        changes.append(partial(cut_layers, mesh=layer_mesh(placing.device)))
    with fail_together(is_split=placing.is_split), loading(path):
        _check_files(path, published.config, placing)
        with dequantising(published.config) as config, _without_warm_up(placing):
            source, kept = _lazy_source(path, config, placing) or (_stored_source(path, config), {})
            changes = [partial(keep_fp8, blocks=kept), *changes] if kept else changes
            model, report = _build(source, changes, **arguments, dtype=placing.dtype)
        if parts is not None:
            unexpected = report["unexpected_keys"]
            report["unexpected_keys"] = {name for name in unexpected if not parts.is_left_out(name)}
        require_tensors(report, path=path)
    if placing.weights == "random":
        logger.warning("%s: weights are random, so texts, acceptance and losses mean nothing", path)
    if "state_dict" in source and (file := local_file(path, GENERATION_CONFIG_NAME)):
        model.generation_config = GenerationConfig.from_pretrained(file.parent)
    split = None
    if placing.tp_plan != "none":
        rank, family = int(os.environ["RANK"]), FAMILIES[published.family_name]
        split = parts_of(model, placing.tp_plan, family=family, rank=rank, num_ranks=num_ranks())
        run_on_parts(model, split)
    elif placing.device_map != "none":
        require_shared_place(model, family=FAMILIES[published.family_name])
    elif "device_map" not in arguments:
        model = model.to(placing.device)
    if parts is None:
        return LoadedModel(model, published.family_name, split=split)
    return LoadedModel(parts.put_back(model), published.family_name, len(parts.left_out))


def _on_own_device(
    placing: Placing, arguments: dict[str, object]
) -> tuple[Placing, dict[str, object]]:
    """Both with the number of this process's GPU, where the target lies on one."""
    device = own_device(placing.device, is_split=placing.is_split)
    if "device_map" in arguments and placing.device_map == "none":
        arguments = arguments | {"device_map": {"": device}}
    return dataclasses.replace(placing, device=device), arguments


def _check_files(path: str, config: PreTrainedConfig, placing: Placing) -> None:
    """Refuse files in a folder that cannot be those of `config`, by their headers."""
    if placing.weights == "random" or not Path(path).is_dir():
        return
    method = quantisation_of(config)
    if method != "bitsandbytes":  # which packs numbers
        check_sizes(Path(path), config)
    if method in FP8_METHODS:
        require_scales(Path(path))


def _stored_source(path: str, config: PreTrainedConfig) -> dict[str, object]:
    """What `from_pretrained` takes to read the files as they are."""
    hub_id = split_hub_id(path)
    return {
        "pretrained_model_name_or_path": hub_id.name,
        "revision": hub_id.revision,
        "config": config,
        "use_safetensors": True,  # nothing pickled
    }


def _lazy_source(
    path: str, config: PreTrainedConfig, placing: Placing
) -> tuple[dict[str, object], dict[str, int]] | None:
    """What it takes instead where tensors are made as they are read; None where they are not.

    With it come the layers that keep FP8, as `keep_fp8` takes them.
    """
    if not _is_lazy(config, placing):
        return None
    from mtp_research.models.loading.kept_fp8 import made_tensors
    from mtp_research.models.loading.lazy_tensors import Form

    plain, form = plain_config(config), Form(placing.dtype, placing.device)
    how = {"weights": placing.weights, "keep_fp8": placing.keep_fp8, "form": form}
    made = made_tensors(path, config, _without_weights(plain), **how)
    return {"config": plain, "state_dict": made.tensors}, made.blocks


def _is_lazy(config: PreTrainedConfig, placing: Placing) -> bool:
    """Whether tensors are made when they are read: the library cannot read the files, or not so."""
    method = quantisation_of(config)
    in_parts = placing.is_split and method is not None
    is_made = placing.weights == "random" or placing.keep_fp8
    return is_made or in_parts or method == "compressed-tensors"


def _without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))


def _build(
    source: Mapping[str, object],
    changes: Sequence[Callable[[PreTrainedModel], None]],
    **arguments: object,
) -> tuple[Any, dict[str, set[str]]]:
    """A loaded model and the library's report; `changes` are made before there are weights."""
    load, own = AutoModelForCausalLM.from_pretrained, None
    if changes or "state_dict" in source:
        config = cast(PreTrainedConfig, source["config"])
        own = type(_without_weights(config))
        if type(config) is not own.config_class:  # of images and text
            source = {**source, "config": config.get_text_config()}
        load = _changed(own, changes).from_pretrained
    loaded = load(
        **{"pretrained_model_name_or_path": None, **source, **arguments},
        attn_implementation="eager",
        ignore_mismatched_sizes=True,  # refused by name, see `require_tensors`
        output_loading_info=True,
        trust_remote_code=False,
    )
    model, report = cast(tuple[Any, dict[str, set[str]]], loaded)
    if own is not None:
        model.__class__ = own
    return model, report


def _changed(
    own: type[PreTrainedModel], changes: Sequence[Callable[[PreTrainedModel], None]]
) -> type[PreTrainedModel]:
    """A class whose models are changed when they are built."""

    def build(model: PreTrainedModel, config: PreTrainedConfig, *rest: object) -> None:
        own.__init__(model, config, *rest)
        for change in changes:
            change(model)

    def initialise(model: PreTrainedModel, module: nn.Module) -> None:
        # What is missing is refused; drawing it might wait for ranks that have it.
        if not any(isinstance(p.data, DTensor) for p in module.parameters(recurse=False)):
            own._init_weights(model, module)

    # The library finds its renaming rules by the name of the class and its module.
    own_facts = {"__module__": own.__module__, "__init__": build, "_init_weights": initialise}
    return type(own.__name__, (own,), own_facts)


@contextmanager
def _without_warm_up(placing: Placing) -> Iterator[None]:
    """Keep the library from asking a GPU for the whole size of layers that ranks share."""
    if placing.layers != "sharded":
        yield
        return
    with patch.object(modeling_utils, "caching_allocator_warmup"):
        yield


def _layer_filter(published: PublishedConfig, placing: Placing) -> LayerFilter | None:
    """What leaves layers out; None for whole models.

    Those are also models of images and text and ones that stay quantised, whose loaders want to see
    every layer.
    """
    config, family_name = published
    is_plain = config.get_text_config() is config and quantisation_of(config) in (
        None,
        *FP8_METHODS,
    )
    if placing.layers in ("all", "sharded") or not is_plain:
        return None
    return LayerFilter(FAMILIES[family_name], placing.layers)


def _arguments(published: PublishedConfig, placing: Placing) -> dict[str, object]:
    """Where the library is to put tensors; refuses what does not go together."""
    config, family_name = published
    family = FAMILIES[family_name]
    _require_matching(config, placing)
    if placing.tp_plan != "none":
        text, plan = config.get_text_config(), placing.tp_plan
        split = distribution(plan, config=text, family=family, device=placing.device)
        return {"distributed_config": split}
    if placing.layers == "sharded":
        if num_ranks() < 2:
            raise ConfigError(
                "trainer.shard_target needs 2 or more ranks, got 1; set trainer.shard_target=false."
            )
        require_gpus(placing.device)
    if placing.device_map == "none":
        is_packed = quantisation_of(config) == "bitsandbytes"  # placed by its loader
        is_placed = is_packed or placing.is_split or _is_lazy(config, placing)
        return {"device_map": {"": placing.device}} if is_placed else {}
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
    return {"device_map": auto_map(config, family=family, dtype=placing.dtype)}


def _require_matching(config: PreTrainedConfig, placing: Placing) -> None:
    """Refuse weights that are made or read in parts where something else wants them whole."""
    if placing.weights not in WEIGHTS:
        raise ConfigError(
            f"model.weights must be one of {sorted(WEIGHTS)}, got {placing.weights!r}; set "
            "model.weights=stored."
        )
    if placing.keep_fp8:
        require_fp8(placing.device)
        if placing.tp_plan != "none":
            raise ConfigError(
                f"model.keep_fp8=true wants model.tp_plan=none, got {placing.tp_plan}; set "
                "model.keep_fp8=false."
            )
    keys = {
        f"model.tp_plan={placing.tp_plan}": (placing.tp_plan != "none", "model.tp_plan=none"),
        "trainer.shard_target=true": (placing.layers == "sharded", "trainer.shard_target=false"),
        "model.weights=random": (placing.weights == "random", "model.weights=stored"),
        "model.keep_fp8=true": (placing.keep_fp8, "model.keep_fp8=false"),
    }
    obstacles = {
        "model.device_map": placing.device_map != "none",
        "a checkpoint stored as bitsandbytes": quantisation_of(config) == "bitsandbytes",
    }
    for other in (name for name, is_there in obstacles.items() if is_there):
        for key, (is_set, fix) in keys.items():
            if is_set:
                raise ConfigError(f"{key} does not go with {other}; set {fix}.")


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
