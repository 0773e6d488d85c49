"""The progress line: on a terminal and in a log, on a clock of its own."""

import io
import subprocess
import sys
import threading

import pytest

from mtp_research.runtime import progress
from mtp_research.runtime.progress import WorkProgress, clock
from mtp_research.runtime.provenance import REPOSITORY_ROOT


class Screen(io.StringIO):
    """Standard error, on a terminal or not."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds on the clock, to be set."""
    seconds = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds[0])
    return seconds


def write_to(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> Screen:
    """Standard error from here on; pytest puts its own in place after the fixtures."""
    screen = Screen(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_log_gets_a_line_each_thirty_seconds_with_the_time_left(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_to(monkeypatch, is_terminal=False)
    with WorkProgress("decoding", total=153, unit="prompts") as work:
        for seconds, count in [(10, 5), (31, 51), (50, 70), (62, 102)]:
            now[0] = 100.0 + seconds
            work.done(count, note="eagle")
    assert log.getvalue().splitlines() == [
        "decoding: 51/153 prompts, 1:02 left  eagle",
        "decoding: 102/153 prompts, 0:31 left  eagle",
    ]


def test_what_an_earlier_process_did_counts_for_no_time(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_to(monkeypatch, is_terminal=False)
    with WorkProgress("decoding", total=100, unit="prompts", first=80) as work:
        now[0] += 40
        work.advance(10)
    assert log.getvalue() == "decoding: 90/100 prompts, 0:40 left\n"


@pytest.mark.parametrize(
    ("first", "is_shown"), [(3, True), (0, False)], ids=["nothing to do", "another rank"]
)
def test_nothing_is_shown(
    now: list[float], monkeypatch: pytest.MonkeyPatch, first: int, is_shown: bool
) -> None:
    log = write_to(monkeypatch, is_terminal=False)
    with WorkProgress("x", total=3, unit="y", first=first, is_shown=is_shown) as work:
        now[0] += 100
        work.advance()
    assert log.getvalue() == ""


def test_terminal_gets_a_live_line_that_no_thread_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    screen = write_to(monkeypatch, is_terminal=True)
    monkeypatch.setattr(progress, "_DRAW_EVERY_S", 0.0)
    before = threading.active_count()
    with WorkProgress("decoding", total=20, unit="prompts") as work:
        work.done(7, note="[bold]eagle")
        assert threading.active_count() == before
        shown = screen.getvalue()
        drawn = len(shown)
        monkeypatch.setattr(progress, "_DRAW_EVERY_S", 1e9)
        work.done(8, note="not yet")
        assert len(screen.getvalue()) == drawn
    assert "7/20" in shown
    assert "prompts" in shown
    assert "[bold]eagle" in shown
    assert "not yet" not in screen.getvalue()


def test_parts_with_a_live_line_of_their_own_leave_plain_lines(
    monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    screen = write_to(monkeypatch, is_terminal=True)
    with WorkProgress("matrix", total=2, unit="cells", is_live=False) as work:
        now[0] += 60
        work.advance()
    assert screen.getvalue() == "matrix: 1/2 cells, 1:00 left\n"


def test_clock_reads_like_one() -> None:
    assert [clock(one) for one in (0.4, 65, 3599.6, 7325)] == ["0:00", "1:05", "1:00:00", "2:02:05"]


def test_no_drawing_library_is_imported_where_there_is_no_terminal() -> None:
    probe = (
        "import sys\n"
        "for name in ('rich', 'torch'): sys.modules[name] = None\n"
        "from mtp_research.runtime.progress import WorkProgress\n"
        "with WorkProgress('a', total=2, unit='b') as work: work.advance()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=REPOSITORY_ROOT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1000:]
