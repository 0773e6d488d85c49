"""JSON lines, plain or compressed: the one reader of training text, questions and prompts."""

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mtp_research.runtime.errors import ConfigError, IntegrityError

# A longer line is no row but another kind of file. Parsed, a line takes 20 times its size.
MAX_LINE_BYTES = 8_000_000
_OPENERS = {".xz": lzma.open, ".gz": gzip.open}


class JsonLine(NamedTuple):
    """A row and where it stands."""

    number: int  # from 1, blank lines counted
    where: str  # FILE:NUMBER, for messages
    record: dict


def read_json_lines(
    path: Path, *, key: str, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[JsonLine]:
    """Yield the JSON object of every line that is not blank; reads one line ahead at most.

    Args:
        path: `.jsonl`, or such a file with the ending `.xz` or `.gz`.
        key: configuration key or option that names the file, for messages.
        max_line_bytes: a longer line is refused.

    Raises:
        ConfigError: the file cannot be opened.
        IntegrityError: it is damaged or not UTF-8, or a line is too long or no JSON object; the
            message names file and line.
    """
    number = 0
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            while line := file.readline(max_line_bytes + 1):
                number += 1
                where = f"{path}:{number}"
                if len(line) > max_line_bytes:
                    raise IntegrityError(
                        f"{where}: longer than {max_line_bytes} bytes; shorten or remove the line."
                    )
                if text := line.decode("utf-8-sig" if number == 1 else "utf8").strip():
                    yield JsonLine(number, where, _parse(text, where))
    except UnicodeDecodeError as fault:
        raise IntegrityError(f"{path}:{number}: not UTF-8 ({fault.reason}).") from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as fault:
        raise IntegrityError(
            f"{path}:{number}: the compressed file is damaged after this line ({fault}); fetch it "
            "again."
        ) from None
    except OSError as fault:
        raise ConfigError(f"{key} {str(path)!r} cannot be read: {fault.strerror}.") from None


def _parse(line: str, where: str) -> dict:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as fault:
        reason = "a number of too many digits"
        if isinstance(fault, json.JSONDecodeError):
            reason = fault.msg
        elif isinstance(fault, RecursionError):
            reason = "nested too deeply"
        raise IntegrityError(
            f"{where}: expected one JSON object a line, got invalid JSON ({reason})."
        ) from None
    if not isinstance(record, dict):
        raise IntegrityError(f"{where}: expected a JSON object, got {type(record).__name__}.")
    return record
