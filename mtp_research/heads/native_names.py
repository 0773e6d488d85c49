"""The tensors of MTP modules under the names of published checkpoints.

One mapping serves reading and writing: `native_views` gives, for each published name, the part of
our tensor that it holds. Published experts are one tensor each, ours are stacked, gate before up:

    model.layers.61.mlp.experts.7.gate_proj.weight   gate_up_proj[7, :I]
    model.layers.61.mlp.experts.7.up_proj.weight     gate_up_proj[7, I:]
    model.layers.61.mlp.experts.7.down_proj.weight   down_proj[7]

Letters: E experts, I expert width, D hidden.
"""

import re
from collections.abc import Iterable

from torch import Tensor

from mtp_research.errors import ConfigError
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.family import NativeLayout, SharedTensor

_FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj")}
_STACKED_DIMS = 3


def native_views(
    heads: MTPHeads, layout: NativeLayout, *, has_stacked_experts: bool = False
) -> dict[str, Tensor]:
    """Every tensor of `heads` by its published name; writing a view writes the heads.

    Args:
        heads: the modules.
        layout: their names.
        has_stacked_experts: whether the published file stacks experts as we do.

    Raises:
        ConfigError: the layout has names for one module only, and there are several.
    """
    num_modules = heads.spec.num_mtp_modules
    if num_modules > 1 and not _is_numbered(layout):
        raise ConfigError(
            f"the published names of family {heads.target.family_name!r} ({layout.prefix}*) hold "
            f"one MTP module, got {num_modules}; keep these heads in our own format."
        )
    views: dict[str, Tensor] = {}
    for name, tensor in heads.state_dict(keep_vars=False).items():
        _, module_idx, own = name.split(".", 2)
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

    Args:
        names: all names.
        layout: of the family.
        num_layers: layers of the target; a prefix with `{layer}` owns the layers from there on.
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


def _is_numbered(layout: NativeLayout) -> bool:
    return any("{" in layout.prefix + there for _, there in layout.names)


def _pattern(template: str) -> str:
    pieces = re.split(r"\{(?:module|layer)\}", template)
    return r"(\d+)".join(re.escape(piece) for piece in pieces)
