"""What a price study refuses to be asked, and to call done; its figures as scalars.

Beside `fault_price`, which decodes. Letter: K drafts per step.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from mtp_research.config import EvalConfig
from mtp_research.config_choices import CLEAN_POLICIES, POLICIES
from mtp_research.errors import ConfigError, IntegrityError
from mtp_research.evaluation.fault_study import UNFINISHED, FaultStudy
from mtp_research.evaluation.fault_table import price_rows
from mtp_research.validation import schema_keys

_UNCLEAN = [name for name in POLICIES if name not in CLEAN_POLICIES]
# What a study reads: these sections but for one key, and these keys. All else keeps its default.
_READ_SECTIONS = ("model", "engine", "prompts", "logger", "seed", "output_dir", "baseline", "task")
_NOT_READ = "model.tp_plan"
_READ_KEYS = (
    "spec.policy",
    "spec.head",
    "spec.num_speculative_tokens",
    "spec.verify",  # checked on its own
    "grid.head",
    "grid.num_speculative_tokens",
    "sampling.temperature",
    "sampling.max_new_tokens",
)
_FIXED_KEYS = {"engine.audit": True, "engine.audit_every": 1}  # every slot is looked at


def check_asked(config: EvalConfig, pairs: Sequence[tuple[str | None, int]]) -> None:
    """Refuse what a study cannot measure, before anything is loaded.

    Raises:
        ConfigError: no unclean policy, a sampled decoding or lossy rule, no trained heads, or a key
            that a study does not read.
    """
    if set(config.spec.policy) <= set(CLEAN_POLICIES):
        raise ConfigError(
            f"spec.policy must name an unclean policy, got {config.spec.policy}; "
            f"set spec.policy=[{','.join(_UNCLEAN)}]."
        )
    if config.sampling.temperature > 0:
        raise ConfigError(
            f"sampling.temperature must be 0 for task=fault_price, got "
            f"{config.sampling.temperature}; set sampling=greedy."
        )
    if config.spec.verify not in ("auto", "greedy"):
        raise ConfigError(
            f"spec.verify must be greedy for task=fault_price, got {config.spec.verify}; "
            "set spec.verify=greedy."
        )
    _check_read(config)
    for head, num_drafts in pairs:
        if head in (None, "oracle") or num_drafts == 0:
            raise ConfigError(
                f"spec.head and spec.k must be trained heads and at least 1 for task=fault_price, "
                f"got {head} and {num_drafts}; set spec.head=PATH spec.k=3."
            )


def require_outputs(study: FaultStudy, output_dir: Path) -> None:
    """Say which prompts are in no figure; refuse a study with a condition that has none.

    Raises:
        IntegrityError: names the conditions.
    """
    empty = []
    for one in study.conditions:
        label = "{} K={} {}".format(*one.key)
        num_unfinished = one.text_sha256.count(UNFINISHED)
        if num_unfinished == len(one.text_sha256):
            empty.append(label)
        elif num_unfinished:
            sys.stderr.write(
                f"warning: {num_unfinished} of {len(one.text_sha256)} prompts did not finish under "
                f"{label} and are in none of its lengths\n"
            )
    if empty:
        raise IntegrityError(
            f"expected finished generations, got none for {', '.join(empty)}: the target's logits "
            f"are not finite; check model.path and model.dtype. Results: {output_dir}"
        )


def study_scalars(study: FaultStudy) -> dict[str, float | str]:
    """Acceptance length and loss of every condition, for the summary of a W&B run."""
    scalars: dict[str, float | str] = {}
    for row in price_rows(study):
        label = "{} K={} {}".format(*row.condition.key)
        found = {"acceptance_length": row.length, "lost": row.lost}
        for name, figure in found.items():
            if figure is not None and figure.value is not None:
                scalars[f"{label}/{name}"] = figure.value
    return scalars


def _check_read(config: EvalConfig) -> None:
    """A key that a study ignores is a fault, not a silent no-op; one line a key."""
    faults = []
    for key, item in schema_keys(EvalConfig).items():
        is_read = key in _READ_KEYS or key.split(".")[0] in _READ_SECTIONS
        if is_read and key != _NOT_READ and key not in _FIXED_KEYS:
            continue
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        expected = _FIXED_KEYS.get(key, default)
        if (value := attrgetter(key)(config)) != expected:
            typed = json.dumps(expected).strip('"')
            faults.append(
                f"{key} must be {typed} for task=fault_price, got {value}; set {key}={typed}."
            )
    if faults:
        raise ConfigError("\n".join(faults))
