"""Conversations to be answered, from any JSONL file or `datasets` source.

First stage of regeneration. A source is a `.jsonl` file (also `.xz` or `.gz`), a folder that
`datasets` saved or can read, or the name of a data set on the hub. The first of these fields that a
row has holds the conversation, unless the caller names another:

    messages        role and content of each turn
    conversations   the same as `from` and `value`, with the speakers `human` and `gpt`
    turns           the user's messages, of which the first is asked
    instruction     one message, followed by the row's `input` if there is one
    prompt, question    one message

What the data set's own assistant said is dropped: the target answers in its place.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, cast

from mtp_research.data.json_lines import read_json_lines
from mtp_research.runtime.errors import ConfigError, EnvironmentFault

FIELDS = ("messages", "conversations", "turns", "instruction", "prompt", "question")
_SUFFIXES = (".jsonl", ".jsonl.xz", ".jsonl.gz")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_ID_FIELDS, _DOMAIN_FIELDS = ("id", "question_id"), ("domain", "category")


@dataclass(frozen=True)
class Question:
    """A conversation that waits for the assistant."""

    doc_id: str  # the row's own; source and row number where it has none, or another row's
    domain: str  # the row's domain or category, or the name of the source
    # (role, content) up to the first turn of the assistant; at least one user's
    messages: tuple[tuple[str, str], ...]


class SourceRow(NamedTuple):
    """One row and where it stands, for messages and for rows without an id."""

    where: str
    record: Mapping[str, object]


def read_questions(
    source: str, *, field: str | None = None, split: str = "train"
) -> list[Question]:
    """All rows of a source that ask something; others, such as plain documents, are left out.

    `field` holds the conversation, None takes the first of `FIELDS`; `split` is of a `datasets`
    source.
    """
    name = Path(source).name.split(".")[0]
    fields, questions = FIELDS if field is None else (field,), []
    rows = _file_rows(Path(source)) if source.endswith(_SUFFIXES) else _dataset_rows(source, split)
    seen: set[str] = set()
    used: set[str] = set()
    for where, record in rows:
        seen |= record.keys()
        messages = _conversation(record, fields=fields)
        if messages:
            doc_id = _first(record, _ID_FIELDS) or where
            doc_id = where if doc_id in used else doc_id
            used.add(doc_id)
            domain = _first(record, _DOMAIN_FIELDS) or name
            questions.append(Question(doc_id, domain, messages))
    if not questions:
        raise ConfigError(
            f"--source {source} must have rows with one of {', '.join(fields)}, got the fields "
            f"{', '.join(sorted(seen)) or 'of no row'}; set --field."
        )
    return questions


def _conversation(
    record: Mapping[str, object], *, fields: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """(role, content) pairs before the assistant first speaks; empty when nobody asks."""
    name = next((name for name in fields if record.get(name)), None)
    if name is None:
        return ()
    turns = _turns(record[name])
    extra = record.get("input")
    if name == "instruction" and isinstance(extra, str) and extra:
        turns = [("user", f"{turns[0][1]}\n\n{extra}")]
    asked = tuple(takewhile(lambda turn: turn[0] != "assistant", turns))
    return asked if any(role == "user" for role, _ in asked) else ()


def _turns(value: object) -> list[tuple[str, str]]:
    """(role, content) of what a field holds; of bare strings the first is the user's."""
    if isinstance(value, str):
        return [("user", value)]
    turns = []
    for turn in value if isinstance(value, list) else []:
        if isinstance(turn, str):
            return [("user", turn)]
        if isinstance(turn, Mapping):
            role = str(turn.get("role", turn.get("from", "")))
            turns.append((_ROLES.get(role, role), str(turn.get("content", turn.get("value", "")))))
    return turns


def _first(record: Mapping[str, object], names: tuple[str, ...]) -> str | None:
    """The first of the fields that the record has, as text."""
    return next((str(record[name]) for name in names if record.get(name) is not None), None)


def _file_rows(path: Path) -> Iterator[SourceRow]:
    if not path.is_file():
        raise ConfigError(f"--source must be a file, a folder or a data set, got {path}: no file.")
    for line in read_json_lines(path, key="--source"):
        yield SourceRow(f"{path.name}:{line.number}", line.record)


def _dataset_rows(source: str, split: str) -> Iterator[SourceRow]:
    """Rows of a folder that `datasets` saved, or of anything that it loads by name."""
    try:
        import datasets
    except ImportError as fault:
        raise EnvironmentFault(
            f"--source {source} needs the package datasets ({fault}); install mtp-research[train]."
        ) from fault
    try:
        if (Path(source) / "state.json").is_file():
            rows = datasets.load_from_disk(source)
        else:
            rows = datasets.load_dataset(source, split=split)
    except (FileNotFoundError, ValueError, datasets.exceptions.DatasetsError) as fault:
        raise ConfigError(
            f"--source must be a file, a folder or a data set with the split {split}, got "
            f"{source} ({fault}); set --source or --split."
        ) from fault
    except (ConnectionError, OSError) as fault:
        raise EnvironmentFault(f"--source {source} cannot be fetched ({fault}).") from fault
    for number, record in enumerate(rows):
        yield SourceRow(f"{Path(source).name}:{number}", cast(Mapping[str, object], record))
