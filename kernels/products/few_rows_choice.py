"""Which program shape a product of few rows gets.

Where it sits: `models/rewrites/products.py` asks it for projections of compiled steps, and keeps
the library's product where it names none. Rows are measurements: the program shapes that the
benchmark `few_rows` found fastest on one H200, by the size of the weight, where they were faster
than the library's product. One row has the program of `gemv` (docs/benchmarks.md). For FP8
weights, of which the library has no such product, there is one for every size up to the most rows
that the kernel takes.
Letters: T rows, N outputs, K depth, F gated outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from mtp_research.kernels.products.few_rows_product import MAX_ROWS, FewRowsConfig
from mtp_research.kernels.products.gemv import GemvConfig

_HOPPER = (9, 0)
_DTYPES = (torch.bfloat16, torch.float16)


class _Choice(NamedTuple):
    """A program shape for weights of so many rows, `[min_outputs, end_outputs)`, and columns."""

    min_outputs: int
    end_outputs: int
    min_depth: int
    config: FewRowsConfig | GemvConfig


_ANY = 1 << 62
_WIDE_SPLIT = FewRowsConfig(64, 128, 4, 6, 2, uses_descriptor=True)
_NARROW = FewRowsConfig(32, 256, 2, 5, uses_descriptor=True)
_ONE_ROW = GemvConfig(4, 4096, 4)
# By the padded number of rows; the first row that fits is taken.
_CHOICES: dict[int, tuple[_Choice, ...]] = {
    1: (_Choice(1024, _ANY, 512, _ONE_ROW),),
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
    1: (_Choice(1024, _ANY, 512, _ONE_ROW),),
    8: (),  # a plain product and the activation by itself: 97.9 instead of 99.5 us a layer
    16: (_Choice(20_480, _ANY, 4096, FewRowsConfig(64, 128, 4, 5)),),
}
# Of FP8 weights, by the padded number of rows: the library has no such product, so there is one for
# every size. Measured with the sizes of GLM-4.5-Air: 8 and 32 rows by the benchmark `fp8` on one
# H200 (one row: docs/benchmarks.md), 128 rows as the fastest of 23 shapes on one H100, all sizes
# together. 64 rows have the shape of 32, 2 % slower there than the fastest of 14; so have 16.
_FP8_CONFIGS: dict[int, FewRowsConfig | GemvConfig] = {
    1: _ONE_ROW,
    8: FewRowsConfig(64, 128, 4, 6, 2),
    16: FewRowsConfig(64, 128, 4, 5, 2, uses_descriptor=True),
    32: FewRowsConfig(64, 128, 4, 5, 2, uses_descriptor=True),
    64: FewRowsConfig(64, 128, 4, 5, 2, uses_descriptor=True),
    MAX_ROWS: FewRowsConfig(128, 128, 8, 4, 1, uses_descriptor=True),
}


def runs_on(device: torch.device) -> bool:
    """Whether the program shapes were measured on a device like this one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER


def choose_config(
    num_rows: int, num_outputs: int, depth: int, *, dtype: torch.dtype
) -> FewRowsConfig | GemvConfig | None:
    """Program shape of T >= 1 rows times a weight `[N, K]`; None: the library's is faster."""
    return _choose(_CHOICES, num_rows, num_outputs, depth, dtype)


def has_config(num_outputs: int, depth: int, *, dtype: torch.dtype) -> bool:
    """Whether `choose_config` names a program shape for some number of rows."""
    return any(choose_config(rows, num_outputs, depth, dtype=dtype) for rows in _CHOICES)


def choose_gated_config(
    num_rows: int, num_weight_rows: int, depth: int, *, dtype: torch.dtype
) -> FewRowsConfig | GemvConfig | None:
    """As `choose_config`, for a gated product; `num_weight_rows` are 2F, those of both halves."""
    return _choose(_GATED_CHOICES, num_rows, num_weight_rows, depth, dtype)


def choose_fp8_config(num_rows: int, depth: int) -> FewRowsConfig | GemvConfig | None:
    """Program shape of T >= 1 rows times an FP8 weight; None for more than the kernel takes."""
    found = next((c for padded, c in _FP8_CONFIGS.items() if num_rows <= padded), None)
    if isinstance(found, FewRowsConfig) and depth % 16:
        return found._replace(uses_descriptor=False)  # which wants rows that start at 16 bytes
    return found


def _choose(
    choices: dict[int, tuple[_Choice, ...]],
    num_rows: int,
    num_outputs: int,
    depth: int,
    dtype: torch.dtype,
) -> FewRowsConfig | GemvConfig | None:
    if dtype not in _DTYPES or depth % 8:  # rows of the weight start at 16 bytes
        return None
    found: list[FewRowsConfig | GemvConfig | None] = []
    for of_size in choices.values():
        fits = (c for c in of_size if c.min_outputs <= num_outputs < c.end_outputs)
        found.append(next((c.config for c in fits if depth >= c.min_depth), None))
    # Compared and not computed with: code compiled for any number of rows then holds for a range,
    # which is as wide as can be.
    for padded_rows, config, above in zip(choices, found, [*found[1:], None], strict=True):
        if config != above and num_rows <= padded_rows:
            return config
    return None
