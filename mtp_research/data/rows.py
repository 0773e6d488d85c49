"""Rows of text from outside: the one reader of training text, questions and prompts.

A source is a file, a folder of such files, a folder that `datasets` saved, an address, or the name
of a data set on the hub, `ORGANISATION/NAME[:CONFIG][@SPLIT]` (split `train` unless it is said):

    .jsonl, .json   one JSON object a line, or one array of them; also packed as .gz or .xz
    .parquet        read by `datasets`, as hub names and addresses are
    .txt            plain text: one row, or one a line where the caller wants lines

What rows mean is the business of `conversation_of` and of the callers; docs/data.md has the table.
"""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.runtime.files import sha256_of

# A longer line is no row but another kind of file. Parsed, a line takes 20 times its size.
MAX_LINE_BYTES = 8_000_000
_MAX_ARRAY_BYTES = 2_000_000_000  # an array is read whole
_OPENERS = {".xz": lzma.open, ".gz": gzip.open}
_KINDS = (".jsonl", ".json", ".parquet", ".txt")
SUFFIXES = (*_KINDS, *(f"{kind}{packed}" for kind in (".jsonl", ".json") for packed in _OPENERS))
_SAVED = ("state.json", "dataset_dict.json")  # of `datasets`
_ADDRESS = ("https://", "http://")
_NUM_HUB_ID_PARTS = 2
# Fields that name a row, and the group that it is reported in.
_ID_FIELDS = ("id", "question_id", "task_id", "prompt_id")
_DOMAIN_FIELDS = ("domain", "category")


@dataclass(frozen=True)
class Row:
    """One row and where it stands."""

    where: str  # FILE:LINE, FILE[INDEX] or NAME[INDEX], for messages
    file: str  # name of its file without the folder, or of the data set
    folder: str  # name of the folder it was found in below the source; empty otherwise
    parent: str  # name of the folder that holds the file, or of the data set
    number: int  # line from 1, blank ones counted; index from 1 where there are no lines
    record: Mapping[str, Any]

    @property
    def stem(self) -> str:
        """The file's name up to its first dot."""
        return self.file.partition(".")[0]

    @property
    def name(self) -> str | None:
        """The row's own id, if it has one."""
        return first_of(self.record, _ID_FIELDS)

    @property
    def domain(self) -> str | None:
        """The row's own domain or category, if it has one."""
        return first_of(self.record, _DOMAIN_FIELDS)


def first_of(record: Mapping[str, object], names: tuple[str, ...]) -> str | None:
    """The first of the fields that the record has, as text."""
    return next((str(record[name]) for name in names if record.get(name) is not None), None)


def read_rows(
    source: str | Path,
    *,
    key: str,
    max_line_bytes: int = MAX_LINE_BYTES,
    text_lines: bool = False,
) -> Iterator[Row]:
    """Yield the rows of a source (see the module), files of a folder in the order of their names.

    Args:
        source: a folder without files of its own stands for the `question.jsonl` of its folders.
        key: configuration key or option that names the source, for messages.
        max_line_bytes: a longer line is refused.
        text_lines: a `.txt` file has a row in every line that is not blank.

    Raises:
        ConfigError: there is no such source, or it cannot be opened.
        EnvironmentFault: `datasets` is missing, or the network.
        IntegrityError: a file is damaged or not UTF-8, or a line is too long or no JSON object; the
            message names file and line.
    """
    path = Path(source)
    if _is_saved(path) or is_remote(str(source)):
        yield from _dataset_rows(str(source), key=key)
        return
    for file in source_files(path, key=key):
        folder = file.parent.name if path.is_dir() and file.parent != path else ""
        place = {"file": file.name, "folder": folder, "parent": file.resolve().parent.name}
        reading = _read_file(file, key=key, max_line_bytes=max_line_bytes, text_lines=text_lines)
        for where, number, record in reading:
            yield Row(where=where, number=number, record=record, **place)


def source_files(path: Path, *, key: str) -> list[Path]:
    """The files that a local source stands for, sorted (`ConfigError` where there are none)."""
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise ConfigError(
                f"{key} must be a file that ends in {', '.join(_KINDS)} (the first two also .gz or "
                f".xz), got {str(path)!r}; rename or convert it."
            )
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"{key} must be an existing file or folder, an address, or a data set "
            f"ORGANISATION/NAME[:CONFIG][@SPLIT], got {str(path)!r} (from {Path.cwd()}); set {key}."
        )
    files = [file for file in path.iterdir() if file.name.endswith(SUFFIXES)]
    files = files or list(path.glob("*/question.jsonl"))
    if not files:
        raise ConfigError(
            f"{key} {str(path)!r} holds no file that ends in {', '.join(_KINDS)} (folders in it "
            f"are not read); set {key} to a file or to a folder of such files."
        )
    return sorted(files)


def is_remote(source: str) -> bool:
    """Whether a source is an address or, where no such path exists, a name on the hub."""
    if source.startswith(_ADDRESS):
        return True
    name = source.partition("@")[0].partition(":")[0]
    parts = name.split("/")
    looks_like_name = len(parts) == _NUM_HUB_ID_PARTS and all(parts) and source[0] not in ".~"
    return looks_like_name and not source.endswith(SUFFIXES) and not Path(source).exists()


def check_source_exists(source: str, *, key: str) -> None:
    """Refuse a source that is not there or holds nothing of use, without reading it."""
    if not _is_saved(Path(source)) and not is_remote(source):
        source_files(Path(source), key=key)


def source_sha256(source: str, *, key: str) -> str:
    """Hash of a source: of the file, of the hashes of a folder's files, or of all rows."""
    path = Path(source)
    if path.is_file():
        return sha256_of(path)
    digest = hashlib.sha256()
    if _is_saved(path) or is_remote(source):
        for row in read_rows(source, key=key):
            digest.update(json.dumps(row.record, sort_keys=True, default=str).encode())
    else:
        for file in source_files(path, key=key):
            digest.update(sha256_of(file).encode())
    return digest.hexdigest()


class _Found(NamedTuple):
    where: str
    number: int
    record: Mapping[str, Any]


def _read_file(path: Path, *, key: str, max_line_bytes: int, text_lines: bool) -> Iterator[_Found]:
    packed = path.suffix if path.suffix in _OPENERS else ""
    kind = Path(path.name.removesuffix(packed)).suffix
    if kind == ".parquet":
        for index, record in enumerate(_load("parquet", data_files=str(path), key=key)):
            yield _Found(f"{path}[{index}]", index + 1, record)
    elif kind == ".txt":
        yield from _text_rows(path, key=key, text_lines=text_lines)
    elif kind == ".json" and _begins_with_array(path, key=key):
        yield from _array_rows(path, key=key)
    else:
        yield from _json_lines(path, key=key, max_line_bytes=max_line_bytes)


@contextmanager
def _opened(path: Path, *, key: str, place: list[int]) -> Iterator[Any]:
    """The bytes of a file, unpacked; faults name the line that `place` holds."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield file
    except UnicodeDecodeError as fault:
        raise IntegrityError(f"{path}:{place[0]}: not UTF-8 ({fault.reason}).") from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as fault:
        raise IntegrityError(
            f"{path}:{place[0]}: the compressed file is damaged after this line ({fault}); fetch "
            "it again."
        ) from None
    except OSError as fault:
        raise ConfigError(f"{key} {str(path)!r} cannot be read: {fault.strerror}.") from None


def _json_lines(path: Path, *, key: str, max_line_bytes: int) -> Iterator[_Found]:
    """Reads one line ahead at most."""
    place = [0]
    with _opened(path, key=key, place=place) as file:
        while line := file.readline(max_line_bytes + 1):
            place[0] += 1
            where = f"{path}:{place[0]}"
            if len(line) > max_line_bytes:
                raise IntegrityError(
                    f"{where}: longer than {max_line_bytes} bytes; shorten or remove the line."
                )
            if text := line.decode("utf-8-sig" if place[0] == 1 else "utf8").strip():
                yield _Found(where, place[0], _object(_parse(text, where), where))


def _begins_with_array(path: Path, *, key: str) -> bool:
    with _opened(path, key=key, place=[1]) as file:
        start = file.read(1024).decode("utf-8-sig", errors="ignore").lstrip()
    return start.startswith("[")


def _array_rows(path: Path, *, key: str) -> Iterator[_Found]:
    with _opened(path, key=key, place=[1]) as file:
        content = file.read(_MAX_ARRAY_BYTES + 1)
        if len(content) > _MAX_ARRAY_BYTES:
            raise IntegrityError(
                f"{path}: an array of more than {_MAX_ARRAY_BYTES} bytes; write one object a line."
            )
        rows = _parse(content.decode("utf-8-sig"), str(path))
    for index, row in enumerate(rows):
        where = f"{path}[{index}]"
        yield _Found(where, index + 1, _object(row, where))


def _text_rows(path: Path, *, key: str, text_lines: bool) -> Iterator[_Found]:
    with _opened(path, key=key, place=[1]) as file:
        text = file.read().decode("utf-8-sig")
    if not text_lines:
        if text.strip():
            yield _Found(f"{path}:1", 1, {"text": text})
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield _Found(f"{path}:{number}", number, {"text": line.strip()})


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as fault:
        reason = "a number of too many digits"
        if isinstance(fault, json.JSONDecodeError):
            reason = fault.msg
        elif isinstance(fault, RecursionError):
            reason = "nested too deeply"
        raise IntegrityError(
            f"{where}: expected one JSON object a line, got invalid JSON ({reason})."
        ) from None


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise IntegrityError(f"{where}: expected a JSON object, got {type(value).__name__}.")
    return value


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in _SAVED)


def _dataset_rows(source: str, *, key: str) -> Iterator[Row]:
    """Rows of a folder that `datasets` saved, of an address, or of a name on the hub."""
    place = source
    if _is_saved(Path(source)) or source.startswith(_ADDRESS):
        split = "train"
    else:
        place, _, split = source.partition("@")
    if source.startswith(_ADDRESS):
        kind = "parquet" if source.endswith(".parquet") else "json"
        rows = _load(kind, data_files=source, key=key)
    else:
        name, _, config = place.partition(":")
        rows = _load(name, config or None, split=split or "train", key=key)
    short = place.partition(":")[0].rstrip("/").rpartition("/")[2]
    for index, record in enumerate(rows):
        yield Row(f"{short}[{index}]", short, "", short, index + 1, record)


def _load(
    name: str, *config: str | None, key: str, split: str = "train", **options: str
) -> Iterator[Mapping[str, Any]]:
    """Rows that `datasets` reads; hub names and addresses are kept in its own cache."""
    try:
        import datasets
    except ImportError as fault:
        raise EnvironmentFault(
            f"{key} needs the package datasets ({fault}); install mtp-research[train]."
        ) from fault
    try:
        if _is_saved(Path(name)):
            found = datasets.load_from_disk(name)
            rows = found[split] if isinstance(found, datasets.DatasetDict) else found
        else:
            loading: dict[str, Any] = {"split": split, **options}
            loading["streaming"] = name == "parquet"  # a local file needs no copy in the cache
            rows = datasets.load_dataset(name, *config, **loading)
        for record in rows:
            yield cast(Mapping[str, Any], record)
    except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as fault:
        raise EnvironmentFault(
            f"{key} {name!r} is no local path (from {Path.cwd()}) and cannot be fetched "
            f"({_reason(fault)}); set {key} to a file, or fetch it where there is a network."
        ) from fault
    except (KeyError, OSError, ValueError, datasets.exceptions.DatasetsError) as fault:
        raise ConfigError(
            f"{key} must be a data set with the split {split}, or a whole file, got "
            f"{options.get('data_files', name)} ({_reason(fault)}); set {key}."
        ) from fault


def _reason(fault: BaseException) -> str:
    return " ".join(str(fault).split())[:200] or type(fault).__name__
