"""Conversations in a model's own chat template: what the assistant says is found in it."""

import pytest

from mtp_research.data.chat import encode_in_template
from mtp_research.data.sources import Document
from mtp_research.data.tokenizer import encode_documents
from mtp_research.models.target import load_tokenizer
from mtp_research.runtime.errors import ConfigError
from mtp_research.runtime.provenance import REPOSITORY_ROOT

# ChatML on the special tokens that the shipped tokenizer has: `<|end|>` ends a turn.
CHATML = (
    "{% for message in messages %}{{ '<|user|>' + message['role'] + '\n' + message['content'] "
    "+ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}"
    "{% endif %}"
)
# The newest turn of the assistant looks otherwise than earlier ones.
SHORTENED = "(message['content'] if loop.last or message['role'] == 'user' else '-') "
REWRITES = CHATML.replace("message['content'] ", SHORTENED)
TURNS = (("user", "Why?"), ("assistant", "So be it."), ("user", "And?"), ("assistant", "No."))


@pytest.fixture
def tokenizer():
    loaded = load_tokenizer(str(REPOSITORY_ROOT / "assets" / "lab_tiny" / "target"))
    loaded.eos_token = "<|end|>"
    return loaded


def chat(turns=TURNS):
    return Document("d", "chat", messages=turns)


def test_template_with_generation_marks_equals_the_lab_encoding(tokenizer):
    documents = [chat(), chat(TURNS[:2]), chat(TURNS[:1])]
    got = list(encode_in_template(documents, tokenizer))
    assert got == list(encode_documents(documents, tokenizer))


def test_template_without_marks_masks_each_answer_up_to_its_end_token(tokenizer):
    tokenizer.chat_template = CHATML
    (document,) = encode_in_template([chat()], tokenizer)
    own = [
        token
        for token, is_own in zip(document.token_ids, document.loss_mask, strict=True)
        if is_own
    ]
    assert tokenizer.decode(own) == "So be it.<|end|>No.<|end|>"
    text = tokenizer.decode(document.token_ids)
    assert text.startswith("<|user|>user\nWhy?<|end|>\n<|user|>assistant\nSo be it.<|end|>\n")


def test_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    tokenizer.chat_template = REWRITES
    assert sum(next(encode_in_template([chat(TURNS[:2])], tokenizer)).loss_mask) > 0
    with pytest.raises(ConfigError, match="rewrites earlier turns of document 'd'"):
        list(encode_in_template([chat()], tokenizer))


def test_conversation_without_a_template_or_refused_by_it_names_the_key(tokenizer):
    with pytest.raises(ConfigError, match=r"'d' .*expected roles.*data\.path"):
        list(encode_in_template([chat((("tool", "x"),))], tokenizer))
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template; set data\.path"):
        list(encode_in_template([chat()], tokenizer))


def test_plain_text_ends_with_the_end_token_and_is_all_own(tokenizer):
    (document,) = encode_in_template([Document("d", "text", text="a b")], tokenizer)
    assert document.token_ids[-1] == tokenizer.eos_token_id
    assert document.loss_mask == (False, *[True] * (len(document.token_ids) - 1))
