"""Products of a few rows with a weight that is read once, near the bandwidth of the memory.

Where it sits: `models/merged.py` calls it in compiled decode steps, through `models/few_rows.py`,
for the projections that `few_rows_choice` names. Such a product is as slow as its weight is long. A
library's product leaves a tenth to a third of the bandwidth unused there, in part because it splits
K over programs and adds the parts up in a second kernel.
Maths: out[t, n] = sum_k x[t, k] * weight[n, k] + bias[n], accumulated in float32.
Layout: one program per BLOCK_N rows of the weight, the first operand of the matrix instruction, so
that the padded dimension of the other one is 8, 16, ... 128. Tiles are small enough to give every
multiprocessor about as many programs, and pipelined deeply enough to keep tens of kilobytes on
their way. Where a weight has too few rows for that, several programs share a tile's K; the last one
to arrive adds their parts up in the order of K, so that the result does not depend on who that is.
On Hopper a launch overlaps the end of the kernel in front of it (programmatic dependent launch): a
program asks for the beginning of its weight rows, which no kernel writes, before it waits for `x`.
A gated product has the rows of `gate` and `up` in one weight `[2F, K]`; a program multiplies half a
tile of each and stores silu(gate) * up.
Letters: T rows, N outputs, K depth, S splits of K, F gated outputs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.few_rows_triton import few_rows_kernel
from torch.nn import functional

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # checks.resolve_backend refuses the kernel then
    TensorDescriptor = None

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 128
_LINE_BYTES = 128  # of the L2 cache
_NUM_SMS = 132  # of the H100 and the H200
_NUM_EARLY_LINES = 8  # of each weight row: a kilobyte, tens of them a multiprocessor
_MAX_SHARED_TILES = 4096  # tiles whose K several programs share


class FewRowsConfig(NamedTuple):
    """Compile-time shape of one program, and how many of them there should be.

    Attributes:
        block_n: rows of the weight a program, a power of two of 16 or more.
        block_k: elements of K a step of its loop, a power of two of 16 or more.
        num_warps: warps a program.
        num_stages: steps of the loop whose loads are under way together, and one more.
        programs_per_sm: programs share the K of a tile until there are about so many on every
            multiprocessor; 0: they never do.
        uses_descriptor: tiles of the weight are copied by the tensor memory accelerator.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 0
    uses_descriptor: bool = False


def few_rows_product_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, is_gated: bool = False
) -> Tensor:
    """Plain PyTorch. Arguments and result as in `few_rows_product`."""
    out = x.float() @ weight.float().T
    out = (out if bias is None else out + bias.float()).to(x.dtype)
    if not is_gated:
        return out
    gate, up = out.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def few_rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: FewRowsConfig,
    is_gated: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`x @ weight.T + bias` for at most 128 rows, in one kernel; the same bits at every call.

    Args:
        x: `[T, K]`, 0 <= T <= 128, rows contiguous.
        weight: `[N, K]`, rows contiguous, dtype of `x`.
        bias: `[N]`, dtype of `x`; None for none.
        config: shape of the programs, from `few_rows_choice` or a benchmark.
        is_gated: `weight` holds `gate` and `up`, F rows each; without bias, splits or descriptor.
        backend: `auto`, `reference` or `triton`.

    Returns:
        `[T, N]`, contiguous, in the dtype of `x`; silu(gate) * up `[T, F]` if gated.

    Raises:
        ValueError: shapes, dtypes or devices disagree, or the backend cannot run them.
    """
    _check(x, weight, bias)
    if is_gated:
        _check_gated(weight, bias, config)
    if checks.resolve_backend(backend, tensor=x, kernel=few_rows_kernel) == "reference":
        return few_rows_product_ref(x, weight, bias, is_gated=is_gated)
    for name, tensor in (("x", x), ("weight", weight)):
        checks.check_kernel_dtype(name, tensor, kernel=few_rows_kernel)
        checks.check_last_dim_contiguous(name, tensor)
    out = x.new_empty(len(x), len(weight) // 2 if is_gated else len(weight))
    if out.numel() == 0:
        return out
    num_tiles = -(-len(weight) // config.block_n)
    num_splits = choose_num_splits(num_tiles, weight.shape[1], config=config)
    is_split = num_splits > 1
    overlaps = can_overlap(x.device)
    with checks.launch_device(x):
        few_rows_kernel[(num_tiles, num_splits)](
            x,
            weight,
            _tiles(weight, config) if config.uses_descriptor else None,
            bias,
            out,
            x.new_empty(num_splits, *out.shape, dtype=torch.float32) if is_split else None,
            _arrived(x.device) if is_split else None,
            len(x),
            out.shape[1],
            weight.shape[1],
            x.stride(0),
            weight.stride(0),
            num_splits,
            **few_rows_constants(
                len(x),
                weight.shape[1],
                dtype=x.dtype,
                config=config,
                overlaps=overlaps,
                is_gated=is_gated,
            ),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **({"launch_pdl": True} if overlaps else {}),
        )
    return out


def choose_num_splits(num_tiles: int, depth: int, *, config: FewRowsConfig) -> int:
    """Programs that share the K of a tile: as many as bring `programs_per_sm`, at least one."""
    num_programs = config.programs_per_sm * _NUM_SMS
    num_steps = -(-depth // config.block_k)
    most = 1 if num_tiles > _MAX_SHARED_TILES else num_steps
    return max(1, min(num_programs // num_tiles, most))


def few_rows_constants(
    num_rows: int,
    depth: int,
    *,
    dtype: torch.dtype,
    config: FewRowsConfig,
    overlaps: bool,
    is_gated: bool,
) -> dict[str, int | bool]:
    """The compile-time arguments of the kernel, by parameter name."""
    return {
        "EVEN_DEPTH": depth % config.block_k == 0,
        "BLOCK_T": max(8, 1 << (num_rows - 1).bit_length()),
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "LINE": _LINE_BYTES // dtype.itemsize,
        "OVERLAPS": overlaps,
        "IS_GATED": is_gated,
        "NUM_EARLY_LINES": _NUM_EARLY_LINES,
    }


def can_overlap(device: torch.device) -> bool:
    """Whether launches on a device can overlap, which Hopper was the first to do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _tiles(weight: Tensor, config: FewRowsConfig) -> TensorDescriptor:
    """Descriptor of the weight's tiles, which must start at multiples of 16 bytes."""
    stride_bytes = weight.stride(0) * weight.element_size()
    if stride_bytes % 16 or weight.data_ptr() % 16:
        raise ValueError(
            "weight rows must start at multiples of 16 bytes for a config with uses_descriptor, "
            f"got a stride of {stride_bytes} bytes; use another config or a copy of the weight."
        )
    return TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k])


@functools.lru_cache
def _arrived(device: torch.device) -> Tensor:
    """Arrivals at each tile: zeros between launches, so one stream at a time may use them."""
    return torch.zeros(_MAX_SHARED_TILES, dtype=torch.int32, device=device)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    checks.check_rank("x", x, letters="[T, K]")
    checks.check_rank("weight", weight, letters="[N, K]")
    checks.check_shape("weight", weight, shape=(weight.shape[0], x.shape[1]), letters="[N, K]")
    if len(x) > MAX_ROWS:
        raise ValueError(
            f"x must have at most {MAX_ROWS} rows, got {len(x)}; use torch.nn.functional.linear."
        )
    operands = {"weight": weight}
    if bias is not None:
        checks.check_shape("bias", bias, shape=(len(weight),), letters="[N]")
        operands["bias"] = bias
    for name, tensor in operands.items():
        checks.check_dtype(name, tensor, dtype=x.dtype)
        checks.check_device(name, tensor, device=x.device)


def _check_gated(weight: Tensor, bias: Tensor | None, config: FewRowsConfig) -> None:
    if len(weight) % 2 or bias is not None or config.programs_per_sm or config.uses_descriptor:
        raise ValueError(
            "a gated product needs an even number of weight rows, no bias, and a config without "
            f"splits and descriptor, got {len(weight)} rows, bias {bias is not None} and {config}; "
            "use is_gated=False."
        )
