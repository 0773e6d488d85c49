"""How a prompt in words becomes token ids: the one rule of evaluation and of the Python interface.

Plain text is completed: what the tokenizer's own rule puts before a text (`<|begin_of_text|>` with
Llama, nothing with Qwen3 and SmolLM2), and the text. Tokenizers of lab targets have no rule; every
text that they learnt from begins with `<|bos|>`, so that token comes first. A conversation goes
through the model's chat template, with the opening of the assistant's turn.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from mtp_research.runtime.errors import ConfigError

Message = Mapping[str, str]  # `role` and `content`

# Of the lab targets' tokenizers, at ids 0 to 5.
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")


class ChatTokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        """Their ids."""
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


def is_lab_tokenizer(tokenizer: ChatTokenizer) -> bool:
    """Whether it was made by `task=target`."""
    found = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    return found == list(range(len(SPECIAL_TOKENS)))


def begin_of_text(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The tokens that stand before a text; those that a tokenizer puts behind it are left out."""
    if is_lab_tokenizer(tokenizer):
        return (0,)
    bare, whole = (tokenizer.encode("a", add_special_tokens=rule) for rule in (False, True))
    starts = range(len(whole) - len(bare) + 1)
    return tuple(
        next((whole[:start] for start in starts if whole[start : start + len(bare)] == bare), [])
    )


def completion_ids(text: str, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Token ids of a text to be continued; one that spells what stands before gets no other."""
    begin = begin_of_text(tokenizer)
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    return token_ids if token_ids[: len(begin)] == begin else (*begin, *token_ids)


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
