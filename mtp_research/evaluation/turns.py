"""Evaluations of one machine take turns, so that the times of one are not those of its neighbours.

Compiling and capturing steps takes a core for minutes and leaves the GPU idle; decoding wants the
GPU alone. Evaluations that name the same file in `timing.turns` do the first side by side and the
second one after the other: who prepares holds a shared lock, who decodes an exclusive one.
"""

import fcntl
import os
from pathlib import Path

from mtp_research.errors import EnvironmentFault


class Turns:
    """The lock of one evaluation; the kernel lets go when the process ends, however it ends.

    Args:
        path: `timing.turns`, created if it is missing; None never waits.

    Raises:
        EnvironmentFault: the file cannot be created or written.
    """

    def __init__(self, path: str | None) -> None:
        self._descriptor: int | None = None
        if path is None:
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as fault:
            raise EnvironmentFault(
                f"timing.turns must be a file that can be written, got {path} ({fault.strerror}); "
                "set timing.turns=PATH."
            ) from fault

    def prepare(self) -> None:
        """Wait until nobody decodes; from then on nobody starts to."""
        self._lock(fcntl.LOCK_SH)

    def decode(self) -> None:
        """Wait until nobody else prepares or decodes; from then on nobody does.

        Two that prepare and want to decode do not wait for each other: the kernel gives up the
        shared lock before it waits for the exclusive one.
        """
        self._lock(fcntl.LOCK_EX)

    def close(self) -> None:
        """Let the others go on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, kind: int) -> None:
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, kind)
