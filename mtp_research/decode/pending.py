"""The one device-to-host copy of a step, started when the step is launched and waited for later."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from mtp_research.decode.step import StepResult


class PendingResult:
    """A step's result on its way to the host.

    The copy is queued behind the step at once: a captured step overwrites its result when it is
    replayed, and with deferred output that happens before the host looks.

    Args:
        result: tensors of the step, on any device.
    """

    def __init__(self, result: StepResult) -> None:
        is_cuda = result.sampled_token_ids.is_cuda
        self._result = cast(StepResult, _start_copy(result)) if is_cuda else result
        self._done = torch.cuda.Event() if is_cuda else None
        if self._done is not None:
            self._done.record()

    def wait(self) -> StepResult:
        """The result on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._result


def _start_copy(value: object) -> object:
    """Copy the tensors of nested named tuples into pinned host memory, without waiting."""
    if isinstance(value, Tensor):
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return host.copy_(value, non_blocking=True)
    if isinstance(value, tuple):
        make = cast(Callable[..., object], type(value))
        return make(*(_start_copy(part) for part in value))
    return value
