import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from mtp_research.evaluation.run.prompt_files import MAX_LINE_BYTES, read_prompt_files
from mtp_research.runtime.errors import ConfigError, IntegrityError

GOOD = json.dumps({"question_id": 1, "category": "c", "turns": ["first", "second"]})


def _written(folder: Path, content: str | bytes, name: str = "set.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_turns_of_the_user_are_asked(tmp_path: Path):
    (prompt,) = read_prompt_files(_written(tmp_path, GOOD))
    assert (prompt.question_id, prompt.category) == ("1", "c")
    assert (prompt.turns, prompt.format, prompt.system) == (("first", "second"), "chat", None)


def test_messages_are_asked_without_the_assistants_turns(tmp_path: Path):
    said = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    (prompt,) = read_prompt_files(_written(tmp_path, json.dumps(row)))
    assert (prompt.turns, prompt.format, prompt.system) == (("a", "c"), "chat", "Be brief.")


def test_lines_of_a_text_file_are_completed(tmp_path: Path):
    prompts = read_prompt_files(_written(tmp_path, "one\n\ntwo\n", "own.txt"))
    assert [(p.question_id, p.turns, p.format) for p in prompts] == [
        ("own-1", ("one",), "completion"),
        ("own-3", ("two",), "completion"),
    ]


# One row each with the fields of the sets on the hub, which were not fetched here.
PUBLIC = {
    "mt_bench": ({"prompt": ["a", "b"], "prompt_id": 7, "category": "math", "reference": ["1"]},
                 ("7", "math", ("a", "b"), "chat")),
    "gsm8k": ({"question": "q", "answer": "#### 3"}, ("gsm8k-1", None, ("q",), "chat")),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f():", "test": "t", "entry_point": "f",
                   "canonical_solution": "s"}, ("HumanEval/0", None, ("def f():",), "completion")),
    "speed_bench": ({"question_id": "x", "category": "rag", "sub_category": "s", "turns": ["a"],
                     "multiturn": False}, ("x", "rag", ("a",), "chat")),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_rows_of_public_sets(name: str, tmp_path: Path):
    row, (question_id, category, turns, form) = PUBLIC[name]
    (prompt,) = read_prompt_files(_written(tmp_path, json.dumps(row), f"{name}.jsonl"))
    assert (prompt.question_id, prompt.turns, prompt.format) == (question_id, turns, form)
    assert prompt.category == (category or tmp_path.name)
    scored = ("reference", "answer", "test", "entry_point", "canonical_solution", "prompt")
    assert prompt.reference == {field: row[field] for field in scored if field in row}


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"prompt": "def f():"}, "completion"),
        ({"question": "why?"}, "chat"),
        ({"instruction": "do"}, "chat"),
        ({"question": "why?", "format": "completion"}, "completion"),
    ],
    ids=["prompt", "question", "instruction", "explicit format"],
)
def test_generic_row_gets_format_and_folder_as_category(tmp_path: Path, row: dict, form: str):
    (prompt,) = read_prompt_files(_written(tmp_path, json.dumps(row)))
    assert prompt.format == form
    assert prompt.category == tmp_path.name
    assert prompt.question_id == "set-1"


def test_gzip_blank_lines_and_byte_order_mark_are_read(tmp_path: Path):
    content = b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n\r\n  \n"
    path = _written(tmp_path, gzip.compress(content), "set.jsonl.gz")
    assert len(read_prompt_files(path)) == 1


def test_text_with_html_and_control_characters_is_kept(tmp_path: Path):
    text = "<script>alert(1)</script>\x00\x1b[31m\u2028 [bold]"
    (prompt,) = read_prompt_files(_written(tmp_path, json.dumps({"question": text})))
    assert prompt.turns[0] == text


def test_folder_is_read_in_name_order(tmp_path: Path):
    _written(tmp_path, json.dumps({"question": "b"}), "b.jsonl")
    _written(tmp_path, json.dumps({"question": "a"}), "a.jsonl")
    _written(tmp_path, "not a prompt file", "notes.md")
    assert [prompt.turns[0] for prompt in read_prompt_files(tmp_path)] == ["a", "b"]


def test_folder_of_sets_prefixes_ids(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        _written(tmp_path / name, GOOD, "question.jsonl")
    assert [prompt.question_id for prompt in read_prompt_files(tmp_path)] == ["one/1", "two/1"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "invalid JSON"),
        ("[" * 100_000, "invalid JSON"),
        ("[1]", "expected a JSON object, got list"),
        ("{}", "expected `turns`"),
        ('{"turns": []}', "or `text`, got nothing in turns"),
        ('{"question": ""}', "got nothing in question"),
        ('{"turns": "text"}', "expected `turns`"),
        ('{"turns": [1]}', "must be text or turns, got int"),
        ('{"question": " \\n"}', "must be text that is not empty"),
        ('{"question": "x", "question_id": null}', "question_id must be"),
        ('{"question": "x", "category": 3}', "category text"),
        ('{"question": "x", "format": "html"}', "format must be chat or completion, got 'html'"),
        ('{"question": "\\ud800"}', "surrogate"),
        ('{"question_id": 1, "question": "x"}', "question_id '1' occurs twice, first in"),
        ('{"question": "' + "x" * MAX_LINE_BYTES + '"}', "longer than 1000000 bytes"),
    ],
    ids=lambda value: value[:24],
)
def test_bad_line_is_refused_with_file_and_number(tmp_path: Path, line: str, fault: str):
    path = _written(tmp_path, f"{GOOD}\n\n{line}\n")
    with pytest.raises(IntegrityError) as caught:
        read_prompt_files(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_line_that_is_not_utf8_is_refused(tmp_path: Path):
    with pytest.raises(IntegrityError, match=":2: not UTF-8"):
        read_prompt_files(_written(tmp_path, GOOD.encode() + b"\n\xff\xfe\n"))


@pytest.mark.parametrize("content", [b"", b"\n \n"], ids=["empty", "blank"])
def test_empty_file_is_refused(tmp_path: Path, content: bytes):
    with pytest.raises(IntegrityError, match=r"set\.jsonl holds no prompts"):
        read_prompt_files(_written(tmp_path, content))


@pytest.mark.parametrize("damage", ["truncated", "not gzip"])
def test_damaged_gzip_is_refused(tmp_path: Path, damage: str):
    packed = gzip.compress(b'{"question": "why?"}\n' * 50)
    content = packed[:-10] if damage == "truncated" else b"plain text"
    with pytest.raises(IntegrityError, match="compressed file is damaged"):
        read_prompt_files(_written(tmp_path, content, "set.jsonl.gz"))


def test_folder_without_prompt_files_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"prompts\.path .* holds no file that ends in"):
        read_prompt_files(tmp_path)


def test_line_of_50_megabytes_is_refused_without_reading_it(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    with path.open("wb") as file:
        file.write(b'{"question": "')
        file.truncate(50_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match=":1: longer than 1000000 bytes"):
            read_prompt_files(path)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_row_whose_text_is_withheld_is_refused(tmp_path: Path):
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING ..."
    with pytest.raises(IntegrityError, match=r":1: the text is withheld; fetch it"):
        read_prompt_files(_written(tmp_path, json.dumps({"question_id": "a", "turns": [text]})))
