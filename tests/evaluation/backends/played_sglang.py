"""SGLang 0.5.23 as far as our driver looks: an engine whose steps our own loop plays.

    monkeypatch.setitem(sys.modules, "sglang", PlayedSglang())

Chunks are shaped as those of `sglang_0_5_23.json`, which says where its fields are from. They are
handed out as SGLang does it: those that nobody has fetched are joined, and whoever waits for one is
woken after `batch_notify_size` of them. The next step's are always there already, the worst case.
"""

import asyncio
import copy
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from mtp_research.decode.sampling.sampling_params import SamplingParams
from tests.evaluation.backends.played_vllm import loop_of, pieces_of

WRITTEN = json.loads(Path(__file__).with_name("sglang_0_5_23.json").read_text())
Chunk = dict[str, Any]


class PlayedSglang(ModuleType):
    """The module, with what its engines were asked for."""

    def __init__(self, version: str = "0.5.23", engine: str = "sglang") -> None:
        super().__init__("sglang")
        self.__spec__ = ModuleSpec("sglang", None)
        self.__version__ = version
        self.played_engine = engine  # whose conventions are played
        self.words: list[dict[str, Any]] = []
        self.num_open = 0
        self.lost_rounds = 0  # that its counts forget

    def Engine(self, **words: Any) -> "PlayedEngine":
        """An engine; its processes run until it is shut down."""
        self.words.append(words)
        self.num_open += 1
        steps, algorithm = words.get("speculative_num_steps", 0), "speculative_algorithm" in words
        assert algorithm == (steps > 0)
        decoder = loop_of(
            Path(words["model_path"]),
            words["dtype"],
            num_drafts=steps,
            max_model_len=words["context_length"],
            conventions=self.played_engine,
        )

        def chunks(name: str, input_ids: list[int], params: Mapping[str, Any]) -> list[Chunk]:
            ends = () if params["ignore_eos"] else tuple(params["stop_token_ids"])
            sampling = SamplingParams(
                max_new_tokens=params["max_new_tokens"], stop_token_ids=ends, temperature=0.0
            )
            (record,) = decoder.generate([input_ids], sampling=sampling)
            pieces = [piece for piece in pieces_of(record, has_rounds=steps > 0) if piece]
            rounds = record.num_accepted_per_round
            num_told = len(rounds) - self.lost_rounds
            told = {"spec_verify_ct": num_told, "spec_num_correct_drafts": sum(rounds)}
            told["spec_num_proposed_drafts"] = len(rounds) * steps
            histogram = [rounds.count(kept) for kept in range(max(rounds, default=0) + 1)]
            told |= {"spec_correct_drafts_histogram": histogram} if rounds else {}
            end: dict[str, Any] = {"type": record.finish_reason}
            end |= {"matched": pieces[-1][-1]} if end["type"] == "stop" else {}
            return shaped(name, len(input_ids), pieces, end, told if rounds else {})

        return PlayedEngine(chunks, words, on_shutdown=self._shutdown)

    def _shutdown(self) -> None:
        self.num_open -= 1


def shaped(
    name: str,
    num_prompt_tokens: int,
    pieces: Sequence[list[int]],
    end: Mapping[str, Any],
    told: Mapping[str, Any],
) -> list[Chunk]:
    """Chunks of a request with the fields that the written ones have."""
    first, *_, last = WRITTEN["requests"]["length"]["chunks"]
    plain = {key: value for key, value in last["meta_info"].items() if not key.startswith("spec_")}
    chunks, count = [], 0
    for index, piece in enumerate(pieces):
        is_last = index == len(pieces) - 1
        count += len(piece)
        meta = copy.deepcopy(plain if is_last else first["meta_info"])
        meta |= {"id": name, "prompt_tokens": num_prompt_tokens, "completion_tokens": count}
        meta |= {"finish_reason": dict(end), **told} if is_last else {}
        chunks.append({"output_ids": list(piece), "meta_info": meta})
    return chunks


class PlayedEngine:
    """What `sglang.Engine` gives us: a loop, streams and an end."""

    def __init__(self, chunks: Any, words: Mapping[str, Any], *, on_shutdown: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._chunks, self._words, self._on_shutdown = chunks, words, on_shutdown
        self._running: dict[str, SimpleNamespace] = {}
        self._handle_loop: asyncio.Task[None] | None = None

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict, rid: str, stream: bool
    ) -> AsyncIterator[Chunk]:
        """A stream of chunks."""
        assert stream
        assert self._words["incremental_streaming_output"]
        assert self._words["skip_tokenizer_init"]
        return self._stream(rid, self._chunks(rid, input_ids, sampling_params))

    async def _stream(self, rid: str, chunks: list[Chunk]) -> AsyncIterator[Chunk]:
        state = SimpleNamespace(chunks=deque(chunks), unread=[], event=asyncio.Event())
        self._running[rid] = state
        if self._handle_loop is None or self._handle_loop.done():
            self._handle_loop = asyncio.create_task(self._hand_out())
        while True:
            await state.event.wait()
            unread, state.unread = state.unread, []
            state.event.clear()
            joined = [token for chunk in unread for token in chunk["output_ids"]]
            yield unread[-1] | {"output_ids": joined}
            if unread[-1]["meta_info"]["finish_reason"]:
                return

    async def _hand_out(self) -> None:
        told: list[SimpleNamespace] = []
        while self._running:
            for rid, state in list(self._running.items())[: self._words["max_running_requests"]]:
                state.unread.append(state.chunks.popleft())
                told.append(state)
                if not state.chunks:
                    del self._running[rid]
                if len(told) >= self._words["batch_notify_size"]:
                    for one in told:
                        one.event.set()
                    told = []
                    await asyncio.sleep(0)
        for one in told:
            one.event.set()

    def shutdown(self) -> None:
        """End it."""
        self.loop.close()
        self._on_shutdown()
