"""Servers of OpenAI's API that run a target: finding one, and asking it.

A request is tried again where waiting may help; what a server refuses is a `Refused`. The name of a
server's model has to be found in the target's, or to be given.
"""

import asyncio
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NamedTuple

import httpx

from mtp_research.runtime.errors import ConfigError, EnvironmentFault, escaped

logger = logging.getLogger(__name__)

WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts, where the server does not say how long
REFUSED_FORM = (400, 404, 405, 415, 422, 501)  # another form of a request may be taken
_CONNECT_S = 10.0
_MAX_SAID = 300  # characters of a server's message that are repeated

Json = Mapping[str, Any]


class Options(NamedTuple):
    """How messages call what the user sets."""

    endpoint: str  # such as `--endpoint`
    target: str
    name_fix: str  # what to do where no name of the server is the target's
    key_fix: str  # and where it asks for a key
    goes_on: str  # what the same command does once the server is back


@dataclass(frozen=True)
class Server:
    """Where a target is served, and as what."""

    url: str  # up to `/v1`
    model: str  # the name to ask for
    max_model_len: int | None  # tokens of prompt and answer; None where it does not say
    timeout_s: float  # of one answer
    key: str | None  # sent as a bearer token
    options: Options

    def connection(self) -> "Connection":
        """A connection; use as an asynchronous context manager."""
        return Connection(self.url, timeout_s=self.timeout_s, key=self.key, options=self.options)


class Refused(Exception):
    """The server understood a request and does not take it."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status} {said}")
        self.status = status


class Connection:
    """Requests to one server, each tried again where waiting may help.

    A client is in one request at a time: httpx looks at all open connections of a client whenever a
    request starts or ends, which with 32 of them takes three times as long as the request itself.
    """

    def __init__(self, url: str, *, timeout_s: float, key: str | None, options: Options) -> None:
        self._url, self._options, self._is_told = url, options, False
        self._new_client = partial(
            httpx.AsyncClient,
            base_url=url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
            verify=httpx.create_ssl_context(),
        )
        self._idle: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> "Connection":
        return self

    async def __aexit__(self, *fault: Any) -> None:
        while self._idle:
            await self._idle.pop().aclose()

    async def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """The reply's JSON object.

        Raises:
            Refused: a status that another attempt would not change.
            EnvironmentFault: no answer in as many attempts as there are `WAITS_S`, and one more.
        """
        for wait_s in (*WAITS_S, None):
            told_s = None
            client = self._idle.pop() if self._idle else self._new_client()
            try:
                reply = await client.request(method, path, json=body)
            except httpx.TransportError as fault:
                said = " ".join(f"{type(fault).__name__}: {fault}".split())
            else:
                if reply.is_success:
                    return self._object(reply)
                said = f"status {reply.status_code} ({_message(reply)})"
                if not _may_pass(reply.status_code):
                    raise Refused(reply.status_code, _message(reply))
                told_s = retry_after_s(reply)
            finally:
                self._idle.append(client)
            if wait_s is None:
                break
            await self._pause(wait_s if told_s is None else told_s, said)
        raise EnvironmentFault(
            f"the server of {self._options.endpoint} {self._url} must answer, got {said} "
            f"{len(WAITS_S) + 1} times in a row; start it and run the same command again, which "
            f"{self._options.goes_on}."
        )

    def _object(self, reply: httpx.Response) -> Json:
        try:
            content = reply.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            option = self._options.endpoint
            raise EnvironmentFault(
                f"{option} {self._url} must answer with JSON objects as OpenAI's API does, got "
                f"{reply.text[:80]!r} for {reply.request.url.path}; set {option} to its /v1."
            )
        return content

    async def _pause(self, wait_s: float, said: str) -> None:
        if not self._is_told:  # once: every worker meets the same
            logger.warning("%s: %s; trying again in %g s", self._url, escaped(said), wait_s)
            self._is_told = True
        await asyncio.sleep(wait_s)


def _may_pass(status: int) -> bool:
    return status == 429 or (status >= 500 and status not in REFUSED_FORM)


def retry_after_s(reply: httpx.Response) -> float | None:
    """What the header says, in seconds or as a date; None without one that can be read."""
    said = reply.headers.get("retry-after", "")
    if re.fullmatch(r"\d+(\.\d+)?", said):
        return float(said)
    try:
        moment = parsedate_to_datetime(said)
    except ValueError:
        return None
    return max((moment.astimezone(UTC) - datetime.now(UTC)).total_seconds(), 0.0)


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
    key_variable: str | None = None,
    options: Options,
) -> Server:
    """The server at an address, once it has said that it serves the target.

    Args:
        endpoint: `http://HOST:PORT`, with or without `/v1`.
        target: folder or hub id, whose parts are compared with the names of the server.
        served_model: the name to take, whatever the target is called; None: one that fits.
        timeout_s: seconds that an answer may take.
        key_variable: environment variable that holds the server's key.
        options: how messages call these.

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
            f"{options.endpoint} must be an address such as http://localhost:8000/v1, got "
            f"{endpoint!r}."
        )
    url = url if url.endswith("/v1") else f"{url}/v1"
    key = None if key_variable is None else os.environ.get(key_variable)
    if key_variable is not None and not key:
        raise ConfigError(
            f"--api-key-variable must name an environment variable with the server's key, "
            f"{key_variable!r} is not set."
        )

    async def read() -> Json:
        async with Connection(url, timeout_s=timeout_s, key=key, options=options) as connection:
            return await connection.ask("GET", "/models")

    try:
        listed = asyncio.run(read()).get("data")
    except Refused as fault:
        raise ConfigError(
            f"{options.endpoint} {url} must list its models, got {fault} for GET /models; set it "
            f"to an address of OpenAI's API, and {options.key_fix} where it asks for a key."
        ) from None
    models = [one for one in listed or [] if isinstance(one, dict) and one.get("id")]
    chosen = choose_model(
        models, target=target, served_model=served_model, url=url, options=options
    )
    limit = chosen.get("max_model_len")
    limit = limit if isinstance(limit, int) else None
    return Server(url, str(chosen["id"]), limit, timeout_s, key, options)


def choose_model(
    models: Sequence[Json], *, target: str, served_model: str | None, url: str, options: Options
) -> Json:
    """The listed model that is called `served_model`, or has a name of the target's."""
    known = set(_parts(target))
    for model in models:
        names = [_parts(str(model[field]))[-1] for field in ("id", "root") if model.get(field)]
        fits = model["id"] == served_model if served_model else not known.isdisjoint(names)
        if fits:
            return model
    wanted = f"serve {served_model!r}" if served_model else f"serve {options.target} {target}"
    names = ", ".join(sorted(str(model["id"]) for model in models)) or "no model"
    raise ConfigError(f"{options.endpoint} {url} must {wanted}, got {names}; {options.name_fix}.")


def _parts(name: str) -> list[str]:
    """Parts of a path or hub id in lower case, those of the hub's cache folders as well."""
    return [part for part in re.split(r"/|\\|--", name.lower().partition("@")[0]) if part] or [""]
