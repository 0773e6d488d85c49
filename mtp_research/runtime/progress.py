"""How a command says how far it is: the one owner of the progress line.

On a terminal a live line by rich, with the time left. Elsewhere a plain line each 30 seconds, so
that a log shows that the work goes on. Both go to stderr: stdout belongs to the result. No thread
draws beside the work, which would take time from a decode loop that is being timed: the line is
drawn by whoever calls `done`, four times a second at most. rich is imported on a terminal only.
"""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 30.0  # between plain lines where there is no terminal
_DRAW_EVERY_S = 0.25


class WorkProgress:
    """Progress of one piece of work; use as a context manager.

    Example: `with WorkProgress("decoding", total=153, unit="prompts") as progress:`, then
    `progress.done(count)` with what is done so far.
    """

    def __init__(
        self,
        name: str,
        *,
        total: int,
        unit: str,
        first: int = 0,
        is_shown: bool = True,
        is_live: bool = True,
    ) -> None:
        """Begin at `first` of `total` units.

        Args:
            name: what is being done.
            total: units of the whole work; more than `first`, or nothing is shown.
            unit: what is counted, in the plural.
            first: units that an earlier process did; they do not count for the time left.
            is_shown: False for a rank that shows nothing.
            is_live: False for work whose parts have a live line of their own.
        """
        self._name, self._unit, self._total, self._first = name, unit, total, first
        self._is_shown, self._is_live = is_shown and total > first, is_live
        self._count = first
        self._began = self._last = time.monotonic()
        self._live: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> "WorkProgress":
        self._began = self._last = time.monotonic()
        if self._is_shown and self._is_live and sys.stderr.isatty():
            self._live = _live_line(self._name, self._unit, self._total, self._first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live[0].stop()
            self._live = None

    def done(self, count: int, *, note: str = "") -> None:
        """`count` units are done, the earlier ones included; `note` stands at the end."""
        self._count = count
        now = time.monotonic()
        if self._live is not None and now - self._last >= _DRAW_EVERY_S:
            progress, task = self._live
            progress.update(task, completed=count, note=note, refresh=True)
            self._last = now
        elif self._live is None and self._is_shown and now - self._last >= LINE_EVERY_S:
            sys.stderr.write(f"{self._line(now)}{f'  {note}' if note else ''}\n")
            sys.stderr.flush()
            self._last = now

    def advance(self, count: int = 1, *, note: str = "") -> None:
        """`count` more units are done."""
        self.done(self._count + count, note=note)

    def _line(self, now: float) -> str:
        """`decoding: 40/153 prompts, 1:30 left`."""
        text = f"{self._name}: {self._count}/{self._total} {self._unit}"
        num_new = self._count - self._first
        if num_new <= 0:
            return text
        left_s = (now - self._began) / num_new * (self._total - self._count)
        return f"{text}, {clock(left_s)} left"


def clock(seconds: float) -> str:
    """`1:05`, or `2:00:00` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def live_bar(console: "Console", *, is_shown: bool = True, auto_refresh: bool = True) -> "Progress":
    """A bar by rich with count and time left, drawn on a terminal only.

    A task has the fields `unit`, behind the count, and `note`, at the end. With `auto_refresh` a
    thread draws; else who updates it.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        auto_refresh=auto_refresh,
        transient=not auto_refresh,
        disable=not is_shown or not console.is_terminal,
    )


def _live_line(name: str, unit: str, total: int, first: int) -> "tuple[Progress, TaskID] | None":
    try:
        from rich.console import Console
    except ModuleNotFoundError:  # decoding alone does not need it
        return None
    progress = live_bar(Console(stderr=True), auto_refresh=False)
    progress.start()
    task = progress.add_task(name, total=total, completed=first, unit=unit, note="")
    return progress, task
