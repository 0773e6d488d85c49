"""Decoder layers of compiled steps, compiled once for all layers, batch sizes and conditions.

A step that is compiled as a whole has every layer in it, one after the other, and is compiled anew
for each batch size. Layers of one class do the same to other weights, so here a step calls each
through an op, `run_layer`, into which the compiler does not look. The op runs the layer compiled by
itself: for any number of rows, with the weights as arguments, so that one compilation serves the
layers of target and MTP modules, decoding and prompt rows. What differs by pass (where rows lie and
what they may read) never enters that code: its attention op asks for the pass that is running
(`region_pass`).

**Deterministic steps** (`engine.deterministic`) go further. Code that another number of rows, or
another kind of step, would have compiled anew may add up in another order. So every pass runs the
same regions, steps that are not captured included; besides layers, norms and rotary embeddings
outside of them are regions (`row_modules`); and a region is compiled as for
`_HINT_ROWS` rows, whichever step comes first, and runs on two at least: one is a case of its own.

A layer is taken if its own forward, on test rows, gives one tensor like its input, and if nothing
has replaced the forward of a module in it. Others stay part of the step.

A layer that ends with a sum, `hidden + branch`, leaves it to the layer behind it, whose first norm
reads it anyway: so a launch less. Behind the last layer the step adds up.

Like the ops over pages, `run_layer` does not declare that it writes them; see `paged`.

Letters: T packed rows, D hidden, P rotary dims.
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from mtp_research.kernels.attention.attention_rows import AttentionRows
from mtp_research.kernels.latent.expanded_attention import (
    ExpandedRows,
    Prompts,
    Span,
)
from mtp_research.models.attention.paged import (
    Angles,
    PagedContext,
    latent_dims,
    stores_in_launch,
)
from mtp_research.models.family import KVKind, KVStack
from mtp_research.models.rewrites.cpu_layers import variant_of
from mtp_research.models.rewrites.invariant import invariant_backend
from mtp_research.models.rewrites.region_pass import RegionContext, RegionPass, running
from mtp_research.models.rewrites.rotary import Recorder
from mtp_research.models.target import Target

logger = logging.getLogger(__name__)
CompileOptions = dict[str, str | int | bool | Callable[..., object]]
_NUM_TEST_ROWS = 2
# Kinds of layers times ranges of rows; of a part of a step, sampling times policies; of
# verification times K, for one request and for more.
_MAX_COMPILED_VERSIONS = 256
DETERMINISTIC = "deterministic"  # the compiler's option; products are then batch-invariant, too
LEAST_ROWS = 2  # of a deterministic region
_HINT_ROWS = 64
VIEW_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
Result = TypeVar("Result")
# What a layer is called with and the op hands on; with other values it stays part of the step.
_HANDED_ON = {"position_embeddings", "position_ids", "past_key_values", "attention_context"}


def mark_any_size(*tensors: Tensor, dim: int) -> None:
    """Code compiled for these tensors holds for any size of `dim` above 1.

    The compiler takes a size of 1 for a case of its own, compiled anew.
    """
    for tensor in tensors:
        if tensor.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


@functools.cache
def compiled_once(
    function: Callable[..., Result], options: tuple[tuple[str, object], ...]
) -> Callable[..., Result]:
    """`function` compiled, the same for all who ask; it has versions by what it is called with."""
    torch._dynamo.config.recompile_limit = _MAX_COMPILED_VERSIONS
    if not dict(options).get(DETERMINISTIC):
        return torch.compile(function, dynamic=False, options=dict(options))  # pyright: ignore[reportArgumentType]
    return torch.compile(function, dynamic=False, backend=invariant_backend(options))


def like_all_rows(*tensors: Tensor) -> list[Tensor]:
    """Rows, in dim 1, as deterministic regions take them: at least two, any number alike."""
    found = []
    for tensor in tensors:
        if tensor.shape[1] < LEAST_ROWS:
            tensor = tensor.repeat_interleave(LEAST_ROWS, dim=1)
        torch._dynamo.mark_dynamic(tensor, 1, hint_override=_HINT_ROWS)
        found.append(tensor)
    return found


def are_regions(target: Target, heads: nn.Module | None) -> bool:
    """Whether all layers of target and modules run as regions."""
    blocks = () if heads is None else (one.block for one in cast(nn.ModuleList, heads.mtp_modules))
    layers = (*cast(nn.ModuleList, target.model.base_model.layers), *blocks)
    return all(isinstance(layer, LayerRegion) and layer.region is not None for layer in layers)


class LayerRegion(nn.Module):
    """Marks the classes that `compile_layers_once` makes."""

    plain_class: type[nn.Module]
    branch: str | None  # the module whose output the layer adds last
    region: "_Region | None" = None  # of the class: heads make their blocks of the target's classes


def compile_layers_once(
    target: Target, model: nn.Module, *, enabled: bool, options: CompileOptions
) -> int:
    """Let decoder layers of `model` be compiled as regions, in place; returns how many.

    `target` gives the classes of layers, and size, cos and sin of the test rows; `options` are what
    `torch.compile` takes. Without `enabled`, layers that an earlier call has changed are put back.
    """
    layers = cast(nn.ModuleList, target.model.base_model.layers)
    classes = tuple({_plain_class(layer) for layer in layers})
    hidden = torch.linspace(-3.0, 3.0, _NUM_TEST_ROWS * target.config.hidden_size)
    hidden = hidden.sin().view(1, _NUM_TEST_ROWS, -1).to(target.device, target.dtype)
    position_ids = torch.arange(7, 7 + _NUM_TEST_ROWS, device=target.device)[None]
    with torch.no_grad():
        angles = Angles(*target.position_embeddings(hidden, position_ids))
    count = 0
    for module in list(model.modules()):
        if isinstance(module, LayerRegion) and not enabled:
            module.region = None
        if not (enabled and isinstance(module, classes)):
            continue
        if not isinstance(module, LayerRegion):
            test = functools.partial(_run_alone, hidden, position_ids, angles)
            if not _maps_rows(module, hidden, test):
                continue
            module.__class__ = _regional(type(module), _last_branch(module, test))
        layer = cast(LayerRegion, module)
        if layer.region is None or layer.region.options != options:
            layer.region = _Region(layer, options)
        count += 1
    if model is target.model:
        for layer, behind in itertools.pairwise(layers):
            if isinstance(layer, LayerRegion) and layer.region is not None:
                is_seen = bool(layer._forward_hooks or behind._forward_pre_hooks)  # between the two
                layer.region.is_followed = isinstance(behind, LayerRegion) and not is_seen
    return count


def _plain_class(layer: nn.Module) -> type[nn.Module]:
    return layer.plain_class if isinstance(layer, LayerRegion) else type(layer)


def _maps_rows(layer: nn.Module, hidden: Tensor, test: Callable[..., object]) -> bool:
    """Whether `layer` gives one tensor like its input, and its modules are the library's."""
    if any("forward" in vars(module) for module in layer.modules()) or len(_indices(layer)) != 1:
        return False
    try:
        output = test(layer, layer)
    except (TypeError, RuntimeError, AttributeError) as fault:  # another signature
        logger.debug("%s is compiled with the step: %s", type(layer).__name__, fault)
        return False
    return isinstance(output, Tensor) and output.shape == hidden.shape


def _run_alone(
    hidden: Tensor, position_ids: Tensor, angles: Angles, layer: nn.Module, caller: object
) -> object:
    """What the forward of `layer` gives on test rows if its own modules are those of `caller`."""
    with torch.no_grad():
        return type(layer).forward(
            caller,
            hidden,
            attention_mask=None,
            position_embeddings=tuple(angles),
            position_ids=position_ids,
            past_key_values=None,
            attention_context=Recorder(),
        )


class _Apart:
    """Stands for a layer; the module that it adds last adds nothing, and its output is kept.

    With a `branch` that output is at hand: the module is not run, and adds it.
    """

    def __init__(self, layer: nn.Module, name: str, branch: Tensor | None = None) -> None:
        self._layer, self._name, self.branch = layer, name, branch
        self._is_known = branch is not None

    def __getattr__(self, name: str) -> object:
        return self._keep if name == self._name else getattr(self._layer, name)

    def _keep(self, *args: object, **kwargs: object) -> Tensor:
        if self._is_known:
            return cast(Tensor, self.branch)
        branch: Tensor = getattr(self._layer, self._name)(*args, **kwargs)
        self.branch = branch
        return torch.zeros_like(branch)


def _last_branch(layer: nn.Module, test: Callable[..., object]) -> str | None:
    """The module whose output `layer` adds last, to the bit on test rows; None: no such.

    The module is run once: on a GPU experts may add up in another order each time.
    """
    for name, _ in layer.named_children():
        apart = _Apart(layer, name)
        try:
            rest = test(layer, apart)
        except (TypeError, RuntimeError, AttributeError):
            continue
        branch = apart.branch
        # Attention gives zeros here, and so does a norm behind it: those add nothing either way.
        if not (isinstance(rest, Tensor) and isinstance(branch, Tensor) and branch.any()):
            continue
        if torch.equal(rest + branch, cast(Tensor, test(layer, _Apart(layer, name, branch)))):
            return name
    return None


def _indices(layer: nn.Module) -> set[int]:
    """Cache layers of the attentions in `layer`."""
    return {vars(m)["layer_idx"] for m in layer.modules() if "layer_idx" in vars(m)}


@functools.cache
def _regional(plain: type[nn.Module], branch: str | None) -> type[nn.Module]:
    """The class `plain` whose forward calls its region in passes over pages that ask for it."""

    def forward(self: LayerRegion, hidden: Tensor, *args: object, **kwargs: object) -> object:
        region, context = self.region, kwargs.get("attention_context")
        before = context.take_apart(hidden) if isinstance(context, PagedContext) else None
        given = {n for n, value in kwargs.items() if value is not None and value is not False}
        is_paged = isinstance(context, PagedContext) and context.pool.runs_regions
        if region is None or not is_paged or args or given != _HANDED_ON:
            hidden = hidden if before is None else hidden + before
            return plain.forward(self, hidden, *args, **kwargs)
        context = cast(PagedContext, context)
        stack = context.stack_of(region.layer_idx)
        angles = Angles(*cast(tuple[Tensor, Tensor], kwargs["position_embeddings"]))
        expanded, numbers = region.expanded(context, block_size=stack.keys.shape[2])
        if branch is not None and before is None:  # the same code for the first layer
            before = hidden.new_zeros(hidden.shape)
        output, *own = run_layer(
            region.number,
            region.num_outputs,
            hidden,
            before,
            context.angles_of_pass(angles),
            cast(Tensor, kwargs["position_ids"]),
            stack.keys,
            stack.values,
            stack.index,
            context.slot_mapping,
            context.block_table,
            context.seq_lens,
            context.query_start_loc,
            # Code that names it would serve this number alone.
            0 if context.has_equal_rows else context.max_query_len,
            stack.kind,
            context.backend,
            expanded,
            numbers,
        )
        if not own:
            return output
        return context.leave_apart(output, own[0]) if region.is_followed else output + own[0]

    return variant_of(plain, LayerRegion, forward, plain_class=plain, branch=branch)


class _Region:
    """A layer, the code compiled for its like, and the number by which the op finds it."""

    is_followed = False  # by a region that adds up what this one leaves apart

    def __init__(self, layer: LayerRegion, options: CompileOptions) -> None:
        (self.layer_idx,) = _indices(layer)
        self.num_outputs = 1 if layer.branch is None else 2
        self.options = options
        number = next(_numbers)
        # A tensor, so that code that calls a layer of a module serves those of other modules.
        self.number = torch.tensor(number, device="cpu")
        self._layer = weakref.ref(layer)  # which owns its region
        latent = [module for module in layer.modules() if hasattr(module, "qk_nope_head_dim")]
        self._latent_dims = latent_dims(latent[0]) if latent else None
        self._compiled = compiled_once(_run, tuple(options.items()))
        self._is_deterministic = bool(options.get(DETERMINISTIC))
        _regions[number] = self

    def run(
        self,
        hidden: Tensor,
        before: Tensor | None,
        both: Tensor,
        positions: Tensor,
        now: RegionPass,
    ) -> list[Tensor]:
        """Output `[1, T, D]` of the layer in a pass, or what to add up to it.

        `before` is what to add to `hidden` first; `both` is cos and sin, `[2, T, P]`.
        """
        num_rows = hidden.shape[1]
        by_rows = [hidden, both, positions, *(() if before is None else (before,))]
        if self._is_deterministic:
            by_rows = like_all_rows(*by_rows)
            if len(now.slot_mapping) < LEAST_ROWS:  # rows that are stored nowhere
                slots = nn.functional.pad(now.slot_mapping, (0, LEAST_ROWS - num_rows), value=-1)
                now = now._replace(slot_mapping=slots)
        else:
            mark_any_size(*by_rows, dim=1)
        stores = stores_in_launch(now.rows.max_query_len, backend=now.backend)
        running.now = now
        # Compiled code that calls us excludes this key the first time it runs, and not later: the
        # layer, whose guards see that, would be compiled twice.
        with torch._C._ExcludeDispatchKeyGuard(VIEW_TRACKING):
            outputs = self._compiled(self._layer(), now.pages.kind, stores, *by_rows)
        return [out if out.shape[1] == num_rows else out[:, :num_rows].clone() for out in outputs]

    def expanded(self, context: PagedContext, *, block_size: int) -> tuple[list[Tensor], list[int]]:
        """`ExpandedRows` of the pass, as the op takes them; empty where there are none."""
        if self._latent_dims is None or context.prompts is None:
            return [], []
        found = context.expanded(self._latent_dims, block_size=block_size)
        if found is None:
            return [], []
        *tensors, (spans, *others) = found
        return tensors, [*others, *(number for span in spans for number in span)]


# By the number that calls hand over, for as long as their layers live.
_regions: weakref.WeakValueDictionary[int, _Region] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _run(
    layer: LayerRegion,
    kind: KVKind,
    stores: bool,
    hidden: Tensor,
    both: Tensor,
    positions: Tensor,
    before: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """What is compiled: a layer's own forward."""
    angles = Angles(both[0][None], both[1][None])
    context = RegionContext(kind, stores, angles, both)
    apart = None if layer.branch is None else _Apart(layer, layer.branch)
    output = layer.plain_class.forward(
        layer if apart is None else apart,
        hidden if before is None else hidden + before,
        attention_mask=None,
        position_embeddings=tuple(angles),
        position_ids=positions,
        past_key_values=context,
        attention_context=context,
    )
    return (output,) if apart is None else (output, cast(Tensor, apart.branch))


@torch.library.custom_op("mtp_research::run_layer", mutates_args=())
def run_layer(
    region: torch.Tensor,
    num_outputs: int,
    hidden: torch.Tensor,
    before: torch.Tensor | None,
    both: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    index: int,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    kind: str,
    backend: str,
    expanded: list[torch.Tensor],
    numbers: list[int],
) -> list[torch.Tensor]:
    """Output `[1, T, D]` of a region's layer on `hidden` `[1, T, D]`; see `_Region.run`.

    The others are the fields of `KVStack`, `PagedContext` and `AttentionRows`; the last two come
    from `_Region.expanded`. `max_query_len` is 0 where all requests have as many rows, or as
    `uneven_rows` says.
    """
    max_query_len = max_query_len or running.longest or hidden.shape[1] // len(seq_lens)
    plan = None
    if expanded:
        of_others, spans = numbers[:3], numbers[3:]
        pairs = zip(spans[::2], spans[1::2], strict=True)
        prompts = Prompts(tuple(Span(*pair) for pair in pairs), *of_others)
        plan = ExpandedRows(*expanded, prompts)
    now = RegionPass(
        KVStack(keys, values, cast(KVKind, kind), index).pages,
        slot_mapping,
        # The layer's own products, which wait first, are in front of its attention.
        AttentionRows(block_table, seq_lens, query_start_loc, max_query_len, are_settled=True),
        backend,
        plan,
    )
    return _regions[int(region)].run(hidden, before, both, positions, now)


@run_layer.register_fake
def _fake_layer(
    region: torch.Tensor, num_outputs: int, hidden: torch.Tensor, *_: object
) -> list[torch.Tensor]:
    return [torch.empty_like(hidden) for _ in range(num_outputs)]
