"""The reader of JSON lines: what it yields, what it refuses, in plain and compressed files."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_research.data.json_lines import read_json_lines
from mtp_research.runtime.errors import ConfigError, IntegrityError


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_blank_lines_are_counted_and_left_out(
    suffix: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(b'\xef\xbb\xbf{"x": 1}\n\n  \n{"x": "\xc3\xa4"}'))
    lines = list(read_json_lines(path, key="data.path"))
    assert [(line.number, line.where, line.record) for line in lines] == [
        (1, f"{path}:1", {"x": 1}),
        (4, f"{path}:4", {"x": "\u00e4"}),
    ]


def test_rows_before_a_fault_are_yielded(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(lzma.compress(b'{"x": 1}\n' * 20_000)[:-40])
    lines = read_json_lines(path, key="data.path")
    assert next(lines).record == {"x": 1}
    with pytest.raises(IntegrityError, match=r"a\.jsonl\.xz:\d+: the compressed file is damaged"):
        list(lines)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b'{"x": ' + b"7" * 5000 + b"}", "a number of too many digits"),
        (b'{"x": "' + b"7" * 8_000_000 + b'"}', "longer than 8000000 bytes"),
        (b'{"x": "\xff"}', "not UTF-8"),
    ],
    ids=["nested", "digits", "long", "bytes"],
)
def test_line_that_is_refused_is_named(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": 1}\n' * 6 + line + b"\n")
    with pytest.raises(IntegrityError, match=rf"a\.jsonl:7: .*{reason}"):
        list(read_json_lines(path, key="data.path"))


def test_file_that_cannot_be_opened_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path .* cannot be read: No such file"):
        next(read_json_lines(tmp_path / "none.jsonl", key="data.path"))
