"""Two-level bootstrap of acceptance lengths: training seeds first, then prompts.

Heads trained again with another seed differ, and so do prompts; an interval that is to hold for the
method, and not for one training run, needs both. Every seed decodes the same prompts, so that seeds
and prompts are crossed: a draw takes S of the S seeds and P of the P prompts, each with
replacement, and counts every drawn seed over the drawn prompts. With one seed it is the cluster
bootstrap of `bootstrap.py`.

Few seeds are few: with three of them one draw in nine holds one seed alone, and the interval
says little about seeds not trained. It is printed beside the seeds' own values for that reason.

Letters: S seeds, P prompts. numpy only.
Source: percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13);
crossed clusters: Owen, The pigeonhole bootstrap (arXiv:0712.1111).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mtp_research.evaluation.bootstrap import LEVEL, NUM_DRAWS, Estimate

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Draws:
    """How often each draw takes each seed and each prompt.

    Attributes:
        seeds: `[draws, S]` counts, rows sum to S.
        prompts: `[draws, P]` counts, rows sum to P.
    """

    seeds: Floats
    prompts: Floats


@dataclass(frozen=True)
class Lengths:
    """Acceptance length (micro) of one condition, mean over seeds, on all data and on each draw.

    Attributes:
        value: mean over seeds of 1 + sum(accepted)/rounds; nan if a seed has no rounds.
        draws: `[draws]` the same on each draw; nan where a drawn seed has no rounds.
        by_seed: `[S]` each seed's own figure.
    """

    value: float
    draws: Floats
    by_seed: Floats


def make_draws(num_seeds: int, num_prompts: int, *, seed: int, num_draws: int = NUM_DRAWS) -> Draws:
    """Resamplings that all conditions of a comparison share, which pairs them.

    Args:
        num_seeds: S, >= 1.
        num_prompts: P, >= 1.
        seed: of the resampling; equal arguments give equal draws.
        num_draws: resamplings, >= 1.
    """
    generator = np.random.default_rng(seed)
    counts = [
        generator.multinomial(size, np.full(size, 1 / size), size=num_draws).astype(np.float64)
        for size in (num_prompts, num_seeds)
    ]
    return Draws(seeds=counts[1], prompts=counts[0])


def lengths(accepted: ArrayLike, rounds: ArrayLike, draws: Draws) -> Lengths:
    """Acceptance length of one condition.

    Args:
        accepted: `[S, P]` accepted drafts of each seed and prompt, bonus not counted.
        rounds: `[S, P]` verify rounds.
        draws: of `make_draws(S, P)`.
    """
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
    if not np.isfinite(value) or not len(defined):
        return Estimate(None)
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
