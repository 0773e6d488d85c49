"""Answers of a target that a server of OpenAI's API runs: the other half of `regenerate`.

A server takes one of four forms of a request, tried in this order with the first task: a completion
of our token ids or a chat, each with and without asking for the token ids of the answer, which vLLM
gives (`return_token_ids`). Where there are none, the text is tokenised, and the line says so.

The name of a server's model has to be found in the target's, or to be given; it has to count as
many tokens in the first question as the target's tokenizer, and in every prompt as many as we sent.
"""

import asyncio
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from mtp_research.data.prompt_text import completion_ids
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, escaped
from mtp_research.runtime.progress import WorkProgress
from mtp_research.studies.answer_tasks import Answered, SpecialTokenizer, Task, sort_out

logger = logging.getLogger(__name__)

WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts, where the server does not say how long
_CONNECT_S = 10.0
_REFUSED_FORM = (400, 404, 405, 415, 422, 501)  # another form may be taken
_MAX_SAID = 300  # characters of a server's message that are repeated

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Server:
    """Where a target is served, and as what."""

    url: str  # up to `/v1`
    model: str  # the name to ask for
    max_model_len: int | None  # tokens of prompt and answer; None where it does not say
    timeout_s: float  # of one answer
    key: str | None  # sent as a bearer token

    def connection(self) -> "_Connection":
        """A connection; use as an asynchronous context manager."""
        return _Connection(self.url, timeout_s=self.timeout_s, key=self.key)


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


class _Refused(Exception):
    """The server understood a request and does not take it."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status} {said}")
        self.status = status


class _Connection:
    """Requests to one server, each tried again where waiting may help."""

    def __init__(self, url: str, *, timeout_s: float, key: str | None) -> None:
        self._url, self._is_told = url, False
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None),  # as many as there are workers
        )

    async def __aenter__(self) -> "_Connection":
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *fault: Any) -> None:
        await self._client.__aexit__(*fault)

    async def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """The reply's JSON object.

        Raises:
            _Refused: a status that another attempt would not change.
            EnvironmentFault: no answer in as many attempts as there are `WAITS_S`, and one more.
        """
        for wait_s in (*WAITS_S, None):
            told_s = None
            try:
                reply = await self._client.request(method, path, json=body)
            except httpx.TransportError as fault:
                said = " ".join(f"{type(fault).__name__}: {fault}".split())
            else:
                if reply.is_success:
                    return _object(reply, self._url)
                said = f"status {reply.status_code} ({_message(reply)})"
                if not _may_pass(reply.status_code):
                    raise _Refused(reply.status_code, _message(reply))
                told_s = _retry_after_s(reply)
            if wait_s is None:
                break
            await self._pause(wait_s if told_s is None else told_s, said)
        raise EnvironmentFault(
            f"the server of --endpoint {self._url} must answer, got {said} "
            f"{len(WAITS_S) + 1} times in a row; start it and run the same command again, which "
            "keeps what was answered."
        )

    async def _pause(self, wait_s: float, said: str) -> None:
        if not self._is_told:  # once: every worker meets the same
            logger.warning("%s: %s; trying again in %g s", self._url, escaped(said), wait_s)
            self._is_told = True
        await asyncio.sleep(wait_s)


def _may_pass(status: int) -> bool:
    return status == 429 or (status >= 500 and status not in _REFUSED_FORM)


def _retry_after_s(reply: httpx.Response) -> float | None:
    """What the header says, in seconds or as a date; None without one that can be read."""
    said = reply.headers.get("retry-after", "")
    if re.fullmatch(r"\d+(\.\d+)?", said):
        return float(said)
    try:
        moment = parsedate_to_datetime(said)
    except ValueError:
        return None
    return max((moment.astimezone(UTC) - datetime.now(UTC)).total_seconds(), 0.0)


def _object(reply: httpx.Response, url: str) -> Json:
    try:
        content = reply.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise EnvironmentFault(
            f"--endpoint {url} must answer with JSON objects as OpenAI's API does, got "
            f"{reply.text[:80]!r} for {reply.request.url.path}; set --endpoint to its /v1."
        )
    return content


def _message(reply: httpx.Response) -> str:
    """What a server says of a fault, on one line."""
    try:
        content = reply.json()
    except ValueError:
        content = reply.text
    for name in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(name):
            content = content[name]
    return " ".join(str(content).split())[:_MAX_SAID] or "no message"


def find_server(
    endpoint: str,
    *,
    target: str,
    served_model: str | None,
    timeout_s: float,
    key_variable: str | None,
) -> Server:
    """The server at an address, once it has said that it serves the target.

    Args:
        endpoint: `http://HOST:PORT`, with or without `/v1`.
        target: folder or hub id, whose parts are compared with the names of the server.
        served_model: the name to take, whatever the target is called; None: one that fits.
        timeout_s: seconds that an answer may take.
        key_variable: environment variable that holds the server's key.

    Raises:
        ConfigError: the address is none, or no name of the server fits.
        EnvironmentFault: it does not answer.
    """
    url = endpoint.rstrip("/")
    try:
        parsed = httpx.URL(url)
        is_address = parsed.scheme in ("http", "https") and bool(parsed.host)
    except httpx.InvalidURL:
        is_address = False
    if not is_address:
        raise ConfigError(
            f"--endpoint must be an address such as http://localhost:8000/v1, got {endpoint!r}."
        )
    url = url if url.endswith("/v1") else f"{url}/v1"
    key = None if key_variable is None else os.environ.get(key_variable)
    if key_variable is not None and not key:
        raise ConfigError(
            f"--api-key-variable must name an environment variable with the server's key, "
            f"{key_variable!r} is not set."
        )

    async def read() -> Json:
        async with _Connection(url, timeout_s=timeout_s, key=key) as connection:
            return await connection.ask("GET", "/models")

    try:
        listed = asyncio.run(read()).get("data")
    except _Refused as fault:
        raise ConfigError(
            f"--endpoint {url} must list its models, got {fault} for GET /models; set --endpoint "
            "to an address of OpenAI's API, and --api-key-variable where it asks for a key."
        ) from None
    models = [one for one in listed or [] if isinstance(one, dict) and one.get("id")]
    chosen = _choose(models, target=target, served_model=served_model, url=url)
    limit = chosen.get("max_model_len")
    return Server(url, str(chosen["id"]), limit if isinstance(limit, int) else None, timeout_s, key)


def _choose(models: Sequence[Json], *, target: str, served_model: str | None, url: str) -> Json:
    known = set(_parts(target))
    for model in models:
        names = [_parts(str(model[field]))[-1] for field in ("id", "root") if model.get(field)]
        fits = model["id"] == served_model if served_model else not known.isdisjoint(names)
        if fits:
            return model
    wanted = f"serve {served_model!r}" if served_model else f"serve --target {target}"
    names = ", ".join(sorted(str(model["id"]) for model in models)) or "no model"
    raise ConfigError(f"--endpoint {url} must {wanted}, got {names}; set --served-model.")


def _parts(name: str) -> list[str]:
    """Parts of a path or hub id in lower case, those of the hub's cache folders as well."""
    return [part for part in re.split(r"/|\\|--", name.lower().partition("@")[0]) if part] or [""]


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
                except _Refused as fault:
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


async def _first_answer(connection: _Connection, work: _Work, task: Task) -> tuple[_Form, Json]:
    """The first form of a request that the server takes, and its answer."""
    refusals: dict[str, str] = {}
    for form in _FORMS:
        try:
            return form, await connection.ask("POST", form.path, work.body(task, form))
        except _Refused as fault:
            refusals[form.path] = str(fault)  # the plainer form of a path comes last
            if fault.status not in _REFUSED_FORM:
                break
    said = "; ".join(f"{path}: {fault}" for path, fault in refusals.items())
    raise ConfigError(
        f"--endpoint {work.server.url} must take completions or chats, got {said}; change what it "
        "refuses, such as --top-k 0, or set --api-key-variable where it asks for a key."
    )


async def _check_tokenizer(connection: _Connection, work: _Work, task: Task) -> None:
    """Let the server count the first question as text: our ids would pass any tokenizer."""
    text, tokenizer = task.messages[-1][1], work.reader.tokenizer
    body = {"model": work.server.model, "prompt": text, "max_tokens": 1, "temperature": 0}
    try:
        usage = (await connection.ask("POST", _FORMS[0].path, body)).get("usage") or {}
    except _Refused:  # takes token ids alone
        return
    ours = completion_ids(text, tokenizer), tokenizer.encode(text, add_special_tokens=True)
    if usage.get("prompt_tokens") not in (None, *map(len, ours)):
        got = f"{usage['prompt_tokens']} tokens in the text of {task.doc_id}"
        raise work.other_model(got, ours[0])
