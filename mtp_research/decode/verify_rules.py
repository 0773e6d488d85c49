"""Verification rules by name: the one table that decoder, configuration and verdicts read."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from mtp_research.decode.verify import (
    VerifyInputs,
    VerifyOptions,
    VerifyOutput,
    verify_greedy,
    verify_standard,
)
from mtp_research.decode.verify_block import verify_block
from mtp_research.decode.verify_lossy import verify_relaxed, verify_synthetic, verify_typical
from mtp_research.errors import ConfigError


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


def check_options(name: str, options: VerifyOptions, *, num_speculative_tokens: int) -> None:
    """Refuse settings that the rule would ignore, and `synthetic` without its rates.

    Raises:
        ConfigError: names the setting.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default and not field.name.startswith(f"{name}_"):
            raise ConfigError(
                f"VerifyOptions.{field.name} must be left alone for spec.verify={name}, "
                f"got {value}; set spec.verify={field.name.split('_')[0]}."
            )
    num_rates = len(options.synthetic_rates)
    if name == "synthetic" and num_rates != num_speculative_tokens:
        raise ConfigError(
            f"VerifyOptions.synthetic_rates must hold spec.k={num_speculative_tokens} rates, got "
            f"{num_rates}; verify_lossy.rates_of_length makes them from a mean length."
        )
