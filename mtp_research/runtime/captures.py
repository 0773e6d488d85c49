"""CUDA graphs: a call is captured once, and then replayed without Python and without launches.

    capture_call       what reads static tensors: steps of the decode loop
    CapturedPass       a call of any tensors of the same shapes, without gradients
    CapturedModule     the same with gradients for a module's parameters

A graph runs on fixed memory: what the last two are called with is copied to where the graph reads
it, and what it wrote holds until it runs again.
"""

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from mtp_research.runtime.errors import EnvironmentFault

# Run before a capture: kernels compile, libraries allocate their workspaces.
_NUM_WARM_UP_RUNS = 3
# Of what is timed: the shortest run counts, and the device is idle before its first replay alone.
_NUM_TIMED_RUNS = 5
_REPLAYS_A_RUN = 3


class Replayable(Protocol):
    """A captured call."""

    def replay(self) -> None:
        """Run it again on what its tensors hold now."""


Result = TypeVar("Result")


class Captured(NamedTuple, Generic[Result]):
    """A graph and the tensors its replay writes."""

    graph: Replayable
    result: Result


@contextlib.contextmanager
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


@functools.cache
def side_stream(device_index: int) -> torch.cuda.Stream:
    """The one stream of a GPU beside that of the steps: for warm-ups, captures and copies.

    Once a process had used some more, kernels of its graphs that may overlap followed each other
    after .9 instead of .25 us (a step of 281 launches 1.33 instead of 1.19 ms, one H200).
    """
    return torch.cuda.Stream(device_index)


def capture_call(call: Callable[[], Result], *, pool: Any) -> Captured[Result]:
    """Warm up and capture `call`, which must read static tensors and wait for nothing."""
    stream = side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_NUM_WARM_UP_RUNS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph, pool=pool, stream=stream):
        result = call()
    torch.cuda.synchronize()
    return Captured(graph, result)


def seconds_of(replays: Sequence[Callable[[], None]], *, device: torch.device) -> float:
    """Seconds of these replays among others: a launch is hidden behind the work before it."""
    seconds = []
    for _ in range(_NUM_TIMED_RUNS):
        started = time.perf_counter()
        for _ in range(_REPLAYS_A_RUN):
            for replay in replays:
                replay()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started) / _REPLAYS_A_RUN)
    return min(seconds)


class CapturedPass(Generic[Result]):
    """`call`, captured when it is first called; `key` is the setting that asks for it."""

    def __init__(self, call: Callable[..., Result], *, key: str) -> None:
        self._call = call
        self._key = key
        self._inputs: tuple[Tensor, ...] = ()
        self._captured: Captured[Result] | None = None

    def __call__(self, *inputs: Tensor) -> Result:
        """What `call` gives, until the next one."""
        if self._captured is None:
            self._inputs = _copies(inputs)
            call = functools.partial(self._call, *self._inputs)
            capture = functools.partial(capture_call, call, pool=None)
            self._captured = _captured(capture, key=self._key)
        for own, new in zip(self._inputs, inputs, strict=True):
            own.copy_(new)
        self._captured.graph.replay()
        return self._captured.result


class CapturedModule(Generic[Result]):
    """`call`, which runs `module`: two graphs, of it and of its backward pass.

    Gradients of parameters lie where the next backward pass writes: who adds up those of several
    takes copies.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Result], *, key: str) -> None:
        self._called = _Called(module, call)
        self._key = key
        self._graphed: Callable[..., Result] | None = None

    def __call__(self, *inputs: Tensor) -> Result:
        """What `call` gives, until the next one."""
        if self._graphed is None:
            capture = functools.partial(
                torch.cuda.make_graphed_callables,
                self._called,
                _copies(inputs),
                allow_unused_input=True,
            )
            self._graphed = cast(Callable[..., Result], _captured(capture, key=self._key))
        return self._graphed(*inputs)


class _Called(nn.Module):
    """A module run in another way; torch looks up its parameters here."""

    def __init__(self, module: nn.Module, call: Callable[..., object]) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, *inputs: Tensor) -> object:
        return self._call(*inputs)


def _copies(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Memory of the graph's own."""
    return tuple(part.clone() for part in inputs)


def _captured(capture: Callable[[], Result], *, key: str) -> Result:
    """Capture, and draw again what the runs before it have drawn."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with no_collection(), torch.random.fork_rng(devices):
            return capture()
    except RuntimeError as fault:
        reason = str(fault).splitlines()[0]
        raise EnvironmentFault(
            f"{key}=true: a part of this model cannot be captured ({reason}); set {key}=false."
        ) from fault
