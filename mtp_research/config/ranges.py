"""What a key takes: how the schema states it, how it is checked and how a fault line says it.

A dataclass field states its range or its choices in its metadata (`within`, `above`, `one_of`); the
comment at it is its meaning. A fault line says which key, what was expected, what was got and
the override that fixes it. Rules between keys stand in `rules`.
"""

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from types import NoneType
from typing import TypeVar, get_args, get_origin

from mtp_research.runtime.errors import ConfigError, nearest

ALIASES = {"spec.k": "spec.num_speculative_tokens"}

Field = dataclasses.Field[object]
Number = TypeVar("Number", int, float, int | None, float | None)
Choice = TypeVar("Choice", str, str | None)


def within(default: Number, low: float, high: float) -> Number:
    """A key in [low, high]; None is legal where the annotation allows it."""
    return field(default=default, metadata={"low": low, "high": high})


def above(default: float, low: float, high: float) -> float:
    """A key in (low, high]."""
    return field(default=default, metadata={"low": low, "high": high, "open_low": True})


def one_of(default: Choice, *choices: str) -> Choice:
    """A key that takes one of the choices; None is legal where the annotation allows it."""
    return field(default=default, metadata={"choices": tuple(sorted(choices))})


def axis(section: type, key: str) -> list:
    """A key that takes a list of what `key`, a field of `section`, takes one of."""
    single = section.__dataclass_fields__[key.rsplit(".", 1)[-1]]
    metadata = {**single.metadata, "axis_of": key, "single": single}
    return field(default_factory=list, metadata=metadata)


def check_values(config: object, *, section: str = "") -> None:
    """Check ranges and choices of a dataclass, whose key is `section`, and of its sections."""
    if faults := list(_value_faults(config, f"{section}." if section else "")):
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


def meanings(schema: type, prefix: str = "") -> dict[str, str]:
    """Map every dotted key of a schema to the comment at its field: above, then beside."""
    found: dict[str, str] = {}
    for item in dataclasses.fields(schema):
        if isinstance(item.type, type) and dataclasses.is_dataclass(item.type):
            found |= meanings(item.type, f"{prefix}{item.name}.")
    for base in schema.__bases__:
        found |= meanings(base, prefix) if dataclasses.is_dataclass(base) else {}
    lines = Path(inspect.getfile(schema)).read_text(encoding="utf8").splitlines()
    classes = [node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef)]
    (body,) = [node.body for node in classes if node.name == schema.__name__]
    for node in body:
        if not isinstance(node, ast.AnnAssign):
            continue
        first = node.lineno - 1
        while lines[first - 1].strip().startswith("#"):
            first -= 1
        comments = [line.partition("# ")[2] for line in lines[first : node.end_lineno]]
        found[prefix + ast.unparse(node.target)] = " ".join(filter(None, comments))
    return found


def legal_values(item: Field) -> str:
    """Describe what a key takes, for fault lines and for `--help`."""
    may_grow = isinstance(item.metadata.get("choices"), Mapping)
    return (_legal_values.__wrapped__ if may_grow else _legal_values)(item)


@functools.cache  # asked for every number of every request, and fields live as long as the process
def _legal_values(item: Field) -> str:
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


def in_own_words(message: str, options: Mapping[str, str]) -> str:
    """A message with a command's own options in place of keys of the configuration."""
    for key, option in options.items():
        found = rf"(?<![\w.]){re.escape(key)}"
        message = re.sub(rf"{found}\b(?!=)", option, re.sub(f"{found}=", f"{option} ", message))
    return message


def fault_line(key: str, item: Field, value: object) -> str:
    """Compose the line for a value that a key does not take."""
    if "axis_of" in item.metadata:  # a value of a list: say it of the key that takes one
        key, item = item.metadata["axis_of"], item.metadata["single"]
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


def _value_faults(config: object, prefix: str) -> Iterator[str]:
    assert dataclasses.is_dataclass(config), f"{prefix} must be a dataclass, got {type(config)}"
    for item in dataclasses.fields(config):
        value, key = getattr(config, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            yield from _value_faults(value, f"{key}.")
        elif value is not None or NoneType not in get_args(item.type):
            values = value if isinstance(value, list | tuple) else [value]
            yield from (fault_line(key, item, one) for one in values if not _is_legal(item, one))


def _is_legal(item: Field, value: object) -> bool:
    """None counts as a number out of range and as no choice: lists hold none of it."""
    limits = item.metadata
    if "choices" in limits:
        return value in tuple(limits["choices"])  # also a value that no table can look up
    if "low" not in limits:
        return True
    assert isinstance(value, int | float), f"{item.name} must be a number, got {value!r}"
    return limits["low"] <= value <= limits["high"] and not (
        _is_open(item) and value == limits["low"]
    )
