"""AsyncDecoder: many concurrent streams from one decode loop, for asyncio programs.

    async with AsyncDecoder(decoder) as async_decoder:
        async for event in async_decoder.generate(prompt, sampling=sampling):
            print(event.text, end="", flush=True)

Steps run in one worker thread, so that the event loop stays responsive. The decoder's state is
changed from the event loop only, and only between two steps: arrivals and cancellations wait for
that moment. Without requests no task and no step runs.

Backpressure: a reader that is slower than the loop does not slow it down. The tokens that it has
not fetched are merged into one event, so that it holds at most `max_new_tokens` of them. Arrivals
beyond `max_num_live` wait, in order, before they enter the decoder.
"""

import asyncio
import functools
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.arguments import Prompt, in_words, prompt_ids, whole_number
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.request import Request, RequestFeed, StreamEvent
from mtp_research.runtime.compiling import old_objects_kept
from mtp_research.runtime.errors import ConfigError, DecoderClosed, EnvironmentFault


@dataclass(eq=False)
class _Stream:
    """One reader: what it asked for, and what it has not fetched yet."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams | None
    request_id: str | None
    priority: int
    request: Request | None = None
    feed: RequestFeed | None = None
    has_left: bool = False
    _event: StreamEvent | None = None
    _error: BaseException | None = None
    _is_ready: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, event: StreamEvent) -> None:
        """Add an event to what waits to be fetched."""
        self._event = event if self._event is None else _merged(self._event, event)
        self._is_ready.set()

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the reader."""
        self._error = error
        self._is_ready.set()

    async def fetch(self) -> StreamEvent:
        """Wait for the next event."""
        await self._is_ready.wait()
        self._is_ready.clear()
        if self._error is not None:
            raise self._error
        event, self._event = self._event, None
        assert event is not None, "a stream that is ready has an event or an error"
        return event


class AsyncDecoder:
    """Serves concurrent readers from one decoder, of which it must be the only user.

    Args:
        decoder: a decoder without requests. Finished requests stay in `decoder.stats.records`;
            a service that runs for days should clear that list now and then.
        max_num_live: most requests inside the decoder; later ones wait outside. None: no limit.

    Raises:
        ConfigError: `max_num_live` is below 1, or the decoder has requests already.
    """

    def __init__(self, decoder: SpecDecoder, *, max_num_live: int | None = None) -> None:
        if max_num_live is not None:
            max_num_live = whole_number(max_num_live, key="max_num_live")
        if max_num_live is not None and max_num_live < 1:
            raise ConfigError(
                f"max_num_live must be >= 1 or None, got {max_num_live}; set max_num_live."
            )
        if decoder.has_work:
            raise ConfigError(
                "AsyncDecoder needs a decoder without requests; finish or abort them first."
            )
        self._decoder = decoder
        self._places = asyncio.Semaphore(max_num_live) if max_num_live is not None else None
        self._arriving: list[_Stream] = []
        self._live: list[_Stream] = []
        self._driver: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self._is_closed = False
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode-step")

    def __repr__(self) -> str:
        return f"AsyncDecoder({self._decoder!r})"

    async def __aenter__(self) -> "AsyncDecoder":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[StreamEvent]:
        """Yield the output of one prompt as it is decided; the last event has a finish reason.

        `prompt` is text, token ids or messages, see `SpecDecoder.add_request`; events have `text`
        and `token_ids`. `sampling` and `max_new_tokens` as in `SpecDecoder.generate`.

        Cancelling the reading task, or leaving the iterator early, aborts the request; its blocks
        are free before the next step.
        """
        self._check_usable()
        # In the worker, beside no step: the first text reads the tokenizer, which takes a second.
        encode = functools.partial(prompt_ids, prompt, target=self._decoder.target)
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(self._worker, encode) if in_words(prompt) else encode()
        sampling = self._decoder.chosen_sampling(sampling, max_new_tokens)
        stream = _Stream(ids, sampling, request_id, priority)
        if self._places is not None:
            await self._places.acquire()
        try:
            self._check_usable()
            self._arriving.append(stream)
            self._wake()
            event = await stream.fetch()
            while event.finish_reason is None:
                yield event
                event = await stream.fetch()
            yield event
        finally:
            stream.has_left = True
            if self._places is not None:
                self._places.release()
            if self._driver is None:
                self._admit_and_abort()

    async def close(self) -> None:
        """Abort what is running, whose readers get a last event, and end the worker thread."""
        self._is_closed = True
        if self._driver is not None:
            await asyncio.wait([self._driver])
        self._worker.shutdown()

    def _check_usable(self) -> None:
        if self._fault is not None:
            raise DecoderClosed(
                f"a decode step failed before: {self._fault}; build a new decoder."
            ) from self._fault
        if self._is_closed:
            raise EnvironmentFault("the AsyncDecoder is closed; build a new one.")

    def _wake(self) -> None:
        if self._driver is None:
            self._driver = asyncio.get_running_loop().create_task(self._drive())
            self._driver.add_done_callback(self._end_drive)

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        with old_objects_kept():
            while True:
                self._admit_and_abort()
                self._deliver()
                if not self._decoder.has_work:
                    return
                step = loop.run_in_executor(self._worker, self._decoder.step)
                try:
                    await asyncio.shield(step)
                except asyncio.CancelledError:
                    await asyncio.wait([step])  # a step cannot be interrupted
                    raise

    def _end_drive(self, driver: asyncio.Task[None]) -> None:
        self._driver = None
        error = asyncio.CancelledError() if driver.cancelled() else driver.exception()
        if error is None:
            if self._arriving:  # they came after the driver's last look
                self._wake()
            return
        self._fault = error
        for stream in [*self._live, *self._arriving]:
            stream.has_left = True
            stream.fail(error)
        self._admit_and_abort()

    def _admit_and_abort(self) -> None:
        """Bring the decoder up to date with its readers; only between two steps."""
        for stream in self._live:
            if (stream.has_left or self._is_closed) and stream.request is not None:
                self._decoder.abort(stream.request)
        self._live = [stream for stream in self._live if not stream.has_left]
        while self._arriving:
            stream = self._arriving[0]
            if not stream.has_left:
                self._admit(stream)
            del self._arriving[0]  # whoever is not admitted when the driver ends is told so

    def _admit(self, stream: _Stream) -> None:
        try:
            self._check_usable()
            stream.request = self._decoder.add_request(
                stream.prompt_token_ids,
                sampling=stream.sampling,
                request_id=stream.request_id,
                priority=stream.priority,
            )
        except Exception as error:  # whatever it is, it is this reader's and nobody else's
            stream.fail(error)
            return
        stream.feed = RequestFeed(stream.request)
        self._live.append(stream)

    def _deliver(self) -> None:
        for stream in self._live:
            event = stream.feed.read() if stream.feed is not None else None
            if event is not None:
                stream.push(event)
                stream.has_left = event.finish_reason is not None


def _merged(first: StreamEvent, second: StreamEvent) -> StreamEvent:
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    piece = second.piece
    if piece is not None and first.piece is not None:
        piece = piece._replace(first=first.piece.first, start=first.piece.start)
    return StreamEvent(
        first.request_id,
        first.token_ids + second.token_ids,
        second.finish_reason,
        logprobs,
        second.error,
        piece,
    )
