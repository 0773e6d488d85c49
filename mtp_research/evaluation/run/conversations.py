"""Later turns of a prompt: each is asked with the condition's own answers before it.

Between prompts and decode loop. A turn is a request of its own; the next one is made when its
answer is there, between two steps of the loop, while other requests go on. What an answer looks
like in the next prompt, with its thinking part or without, is the chat template's business.

    conversations.begin(records)   a `Dialogue`, one pass of a condition, new or resumed
    dialogue.left                  what is asked at once: first turns, and the next of begun ones
    dialogue.next_turn(record)     what a finished turn leads to
    write_generations(...)         `generations.jsonl`: what every condition wrote, to be read

That file holds texts, those of the prompts too, and stays beside the results on this machine (and
on W&B, where that is asked for); figures come from `results.json`, which holds none.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.report.stored import GENERATIONS_FILE
from mtp_research.evaluation.run.prompt_files import Prompt
from mtp_research.evaluation.run.prompts import ChatTokenizer, EncodedPrompts, encode_prompt
from mtp_research.evaluation.stats.outcome import ConditionResult, turn_id, turns_by_prompt
from mtp_research.evaluation.stats.statistics import FINISHED, is_finished
from mtp_research.runtime.errors import IntegrityError
from mtp_research.runtime.files import write_atomically

# Tokens that an answer takes in the next prompt for each that was generated: text that is encoded
# again is rarely longer, but bytes that are no UTF-8 can be.
_ROOM_FOR_ANSWER = 2


class AnswerTokenizer(ChatTokenizer, Protocol):
    """A tokenizer that also turns answers into text."""

    all_special_ids: list[int]

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Text of token ids."""
        ...


class AskedTurn(NamedTuple):
    """One request to make."""

    request_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Conversations:
    """The prompts of an evaluation and how their later turns are asked.

    Raises:
        IntegrityError: the id of a later turn is the id of another prompt.
    """

    encoded: EncodedPrompts
    tokenizer: AnswerTokenizer
    thinking: bool | None = None  # see `encode_prompt`
    stop_token_ids: Sequence[int] = ()  # tokens that end a turn, and are no part of what it says

    def __post_init__(self) -> None:
        taken = self.prompt_of.keys() & {prompt.question_id for prompt in self.encoded.prompts}
        if taken:
            raise IntegrityError(
                f"question_id {min(taken)!r} is the name of a later turn of another prompt; "
                "number the prompts differently, or set prompts.turns=first."
            )

    @cached_property
    def prompt_of(self) -> dict[str, str]:
        """The prompt's id by the request id of each later turn."""
        return {
            turn_id(prompt.question_id, turn): prompt.question_id
            for prompt in self.encoded.prompts
            for turn in range(1, len(prompt.turns))
        }

    @property
    def request_ids(self) -> list[str]:
        """Of every turn."""
        return [*(prompt.question_id for prompt in self.encoded.prompts), *self.prompt_of]

    def longest_text(self, max_new_tokens: int) -> int:
        """Tokens to which the longest text is expected to grow; one more is never reached."""
        longest = self.encoded.longest_text(max_new_tokens)
        for prompt in self.encoded.prompts:
            if num_answers := len(prompt.turns) - 1:
                asked = self.encode(prompt, [""] * num_answers)
                room = _ROOM_FOR_ANSWER * num_answers * max_new_tokens
                longest = max(longest, len(asked) + room + max_new_tokens + 1)
        return longest

    def begin(self, records: Iterable[RequestRecord], *, max_model_len: int) -> "Dialogue":
        """One pass over the prompts, of which an earlier process has left `records`."""
        return Dialogue(self, records, max_model_len=max_model_len)

    def cut_prompts(self, records: Iterable[RequestRecord]) -> tuple[str, ...]:
        """Ids of the prompts of a whole pass whose next turn did not fit the context."""
        asked = turns_by_prompt(records, self.prompt_of)
        return tuple(
            prompt.question_id
            for prompt in self.encoded.prompts
            if is_finished(turns := asked[prompt.question_id]) and len(turns) < len(prompt.turns)
        )

    def text(self, record: RequestRecord) -> str:
        """The text of an answer: without special tokens, but for the marks of its thinking."""
        return self.decode(record.output_token_ids)

    def answer(self, record: RequestRecord, *, is_open: bool) -> str:
        """The text behind the thinking part, empty if that has not ended; see `Thinking`."""
        token_ids = record.output_token_ids
        if self.encoded.thinking_token_ids is not None:
            begin, end = self.encoded.thinking_token_ids
            marks = [one for one in token_ids if one in (begin, end)]
            if marks[-1:] == [begin] or (is_open and not marks):
                return ""
            if end in token_ids:
                token_ids = token_ids[len(token_ids) - token_ids[::-1].index(end) :]
        return self.decode(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of output tokens."""
        dropped = {*self.tokenizer.all_special_ids, *self.stop_token_ids}
        dropped -= set(self.encoded.thinking_token_ids or ())
        return self.tokenizer.decode(
            [one for one in token_ids if one not in dropped],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )

    def encode(self, prompt: Prompt, answers: Sequence[str]) -> tuple[int, ...]:
        """Token ids of the turn behind these answers."""
        return encode_prompt(prompt, self.tokenizer, answers=answers, thinking=self.thinking)


class Dialogue:
    """One pass of a condition: who has answered what so far."""

    def __init__(
        self,
        conversations: Conversations,
        records: Iterable[RequestRecord],
        *,
        max_model_len: int,
    ) -> None:
        self._conversations = conversations
        self._max_model_len = max_model_len
        self._prompts = {prompt.question_id: prompt for prompt in conversations.encoded.prompts}
        self._answers: dict[str, list[str]] = {}
        begun = turns_by_prompt(records, conversations.prompt_of)
        self._left = conversations.encoded.without(begun.keys())
        for turns in begun.values():
            asked = [self.next_turn(record) for record in turns][-1]
            if asked is not None:
                self._add(asked)

    @property
    def left(self) -> EncodedPrompts:
        """What is asked first, by request id: first turns, and the next of conversations begun."""
        return self._left

    def next_turn(self, record: RequestRecord) -> AskedTurn | None:
        """What is asked once a turn has ended.

        None after the last turn, after one that failed, and where the next does not fit.
        """
        name = self._conversations.prompt_of.get(record.request_id, record.request_id)
        prompt = self._prompts.get(name)
        if prompt is None or len(prompt.turns) == 1 or record.finish_reason not in FINISHED:
            return None
        answers = self._answers.setdefault(name, [])
        answers.append(self._conversations.text(record))
        if len(answers) == len(prompt.turns):
            return None
        token_ids = self._conversations.encode(prompt, answers)
        if len(token_ids) >= self._max_model_len:
            return None
        return AskedTurn(turn_id(name, len(answers)), token_ids)

    def _add(self, asked: AskedTurn) -> None:
        name = self._conversations.prompt_of[asked.request_id]
        prompt = replace(self._prompts[name], question_id=asked.request_id)
        self._left = replace(
            self._left,
            prompts=(*self._left.prompts, prompt),
            token_ids=(*self._left.token_ids, asked.token_ids),
        )


def write_generations(
    folder: Path, conditions: Sequence[ConditionResult], conversations: Conversations
) -> Path:
    """Write the texts of all conditions, a line a prompt, whole or not at all; return the path.

    They are made from the records, so that a run which was killed and went on has all of them.
    """
    lines = (json.dumps(line) for one in conditions for line in _lines(one, conversations))
    path = folder / GENERATIONS_FILE
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    return path


def _lines(condition: ConditionResult, conversations: Conversations) -> Iterator[dict[str, object]]:
    found = turns_by_prompt(condition.records, condition.prompt_of)
    for prompt in conversations.encoded.prompts:
        turns = found[prompt.question_id]
        yield {
            "condition": condition.label,
            "id": prompt.question_id,
            "category": prompt.category,
            "score": (condition.scores or {}).get(prompt.question_id),
            "is_cut": prompt.question_id in condition.cut_prompts,
            "turns": [
                {
                    "asked": asked,
                    "text": conversations.text(record),
                    "accepted": record.num_accepted_per_round,
                    "drafted": record.num_drafted_per_round,
                    "finish_reason": record.finish_reason,
                }
                for asked, record in zip(prompt.turns, turns, strict=False)
            ],
        }
