"""What captured steps of every kind share: the capture itself, and static sampling parameters.

Letters: R requests.
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mtp_research.decode.sampling_tensors import SamplingTensors
from mtp_research.decode.step import StepResult

# Run before a capture: kernels compile, libraries allocate their workspaces.
_NUM_WARM_UP_RUNS = 3


class Replayable(Protocol):
    """A captured call."""

    def replay(self) -> None:
        """Run it again on what its tensors hold now."""


class Captured(NamedTuple):
    """A graph and the tensors its replay writes."""

    graph: Replayable
    result: StepResult


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's cycle collector stays away: to destroy an older graph ends a capture with an error.

    Decoders lie in reference cycles, so that theirs are destroyed whenever the collector runs.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def capture_call(call: Callable[[], StepResult], *, pool: Any) -> Captured:
    """Warm up and capture `call`, which must read static tensors and wait for nothing.

    Args:
        call: run four times.
        pool: handle of the memory pool that graphs share, for whose type torch has no public name.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_NUM_WARM_UP_RUNS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph, pool=pool):
        result = call()
    torch.cuda.synchronize()
    return Captured(graph, result)


class StaticParams:
    """Sampling parameters of a captured step, at fixed addresses.

    Args:
        num_requests: most requests of a step; those behind a batch keep a harmless value.
        device: where they live.
    """

    def __init__(self, num_requests: int, *, device: torch.device) -> None:
        self._num_requests, self._device = num_requests, device
        self._storage: dict[str, Tensor] = {}
        self._uploaded: SamplingTensors | None = None

    def upload(self, params: SamplingTensors) -> None:
        """Put the parameters of a batch in place; nothing if they are there already."""
        if params is self._uploaded:
            return
        for name, value in params._asdict().items():
            if isinstance(value, Tensor):
                if name not in self._storage:
                    self._storage[name] = torch.ones(
                        self._num_requests, dtype=value.dtype, device=self._device
                    )
                self._storage[name][: len(value)] = value
        self._uploaded = params

    def view(self, params: SamplingTensors, num_requests: int) -> SamplingTensors:
        """Flags of `params` over the storage of the first requests."""
        storage = {name: value[:num_requests] for name, value in self._storage.items()}
        return params._replace(**storage)

    @staticmethod
    def key(params: SamplingTensors) -> tuple[Hashable, ...]:
        """What code depends on, and a graph with it."""
        return tuple(value for value in params if isinstance(value, bool | int | None))
