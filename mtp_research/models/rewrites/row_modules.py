"""Norms and rotary embeddings outside of decoder layers, as regions of deterministic steps.

Compiled with a step, or called by one that is not compiled, they would add up and round in as many
ways as there is code. Here each runs, in every pass, the one piece of code that was compiled for
its like: an op calls it, as `regions` does for layers.

Letters: M rows, D columns.
"""

import functools
import itertools
import weakref
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from mtp_research.models.rewrites.cpu_layers import variant_of
from mtp_research.models.rewrites.regions import (
    DETERMINISTIC,
    LEAST_ROWS,
    VIEW_TRACKING,
    CompileOptions,
    LayerRegion,
    compiled_once,
    like_all_rows,
)
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError

_PLAIN_MODULES = (nn.Embedding, nn.Linear)


class RowModule(nn.Module):
    """Marks the classes that `compile_row_modules` makes."""

    plain_class: type[nn.Module]
    region: "_RowRegion | None" = None  # of the class: heads make their norms of the target's class


def compile_row_modules(target: Target, model: nn.Module, *, options: CompileOptions) -> None:
    """Let what `model` computes of rows outside of its layers be compiled as regions, in place.

    These are norms like the target's last one and rotary embeddings; products, embeddings and what
    only moves numbers need none. Without `DETERMINISTIC` among `options`, modules that an earlier
    call has changed are put back.

    Raises:
        ConfigError: a layer is no region, or it is not known what a module does.
    """
    hidden = torch.linspace(-3.0, 3.0, LEAST_ROWS * target.config.hidden_size).sin()
    hidden = hidden.view(1, LEAST_ROWS, -1).to(target.device, target.dtype)
    position_ids = torch.arange(LEAST_ROWS, device=target.device)[None]
    norm_class = _plain_class(target.final_norm)
    layers = cast(nn.ModuleList, target.model.base_model.layers)
    layer_classes = tuple({_plain_class(layer) for layer in layers})
    for name, module in _outside_of_regions(model, layer_classes):
        if not options.get(DETERMINISTIC):
            if isinstance(module, RowModule):
                module.region = None
            continue
        plain = _plain_class(module)
        if hasattr(module, "inv_freq"):  # a rotary embedding
            rows = [hidden, position_ids]
        elif plain is norm_class:
            rows = [hidden]
        elif isinstance(module, layer_classes) or not isinstance(module, _PLAIN_MODULES):
            raise ConfigError(
                "engine.deterministic=true compiles layers, norms, products and rotary embeddings, "
                f"got {name}, {type(module).__name__}; set engine.compile=false."
            )
        else:
            continue
        if not isinstance(module, RowModule):
            module.__class__ = _regional(plain)
        row_module = cast(RowModule, module)
        if row_module.region is None or row_module.region.options != options:
            row_module.region = _RowRegion(row_module, options, rows)


def _plain_class(module: nn.Module) -> type[nn.Module]:
    return module.plain_class if isinstance(module, RowModule | LayerRegion) else type(module)


@functools.cache
def _regional(plain: type[nn.Module]) -> type[nn.Module]:
    return variant_of(plain, RowModule, _run_as_region, plain_class=plain)


def _outside_of_regions(
    module: nn.Module, layer_classes: tuple[type[nn.Module], ...], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Modules without modules in them, and layers that are no regions, with their names."""
    if isinstance(module, LayerRegion) and module.region is not None:
        return
    children = list(module.named_children())
    if not children or isinstance(module, layer_classes):
        yield name, module
        return
    for child_name, child in children:
        child_name = f"{name}.{child_name}".lstrip(".")
        yield from _outside_of_regions(child, layer_classes, child_name)


def _run_as_region(
    self: RowModule, hidden: Tensor, position_ids: Tensor | None = None
) -> Tensor | tuple[Tensor, ...]:
    rows = [hidden] if position_ids is None else [hidden, position_ids]
    # Other forwards are not of packed rows, or of positions by axis, whose steps are not compiled.
    is_packed = hidden.dim() == 3 and all(len(tensor) == 1 for tensor in rows)
    if self.region is None or torch.is_grad_enabled() or not is_packed:
        return self.plain_class.forward(self, *rows)
    found = run_rows(rows, self.region.number, self.region.sizes)
    return found[0] if len(found) == 1 else tuple(found)


class _RowRegion:
    """A module, the code compiled for its like, and the number by which the op finds it."""

    def __init__(self, module: RowModule, options: CompileOptions, rows: list[Tensor]) -> None:
        self.options = options
        number = next(_numbers)
        self.number = torch.tensor(number, device="cpu")  # as of layers
        self.module = weakref.ref(module)  # which owns its region
        self.compiled = compiled_once(_run_module, tuple(options.items()))
        with torch.no_grad():
            outputs = _run_module(module, rows)
        if {out.dtype for out in outputs} != {rows[0].dtype}:
            raise ConfigError(
                "engine.deterministic=true compiles modules whose outputs have the dtype of their "
                f"rows, {rows[0].dtype}, got {type(module).__name__} with "
                f"{[out.dtype for out in outputs]}; set engine.compile=false."
            )
        self.sizes = [out.shape[2] for out in outputs]
        _row_regions[number] = self


_row_regions: weakref.WeakValueDictionary[int, _RowRegion] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _run_module(module: RowModule, rows: list[Tensor]) -> list[Tensor]:
    found = module.plain_class.forward(module, *rows)
    return [found] if isinstance(found, Tensor) else list(found)


@torch.library.custom_op("mtp_research::run_rows", mutates_args=())
def run_rows(
    rows: list[torch.Tensor], region: torch.Tensor, sizes: list[int]
) -> list[torch.Tensor]:
    """Outputs, each `[1, M, D]`, of a region's module on `rows`, each `[1, M, ...]`.

    `sizes` are their D: code that calls the op knows no region.
    """
    found = _row_regions[int(region)]
    with torch._C._ExcludeDispatchKeyGuard(VIEW_TRACKING):  # as for layers
        outputs = found.compiled(found.module(), like_all_rows(*rows))
    num_rows = rows[0].shape[1]
    return outputs if num_rows >= LEAST_ROWS else [out[:, :num_rows].clone() for out in outputs]


@run_rows.register_fake
def _fake_rows(
    rows: list[torch.Tensor], region: torch.Tensor, sizes: list[int]
) -> list[torch.Tensor]:
    return [rows[0].new_empty(1, rows[0].shape[1], size) for size in sizes]
