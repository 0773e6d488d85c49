"""The words of a command line: which keys and YAML files an entry takes, and `--help`.

Names are checked here, before Hydra sees them: a mistyped one is answered with its neighbours. A
word selects a YAML file of a group (`model=lab_tiny`), sets a key (`seed=1`, `spec.k=3`), adds an
entry to a mapping (`model.architecture.num_hidden_layers=2`), takes one away (`~experiment`), or is
Hydra's own (`hydra.verbose=true`), which goes through as it is.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, get_origin

from mtp_research.config.ranges import ALIASES, legal_values, meanings, schema_keys
from mtp_research.config.schema import GRID_AXES, EvalConfig, TrainConfig
from mtp_research.runtime.errors import ConfigError, nearest
from mtp_research.runtime.provenance import redact_words, shipped_root

CONF_DIR = shipped_root() / "conf"
Schema = type[TrainConfig] | type[EvalConfig]
ENTRIES: dict[Schema, str] = {TrainConfig: "train", EvalConfig: "eval"}
_AXIS_OF = {key: axis for axis, key in GRID_AXES.items()}
_OUTPUT_KEYS = ("hydra.run.dir", "hydra.sweep.dir")
EXAMPLES = {
    "train": (
        "python train.py",
        "python train.py experiment=train_ttt_n1",
        "python train.py task=target model=lab_tiny",
        "python train.py trainer.max_steps=50 seed=1 output_dir=runs/first",
        "python train.py -m seed=0,1,2 output_dir=runs/seeds",
    ),
    "eval": (
        "python eval.py spec.k=3",
        "python eval.py spec.k=5 spec.policy=training spec.head=runs/first/head",
        "python eval.py spec=standard sampling=warm",
        "python eval.py spec.k=[1,3] engine.max_num_requests=[1,16] timing.passes=2",
        "python eval.py -m spec.k=1,3 model=lab_tiny,lab_small",
        "python eval.py experiment=eval_oracle",
    ),
}
FLAGS = """flags:
  --help  this text
  -m  many runs, one after the other: each combination of a=1,2 b=x,y in a folder of its own
      (a list, spec.k=[1,3], is one run whose conditions are paired)
  --cfg job | hydra | all  print the configuration as YAML and stop; --package KEY: a part of it
  --resolve  with --cfg: interpolations replaced by their values
  --info [all | config | defaults | defaults-tree | plugins | searchpath]  what Hydra composed
  --config-dir DIR  one more folder of YAML groups; --config-path DIR: in place of conf/
  --config-name NAME  another primary file, such as one that --cfg job wrote
  -sc install=bash  tab completion: eval "$(python eval.py -sc install=bash)"
  --hydra-help  Hydra's own help
  --traceback  show where an error came from"""
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


class Overrides(NamedTuple):
    """What goes to Hydra: overrides of every run, and with `-m` those that hold several values."""

    fixed: list[str]
    swept: list[str]


def check_overrides(
    schema: Schema, words: Sequence[str], *, is_many: bool = False, folders: Sequence[Path] = ()
) -> Overrides:
    """Check the names in the words of a command line and spell them as Hydra expects.

    Aliases are replaced, a single policy becomes a list, and a list for a key that takes one value
    goes to its axis of `grid`. With `is_many`, that is `-m`, `spec.k=1,2` stands for two runs.

    Raises:
        ConfigError: one line per unknown key or group choice, with the nearest valid names, and per
            key of several values without `-m`.
    """
    groups = group_choices(schema, folders or (CONF_DIR,))
    fixed, swept, faults = [], [], []
    for word, shown in zip(words, redact_words(words), strict=True):
        fault = _fault(schema, word, groups, is_many=is_many)
        if fault:
            faults.append(fault.replace(word, shown))
        elif word.startswith(("hydra.", "hydra/", "+hydra.", "++hydra.", "~")):
            fixed.append(word)
        elif not is_many:
            fixed += _spell(schema, word)
        else:
            for spelled, is_swept in _spell_sweep(schema, word):
                (swept if is_swept else fixed).append(spelled)
    if faults:
        raise ConfigError("\n".join(faults))
    return Overrides(fixed, swept)


def group_choices(schema: Schema, folders: Sequence[Path] = (CONF_DIR,)) -> dict[str, list[str]]:
    """Map each config group of an entry to its YAML names; an experiment belongs to one entry."""
    own = {item.name for item in dataclasses.fields(schema)} | {"experiment", "defaults", "hydra"}
    found = {
        group: sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
        for group in (*(item.name for item in dataclasses.fields(schema)), "experiment")
    }
    files = [folder / "experiment" for folder in folders]
    found["experiment"] = [
        name
        for name in found["experiment"]
        if all(_sections(file / f"{name}.yaml") <= own for file in files)
    ]
    return {group: names for group, names in found.items() if names}


def _sections(path: Path) -> set[str]:
    """Groups and sections that an experiment sets, read without a YAML parser for --help's sake."""
    text = path.read_text(encoding="utf8") if path.is_file() else ""
    return set(re.findall(r"(?:^|override /)(\w+):", text, re.MULTILINE))


def help_text(schema: Schema) -> str:
    """Describe an entry: examples, groups and choices, keys with values and meaning."""
    entry = ENTRIES[schema]
    program = program_name(entry)
    lines = [f"usage: {program} [group=choice ...] [key=value ...]", "", "examples:"]
    lines += [f"  {example.replace(_script(entry), program)}" for example in EXAMPLES[entry]]
    lines += ["", "groups (YAML files under conf/):"]
    lines += [f"  {group}={' | '.join(names)}" for group, names in group_choices(schema).items()]
    lines += ["", "keys (spec.k is short for spec.num_speculative_tokens):"]
    said = meanings(schema)
    for key, item in schema_keys(schema).items():
        lines += [f"  {key}: {legal_values(item)}{_default(item)}", f"      {said[key]}"]
    return "\n".join([*lines, "", FLAGS])


def program_name(entry: str) -> str:
    """How this entry is called here: the script of a source tree, or the command of a wheel."""
    door, _, name = sys.argv[0].rpartition(" ")  # `mtp train`, by mtp_research.__main__
    return f"{door} {entry}" if name in ENTRIES.values() else _script(entry)


def _script(entry: str) -> str:
    return f"python {entry}.py"


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


def _fault(schema: Schema, word: str, groups: dict[str, list[str]], *, is_many: bool) -> str | None:
    key, has_value, value = word.lstrip("+~").partition("=")
    if key.startswith(("hydra.", "hydra/")):
        if key == "hydra.sweep.subdir" and (value.startswith("/") or ".." in value):
            return f"{key} must stay below output_dir, got {value}; set output_dir=A,B."
        fixed = next((name for name in _OUTPUT_KEYS if key == name), None)
        return fixed and f"{fixed} follows output_dir, got {value}; set output_dir={value}."
    if not key or (not has_value and not word.startswith("~")):
        return f"an argument must read NAME=VALUE without spaces, got {word}; --help lists names."
    if value.startswith("{") and any(name.startswith(f"{key}.") for name in schema_keys(schema)):
        first = re.match(r"\{\s*([\w.]+)\s*:\s*([^,}]*)", value)
        example = f"{key}.{first[1]}={first[2].strip()}" if first else f"{key}.NAME=VALUE"
        return f"{key} is a section, got {value}; set its keys one by one: {example}."
    if fault := _name_fault(schema, key, groups):
        return fault
    values = _parts(schema, key, value)
    if len(values) > 1 and not is_many:
        one = f"write {key}=[{value}] for one paired run, or " if _axis(schema, key) else ""
        return f"{key} takes one value a run, got {value}; {one}add -m for many runs."
    known = [*groups.get(key, []), *(["null"] if key == "experiment" else [])]
    for choice in values if key in groups and has_value else ():
        if choice not in known and "(" not in choice:  # glob(*) and choice(a,b) are Hydra's
            options = ", ".join(groups[key])
            return f"{key} must be one of {options}, got {choice}{nearest(choice, known)}."
    return None


def _name_fault(schema: Schema, key: str, groups: dict[str, list[str]]) -> str | None:
    keys, full = schema_keys(schema), ALIASES.get(key, key)
    if key in groups or full in keys or _mapping_of(schema, key):
        return None
    entry = ENTRIES[schema]
    for other, name in ENTRIES.items():
        if full in schema_keys(other) or key in group_choices(other):
            return f"{key} belongs to {name}.py, got it in {entry}.py; run {program_name(name)}."
    known = [*keys, *groups, *(alias for alias, full in ALIASES.items() if full in keys)]
    return f"{key} is not a key of {entry}.py{nearest(key, known)}; --help lists all keys."


def _parts(schema: Schema, key: str, value: str) -> list[str]:
    """Values of `a,b`; free text, lists, mappings and quoted values are one value."""
    item = schema_keys(schema).get(ALIASES.get(key, key))
    is_one = value.startswith(("[", "{", "'", '"')) or "(" in value
    if item is not None and not _axis(schema, key):  # a path may hold commas
        is_one |= _is_text(item) or get_origin(item.type) in (list, tuple, dict)
    return [value] if is_one else value.split(",")


def _is_text(item: dataclasses.Field) -> bool:
    return item.type in (str, str | None) and "choices" not in item.metadata


def _axis(schema: Schema, key: str) -> str | None:
    return _AXIS_OF.get(ALIASES.get(key, key)) if schema is EvalConfig else None


def _mapping_of(schema: Schema, key: str) -> str | None:
    """The mapping key that `key` adds an entry to, such as model.architecture; None without one."""
    for known, item in schema_keys(schema).items():
        if get_origin(item.type) is dict and key.startswith(f"{known}."):
            return known
    return None


def _spell_sweep(schema: Schema, word: str) -> Iterator[tuple[str, bool]]:
    """A word of `-m`, and whether it holds several values: Hydra splits, each is spelled alone."""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # not for --help
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as fault:
        line = str(fault).splitlines()[0]
        raise ConfigError(f"{word} must read as Hydra's grammar has it: {line}") from fault
    if not override.is_discrete_sweep() or "=glob(" in word:  # Hydra knows which files there are
        yield from ((spelled, override.is_sweep_override()) for spelled in _spell(schema, word))
        return
    key = word.lstrip("+").partition("=")[0]
    values = [_spell(schema, f"{key}={value}") for value in override.sweep_string_iterator()]
    for same in zip(*values, strict=False):  # a key, and what it does to its axis
        names = {one.partition("=")[0] for one in same}
        if len(names) > 1:
            raise ConfigError(f"{key} must be single values or lists, got both; split the command.")
        texts = dict.fromkeys(one.partition("=")[2] for one in same)
        yield f"{names.pop()}={','.join(texts)}", len(texts) > 1


def _spell(schema: Schema, word: str) -> list[str]:
    key, _, value = word.lstrip("+").partition("=")
    key = ALIASES.get(key, key)
    axis, item = _axis(schema, key), schema_keys(schema).get(key)
    if axis and value.startswith("[") and value != "[]":
        if item is not None and _is_text(item):
            words = [text.strip() for text in value.removeprefix("[").removesuffix("]").split(",")]
            value = f"[{','.join(map(quote, words))}]"
        return [f"{axis}={value}"]
    # Entries of a mapping are new keys, which Hydra wants to hear.
    if _mapping_of(schema, key) or (item is not None and get_origin(item.type) is dict):
        return [f"++{key}={value}"]
    if item is not None and get_origin(item.type) in (list, tuple) and not value.startswith("["):
        value = f"[{value}]"
    elif item is not None and _is_text(item):  # paths may hold spaces, commas and brackets
        value = quote(value)
    return [f"{key}={value}", *([f"{axis}=[]"] if axis else [])]  # whatever an experiment lists


def quote(text: str) -> str:
    """A text as Hydra reads it; null and quoted texts are left as they are."""
    if text == "null" or text.startswith(("'", '"')):
        return text
    return "'" + text.replace("'", "\\'") + "'"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the flags.")


def read_flags(words: Sequence[str]) -> argparse.Namespace:
    """Split a command line into flags, most of them Hydra's, and `overrides`."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    commands = parser.add_mutually_exclusive_group()
    commands.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    commands.add_argument("--info", "-i", nargs="?", const="all", choices=INFO)
    for long, short in {"--run": "-r", "--multirun": "-m", "--shell-completion": "-sc"}.items():
        commands.add_argument(long, short, action="store_true")
    commands.add_argument("--hydra-help", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--traceback", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--config-dir", "-cd", type=_folder)
    parser.add_argument("--config-path", "-cp", type=_folder, default=str(CONF_DIR))
    parser.add_argument("--config-name", "-cn")
    known = [option for action in parser._actions for option in action.option_strings]
    words = [_without_dashes(word, known) for word in words]
    kinds = [*words[1:], ""]  # --info may stand alone in front of an override
    spelled = [
        f"{word}=all" if word in ("--info", "-i") and kind not in INFO else word
        for word, kind in zip(words, kinds, strict=False)
    ]
    flags, unknown = parser.parse_known_intermixed_args(spelled)
    if unknown:
        word, name = unknown[0], unknown[0].lstrip("-")
        if re.match(r"[\w.+~/]+=", name) or "." in name:
            value = "" if "=" in name else "=VALUE"
            raise ConfigError(f"{word} is not a flag; drop the dashes: {name}{value}.")
        raise ConfigError(
            f"{word} is not a flag{nearest(word, known)}; --help lists flags, and keys, which are "
            "written NAME=VALUE."
        )
    if (flags.resolve or flags.package) and not flags.cfg:
        raise ConfigError("--resolve and --package go with --cfg, got no --cfg; add --cfg job.")
    return flags


def _without_dashes(word: str, options: Sequence[str]) -> str:
    """`--NAME=VALUE`, as `wandb agent` passes it by default, as the override NAME=VALUE."""
    is_override = re.match(r"--[\w.]+=", word) and word.partition("=")[0] not in options
    return word.removeprefix("--") if is_override else word


def _folder(path: str) -> str:
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, got {path} (from {Path.cwd()})")
    return str(Path(path).resolve())


def hydra_words(flags: argparse.Namespace) -> list[str]:
    """The flags that Hydra takes, as it takes them."""
    kept = ("run", "multirun", "shell_completion", "hydra_help", "resolve")
    words = [f"--{name.replace('_', '-')}" for name in kept if getattr(flags, name)]
    for name in ("cfg", "info", "package", "config_dir"):
        if getattr(flags, name):
            words += [f"--{name.replace('_', '-')}", getattr(flags, name)]
    return words
