"""Which products go through `few_rows_product`, and in which program shape.

Where it sits: `models/few_rows.py` asks while a step is compiled, for every projection of it. The
rows below are measurements: for each number of rows the program shapes that `bench_few_rows` found
fastest on one H200, by the size of the weight, where they were faster than the library's product.
Letters: T rows, N outputs, K depth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from mtp_research.kernels.few_rows_product import FewRowsConfig

_HOPPER = (9, 0)
_DTYPES = (torch.bfloat16, torch.float16)


class _Choice(NamedTuple):
    """A program shape for weights of so many rows, `[min_outputs, end_outputs)`, and columns."""

    min_outputs: int
    end_outputs: int
    min_depth: int
    config: FewRowsConfig


_ANY = 1 << 62
_WIDE_SPLIT = FewRowsConfig(64, 128, 4, 6, 2, uses_descriptor=True)
_NARROW = FewRowsConfig(32, 256, 2, 5, uses_descriptor=True)
# By the padded number of rows; the first row that fits is taken.
_CHOICES: dict[int, tuple[_Choice, ...]] = {
    8: (
        _Choice(2048, 2560, 2048, _WIDE_SPLIT),
        _Choice(2560, 8192, 1024, _NARROW),
        _Choice(12_288, 20_480, 4096, _WIDE_SPLIT),
        _Choice(20_480, 24_576, 4096, _NARROW),
        _Choice(24_576, _ANY, 2048, _WIDE_SPLIT),
    ),
    16: (
        _Choice(2048, 2560, 4096, FewRowsConfig(64, 128, 4, 5, 2)),
        _Choice(2560, 8192, 2048, FewRowsConfig(32, 256, 2, 5)),
        _Choice(12_288, _ANY, 2048, FewRowsConfig(64, 128, 4, 5, 2, uses_descriptor=True)),
    ),
    32: (
        _Choice(4096, 8192, 4096, FewRowsConfig(64, 128, 4, 7, 1)),
        _Choice(28_672, _ANY, 2048, FewRowsConfig(64, 128, 4, 4, 2, uses_descriptor=True)),
    ),
    64: (_Choice(28_672, _ANY, 2048, FewRowsConfig(128, 128, 8, 4, 1, uses_descriptor=True)),),
}
# Of gated products, by the rows of both halves together.
_GATED_CHOICES: dict[int, tuple[_Choice, ...]] = {
    8: (_Choice(20_480, _ANY, 4096, FewRowsConfig(32, 256, 2, 5)),),
    16: (_Choice(20_480, _ANY, 4096, FewRowsConfig(64, 128, 4, 5)),),
}


def runs_on(device: torch.device) -> bool:
    """Whether the program shapes were measured on a device like this one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER


def choose_config(
    num_rows: int, num_outputs: int, depth: int, *, dtype: torch.dtype
) -> FewRowsConfig | None:
    """Program shape of a product of T rows with a weight `[N, K]`; None: the library's is faster.

    Args:
        num_rows: T, at least 1.
        num_outputs: N.
        depth: K.
        dtype: of rows and weight.
    """
    return _choose(_CHOICES, num_rows, num_outputs, depth, dtype)


def choose_gated_config(
    num_rows: int, num_weight_rows: int, depth: int, *, dtype: torch.dtype
) -> FewRowsConfig | None:
    """Program shape of a gated product; None: the library's and a compiled kernel are faster.

    Args:
        num_rows: T, at least 1.
        num_weight_rows: 2F, rows of both halves.
        depth: K.
        dtype: of rows and weight.
    """
    return _choose(_GATED_CHOICES, num_rows, num_weight_rows, depth, dtype)


def _choose(
    choices: dict[int, tuple[_Choice, ...]],
    num_rows: int,
    num_outputs: int,
    depth: int,
    dtype: torch.dtype,
) -> FewRowsConfig | None:
    if dtype not in _DTYPES or depth % 8:  # rows of the weight start at 16 bytes
        return None
    padded_rows = max(8, 1 << (num_rows - 1).bit_length())
    for choice in choices.get(padded_rows, ()):
        is_wide = choice.min_outputs <= num_outputs < choice.end_outputs
        if is_wide and depth >= choice.min_depth:
            return choice.config
    return None
