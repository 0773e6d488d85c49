"""The command line's grammar: which `key=value` words `train.py` and `eval.py` take, and `--help`.

Names are checked here, before Hydra is imported: a mistyped one is answered with its neighbours.
A word selects a YAML file of a group (`model=lab_tiny`), sets a key (`seed=1`,
`spec.k=3`), or adds an entry to a mapping (`model.architecture.num_hidden_layers=2`).
"""

import dataclasses
from collections.abc import Sequence
from typing import get_origin

from mtp_research.config import EvalConfig, TrainConfig
from mtp_research.errors import ConfigError
from mtp_research.provenance import REPOSITORY_ROOT
from mtp_research.validation import ALIASES, legal_values, nearest, schema_keys

CONF_DIR = REPOSITORY_ROOT / "conf"
Schema = type[TrainConfig] | type[EvalConfig]
ENTRIES: dict[Schema, str] = {TrainConfig: "train", EvalConfig: "eval"}
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
        "python eval.py experiment=eval_oracle",
    ),
}


def group_choices(schema: Schema) -> dict[str, list[str]]:
    """Map each config group of an entry to its YAML names; an experiment belongs to one entry."""
    names = [item.name for item in dataclasses.fields(schema)] + ["experiment"]
    found = {name: sorted(path.stem for path in (CONF_DIR / name).glob("*.yaml")) for name in names}
    is_eval = ENTRIES[schema] == "eval"
    found["experiment"] = [n for n in found["experiment"] if n.startswith("eval_") == is_eval]
    return {name: choices for name, choices in found.items() if choices}


def check_overrides(schema: Schema, words: Sequence[str]) -> list[str]:
    """Check the names in the words of a command line and spell them as Hydra expects.

    Args:
        schema: `TrainConfig` or `EvalConfig`.
        words: `key=value` overrides.

    Returns:
        The overrides with aliases replaced and a single policy made a list.

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
        spelled.append(_spell(schema, ALIASES.get(key, key), value))
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
    lines += ["", "keys (spec.k is short for spec.num_speculative_tokens):"]
    for key, item in schema_keys(schema).items():
        lines.append(f"  {key}: {legal_values(item)}")
    lines += ["", "flags:", "  --help  this text"]
    lines += ["  --cfg job  print the resolved configuration and stop"]
    lines += ["  --traceback  show where an error came from"]
    return "\n".join(lines)


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
    # Paths may hold spaces, commas and brackets; null and quoted text are left as they are.
    is_text = item.type in (str, str | None) and "choices" not in item.metadata
    if is_text and value != "null" and not value.startswith(("'", '"')):
        value = "'" + value.replace("'", "\\'") + "'"
    return f"{key}={value}"
