"""Documents as token ids in the chat form of any Hugging Face tokenizer, with loss masks.

The lab targets' own tokenizer has a faster way (`tokenizer.encode_documents`). Here the model's
chat template writes the conversation, and what the assistant says in it is found in one of two
ways:

    template with {% generation %}   the template marks it
    any other                        it is what the template adds to the conversation before, once
                                     that ends with the opening of the assistant's turn

A template that rewrites earlier turns (drops their reasoning, say) has no such prefix: a mask would
be a guess, and the document is refused. Regenerated text needs none of this: it is token ids.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mtp_research.data.packing import EncodedDocument
from mtp_research.data.prompt_text import ChatTokenizer, is_lab_tokenizer
from mtp_research.data.sources import Document
from mtp_research.data.tokenizer import encode_documents
from mtp_research.runtime.errors import ConfigError

Messages = list[dict[str, str]]


class TemplateTokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: str | None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the model wants around it."""
        ...

    def apply_chat_template(
        self, conversation: Messages, **options: bool
    ) -> list[int] | Mapping[str, list[int]]:
        """Token ids of a conversation, or a mapping with `return_dict`."""
        ...


def encode_for_target(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase
) -> list[EncodedDocument]:
    """Token ids and loss masks as the target of this tokenizer reads them."""
    if is_lab_tokenizer(cast(ChatTokenizer, tokenizer)):
        return list(encode_documents(documents, cast(PreTrainedTokenizerFast, tokenizer)))
    return list(encode_in_template(documents, cast(TemplateTokenizer, tokenizer)))


def encode_in_template(
    documents: Sequence[Document], tokenizer: TemplateTokenizer
) -> Iterator[EncodedDocument]:
    """Token ids and loss masks of `documents`, in order.

    The mask is True where the token is the target's own output: the assistant's turns up to the
    end token, and all of a plain text but its first token.
    """
    for document in documents:
        if document.messages is None:
            token_ids = tokenizer.encode(document.text or "")
            if tokenizer.eos_token_id is not None and token_ids[-1:] != [tokenizer.eos_token_id]:
                token_ids = [*token_ids, tokenizer.eos_token_id]
            mask = [index > 0 for index in range(len(token_ids))]
        else:
            token_ids, mask = _encode_messages(document, tokenizer)
        yield EncodedDocument(document.doc_id, document.domain, tuple(token_ids), tuple(mask))


def _encode_messages(
    document: Document, tokenizer: TemplateTokenizer
) -> tuple[list[int], list[bool]]:
    template = tokenizer.chat_template
    if template is None:
        raise ConfigError(
            f"document {document.doc_id!r} is a conversation, but the target's tokenizer has no "
            "chat template; set data.path to regenerated text."
        )
    messages = [{"role": role, "content": content} for role, content in document.messages or ()]
    try:
        if re.search(r"\{%-?\s*generation\b", template):
            found = cast(
                Mapping[str, list[int]],
                tokenizer.apply_chat_template(
                    messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                ),
            )
            return list(found["input_ids"]), [flag == 1 for flag in found["assistant_masks"]]
        return _encode_by_prefix(messages, tokenizer, doc_id=document.doc_id)
    except TemplateError as fault:
        raise ConfigError(
            f"the chat template refuses document {document.doc_id!r} ({fault}); change data.path."
        ) from fault


def _encode_by_prefix(
    messages: Messages, tokenizer: TemplateTokenizer, *, doc_id: str
) -> tuple[list[int], list[bool]]:
    """The mask is what each turn of the assistant adds behind its opening."""
    token_ids = _written(messages, tokenizer, opens_turn=False)
    mask = [False] * len(token_ids)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _written(messages[:index], tokenizer, opens_turn=True)
            whole = _written(messages[: index + 1], tokenizer, opens_turn=False)
            start, end = len(before), len(whole)
            if token_ids[:start] != before or token_ids[:end] != whole or start >= end:
                raise ConfigError(
                    f"the chat template rewrites earlier turns of document {doc_id!r}, so that "
                    "the assistant's own tokens cannot be found; set data.path to regenerated text."
                )
            # What follows the end token belongs to the template: the model stops there.
            eos = tokenizer.eos_token_id
            while end > start + 1 and eos in whole[start:end] and whole[end - 1] != eos:
                end -= 1
            mask[start:end] = [True] * (end - start)
    return token_ids, mask


def _written(messages: Messages, tokenizer: TemplateTokenizer, *, opens_turn: bool) -> list[int]:
    found = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, add_generation_prompt=opens_turn
    )
    return list(cast(list[int], found))
