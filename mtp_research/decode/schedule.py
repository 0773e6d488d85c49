"""What one step runs: the scheduler's answer, read by whoever builds and commits the step."""

from typing import NamedTuple

from mtp_research.decode.request import Request


class Scheduled(NamedTuple):
    """One entry of a schedule.

    Attributes:
        request: whose rows.
        num_scheduled_tokens: rows, at least 1.
        first_position: position of the first row; for rows that are not prompt rows, as far as the
            host knows (the device knows the exact one).
        is_prefill: the rows are prompt rows, or recomputed after a preemption.
        samples: the rows reach the end of the accepted text, so a token is sampled.
        resumes: the rows end a recompute: drafts follow, but the next token is known.
    """

    request: Request
    num_scheduled_tokens: int
    first_position: int
    is_prefill: bool
    samples: bool
    resumes: bool

    @property
    def end_position(self) -> int:
        """Position behind the last row, as far as the host knows."""
        return self.first_position + self.num_scheduled_tokens


class Schedule(NamedTuple):
    """One step's work.

    Attributes:
        entries: rows to run.
        admitted: requests with a fresh slot, whose text must be written before the step.
        preempted: requests whose pages and slot were taken away.
        num_prompt_rows: rows of the entries that are prompt rows.
    """

    entries: list[Scheduled]
    admitted: list[Request]
    preempted: list[Request]
    num_prompt_rows: int
