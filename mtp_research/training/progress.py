"""What a person sees of a training run: a live line on a terminal, plain lines elsewhere, a table.

Everything goes to stderr; stdout belongs to the result line of the entry.
"""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mtp_research.training.replay import WalkReport

LINE_EVERY = 50  # steps between plain lines where there is no terminal


class ProgressView:
    """Progress of one run; use as a context manager.

    Args:
        num_steps: optimizer steps of the run.
        first_step: steps done before, when resumed.
        is_shown: False on all ranks but one.
    """

    def __init__(self, *, num_steps: int, first_step: int, is_shown: bool) -> None:
        """Nothing is shown before the context is entered."""
        self._console = Console(stderr=True, quiet=not is_shown)
        self._num_steps = num_steps
        self._progress = Progress(
            TextColumn("training heads"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not is_shown or not self._console.is_terminal,
        )
        self._task = self._progress.add_task(
            "", total=num_steps, completed=first_step, figures="measuring held-out text"
        )
        self._walk = ""

    def __enter__(self) -> "ProgressView":
        """Start the live line."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the live line."""
        self._progress.stop()

    def note(self, text: str) -> None:
        """One line of information."""
        self._console.print(text, highlight=False)

    def step(self, step: int, *, loss: float, accuracy: list[float]) -> None:
        """Figures of a finished step; `accuracy` per depth, on training tokens."""
        figures = f"loss {loss:.3f}  accuracy {_percent(accuracy)}{self._walk}"
        self._progress.update(self._task, completed=step, figures=figures)
        is_due = step % LINE_EVERY == 0 or step == self._num_steps
        if self._progress.disable and is_due:
            self.note(f"step {step}/{self._num_steps}  {figures}")

    def walk(self, step: int, report: WalkReport) -> None:
        """A new held-out report."""
        length = f"{report.acceptance_length:.3f} +- {report.standard_error:.3f}"
        self._walk = f"  walk {report.acceptance_length:.3f}"
        self._progress.update(self._task, figures=self._walk.strip())
        self.note(
            f"step {step}/{self._num_steps}  held-out acceptance length {length}  "
            f"accuracy {_percent(list(report.accuracy_per_depth))}"
        )

    def table(self, before: WalkReport, after: WalkReport) -> None:
        """Held-out figures before and after training, overall and per domain."""
        self._console.print(result_table(before, after))


def result_table(before: WalkReport, after: WalkReport) -> Table:
    """Acceptance length of the replay walk before and after training; marginal accuracies below."""
    table = Table(title=f"held-out acceptance length ({after.num_documents} documents)")
    table.add_column("text")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    table.add_row(
        "all",
        f"{before.acceptance_length:.3f}",
        f"{after.acceptance_length:.3f} +- {after.standard_error:.3f}",
    )
    for domain, length in after.length_by_domain.items():
        first = before.length_by_domain.get(domain, float("nan"))
        table.add_row(f"  {domain}", f"{first:.3f}", f"{length:.3f}")
    table.add_section()
    pairs = zip(before.accuracy_per_depth, after.accuracy_per_depth, strict=True)
    for depth, (first, last) in enumerate(pairs, start=1):
        table.add_row(f"accuracy at depth {depth}", f"{first:.1%}", f"{last:.1%}")
    return table


def _percent(values: list[float]) -> str:
    return "/".join(f"{value:.0%}" for value in values)
