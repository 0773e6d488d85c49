"""Weights of a target from its files: on one device, over those of a map, or split over ranks.

First the config is read, and what cannot work is refused; then transformers loads, and what is not
whole is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mtp_research.errors import ConfigError
from mtp_research.models.families import FAMILIES
from mtp_research.models.loading import PublishedConfig, loading, read_config, require_tensors
from mtp_research.models.placement import auto_map, require_shared_place
from mtp_research.models.quantised import dequantising, quantisation_of, require_scales
from mtp_research.models.tensor_parallel import distribution, keep_local_parts, num_ranks


@dataclass(frozen=True)
class Placing:
    """Where weights go.

    Attributes:
        device: of a target that lies on one.
        dtype: of the weights.
        tp_plan: `none`, or how ranks split the target; see `models/tensor_parallel.py`.
        device_map: `none`, `auto`, or devices by module name; see `models/placement.py`.
    """

    device: torch.device
    dtype: torch.dtype
    tp_plan: str = "none"
    device_map: str | Mapping[str, int | str] = "none"


class LoadedModel(NamedTuple):
    """A causal LM and the family that its files belong to."""

    model: PreTrainedModel
    family_name: str


def load_weights(path: str, *, placing: Placing) -> LoadedModel:
    """Load the causal LM at `path` (folder or hub id); no remote code is run.

    Raises:
        ConfigError: nothing is there; the family, its quantisation or the placing is not supported.
        IntegrityError: a file is damaged, or a tensor is missing or of another shape.
        EnvironmentFault: a package or device that the placing or quantisation needs is missing.
    """
    with loading(path):
        published = read_config(path)  # refuses before gigabytes are read
        if quantisation_of(published.config) == "fp8":
            require_scales(Path(path))
        with dequantising(published.config) as config:
            loaded = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=placing.dtype,
                trust_remote_code=False,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
                **_arguments(published, placing),
            )
    model, report = cast(tuple[Any, dict[str, set[str]]], loaded)
    require_tensors(report, path=path)
    if placing.tp_plan != "none":
        keep_local_parts(model)
    elif placing.device_map != "none":
        require_shared_place(model, family=FAMILIES[published.family_name])
    elif quantisation_of(published.config) != "bitsandbytes":  # whose loader has placed them
        model = model.to(placing.device)
    return LoadedModel(model, published.family_name)


def _arguments(published: PublishedConfig, placing: Placing) -> dict[str, object]:
    """Arguments of `from_pretrained` that say where weights go.

    Raises:
        ConfigError: settings that exclude each other.
    """
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
