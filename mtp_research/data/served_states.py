"""Hidden states of packed rows, asked of a server while heads train.

The server runs the target and writes the hidden states of each prompt to a file in a local folder,
as vLLM's `ExampleHiddenStatesConnector` does (`engine_states` has the form of the files). A row's
documents are sent as prompts; the reply names the file, which is read when it is whole, checked and
removed. Rows are asked for in the order of their use, at most `ahead` of them before they are
needed: a server that is faster than the training waits, and the folder never holds more.

vLLM gives no checksum. What is checked: the lengths that a file of safetensors states of itself,
its token ids against those that were sent, shapes, dtype and that numbers are finite.

Letters: S row length, D hidden.

Source: vLLM 0.24.0, `example_hidden_states_connector.py` (`load_hidden_states`,
`cleanup_hidden_states`) and `entrypoints/openai/completion`.
"""

import asyncio
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from mtp_research.data.engine_states import StatesForm, read_last_states, read_token_ids
from mtp_research.data.packing import PackedRows, document_spans
from mtp_research.data.server import Json, Refused, Server
from mtp_research.runtime.errors import ConfigError, IntegrityError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

MOST_AT_ONCE = 128  # documents that a server is asked for, each with a connection and a file


@dataclass
class ServedTimes:
    """Seconds since rows were announced; documents are under way beside one another."""

    num_served: int = 0  # documents
    server_s: float = 0.0  # from request to reply, of all documents together
    writer_s: float = 0.0  # then until the file was whole
    reading_s: float = 0.0  # then until it was read, checked and removed
    waited_s: float = 0.0  # that `rows` stood still; on a GPU partly beside the step before


class ServedStates:
    """States of packed rows, before the final norm.

    Args:
        packed: the rows.
        server: of the target.
        form: what its states are like.
        ahead: rows that are asked for before they are needed.
        keeps: rows stay in memory, where they are read again and again.
        device: where `rows` puts them.
    """

    def __init__(
        self,
        packed: PackedRows,
        *,
        server: Server,
        form: StatesForm,
        ahead: int,
        keeps: bool,
        device: torch.device,
    ) -> None:
        self._packed, self._server, self._form = packed, server, form
        self._ahead, self._keeps, self._device = ahead, keeps, device
        self.times = ServedTimes()
        self._kept: dict[int, Tensor] = {}
        self._order: Iterator[int] = iter(())
        self._asked: deque[tuple[int, Future[Tensor]]] = deque()  # in the order of their use
        self._loop = asyncio.new_event_loop()
        self._connection, self._places = server.connection(), asyncio.Semaphore(MOST_AT_ONCE)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def follow(self, order: Iterable[int]) -> None:
        """Ask ahead for these rows, which `rows` is going to be called for, one after the other."""
        self._order, self.times = iter(order), ServedTimes()
        self._ask_ahead()

    def rows(self, indices: Sequence[int]) -> Tensor:
        """States `[len(indices), S, D]`, zero where a row is empty.

        Raises:
            ConfigError: the server refuses a document, or its files cannot be seen from here.
            EnvironmentFault: it does not answer.
            IntegrityError: a file is damaged, or of other tokens.
        """
        futures = [self._taken(index) for index in indices]
        self._ask_ahead()
        begun_s = time.perf_counter()
        found = [future.result() for future in futures]
        self.times.waited_s += time.perf_counter() - begun_s
        if self._keeps:
            self._kept.update(zip(indices, found, strict=True))
        states = found[0].new_empty(len(found), *found[0].shape, device=self._device)
        for place, row in zip(states, found, strict=True):
            place.copy_(row, non_blocking=True)
        return states

    def _taken(self, index: int) -> Future[Tensor]:
        if self._asked and self._asked[0][0] == index:
            return self._asked.popleft()[1]
        return self._ask(index)

    def _ask_ahead(self) -> None:
        for index in itertools.islice(self._order, self._ahead - len(self._asked)):
            self._asked.append((index, self._ask(index)))

    def _ask(self, index: int) -> Future[Tensor]:
        if index in self._kept:
            there: Future[Tensor] = Future()
            there.set_result(self._kept[index])
            return there
        return asyncio.run_coroutine_threadsafe(self._row(index), self._loop)

    async def _row(self, index: int) -> Tensor:
        """States `[S, D]` of a row; a fault of one document ends the requests of the others."""
        token_ids = self._packed.token_ids[index]
        spans = list(document_spans(self._packed.document_index[index]))
        states = torch.zeros(
            (len(token_ids), self._form.hidden_size),
            dtype=self._form.dtype,
            pin_memory=self._device.type == "cuda",  # else the copy would wait for the device
        )
        try:
            async with asyncio.TaskGroup() as group:
                for span in spans:
                    group.create_task(self._document(token_ids[span], states[span]))
        except BaseExceptionGroup as faults:
            raise faults.exceptions[0] from None
        return states

    async def _document(self, token_ids: np.ndarray, place: Tensor) -> None:
        async with self._places:
            await self._answered(token_ids, place)

    async def _answered(self, token_ids: np.ndarray, place: Tensor) -> None:
        times, begun_s = self.times, time.perf_counter()
        body = {"model": self._server.model, "prompt": token_ids.tolist()}
        body |= {"max_tokens": 1, "temperature": 0}
        try:
            reply = await self._connection.ask("POST", "/completions", body)
        except Refused as fault:
            raise ConfigError(
                f"{self._form.key} {self._server.url} must read documents of {len(token_ids)} "
                f"tokens, got {fault}; raise its longest context, or lower data.seq_len."
            ) from None
        replied_s = time.perf_counter()
        whole_s = await asyncio.to_thread(self._read, token_ids, reply, place)
        times.num_served += 1
        times.server_s += replied_s - begun_s
        times.writer_s += whole_s - replied_s
        times.reading_s += time.perf_counter() - whole_s

    def _read(self, token_ids: np.ndarray, reply: Json, place: Tensor) -> float:
        """Fill `place`, `[n, D]`; the `perf_counter` at which the file was whole."""
        path = _path_of(reply)
        if path is None:
            raise ConfigError(
                f"{self._form.key} {self._server.url} must say where it wrote the hidden states "
                f"(kv_transfer_params.hidden_states_path), got the fields {sorted(reply)}; start "
                "it as docs/data.md shows."
            )
        _wait_for_writer(path)
        whole_s = time.perf_counter()
        if not path.is_file():
            raise ConfigError(
                f"{self._form.key} {self._server.url} must write to a folder of this machine, it "
                f"named {path}, which is not here; set its shared_storage_path, and leave its "
                "use_synchronization_lock on."
            )
        found = read_token_ids(path, form=self._form)
        if not np.array_equal(found, token_ids):
            raise IntegrityError(
                f"{path}: expected the states of the {len(token_ids)} token ids that were sent, "
                f"got those of {len(found)} others; give each server a folder of its own."
            )
        place.copy_(read_last_states(path, length=len(token_ids)))
        for used in (path, _lock_of(path)):
            used.unlink(missing_ok=True)
        return whole_s


def _path_of(reply: Json) -> Path | None:
    said = reply.get("kv_transfer_params")
    path = said.get("hidden_states_path") if isinstance(said, dict) else None
    return Path(cast(str, path)) if path else None


def _lock_of(path: Path) -> Path:
    """What vLLM holds locked while it writes a file."""
    return path.with_name(f"{path.name}.lock")


def _wait_for_writer(path: Path) -> None:
    """The reply comes before the file is whole: sleep until its writer lets go of the lock."""
    if fcntl is None:
        return
    try:
        with _lock_of(path).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
    except FileNotFoundError:  # vLLM writes without one where it is told so, and then any time
        return
