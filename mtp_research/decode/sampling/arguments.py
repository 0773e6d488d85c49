"""What a user hands in, read into plain Python values before a request is queued.

A value of the wrong type that got past this point would raise inside a step, where it ends the
requests of everybody. NumPy and PyTorch scalars and arrays are taken; a bool is never a number,
and a number with a fraction is never a count or a token id.
"""

import math
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Real
from typing import TYPE_CHECKING, TypeAlias, cast

from mtp_research.runtime.errors import ArgumentTypeError

if TYPE_CHECKING:
    from mtp_research.data.prompt_text import Message
    from mtp_research.models.target import Target

# Text to be continued, token ids, or messages to be answered.
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message]"
_PROMPT = "text, a sequence of token ids (integers) or a list of messages"


def in_words(prompt: object) -> bool:
    """Whether a prompt is text or messages, which take a tokenizer."""
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    return isinstance(prompt, str) or (is_list and isinstance(prompt[0], Mapping))


def prompt_ids(prompt: object, *, target: "Target") -> tuple[int, ...]:
    """Token ids of a prompt; the target's tokenizer is read for text and messages only."""
    if isinstance(prompt, str):
        return target.encode(plain_text(prompt, key="the prompt"))
    if in_words(prompt):
        for message in cast("Sequence[object]", prompt):
            _check_message(message)
        return target.encode(cast("Sequence[Message]", prompt))
    if isinstance(prompt, Mapping):
        raise ArgumentTypeError(
            "the prompt must be text, token ids or a list of messages, got one of type "
            f"{type(prompt).__name__}; put a single message in a list: "
            '[{"role": "user", "content": TEXT}].'
        )
    return token_ids(prompt, key="the prompt", expected=_PROMPT)


def _check_message(message: object) -> None:
    if not isinstance(message, Mapping) or not all(
        isinstance(message.get(key), str) for key in ("role", "content")
    ):
        raise ArgumentTypeError(
            'a message of the prompt must be {"role": TEXT, "content": TEXT}, got '
            f"{reprlib.repr(message)}; give it both as text."
        )


def prompt_list(prompts: Iterable[Prompt]) -> Iterable[Prompt]:
    """The prompts of `generate`, which takes many: one prompt alone would be read as several."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ArgumentTypeError(
            "prompts must be a list of prompts, each text, token ids or messages, got one of type "
            f"{type(prompts).__name__}; put a single prompt in a list: generate([PROMPT])."
        )
    return prompts


def whole_number(value: object, *, key: str, expected: str = "an integer") -> int:
    """An integer of any integral type."""
    plain = _plain(value)
    if isinstance(plain, bool):
        raise _fault(key, expected, value)
    try:
        return operator.index(plain)  # pyright: ignore[reportArgumentType]: it is asked to judge
    except TypeError:
        raise _fault(key, expected, value) from None


def real_number(value: object, *, key: str, expected: str = "a number") -> float:
    """A float; NaN for an integer beyond all floats, which every range check refuses."""
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, Real):
        raise _fault(key, expected, value)
    try:
        return float(plain)
    except OverflowError:
        return math.nan


def token_ids(
    values: object, *, key: str, expected: str = "a sequence of token ids, which are integers"
) -> tuple[int, ...]:
    """Token ids of a sequence or a one-dimensional array."""
    plain = _plain(values)
    if isinstance(plain, str | bytes | bytearray | Mapping | Set) or not isinstance(
        plain, Iterable
    ):
        raise _fault(key, expected, values)
    ids = tuple(plain)
    if set(map(type, ids)) <= {int}:
        return ids
    return tuple(whole_number(one, key=f"a token id of {key}") for one in ids)


def plain_text(value: object, *, key: str) -> str:
    """A string that can be written as UTF-8: ids and salts are hashed."""
    if not isinstance(value, str):
        raise _fault(key, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _fault(key, "text without lone surrogates", value) from None
    return value


def _plain(value: object) -> object:
    """An array or scalar of NumPy or PyTorch as Python values; neither is imported here.

    Asked for every number of every request, so by the method alone: `isinstance` of a protocol
    takes fifteen microseconds.
    """
    to_list = None if isinstance(value, type) else getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _fault(key: str, expected: str, value: object) -> ArgumentTypeError:
    shown = reprlib.repr(value) if isinstance(value, str | float | bool | None) else "one"
    return ArgumentTypeError(
        f"{key} must be {expected}, got {shown} of type {type(value).__name__}; convert it."
    )
