"""Processes of one machine take turns, so that the times of one are not those of its neighbours.

Compiling and capturing steps takes a core for minutes and leaves the GPU idle; decoding wants the
GPU alone. Evaluations that name the same file in `timing.turns` do the first side by side and the
second one after the other: who prepares holds a shared lock, who decodes an exclusive one. A second
file, `FILE.gate`, keeps the order: who waits for an exclusive lock lets nobody new prepare.
"""

import fcntl
import os
import sys
from pathlib import Path

from mtp_research.runtime.errors import EnvironmentFault


class Turns:
    """The locks of one process, given up when it and what it forked have ended.

    Args:
        path: created if it is missing, on a disk of this machine; None never waits.
        name: of the setting, for messages.

    Raises:
        EnvironmentFault: the files cannot be created, written or locked; also from the methods.
    """

    def __init__(self, path: str | None, *, name: str = "timing.turns") -> None:
        self._path, self._name = path, name
        self._held: int | None = None
        self._lock = self._gate = -1
        if path is None:
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._lock, self._gate = (
                os.open(file, os.O_CREAT | os.O_RDWR, 0o666) for file in (path, f"{path}.gate")
            )
        except OSError as fault:
            raise self._fault(fault) from fault

    def prepare(self) -> None:
        """Wait until nobody decodes or waits to; from then on nobody starts to."""
        self._take(fcntl.LOCK_SH)

    def decode(self) -> None:
        """Wait until nobody else prepares or decodes; from then on nobody does."""
        self._take(fcntl.LOCK_EX)

    def close(self) -> None:
        """Let the others go on."""
        if self._path is not None and self._lock >= 0:
            os.close(self._lock)
            os.close(self._gate)
            self._lock = -1

    def _take(self, kind: int) -> None:
        if self._path is None or self._held == kind:
            return
        try:
            # What is held is given up first: two that prepare must not wait for each other.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._wait(self._gate, fcntl.LOCK_EX)
            self._wait(self._lock, kind)
            fcntl.flock(self._gate, fcntl.LOCK_UN)
        except OSError as fault:
            raise self._fault(fault) from fault
        self._held = kind

    def _wait(self, descriptor: int, kind: int) -> None:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write(f"note: waiting for a turn, {self._name}={self._path}\n")
            fcntl.flock(descriptor, kind)

    def _fault(self, fault: OSError) -> EnvironmentFault:
        return EnvironmentFault(
            f"{self._name} must be a file on a disk of this machine that can be written, got "
            f"{self._path} ({fault.strerror}); set {self._name}=PATH."
        )
