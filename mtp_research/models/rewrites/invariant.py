"""Deterministic decoding: products and sums whose rows do not depend on the rows beside them.

Model code is the library's, so the functions it calls are replaced while a step runs: every product
and every sum over the last dimension goes to a kernel whose order of additions follows from the
shapes of one row. Experts go through one grouped product, which a CUDA graph can hold. Attention
is asked for its invariant form by name (`kernels.checks.INVARIANT`). What is left works element by
element, or row by row in an order of its own (softmax, norms of the library's own kernels).

Compiled code is traced without the mode: its products are replaced in the traced graph instead
(`replace_products`). What else such code computes of rows, in kernels whose order of additions the
compiler chose, must be the same code for every number of rows and in every step: see `regions`.

On a CPU vectorised functions compute the last elements of a tensor by other code than the rest, so
that an element's bits depend on its place: these are called once per row there.

Letters: M rows, K depth, N outputs, E experts, P pairs of a row and an expert, D hidden.
Source: batch invariance as in thinking-machines-lab/batch_invariant_ops.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from mtp_research.kernels import checks
from mtp_research.kernels.products.invariant_matmul import (
    invariant_grouped_matmul,
    invariant_matmul,
    row_sum,
)
from mtp_research.models.experts import expert_stacks
from mtp_research.runtime.errors import ConfigError

EXPERTS_NAME = "mtp_research_invariant"


class InvariantProducts(TorchFunctionMode):
    """While entered, PyTorch's products and sums over the last dimension are batch-invariant.

    Experts of `models` are then routed to `experts_forward`.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        owners = [stack for model in models for stack in expert_stacks(model)]
        configs = [cast(PreTrainedConfig, owner.config) for owner in owners]
        self._configs = list({id(config): config for config in configs}.values())
        self._experts_before: list[str] = []

    def __enter__(self) -> Self:
        before = [config._experts_implementation for config in self._configs]
        if EXPERTS_NAME in before:  # a step of another thread has changed the model's setting
            raise ConfigError(
                "engine.deterministic=true must run in one thread at a time on a target with "
                "experts, got two; decode in one thread or load the target twice."
            )
        self._experts_before = before
        for config in self._configs:
            config._experts_implementation = EXPERTS_NAME
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, fault, trace)
        for config, name in zip(self._configs, self._experts_before, strict=True):
            config._experts_implementation = name

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call the invariant form of `func` where there is one."""
        kwargs = kwargs or {}
        if func in _REFUSED:
            raise _refused(func)
        if func in _ELEMENTWISE and not cast(Tensor, args[0]).is_cuda:
            return _by_row(func, cast(Tensor, args[0]), *args[1:], **kwargs)
        return _INVARIANT.get(func, func)(*args, **kwargs)


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Output `[M, D]` of an expert layer, as `transformers.integrations.moe` calls it.

    The outputs of a row are added up by rising expert: routers name them in no fixed order.
    `top_k_index` and `top_k_weights` are `[M, P / M]`.
    """
    index, order = torch.sort(top_k_index, dim=-1)
    weights = top_k_weights.gather(-1, order)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _project(module, name, hidden_states, index.flatten())
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outputs = _project(module, "down_proj", inner, index.flatten())
    weighted = outputs.view(*index.shape, -1) * weights[..., None]
    total = weighted[:, 0]
    for pair in range(1, index.shape[1]):
        total = total + weighted[:, pair]
    return total.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)


def _project(module: nn.Module, name: str, rows: Tensor, experts: Tensor) -> Tensor:
    """Outputs `[P, N]` of one of the experts' projections."""
    weight = module.get_parameter(name)
    weight = weight.mT if module.is_transposed else weight
    output = invariant_grouped_matmul(rows, weight, experts, backend=_backend(rows))
    if module.has_bias:
        output = output + module.get_parameter(f"{name}_bias")[experts]
    return output


def _backend(tensor: Tensor) -> str:
    """The kernels, or the reference for dtypes that they do not know."""
    return "auto" if tensor.dtype in checks.KERNEL_DTYPES else "reference"


@torch.library.custom_op("mtp_research::invariant_product", mutates_args=())
def invariant_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`invariant_matmul`, one node for `torch.compile`."""
    return invariant_matmul(rows, weight, bias, backend=_backend(rows))


@invariant_product.register_fake
def _fake(rows: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], weight.shape[-2])


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = input.reshape(-1, input.shape[-1])
    return invariant_product(rows, weight, bias).view(*input.shape[:-1], weight.shape[0])


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    """`input @ other` of matrices or of batches of them, `[..., M, K]` and `[..., K, N]`."""
    if input.shape[-1] == 1:  # rotary frequencies times positions: nothing is added up
        return input * other
    if other.dim() == 2:
        return _linear(input, other.mT)
    batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    rows = input.expand(*batch, *input.shape[-2:]).flatten(0, -3)
    weights = other.mT.expand(*batch, *other.mT.shape[-2:]).flatten(0, -3)
    output = invariant_product(rows, weights)
    return output.view(*batch, *output.shape[-2:])


def _sum(input: Tensor, *args: object, **kwargs: object) -> Tensor:
    keepdim = _row_keepdim(input, args, kwargs)
    if keepdim is None:
        return cast(Callable[..., Tensor], torch.sum)(input, *args, **kwargs)
    rows = input.reshape(-1, input.shape[-1])
    total = row_sum(rows, backend=_backend(rows)).view(input.shape[:-1])
    return total[..., None] if keepdim else total


def _mean(input: Tensor, *args: object, **kwargs: object) -> Tensor:
    if _row_keepdim(input, args, kwargs) is None:
        return cast(Callable[..., Tensor], torch.mean)(input, *args, **kwargs)
    return _sum(input, *args, **kwargs) / input.shape[-1]


def _row_keepdim(
    input: Tensor, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> bool | None:
    """`keepdim` of a reduction over the last dimension alone; None for any other reduction."""
    given = {**dict(zip(("dim", "keepdim"), args, strict=False)), **kwargs}
    dim = given.get("dim")
    dims = list(dim) if isinstance(dim, list | tuple) else [dim]
    is_row = dims in ([-1], [input.dim() - 1]) and set(given) <= {"dim", "keepdim"}
    if not is_row or len(args) > 2 or not input.is_floating_point():
        return None
    return bool(given.get("keepdim", False))


def _by_row(
    function: Callable[..., object], input: Tensor, *args: object, **kwargs: object
) -> Tensor:
    if input.dim() == 0 or input.numel() == 0:
        return cast(Tensor, function(input, *args, **kwargs))
    rows = [
        cast(Tensor, function(row.clone(), *args, **kwargs))
        for row in input.reshape(-1, input.shape[-1])
    ]
    return torch.stack(rows).view(input.shape)


def replace_products(graph: fx.GraphModule) -> None:
    """Let what `torch.compile` has traced call the invariant forms of its products, in place.

    Experts are those of `expert_mlp`, which has such a form itself; others are refused.
    """
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        is_method = node.op == "call_method"
        function = cast(Callable, getattr(Tensor, node.target, None) if is_method else node.target)
        if function in _REFUSED:
            raise _refused(function)
        if function is _EXPERT_PAIRS:
            *operands, _ = node.args  # the last is the backend
            node.args = (*operands, checks.INVARIANT)
        elif function in _PRODUCTS:
            node.op, node.target = "call_function", _PRODUCTS[function]
    graph.recompile()


def _refused(function: Callable[..., object]) -> ConfigError:
    name = getattr(function, "__name__", str(function))
    return ConfigError(
        f"engine.deterministic=true has no batch-invariant form of {name}, which this model calls; "
        "set engine.deterministic=false."
    )


@functools.cache
def invariant_backend(options: tuple[tuple[str, object], ...]) -> Callable[..., Any]:
    """Inductor for `torch.compile`, after `replace_products`; `options` are Inductor's."""
    from torch._inductor.compile_fx import compile_fx

    def compile_graph(graph: fx.GraphModule, inputs: list[Tensor]) -> object:
        replace_products(graph)
        return compile_fx(graph, inputs, config_patches=dict(options))

    return compile_graph


_EXPERT_PAIRS = torch.ops.mtp_research.expert_pairs.default
_PRODUCTS: dict[Callable[..., object], Callable[..., object]] = {
    functional.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, operator.matmul), _matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm, torch.mm, Tensor.mm), _matmul),
}
_INVARIANT: dict[Callable[..., object], Callable[..., object]] = {
    **_PRODUCTS,
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
}
_ELEMENTWISE: set[Callable[..., object]] = {
    *(functional.silu, functional.gelu, functional.softplus),
    *(torch.sigmoid, Tensor.sigmoid, functional.sigmoid),
    *(torch.tanh, Tensor.tanh, functional.tanh),
    *(torch.rsqrt, Tensor.rsqrt, torch.exp, Tensor.exp),
}
_REFUSED: set[Callable[..., object]] = {
    *(torch.einsum, torch.tensordot, torch.inner, torch.addmm, torch.baddbmm, torch.addbmm),
    *(torch.mv, torch.dot, functional.conv1d, functional.scaled_dot_product_attention),
    *(torch._grouped_mm, functional.grouped_mm),
}
