"""Norms in front of products of few rows, and sums behind them, joined to the products.

With one row, or a few, a norm or the sum of a layer's two branches is a launch that moves some
kilobytes, and costs as much as reading megabytes of a weight. The kernels for few rows take both
over: their programs normalise the rows that they read, and add the residual to what they store.

Compiled norms are one op here, `rms_norm`, for so many rows. A pass over the graph, before the
compiler sees what the op is made of, gives a norm that feeds nothing but a product to it, and a sum
of a product and something else likewise. Norms that feed more are compiled as they were.
Letters: T rows, K depth, N outputs.
"""

import functools
import math
import operator
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mtp_research.models.fp8_layers import Fp8Linear, fp8_linear
from mtp_research.models.rewrites.cpu_layers import variant_of
from mtp_research.models.rewrites.products import (
    MergedLinear,
    few_rows_gated_linear,
    few_rows_linear,
)

MAX_JOINED_ROWS = 8
_NUM_TEST_ROWS = 2
_LIBRARY = torch.library.Library("mtp_research", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows of `x` over their root mean square, times `weight`; rounded as the library rounds."""
    rows = x.float()
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return weight * rows.to(x.dtype)


_LIBRARY.impl("rms_norm", _rms_norm, "CompositeImplicitAutograd")
rms_norm = torch.ops.mtp_research.rms_norm.default


class MarkedNorm(nn.Module):
    """Marks the classes that `mark_norms` makes."""

    library_class: type[nn.Module]


def mark_norms(model: nn.Module, *, enabled: bool) -> int:
    """Let norms whose width a product of ours reads be one op in compiled code of few rows.

    In place, after `merge_projections`; returns how many are. Without `enabled`, norms that an
    earlier call has changed are put back.
    """
    widths = {
        module.in_features
        for module in model.modules()
        if isinstance(module, Fp8Linear)
        or (isinstance(module, MergedLinear) and module.merged.may_use_kernel)
    }
    count = 0
    for module in list(model.modules()):
        if isinstance(module, MarkedNorm):
            module.__class__ = module.library_class
        if enabled and _is_rms_norm(module, widths):
            module.__class__ = _marked(type(module))
            count += 1
    return count


@torch.no_grad()
def _is_rms_norm(module: nn.Module, widths: set[int]) -> bool:
    """Whether a frozen module gives the numbers of `_rms_norm`, for rows of any size."""
    weight, eps = (
        (vars(module) | module._parameters).get("weight"),
        vars(module).get("variance_epsilon"),
    )
    if not isinstance(weight, Tensor) or eps is None or "forward" in vars(module):
        return False
    if weight.dim() != 1 or len(weight) not in widths or weight.requires_grad:
        return False
    rows = torch.linspace(-3.0, 3.0, _NUM_TEST_ROWS * len(weight)).sin().view(_NUM_TEST_ROWS, -1)
    rows = rows * torch.tensor([[1.0], [1e-3]])  # epsilon counts in the second
    rows = rows.to(weight.device, weight.dtype)
    return torch.equal(type(module).forward(module, rows), _rms_norm(rows, weight, eps))


@functools.cache
def _marked(plain: type[nn.Module]) -> type[nn.Module]:
    def forward(self: MarkedNorm, hidden_states: Tensor) -> Tensor:
        weight = cast(Tensor, self.weight)
        is_frozen = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        are_few = hidden_states.numel() <= MAX_JOINED_ROWS * hidden_states.shape[-1]
        if is_frozen and are_few and hidden_states.dtype == weight.dtype:
            return rms_norm(hidden_states, weight, self.variance_epsilon)
        return plain.forward(self, hidden_states)

    return variant_of(plain, MarkedNorm, forward, library_class=plain)


_PRODUCTS = (few_rows_linear._opoverload, fp8_linear._opoverload)
_GATED = few_rows_gated_linear._opoverload


class JoinAroundProducts(CustomGraphPass):
    """The pass, as `torch.compile` takes it."""

    def __call__(self, graph: fx.Graph) -> None:
        """Join what is around each product of few rows to it, in place."""
        order = {node: place for place, node in enumerate(graph.nodes)}
        for node in order:
            if node.target in (*_PRODUCTS, _GATED) and _has_few_rows(node):
                _join_norm(graph, node)
                if node.target is not _GATED:
                    _join_sum(graph, node, order)

    def uuid(self) -> object:
        """What cached code depends on: this file."""
        return get_hash_for_files((__file__,))


def _has_few_rows(node: fx.Node) -> bool:
    num_rows = math.prod(_value(node).shape[:-1])
    return statically_known_true(num_rows <= MAX_JOINED_ROWS)


def _value(node: fx.Node) -> Tensor:
    return node.meta["example_value"]


def _join_norm(graph: fx.Graph, node: fx.Node) -> None:
    norm = node.args[0]
    if not isinstance(norm, fx.Node) or norm.target is not rms_norm or len(norm.users) > 1:
        return
    x, weight, eps = norm.args
    node.args = (x, *node.args[1:])
    node.kwargs = {**node.kwargs, "norm_weight": weight, "eps": eps}
    graph.erase_node(norm)


def _join_sum(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int]) -> None:
    (total, *others) = node.users
    if others or total.target is not operator.add:
        return
    residual = next((arg for arg in total.args if arg is not node), None)
    if not isinstance(residual, fx.Node) or order[residual] > order[node]:
        return
    values = {(_value(n).shape, _value(n).dtype) for n in (node, residual, total)}
    if len(values) == 1:
        node.kwargs = {**node.kwargs, "residual": residual}
        total.replace_all_uses_with(node)
        graph.erase_node(total)
