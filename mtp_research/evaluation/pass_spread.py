"""Tokens per second of a condition as tables show them: the median pass, the slowest, the fastest.

What each rate counts: `speed.Speed`.
"""

from mtp_research.evaluation.bootstrap import Estimate
from mtp_research.evaluation.speed import Speed


def end_to_end_rate(speed: Speed) -> Estimate:
    """Over whole passes."""
    return Estimate(
        speed.tokens_per_s_end_to_end,
        speed.tokens_per_s_end_to_end_low,
        speed.tokens_per_s_end_to_end_high,
    )


def decode_rate(speed: Speed) -> Estimate:
    """Over the steps without prompt rows."""
    return Estimate(
        speed.tokens_per_s_decode, speed.tokens_per_s_decode_low, speed.tokens_per_s_decode_high
    )


def full_rate(speed: Speed) -> Estimate:
    """Over those of them that took every place of the batch."""
    return Estimate(
        speed.tokens_per_s_full, speed.tokens_per_s_full_low, speed.tokens_per_s_full_high
    )
