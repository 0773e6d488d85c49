"""Layers of steps on a CPU, in the order or the call that its library is fast at.

**Products.** PyTorch hands `x W^T` of a few float32 rows to MKL as a product whose long side is
W's. Where W comes from memory, MKL then takes up to six times as long as for `W x^T`, which is the
same product, and twice as long for one row as for two. Steps of a decode loop have few rows, so
that a verified row would cost more than the bandwidth says. Here such a weight is put on the left,
and one row is doubled. Where W lies in the core's own cache, `x W^T` is the faster one. With
few inputs it is fast everywhere if W lies in memory by its columns: 31 instead of 43 us for 8 rows
and a W of 448 x 128; for 2 or 3 rows at most a sixth slower than W on the left.

**Norms.** The library's RMSNorm is eight calls, and so is `torch.nn.functional.rms_norm` inside:
20.9 and 15.2 us for a row of 128; here it is four, 10.0 us. A class is taken for one if it gives
the same numbers on test rows, so that forms with `1 + weight` or a gate are told apart without
knowing a family.

**Experts.** The library's loop makes a dozen calls for each expert that some row chose. Where all
experts of a layer are small, two products over all of them take less, of few rows: what a row did
not choose counts 0 times.

Measured on an AMD EPYC (Zen 4), 2 cores of 1 MiB of cache each, MKL of torch 2.13; other CPUs are
not. Letters: T rows, N outputs, K depth, D hidden, E experts, I inner size of an expert.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from mtp_research.models.experts import expert_stacks, unknown_form

MAX_ROWS = 8
# Weights of the smaller models stay in the caches and gain nothing, if they are not large; of the
# others, small ones gain less than the calls cost.
_MIN_WEIGHTS = 100_000
_MIN_READ_WEIGHTS = 50_000
_CACHED_WEIGHTS = 500_000
# For a deeper weight, or a large one that is deeper than wide with more than two rows, PyTorch's
# own order is as fast.
_MAX_DEPTH = 1024
_FEW_INPUTS = 128
_PAIR = 2
_ZERO = torch.zeros(())
EXPERTS_NAME = "mtp_research_all_experts"
_LIBRARY_LOOP = "eager"
_MAX_EXPERT_WEIGHTS = 500_000  # of a layer: what reading them all may cost
_MAX_EXPERT_ROWS = 64


def order_weights(models: Sequence[nn.Module], *, enabled: bool) -> int:
    """Let frozen float32 linears on a CPU multiply few rows fast, or give them back, in place.

    Those of few inputs lie in memory by their columns, others run `FewRowsLinear`. Names, values
    and shapes stay. Returns how many linears run it now.
    """
    linears = [
        module
        for model in models
        for module in model.modules()
        if type(module) in (nn.Linear, FewRowsLinear)
    ]
    num_weights = sum(linear.weight.numel() for linear in linears)
    is_read = num_weights > _CACHED_WEIGHTS
    least = _MIN_READ_WEIGHTS if is_read else _MIN_WEIGHTS
    for linear in linears:
        has_few_inputs = linear.weight.shape[1] <= _FEW_INPUTS and _is_plain(linear)
        by_columns = enabled and is_read and has_few_inputs
        if has_few_inputs:
            weight = linear.weight.data
            linear.weight.data = weight.t().contiguous().t() if by_columns else weight.contiguous()
        gains = enabled and not by_columns and _gains(cast(nn.Linear, linear), least=least)
        linear.__class__ = FewRowsLinear if gains else nn.Linear
    return sum(type(linear) is FewRowsLinear for linear in linears)


def _gains(linear: nn.Linear, *, least: int) -> bool:
    weight = linear.weight
    is_sized = weight.numel() >= least and weight.shape[1] <= _MAX_DEPTH
    return torch.backends.mkl.is_available() and is_sized and _is_plain(linear)


def _is_plain(module: nn.Module) -> bool:
    """Whether a layer is the library's on a frozen float32 weight on a CPU."""
    weight = cast(Tensor, module.weight)
    is_own = type(weight.data) is Tensor and "forward" not in vars(module)
    is_float = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_own and is_float and not weight.requires_grad


class FewRowsLinear(nn.Linear):
    """A linear layer whose weight is the left operand where the rows are few."""

    def forward(self, input: Tensor) -> Tensor:
        """Output `[..., N]` of `[..., K]`."""
        weight = self.weight
        num_outputs, depth = weight.shape
        num_rows = input.numel() // depth
        is_wide = num_outputs >= depth or num_outputs * depth < _MIN_WEIGHTS
        is_few = 0 < num_rows <= MAX_ROWS and (is_wide or num_rows <= _PAIR)
        if not is_few or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return functional.linear(input, weight, self.bias)
        rows = input.reshape(num_rows, depth)
        if num_rows == 1:
            rows = torch.cat((rows, rows))
        output = torch.mm(weight, rows.t())[:, :num_rows].t()
        if self.bias is not None:
            output = output + self.bias
        return output.contiguous().view(*input.shape[:-1], num_outputs)


class FusedNorm(nn.Module):
    """Marks the classes that `fuse_norms` makes."""

    library_class: type[nn.Module]


def fuse_norms(models: Iterable[nn.Module], *, enabled: bool) -> int:
    """Let frozen float32 RMSNorms on a CPU take fewer calls, or give them back, in place.

    Names, parameters and state dicts stay. Returns how many norms do now.
    """
    count = 0
    for model in models:
        for module in model.modules():
            if isinstance(module, FusedNorm) and not enabled:
                module.__class__ = module.library_class
            elif enabled and type(module).__name__.endswith("RMSNorm") and _is_rms_norm(module):
                module.__class__ = _fused(type(module))
            count += isinstance(module, FusedNorm)
    return count


def _is_rms_norm(norm: nn.Module) -> bool:
    """Whether `norm` gives what `_rms_norm` gives, for rows of any size."""
    names = vars(norm).keys() | norm._parameters.keys()
    if isinstance(norm, FusedNorm) or not {"weight", "variance_epsilon"} <= names:
        return False
    weight = cast(Tensor, norm.weight)
    if weight.dim() != 1 or not _is_plain(norm):
        return False
    rows = torch.linspace(-3.0, 3.0, 2 * len(weight)).sin().view(2, -1)
    rows = rows * torch.tensor([[1.0], [1e-3]])  # epsilon counts in the second
    with torch.no_grad():
        expected = type(norm).forward(norm, rows)
        output = _rms_norm(norm, rows)
    return torch.allclose(output, expected, rtol=1e-5, atol=1e-6)


def _rms_norm(norm: nn.Module, rows: Tensor) -> Tensor:
    """`w x / sqrt(mean x^2 + eps)` as `w x sqrt(D) / hypot(|x|, sqrt(D eps))`."""
    weight, width = cast(Tensor, norm.weight), rows.shape[-1]
    least = torch.tensor(math.sqrt(width * cast(float, norm.variance_epsilon)))
    length = torch.hypot(torch.linalg.vector_norm(rows, dim=-1, keepdim=True), least)
    return torch.addcdiv(_ZERO, rows * weight, length, value=math.sqrt(width))


@functools.cache
def _fused(plain: type[nn.Module]) -> type[nn.Module]:
    """The class `plain` with a forward of fewer calls for float32 rows without gradients."""

    def forward(self: FusedNorm, hidden_states: Tensor) -> Tensor:
        is_float = hidden_states.dtype == self.weight.dtype == torch.float32
        if not is_float or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return plain.forward(self, hidden_states)
        return _rms_norm(self, hidden_states)

    return variant_of(plain, FusedNorm, forward, library_class=plain)


def join_experts(models: Iterable[nn.Module], *, enabled: bool) -> int:
    """Let small float32 expert layers on a CPU run `all_experts`, or the library's loop, in place.

    Returns how many layers run it now. Layers that something else runs are left alone.
    """
    count = 0
    for model in models:
        stacks = expert_stacks(model)
        gains = enabled and all(map(_are_small, stacks))
        for stack in stacks:
            config = cast(PreTrainedConfig, stack.config)
            if config._experts_implementation in (_LIBRARY_LOOP, EXPERTS_NAME):
                config._experts_implementation = EXPERTS_NAME if gains else _LIBRARY_LOOP
            count += config._experts_implementation == EXPERTS_NAME
    return count


def _are_small(stack: nn.Module) -> bool:
    if unknown_form(stack) is not None:
        return False
    weights = [cast(Tensor, stack.gate_up_proj), cast(Tensor, stack.down_proj)]
    places = {(weight.dtype, weight.device.type, type(weight.data)) for weight in weights}
    is_plain = places == {(torch.float32, "cpu", Tensor)}
    return is_plain and sum(weight.numel() for weight in weights) <= _MAX_EXPERT_WEIGHTS


def all_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Output `[T, D]` of an expert layer, as `transformers.integrations.moe` calls it.

    Many rows, and rows with gradients, take the library's loop. A row of `top_k_index` `[T, top_k]`
    has no expert twice.
    """
    num_rows = len(hidden_states)
    is_few = num_rows <= _MAX_EXPERT_ROWS and hidden_states.dtype == torch.float32
    if not is_few or torch.is_grad_enabled() or torch.compiler.is_compiling():
        loop = type(module).forward.__wrapped__
        return loop(module, hidden_states, top_k_index, top_k_weights)
    gate_up_proj, down_proj = cast(Tensor, module.gate_up_proj), cast(Tensor, module.down_proj)
    num_experts, _, num_inner = down_proj.shape
    shares = hidden_states.new_zeros(num_rows, num_experts)
    shares.scatter_(1, top_k_index, top_k_weights.to(shares.dtype))
    inner = torch.mm(gate_up_proj.flatten(0, 1), hidden_states.t())
    gate, up = inner.view(num_experts, 2, num_inner, num_rows).unbind(1)
    gated = functional.silu(gate).mul_(up).mul_(shares.t()[:, None])  # [E, I, T]
    return torch.bmm(down_proj, gated).sum(0).t().contiguous()


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, all_experts)


def variant_of(
    plain: type[nn.Module], mark: type[nn.Module], forward: Callable, **fields: object
) -> type[nn.Module]:
    """The class `plain` under its name with another `forward`, and fields of the class.

    Made here, it cannot be found by name: copies and files of its modules hold `plain`, without the
    module's `region`, if it has one.
    """

    def reduce(self: nn.Module, protocol: int) -> tuple:
        _, _, state, *rest = plain.__reduce_ex__(self, protocol)
        kept = {name: value for name, value in cast(dict, state).items() if name != "region"}
        return (_new, (plain,), kept, *rest)

    methods = {"forward": forward, "__doc__": plain.__doc__, "__reduce_ex__": reduce}
    return type(plain.__name__, (mark, plain), methods | fields)


def _new(plain: type[nn.Module]) -> nn.Module:
    return plain.__new__(plain)
