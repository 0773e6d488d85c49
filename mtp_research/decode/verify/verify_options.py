"""Which settings of the lossy rules go together, and the rates of synthetic acceptance; no torch.

The settings and their ranges stand in `VerifyOptions` of the schema. Letters: K drafts per step.
"""

import dataclasses
import itertools
import math
from typing import Literal, cast

from mtp_research.config.ranges import check_values
from mtp_research.config.schema import VERIFY_RULES, VerifyOptions
from mtp_research.decode.verify.profile_reader import profile_rates
from mtp_research.runtime.errors import ConfigError

LengthSchedule = Literal["minimum_variance", "geometric"]


def check_options(name: str, options: VerifyOptions, *, num_speculative_tokens: int) -> None:
    """Refuse settings out of range, settings that the rule would ignore, and those it misses."""
    check_values(options, section="spec")
    thinking, rates = options.relaxed_thinking_token_ids, options.synthetic_rates
    if thinking is not None and len(thinking) != 2:
        raise ConfigError(
            "spec.relaxed_thinking_token_ids must hold the begin and the end token, got "
            f"{thinking}; set spec.relaxed_thinking_token_ids=[BEGIN,END]."
        )
    if any(before < after for before, after in itertools.pairwise(rates)):
        raise ConfigError(
            f"spec.synthetic_rates must be falling in [0, 1], got {rates}; "
            "set spec.synthetic_rates."
        )
    if options.synthetic_schedule == "geometric" and options.synthetic_length is None:
        raise ConfigError(
            "spec.synthetic_schedule must be minimum_variance without synthetic_length, got "
            "geometric; set spec.synthetic_length."
        )
    if name not in ("auto", *VERIFY_RULES):
        return  # what a rule of one's own reads of the settings is its own affair
    usual = VerifyOptions()
    for field in dataclasses.fields(VerifyOptions):
        value = getattr(options, field.name)
        is_set = value != getattr(usual, field.name) and value != ()
        if is_set and not field.name.startswith(f"{name}_"):
            raise ConfigError(
                f"spec.{field.name} must be left alone for spec.verify={name}, "
                f"got {value}; set spec.verify={field.name.split('_')[0]}."
            )
    if name == "synthetic":
        synthetic_rates(options, num_speculative_tokens=num_speculative_tokens)


def synthetic_rates(options: VerifyOptions, *, num_speculative_tokens: int) -> tuple[float, ...]:
    """Chance that drafts 1..j are all accepted, for j = 1..K: given, of a length or a profile."""
    if options.synthetic_profile is not None:
        if options.synthetic_rates or options.synthetic_length is not None:
            raise ConfigError(
                "spec.synthetic_profile must be null where synthetic_rates or synthetic_length is "
                f"set, got {options.synthetic_profile}; set one of them."
            )
        return profile_rates(
            options.synthetic_profile,
            condition=options.synthetic_condition,
            num_speculative_tokens=num_speculative_tokens,
        )
    if options.synthetic_condition is not None:
        raise ConfigError(
            "spec.synthetic_condition must be null without synthetic_profile, got "
            f"{options.synthetic_condition}; set spec.synthetic_profile=FILE."
        )
    if options.synthetic_length is None:
        if len(options.synthetic_rates) == num_speculative_tokens:
            return tuple(options.synthetic_rates)
        raise ConfigError(
            f"spec.synthetic_rates must hold spec.k={num_speculative_tokens} rates, got "
            f"{len(options.synthetic_rates)}; set them, spec.synthetic_length or "
            "spec.synthetic_profile."
        )
    if options.synthetic_rates:
        raise ConfigError(
            "spec.synthetic_rates must be empty where synthetic_length is set, got "
            f"{options.synthetic_rates}; set one of them."
        )
    return rates_of_length(
        options.synthetic_length,
        num_speculative_tokens=num_speculative_tokens,
        schedule=cast(LengthSchedule, options.synthetic_schedule),
    )


def with_rates(options: VerifyOptions, *, num_speculative_tokens: int) -> VerifyOptions:
    """The same options with rates in the place of a profile or a length.

    No step reads a file then, and one that verifies fewer than K drafts takes the first rates of K.
    """
    if options.synthetic_profile is None and options.synthetic_length is None:
        return options
    rates = synthetic_rates(options, num_speculative_tokens=num_speculative_tokens)
    return dataclasses.replace(
        options,
        synthetic_rates=list(rates),
        synthetic_length=None,
        synthetic_profile=None,
        synthetic_condition=None,
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
