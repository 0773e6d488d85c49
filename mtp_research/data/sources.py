"""Documents from corpus files and from the Python source of the running interpreter.

First stage of the data flow: sources -> tokenizer -> packing. A corpus file is
`DOMAIN.SPLIT.jsonl.xz` or `DOMAIN.SPLIT.N.jsonl.xz` (also uncompressed) with one JSON object a
line: `id`, `source`, and either `text` or `messages`. The domain `python` has no file; it is read
from the installed packages, so that nothing has to be shipped.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtp_research.data.json_lines import JsonLine, read_json_lines
from mtp_research.data.python_files import HELD_OUT_STDLIB, PYTHON_PACKAGES, python_files
from mtp_research.runtime.errors import ConfigError, IntegrityError

__all__ = [
    "HELD_OUT_STDLIB",
    "PYTHON_DOMAIN",
    "PYTHON_PACKAGES",
    "Document",
    "Split",
    "corpus_files",
    "load_corpus",
    "python_sources",
    "read_documents",
]

Split = Literal["train", "dev"]

PYTHON_DOMAIN = "python"


@dataclass(frozen=True)
class Document:
    """One unit of text: exactly one of `text` and `messages` is set.

    Attributes:
        doc_id: unique within its source.
        domain: corpus domain such as `math`, or `python`.
        text: plain document.
        messages: (role, content) pairs of a conversation; roles are `user` and `assistant`.
    """

    doc_id: str
    domain: str
    text: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None

    def __post_init__(self) -> None:
        """Reject a document that is both a text and a conversation, or neither."""
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"document {self.doc_id!r} needs exactly one of text and messages")


def load_corpus(corpus_dir: str | Path, *, domains: Sequence[str], split: Split) -> list[Document]:
    """Read every shard of `domains` in `split`, in the order of the file names.

    Raises:
        ConfigError: the folder or a domain's file is missing; names the key to change.
        IntegrityError: a file is damaged or a line does not follow the schema.
    """
    documents: list[Document] = []
    for domain in domains:
        for path in corpus_files(corpus_dir, domain=domain, split=split):
            documents.extend(read_documents(path, domain=domain))
    return documents


def corpus_files(corpus_dir: str | Path, *, domain: str, split: Split) -> list[Path]:
    """The shards of one domain and split, sorted by name.

    Raises:
        ConfigError: the folder is missing, or has no file of this domain and split.
    """
    folder = Path(corpus_dir)
    if not folder.is_dir():
        raise ConfigError(
            f"expected a folder of DOMAIN.{split}.jsonl.xz files, got {str(folder)!r}, which "
            "is not a folder; set model.pretrain.corpus_dir"
        )
    name = re.compile(rf"{re.escape(domain)}\.{split}(\.\d+)?\.jsonl(\.xz)?")
    found = sorted(path for path in folder.iterdir() if name.fullmatch(path.name))
    if not found:
        known = sorted({path.name.split(".")[0] for path in folder.glob(f"*.{split}.*jsonl*")})
        raise ConfigError(
            f"no {domain}.{split}.jsonl.xz in {folder}; it has {', '.join(known) or 'no domains'}; "
            "set model.pretrain.domain_weights or model.pretrain.corpus_dir"
        )
    return found


def read_documents(path: str | Path, *, domain: str | None = None) -> Iterator[Document]:
    """Yield the documents of one `.jsonl` or `.jsonl.xz` file of the corpus schema.

    Args:
        path: file to read.
        domain: domain of the documents; None takes each record's `domain` field, else the part
            of the file name before the first dot.

    Raises:
        IntegrityError: unreadable file, invalid JSON or a missing field; names file and line.
    """
    path = Path(path)
    for line in read_json_lines(path, key="data.path"):
        yield _document(line, path=path, domain=domain)


def _document(line: JsonLine, *, path: Path, domain: str | None) -> Document:
    where, record = line.where, line.record
    if not isinstance(record.get("id"), str):
        raise IntegrityError(f"{where}: expected a JSON object with a string `id`; fix the line")
    text, messages = record.get("text"), record.get("messages")
    if (text is None) == (messages is None):
        raise IntegrityError(f"{where}: expected exactly one of `text` and `messages`")
    if text is not None and not isinstance(text, str):
        raise IntegrityError(f"{where}: expected `text` to be a string, got {type(text).__name__}")
    return Document(
        doc_id=record["id"],
        domain=domain or record.get("domain") or path.name.split(".")[0],
        text=text,
        messages=None if messages is None else _parse_messages(messages, where=where),
    )


def _parse_messages(messages: object, *, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise IntegrityError(f"{where}: expected `messages` to be a non-empty list")
    turns = []
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise IntegrityError(f"{where}: expected messages with `role` and `content`")
        turns.append((str(message["role"]), str(message["content"])))
    return tuple(turns)


def python_sources(
    packages: Sequence[str] = PYTHON_PACKAGES, *, max_bytes: int, split: Split = "train"
) -> list[Document]:
    """Readable Python files of the running interpreter, at most `max_bytes` of them.

    Packages share `max_bytes` equally and what a small one leaves goes to the larger ones, so that
    the standard library is taken whole. Tests, generated files, data tables and held-out modules
    are left out, and so are licence headers. The choice depends on file names and sizes only.

    Args:
        packages: importable names, or `stdlib`.
        max_bytes: budget over all packages, before the split.
        split: `dev` is every 64th file by hash, `train` the others.

    Raises:
        ConfigError: a package is reserved for evaluation or is not installed.
    """
    return [
        Document(doc_id=name, domain=PYTHON_DOMAIN, text=text)
        for name, text in python_files(packages, max_bytes=max_bytes, split=split)
    ]
