"""MTP modules of a published checkpoint: read by index, checked, and put into our modules.

Nothing but the MTP tensors is read, from the shards that hold them. Every one of them must be known
and none may be missing: a tensor that is skipped in silence costs acceptance and shows nowhere
else.

One mapping of names serves reading and writing: `native_views` gives, for each published name, the
part of our tensor that it holds. Published experts are one tensor each, ours are stacked, gate
before up, for an expert width I:

    model.layers.61.mlp.experts.7.gate_proj.weight   gate_up_proj[7, :I]
    model.layers.61.mlp.experts.7.up_proj.weight     gate_up_proj[7, I:]
    model.layers.61.mlp.experts.7.down_proj.weight   down_proj[7]

`published_conventions` takes from such a checkpoint how its modules are run: from its configuration
and index alone, so that `head.init=native` needs no typing. What was typed stays as it is, and
`init.init_heads` refuses what contradicts the family.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mtp_research.config.training_schema import HeadConfig
from mtp_research.heads.record import CONVENTIONS
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.families import FAMILIES
from mtp_research.models.family import NativeLayout, SharedTensor
from mtp_research.models.loading.load_weights import loading, read_config
from mtp_research.models.loading.quantised import dequantise, without_scales
from mtp_research.models.loading.source import (
    CONFIG_FILE,
    INDEX_FILE,
    local_file,
    may_hold_modules,
    read_weight_map,
)
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError, IntegrityError

_FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj")}
_STACKED_DIMS = 3
SINGLE_FILE = "model.safetensors"
_NUM_LISTED = 3


def load_native_heads(folder: str | Path, target: Target) -> MTPHeads:
    """MTP modules of a checkpoint folder on `target`: its dtype and device, no gradients.

    Conventions are the family's, from `models/families.py`.
    """
    family = target.family
    spec = HeadSpec(
        num_mtp_modules=num_published_modules(folder, target),
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

    `heads` have the checkpoint's conventions and as many modules or more: of P published ones,
    module i starts from module i mod P, which is the one that serving engines run at depth i. Every
    tensor must be there, known and of the right shape, copies equal to the target's, and no two
    published modules alike.
    """
    index, target = _published_native(folder), heads.target
    num_published = num_published_modules(folder, target)
    layout = target.family.native
    keys = native_keys(index.files, layout, num_layers=target.config.num_hidden_layers)
    views = native_views(
        heads,
        layout,
        num_modules=num_published,
        has_stacked_experts=has_stacked_experts(keys),
    )
    copies = native_copies(heads, layout)
    _check_names(keys, views, copies, folder=index.folder)
    tensors = dequantise(index.read(keys))
    _check_copies(tensors, copies, target=target, folder=index.folder)
    _check_shapes(tensors, views, folder=index.folder)
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(tensors[name])
    modules = list(cast(nn.ModuleList, heads.mtp_modules))
    _check_distinct(modules[:num_published], folder=index.folder)
    for module_idx, module in enumerate(modules[num_published:], start=num_published):
        module.load_state_dict(modules[module_idx % num_published].state_dict())


def has_native_heads(folder: str | Path, target: Target) -> bool:
    """Whether a folder holds MTP modules in the published names of the target's family.

    True as well where only its configuration promises some: reading them then says what is missing.
    """
    folder = Path(folder)
    if not (folder / CONFIG_FILE).is_file():
        return False
    promised = _promised(folder, target.family.native.count_field)
    return num_stored_modules(folder, target) > 0 or bool(promised)


def num_stored_modules(folder: str | Path, target: Target) -> int:
    """How many MTP modules of the target's family the files of a checkpoint folder hold."""
    layout, num_layers = target.family.native, target.config.num_hidden_layers
    keys = native_keys(read_index(Path(folder)).files, layout, num_layers=num_layers)
    return num_native_modules(keys, layout)


def num_published_modules(folder: str | Path, target: Target) -> int:
    """How many MTP modules a checkpoint folder of `target` holds.

    Its configuration must promise as many, where it has a field for it.
    """
    index = _published_native(folder)
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


def native_views(
    heads: MTPHeads,
    layout: NativeLayout,
    *,
    num_modules: int | None = None,
    has_stacked_experts: bool = False,
) -> dict[str, Tensor]:
    """Every tensor of `heads` by its published name; writing a view writes the heads.

    Args:
        heads: the modules.
        layout: names of the family.
        num_modules: of the first so many modules only; None for all.
        has_stacked_experts: whether the published file stacks experts as we do.
    """
    num_modules = heads.spec.num_mtp_modules if num_modules is None else num_modules
    if num_modules > 1 and not layout.numbers_modules:
        raise ConfigError(
            f"the published names of family {heads.target.family_name!r} ({layout.prefix}*) hold "
            f"one MTP module, got {num_modules}; train one module (head=shared_n1), or keep these "
            "heads in our own format."
        )
    views: dict[str, Tensor] = {}
    for name, tensor in heads.state_dict(keep_vars=False).items():
        _, module_idx, own = name.split(".", 2)
        if int(module_idx) >= num_modules:
            continue
        for part, view in _parts(own, tensor, has_stacked_experts=has_stacked_experts):
            views[_published(part, layout, int(module_idx), heads)] = view
    return views


def native_copies(heads: MTPHeads, layout: NativeLayout) -> dict[str, SharedTensor]:
    """Names under which a release may repeat the target's embedding and lm_head."""
    owns_lm_head = heads.spec.owns_lm_head
    return {
        _numbered(layout.prefix, module_idx, heads.target.config.num_hidden_layers) + name: shared
        for module_idx in range(heads.spec.num_mtp_modules)
        for name, shared in layout.copies
        if not (owns_lm_head and shared == "lm_head")
    }


def native_keys(names: Iterable[str], layout: NativeLayout, *, num_layers: int) -> list[str]:
    """Those of a checkpoint's tensor names that belong to MTP modules.

    A prefix with `{layer}` owns the layers from the target's `num_layers` on.
    """
    pattern = re.compile(_pattern(layout.prefix))
    first = num_layers if "{layer}" in layout.prefix else 0
    found = ((name, pattern.match(name)) for name in names)
    return [name for name, m in found if m and (not m.groups() or int(m[1]) >= first)]


def num_native_modules(keys: Iterable[str], layout: NativeLayout) -> int:
    """How many modules are among `native_keys`: those that have a projection."""
    projection = dict(layout.names)["eh_proj."] + "weight"
    pattern = re.compile(_pattern(layout.prefix + projection))
    return sum(bool(pattern.fullmatch(key)) for key in keys)


def has_stacked_experts(keys: Iterable[str]) -> bool:
    """Whether a checkpoint stacks its experts, as a few re-packed ones do."""
    return any(key.endswith((".gate_up_proj", ".experts.down_proj")) for key in keys)


@dataclass(frozen=True)
class TensorIndex:
    """Which file of a folder holds which tensor."""

    folder: Path  # checkpoint folder
    files: Mapping[str, str]  # file name of every tensor

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors on the CPU as they are stored; every shard that is needed is opened once."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        tensors: dict[str, Tensor] = {}
        for file, wanted in sorted(by_file.items()):
            path = self.folder / file
            if not path.is_file():
                raise IntegrityError(
                    f"{self.folder} must hold {file}, which its index names for {wanted[0]} and "
                    f"{len(wanted) - 1} more tensors; fetch the model again."
                )
            try:
                with safe_open(path, framework="pt") as shard:
                    lacking = sorted(set(wanted) - set(shard.keys()))
                    if lacking:
                        raise IntegrityError(
                            f"{path} must hold the tensors that the index names for it, lacks "
                            f"{lacking[:_NUM_LISTED]}; fetch the model again."
                        )
                    tensors |= {name: shard.get_tensor(name) for name in wanted}
            except (OSError, SafetensorError) as fault:
                raise IntegrityError(f"cannot read {path}: {fault}") from fault
        return tensors


def read_index(folder: Path) -> TensorIndex:
    """The tensors that a checkpoint folder promises, without reading one."""
    files = read_weight_map(folder)
    if files is None:
        return TensorIndex(folder, dict.fromkeys(_names_in(folder / SINGLE_FILE), SINGLE_FILE))
    return TensorIndex(folder, files)


def _names_in(path: Path) -> list[str]:
    if not path.is_file():
        raise IntegrityError(
            f"{path.parent} must be a model folder, with {INDEX_FILE} or {SINGLE_FILE}."
        )
    try:
        with safe_open(path, framework="pt") as shard:
            return list(shard.keys())
    except (OSError, SafetensorError) as fault:
        raise IntegrityError(f"cannot read {path}: {fault}") from fault


def _published_native(folder: str | Path) -> TensorIndex:
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(
            f"native MTP modules need a local checkpoint folder, {str(folder)!r} is none; "
            "download the model and set the path to its folder."
        )
    return read_index(folder)


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
    originals = {"embed_tokens": target.embed_weight, "lm_head": target.lm_head_weight}
    for name in copies.keys() & tensors.keys():
        original = cast(Tensor, originals[copies[name]]).cpu()
        if not torch.equal(tensors[name].to(original.dtype), original):
            raise IntegrityError(
                f"{folder}: {name} must be a copy of the target's {copies[name]}, it differs; "
                "modules with an embedding or head of their own are not supported."
            )


def _check_distinct(modules: Iterable[nn.Module], *, folder: Path) -> None:
    """Modules that are equal were loaded from one place: the last one written twice."""
    states = [module.state_dict() for module in modules]
    for (first, one), (second, other) in combinations(enumerate(states), 2):
        if all(torch.equal(one[name], other[name]) for name in one):
            raise IntegrityError(
                f"{folder}: MTP modules {first} and {second} are equal, the file holds one of them "
                "twice; fetch the model again."
            )


def _parts(own: str, tensor: Tensor, *, has_stacked_experts: bool) -> list[tuple[str, Tensor]]:
    """A tensor, or its experts one by one."""
    if tensor.dim() != _STACKED_DIMS or has_stacked_experts:
        return [(own, tensor)]
    stack, _, kind = own.rpartition(".")
    pieces = _FUSED_PARTS.get(kind, (kind,))
    return [
        (f"{stack}.{expert}.{piece}.weight", part)
        for expert, weights in enumerate(tensor)
        for piece, part in zip(pieces, weights.chunk(len(pieces)), strict=True)
    ]


def _published(own: str, layout: NativeLayout, module_idx: int, heads: MTPHeads) -> str:
    for here, there in layout.names:
        if own.startswith(here):
            template = layout.prefix + there
            num_layers = heads.target.config.num_hidden_layers
            return _numbered(template, module_idx, num_layers) + own.removeprefix(here)
    raise AssertionError(f"no published name for {own!r} in {layout}")


def _numbered(template: str, module_idx: int, num_layers: int) -> str:
    return template.format(module=module_idx, layer=num_layers + module_idx)


def _pattern(template: str) -> str:
    pieces = re.split(r"\{(?:module|layer)\}", template)
    return r"(\d+)".join(re.escape(piece) for piece in pieces)


def adopt_conventions(head: HeadConfig, *, path: str, typed: Collection[str]) -> dict[str, object]:
    """Set what a checkpoint's own modules need, in place, where nobody has set it.

    `head` has `init=native` or `auto`; what is not its default or is among the `typed` keys counts
    as set. Nothing is changed for a `path` (`model.path`) that is not on this machine yet, and for
    an `auto` that `init.choose_start` will find to be no native start. Returns the keys that were
    changed, with their new values.
    """
    file = local_file(path, CONFIG_FILE)
    if file is None or (head.init == "auto" and not may_hold_modules(file.parent)):
        return {}
    plain = {item.name: item.default for item in fields(HeadConfig)}
    published = published_conventions(file.parent)
    is_set = {name for name in published if name in typed or getattr(head, name) != plain[name]}
    own = {name: getattr(head, name) for name in is_set}
    if head.init == "auto" and ("num_mtp_modules" not in published or misfits(own, published)):
        return {}
    changed = {
        name: value
        for name, value in published.items()
        if name not in is_set and value != plain[name]
    }
    for name, value in changed.items():
        setattr(head, name, value)
    return changed


def misfits(own: Mapping[str, object], published: Mapping[str, object]) -> dict[str, object]:
    """Published values of the keys of `own` that modules of a release cannot be trained with.

    More modules than were published start as copies; fewer would leave some of them out.
    """
    return {
        name: value
        for name, value in published.items()
        if name in own
        and (
            cast(int, own[name]) < cast(int, value)
            if name == "num_mtp_modules"
            else own[name] != value
        )
    }


def published_conventions(folder: Path) -> dict[str, object]:
    """Keys of `head` and their values for the modules in a checkpoint folder.

    `num_mtp_modules` is left out where the folder holds none that can be trained.
    """
    with loading(str(folder)):
        published = read_config(str(folder))
    family = FAMILIES[published.family_name]
    found: dict[str, object] = {name: getattr(family, name) for name in CONVENTIONS}
    num_layers = published.config.get_text_config().num_hidden_layers
    keys = native_keys(read_index(folder).files, family.native, num_layers=num_layers)
    num_modules = num_native_modules(keys, family.native)
    is_trained = num_modules > 0 and not family.owns_lm_head
    return found | ({"num_mtp_modules": num_modules} if is_trained else {})
