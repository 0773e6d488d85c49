"""The reader of rows: what it yields and refuses, in each kind of file and source."""

import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_research.data.rows import check_source_exists, is_remote, read_rows, source_sha256
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_blank_lines_are_counted_and_left_out(
    suffix: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(b'\xef\xbb\xbf{"x": 1}\n\n  \n{"x": "\xc3\xa4"}'))
    lines = list(read_rows(path, key="data.path"))
    assert [(line.number, line.where, line.record) for line in lines] == [
        (1, f"{path}:1", {"x": 1}),
        (4, f"{path}:4", {"x": "\u00e4"}),
    ]


def test_rows_before_a_fault_are_yielded(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(lzma.compress(b'{"x": 1}\n' * 20_000)[:-40])
    lines = read_rows(path, key="data.path")
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
        list(read_rows(path, key="data.path"))


def records(source: object, **options: object) -> list:
    return [row.record for row in read_rows(str(source), key="data.path", **options)]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.json.xz"])
def test_array_is_read_as_rows_and_lines_in_a_json_file_too(name: str, tmp_path: Path) -> None:
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
    path = tmp_path / name
    path.write_bytes(pack(b'\n [{"x": 1},\n {"x": 2}]'))
    rows = list(read_rows(path, key="data.path"))
    assert [(row.where, row.number, row.record) for row in rows] == [
        (f"{path}[0]", 1, {"x": 1}),
        (f"{path}[1]", 2, {"x": 2}),
    ]
    path.write_bytes(pack(b'{"x": 1}\n{"x": 2}\n'))
    assert records(path) == [{"x": 1}, {"x": 2}]
    path.write_bytes(pack(b'[{"x": 1}, 7]'))
    with pytest.raises(IntegrityError, match=r"\[1\]: expected a JSON object, got int"):
        records(path)


def test_text_file_is_one_row_or_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\ufeffone\n\n  two \n", encoding="utf8")
    assert records(path) == [{"text": "one\n\n  two \n"}]
    assert records(path, text_lines=True) == [{"text": "one"}, {"text": "two"}]
    assert [row.number for row in read_rows(path, key="x", text_lines=True)] == [1, 3]
    path.write_bytes(b"\xff")
    with pytest.raises(IntegrityError, match=r"a\.txt:1: not UTF-8"):
        records(path)


def test_parquet_and_saved_folders_are_read_by_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    wanted = [{"id": "a", "x": 1}, {"id": "b", "x": 2}]
    table = datasets.Dataset.from_list(wanted)
    table.to_parquet(str(tmp_path / "a.parquet"))
    assert records(tmp_path / "a.parquet") == wanted
    (row, _) = read_rows(tmp_path / "a.parquet", key="data.path")
    assert (row.where, row.name) == (f"{tmp_path}/a.parquet[0]", "a")
    table.save_to_disk(str(tmp_path / "saved"))
    assert records(tmp_path / "saved") == wanted
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "splits"))
    assert records(tmp_path / "splits") == wanted
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises((ConfigError, IntegrityError), match=r"data\.path .*bad\.parquet"):
        records(tmp_path / "bad.parquet")


def test_folder_has_its_files_by_name_and_others_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"x": 2}\n')
    (tmp_path / "a.json").write_text('[{"x": 1}]')
    (tmp_path / "notes.md").write_text("not a row")
    assert records(tmp_path) == [{"x": 1}, {"x": 2}]
    before = source_sha256(str(tmp_path), key="data.path")
    (tmp_path / "notes.md").write_text("still none")
    assert source_sha256(str(tmp_path), key="data.path") == before
    (tmp_path / "b.jsonl").write_text('{"x": 3}\n')
    assert source_sha256(str(tmp_path), key="data.path") != before


def test_names_of_the_hub_are_told_from_paths(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "set").mkdir()
    assert is_remote("openai/gsm8k")
    assert is_remote("openai/gsm8k:main@test")
    assert is_remote("https://example.org/question.jsonl")
    for local in ("data/set", "data/answers.jsonl", "./a/b", "/a/b", "answers", "a/b/c"):
        assert not is_remote(local)


def test_hub_name_configuration_and_split_reach_datasets(monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    seen = []

    def load(name: str, *config: object, **options: object) -> list:
        seen.append((name, *config, options["split"], options.get("data_files")))
        return [{"question": "q"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    (row,) = read_rows("openai/gsm8k:main@test", key="prompts.path")
    assert (row.where, row.parent, row.stem, row.number) == ("gsm8k[0]", "gsm8k", "gsm8k", 1)
    assert records("org/name") == [{"question": "q"}]
    assert records("https://x.org/d/question.jsonl") == [{"question": "q"}]
    assert seen == [
        ("openai/gsm8k", "main", "test", None),
        ("org/name", None, "train", None),
        ("json", "train", "https://x.org/d/question.jsonl"),
    ]


def test_hub_name_without_a_network_is_one_line(monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        EnvironmentFault,
        match=r"'org/name' is no local path \(from /.*cannot be fetched \(no route\)",
    ):
        list(read_rows("org/name", key="prompts.path"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path, "must be an existing file or folder"),
        (lambda path: path.mkdir(), "holds no file that ends in .jsonl, .json, .parquet, .txt"),
    ],
    ids=["missing", "empty"],
)
def test_source_that_is_not_there_is_refused_without_reading(make, words, tmp_path: Path) -> None:
    make(tmp_path / "source")
    with pytest.raises(ConfigError, match=rf"data\.path .*{words}"):
        check_source_exists(str(tmp_path / "source"), key="data.path")


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ConfigError, match=r"data\.path must be a file that ends in .*a\.csv"):
        check_source_exists(str(tmp_path / "a.csv"), key="data.path")


def test_file_that_cannot_be_opened_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path must be an existing file or folder"):
        next(read_rows(tmp_path / "none.jsonl", key="data.path"))
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"x": 1}))
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root reads everything")
    with pytest.raises(ConfigError, match=r"data\.path .* cannot be read: Permission denied"):
        next(read_rows(path, key="data.path"))
