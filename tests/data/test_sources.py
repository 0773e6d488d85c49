import json
import lzma
import sys
import sysconfig
from pathlib import Path

import pytest

from mtp_research.data.sources import (
    HELD_OUT_STDLIB,
    Document,
    load_corpus,
    python_sources,
    read_documents,
)
from mtp_research.runtime.errors import ConfigError, IntegrityError

TEXT = {"id": "a:1", "source": "s", "text": "One line.\nTwo."}
CHAT = {
    "id": "a:2",
    "source": "s",
    "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
}


def write_lines(path: Path, lines: list[str]) -> Path:
    text = "".join(f"{line}\n" for line in lines)
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf8")
    return path


@pytest.mark.parametrize("name", ["math.train.jsonl", "math.train.0.jsonl.xz"])
def test_read_documents_returns_both_forms(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / name, [json.dumps(TEXT), "", json.dumps(CHAT)])
    assert list(read_documents(path)) == [
        Document(doc_id="a:1", domain="math", text="One line.\nTwo."),
        Document(doc_id="a:2", domain="math", messages=(("user", "2 + 2?"), ("assistant", "4"))),
    ]


def test_read_documents_prefers_the_given_domain(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "answers.jsonl", [json.dumps({**TEXT, "domain": "code"})])
    assert next(read_documents(path)).domain == "code"
    assert next(read_documents(path, domain="other")).domain == "other"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "JSON"),
        ('["a"]', "expected a JSON object"),
        ('{"id": "x", "source": "s"}', "got the fields .'id', 'source'"),
        ('{"id": "x", "text": "t", "messages": [{"role": "user", "content": "c"}]}', "got both"),
        ('{"id": "x", "text": 3}', "string"),
        ('{"id": "x", "messages": []}', "expected `text`, `messages`"),
        ('{"id": "x", "prompt": "p"}', "an answer of the assistant to learn, as text, got none"),
        ('{"question": "q", "answer": 4}', "as text, got `answer` of type int; let the target"),
        ('{"id": "x", "messages": [{"role": "user"}]}', "`content`"),
    ],
)
def test_read_documents_bad_line_names_file_and_line(tmp_path: Path, line: str, words: str) -> None:
    path = write_lines(tmp_path / "math.dev.jsonl", [json.dumps(TEXT), line])
    with pytest.raises(IntegrityError, match=words) as caught:
        list(read_documents(path))
    assert f"{path}:2" in str(caught.value)


def test_read_documents_without_an_id_are_called_by_file_and_line(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "response": "r"}, {"text": "t"}, {"id": 7, "text": "u"}]
    path = write_lines(tmp_path / "own.jsonl", [json.dumps(row) for row in rows])
    assert list(read_documents(path)) == [
        Document("own.jsonl:1", "own", messages=(("user", "p"), ("assistant", "r"))),
        Document("own.jsonl:2", "own", text="t"),
        Document("7", "own", text="u"),
    ]


def test_read_documents_truncated_archive_is_an_integrity_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "math.dev.jsonl.xz", [json.dumps(TEXT)] * 500)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(IntegrityError, match=r"math\.dev\.jsonl\.xz"):
        list(read_documents(path))


def test_load_corpus_reads_all_shards_of_the_split_only(tmp_path: Path) -> None:
    names = ["p.train.0.jsonl", "p.train.1.jsonl.xz", "p.dev.jsonl", "prose.train.jsonl"]
    for name in names:
        write_lines(tmp_path / name, [json.dumps({**TEXT, "id": name})])
    found = load_corpus(tmp_path, domains=["p"], split="train")
    assert [document.doc_id for document in found] == names[:2]


def test_load_corpus_missing_folder_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.pretrain\.corpus_dir"):
        load_corpus(tmp_path / "none", domains=["math"], split="train")


def test_load_corpus_unknown_domain_lists_the_known_ones(tmp_path: Path) -> None:
    for name in ("b.train.jsonl", "a.train.jsonl"):
        write_lines(tmp_path / name, [json.dumps(TEXT)])
    with pytest.raises(ConfigError, match="a, b"):
        load_corpus(tmp_path, domains=["math"], split="train")


def test_document_with_text_and_messages_is_refused() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Document(doc_id="x", domain="d", text="t", messages=(("user", "u"),))


def test_held_out_modules_exist_in_this_interpreter() -> None:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    assert [name for name in HELD_OUT_STDLIB if not (stdlib / name).is_file()] == []
    assert len(HELD_OUT_STDLIB) == len(set(HELD_OUT_STDLIB)) >= 30


def test_python_sources_never_hold_held_out_code_or_tests() -> None:
    documents = [
        document
        for split in ("train", "dev")
        for document in python_sources(["stdlib"], max_bytes=10**9, split=split)
    ]
    names = {document.doc_id.rsplit("/", 1)[-1] for document in documents}
    folders = {part for document in documents for part in document.doc_id.split("/")[1:-1]}
    assert len(documents) > 300
    assert names.isdisjoint(HELD_OUT_STDLIB)
    assert names.isdisjoint(f"test_{name}" for name in HELD_OUT_STDLIB)
    assert folders.isdisjoint({"test", "tests", "site-packages", "networkx", "sympy"})


def test_python_sources_stay_in_budget_and_do_not_share_files_between_splits() -> None:
    train = python_sources(["stdlib", "numpy"], max_bytes=2_000_000)
    dev = python_sources(["stdlib", "numpy"], max_bytes=2_000_000, split="dev")
    total = sum(len((document.text or "").encode()) for document in train + dev)
    assert 1_800_000 < total <= 2_000_000
    assert {document.doc_id for document in train}.isdisjoint(d.doc_id for d in dev)
    assert train == python_sources(["stdlib", "numpy"], max_bytes=2_000_000)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sample_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_python_sources_strip_licences_and_skip_generated_files(package: Path) -> None:
    body = "def double(number):\n    return number + number\n\n\n" * 20
    (package / "simple.py").write_text(f"# Copyright someone\n# License: free\n\n{body}")
    (package / "made.py").write_text(f"# This file was automatically generated.\n{body}")
    (package / "table.py").write_text(f"table = {list(range(9000))}\n")
    (package / "csv.py").write_text(body)
    documents = python_sources(["sample_package"], max_bytes=10**6)
    assert [document.doc_id for document in documents] == ["sample_package/simple.py"]
    assert (documents[0].text or "").startswith("def double")


def test_python_sources_refuse_reserved_and_missing_packages() -> None:
    with pytest.raises(ConfigError, match="reserved"):
        python_sources(["networkx"], max_bytes=1000)
    with pytest.raises(ConfigError, match="not installed"):
        python_sources(["no_such_package_here"], max_bytes=1000)
    assert "no_such_package_here" not in sys.modules
