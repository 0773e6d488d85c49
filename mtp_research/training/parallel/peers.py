"""Ends every rank of a training soon after one of them has gone, whatever launched them.

A killed process takes no leave. The others would wait for it in their next collective call: on
GPUs for NCCL's own limit of ten minutes, and a launcher looks after the processes of its own
machine alone. So each rank keeps a connection to rank 0, which the kernel closes with the process:

    rank 1 --+
    rank 2 --+--> rank 0, which listens on a port of the address where the ranks met
    rank 3 --+

A rank that leaves as it should says so first; one that does not is found by its closed connection,
and rank 0 tells the others which it was.
"""

import faulthandler
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import cast

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from mtp_research.runtime.errors import EnvironmentFault, Interrupted, NumericFault
from mtp_research.runtime.provenance import write_error

logger = logging.getLogger(__name__)
_GRACE_S = 10.0  # for a rank that has a fault of its own to tell, or waits where nothing ends it
_NOTICE_S = 3.0  # between a collective call that fails and the connection that closes
_TOKEN_BYTES = 16
_WORD_BYTES = 4  # of what ranks say: the number of one that is lost, or
_FAREWELL = b"\xff" * _WORD_BYTES


@contextmanager
def watched_peers(ranks: Accelerator) -> Iterator[None]:
    """End the block, or the process where nothing else can, when another rank has gone.

    All ranks call. A rank that is lost is an `EnvironmentFault`; a fault of this rank's own stays.
    """
    if ranks.num_processes == 1:
        yield
        return
    peers = _Peers(ranks)
    try:
        yield
        peers.say(_FAREWELL)
    except (Interrupted, NumericFault):  # of all ranks
        peers.say(_FAREWELL)
        raise
    except EnvironmentFault:
        raise
    except RuntimeError as fault:  # what collective calls raise
        if not peers.is_lost.wait(_NOTICE_S):
            raise
        # Taking down what ranks shared may wait for the lost one as well.
        unseen = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(_GRACE_S, exit=True, file=unseen)
        raise EnvironmentFault(peers.line) from fault
    finally:
        peers.has_left.set()


class _Peers:
    """The connections of this rank, and a thread that waits for one to close."""

    def __init__(self, ranks: Accelerator) -> None:
        self.line = ""  # for people, once a rank is lost
        self.is_lost, self.has_left = threading.Event(), threading.Event()
        self._rank = ranks.process_index
        self._waiting = selectors.DefaultSelector()
        self._connections: list[socket.socket] = []
        if self._rank == 0:
            self._listener = socket.create_server(("", 0), backlog=ranks.num_processes)
            self._connections.append(self._listener)
            meeting = [self._listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES)]
            port, self._token = cast(list, broadcast_object_list(meeting))
            self._waiting.register(self._listener, selectors.EVENT_READ, None)
        else:
            port, self._token = cast(list, broadcast_object_list([None, None]))
            self._call(port)
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def say(self, word: bytes) -> None:
        """Send a word on every connection that is still open."""
        for connection in self._connections:
            with suppress(OSError):
                connection.sendall(word)

    def _call(self, port: int) -> None:
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        try:
            connection = socket.create_connection((address, port), timeout=_GRACE_S)
        except OSError as fault:
            logger.warning(
                "rank %d cannot reach %s:%d (%s): a rank that goes is noticed late",
                *(self._rank, address, port, fault),
            )
            return
        connection.sendall(self._token + _word(self._rank))
        self._add(connection, rank=0)

    def _add(self, connection: socket.socket, *, rank: int) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":  # a host that loses its power closes nothing
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 6)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._connections.append(connection)
        self._waiting.register(connection, selectors.EVENT_READ, rank)

    def _watch(self) -> None:
        while not (self.has_left.is_set() or self.is_lost.is_set()):
            for key, _ in self._waiting.select(timeout=1.0):
                connection = cast(socket.socket, key.fileobj)
                if key.data is None:
                    self._answer()
                    continue
                self._waiting.unregister(connection)
                if (lost := _lost_rank(connection, other=key.data)) is not None:
                    self._lose(lost)
                    break
        self._waiting.close()
        for connection in self._connections:
            connection.close()

    def _answer(self) -> None:
        """Take in a rank that calls; others who know the port do not know the token."""
        connection, _ = self._listener.accept()
        connection.settimeout(_GRACE_S)
        try:
            said = connection.recv(_TOKEN_BYTES + _WORD_BYTES, socket.MSG_WAITALL)
        except OSError:
            said = b""
        if said[:_TOKEN_BYTES] == self._token:
            self._add(connection, rank=int.from_bytes(said[_TOKEN_BYTES:]))
        else:
            connection.close()

    def _lose(self, rank: int) -> None:
        self.line = (
            f"every rank must run to the end, got rank {rank} gone, as rank {self._rank} noticed; "
            "see what it printed last, and run the same command again, which goes on from the last "
            "checkpoint."
        )
        self.is_lost.set()
        if self._rank == 0:
            self.say(_word(rank))
        if self.has_left.wait(_GRACE_S):
            return
        write_error(self.line)
        os._exit(EnvironmentFault.exit_code)


def _word(rank: int) -> bytes:
    return rank.to_bytes(_WORD_BYTES)


def _lost_rank(connection: socket.socket, *, other: int) -> int | None:
    """Which rank is lost by what `other` said or did not say; None for a farewell."""
    try:
        said = connection.recv(_WORD_BYTES, socket.MSG_WAITALL)
    except OSError:
        said = b""
    if said == _FAREWELL:
        return None
    return int.from_bytes(said) if len(said) == _WORD_BYTES else other
