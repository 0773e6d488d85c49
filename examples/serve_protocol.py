"""What `examples.serve` reads and writes: just enough HTTP/1.1, and requests in OpenAI's form.

A connection is kept open for the next request. When a client leaves, its answer is cancelled.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from mtp_research import SamplingParams, SpecDecoder

Body = dict[str, Any]  # JSON of a request
MAX_BODY = 16 << 20  # bytes
LOOK_EVERY_S = 0.25  # at whether the client is still there
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
PASSED = {"temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", *PENALTIES}
# What the loop lacks, with the values that do not ask for it.
NEUTRAL = {"n": 1, "best_of": 1, "echo": False, "logprobs": False, "stop": []}
READ = {"max_tokens", "max_completion_tokens", "stop_token_ids", "ignore_eos", "model", "user"}
KNOWN = {*PASSED, *NEUTRAL, *READ, "prompt", "messages", "stream", "stream_options"}
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error"}


class Refused(ValueError):
    """A request that is answered with one line and this status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Reply:
    """One answer: `whole`, or `event` after `event`."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._has_begun = False

    async def whole(self, content: object, status: int = 200) -> None:
        """JSON; text goes as it is."""
        is_text = isinstance(content, str)
        data = (content if is_text else json.dumps(content)).encode()
        self._begin(status, "text/plain" if is_text else "application/json", size=len(data))
        self._writer.write(data)
        await self._writer.drain()

    async def event(self, content: object) -> None:
        """One event of a stream; None ends it."""
        if not self._has_begun:
            self._begin(200, "text/event-stream", size=None)
        data = f"data: {'[DONE]' if content is None else json.dumps(content)}\n\n"
        end = "0\r\n\r\n" if content is None else ""
        self._writer.write(f"{len(data.encode()):x}\r\n{data}\r\n{end}".encode())
        await self._writer.drain()

    async def error(self, message: str, status: int) -> None:
        """An error in OpenAI's form and on one line; it ends a stream that has begun."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        line = " ".join(message.split())
        content = {"error": {"message": line, "type": kind, "param": None, "code": status}}
        if self._has_begun:
            await self.event(content)
            await self.event(None)
        else:
            await self.whole(content, status)

    def _begin(self, status: int, kind: str, *, size: int | None) -> None:
        self._has_begun = True
        length = "Transfer-Encoding: chunked" if size is None else f"Content-Length: {size}"
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}; charset=utf-8"
        self._writer.write(f"{head}\r\n{length}\r\n\r\n".encode())


Answer = Callable[[str, bytes, Reply], Awaitable[None]]


async def serve(answer: Answer, *, host: str, port: int) -> asyncio.Server:
    """Listen; `answer(METHOD PATH, body, reply)` is called for each request. Port 0: a free one."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not reader.at_eof():
                await _while_connected(reader, answer(*await _request(reader), Reply(writer)))
        except Refused as fault:  # where its successor begins is unknown
            await Reply(writer).error(str(fault), fault.status)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()

    return await asyncio.start_server(connected, host, port)


async def _request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """`METHOD PATH` and body of the next request."""
    try:
        line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = line.split(" ")
        headers = {name.lower(): value for name, _, value in (f.partition(":") for f in fields)}
        size = int(headers.get("content-length", 0))
    except (ValueError, asyncio.LimitOverrunError):
        raise Refused("expected an HTTP/1.1 request, got something else") from None
    if not 0 <= size <= MAX_BODY or "transfer-encoding" in headers:
        raise Refused(f"a body must have a Content-Length in 0..{MAX_BODY}, got another")
    return f"{method} {path.partition('?')[0]}", await reader.readexactly(size)


async def _while_connected(reader: asyncio.StreamReader, work: Awaitable[None]) -> None:
    task = asyncio.ensure_future(work)
    try:
        while not task.done() and not reader.at_eof():
            await asyncio.wait([task], timeout=LOOK_EVERY_S)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def read_body(content: bytes) -> Body:
    """A request's JSON without the keys that are null; a key that means nothing here is refused."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise Refused("the body must be JSON, got something else") from None
    if not isinstance(body, dict):
        raise Refused(f"the body must be a JSON object, got a {type(body).__name__}")
    body = {key: value for key, value in body.items() if value is not None}
    for key in body:
        if key not in KNOWN:
            raise Refused(f"{key} is not supported; leave it out")
        if key in NEUTRAL and body[key] != NEUTRAL[key]:
            fix = "set stop_token_ids" if key == "stop" else "leave it out"
            raise Refused(f"{key} must be {json.dumps(NEUTRAL[key])}, got another value; {fix}")
    if not isinstance(body.get("stream_options", {}), dict):
        raise Refused("stream_options must be an object, got something else")
    return body


def read_sampling(body: Body, decoder: SpecDecoder, *, is_chat: bool) -> SamplingParams:
    """How the loop is to sample; `SamplingParams` checks what it takes."""
    ends = body.get("stop_token_ids", [])
    if not isinstance(ends, list):
        raise Refused("stop_token_ids must be a list of token ids, got something else")
    own = () if body.get("ignore_eos") else decoder.target.stop_token_ids
    limit = body.get("max_tokens", decoder.max_model_len if is_chat else 16)
    given = {"temperature": 1.0, "seed": None} | {k: body[k] for k in PASSED & body.keys()}
    if given.get("top_k") == -1:  # some clients say "off" like this
        del given["top_k"]
    limit = body.get("max_completion_tokens", limit)
    return SamplingParams(max_new_tokens=limit, stop_token_ids=(*own, *ends), **given)


def read_prompts(body: Body, *, is_chat: bool) -> list[Any]:
    """Text, token ids or messages each."""
    prompt = body.get("messages" if is_chat else "prompt")
    if not prompt or (is_chat and not isinstance(prompt, list)):
        raise Refused(f"{'messages' if is_chat else 'prompt'} must be given, got nothing of use")
    is_many = isinstance(prompt, list) and isinstance(prompt[0], str | list) and not is_chat
    if is_chat:
        return [[_plain(message) for message in prompt]]
    return prompt if is_many else [prompt]


def _plain(message: object) -> object:
    """A message whose content is text, which some clients send in parts."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(content, str | list):
        raise Refused('a message must be {"role": TEXT, "content": TEXT}, got something else')
    parts = content if isinstance(content, list) else []
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
        raise Refused("a part of a message must be text, got something else")
    text = "".join(str(part.get("text", "")) for part in parts)
    return {**message, "content": text} if parts else message


def choice(index: int, text: str, reason: str | None, key: str | None) -> Body:
    """An entry of `choices`: text, or under `key` what the assistant says."""
    said = {"text": text}
    if key is not None:
        said = {key: {"content": text} | ({"role": "assistant"} if key == "message" else {})}
    return {"index": index, **said, "logprobs": None, "finish_reason": reason}
