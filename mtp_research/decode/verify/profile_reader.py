"""Reads `speculation_profile.json`: the acceptance of a measured run, to be replayed; no torch.

`evaluation.report.profile` writes the file. Rates are computed from its counts, and a file whose
own rates differ from them was edited or damaged. They are unconditional: p_i is the share of rounds
that accepted drafts 1..i, so that 1 + p_1 + ... + p_K is the acceptance length.

Letter: K drafts per step.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from mtp_research.runtime.errors import ConfigError, IntegrityError, escaped

PROFILE_FILE = "speculation_profile.json"
PROFILE_SCHEMA_VERSION = 1
_TOLERANCE = 1e-9  # of a stored rate to the one that the counts give


def profile_rates(
    path: str, *, condition: str | None, num_speculative_tokens: int
) -> tuple[float, ...]:
    """p_1..p_K of a condition of a profile; of one measured with more drafts the first K.

    Args:
        path: the file.
        condition: its label; None where only one condition has K drafts or more.
        num_speculative_tokens: K.

    Raises:
        ConfigError: no such file or condition, several that fit, fewer than K drafts, no rounds.
        IntegrityError: the file is damaged, or of another version.
    """
    measured = _read(Path(path))
    labels = ", ".join(escaped(label) for label in measured) or "none"
    if condition is not None and condition not in measured:
        raise ConfigError(
            f"spec.synthetic_condition must be a condition of {path} ({labels}), got "
            f"{condition}; set spec.synthetic_condition=LABEL."
        )
    named = list(measured) if condition is None else [condition]
    fitting = [label for label in named if len(measured[label]) >= num_speculative_tokens]
    if not fitting:
        most = max((len(measured[label]) for label in named), default=0)
        raise ConfigError(
            f"spec.synthetic_profile must hold rates of spec.k={num_speculative_tokens} drafts, "
            f"got at most {most} in {path}; lower spec.k or measure with more."
        )
    if len(fitting) > 1:
        raise ConfigError(
            f"spec.synthetic_profile must hold one condition of spec.k={num_speculative_tokens} "
            f"drafts or more, got {labels} in {path}; set spec.synthetic_condition=LABEL."
        )
    return measured[fitting[0]][:num_speculative_tokens]


def _read(path: Path) -> dict[str, tuple[float, ...]]:
    """p_1..p_K by label; a condition without rounds has none."""
    try:
        stored = json.loads(path.read_text(encoding="utf8"))
    except OSError as error:
        raise ConfigError(
            f"spec.synthetic_profile must be a {PROFILE_FILE}, got {path} ({error.strerror}); set "
            "spec.synthetic_profile=FILE."
        ) from None
    except (ValueError, RecursionError):
        raise IntegrityError(f"{path} is no readable profile; evaluate again.") from None
    version = stored.get("schema_version") if isinstance(stored, dict) else None
    if version != PROFILE_SCHEMA_VERSION or not isinstance(stored.get("conditions"), list):
        raise IntegrityError(
            f"{path}: expected a profile of schema_version {PROFILE_SCHEMA_VERSION}, got "
            f"{version!r}; evaluate again."
        )
    measured: dict[str, tuple[float, ...]] = {}
    for number, fields in enumerate(stored["conditions"], 1):
        rates = _rates(fields) if isinstance(fields, dict) else None
        if rates is None:
            raise IntegrityError(
                f"{path}: expected counts that give its rates, got others in condition {number}; "
                "the file was edited or damaged, evaluate again."
            )
        measured[str(fields["label"])] = rates
    return measured


def _rates(fields: Mapping[str, object]) -> tuple[float, ...] | None:
    """Rates from the counts; None where the fields are not counts or do not give their rates."""
    num_rounds, num_drafts = fields.get("num_rounds"), fields.get("num_speculative_tokens")
    accepted, stored = (
        fields.get(name) for name in ("num_accepted_per_position", "acceptance_rate_per_position")
    )
    if not isinstance(accepted, list) or not isinstance(stored, list) or "label" not in fields:
        return None
    if any(type(count) is not int for count in (num_rounds, num_drafts, *accepted)):
        return None
    counts = cast("Sequence[int]", [num_rounds, *accepted, 0])
    is_falling = all(before >= after for before, after in itertools.pairwise(counts))
    if not is_falling or len(accepted) != num_drafts:
        return None
    rates = tuple(count / counts[0] for count in accepted) if num_rounds else ()
    numbers = [rate for rate in stored if isinstance(rate, int | float)]
    if len(numbers) != len(stored) or len(stored) != len(rates):
        return None
    is_equal = all(map(lambda a, b: math.isclose(a, b, abs_tol=_TOLERANCE), rates, numbers))
    return rates if is_equal else None
