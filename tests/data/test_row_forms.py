"""Conversations from the forms that public data sets have, and the questions in them."""

import gzip
import json
import lzma

import pytest

from mtp_research.data.row_forms import conversation_of, read_questions
from mtp_research.data.rows import read_rows
from mtp_research.runtime.errors import ConfigError, IntegrityError

SYSTEM = {"role": "system", "content": "Be brief."}
USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}


def write(path, records, opener=open):
    with opener(path, "wt", encoding="utf8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return str(path)


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [USER, ANSWER, USER]}, [("user", "Why?")]),
        ({"messages": [SYSTEM, USER, ANSWER]}, [("system", "Be brief."), ("user", "Why?")]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            [("user", "a")],
        ),
        ({"turns": ["first", "second"]}, [("user", "first")]),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, [("user", "Add.\n\n1 2")]),
        ({"instruction": "Sing.", "input": ""}, [("user", "Sing.")]),
        ({"prompt": "p", "completion": "c"}, [("user", "p")]),
        ({"question": "q", "answer": "a"}, [("user", "q")]),
    ],
    ids=["messages", "system", "sharegpt", "turns", "alpaca", "alpaca-bare", "prompt", "question"],
)
def test_questions_of_each_known_form(tmp_path, record, messages):
    unusable = [{"text": "plain"}, {"messages": [ANSWER]}, {"prompt": ""}]
    source = write(tmp_path / "set.train.jsonl", [*unusable, record])
    (question,) = read_questions(source)
    assert list(question.messages) == messages
    assert (question.doc_id, question.domain) == ("set.train.jsonl:4", "set")


def test_questions_keep_ids_and_domains_and_no_id_is_used_twice(tmp_path):
    rows = [{"id": "a", "category": "math", "prompt": "1"}, {"id": "a", "prompt": "2"}]
    rows.append({"question_id": 7, "prompt": "3"})
    questions = read_questions(write(tmp_path / "x.jsonl", rows))
    assert [question.doc_id for question in questions] == ["a", "x.jsonl:2", "7"]
    assert [question.domain for question in questions] == ["math", "x", "x"]


@pytest.mark.parametrize(("suffix", "opener"), [(".xz", lzma.open), (".gz", gzip.open)])
def test_questions_of_packed_files_and_a_cut_one(tmp_path, suffix, opener):
    path = tmp_path / f"set.jsonl{suffix}"
    source = write(path, [{"task": "t", "prompt": "p"}] * 50, opener)
    assert len(read_questions(source)) == 50
    assert read_questions(source, field="task")[0].messages == (("user", "t"),)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(IntegrityError, match=r"set\.jsonl"):
        read_questions(source)


@pytest.mark.parametrize("number", [1, 2])
def test_questions_bad_line_is_named(tmp_path, number):
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "p"}\n' * (number - 1) + ("{" if number == 1 else "[1]") + "\n")
    with pytest.raises(IntegrityError, match=rf"set\.jsonl:{number}: expected"):
        read_questions(str(path))


def test_questions_without_a_known_field_name_the_key(tmp_path):
    source = write(tmp_path / "set.jsonl", [{"body": "b"}])
    with pytest.raises(ConfigError, match=r"got the fields body; rename one, or set --field"):
        read_questions(source)
    misspelt = write(tmp_path / "misspelt.jsonl", [{"prompts": "b"}])
    with pytest.raises(ConfigError, match=r"got the fields prompts; nearest: prompt; rename"):
        read_questions(misspelt)
    with pytest.raises(ConfigError, match="must be an existing file or folder"):
        read_questions(str(tmp_path / "none.jsonl"))


def test_questions_of_a_saved_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [USER, ANSWER], "category": "c"}, {"messages": [ANSWER], "category": "c"}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (question,) = read_questions(str(tmp_path / "saved"))
    assert (question.doc_id, question.domain) == ("saved:1", "c")
    assert question.messages == (("user", "Why?"),)
    with pytest.raises(ConfigError, match="--source must be an existing file"):
        read_questions(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"messages": [SYSTEM, USER, ANSWER]}, "system: Be brief. | user: Why? | assistant: So."),
        (
            {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]},
            "system: s | user: a",
        ),
        ({"prompt": "p", "response": "r"}, "user: p | assistant: r"),
        ({"prompt": "p", "completion": "c", "system": "s"}, "system: s | user: p | assistant: c"),
        ({"prompt": ["one", "two"]}, "user: one | user: two"),
        ({"prompt": [USER], "answer": "r"}, "user: Why? | assistant: r"),
        ({"instruction": "i", "input": "x", "output": "o"}, "user: i\n\nx | assistant: o"),
        ({"question": "q", "answer": 7}, "user: q"),
        ({"turns": ["a", "b"], "response": "no"}, "user: a | user: b"),
        ({"text": "plain"}, ""),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "t"}]}]},
            "user: t",
        ),
    ],
)
def test_conversation_of_each_form(tmp_path, record, turns):
    (row,) = read_rows(write(tmp_path / "x.jsonl", [record]), key="data.path")
    assert " | ".join(f"{role}: {content}" for role, content in conversation_of(row)) == turns


@pytest.mark.parametrize(
    "turn", [{"role": "user"}, {"content": "c"}, {"role": "user", "content": [{"image": "x"}]}, 7]
)
def test_turn_without_role_or_text_is_named(tmp_path, turn):
    (row,) = read_rows(write(tmp_path / "x.jsonl", [{"messages": [turn]}]), key="data.path")
    with pytest.raises(IntegrityError, match=r"x\.jsonl:1: `messages` must"):
        conversation_of(row)
