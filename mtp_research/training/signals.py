"""SIGTERM and SIGINT as a request: the current step ends, state is saved, then the run stops."""

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Catches the signals inside a `with` block; a second one acts at once, as without us.

    Attributes:
        name: name of the signal that came, None so far.
    """

    def __init__(self) -> None:
        """No request yet."""
        self.name: str | None = None
        self._previous: dict[int, signal.Handlers] = {}

    def __enter__(self) -> "StopRequest":
        """Install the handlers."""
        self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the previous handlers back."""
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
