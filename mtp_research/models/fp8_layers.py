"""Layers of a frozen target whose weights stay FP8: `Fp8Linear`, and experts with scales.

They take the place of a model's own layers while it has no weights yet. Products of few rows go
through a kernel that reads the stored bytes. For more rows, as prompts have, a matrix is multiplied
as a plain copy that lives as long as the product: 117 MB of the largest of GLM-4.5-Air's layers,
and each number is converted once, where the kernel's tiles would convert it once per 128 rows.
Experts have no such copies (`kernels.experts.expert_mlp`). On a CPU, and in float32 or float64,
every product is one of plain copies, which are the numbers that de-quantising loading gives.

Embedding, lm_head, norms and routers stay as they are, and so do matrices that something reads
without calling their layer. Letters: T rows, O outputs, C inputs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtp_research.kernels.products.few_rows_choice import choose_fp8_config
from mtp_research.kernels.products.few_rows_product import few_rows_product
from mtp_research.kernels.products.scaled_weights import FP8, dequantise, scale_shape
from mtp_research.models.experts import FP8_PROJECTIONS, expert_stacks, unknown_form
from mtp_research.models.loading.placement import whole
from mtp_research.runtime.errors import EnvironmentFault

# Routers, which no release stores as FP8, and what latent attention multiplies by itself.
_NEVER = ("gate", "kv_b_proj", "router", "shared_expert_gate")
_LEAST_CAPABILITY = (8, 9)
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class Fp8Linear(nn.Module):
    """A linear layer with an FP8 weight; not an `nn.Linear`, which code around may multiply by."""

    def __init__(self, plain: nn.Linear, *, block: int) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.block = block  # edge of a scale's block, 0 for a scale per row
        self.weight = _stored(plain.weight)
        self.weight_scale = _scale(plain.weight, block=block)
        self.bias = plain.bias

    def forward(self, input: Tensor) -> Tensor:
        """Output `[..., O]` of `[..., C]`."""
        return fp8_linear(input, self.weight, self.weight_scale, self.bias, self.block)


@torch.library.custom_op("mtp_research::fp8_linear", mutates_args=())
def fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    block: int,
) -> torch.Tensor:
    """Output `[..., O]` of input `[..., C]`, in its dtype; the others as in `few_rows_product`."""
    rows = input.reshape(-1, input.shape[-1])
    config = choose_fp8_config(len(rows), rows.shape[1])
    if config is None or not input.is_cuda or input.dtype not in _KERNEL_DTYPES:
        plain = dequantise(weight, scale, block=block, dtype=input.dtype)
        return functional.linear(input, plain, bias)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    output = few_rows_product(rows, weight, bias, scale=scale, scale_block=block, config=config)
    return output.view(*input.shape[:-1], len(weight))


@fp8_linear.register_fake
def _fake(input: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


def keep_fp8(model: nn.Module, *, blocks: Mapping[str, int]) -> None:
    """Let layers of a model without weights hold FP8 weights and float32 scales, in place.

    `blocks` has the edge of a scale's block (0: a scale per row) by the name of a layer that
    `keepable` names. Scales are parameters `weight_scale`, `gate_up_proj_scale`, `down_proj_scale`.
    """
    for name, block in blocks.items():
        owner_name, _, own = name.rpartition(".")
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            setattr(model.get_submodule(owner_name), own, Fp8Linear(layer, block=block))
            continue
        cast(Any, layer).fp8_block = block
        for projection, num_parts in zip(FP8_PROJECTIONS, (2, 1), strict=True):
            plain = layer.get_parameter(projection)
            scale = _scale(plain, block=block, num_parts=num_parts)
            layer.register_parameter(projection, _stored(plain))
            layer.register_parameter(f"{projection}_scale", scale)


def keepable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers and expert stacks of the decoder layers that `keep_fp8` can change, by name.

    Those of recurrent layers are not among them: code of ours reads their weights.
    """
    layers = cast(nn.Module, model.base_model).get_submodule("layers")
    parents = [m for m in layers.modules() if not any(_is_convolution(c) for c in m.children())]
    linears = {id(c) for m in parents for c in m.children() if type(c) is nn.Linear}
    stacks = {id(stack) for stack in expert_stacks(layers) if unknown_form(stack) is None}
    for name, module in model.named_modules():
        is_linear = id(module) in linears and name.rpartition(".")[2] not in _NEVER
        if is_linear or id(module) in stacks:
            yield name, module


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d)


def plain_state(module: nn.Module, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of a module with plain weights in place of FP8 ones, for modules without scales.

    Of one that ranks share it is gathered: all of them must call.
    """
    state = {name: whole(part) for name, part in module.state_dict().items()}
    for name, layer in module.named_modules():
        block = layer.block if isinstance(layer, Fp8Linear) else vars(layer).get("fp8_block")
        if block is None:
            continue
        for own in ("weight",) if isinstance(layer, Fp8Linear) else FP8_PROJECTIONS:
            full = f"{name}.{own}" if name else own
            num_parts = 2 if own == "gate_up_proj" else 1
            stored = (state[full], state.pop(f"{full}_scale"))
            weight, scale = (part.unflatten(-2, (num_parts, -1)) for part in stored)
            state[full] = dequantise(weight, scale, block=block, dtype=dtype).flatten(-3, -2)
    return state


def holds_fp8(model: nn.Module) -> bool:
    """Whether some weights of a model are FP8."""
    return any(parameter.dtype == FP8 for parameter in model.parameters())


def require_fp8(device: torch.device) -> None:
    """Refuse (`EnvironmentFault`) a GPU that cannot convert FP8 numbers."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise EnvironmentFault(
            f"model.keep_fp8=true needs a GPU of compute capability 8.9 or more, got "
            f"{capability[0]}.{capability[1]}; set model.keep_fp8=false."
        )


def _stored(plain: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(plain, dtype=FP8), requires_grad=False)


def _scale(plain: Tensor, *, block: int, num_parts: int = 1) -> nn.Parameter:
    *lead, rows, columns = plain.shape
    num_rows, num_columns = scale_shape(rows // num_parts, columns, block=block)
    shape = (*lead, num_parts * num_rows, num_columns)
    return nn.Parameter(plain.new_empty(shape, dtype=torch.float32), requires_grad=False)
