"""Chi-square tests without a statistics library."""

import math

import torch
from torch import Tensor


def chi_square_p_value(observed: Tensor, expected: Tensor) -> float:
    """Chance of counts at least as far from `expected` as `observed`, both `[V]`.

    Cells that expect fewer than 5 are pooled. An observation where nothing is expected gives 0. The
    upper incomplete gamma function is exact; there is no approximation but Pearson's own.
    """
    observed, expected = observed.double(), expected.double()
    if float(observed[expected == 0].sum()) > 0:
        return 0.0
    small = expected < 5
    cells = torch.stack([observed, expected])[:, ~small]
    pooled = torch.stack([observed[small].sum(), expected[small].sum()])
    if pooled[1] > 0:
        cells = torch.cat([cells, pooled[:, None]], dim=1)
    if cells.shape[1] < 2:
        return 1.0
    statistic = float(((cells[0] - cells[1]) ** 2 / cells[1]).sum())
    freedom = torch.tensor((cells.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2).double()))


def smallest_of(p_values: list[float]) -> float:
    """Bonferroni: chance bound for the smallest of several p-values."""
    assert all(0 <= p <= 1 and not math.isnan(p) for p in p_values), p_values
    return min(1.0, min(p_values) * len(p_values))
