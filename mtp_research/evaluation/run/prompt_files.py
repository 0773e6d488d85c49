"""Prompt files: from the rows of a source to `Prompt` values.

`data.rows` reads the source and `data.row_forms` the form of a row. What the user says in it is
asked; the assistant's turns are dropped. A `prompt` that is one text (as in HumanEval), and a line
of a `.txt` file, is completed as it stands; all else goes through the model's chat template, unless
`format` says otherwise. Whatever a prompt contains - HTML, control characters - is only data.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mtp_research.data.row_forms import FIELDS, Turns, conversation_of
from mtp_research.data.rows import Row, read_rows
from mtp_research.runtime.errors import IntegrityError

Format = Literal["chat", "completion"]

MAX_LINE_BYTES = 1_000_000
# What answers are scored by.
REFERENCE_FIELDS = (
    "reference", "answer", "test", "entry_point", "canonical_solution", "prompt",
)  # fmt: skip
# How rows of SPEED-Bench begin whose text has to be fetched elsewhere.
_WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
_EXPECTED = "expected `turns`, `messages`, `prompt`, `question`, `instruction` or `text`"


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    question_id: str  # unique within the set; becomes the `request_id` of the generation
    category: str  # domain, the unit of the report's breakdown
    turns: tuple[str, ...]  # the user's messages (`chat`), or the text to continue (`completion`)
    format: Format  # `chat` goes through the model's template, `completion` does not
    system: str | None = None  # what a chat's system turn says; None without one
    # Other fields of the row by name, from which an answer is scored; not part of what is asked
    reference: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def sha256(self) -> str:
        """Hash of what the model is asked, not of the id, the category or the reference."""
        parts = [self.format, *self.turns]
        if self.system is not None or len(self.turns) > 1:
            parts = [json.dumps([self.format, self.system, self.turns])]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def read_prompt_files(source: Path | str) -> list[Prompt]:
    """Read the prompts of a source that `data.rows` takes, in the order of files and rows.

    Ids from the `question.jsonl` of a folder's folders are prefixed with the folder's name, because
    such sets number their questions from 0 each.

    Raises:
        ConfigError: nothing to read there.
        EnvironmentFault: a data set that cannot be fetched.
        IntegrityError: an empty file, or a row that is too long, no JSON object, no prompt or an
            id that was there before; the message names file and line.
    """
    prompts = []
    seen: dict[str, str] = {}
    rows = read_rows(source, key="prompts.path", max_line_bytes=MAX_LINE_BYTES, text_lines=True)
    for row in rows:
        prompt = _prompt(row)
        if prompt.question_id in seen:
            raise IntegrityError(
                f"{row.where}: question_id {prompt.question_id!r} occurs twice, first in "
                f"{seen[prompt.question_id]}; number the prompts differently."
            )
        seen[prompt.question_id] = row.where
        prompts.append(prompt)
    if not prompts:
        raise IntegrityError(f"{source} holds no prompts; expected one JSON object a line.")
    return prompts


def _prompt(row: Row) -> Prompt:
    record, where = row.record, row.where
    turns, default_form = _turns_of(row)
    asked = tuple(content for role, content in turns if role == "user")
    system = next((content for role, content in turns if role == "system"), None)
    name = record.get("question_id", record.get("task_id", record.get("id")))
    is_named = any(field in record for field in ("question_id", "task_id", "id"))
    if not is_named:
        name = record.get("prompt_id", f"{row.stem}-{row.number}")
    category, form = record.get("category", row.parent), record.get("format", default_form)
    if not isinstance(name, str | int) or not isinstance(category, str) or not category:
        raise IntegrityError(f"{where}: question_id must be text or a number, category text.")
    if form not in ("chat", "completion"):
        raise IntegrityError(f"{where}: format must be chat or completion, got {form!r}.")
    if any(text.startswith(_WITHHELD) for text in asked):
        raise IntegrityError(
            f"{where}: the text is withheld; fetch it from its source, as the page of the data set "
            "says, and set prompts.path to the file."
        )
    if not asked or not all(text.strip() for text in asked):
        raise IntegrityError(f"{where}: the prompt must be text that is not empty.")
    if form == "completion" and (len(asked) > 1 or system is not None):
        raise IntegrityError(f"{where}: a prompt to complete is one text, got {len(turns)} turns.")
    if not _is_unicode(f"{name}{category}{system}{''.join(asked)}"):
        raise IntegrityError(f"{where}: the text holds half of a surrogate pair.")
    return Prompt(
        question_id=f"{row.folder}/{name}" if row.folder else str(name),
        category=category,
        turns=asked,
        format=form,
        system=system,
        reference={name: record[name] for name in REFERENCE_FIELDS if name in record},
    )


def _turns_of(row: Row) -> tuple[Turns, Format]:
    """What is asked; of a plain `prompt` or `text` the model goes on where it ends."""
    record = row.record
    if isinstance(record.get("turns"), str):
        raise IntegrityError(f"{row.where}: `turns` must be a list, got text; {_EXPECTED}.")
    text = record.get("text") if not any(record.get(name) for name in FIELDS) else None
    if isinstance(text, str):
        return (("user", text),), "completion"
    turns = conversation_of(row)
    if not turns:
        empty = [name for name in FIELDS if record.get(name) in ("", [])]
        got = f"nothing in {empty[0]}" if empty else f"the fields {sorted(record)[:12]}"
        raise IntegrityError(f"{row.where}: {_EXPECTED}, got {got}.")
    first = next(name for name in FIELDS if record.get(name))
    is_plain = first == "prompt" and isinstance(record["prompt"], str)
    return turns, "completion" if is_plain else "chat"


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
