"""What a row says: a conversation of (role, content) turns, from the forms that data sets have.

The first of these fields that a row has holds it, unless the caller names another:

    messages, conversations   turns with `role` and `content`, or `from` and `value` (ShareGPT)
    turns                     what the user says, turn by turn
    instruction               one message, followed by the row's `input` if there is one
    prompt, question          one message, or several in a list

An answer beside `instruction`, `prompt` or `question` (`response`, `completion`, `output`,
`answer`) is the assistant's turn, and `system` is the first turn of any of them.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile

from mtp_research.data.rows import Row, read_rows
from mtp_research.runtime.errors import ConfigError, IntegrityError, nearest

logger = logging.getLogger(__name__)

FIELDS = ("messages", "conversations", "turns", "instruction", "prompt", "question")
ANSWERS = ("response", "completion", "output", "answer")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}

Turns = tuple[tuple[str, str], ...]


def conversation_of(row: Row, *, fields: tuple[str, ...] = FIELDS) -> Turns:
    """(role, content) of every turn of a row, as it stands; empty where it has no such field.

    Raises:
        IntegrityError: a turn has no role, or no text as its content.
    """
    record = row.record
    name = next((name for name in fields if record.get(name)), None)
    if name is None:
        return ()
    turns = list(_turns(record[name], f"{row.where}: `{name}`"))
    if name in ("instruction", "prompt", "question") or name not in FIELDS:
        extra = record.get("input")
        if name == "instruction" and isinstance(extra, str) and extra:
            turns[-1] = ("user", f"{turns[-1][1]}\n\n{extra}")
        answer = next((record[n] for n in ANSWERS if isinstance(record.get(n), str)), None)
        if answer and turns[-1][0] == "user":
            turns.append(("assistant", answer))
    system = record.get("system")
    if isinstance(system, str) and system and turns[0][0] != "system":
        turns.insert(0, ("system", system))
    return tuple(turns)


def _turns(value: object, where: str) -> Iterator[tuple[str, str]]:
    """(role, content) of what a field holds; bare strings are the user's."""
    parts = value if isinstance(value, list) else [value]
    for turn in parts:
        if isinstance(turn, Mapping):
            role = turn.get("role", turn.get("from"))
            content = _text(turn.get("content", turn.get("value")))
            if not isinstance(role, str) or content is None:
                raise IntegrityError(
                    f"{where} must hold turns with `role` and `content` (or `from` and `value`) as "
                    f"text, got the fields {sorted(turn)[:8]}; fix the row."
                )
            yield _ROLES.get(role, role), content
        elif isinstance(turn, str):
            yield "user", turn
        else:
            raise IntegrityError(f"{where} must be text or turns, got {type(turn).__name__}.")


def _text(content: object) -> str | None:
    """Text of a turn, also where it comes in parts; None for anything else, such as a picture."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if parts and len(texts) == len(parts) else None
    return content if isinstance(content, str) else None


@dataclass(frozen=True)
class Question:
    """A conversation that waits for the assistant."""

    doc_id: str  # the row's own; file and line where it has none, or another row's
    domain: str  # the row's domain or category, or the name of the source
    messages: Turns  # up to the first turn of the assistant; at least one user's


def read_questions(source: str, *, field: str | None = None) -> list[Question]:
    """All rows of a source that ask something; others, such as plain documents, are left out.

    `field` holds the conversation, None takes the first of `FIELDS`. Of `turns` the first is asked.
    What the data set's own assistant said is dropped: the target answers in its place.
    """
    fields, questions = FIELDS if field is None else (field,), []
    seen: set[str] = set()
    used: set[str] = set()
    silent: list[str] = []  # places of rows that ask nothing
    for row in read_rows(source, key="--source"):
        seen |= row.record.keys()
        turns = conversation_of(row, fields=fields)
        asked = _first_of_the_user(tuple(takewhile(lambda turn: turn[0] != "assistant", turns)))
        if any(role == "user" and content for role, content in asked):
            doc_id = row.name or f"{row.file}:{row.number}"
            doc_id = f"{row.file}:{row.number}" if doc_id in used else doc_id
            used.add(doc_id)
            questions.append(Question(doc_id, row.domain or row.stem, asked))
        else:
            silent.append(row.where)
    if not questions:
        raise ConfigError(f"--source {source} must have {_lacking(fields, seen)}.")
    if silent:
        number = f"{len(silent)} of {len(silent) + len(questions)} rows"
        logger.warning("%s ask nothing and are left out, the first at %s", number, silent[0])
    return questions


def _lacking(fields: Sequence[str], seen: Set[str]) -> str:
    if not seen:
        return "questions, got an empty file; set another --source"
    if found := sorted(seen & {*fields}):
        return f"text of a user in {', '.join(found)}, got none; fix the rows"
    wanted, got = ", ".join(fields), ", ".join(sorted(seen))
    close = next(filter(None, (nearest(name, fields) for name in sorted(seen))), "")
    return f"rows with one of {wanted}, got the fields {got}{close}; rename one, or set --field"


def _first_of_the_user(turns: Turns) -> Turns:
    """Turns up to the first message of the user: later ones need the answer before them."""
    end = next((i for i, (role, _) in enumerate(turns) if role == "user"), len(turns))
    return turns[: end + 1]
