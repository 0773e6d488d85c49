"""Prompt files: from the lines of a file to `Prompt` values.

A file holds one JSON object a line, plain, gzip or xz. Two schemas are read: `question.jsonl` of
MT-bench and Spec-Bench (`question_id`, `category`, `turns`, optional `format`), and any row with
`prompt` (completed as it stands, as in HumanEval), `question` or `instruction` (asked as a user).
Of several turns the first is asked: a later one needs the answer before it. Whatever a prompt
contains - HTML, control characters - is only data.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from mtp_research.data.json_lines import JsonLine, read_json_lines
from mtp_research.runtime.errors import ConfigError, IntegrityError

Format = Literal["chat", "completion"]

MAX_LINE_BYTES = 1_000_000
_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".jsonl.xz")
_GENERIC_FIELDS: tuple[tuple[str, Format], ...] = (
    ("prompt", "completion"),
    ("question", "chat"),
    ("instruction", "chat"),
)


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


def read_prompt_files(path: Path) -> list[Prompt]:
    """Read a file, all prompt files of a folder, or the `question.jsonl` of each of its folders.

    Args:
        path: file or folder. Ids from files of the last kind are prefixed with the folder's name,
            because such sets number their questions from 0 each.

    Returns:
        Prompts in file order, files in the order of their names.

    Raises:
        ConfigError: nothing to read at `path`.
        IntegrityError: an empty file, or a line that is too long, no JSON object, no prompt or an
            id that was there before; the message names file and line.
    """
    prompts = []
    seen: dict[str, str] = {}
    for file in _prompt_files(path):
        prefix = f"{file.parent.name}/" if path.is_dir() and file.parent != path else ""
        for where, prompt in _read_file(file, prefix):
            if prompt.question_id in seen:
                raise IntegrityError(
                    f"{where}: question_id {prompt.question_id!r} occurs twice, first in "
                    f"{seen[prompt.question_id]}; number the prompts differently."
                )
            seen[prompt.question_id] = where
            prompts.append(prompt)
    return prompts


def _prompt_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"prompts.path must be an existing file or folder, got {str(path)!r}; set "
            "prompts.path, or leave it out for the shipped prompts."
        )
    files = [file for file in path.iterdir() if file.name.endswith(_SUFFIXES)]
    files = files or list(path.glob("*/question.jsonl"))
    if not files:
        raise ConfigError(
            f"prompts.path {str(path)!r} holds no prompt file ({', '.join(_SUFFIXES)}); set "
            "prompts.path to a file or to a folder of such files."
        )
    return sorted(files)


def _read_file(path: Path, prefix: str) -> Iterator[tuple[str, Prompt]]:
    num_prompts = 0
    for line in read_json_lines(path, key="prompts.path", max_line_bytes=MAX_LINE_BYTES):
        prompt = _prompt(line, path=path)
        yield line.where, replace(prompt, question_id=prefix + prompt.question_id)
        num_prompts += 1
    if num_prompts == 0:
        raise IntegrityError(f"{path} holds no prompts; expected one JSON object a line.")


def _prompt(line: JsonLine, *, path: Path) -> Prompt:
    row, where = line.record, line.where
    text, default_format = _text_of(row, where)
    category = row.get("category", path.resolve().parent.name)
    default_id = f"{path.name.partition('.')[0]}-{line.number}"
    name = row.get("question_id", row.get("task_id", row.get("id", default_id)))
    form = row.get("format", default_format)
    if not isinstance(name, str | int) or not isinstance(category, str) or not category:
        raise IntegrityError(f"{where}: question_id must be text or a number, category text.")
    if form not in ("chat", "completion"):
        raise IntegrityError(f"{where}: format must be chat or completion, got {form!r}.")
    if not _is_unicode(f"{name}{category}{text}"):
        raise IntegrityError(f"{where}: the text holds half of a surrogate pair.")
    return Prompt(question_id=str(name), category=category, turns=(text,), format=form)


def _text_of(row: Mapping[str, object], where: str) -> tuple[str, Format]:
    turns = row.get("turns")
    if isinstance(turns, list) and turns:
        text, form = turns[0], "chat"
    else:
        found = [(row[field], form) for field, form in _GENERIC_FIELDS if field in row]
        if not found or "turns" in row:
            raise IntegrityError(
                f"{where}: expected `turns` (a list with the user's messages), `prompt`, "
                f"`question` or `instruction`, got the fields {sorted(row)[:12]}."
            )
        text, form = found[0]
    if not isinstance(text, str) or not text.strip():
        raise IntegrityError(f"{where}: the prompt must be text that is not empty.")
    return text, cast(Format, form)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
