"""MTP modules of a published checkpoint: read by index, checked, and put into our modules.

Nothing but the MTP tensors is read. Every one of them must be known and none may be missing: a
tensor that is skipped in silence costs acceptance and shows nowhere else.
"""

import json
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from mtp_research.errors import ConfigError, IntegrityError
from mtp_research.heads.block_scales import dequantise, without_scales
from mtp_research.heads.native_names import (
    has_stacked_experts,
    native_copies,
    native_keys,
    native_views,
    num_native_modules,
)
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.heads.tensor_index import TensorIndex, read_index
from mtp_research.models.family import SharedTensor
from mtp_research.models.source import CONFIG_FILE
from mtp_research.models.target import Target

_NUM_LISTED = 3


def load_native_heads(folder: str | Path, target: Target) -> MTPHeads:
    """MTP modules of a checkpoint folder on `target`: its dtype and device, no gradients.

    Conventions are the family's, from `models/families.py`.

    Args:
        folder: checkpoint in the family's published names; its other tensors are not read.
        target: the model they belong to.

    Raises:
        ConfigError: the folder is missing.
        IntegrityError: see `read_native`.
    """
    family = target.family
    spec = HeadSpec(
        num_mtp_modules=_count(_published(folder), target),
        hidden_source=family.hidden_source,
        recycle_norm=family.recycle_norm,
        concat_order=family.concat_order,
        owns_lm_head=family.owns_lm_head,
    )
    heads = MTPHeads(target, spec=spec)
    read_native(heads, folder=folder)
    return heads.eval().requires_grad_(False)


def read_native(heads: MTPHeads, *, folder: str | Path) -> None:
    """Put the MTP modules of a checkpoint folder into `heads`, in place.

    Args:
        heads: as many modules as the checkpoint has, with its conventions.
        folder: checkpoint of their target, in the family's published names.

    Raises:
        ConfigError: the folder is missing.
        IntegrityError: the files lack modules, hold missing, extra or misshaped tensors, copies
            that differ from the target's, or two equal modules.
    """
    index, target = _published(folder), heads.target
    layout = target.family.native
    keys = native_keys(index.files, layout, num_layers=target.config.num_hidden_layers)
    views = native_views(heads, layout, has_stacked_experts=has_stacked_experts(keys))
    copies = native_copies(heads, layout)
    _check_names(keys, views, copies, folder=index.folder)
    tensors = dequantise(index.read(keys))
    _check_copies(tensors, copies, target=target, folder=index.folder)
    _check_shapes(tensors, views, folder=index.folder)
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(tensors[name])
    _check_distinct(heads, folder=index.folder)


def has_native_heads(folder: str | Path, target: Target) -> bool:
    """Whether a folder holds MTP modules in the published names of the target's family.

    True as well where only its configuration promises some: reading them then says what is missing.

    Raises:
        IntegrityError: its index or only file cannot be read.
    """
    folder = Path(folder)
    if not (folder / CONFIG_FILE).is_file():
        return False
    layout, num_layers = target.family.native, target.config.num_hidden_layers
    keys = native_keys(read_index(folder).files, layout, num_layers=num_layers)
    return num_native_modules(keys, layout) > 0 or bool(_promised(folder, layout.count_field))


def num_published_modules(folder: str | Path, target: Target) -> int:
    """How many MTP modules a checkpoint folder of `target` holds.

    Raises:
        ConfigError: the folder is missing.
        IntegrityError: none, or another number than its configuration promises.
    """
    return _count(_published(folder), target)


def _published(folder: str | Path) -> TensorIndex:
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(
            f"native MTP modules need a local checkpoint folder, {str(folder)!r} is none; "
            "download the model and set the path to its folder."
        )
    return read_index(folder)


def _count(index: TensorIndex, target: Target) -> int:
    """Modules in the files, which the configuration must promise where it has a field for it."""
    layout = target.family.native
    keys = native_keys(index.files, layout, num_layers=target.config.num_hidden_layers)
    num_modules = num_native_modules(keys, layout)
    promised = _promised(index.folder, layout.count_field)
    if num_modules == 0 or (promised is not None and promised != num_modules):
        said = "" if promised is None else f" ({layout.count_field} promises {promised})"
        place = layout.prefix.format(layer=target.config.num_hidden_layers, module=0)
        raise IntegrityError(
            f"{index.folder} must hold MTP modules, the first under {place}*, got {num_modules}"
            f"{said}; fetch the model again, or train heads (head.init=target_last_layer)."
        )
    return num_modules


def _promised(folder: Path, count_field: str | None) -> int | None:
    if count_field is None or not (folder / CONFIG_FILE).is_file():
        return None
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf8"))
        return config.get("text_config", config).get(count_field)
    except (OSError, ValueError, AttributeError) as fault:
        raise IntegrityError(
            f"{folder / CONFIG_FILE} must be a model's configuration in JSON, got {fault}."
        ) from fault


def _check_names(
    keys: list[str],
    views: Mapping[str, Tensor],
    copies: Mapping[str, SharedTensor],
    *,
    folder: Path,
) -> None:
    found = without_scales(keys) - copies.keys()
    missing, extra = sorted(views.keys() - found), sorted(found - views.keys())
    if missing or extra:
        raise IntegrityError(
            f"{folder} must hold the {len(views)} tensors of its MTP modules; {len(missing)} are "
            f"missing {missing[:_NUM_LISTED]}, {len(extra)} are extra {extra[:_NUM_LISTED]}; fetch "
            "the model again, or check that its family is the target's."
        )


def _check_shapes(
    tensors: Mapping[str, Tensor], views: Mapping[str, Tensor], *, folder: Path
) -> None:
    misshaped = [
        f"{name} {list(tensors[name].shape)}, not {list(view.shape)}"
        for name, view in views.items()
        if tensors[name].shape != view.shape
    ]
    if misshaped:
        raise IntegrityError(
            f"{folder}: {len(misshaped)} MTP tensors have another shape: "
            f"{'; '.join(misshaped[:_NUM_LISTED])}."
        )


def _check_copies(
    tensors: Mapping[str, Tensor],
    copies: Mapping[str, SharedTensor],
    *,
    target: Target,
    folder: Path,
) -> None:
    """Modules use the target's embedding and lm_head, so a release's copies must be equal to it."""
    originals = {"embed_tokens": target.embed_tokens.weight, "lm_head": target.lm_head_weight}
    for name in copies.keys() & tensors.keys():
        original = cast(Tensor, originals[copies[name]]).cpu()
        if not torch.equal(tensors[name].to(original.dtype), original):
            raise IntegrityError(
                f"{folder}: {name} must be a copy of the target's {copies[name]}, it differs; "
                "modules with an embedding or head of their own are not supported."
            )


def _check_distinct(heads: MTPHeads, *, folder: Path) -> None:
    """Modules that are equal were loaded from one place: the last one written twice."""
    states = [module.state_dict() for module in cast(nn.ModuleList, heads.mtp_modules)]
    for (first, one), (second, other) in combinations(enumerate(states), 2):
        if all(torch.equal(one[name], other[name]) for name in one):
            raise IntegrityError(
                f"{folder}: MTP modules {first} and {second} are equal, the file holds one of them "
                "twice; fetch the model again."
            )
