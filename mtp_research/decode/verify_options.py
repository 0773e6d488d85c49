"""Settings of the lossy verification rules; plain values, importable without torch.

Letters: K drafts per step.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Literal

from mtp_research.errors import ConfigError

LengthSchedule = Literal["minimum_variance", "geometric"]


@dataclass(frozen=True)
class VerifyOptions:
    """Settings of the lossy rules; each is read by the rule that its name begins with.

    Attributes:
        relaxed_top_n: accept a draft among the target's n most probable tokens, >= 1.
        relaxed_delta: ... whose probability is at most this far below the best one's, in [0, 1].
        relaxed_thinking_token_ids: (begin, end) tokens between which the rule holds; elsewhere, and
            None means nowhere else, drafts are verified greedily.
        typical_epsilon: accept a draft of probability above min(epsilon, delta * exp(-entropy)),
            in (0, 1).
        typical_delta: see `typical_epsilon`, > 0.
        synthetic_rates: chance that drafts 1..j are all accepted, for j = 1..K; falling, in [0, 1].
        synthetic_length: instead of rates, the mean acceptance length, in [1, K + 1].
        synthetic_schedule: rates that make `synthetic_length`, see `rates_of_length`.
    """

    relaxed_top_n: int = 10
    relaxed_delta: float = 0.6
    relaxed_thinking_token_ids: tuple[int, int] | None = None
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    synthetic_rates: tuple[float, ...] = ()
    synthetic_length: float | None = None
    synthetic_schedule: LengthSchedule = "minimum_variance"

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: names the field, the range and the value.
        """
        falling = (1.0, *self.synthetic_rates, 0.0)
        checks = (
            ("relaxed_top_n", self.relaxed_top_n >= 1, ">= 1"),
            ("relaxed_delta", 0 <= self.relaxed_delta <= 1, "in [0, 1]"),
            ("typical_epsilon", 0 < self.typical_epsilon < 1, "in (0, 1)"),
            ("typical_delta", self.typical_delta > 0, "> 0"),
            (
                "synthetic_rates",
                all(before >= after for before, after in itertools.pairwise(falling)),
                "falling in [0, 1]",
            ),
            (
                "synthetic_length",
                self.synthetic_length is None or 1 <= self.synthetic_length < math.inf,
                ">= 1 or None",
            ),
            (
                "synthetic_schedule",
                self.synthetic_schedule in ("geometric", "minimum_variance")
                and (self.synthetic_length is not None or self.synthetic_schedule != "geometric"),
                "one of ['geometric', 'minimum_variance'], the latter without synthetic_length",
            ),
        )
        for name, holds, expected in checks:
            if not holds:
                raise ConfigError(
                    f"spec.{name} must be {expected}, got {getattr(self, name)}; set spec.{name}."
                )


def check_options(name: str, options: VerifyOptions, *, num_speculative_tokens: int) -> None:
    """Refuse settings that the rule would ignore, and `synthetic` without rates or length.

    Raises:
        ConfigError: names the setting.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default and not field.name.startswith(f"{name}_"):
            raise ConfigError(
                f"spec.{field.name} must be left alone for spec.verify={name}, "
                f"got {value}; set spec.verify={field.name.split('_')[0]}."
            )
    if name == "synthetic":
        synthetic_rates(options, num_speculative_tokens=num_speculative_tokens)


def synthetic_rates(options: VerifyOptions, *, num_speculative_tokens: int) -> tuple[float, ...]:
    """Chance that drafts 1..j are all accepted, for j = 1..K, given as such or as a mean length.

    Raises:
        ConfigError: neither or both are given, not K rates, or a length outside [1, K + 1].
    """
    if options.synthetic_length is None:
        if len(options.synthetic_rates) == num_speculative_tokens:
            return options.synthetic_rates
        raise ConfigError(
            f"spec.synthetic_rates must hold spec.k={num_speculative_tokens} rates, got "
            f"{len(options.synthetic_rates)}; set them, or spec.synthetic_length."
        )
    if options.synthetic_rates:
        raise ConfigError(
            "spec.synthetic_rates must be empty where synthetic_length is set, got "
            f"{options.synthetic_rates}; set one of them."
        )
    return rates_of_length(
        options.synthetic_length,
        num_speculative_tokens=num_speculative_tokens,
        schedule=options.synthetic_schedule,
    )


def rates_of_length(
    acceptance_length: float, *, num_speculative_tokens: int, schedule: LengthSchedule
) -> tuple[float, ...]:
    """Synthetic rates with a given mean acceptance length.

    Args:
        acceptance_length: mean tokens per step, bonus counted, in [1, K+1].
        num_speculative_tokens: K.
        schedule: `minimum_variance` accepts the two counts around the mean and no others;
            `geometric` gives every draft the same chance once the ones before it are accepted.

    Returns:
        Chance that drafts 1..j are all accepted, for j = 1..K; they sum to the length minus one.

    Raises:
        ConfigError: the length is out of range.

    Example:
        length 2.5, K = 3: `minimum_variance` gives (1, 0.5, 0), lengths 2 and 3 half the time each.
    """
    if not 1 <= acceptance_length <= num_speculative_tokens + 1:
        raise ConfigError(
            f"the acceptance length must be in [1, K + 1 = {num_speculative_tokens + 1}], "
            f"got {acceptance_length}; lower it or raise spec.k."
        )
    mean = acceptance_length - 1
    steps = range(num_speculative_tokens)
    if schedule == "minimum_variance":
        return tuple(min(max(mean - step, 0.0), 1.0) for step in steps)
    chance = _geometric_chance(mean, num_speculative_tokens)
    return tuple(chance ** (step + 1) for step in steps)


def _geometric_chance(mean: float, num_drafts: int) -> float:
    """The c in [0, 1] with c + c^2 + ... + c^K = mean, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if math.fsum(middle ** (step + 1) for step in range(num_drafts)) < mean:
            low = middle
        else:
            high = middle
    return high
