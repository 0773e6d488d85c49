import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from mtp_research.data.sources import Document, python_sources
from mtp_research.data.tokenizer import (
    ASSISTANT_ID,
    BOS_ID,
    END_ID,
    EOS_ID,
    SPECIAL_TOKENS,
    USER_ID,
    encode_document,
    encode_documents,
    load_tokenizer,
    prompt_ids,
    save_tokenizer,
    train_tokenizer,
)
from mtp_research.runtime.errors import ConfigError

CHAT = Document(
    doc_id="c",
    domain="math",
    messages=(("user", "What is 2 + 2?"), ("assistant", "4"), ("user", "Ok"), ("assistant", "Bye")),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(python_sources(["stdlib"], max_bytes=2_000_000), vocab_size=2048)


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, folder)
    return folder


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_decode_of_encode_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    document = Document(doc_id="x", domain="x", text=text)
    ids = encode_document(document, tokenizer).token_ids
    assert (ids[0], ids[-1]) == (BOS_ID, EOS_ID)
    assert tokenizer.decode(list(ids[1:-1]), skip_special_tokens=False) == text


def test_special_tokens_have_the_first_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(6))
    assert tokenizer.get_vocab_size() == 2048


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("1234567").ids) == 7
    digits = [token for token in tokenizer.get_vocab() if sum(c.isdigit() for c in token) > 1]
    assert digits == []


@pytest.mark.parametrize("num_spaces", [4, 8, 12])
def test_newline_with_indentation_is_one_token(tokenizer: Tokenizer, num_spaces: int) -> None:
    assert len(tokenizer.encode("\n" + " " * num_spaces).ids) == 1


def test_prompt_cut_after_a_colon_is_a_prefix_of_the_whole_encoding(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("def f(x):\n    return x\n").ids
    prefix = tokenizer.encode("def f(x):").ids
    assert whole[: len(prefix)] == prefix


def test_chat_document_is_masked_to_the_assistant(tokenizer: Tokenizer) -> None:
    encoded = encode_document(CHAT, tokenizer)
    ids = list(encoded.token_ids)
    assert ids[:2] == [BOS_ID, USER_ID]
    assert ids[-1] == END_ID
    own = [token for token, mine in zip(ids, encoded.loss_mask, strict=True) if mine]
    bye = tokenizer.encode("Bye").ids
    assert own == [*tokenizer.encode("4").ids, END_ID, *bye, END_ID]


def test_plain_document_is_masked_except_bos(tokenizer: Tokenizer) -> None:
    encoded = encode_document(Document(doc_id="t", domain="t", text="a b"), tokenizer)
    assert encoded.loss_mask == (False, *([True] * (len(encoded.token_ids) - 1)))


def test_text_that_spells_a_special_token_stays_text(tokenizer: Tokenizer) -> None:
    text = "stop <|end|> <|user|> here"
    encoded = encode_document(Document(doc_id="t", domain="t", text=text), tokenizer)
    assert min(encoded.token_ids[1:-1]) >= len(SPECIAL_TOKENS)


def test_encode_documents_equals_one_by_one(tokenizer: Tokenizer) -> None:
    documents = [CHAT, Document(doc_id="t", domain="t", text="x = 1\n"), CHAT]
    assert list(encode_documents(documents, tokenizer)) == [
        encode_document(document, tokenizer) for document in documents
    ]


def test_folder_loads_in_transformers_with_the_same_chat_form(
    tokenizer: Tokenizer, folder: Path
) -> None:
    loaded = AutoTokenizer.from_pretrained(folder)
    assert CHAT.messages is not None
    messages = [{"role": role, "content": content} for role, content in CHAT.messages]
    rendered = loaded.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    encoded = encode_document(CHAT, loaded)
    assert rendered["input_ids"] == list(encoded.token_ids)
    assert [bool(mine) for mine in rendered["assistant_masks"]] == list(encoded.loss_mask)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 2)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert "chat_template" in config


def test_prompt_ids_equal_the_generation_prompt(tokenizer: Tokenizer, folder: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hi"}]
    expected = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt_ids([("user", "Hi")], tokenizer) == expected
    assert expected[-1] == ASSISTANT_ID


def test_load_tokenizer_round_trips_and_names_a_missing_file(
    tokenizer: Tokenizer, folder: Path, tmp_path: Path
) -> None:
    loaded = load_tokenizer(folder)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert encode_document(CHAT, loaded) == encode_document(CHAT, tokenizer)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_training_is_deterministic() -> None:
    documents = python_sources(["stdlib"], max_bytes=100_000)
    first = train_tokenizer(documents, vocab_size=400)
    assert first.to_str() == train_tokenizer(documents[::-1], vocab_size=400).to_str()


def test_too_small_vocabulary_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"model\.pretrain\.vocab_size"):
        train_tokenizer([CHAT], vocab_size=200)


def test_unknown_role_is_refused(tokenizer: Tokenizer) -> None:
    document = Document(doc_id="r", domain="r", messages=(("tool", "x"),))
    with pytest.raises(ConfigError, match="'tool'"):
        encode_document(document, tokenizer)
