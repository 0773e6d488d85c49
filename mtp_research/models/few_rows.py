"""The op that compiled code sees of a product with few rows, and the choice between two products.

Where it sits: `models/merged.py` calls `linear` while a step is compiled. Letters: T rows, N
outputs, K depth.
"""

import torch
from torch import Tensor
from torch.nn import functional

from mtp_research.kernels.few_rows_choice import choose_config, choose_gated_config
from mtp_research.kernels.few_rows_product import few_rows_product


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`input @ weight.T + bias` by whichever product was faster for this shape.

    Args:
        input: `[..., K]`.
        weight: `[N, K]`.
        bias: `[N]` or None.
    """
    num_rows = input.numel() // input.shape[-1]
    if choose_config(num_rows, *weight.shape, dtype=weight.dtype) is None:
        return functional.linear(input, weight, bias)
    return few_rows_linear(input, weight, bias)


def gated_linear(input: Tensor, weight: Tensor) -> Tensor | None:
    """silu(gate) * up `[..., F]` of input `[..., K]`; None where the kernel is no faster.

    Args:
        input: `[..., K]`.
        weight: `[2F, K]`, rows of `gate` in front of those of `up`.
    """
    num_rows = input.numel() // input.shape[-1]
    if choose_gated_config(num_rows, *weight.shape, dtype=weight.dtype) is None:
        return None
    return few_rows_gated_linear(input, weight)


@torch.library.custom_op("mtp_research::few_rows_linear", mutates_args=())
def few_rows_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Output `[..., N]` of input `[..., K]` and weight `[N, K]`, in one kernel."""
    rows = _rows(input)
    config = choose_config(len(rows), *weight.shape, dtype=weight.dtype)
    assert config is not None, "choose_config names a program shape where this op is called"
    output = few_rows_product(rows, weight, bias, config=config)
    return output.view(*input.shape[:-1], len(weight))


@few_rows_linear.register_fake
def _fake(input: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


@torch.library.custom_op("mtp_research::few_rows_gated_linear", mutates_args=())
def few_rows_gated_linear(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up `[..., F]` of input `[..., K]` and weight `[2F, K]`, in one kernel."""
    rows = _rows(input)
    config = choose_gated_config(len(rows), *weight.shape, dtype=weight.dtype)
    assert config is not None, "choose_gated_config names a program shape where this op is called"
    output = few_rows_product(rows, weight, config=config, is_gated=True)
    return output.view(*input.shape[:-1], len(weight) // 2)


@few_rows_gated_linear.register_fake
def _fake_gated(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0] // 2)


def _rows(input: Tensor) -> Tensor:
    """`input` as `[T, K]` with contiguous rows."""
    rows = input.reshape(-1, input.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
