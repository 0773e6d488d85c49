"""Answers of a target that a server of OpenAI's API runs: the other half of `regenerate`.

A server takes one of four forms of a request, tried in this order with the first task: a completion
of our token ids or a chat, each with and without asking for the token ids of the answer, which vLLM
gives (`return_token_ids`). Where there are none, the text is tokenised, and the line says so.

The server has to count as many tokens in the first question as the target's tokenizer, and in
every prompt as many as we sent.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence, Set, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mtp_research.data.prompt_text import completion_ids
from mtp_research.data.server import REFUSED_FORM, Connection, Json, Options, Refused, Server
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from mtp_research.runtime.progress import WorkProgress
from mtp_research.studies.answer_tasks import Answered, SpecialTokenizer, Task, sort_out

OPTIONS = Options(
    "--endpoint",
    "--target",
    name_fix="set --served-model",
    key_fix="--api-key-variable",
    goes_on="keeps what was answered",
)


class Reader(NamedTuple):
    """What is needed of a target to read answers."""

    tokenizer: SpecialTokenizer
    stop_token_ids: tuple[int, ...]
    vocab_size: int


class _Form(NamedTuple):
    path: str
    is_chat: bool
    asks_ids: bool


_FORMS = (
    _Form("/completions", is_chat=False, asks_ids=True),
    _Form("/completions", is_chat=False, asks_ids=False),
    _Form("/chat/completions", is_chat=True, asks_ids=True),
    _Form("/chat/completions", is_chat=True, asks_ids=False),
)


class ServerAnswers(NamedTuple):
    """What became of the tasks that a server was asked."""

    answered: Answered
    num_encoded: int  # answers of which the server gave the text alone
    num_different: int  # of those, where it counts another number of tokens than our tokenizer


def answer_by_server(
    server: Server,
    tasks: Sequence[Task],
    *,
    output: Path,
    sampling: SamplingParams,
    reader: Reader,
    concurrency: int,
    done: Set[str],
) -> ServerAnswers:
    """Append the server's answer to every task that is not `done` to `output`.

    Lines are those of `regenerate.answer`, with `encoded_from_text` where the token ids are ours.
    `concurrency` requests are open at once.

    Raises:
        ConfigError: it serves another model than the target, or takes no form of our requests.
        EnvironmentFault: it stops answering, or answers in no form of OpenAI's API.
    """
    found = sort_out(tasks, done=done, max_model_len=server.max_model_len)
    work = _Work(server, sampling, reader)
    counts = work.counts
    if found.asked:
        total = len(found.asked) + found.num_there
        progress = WorkProgress("answers", total=total, unit="documents", first=found.num_there)
        with output.open("a", encoding="utf8") as file, progress:

            def write(line: str) -> None:
                file.write(line)
                file.flush()
                counts["written"] += 1
                progress.done(found.num_there + counts["written"])

            asyncio.run(_answer_all(work, found.asked, write=write, concurrency=concurrency))
    answered = Answered(counts["written"], found.num_there, found.num_too_long)
    return ServerAnswers(answered, counts["encoded"], counts["different"])


@dataclass(frozen=True)
class _Work:
    """What all requests of a run share."""

    server: Server
    sampling: SamplingParams
    reader: Reader
    counts: Counter[str] = field(default_factory=Counter)  # `written`, `encoded`, `different`

    def body(self, task: Task, form: _Form) -> Json:
        """A request."""
        sampling, limit = self.sampling, self.server.max_model_len
        most = sampling.max_new_tokens
        body: dict[str, Any] = {
            "model": self.server.model,
            "max_tokens": most if limit is None else min(most, limit - len(task.prompt)),
            "temperature": sampling.temperature,
            "seed": (sampling.seed or 0) + task.number,
        }
        if sampling.temperature > 0:
            body["top_p"] = sampling.top_p
            body |= {"top_k": sampling.top_k} if sampling.top_k or form.asks_ids else {}
        if form.asks_ids:  # vLLM else takes a repetition penalty from the model's own settings
            body |= {"return_token_ids": True, "repetition_penalty": 1.0}
        if form.is_chat:
            return body | {"messages": [{"role": r, "content": c} for r, c in task.messages]}
        return body | {"prompt": list(task.prompt)}

    def line(self, task: Task, reply: Json) -> str:
        """The line of an answer, once it is one to our prompt."""
        choice = _first_choice(reply, self.server.url)
        usage = reply.get("usage") or {}
        sent = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        num_sent = len(sent) if sent else usage.get("prompt_tokens")
        if num_sent not in (None, len(task.prompt)) or (sent and tuple(sent) != task.prompt):
            raise self.other_model(f"{num_sent} tokens in the prompt of {task.doc_id}", task.prompt)
        reader, token_ids = self.reader, choice.get("token_ids")
        if token_ids is not None:
            if any(not 0 <= token < reader.vocab_size for token in token_ids):
                raise self.other_model(
                    f"token ids up to {max(token_ids)}", range(reader.vocab_size)
                )
            return task.line(self._ended(token_ids, choice))
        text = _text_of(choice, self.server.url)
        encoded = self._ended(reader.tokenizer.encode(text, add_special_tokens=False), choice)
        self.counts["encoded"] += 1
        self.counts["different"] += usage.get("completion_tokens") not in (None, len(encoded))
        return task.line(encoded, encoded_from_text=True)

    def _ended(self, token_ids: Sequence[int], choice: Json) -> list[int]:
        """The answer with the token that ended it, which text and some servers leave out."""
        ends, said = self.reader.stop_token_ids, choice.get("stop_reason")
        if choice.get("finish_reason") != "stop" or not ends or set(token_ids[-1:]) & set(ends):
            return list(token_ids)
        usual = self.reader.tokenizer.eos_token_id
        return [*token_ids, next((end for end in (said, usual) if end in ends), ends[0])]

    def other_model(self, got: str, expected: Sized) -> ConfigError:
        """The fault of a server that counts otherwise."""
        return ConfigError(
            f"--endpoint {self.server.url} must serve the model of --target, whose tokenizer and "
            f"chat template give {len(expected)}, got {got}; serve that model with its own chat "
            "template, or set --target."
        )


def _first_choice(reply: Json, url: str) -> Json:
    choices = reply.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise EnvironmentFault(
            f"--endpoint {url} must answer with `choices` as OpenAI's API does, got the fields "
            f"{sorted(reply)[:8]}."
        )
    return choices[0]


def _text_of(choice: Json, url: str) -> str:
    """What was said; a part that the server took out would be missing from the training text."""
    message = choice.get("message") or {}
    text = choice.get("text", message.get("content"))
    kept = [name for name in ("reasoning", "reasoning_content", "tool_calls") if message.get(name)]
    if kept or not isinstance(text, str):
        raise ConfigError(
            f"--endpoint {url} must give the whole answer as text or token ids, got "
            f"{', '.join(kept) or 'neither'} beside it; start it without parsers of reasoning or "
            "tools."
        )
    return text


async def _answer_all(
    work: _Work, tasks: Sequence[Task], *, write: Callable[[str], None], concurrency: int
) -> None:
    waiting = iter(tasks)
    async with work.server.connection() as connection:

        async def answer_some(form: _Form) -> None:
            for task in waiting:  # shared by all workers
                try:
                    reply = await connection.ask("POST", form.path, work.body(task, form))
                except Refused as fault:
                    raise ConfigError(
                        f"--endpoint {work.server.url} must answer {task.doc_id}, got {fault}; set "
                        "--max-model-len where the prompt is too long, or leave it out of --source."
                    ) from None
                write(work.line(task, reply))

        first = next(waiting)
        form, reply = await _first_answer(connection, work, first)
        line = work.line(first, reply)
        if not form.is_chat:
            await _check_tokenizer(connection, work, first)
        write(line)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(answer_some(form))
        except BaseExceptionGroup as faults:
            raise faults.exceptions[0] from None


async def _first_answer(connection: Connection, work: _Work, task: Task) -> tuple[_Form, Json]:
    """The first form of a request that the server takes, and its answer."""
    refusals: dict[str, str] = {}
    for form in _FORMS:
        try:
            return form, await connection.ask("POST", form.path, work.body(task, form))
        except Refused as fault:
            refusals[form.path] = str(fault)  # the plainer form of a path comes last
            if fault.status not in REFUSED_FORM:
                break
    said = "; ".join(f"{path}: {fault}" for path, fault in refusals.items())
    raise ConfigError(
        f"--endpoint {work.server.url} must take completions or chats, got {said}; change what it "
        "refuses, such as --top-k 0, or set --api-key-variable where it asks for a key."
    )


async def _check_tokenizer(connection: Connection, work: _Work, task: Task) -> None:
    """Let the server count the first question as text: our ids would pass any tokenizer."""
    text, tokenizer = task.messages[-1][1], work.reader.tokenizer
    body = {"model": work.server.model, "prompt": text, "max_tokens": 1, "temperature": 0}
    try:
        usage = (await connection.ask("POST", _FORMS[0].path, body)).get("usage") or {}
    except Refused:  # takes token ids alone
        return
    ours = completion_ids(text, tokenizer), tokenizer.encode(text, add_special_tokens=True)
    if usage.get("prompt_tokens") not in (None, *map(len, ours)):
        got = f"{usage['prompt_tokens']} tokens in the text of {task.doc_id}"
        raise work.other_model(got, ours[0])
