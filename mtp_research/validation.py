"""Every check that needs only the configuration, made before a model is loaded.

A fault line says which key, what was expected, what was got and the override that fixes it. Ranges
and choices stand beside the keys in `mtp_research.config`, and here is what reads them; the rules
between keys stand in `train_rules`, `eval_rules` and `placing_rules`.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import get_args, get_origin

from mtp_research.config import EvalConfig, TrainConfig
from mtp_research.config_evaluation import GRID_AXES
from mtp_research.eval_rules import eval_faults
from mtp_research.placing_rules import placing_faults
from mtp_research.runtime.errors import ConfigError
from mtp_research.train_rules import train_faults

ALIASES = {"spec.k": "spec.num_speculative_tokens"}

Field = dataclasses.Field[object]


def validate(config: TrainConfig | EvalConfig) -> None:
    """Check all ranges, choices and rules between keys.

    Raises:
        ConfigError: one line per fault.
    """
    faults = list(_value_faults(config))
    if not faults:
        rules = train_faults(config) if isinstance(config, TrainConfig) else eval_faults(config)
        faults = [*rules, *placing_faults(config)]
    if faults:
        raise ConfigError("\n".join(faults))


def check_values(config: object, *, section: str) -> None:
    """Check ranges and choices of one section, as the command line does.

    Args:
        config: a section of the schema, such as `EngineConfig`.
        section: its key, such as `engine`.

    Raises:
        ConfigError: one line per fault.
    """
    if faults := list(_value_faults(config, f"{section}.")):
        raise ConfigError("\n".join(faults))


def schema_keys(schema: type, prefix: str = "") -> dict[str, Field]:
    """Map every dotted key of a schema, such as `spec.policy`, to its dataclass field."""
    keys: dict[str, Field] = {}
    for item in dataclasses.fields(schema):
        key = f"{prefix}{item.name}"
        if isinstance(item.type, type) and dataclasses.is_dataclass(item.type):
            keys |= schema_keys(item.type, f"{key}.")
        else:
            keys[key] = item
    return keys


def legal_values(item: Field) -> str:
    """Describe what a key takes, for fault lines and for `--help`."""
    types = [part for part in get_args(item.type) if part is not NoneType]
    is_union = get_origin(item.type) not in (list, tuple, dict)
    kind = types[0] if is_union and types else item.type  # `list[int] | None` is a list
    none = " or null" if is_union and NoneType in get_args(item.type) else ""
    if get_origin(kind) in (list, tuple):
        return f"a list, each {_one_value(item, get_args(kind)[0])}{',' if none else ''}{none}"
    if get_origin(kind) is dict:
        return f"a mapping{none}"
    return _one_value(item, kind) + none


def _one_value(item: Field, kind: object) -> str:
    if choices := item.metadata.get("choices"):
        return " | ".join(sorted(choices))
    number = {int: "an integer", float: "a number"}.get(kind) if isinstance(kind, type) else None
    if number is not None and "low" in item.metadata:
        low, high = item.metadata["low"], item.metadata["high"]
        interval = f"above {low:g} up to {high:g}" if _is_open(item) else f"in {low}..{high}"
        return f"{number} {interval}"
    if kind is bool:
        return "true or false"
    return number or "text"


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `; nearest: a, b` for the closest valid names, or nothing when none is close."""
    known = sorted(set(choices))
    tail = word.rsplit(".", 1)[-1]
    tails = {name.rsplit(".", 1)[-1] for name in known}
    close_tails = difflib.get_close_matches(tail, sorted(tails), n=1, cutoff=0.75)
    found = [name for name in known if name.rsplit(".", 1)[-1] in close_tails]
    found += difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    names = list(dict.fromkeys(found))[:3]
    return f"; nearest: {', '.join(names)}" if names else ""


def fault_line(key: str, item: Field, value: object) -> str:
    """Compose the line for a value that a key does not take."""
    if key in GRID_AXES:  # a value of a list: say it of the key that takes one
        key = GRID_AXES[key]
        item = schema_keys(EvalConfig)[key]
    short = next((alias for alias, full in ALIASES.items() if full == key), key)
    line = f"{key} must be {legal_values(item)}, got {value}"
    if choices := item.metadata.get("choices"):
        return f"{line}{nearest(str(value), choices)}."
    if "low" not in item.metadata:
        return f"{line}."
    bounded = item.default
    if isinstance(value, int | float) and not isinstance(bounded, NoneType) and value == value:
        bounded = min(max(value, item.metadata["low"]), item.metadata["high"])
    if _is_open(item) and bounded == item.metadata["low"]:
        bounded = item.default
    return f"{line}; set {short}={'null' if bounded is None else bounded}."


def _is_open(item: Field) -> bool:
    return bool(item.metadata.get("open_low"))


def _value_faults(config: object, prefix: str = "") -> Iterator[str]:
    assert dataclasses.is_dataclass(config), f"{prefix} must be a dataclass, got {type(config)}"
    for item in dataclasses.fields(config):
        value, key = getattr(config, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            yield from _value_faults(value, f"{key}.")
        elif value is None and NoneType in get_args(item.type):
            continue
        elif "low" in item.metadata:
            low, high = item.metadata["low"], item.metadata["high"]
            for number in value if isinstance(value, list) else [value]:
                if not (low <= number <= high) or (_is_open(item) and number == low):
                    yield fault_line(key, item, number)
        elif "choices" in item.metadata:
            for choice in value if isinstance(value, list) else [value]:
                if choice not in item.metadata["choices"]:
                    yield fault_line(key, item, choice)
