"""Serve the decode loop to clients of OpenAI's API, so that outside load tools can measure it.

    python -m examples.serve [--host 127.0.0.1] [--port 8000] [KEY=VALUE of eval.py ...]

`/v1/completions`, `/v1/chat/completions` (whole or streamed), `/v1/models`, `/health`, and
`/metrics` under vLLM's names. There are no keys: whoever reaches the port may use it. What the loop
lacks (string stops, n above 1, tools) is refused with 400. Defaults are those of the API:
temperature 1, 16 new tokens of a completion, the rest of the context for a chat.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from itertools import count

from examples.serve_protocol import (
    Body,
    Refused,
    Reply,
    choice,
    read_body,
    read_prompts,
    read_sampling,
    serve,
)
from mtp_research import AsyncDecoder, SamplingParams, SpecDecoder, load_heads, load_target
from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig
from mtp_research.decode.metrics import ServiceMetrics
from mtp_research.decode.schedule.request import StreamEvent
from mtp_research.evaluation.run.conditions import conditions_of
from mtp_research.evaluation.run.decoders import build_decoder
from mtp_research.runtime.errors import ConfigError

# What eval.py measures several of, or chooses by temperature.
DEFAULTS = ["spec.policy=training", "spec.verify=standard", "baseline=false"]


class Server:
    """Answers for one decoder, of which it must be the only user."""

    def __init__(self, decoder: SpecDecoder, *, name: str) -> None:
        self.decoder, self.name = decoder, name
        self.metrics = ServiceMetrics(decoder, model_name=name)
        self._loop = AsyncDecoder(decoder)
        self._num_live = 0
        self._numbers = count()

    async def answer(self, request: str, content: bytes, reply: Reply) -> None:
        """Answer `METHOD PATH`; every fault has a reply."""
        try:
            if request in ("POST /v1/completions", "POST /v1/chat/completions"):
                await self._complete(read_body(content), reply, is_chat="chat" in request)
            elif request == "GET /v1/models":
                limit = self.decoder.max_model_len
                model = {"id": self.name, "object": "model", "created": 0, "max_model_len": limit}
                await reply.whole({"object": "list", "data": [{**model, "owned_by": "local"}]})
            elif request == "GET /metrics":
                await reply.whole(self.metrics.exposition(num_live=self._num_live))
            elif request == "GET /health":
                await reply.whole("")
            else:
                raise Refused(f"expected POST /v1/completions or the like, got {request}", 404)
        except (ConfigError, Refused) as fault:
            await reply.error(str(fault), getattr(fault, "status", 400))
        except RuntimeError as fault:  # of the loop
            await reply.error(str(fault), 500)

    async def _complete(self, body: Body, reply: Reply, *, is_chat: bool) -> None:
        if body.get("model", self.name) != self.name:
            raise Refused(f"model must be {self.name}, got {body['model']}", 404)
        sampling = read_sampling(body, self.decoder, is_chat=is_chat)
        # The decoder's own check, before the status of a stream is sent.
        asked = [
            self.decoder.check(one, sampling=sampling)
            for one in read_prompts(body, is_chat=is_chat)
        ]
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{next(self._numbers)}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }
        texts, reasons, num_tokens = [""] * len(asked), [""] * len(asked), 0
        is_streamed = bool(body.get("stream"))
        if is_streamed and is_chat:
            head["object"] = "chat.completion.chunk"
        events = self._events([one.prompt_token_ids for one in asked], sampling)
        async with aclosing(events):
            async for index, event in events:
                text, reason = event.text, event.finish_reason
                if is_streamed and (text or reason):
                    part = choice(index, text, reason, "delta" if is_chat else None)
                    if is_chat and not texts[index]:
                        part["delta"]["role"] = "assistant"
                    await reply.event({**head, "choices": [part]})
                texts[index], reasons[index] = texts[index] + text, reason or ""
                num_tokens += len(event.token_ids)
        num_prompt = sum(one.num_prompt_tokens for one in asked)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
        usage["total_tokens"] = num_prompt + num_tokens
        if not is_streamed:
            pairs = enumerate(zip(texts, reasons, strict=True))
            choices = [choice(i, *pair, "message" if is_chat else None) for i, pair in pairs]
            await reply.whole({**head, "choices": choices, "usage": usage})
            return
        if (body.get("stream_options") or {}).get("include_usage"):
            await reply.event({**head, "choices": [], "usage": usage})
        await reply.event(None)

    async def _events(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> AsyncIterator[tuple[int, StreamEvent]]:
        """Events of prompts that are decoded side by side, as they come; aborts all on leaving."""
        told: asyncio.Queue[tuple[int, StreamEvent | Exception]] = asyncio.Queue()

        async def read(index: int, prompt: Sequence[int]) -> None:
            try:
                async for event in self._loop.generate(prompt, sampling=sampling):
                    told.put_nowait((index, event))
            except Exception as error:  # raised below, in the reader of all
                told.put_nowait((index, error))

        self._num_live += len(prompts)
        tasks = [asyncio.create_task(read(index, one)) for index, one in enumerate(prompts)]
        num_open = len(prompts)
        try:
            while num_open:
                index, event = await told.get()
                if isinstance(event, Exception):
                    raise RuntimeError(f"{type(event).__name__}: {event}") from event
                if event.finish_reason not in (None, "stop", "length"):
                    raise RuntimeError(event.error or f"it ended with {event.finish_reason}")
                num_open -= event.finish_reason is not None
                yield index, event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._num_live -= len(prompts)
            self.metrics.take_records()


def load_server(words: Sequence[str]) -> Server:
    """A server of what `eval.py` would measure with these words, one condition alone."""
    config = compose_config(EvalConfig, [*DEFAULTS, *words])
    condition, *more = conditions_of(config)
    if more:
        raise ConfigError(f"expected one condition, got {len(more) + 1}; give no lists.")
    model, head = condition.config.model, condition.config.spec.head
    target = load_target(model.path, dtype=model.dtype, device=model.device, experts=model.experts)
    is_named = head in (None, "oracle")
    heads = (head or "null") if is_named else load_heads(str(head), target)
    decoder = build_decoder(condition, target, heads)
    decoder.warm_up(decoder.usual_sampling(), log=lambda line: print(line, file=sys.stderr))
    return Server(decoder, name=model.name)


async def _listen(server: Server, host: str, port: int) -> None:
    listener = await serve(server.answer, host=host, port=port)
    print(f"{server.decoder} at http://{host}:{listener.sockets[0].getsockname()[1]}/v1")
    await listener.serve_forever()


def main() -> None:
    """Load what the command line names, and serve it until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m examples.serve")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("words", nargs="*", help="keys of eval.py, such as spec.k=3 engine=h200")
    options = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(_listen(load_server(options.words), options.host, options.port))


if __name__ == "__main__":
    main()
