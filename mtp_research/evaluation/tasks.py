"""What a regeneration run asks: questions of a data set, or beginnings by the target itself.

First stage of `regenerate.py`. Seeds make every task repeatable, whatever else is decoded with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jinja2 import TemplateError

from mtp_research.config import EngineConfig
from mtp_research.data.questions import Question
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.errors import ConfigError
from mtp_research.evaluation.prompts import ChatTokenizer, begin_of_text
from mtp_research.models.target import Target

_BEGINNINGS = ("def ", "class ", "import ", "from ", '"""', "#", "The ", "A ", "In ", "I ", "He ")
_MESSAGE_TOKENS, _BEGINNING_TOKENS = 96, 24
_SEED_STRIDE = 1_000_003  # keeps the seeds of two runs apart


class SpecialTokenizer(ChatTokenizer, Protocol):
    """A chat tokenizer that also names its special tokens."""

    all_special_ids: list[int]

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        """Ids of token names."""
        ...


@dataclass(frozen=True)
class Task:
    """One line to make: the prompt and how it is called."""

    doc_id: str
    domain: str
    prompt: tuple[int, ...]


def question_tasks(questions: Sequence[Question], tokenizer: ChatTokenizer) -> list[Task]:
    """Conversations in the target's chat template, up to where the assistant speaks.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template refuses a conversation.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            "--source needs a target whose tokenizer has a chat template, this one has none; use "
            "--self-text or a chat model."
        )
    tasks = []
    for question in questions:
        messages = [{"role": role, "content": content} for role, content in question.messages]
        try:
            token_ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as fault:
            raise ConfigError(
                f"the chat template refuses {question.doc_id} ({fault}); leave it out of --source."
            ) from fault
        tasks.append(Task(question.doc_id, question.domain, tuple(token_ids)))
    return tasks


def self_chat_tasks(
    target: Target, tokenizer: SpecialTokenizer, *, count: int, seed: int, engine: EngineConfig
) -> list[Task]:
    """Prompts whose user message the target invents, sampled at temperature 1 and top-p 0.95."""
    user, assistant, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|end|>"])
    opening = (*begin_of_text(tokenizer), user)
    sampling = SamplingParams(
        temperature=1.0, top_p=0.95, max_new_tokens=_MESSAGE_TOKENS, stop_token_ids=(end,)
    )
    messages = _sample(target, [opening] * count, sampling=sampling, seed=seed, engine=engine)
    return [
        Task(f"self-chat:{seed}:{index}", "chat", (*opening, *message, assistant))
        for index, message in enumerate(messages)
        if len(message) > 1 and message[-1] == end
    ]


def self_text_tasks(
    target: Target, tokenizer: SpecialTokenizer, *, count: int, seed: int, engine: EngineConfig
) -> list[Task]:
    """Beginnings of documents that the target continues from one of a few first words."""
    words = [tokenizer.encode(text, add_special_tokens=False) for text in _BEGINNINGS]
    begin = begin_of_text(tokenizer)
    openings = [(*begin, *words[index % len(words)]) for index in range(count)]
    sampling = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=_BEGINNING_TOKENS)
    beginnings = _sample(target, openings, sampling=sampling, seed=seed, engine=engine)
    special = set(tokenizer.all_special_ids)
    return [
        Task(f"self-text:{seed}:{index}", "text", (*opening, *beginning))
        for index, (opening, beginning) in enumerate(zip(openings, beginnings, strict=True))
        if not special & set(beginning)
    ]


def _sample(
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    *,
    sampling: SamplingParams,
    seed: int,
    engine: EngineConfig,
) -> list[tuple[int, ...]]:
    decoder = SpecDecoder(target, num_speculative_tokens=0, engine=engine)
    for index, prompt in enumerate(prompts):
        params = reseed(sampling, seed * _SEED_STRIDE + index)
        decoder.add_request(prompt, sampling=params, request_id=str(index))
    while decoder.scheduler.has_work:
        decoder.step()
    records = sorted(decoder.stats.records, key=lambda record: int(record.request_id))
    return [record.output_token_ids for record in records]


def reseed(sampling: SamplingParams, offset: int) -> SamplingParams:
    """`sampling` with its seed moved by `offset`."""
    return replace(sampling, seed=sampling.seed + offset)
