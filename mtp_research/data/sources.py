"""Documents from corpus files and from the Python source of the running interpreter.

First stage of the data flow: sources -> tokenizer -> packing. A corpus file is
`DOMAIN.SPLIT.jsonl.xz` or `DOMAIN.SPLIT.N.jsonl.xz` (also uncompressed) with one JSON object a
line: `id`, `source`, and either `text` or `messages`. Other files are read in any of the forms of
`data.rows` and `data.row_forms`. The domain `python` has no file; it is read
from the installed packages, so that nothing has to be shipped. The modules of the standard library
that evaluation may cut its code prompts from are listed here: no target is ever trained on them.
"""

import hashlib
import importlib.util
import re
import string
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtp_research.data.row_forms import ANSWERS, conversation_of
from mtp_research.data.rows import Row, read_rows
from mtp_research.runtime.errors import ConfigError, IntegrityError

Split = Literal["train", "dev"]

PYTHON_DOMAIN = "python"
PYTHON_PACKAGES = ("stdlib", "numpy", "triton", "torch", "transformers")
# Kept for evaluation by the corpus rules: code completion is measured on packages never trained on.
RESERVED_PACKAGES = ("jinja2", "mpmath", "networkx", "sympy")
# For code prompts. All exist as a single top-level file in Python 3.11, 3.12 and 3.13.
HELD_OUT_STDLIB = (
    "bisect.py", "calendar.py", "cmd.py", "codeop.py", "colorsys.py", "configparser.py",
    "contextlib.py", "copy.py", "csv.py", "difflib.py", "filecmp.py", "fnmatch.py", "fractions.py",
    "functools.py", "getopt.py", "glob.py", "graphlib.py", "heapq.py", "linecache.py", "mailbox.py",
    "netrc.py", "pprint.py", "queue.py", "random.py", "reprlib.py", "sched.py", "shelve.py",
    "shlex.py", "statistics.py", "string.py", "textwrap.py", "timeit.py",
)  # fmt: skip
MIN_SOURCE_BYTES = 400
MAX_SOURCE_BYTES = 200_000
_SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test",
    "testing", "tests", "turtledemo", *RESERVED_PACKAGES,
}  # fmt: skip
_GENERATED = re.compile(r"@generated|auto-?generated|automatically generated|do not edit", re.I)
# What readable code is mostly made of; tables of numbers or of escapes are not.
_CODE_BYTES = (string.ascii_letters + " \n_.,:=()[]\"'").encode()
_LICENCE_WORDS = ("copyright", "license", "licence")


@dataclass(frozen=True)
class Document:
    """One unit of text: exactly one of `text` and `messages` is set."""

    doc_id: str  # unique within its source
    domain: str  # corpus domain such as `math`, or `python`
    text: str | None = None  # plain document
    # (role, content) pairs of a conversation; the target's chat template says which roles it has
    messages: tuple[tuple[str, str], ...] | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"document {self.doc_id!r} needs exactly one of text and messages")

    @property
    def texts(self) -> list[str]:
        """The text, or what each turn says."""
        return [self.text or ""] if self.messages is None else [text for _, text in self.messages]


def load_corpus(corpus_dir: str | Path, *, domains: Sequence[str], split: Split) -> list[Document]:
    """Read every shard of `domains` in `split`, in the order of the file names."""
    documents: list[Document] = []
    for domain in domains:
        for path in corpus_files(corpus_dir, domain=domain, split=split):
            documents.extend(read_documents(path, domain=domain))
    return documents


def corpus_files(corpus_dir: str | Path, *, domain: str, split: Split) -> list[Path]:
    """The shards of one domain and split, sorted by name."""
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


def read_documents(
    source: str | Path, *, domain: str | None = None, key: str = "data.path"
) -> Iterator[Document]:
    """Yield the documents of a source that `rows.read_rows` takes.

    A `domain` of None takes each row's own, else the part of the file name before the first dot. A
    row without an id is called by its file and line.
    """
    for row in read_rows(source, key=key):
        yield document_of(row, domain=domain)


def document_of(row: Row, *, domain: str | None = None) -> Document:
    """The text of a row, or its conversation, in which the assistant must speak."""
    text, turns = row.record.get("text"), conversation_of(row)
    if text is not None and not isinstance(text, str):
        raise IntegrityError(
            f"{row.where}: expected `text` to be a string, got {type(text).__name__}."
        )
    if not text and not turns:
        raise IntegrityError(
            f"{row.where}: expected `text`, `messages`, `conversations`, or `prompt` and "
            f"`response`, got the fields {sorted(row.record)[:12]}; docs/data.md lists the forms."
        )
    if turns and text is not None:
        raise IntegrityError(f"{row.where}: expected a text or a conversation, got both.")
    if turns and all(role != "assistant" for role, _ in turns):
        kinds = {name: type(row.record[name]).__name__ for name in ANSWERS if name in row.record}
        odd = [f"`{name}` of type {kind}" for name, kind in kinds.items()]
        raise IntegrityError(
            f"{row.where}: expected an answer of the assistant to learn, as text, got "
            f"{odd[0] if odd else 'none'}; let the target answer with python -m mtp_research "
            "regenerate --source FILE."
        )
    return Document(
        doc_id=row.name or f"{row.file}:{row.number}",
        domain=domain or row.domain or row.stem,
        text=text,
        messages=turns or None,
    )


def python_sources(
    packages: Sequence[str] = PYTHON_PACKAGES, *, max_bytes: int, split: Split = "train"
) -> list[Document]:
    """Readable Python files of the running interpreter, at most `max_bytes` of them.

    Packages share `max_bytes` equally and what a small one leaves goes to the larger ones, so that
    the standard library is taken whole. Tests, generated files, data tables and held-out modules
    are left out, and so are licence headers. The choice depends on file names and sizes only.

    `packages` are importable names, or `stdlib`. `max_bytes` is the budget before the split, of
    which `dev` is every 64th file by hash, `train` the others.
    """
    readable = [_readable_files(package) for package in packages]
    readable.sort(key=lambda files: sum(len(file.texts[0]) for file in files))
    chosen: list[Document] = []
    budget = max_bytes
    for index, files in enumerate(readable):
        share = budget // (len(readable) - index)
        for file in sorted(files, key=lambda file: hash_of(file.doc_id)):
            num_bytes = len(file.texts[0].encode())
            if num_bytes <= share:
                share -= num_bytes
                budget -= num_bytes
                chosen.append(file)
    return [file for file in chosen if _is_dev(file.doc_id) == (split == "dev")]


def _readable_files(package: str) -> list[Document]:
    root = _package_root(package)
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _is_wanted(relative) and path.stat().st_size <= MAX_SOURCE_BYTES:
            text = _clean(path)
            if text is not None:
                name = f"{package}/{relative.as_posix()}"
                files.append(Document(doc_id=name, domain=PYTHON_DOMAIN, text=text))
    return files


def _package_root(package: str) -> Path:
    if package in RESERVED_PACKAGES:
        raise ConfigError(f"{package} is reserved for evaluation; leave it out of the packages")
    if package == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"package {package!r} is not installed; install it or leave it out")
    return Path(spec.origin).parent


def _is_wanted(relative: Path) -> bool:
    """Whether a file is neither a test nor held out; `relative` starts inside the package."""
    if _SKIPPED_FOLDERS & set(relative.parts) or re.match(r"test_|.*_test\.py$", relative.name):
        return False
    return relative.name not in HELD_OUT_STDLIB


def _clean(path: Path) -> str | None:
    """Text without its licence header; None for generated files and for data tables."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    num_odd = len(raw.translate(None, delete=_CODE_BYTES))
    if num_odd > 0.2 * len(raw) or _GENERATED.search(text[:2000]):
        return None
    header = re.match(r"(?:[ \t]*(?:#[^\n]*)?\n)*", text)
    if header and any(word in header.group().lower() for word in _LICENCE_WORDS):
        text = text[header.end() :]
    text = text.strip("\n") + "\n"
    return text if len(text) >= MIN_SOURCE_BYTES else None


def _is_dev(name: str) -> bool:
    return int(hash_of(name)[:8], 16) % 64 == 0


def hash_of(name: str) -> str:
    """Hexadecimal sha256 of a name: an order and a split that depend on nothing else."""
    return hashlib.sha256(name.encode()).hexdigest()
