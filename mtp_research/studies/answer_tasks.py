"""What a target is asked, for regeneration: questions of others, and those that it invents.

Tasks are numbered, and the number is part of their seed, so that it does not matter which process
of a launch decodes them. Questions that are also asked in an evaluation are left out by
`Evaluated`: heads must not be measured on what they learnt.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from jinja2 import TemplateError

from mtp_research.config.schema import EngineConfig
from mtp_research.data.prompt_text import ChatTokenizer, begin_of_text
from mtp_research.data.row_forms import Question, Turns
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.evaluation.run.prompt_files import read_prompt_files
from mtp_research.models.loading.placement import num_ranks
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError
from mtp_research.runtime.progress import WorkProgress

T = TypeVar("T")
_BEGINNINGS = ("def ", "class ", "import ", "from ", '"""', "#", "The ", "A ", "In ", "I ", "He ")
_MESSAGE_TOKENS, _BEGINNING_TOKENS = 96, 24
_SHORTEST_MESSAGE = 2  # tokens, with the one that ends it
_MARK = "MESSAGE"  # where the template puts a user's message
_SEED_STRIDE = 1_000_003  # keeps the seeds of two runs apart
_GRAM_WORDS = 13  # in a row, that two questions do not share by chance


class SpecialTokenizer(ChatTokenizer, Protocol):
    """A chat tokenizer that also names its special tokens."""

    all_special_ids: list[int]
    eos_token_id: int | None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...


@dataclass(frozen=True)
class Task:
    """One line to make: the prompt and how it is called."""

    doc_id: str
    domain: str
    prompt: tuple[int, ...]
    own_words: tuple[int, ...] = ()  # what the target invented of the prompt
    number: int = 0  # among all that are asked for: its seed, whichever process decodes it
    messages: Turns = ()  # that the prompt was made of

    def line(self, output_token_ids: Sequence[int], **marks: bool) -> str:
        """The answer as a line of the output; `marks` are further fields."""
        record = {
            "id": self.doc_id,
            "domain": self.domain,
            "token_ids": [*self.prompt, *output_token_ids],
            "num_prompt_tokens": len(self.prompt),
        }
        return json.dumps(record | marks, separators=(",", ":")) + "\n"


class Answered(NamedTuple):
    """What became of the tasks of one call."""

    num_written: int  # lines appended
    num_there: int  # tasks that the output held before
    num_too_long: int  # prompts that leave no room for a token


class Sorted(NamedTuple):
    """Tasks of a call, and what is not asked."""

    asked: list[Task]
    num_there: int
    num_too_long: int


def sort_out(tasks: Sequence[Task], *, done: Set[str], max_model_len: int | None) -> Sorted:
    """Leave out tasks that are `done`, and prompts as long as the context (None: no limit)."""
    new = [task for task in tasks if task.doc_id not in done]
    fitting = [task for task in new if max_model_len is None or len(task.prompt) < max_model_len]
    return Sorted(fitting, len(tasks) - len(new), len(new) - len(fitting))


class Share(NamedTuple):
    """Which of the processes of torchrun this is; they deal the tasks out among themselves."""

    rank: int = 0
    num_ranks: int = 1

    def of(self, tasks: Sequence[T]) -> list[T]:
        """Every n-th task."""
        return list(tasks[self.rank :: self.num_ranks])

    def in_turns(self, read: Callable[[], T]) -> T:
        """What `read` gives, the first process before the others; all leave together."""
        if self.rank > 0:
            self._wait()
            found = read()
        else:
            found = read()
            self._wait()
        self._wait()
        return found

    def sums(self, counts: Sequence[int]) -> list[int]:
        """The counts added up over the processes, once all of them are here."""
        total = torch.tensor(counts)
        if self.num_ranks > 1:
            dist.all_reduce(total)
        return total.tolist()

    def leave(self) -> None:
        """End the group, which must not outlive the process."""
        if self.num_ranks > 1:
            dist.destroy_process_group()

    def _wait(self) -> None:
        if self.num_ranks > 1:
            dist.barrier()


def join_launch(device: str) -> Share:
    """This process's share under torchrun, on a GPU of its own where there are; else everything."""
    share = Share(int(os.environ.get("RANK", "0")), num_ranks())
    if share.num_ranks > 1:
        dist.init_process_group("gloo")  # a few counts and barriers
        if device != "cpu" and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return share


class Evaluated:
    """Questions of evaluations, to be kept out of training."""

    def __init__(self, sources: Iterable[str]) -> None:
        self._whole: set[tuple[str, ...]] = set()
        self._grams: set[tuple[str, ...]] = set()
        for source in sources:
            for prompt in read_prompt_files(source):
                for text in prompt.turns:
                    words = _words(text)
                    self._whole.add(words)
                    self._grams.update(_grams(words))

    def holds(self, text: str) -> bool:
        """Whether case, spaces and punctuation aside the text is asked there, or shares a run."""
        words = _words(text)
        return words in self._whole or any(gram in self._grams for gram in _grams(words))


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.lower()))


def _grams(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (words[at : at + _GRAM_WORDS] for at in range(len(words) - _GRAM_WORDS + 1))


def question_tasks(questions: Sequence[Question], tokenizer: ChatTokenizer) -> list[Task]:
    """Conversations in the target's chat template, up to where the assistant speaks."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            "--source needs a target whose tokenizer has a chat template, this one has none; use "
            "--self-text or a chat model."
        )
    tasks = []
    for number, question in enumerate(questions):
        messages = [{"role": role, "content": content} for role, content in question.messages]
        try:
            token_ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as fault:
            raise ConfigError(
                f"the chat template refuses {question.doc_id} ({fault}); leave it out of --source."
            ) from fault
        prompt, asked = tuple(token_ids), question.messages
        task = Task(question.doc_id, question.domain, prompt, number=number, messages=asked)
        tasks.append(task)
    return tasks


class Invention(NamedTuple):
    """What the target invents: its beginnings, and what becomes of the words that follow."""

    openings: Callable[[int], tuple[int, ...]]  # by number
    sampling: SamplingParams
    task: Callable[[int, tuple[int, ...]], Task | None]  # by number and words; None: not of use


def invent(
    target: Target,
    tokenizer: "SpecialTokenizer",
    kind: Callable[["SpecialTokenizer", int], Invention],
    *,
    count: int,
    first_number: int,
    share: Share,
    seed: int,
    engine: EngineConfig,
) -> list[Task]:
    """This process's share of `count` tasks that the target invents."""
    if not count:
        return []
    invention = kind(tokenizer, seed)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    own = share.of(range(count))
    for index in own:
        drawn = replace(invention.sampling, seed=seed * _SEED_STRIDE + index)
        decoder.add_request(invention.openings(index), sampling=drawn, request_id=str(index))
    stats = decoder.stats
    with WorkProgress("asking the target", total=len(own), unit="prompts") as progress:
        while decoder.has_work:
            decoder.step()
            progress.done(len(stats.records))
    words = {int(record.request_id): record.output_token_ids for record in decoder.stats.records}
    tasks = [invention.task(index, words[index]) for index in sorted(words)]
    return [replace(task, number=first_number + task.number) for task in tasks if task is not None]


def self_chat(tokenizer: "SpecialTokenizer", seed: int) -> Invention:
    """Prompts whose user message the target invents, sampled at temperature 1 and top-p 0.95."""
    turn = user_turn(tokenizer)
    sampling = SamplingParams(
        temperature=1.0, top_p=0.95, max_new_tokens=_MESSAGE_TOKENS, stop_token_ids=(turn.end,)
    )

    def task(index: int, words: tuple[int, ...]) -> Task | None:
        if len(words) < _SHORTEST_MESSAGE or words[-1] != turn.end:
            return None
        prompt = (*turn.opening, *words[:-1], *turn.closing)
        return Task(f"self-chat:{seed}:{index}", "chat", prompt, words[:-1], index)

    return Invention(lambda _: turn.opening, sampling, task)


class UserTurn(NamedTuple):
    """How the chat template writes a user's message, as token ids."""

    opening: tuple[int, ...]  # before it
    end: int  # the special token behind it
    closing: tuple[int, ...]  # what follows it, that token first, up to where the assistant speaks


def user_turn(tokenizer: SpecialTokenizer) -> UserTurn:
    """The turn in a conversation that begins with it; `ConfigError` where its end is plain text."""
    message = [{"role": "user", "content": _MARK}]
    text = tokenizer.chat_template and tokenizer.apply_chat_template(
        message, add_generation_prompt=True, tokenize=False, return_dict=False
    )
    before, _, after = str(text or "").partition(_MARK)
    opening, closing = (
        tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (before, after)
    )
    if not closing or closing[0] not in tokenizer.all_special_ids:
        raise ConfigError(
            "--self-chat needs a chat template that ends the user's turn with a special token, got "
            f"{after[:20]!r} behind it; set --source."
        )
    return UserTurn(opening, closing[0], closing)


def self_text(tokenizer: SpecialTokenizer, seed: int) -> Invention:
    """Beginnings of documents that the target continues from one of a few first words."""
    first_words = [tokenizer.encode(text, add_special_tokens=False) for text in _BEGINNINGS]
    begin, special = begin_of_text(tokenizer), set(tokenizer.all_special_ids)
    sampling = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=_BEGINNING_TOKENS)

    def opening(index: int) -> tuple[int, ...]:
        return (*begin, *first_words[index % len(first_words)])

    def task(index: int, words: tuple[int, ...]) -> Task | None:
        if special & set(words):
            return None
        return Task(f"self-text:{seed}:{index}", "text", (*opening(index), *words), words, index)

    return Invention(opening, sampling, task)
