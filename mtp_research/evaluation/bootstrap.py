"""Cluster bootstrap over prompts, for statistics that are ratios of two sums over prompts.

Letters: P prompts, S statistics. A resampled unit is a prompt with all its rounds: the rounds of
one text depend on each other, so resampling rounds would make every interval too narrow.
Source: percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_DRAWS = 10_000
LEVEL = 0.95
_MAX_CELLS = 2_000_000  # draws x prompts resampled at once; about 50 MB of arrays


class Estimate(NamedTuple):
    """A figure with its interval; None where it is undefined, such as nothing drafted."""

    value: float | None
    low: float | None = None
    high: float | None = None


class Ratio(NamedTuple):
    """A statistic as sum(top)/sum(bottom) over prompts."""

    top: NDArray[np.float64]  # [P]
    bottom: NDArray[np.float64]  # [P]


def estimate(
    ratios: Mapping[str, Ratio], *, seed: int, num_draws: int = NUM_DRAWS
) -> dict[str, Estimate]:
    """Value and 95 % percentile interval of each statistic.

    Args:
        ratios: statistics over the same P prompts in the same order.
        seed: of the resampling; equal seeds and data give equal intervals.
        num_draws: resamplings, >= 1.

    Returns:
        Estimates by name; None where the bottom is 0 over all prompts. Resamplings in which a
        statistic is undefined are left out of its interval.
    """
    return _intervals(ratios, *_values_and_draws(ratios, seed=seed, num_draws=num_draws))


def estimate_difference(
    ours: Mapping[str, Ratio],
    theirs: Mapping[str, Ratio],
    *,
    seed: int,
    num_draws: int = NUM_DRAWS,
) -> dict[str, Estimate]:
    """Paired difference ours - theirs, each draw taking the same prompts on both sides.

    Args:
        ours: statistics over P prompts.
        theirs: the same statistics over the same prompts in the same order.
        seed: of the resampling.
        num_draws: resamplings, >= 1.

    Returns:
        Estimates by name; exactly 0 throughout for identical data.
    """
    # Equal seed and equal P give equal resamplings, and equal shapes give equal rounding.
    our_values, our_draws = _values_and_draws(ours, seed=seed, num_draws=num_draws)
    their_values, their_draws = _values_and_draws(theirs, seed=seed, num_draws=num_draws)
    return _intervals(ours, our_values - their_values, our_draws - their_draws)


def _values_and_draws(
    ratios: Mapping[str, Ratio], *, seed: int, num_draws: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Values on all prompts [S] and on each draw [num_draws, S]; NaN where the bottom is 0."""
    top = np.stack([ratio.top for ratio in ratios.values()], axis=1)  # [P, S]
    bottom = np.stack([ratio.bottom for ratio in ratios.values()], axis=1)
    num_prompts = len(top)
    draws = np.full((num_draws, len(ratios)), np.nan)
    if num_prompts == 0:
        return np.full(len(ratios), np.nan), draws
    generator = np.random.default_rng(seed)
    rows_per_chunk = max(1, _MAX_CELLS // num_prompts)
    for start in range(0, num_draws, rows_per_chunk):
        num_rows = min(rows_per_chunk, num_draws - start)
        chosen = generator.integers(num_prompts, size=(num_rows, num_prompts))
        chosen += np.arange(num_rows)[:, None] * num_prompts
        counts = np.bincount(chosen.ravel(), minlength=num_rows * num_prompts)
        weights = counts.reshape(num_rows, num_prompts).astype(np.float64)  # [rows, P]
        draws[start : start + num_rows] = _divide(weights @ top, weights @ bottom)
    return _divide(top.sum(axis=0), bottom.sum(axis=0)), draws


def _divide(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)


def _intervals(
    names: Iterable[str], values: NDArray[np.float64], draws: NDArray[np.float64]
) -> dict[str, Estimate]:
    tails = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    estimates = {}
    for name, value, column in zip(names, values, draws.T, strict=True):
        defined = column[np.isfinite(column)]
        if not np.isfinite(value) or not len(defined):
            estimates[name] = Estimate(None)
            continue
        low, high = np.quantile(defined, tails)
        estimates[name] = Estimate(float(value), float(low), float(high))
    return estimates
