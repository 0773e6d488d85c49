"""Captures without a GPU: which streams they use."""

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from mtp_research.runtime import captures


class _Stream:
    """Stands in for a CUDA stream; says which one is current."""

    made: ClassVar[list["_Stream"]] = []
    current: ClassVar["_Stream | None"] = None

    def __init__(self, *_: object) -> None:
        self.made.append(self)

    def wait_stream(self, _: object) -> None: ...

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        before, _Stream.current = _Stream.current, self
        yield
        _Stream.current = before


def test_all_captures_of_a_gpu_use_one_stream_beside_that_of_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = _Stream()
    monkeypatch.setattr(_Stream, "made", [])
    monkeypatch.setattr(_Stream, "current", main)
    captures.side_stream.cache_clear()
    for name, value in {
        "Stream": _Stream,
        "stream": _Stream.entered,
        "graph": lambda graph, pool, stream: stream.entered(),
        "CUDAGraph": object,
        "current_stream": lambda: main,
        "current_device": lambda: 0,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    used: list[_Stream | None] = []
    for _ in range(3):
        captures.capture_call(lambda: used.append(_Stream.current), pool=None)
    (side,) = _Stream.made
    assert used == [side] * (3 * (captures._NUM_WARM_UP_RUNS + 1))
    captures.side_stream.cache_clear()
