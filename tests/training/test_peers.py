"""A rank that goes is told from one that leaves, without other processes: both ends in one."""

import socket
import threading
from types import SimpleNamespace

import pytest

from mtp_research.runtime.errors import EnvironmentFault
from mtp_research.training.parallel import peers

NUM_RANKS = 3


class Exits(list):
    """Stands in for `os._exit`, which ends a thread's process."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def __call__(self, code: int) -> None:
        self.append(code)
        self.came.set()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Exits:
    found = Exits()
    monkeypatch.setattr(peers.os, "_exit", found)
    monkeypatch.setattr(peers, "_GRACE_S", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return found


def meet(monkeypatch: pytest.MonkeyPatch) -> list[peers._Peers]:
    """Connections of all ranks; rank 0 has taken in every one."""
    told: list[object] = []

    def broadcast(values: list) -> list:
        told.extend([] if told else values)
        return told

    monkeypatch.setattr(peers, "broadcast_object_list", broadcast)
    places = [SimpleNamespace(num_processes=NUM_RANKS, process_index=n) for n in range(NUM_RANKS)]
    ranks = [peers._Peers(place) for place in places]
    with socket.create_connection(("127.0.0.1", told[0])) as stranger:
        stranger.settimeout(5)
        stranger.sendall(b"x" * (peers._TOKEN_BYTES + peers._WORD_BYTES))
        assert stranger.recv(1) == b"", "who does not know the token is not taken for a rank"
    assert len(ranks[0]._connections) == NUM_RANKS
    return ranks


def test_rank_that_waits_for_a_lost_one_is_ended_with_one_line(
    exits: Exits, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = meet(monkeypatch)
    ranks[1].has_left.set()  # its own thread is gone with it
    (connection,) = ranks[1]._connections
    connection.shutdown(socket.SHUT_RDWR)  # as the kernel does
    assert ranks[0].is_lost.wait(5)
    assert ranks[2].is_lost.wait(5)
    assert exits.came.wait(5)
    for rank in ranks[0::2]:
        assert f"got rank 1 gone, as rank {rank._rank} noticed" in rank.line
    for thread in threading.enumerate():
        if thread.name == "peers":
            thread.join(5)
    assert exits == [EnvironmentFault.exit_code] * 2
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"error: {rank.line}" for rank in ranks[0::2])


def test_rank_that_takes_its_leave_ends_no_other(
    exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = meet(monkeypatch)
    for rank in (ranks[1], ranks[0], ranks[2]):
        rank.say(peers._FAREWELL)
        rank.has_left.set()
    for thread in threading.enumerate():
        if thread.name == "peers":
            thread.join(5)
            assert not thread.is_alive()
    assert not any(rank.is_lost.is_set() for rank in ranks)
    assert exits == []


@pytest.mark.parametrize("is_lost", [True, False])
def test_failed_collective_is_a_lost_rank_only_where_one_is_lost(
    is_lost: bool, exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = SimpleNamespace(line="rank 1 gone", is_lost=threading.Event(), say=lambda word: None)
    rank.has_left = threading.Event()
    monkeypatch.setattr(peers, "_Peers", lambda ranks: rank)
    monkeypatch.setattr(peers, "_NOTICE_S", 0.01)
    monkeypatch.setattr(peers.faulthandler, "dump_traceback_later", lambda *_, **how: how["file"])
    if is_lost:
        rank.is_lost.set()
    fault = pytest.raises(EnvironmentFault if is_lost else RuntimeError, match=r"rank 1|gloo")
    place = SimpleNamespace(num_processes=2, process_index=0)
    with fault, peers.watched_peers(place):
        raise RuntimeError("gloo: connection closed by peer")
    assert rank.has_left.is_set()
