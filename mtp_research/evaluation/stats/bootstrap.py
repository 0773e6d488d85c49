"""Bootstraps over prompts, and over training seeds and prompts.

Over prompts: a statistic is a ratio of two sums over prompts, and the resampled unit is a prompt
with all its rounds. The rounds of one text depend on each other, so resampling rounds would make
every interval too narrow.

Over seeds and prompts: heads trained again with another seed differ, and so do prompts; an interval
that is to hold for the method, and not for one training run, needs both. Every seed decodes the
same prompts, so that seeds and prompts are crossed: a draw takes as many seeds and as many prompts
as there are, each with replacement, and counts every drawn seed over the drawn prompts. With one
seed it is the bootstrap over prompts. Few seeds are few: with three of them one draw in nine holds
one seed alone, and the interval says little about seeds not trained. It is printed beside the
seeds' own values for that reason.

Letters: P prompts; S statistics in `estimate`, S seeds in `lengths`. numpy only.
Source: percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13);
crossed clusters: Owen, The pigeonhole bootstrap (arXiv:0712.1111).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_DRAWS = 10_000
LEVEL = 0.95
_MAX_CELLS = 2_000_000  # draws x prompts resampled at once; about 50 MB of arrays
Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A figure with its interval; None where it is undefined, such as nothing drafted."""

    value: float | None
    low: float | None = None
    high: float | None = None


class Ratio(NamedTuple):
    """A statistic as sum(top)/sum(bottom) over prompts."""

    top: Floats  # [P]
    bottom: Floats  # [P]


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
        statistic is undefined are left out of its interval; of one prompt there is none.
    """
    return _intervals(ratios, *_values_and_draws(ratios, seed=seed, num_draws=num_draws))


def estimate_difference(
    ours: Mapping[str, Ratio], theirs: Mapping[str, Ratio], *, seed: int, num_draws: int = NUM_DRAWS
) -> dict[str, Estimate]:
    """Paired difference ours - theirs of the same statistics over the same prompts in one order.

    Each draw takes the same prompts on both sides: exactly 0 throughout for identical data.
    """
    # Equal seed and equal P give equal resamplings, and equal shapes give equal rounding.
    our_values, our_draws = _values_and_draws(ours, seed=seed, num_draws=num_draws)
    their_values, their_draws = _values_and_draws(theirs, seed=seed, num_draws=num_draws)
    return _intervals(ours, our_values - their_values, our_draws - their_draws)


def _values_and_draws(
    ratios: Mapping[str, Ratio], *, seed: int, num_draws: int
) -> tuple[Floats, Floats]:
    """Values on all prompts [S] and on each draw [num_draws, S]; NaN where the bottom is 0."""
    top = np.stack([ratio.top for ratio in ratios.values()], axis=1)  # [P, S]
    bottom = np.stack([ratio.bottom for ratio in ratios.values()], axis=1)
    num_prompts = len(top)
    draws = np.full((num_draws, len(ratios)), np.nan)
    if num_prompts == 0:
        return np.full(len(ratios), np.nan), draws
    if num_prompts == 1:  # every draw would be the prompt itself
        return _divide(top[0], bottom[0]), draws
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


def _intervals(names: Iterable[str], values: Floats, draws: Floats) -> dict[str, Estimate]:
    columns = zip(names, values, draws.T, strict=True)
    return {name: interval_of(float(value), column) for name, value, column in columns}


@dataclass(frozen=True)
class Draws:
    """How often each draw takes each seed and each prompt."""

    seeds: Floats  # `[draws, S]` counts, rows sum to S
    prompts: Floats  # `[draws, P]` counts, rows sum to P


@dataclass(frozen=True)
class Lengths:
    """Acceptance length (micro) of one condition, mean over seeds, on all data and on each draw."""

    value: float  # mean over seeds of 1 + sum(accepted)/rounds; nan if a seed has no rounds
    draws: Floats  # `[draws]` the same on each draw; nan where a drawn seed has no rounds
    by_seed: Floats  # `[S]` each seed's own figure


def make_draws(num_seeds: int, num_prompts: int, *, seed: int, num_draws: int = NUM_DRAWS) -> Draws:
    """Resamplings of S seeds and P prompts, both >= 1; sharing them pairs the conditions."""
    generator = np.random.default_rng(seed)
    counts = [
        generator.multinomial(size, np.full(size, 1 / size), size=num_draws).astype(np.float64)
        for size in (num_prompts, num_seeds)
    ]
    return Draws(seeds=counts[1], prompts=counts[0])


def lengths(accepted: ArrayLike, rounds: ArrayLike, draws: Draws) -> Lengths:
    """Acceptance length from accepted drafts `[S, P]`, bonus not counted, and rounds `[S, P]`."""
    top, bottom = (np.atleast_2d(np.asarray(x, dtype=np.float64)) for x in (accepted, rounds))
    wanted = (draws.seeds.shape[1], draws.prompts.shape[1])
    assert top.shape == bottom.shape == wanted, f"{top.shape}, {bottom.shape} for {wanted}"
    by_seed = _divide(top.sum(axis=1), bottom.sum(axis=1))  # [S]
    drawn = _divide(draws.prompts @ top.T, draws.prompts @ bottom.T)  # [draws, S]
    # A seed that a draw leaves out may have no rounds on its prompts.
    weighed = np.where(draws.seeds > 0, drawn * draws.seeds, 0.0)
    return Lengths(float(1 + by_seed.mean()), 1 + weighed.sum(axis=1) / len(by_seed), 1 + by_seed)


def interval_of(value: float, draws: Floats) -> Estimate:
    """A figure with the 95 % percentile interval of its draws; undefined draws are left out."""
    defined = draws[np.isfinite(draws)]
    if not np.isfinite(value):
        return Estimate(None)
    if not len(defined):
        return Estimate(float(value))
    low, high = np.quantile(defined, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Estimate(float(value), float(low), float(high))


def estimate_of(one: Lengths) -> Estimate:
    """Acceptance length with its interval."""
    return interval_of(one.value, one.draws)


def difference(ours: Lengths, theirs: Lengths) -> Estimate:
    """Paired difference ours - theirs; both were made with the same draws."""
    return interval_of(ours.value - theirs.value, ours.draws - theirs.draws)


def _divide(top: Floats, bottom: Floats) -> Floats:
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)
