"""What a user hands in, read into plain Python values before a request is queued.

A value of the wrong type that got past this point would raise inside a step, where it ends the
requests of everybody. NumPy and PyTorch scalars and arrays are taken; a bool is never a number,
and a number with a fraction is never a count or a token id.
"""

import math
import operator
import reprlib
from collections.abc import Iterable, Mapping, Set
from numbers import Real

from mtp_research.runtime.errors import ConfigError


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


def token_ids(values: object, *, key: str) -> tuple[int, ...]:
    """Token ids of a sequence or a one-dimensional array."""
    expected = "a sequence of token ids, which are integers"
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


def _fault(key: str, expected: str, value: object) -> ConfigError:
    shown = reprlib.repr(value) if isinstance(value, str | float | bool | None) else "one"
    return ConfigError(
        f"{key} must be {expected}, got {shown} of type {type(value).__name__}; convert it."
    )
