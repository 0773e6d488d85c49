"""The command line's grammar: which `key=value` words `train.py` and `eval.py` take, and `--help`.

Names are checked here, before Hydra is imported: a mistyped one is answered with its neighbours.
A word selects a YAML file of a group (`model=lab_tiny`), sets a key (`seed=1`,
`spec.k=3`), or adds an entry to a mapping (`model.architecture.num_hidden_layers=2`).
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import get_origin

from mtp_research.config import EvalConfig, TrainConfig
from mtp_research.config_evaluation import GRID_AXES
from mtp_research.runtime.errors import ConfigError
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from mtp_research.validation import ALIASES, legal_values, nearest, schema_keys

CONF_DIR = REPOSITORY_ROOT / "conf"
Schema = type[TrainConfig] | type[EvalConfig]
ENTRIES: dict[Schema, str] = {TrainConfig: "train", EvalConfig: "eval"}
_AXIS_OF = {key: axis for axis, key in GRID_AXES.items()}
EXAMPLES = {
    "train": (
        "python train.py",
        "python train.py experiment=train_ttt_n1",
        "python train.py task=target model=lab_tiny",
        "python train.py trainer.max_steps=50 seed=1 output_dir=runs/first",
    ),
    "eval": (
        "python eval.py spec.k=3",
        "python eval.py spec.k=5 spec.policy=training spec.head=runs/first/head",
        "python eval.py spec=standard sampling=warm",
        "python eval.py spec.k=[1,3] engine.max_num_requests=[1,16] timing.passes=2",
        "python eval.py experiment=eval_oracle",
    ),
}


def group_choices(schema: Schema) -> dict[str, list[str]]:
    """Map each config group of an entry to its YAML names; an experiment belongs to one entry."""
    names = [item.name for item in dataclasses.fields(schema)] + ["experiment"]
    found = {name: sorted(path.stem for path in (CONF_DIR / name).glob("*.yaml")) for name in names}
    own = {*names, "defaults"}
    found["experiment"] = [n for n in found["experiment"] if _names_in_experiment(n) <= own]
    return {name: choices for name, choices in found.items() if choices}


def _names_in_experiment(name: str) -> set[str]:
    """Groups and sections that an experiment sets, read without a YAML parser for --help's sake."""
    text = (CONF_DIR / "experiment" / f"{name}.yaml").read_text(encoding="utf8")
    return set(re.findall(r"(?:^|override /)(\w+):", text, re.MULTILINE))


def check_overrides(schema: Schema, words: Sequence[str]) -> list[str]:
    """Check the names in the words of a command line and spell them as Hydra expects.

    Args:
        schema: `TrainConfig` or `EvalConfig`.
        words: `key=value` overrides.

    Returns:
        The overrides with aliases replaced, a single policy made a list, and a list for a key that
        takes one value put on its axis of `grid`.

    Raises:
        ConfigError: one line per unknown key or group choice, with the nearest valid names.
    """
    spelled, faults = [], []
    for word in words:
        key, has_value, value = word.lstrip("+").partition("=")
        fault = _name_fault(schema, key, value) if has_value else _shape_fault(word)
        if fault:
            faults.append(fault)
            continue
        full = ALIASES.get(key, key)
        axis = _AXIS_OF.get(full) if schema is EvalConfig else None
        if axis is None:
            spelled.append(_spell(schema, full, value))
        elif value.startswith("[") and value != "[]":
            spelled.append(_spell_axis(axis, value, is_text=full == "spec.head"))
        else:  # one value, whatever lists an experiment has
            spelled += [_spell(schema, full, value), f"{axis}=[]"]
    if faults:
        raise ConfigError("\n".join(faults))
    return spelled


def help_text(schema: Schema) -> str:
    """Describe an entry: examples, groups with their choices, keys with their legal values."""
    entry = ENTRIES[schema]
    lines = [f"usage: python {entry}.py [group=choice ...] [key=value ...]", "", "examples:"]
    lines += [f"  {example}" for example in EXAMPLES[entry]]
    lines += ["", "groups (YAML files under conf/):"]
    for group, choices in group_choices(schema).items():
        lines.append(f"  {group}={' | '.join(choices)}")
    lines += ["", "keys (spec.k is short for spec.num_speculative_tokens; what each means stands"]
    lines += ["beside it in mtp_research/config*.py; --cfg job prints the values of a command):"]
    for key, item in schema_keys(schema).items():
        lines.append(f"  {key}: {legal_values(item)}{_default(item)}")
    lines += ["", "flags:", "  --help  this text"]
    lines += ["  --cfg job  print the resolved configuration and stop"]
    lines += ["  --traceback  show where an error came from"]
    return "\n".join(lines)


def _default(item: dataclasses.Field) -> str:
    """The schema's default; the YAML groups may choose another."""
    value = item.default
    if item.default_factory is not dataclasses.MISSING:
        value = item.default_factory()
    if value is dataclasses.MISSING:
        return ""
    if value is None or isinstance(value, bool):
        return f" (default {'null' if value is None else str(value).lower()})"
    if isinstance(value, list | tuple):
        return f" (default [{','.join(map(str, value))}])"
    return f" (default {value or {}})" if isinstance(value, dict) else f" (default {value})"


def _shape_fault(word: str) -> str:
    return f"an argument must read NAME=VALUE, got {word}; --help lists the names."


def _name_fault(schema: Schema, key: str, value: str) -> str | None:
    """The fault line of an unknown key or group choice, None when the name is known."""
    groups, keys = group_choices(schema), schema_keys(schema)
    if key in groups:
        choices = groups[key]
        if value in choices or (key == "experiment" and value == "null"):
            return None
        options = ", ".join(choices)
        return f"{key} must be one of {options}, got {value}{nearest(value, choices)}."
    if ALIASES.get(key, key) in keys or _mapping_of(schema, key):
        return None
    entry = ENTRIES[schema]
    for other, name in ENTRIES.items():
        if ALIASES.get(key, key) in schema_keys(other) or key in group_choices(other):
            return f"{key} belongs to {name}.py, got it in {entry}.py; run python {name}.py."
    known = [*keys, *groups, *(alias for alias, full in ALIASES.items() if full in keys)]
    return f"{key} is not a key of {entry}.py{nearest(key, known)}; --help lists all keys."


def _mapping_of(schema: Schema, key: str) -> str | None:
    """The mapping key that `key` adds an entry to, such as model.architecture; None without one."""
    for known, item in schema_keys(schema).items():
        if get_origin(item.type) is dict and key.startswith(f"{known}."):
            return known
    return None


def _spell_axis(axis: str, value: str, *, is_text: bool) -> str:
    """A list for a grid axis; texts are quoted, because paths may hold spaces."""
    if not is_text:
        return f"{axis}={value}"
    words = [word.strip() for word in value.removeprefix("[").removesuffix("]").split(",")]
    return f"{axis}=[{','.join(map(_quote, words))}]"


def _quote(text: str) -> str:
    """A text as Hydra reads it; null and quoted texts are left as they are."""
    if text == "null" or text.startswith(("'", '"')):
        return text
    return "'" + text.replace("'", "\\'") + "'"


def _spell(schema: Schema, key: str, value: str) -> str:
    """Write one override so that Hydra's grammar reads it as it was meant."""
    if _mapping_of(schema, key):
        return f"++{key}={value}"
    item = schema_keys(schema).get(key)
    if item is None:
        return f"{key}={value}"
    if get_origin(item.type) is dict:  # its entries are new keys, which Hydra wants to hear
        return f"++{key}={value}"
    if get_origin(item.type) in (list, tuple) and not value.startswith("["):
        value = f"[{value}]"
    # Paths may hold spaces, commas and brackets.
    is_text = item.type in (str, str | None) and "choices" not in item.metadata
    return f"{key}={_quote(value) if is_text else value}"
