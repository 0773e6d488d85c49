"""Requests that nobody should send, as data: what each holds, and what becomes of it.

`REFUSED` is refused at the door. `FAILS` is queued and ends with `error`, or is refused. `RUNS` is
odd and legal, and ends in some way. None of them may change the text of a request beside it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from mtp_research.decode.sampling.sampling_params import SamplingParams
from tests.decode.toy_grammar import PAIRS, ToyMatcher

REFUSED, FAILS, RUNS = "refused", "fails", "runs"
STOPS = (1, 2)
HOT = {"temperature": 1.0}
LONE = "\ud800"


class Kind(NamedTuple):
    """A request and its fate; `sampling` are fields, or whatever stands in their place."""

    name: str
    fate: str
    prompt: object = (8,)
    sampling: object = HOT
    arguments: dict[str, object] = {}  # noqa: RUF012, never changed


@dataclass(eq=False)
class BrokenGrammar:
    """Pairs whose matcher raises at one call, or answers it with something else."""

    method: str
    call: int = 1
    answer: object = RuntimeError("broken matcher")
    word: int = 0  # a bit mask of more words than there are is written where this is above 0

    def start(self, *, stop_token_ids: tuple[int, ...]) -> object:
        """The matcher, or the exception."""
        if self.method == "start":
            return _answer(self.answer)
        return _BrokenMatcher(PAIRS.start(stop_token_ids=stop_token_ids), self)


@dataclass
class _BrokenMatcher:
    matcher: ToyMatcher
    grammar: BrokenGrammar
    num_calls: dict[str, int] = field(default_factory=dict)

    def _is_broken(self, method: str) -> bool:
        self.num_calls[method] = self.num_calls.get(method, 0) + 1
        return method == self.grammar.method and self.num_calls[method] >= self.grammar.call

    @property
    def is_terminated(self) -> object:
        if self._is_broken("is_terminated"):
            return _answer(self.grammar.answer)
        return self.matcher.is_terminated

    def fill_bitmask(self, bitmask: torch.Tensor, *, row: int) -> None:
        if self._is_broken("fill_bitmask"):
            bitmask[row] = 0
            bitmask[row, self.grammar.word] = 0
            _answer(self.grammar.answer)
        self.matcher.fill_bitmask(bitmask, row=row)

    def accept_token(self, token_id: int) -> object:
        if self._is_broken("accept_token"):
            return _answer(self.grammar.answer)
        return self.matcher.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        if self._is_broken("rollback"):
            _answer(self.grammar.answer)
        self.matcher.rollback(num_tokens)


def _answer(value: object) -> object:
    if isinstance(value, Exception):
        raise value
    return value


class ForeignGrammar(BrokenGrammar):
    """One that says which vocabulary it is for."""

    vocab_size = 127  # as many words of a mask as the target's 128


class UnhashableGrammar(BrokenGrammar):
    """One that no batch can look up."""

    __hash__ = None


_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "dry_multiplier",
    "dry_base",
)
_INTEGERS = ("top_k", "dry_allowed_length", "min_tokens", "max_new_tokens")
_BAD_FLOATS = ("0.5", None, True, math.nan, -math.inf, (0.5,), [0.5], 1j, 10**400, np.bool_(True))
_BAD_INTEGERS = (2.5, "3", None, True, -1, 2**64, math.nan, (1,), torch.tensor(2.5), np.float32(2))
_BAD_FIELDS: dict[str, Sequence[object]] = {
    **dict.fromkeys(_FLOATS, _BAD_FLOATS),
    **dict.fromkeys(_INTEGERS, _BAD_INTEGERS),
    "seed": (0.5, "7", True, (1,), math.nan, torch.tensor([1, 2])),
    "logprobs": (2.5, True, "2", -1, 2**40, 129),
    "logprobs_kind": (None, "x", 5, (), np.zeros(2)),
    "stop_token_ids": ("ab", 5, (1.5,), (True,), None, b"ab", {5: 1}),
    "dry_breaker_token_ids": ((1.5,), None, (999,), 5),
    "allowed_token_ids": ((), (1.5,), (200,), "x", (2**70,), ((5,),)),
    "bad_words": (((),), (5,), "ab", ((1.5,),), ((999,),), None, ("a",)),
    "logit_bias": (
        *((5,), ((5.5, 1.0),), ((5, "x"),), ((5, math.nan),), ((5, 1.0), (5, 2.0)), {5: "x"}),
        *(((999, 1.0),), None, ((True, 1.0),), ((5, 1.0, 2.0),), ((5, 10**400),), ((-1, 1.0),)),
    ),
    "grammar": (5, "root ::= x", SamplingParams(), UnhashableGrammar("fill_bitmask")),
}
_BAD_PROMPTS = (
    *([], None, "text", b"ab", {5: 1}, {5}, [1.5], [5.0], ["a"], [None], [True, 5], [[5]], 7),
    *([128], [-1], [2**70], [5] * 100, object(), np.array(["a"]), np.array([[5]]), 5.5),
    *(torch.tensor([1.5]), torch.tensor([[5]]), torch.tensor(5), torch.tensor([True])),
)
_BAD_ARGUMENTS: dict[str, Sequence[object]] = {
    "request_id": (7, LONE, b"x", ("a",), "good-0"),
    "priority": (0.5, math.nan, "1", None, True),
    "cache_salt": (None, LONE, 5, b"x"),
}
_GRAMMARS = {
    REFUSED: (
        *(BrokenGrammar("start"), BrokenGrammar("start", answer=None), ForeignGrammar("none")),
        *(BrokenGrammar("start", answer=KeyError("stop id")), BrokenGrammar("is_terminated")),
        *(BrokenGrammar("fill_bitmask"), BrokenGrammar("fill_bitmask", word=4)),
        BrokenGrammar("is_terminated", answer=torch.zeros(2)),
    ),
    FAILS: (
        *(BrokenGrammar("fill_bitmask", call) for call in (2, 3, 4)),
        *(BrokenGrammar("accept_token", call) for call in (1, 2, 3)),
        *(BrokenGrammar("is_terminated", call) for call in (2, 5)),
        *(BrokenGrammar("accept_token", answer=answer) for answer in (False, None, np.zeros(2))),
        *(BrokenGrammar("rollback", call) for call in (2, 3)),
        BrokenGrammar("fill_bitmask", 3, word=4),
    ),
}
_ODD_FIELDS: dict[str, Sequence[object]] = {
    "seed": (None, 2**200, -5, np.int64(7), torch.tensor(7)),
    "top_k": (np.int64(5), torch.tensor(5), 1 << 20),
    "temperature": (5e-324, 1e300, np.float32(0.7), torch.tensor(0.7), 1),
    "top_p": (1e-300,),
    "repetition_penalty": (1e300, 1e-300),
    "logit_bias": (((5, 1e308),), ((5, -1e308), (6, 1e308)), [[np.int64(5), 1]], {5: 1.0}),
    "stop_token_ids": ((2**70,), (-1,), [5], np.array([5])),
    "bad_words": ([[5]],),
    "max_new_tokens": (0, np.int64(3)),
}
_ODD_ARGUMENTS: dict[str, Sequence[object]] = {
    "priority": (10**30,),
    "cache_salt": ("x" * 9999,),
    "request_id": ("",),
}
_ODD_PROMPTS = (torch.tensor([5, 6]), np.array([5]), range(3, 6), (np.int8(5), 6))


def _by_field(fate: str, fields: dict[str, Sequence[object]], word: str = "") -> Iterator[Kind]:
    for name, values in fields.items():
        for value in values:
            yield Kind(f"{word}{name}={value!r}", fate, sampling={**HOT, name: value})


def _by_argument(fate: str, arguments: dict[str, Sequence[object]]) -> Iterator[Kind]:
    for name, values in arguments.items():
        for value in values:
            yield Kind(f"{name}={value!a}"[:60], fate, arguments={name: value})


def _by_grammar() -> Iterator[Kind]:
    for fate, grammars in _GRAMMARS.items():
        for one in grammars:
            sampling = {"grammar": one, "stop_token_ids": STOPS, "max_new_tokens": 12}
            name = f"{type(one).__name__} {one.method} {one.call} {one.answer!r} {one.word}"
            yield Kind(name, fate, sampling=sampling)


_REPEATED = {"dry_multiplier": 1e300, "dry_base": 1e300, "dry_allowed_length": 1}
_NOTHING_LEFT = {"allowed_token_ids": (1,), "bad_words": ((1,),)}
KINDS = (
    *_by_field(REFUSED, _BAD_FIELDS),
    *(Kind(f"prompt={prompt!r}"[:60], REFUSED, prompt=prompt) for prompt in _BAD_PROMPTS),
    *_by_argument(REFUSED, _BAD_ARGUMENTS),
    *(
        Kind(f"sampling={value!r}", REFUSED, sampling=[value])
        for value in ("x", {}, 5, SamplingParams, False)
    ),
    Kind("min_tokens above the limit", REFUSED, sampling={"min_tokens": 99}),
    Kind("grammar without stop", REFUSED, sampling={"grammar": PAIRS}),
    *_by_grammar(),
    *_by_field(RUNS, _ODD_FIELDS, "odd "),
    *(Kind(f"odd prompt={prompt!r}", RUNS, prompt=prompt) for prompt in _ODD_PROMPTS),
    Kind("odd penalties", RUNS, prompt=(5, 5, 5, 5), sampling=_REPEATED),
    Kind("no token is left", RUNS, sampling=_NOTHING_LEFT),
    *_by_argument(RUNS, _ODD_ARGUMENTS),
)


def sampling_of(kind: Kind) -> object:
    """What the request is sampled by; raises where the value itself is refused."""
    if isinstance(kind.sampling, dict):
        return SamplingParams(**{"max_new_tokens": 5} | kind.sampling)
    return kind.sampling[0]
