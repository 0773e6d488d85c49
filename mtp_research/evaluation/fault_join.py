"""Price studies of parts of the heads, joined into the one that a single process would have made.

    eval.py experiment=fault_price spec.head=[ONE] output_dir=parts/ONE       for each head
    python -m mtp_research.evaluation.fault_table parts/* --out FOLDER

Parts must agree in what their files tell of prompts, settings, target, machine and code (of
`engine.*` they tell only the command), and no condition may be in two of them.
Conditions keep the order of the parts, so that texts are held against the first one's of all.
Letter: K drafts per step.
"""

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import NamedTuple

from mtp_research.evaluation.run.conditions import short_names
from mtp_research.evaluation.runs import mapping
from mtp_research.evaluation.stats.fault_study import STUDY_FILE, FaultStudy, read_study
from mtp_research.evaluation.tables import printable
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from mtp_research.runtime.provenance import redact

_NUM_LISTED = 5
_MAX_CHARACTERS = 120  # of a value in a message; a list of GPUs is long
_HEAD_KEYS = ("spec.head", "grid.head")
# What must be the same in the run records; None: all keys. Whether files were untracked is no
# matter, and neither is the memory or the host's kernel.
_SAME: dict[str, tuple[str, ...] | None] = {
    "target": None,
    "versions": None,
    "git": ("sha", "diff_sha256"),
    "hardware": ("cpu", "num_cores", "gpus"),
}
_OWN = ("command", "argv", "working_dir", "started_at", "seconds", "hardware")  # kept of each part


class Part(NamedTuple):
    """A study and the folder that it was read from."""

    folder: Path
    study: FaultStudy


def join_parts(parts: Sequence[Part], *, argv: Sequence[str]) -> FaultStudy:
    """One study with the heads and conditions of all parts, in the order given.

    Args:
        parts: at least one; unfinished ones leave the joined study unfinished.
        argv: words after `fault_table`, for the record.

    Raises:
        ConfigError: parts differ in prompts, settings, target, machine or code, hold other weights
            under one name, or hold a condition twice; the message names what.
    """
    for part in parts[1:]:
        _require_same(parts[0], part)
    paths = [_head_paths(part.study) for part in parts]
    names = short_names(dict.fromkeys(path for found in paths for path in found.values()))
    conditions = [
        replace(condition, head=names[found[condition.head]])
        for part, found in zip(parts, paths, strict=True)
        for condition in part.study.conditions
    ]
    counts = Counter(condition.key for condition in conditions)
    if twice := ["{} K={} {}".format(*key) for key, count in counts.items() if count > 1]:
        raise ConfigError(
            f"expected every head, K and policy in one part, got {_listed(twice)} in several; "
            "leave out the parts that repeat others."
        )
    return replace(
        parts[0].study,
        heads=tuple(_heads(parts, paths, names)),
        conditions=tuple(conditions),
        run=_record(parts, argv=argv),
    )


def make_folder(out: Path, parts: Iterable[Part]) -> None:
    """Make the folder of a joined study, never over one that was decoded.

    Raises:
        ConfigError: `out` is a part, or holds a study that was not joined.
        IntegrityError: the study in `out` cannot be read.
        EnvironmentFault: the folder cannot be made.
    """
    is_part = any(out.resolve() == part.folder.resolve() for part in parts)
    if is_part or ((out / STUDY_FILE).is_file() and not read_study(out).parts):
        raise ConfigError(
            f"--out must not hold a study that was decoded, got {out}; set --out to another folder."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise EnvironmentFault(
            f"--out must be a writable folder, got {out} ({fault.strerror}); set --out PATH."
        ) from None


def _require_same(first: Part, other: Part) -> None:
    found = _prompt_differences(first.study, other.study)
    found += _differences(_settings(other.study), _settings(first.study))
    if found:
        raise ConfigError(
            f"parts must agree in prompts, settings, target, machine and code, got {other.folder} "
            f"beside {first.folder} with {'; '.join(found)}; decode all parts the same way."
        )


def _prompt_differences(first: FaultStudy, other: FaultStudy) -> list[str]:
    if other.prompts == first.prompts:
        return []
    ids = sorted({prompt.question_id for prompt in {*first.prompts} ^ {*other.prompts}})
    if not ids:
        return ["prompts in another order"]
    return [f"{len(ids)} other prompts ({_listed(ids)})"]


def _settings(study: FaultStudy) -> dict[str, object]:
    """What decides the texts and counts of a study beside heads and prompts, by name."""
    found: dict[str, object] = {
        "dtype": study.dtype,
        "max_new_tokens": study.max_new_tokens,
        "seed": study.seed,
    }
    for group, keys in _SAME.items():
        stored = mapping(study.run, group)
        found |= {f"run.{group}.{key}": stored.get(key) for key in keys or stored}
    return found


def _head_paths(study: FaultStudy) -> dict[str, str]:
    """The folder of each head by its name in the study, or the name if no command tells it."""
    names = [str(head.get("name")) for head in study.heads]
    names += [condition.head for condition in study.conditions]
    typed = {path for record in (study.run, *study.parts) for path in _typed_heads(record)}
    found = {}
    for name in dict.fromkeys(names):
        tail = PurePath(name).parts
        ours = [path for path in typed if PurePath(path).parts[-len(tail) :] == tail]
        found[name] = ours[0] if len(ours) == 1 else name
    return found


def _typed_heads(record: Mapping[str, object]) -> list[str]:
    """Absolute paths of the heads that a command names."""
    argv, folder = record.get("argv"), str(record.get("working_dir") or "")
    overrides = [str(word).partition("=") for word in argv] if isinstance(argv, list) else []
    values = [value for key, _, value in overrides if key.lstrip("+") in _HEAD_KEYS]
    words = [word.strip(" '\"") for value in values for word in value.strip("[] ").split(",")]
    return [os.path.normpath(PurePath(folder, word)) for word in words if word]


def _heads(
    parts: Sequence[Part], paths: Sequence[Mapping[str, str]], names: Mapping[str, str]
) -> list[dict[str, object]]:
    """What the parts tell of every head, under its joined name."""
    made: dict[str, dict[str, object]] = {}
    for part, found in zip(parts, paths, strict=True):
        for head in part.study.heads:
            path = found[str(head.get("name"))]
            facts = head | {"name": names[path]}
            if changed := _differences(facts, made.setdefault(path, facts)):
                raise ConfigError(
                    f"parts must hold the same heads called {_shown(path)}, got "
                    f"{'; '.join(changed)} in {part.folder}; name folders apart, by spec.head."
                )
    return list(made.values())


def _record(parts: Sequence[Part], *, argv: Sequence[str]) -> dict[str, object]:
    """The run record: what the parts share, how they were joined, and what is their own."""
    first = parts[0].study.run
    words = ["-m", "mtp_research.evaluation.fault_table", *map(redact, argv)]
    record = {key: first[key] for key in ("schema", *_SAME) if key in first}
    if git := mapping(first, "git"):
        states = [mapping(part.study.run, "git").get("dirty") for part in parts]
        record["git"] = {**git, "dirty": next(filter(None, states), git.get("dirty"))}
    starts = [str(part.study.run["started_at"]) for part in parts if "started_at" in part.study.run]
    return record | {
        "argv": words,
        "command": shlex.join(["python", *words]),
        "started_at": min(starts, default=None),
        "num_conditions": sum(part.study.num_asked for part in parts),
        "parts": [own for part in parts for own in _own_records(part.study)],
    }


def _own_records(study: FaultStudy) -> list[Mapping[str, object]]:
    """What is a part's own; of a joined study, what was its parts' own."""
    own = {key: study.run.get(key) for key in _OWN}
    own |= {"num_conditions": study.num_asked, "num_decoded": len(study.conditions)}
    return study.parts or [own]


def _listed(values: Sequence[str]) -> str:
    more = len(values) - _NUM_LISTED
    listed = ", ".join(map(_shown, values[:_NUM_LISTED]))
    return f"{listed} and {more} more" if more > 0 else listed


def _differences(got: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    return [
        f"{key} {_shown(got.get(key))} for {_shown(expected.get(key))}"
        for key in {**expected, **got}
        if got.get(key) != expected.get(key)
    ]


def _shown(value: object) -> str:
    return printable(str(value), limit=_MAX_CHARACTERS)
