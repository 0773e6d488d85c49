"""Reading and splitting documents of heads."""

import json
import lzma
import math
import shutil

import pytest

from mtp_research.config.training_schema import DataConfig
from mtp_research.data.packing import EncodedDocument
from mtp_research.data.sources import Document
from mtp_research.data.tokenizer import END_ID, EOS_ID, save_tokenizer, train_tokenizer
from mtp_research.models.target import load_tokenizer
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from mtp_research.training.documents import (
    held_out_indices,
    load_head_documents,
    mark_words,
    overlap,
    read_head_documents,
)

LAB_TARGET = REPOSITORY_ROOT / "assets" / "lab_tiny" / "target"
LAB_CONFIG = LAB_TARGET / "config.json"


def trajectory(index: int, *, num_tokens: int = 12) -> dict:
    return {
        "id": f"d{index}",
        "domain": ("code", "math", "prose")[index % 3],
        "token_ids": [6 + (index * 4 + place) % 120 for place in range(num_tokens)],
        "num_prompt_tokens": 4,
    }


def numbered(turns: list[dict], index: int) -> list[dict]:
    """The conversation with other words, since documents that occur in training are dropped."""
    return [turn | {"content": f"{turn['content']}{index}"} for turn in turns]


def load(path, *, eval_documents=3, max_documents=None, model_path="", vocab_size=128):
    data = DataConfig(str(path), eval_documents=eval_documents, max_documents=max_documents)
    found = read_head_documents(data)
    return load_head_documents(
        data, found, model_path=str(model_path), vocab_size=vocab_size, num_depths=3
    )


def write(path, records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.jsonl.xz"])
def test_load_head_documents_token_ids_are_taken_as_they_are(tmp_path, name):
    documents = load(write(tmp_path / name, [trajectory(index) for index in range(9)]))
    assert len(documents.train) == 6
    assert len(documents.held_out) == 3
    document = documents.train[0]
    assert list(document.token_ids) == trajectory(int(document.doc_id[1:]))["token_ids"]
    assert document.loss_mask == (False,) * 4 + (True,) * 8
    assert len(documents.data_sha256) == 64


def test_load_head_documents_with_the_id_of_a_held_out_one_are_not_trained_on(tmp_path, caplog):
    records = [trajectory(index) for index in range(9)]
    documents = load(write(tmp_path / "a.jsonl", [*records, *records]))
    held_out = {document.doc_id for document in documents.held_out}
    assert not held_out & {document.doc_id for document in documents.train}
    assert len(documents.train) + len(documents.held_out) < 18
    assert "documents have the id of a held-out one and are left out of training" in caplog.text


def test_load_head_documents_held_out_covers_every_domain(tmp_path):
    path = write(tmp_path / "answers.jsonl", [trajectory(index) for index in range(30)])
    documents = load(path, eval_documents=6)
    assert sorted(document.domain for document in documents.held_out) == [
        *("code", "code", "math", "math", "prose", "prose")
    ]
    train = {document.doc_id for document in documents.train}
    assert not train & {document.doc_id for document in documents.held_out}


def test_held_out_indices_do_not_depend_on_file_order():
    documents = [
        EncodedDocument(f"d{index}", ("a", "b")[index % 2], (6, 7), (True, True))
        for index in range(20)
    ]
    chosen = {documents[index].doc_id for index in held_out_indices(documents, num_documents=7)}
    backwards = documents[::-1]
    again = {backwards[index].doc_id for index in held_out_indices(backwards, num_documents=7)}
    assert chosen == again


def test_load_head_documents_small_domain_leaves_its_places_to_others(tmp_path):
    records = [trajectory(index) | {"domain": "big"} for index in range(9)]
    path = write(tmp_path / "answers.jsonl", [*records, trajectory(9) | {"domain": "small"}])
    documents = load(path, eval_documents=5)
    assert [document.domain for document in documents.held_out].count("big") == 4


def test_load_head_documents_short_ones_are_counted(tmp_path):
    records = [trajectory(index, num_tokens=4 if index < 5 else 12) for index in range(12)]
    documents = load(write(tmp_path / "answers.jsonl", records))
    short = [d for d in documents.held_out if len(d.token_ids) == 4]
    assert documents.num_short == 5 - len(short)
    assert len(documents.train) == 12 - 3 - documents.num_short


def test_load_head_documents_max_documents_thins_out(tmp_path):
    path = write(tmp_path / "answers.jsonl", [trajectory(index) for index in range(20)])
    documents = load(path, max_documents=8)
    assert len(documents.train) + len(documents.held_out) == 8


def test_load_head_documents_messages_and_text_are_encoded(tmp_path):
    texts = ["some words to learn from", "more words, and 12 digits"]
    tokenizer = train_tokenizer(
        [Document(doc_id=text, domain="prose", text=text) for text in texts], vocab_size=280
    )
    save_tokenizer(tokenizer, tmp_path / "target")
    shutil.copy(LAB_CONFIG, tmp_path / "target")
    turns = [{"role": "user", "content": "words?"}, {"role": "assistant", "content": texts[0]}]
    records = [
        {"id": f"m{index}", "source": "own", "messages": numbered(turns, index)}
        for index in range(4)
    ]
    records += [{"id": f"t{i}", "source": "own", "text": texts[1] + str(i)} for i in range(4)]
    path = write(tmp_path / "mixed.jsonl", records)
    documents = load(path, model_path=tmp_path / "target", vocab_size=280)
    every = {d.doc_id: d for d in (*documents.train, *documents.held_out)}
    assert len(every) == 8
    chat, plain = every["m0"], every["t0"]
    assert chat.token_ids[-1] == END_ID
    assert chat.loss_mask[-1]
    assert not chat.loss_mask[1]
    assert plain.token_ids[-1] == EOS_ID
    assert plain.loss_mask == (False,) + (True,) * (len(plain.token_ids) - 1)


def test_words_are_not_taken_for_the_targets_own_text(tmp_path, caplog):
    words = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    own, other = tmp_path / "own.jsonl", tmp_path / "other.jsonl"
    write(own, [trajectory(0), trajectory(1)])
    write(other, [words, words])
    data = DataConfig(str(own))
    mark_words(data, read_head_documents(data))
    assert (data.kind, caplog.text) == ("regenerated", "")
    data = DataConfig(str(other))
    mark_words(data, read_head_documents(data))
    assert data.kind == "original"
    assert f"--source {other} --output FILE lets the target answer" in caplog.text


def test_load_head_documents_of_another_tokenizer_go_through_its_chat_template(tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(LAB_TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("tokenizer.json", "tokenizer_config.json"):  # no longer the lab's own tokens
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("<|user|>", "<|person|>"))
    turns = [{"role": "user", "content": "words?"}, {"role": "assistant", "content": "So be it."}]
    records = [
        {"id": f"m{index}", "source": "own", "messages": numbered(turns, index)}
        for index in range(5)
    ]
    documents = load(write(tmp_path / "x.jsonl", records), model_path=folder, vocab_size=4096)
    chat = documents.train[0]
    pairs = zip(chat.token_ids, chat.loss_mask, strict=True)
    tokenizer = load_tokenizer(folder)
    assert (
        tokenizer.decode([token for token, is_own in pairs if is_own])
        == f"So be it.{chat.doc_id[1:]}<|end|>"
    )
    assert "<|user|>words?" in tokenizer.decode(chat.token_ids)  # the template's text, spelt out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x", "token_ids": [7, 8', "answers.jsonl:3"),
        ('{"id": "x", "token_ids": "7 8", "num_prompt_tokens": 1}', "answers.jsonl:3"),
        ('{"id": "x", "token_ids": [7, 8], "num_prompt_tokens": 3}', "answers.jsonl:3"),
        ('{"id": "x", "text": "plain"}', "answers.jsonl:3"),
        ("[1, 2]", "answers.jsonl:3"),
        ('{"id": "x", "token_ids": [7, 500], "num_prompt_tokens": 1}', "vocabulary"),
        ('{"id": "x", "token_ids": [7, -1], "num_prompt_tokens": 1}', "vocabulary"),
    ],
    ids=["json", "type", "prompt", "schema", "list", "large", "negative"],
)
def test_load_head_documents_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "answers.jsonl", [trajectory(0), trajectory(1)])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(IntegrityError, match=message):
        load(path, eval_documents=1)


def test_load_head_documents_damaged_archive_is_refused(tmp_path):
    path = write(tmp_path / "answers.jsonl.xz", [trajectory(index) for index in range(50)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(IntegrityError, match="compressed file is damaged"):
        load(path)


def test_load_head_documents_empty_file_is_refused(tmp_path):
    (tmp_path / "answers.jsonl").write_text("\n")
    with pytest.raises(IntegrityError, match="empty"):
        load(tmp_path / "answers.jsonl")


def test_load_head_documents_too_few_documents_name_the_key(tmp_path):
    path = write(tmp_path / "answers.jsonl", [trajectory(0), trajectory(1)])
    with pytest.raises(ConfigError, match=r"data\.eval_documents=1"):
        load(path, eval_documents=2)


def test_token_ids_of_another_tokenizer_are_refused(tmp_path) -> None:
    data = tmp_path / "answers.jsonl"
    data.write_text("\n".join(json.dumps(trajectory(index)) for index in range(4)))
    shipped = LAB_TARGET.parent / "regenerated.jsonl.settings.json"
    settings = json.loads(shipped.read_text())
    config = DataConfig(str(data), eval_documents=1)

    def load() -> None:
        load_head_documents(
            config,
            read_head_documents(config),
            model_path=str(LAB_TARGET),
            vocab_size=4096,
            num_depths=1,
        )

    beside = tmp_path / "answers.jsonl.settings.json"
    beside.write_text(json.dumps(settings))
    load()
    beside.write_text(json.dumps(settings | {"tokenizer_sha256": "0" * 64}))
    with pytest.raises(ConfigError, match=r"another tokenizer; set data.path to"):
        load()


@pytest.mark.parametrize(("part", "first"), [("prompt", 0), ("answer", 4)])
def test_held_out_document_whose_prompt_or_answer_is_in_training_is_dropped(tmp_path, part, first):
    records = [trajectory(index) for index in range(30)]
    before = load(write(tmp_path / "a.jsonl", records), eval_documents=6)
    assert before.num_seen == 0
    held, trained = (int(d[0].doc_id[1:]) for d in (before.held_out, before.train))
    last = first + (4 if part == "prompt" else 8)
    records[held]["token_ids"][first:last] = records[trained]["token_ids"][first:last]
    after = load(write(tmp_path / "a.jsonl", records), eval_documents=6)
    assert [d.doc_id for d in after.held_out] == [d.doc_id for d in before.held_out[1:]]
    assert len(after.train) == len(before.train)
    assert after.num_seen == after.facts()["num_held_out_dropped"] == 1
    assert "5 held-out documents, 1 more dropped" in after.line()


def test_held_out_documents_that_all_occur_in_training_are_refused(tmp_path):
    same = [trajectory(0) | {"id": f"d{index}"} for index in range(9)]
    with pytest.raises(ConfigError, match=r"data\.path must hold documents that differ"):
        load(write(tmp_path / "a.jsonl", same))


def test_overlap_counts_runs_of_thirteen_tokens():
    def answer(name: str, token_ids: list[int]) -> EncodedDocument:
        return EncodedDocument(name, "a", (1, *token_ids), (False,) + (True,) * len(token_ids))

    known = list(range(100, 120))
    held_out = [answer("h", [5, *known[:15], 6])]  # 17 tokens, 5 runs of 13, 3 of them known
    assert overlap(held_out, train=[answer("t", [7, *known])]) == pytest.approx(3 / 5)
    assert overlap(held_out, train=[answer("t", known[::-1])]) == 0
    prompt = EncodedDocument("t", "a", tuple(known), (False,) * len(known))
    assert overlap(held_out, train=[prompt]) == 0
    assert math.isnan(overlap([answer("h", known[:12])], train=held_out))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0}, None),
        ({"temperature": 0.0, "top_p": 1.0, "top_k": 0}, "got text at temperature 0.0"),
        ({"temperature": 1.0, "top_p": 0.95, "top_k": 0}, "top_p 0.95"),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 20}, "top_k 20"),
        (None, "of unknown sampling"),
    ],
)
def test_sampled_length_needs_text_of_temperature_one(tmp_path, settings, reason):
    path = write(tmp_path / "answers.jsonl.xz", [trajectory(index) for index in range(9)])
    if settings is not None:
        (tmp_path / "answers.jsonl.settings.json").write_text(json.dumps(settings))
    documents = load(path)
    if reason is None:
        assert documents.not_sampled is None
        assert "sampled" not in documents.line()
    else:
        assert reason in str(documents.not_sampled)
        assert "sampled_acceptance_length is nan: it needs text sampled at" in documents.line()
