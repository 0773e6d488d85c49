"""How a prompt in words becomes token ids: the one rule of evaluation and of the Python interface.

Plain text is completed: the bos token, if the tokenizer has one, and the text. A conversation goes
through the model's chat template, with the opening of the assistant's turn.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from mtp_research.runtime.errors import ConfigError

Message = Mapping[str, str]  # `role` and `content`


class ChatTokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    bos_token_id: int | None
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        **variables: bool,
    ) -> list[int]:
        """Token ids of a conversation; `variables` are those of the template."""
        ...


def begin_of_text(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The bos token, if the tokenizer has one."""
    return () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)


def completion_ids(text: str, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Token ids of a text that the model is to continue; one that spells the bos gets no other."""
    begin, token_ids = (
        begin_of_text(tokenizer),
        tuple(tokenizer.encode(text, add_special_tokens=False)),
    )
    return token_ids if begin and token_ids[:1] == begin else (*begin, *token_ids)


def chat_ids(
    messages: Sequence[Message], tokenizer: ChatTokenizer, **variables: bool
) -> tuple[int, ...]:
    """Token ids of a conversation that the assistant is to continue.

    `variables` are the template's own, such as `enable_thinking`.

    Raises:
        ConfigError: the tokenizer has no chat template, or its template refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            "a prompt of messages needs a chat template, got a tokenizer without one; give the "
            "prompt as text."
        )
    from jinja2 import TemplateError  # not for those who hand in token ids

    try:
        token_ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **variables,
        )
    except TemplateError as fault:
        raise ConfigError(
            f"the messages of a prompt must be as the model's chat template takes them, got: "
            f"{fault}; change their roles or order."
        ) from fault
    return tuple(token_ids)
