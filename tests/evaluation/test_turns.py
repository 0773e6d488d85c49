"""Evaluations that share a machine: preparing is shared, decoding is not."""

import multiprocessing
import threading
import time
from contextlib import closing
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest

from mtp_research.evaluation.turns import Turns
from mtp_research.runtime.errors import EnvironmentFault

PREPARE_S, DECODE_S = 0.15, 0.1
Span = tuple[float, float]


def evaluate(path: str, spans: "SimpleQueue[tuple[str, float, float]]") -> None:
    """Prepare and decode twice, as an evaluation of two groups does."""
    with closing(Turns(path)) as turns:
        for _ in range(2):
            turns.prepare()
            spans.put(("prepare", time.monotonic(), _end_of_sleep(PREPARE_S)))
            turns.decode()
            spans.put(("decode", time.monotonic(), _end_of_sleep(DECODE_S)))


def _end_of_sleep(seconds: float) -> float:
    time.sleep(seconds)
    return time.monotonic()


def overlap(left: Span, right: Span) -> bool:
    return left[0] < right[1] and right[0] < left[1]


def test_decoding_overlaps_nothing_and_preparing_overlaps_preparing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    spans: SimpleQueue[tuple[str, float, float]] = context.SimpleQueue()
    path = str(tmp_path / "new" / "turns")
    workers = [context.Process(target=evaluate, args=(path, spans)) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = [spans.get() for _ in range(12)]
    for worker in workers:
        worker.join(timeout=20)
        assert worker.exitcode == 0
    pairs = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :]]
    for left, right in pairs:
        if "decode" in (left[0], right[0]):
            assert not overlap(left[1:], right[1:]), (left, right)
    assert any(overlap(a[1:], b[1:]) for a, b in pairs if a[0] == b[0] == "prepare")


def test_who_waits_to_decode_goes_before_who_comes_to_prepare(tmp_path: Path) -> None:
    path, order = str(tmp_path / "turns"), []

    def take(turns: Turns, kind: str) -> None:
        getattr(turns, kind)()
        order.append(kind)
        turns.close()

    first, second, third = (Turns(path) for _ in range(3))
    first.prepare()
    first.prepare()  # holds it already, and does not wait for itself
    waits = threading.Thread(target=take, args=(second, "decode"), daemon=True)
    waits.start()
    time.sleep(PREPARE_S)
    comes = threading.Thread(target=take, args=(third, "prepare"), daemon=True)
    comes.start()
    time.sleep(PREPARE_S)
    assert order == []  # the third could share the lock with the first, and does not overtake
    first.close()
    for thread in (waits, comes):
        thread.join(timeout=20)
    assert order == ["decode", "prepare"]


def test_a_file_that_cannot_be_written_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"timing\.turns must be a file .* directory"):
        Turns(str(tmp_path))


def test_without_a_file_nothing_waits() -> None:
    turns = Turns(None)
    turns.prepare()
    turns.decode()
    turns.close()
