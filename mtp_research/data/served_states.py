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
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
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


class ServedStates:
    """States of packed rows, before the final norm.

    Args:
        packed: the rows.
        server: of the target.
        form: what its states are like.
        ahead: rows that are asked for before they are needed.
        keeps: rows stay in memory, where they are read again and again.
    """

    def __init__(
        self,
        packed: PackedRows,
        *,
        server: Server,
        form: StatesForm,
        ahead: int,
        keeps: bool,
    ) -> None:
        self._packed, self._server, self._form = packed, server, form
        self._ahead, self._keeps = ahead, keeps
        self._kept: dict[int, Tensor] = {}
        self._order: Iterator[int] = iter(())
        self._asked: deque[tuple[int, Future[Tensor]]] = deque()  # in the order of their use
        self._loop = asyncio.new_event_loop()
        self._connection, self._places = server.connection(), asyncio.Semaphore(MOST_AT_ONCE)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def follow(self, order: Iterable[int]) -> None:
        """Ask ahead for these rows, which `rows` is going to be called for, one after the other."""
        self._order = iter(order)
        self._ask_ahead()

    def rows(self, indices: Sequence[int]) -> Tensor:
        """States `[len(indices), S, D]` on the CPU, zero where a row is empty.

        Raises:
            ConfigError: the server refuses a document, or its files cannot be seen from here.
            EnvironmentFault: it does not answer.
            IntegrityError: a file is damaged, or of other tokens.
        """
        futures = [self._taken(index) for index in indices]
        self._ask_ahead()
        found = [future.result() for future in futures]
        if self._keeps:
            self._kept.update(zip(indices, found, strict=True))
        return torch.stack(found)

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
        states = torch.zeros(len(token_ids), self._form.hidden_size, dtype=self._form.dtype)
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._document(token_ids[span])) for span in spans]
        except BaseExceptionGroup as faults:
            raise faults.exceptions[0] from None
        for span, task in zip(spans, asked, strict=True):
            states[span] = task.result()
        return states

    async def _document(self, token_ids: np.ndarray) -> Tensor:
        async with self._places:
            return await self._answered(token_ids)

    async def _answered(self, token_ids: np.ndarray) -> Tensor:
        body = {"model": self._server.model, "prompt": token_ids.tolist()}
        body |= {"max_tokens": 1, "temperature": 0}
        try:
            reply = await self._connection.ask("POST", "/completions", body)
        except Refused as fault:
            raise ConfigError(
                f"{self._form.key} {self._server.url} must read documents of {len(token_ids)} "
                f"tokens, got {fault}; raise its longest context, or lower data.seq_len."
            ) from None
        return await asyncio.to_thread(self._read, _path_of(reply), token_ids, reply)

    def _read(self, path: Path | None, token_ids: np.ndarray, reply: Json) -> Tensor:
        if path is None:
            raise ConfigError(
                f"{self._form.key} {self._server.url} must say where it wrote the hidden states "
                f"(kv_transfer_params.hidden_states_path), got the fields {sorted(reply)}; start "
                "it as docs/data.md shows."
            )
        _wait_for_writer(path)
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
        states = read_last_states(path, length=len(token_ids))
        for used in (path, _lock_of(path)):
            used.unlink(missing_ok=True)
        return states


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
