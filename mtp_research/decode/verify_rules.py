"""Verification rules by name: the one table that decoder, configuration and verdicts read."""

from collections.abc import Callable
from typing import NamedTuple

from mtp_research.decode.verify import (
    VerifyInputs,
    VerifyOutput,
    verify_greedy,
    verify_standard,
)
from mtp_research.decode.verify_block import verify_block
from mtp_research.decode.verify_lossy import (
    verify_relaxed,
    verify_synthetic,
    verify_typical,
)


class Rule(NamedTuple):
    """A verification rule.

    Attributes:
        function: the rule.
        lossless: the text is the target's: the argmax, or distributed exactly as its samples.
        samples: a temperature above 0 means something to it; otherwise it is refused.
    """

    function: Callable[[VerifyInputs], VerifyOutput]
    lossless: bool
    samples: bool


RULES: dict[str, Rule] = {
    "greedy": Rule(verify_greedy, lossless=True, samples=False),
    "standard": Rule(verify_standard, lossless=True, samples=True),
    "block": Rule(verify_block, lossless=True, samples=True),
    "relaxed": Rule(verify_relaxed, lossless=False, samples=False),
    "typical": Rule(verify_typical, lossless=False, samples=True),
    "synthetic": Rule(verify_synthetic, lossless=False, samples=True),
}
LOSSLESS_RULES = frozenset(name for name, rule in RULES.items() if rule.lossless)
