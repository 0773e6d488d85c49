"""What an evaluation leaves behind: prompts by hash, passes with their clocks, and generations.

Between the second and the third stage of the flow: prompts -> decode loop -> statistics -> report.
A *condition* is one way of decoding the prompt set; the one with K = 0 is the baseline. A *pass* is
one decoding of the whole set by one condition. `json_form` writes and reads all of it.
Letter: K drafts per step.
"""

from dataclasses import dataclass

from mtp_research.decode.stats import RequestRecord


@dataclass(frozen=True)
class PromptEntry:
    """A prompt as a report names it: by hash, without its text."""

    question_id: str
    category: str
    format: str
    sha256: str


@dataclass(frozen=True)
class StepParts:
    """Seconds of the steps without prompt rows.

    Attributes:
        num_steps: how many there were.
        target_s: target forward and logits.
        verify_s: logit processors, verification, new frontier.
        draft_s: all draft passes.
        host_s: the rest of the steps' wall time.
    """

    num_steps: int
    target_s: float
    verify_s: float
    draft_s: float
    host_s: float


@dataclass(frozen=True)
class PassRecord:
    """Times and counts of one pass, without the writing of the journal.

    A pass that was interrupted and resumed has neither times nor steps: they would be of two
    processes.

    Attributes:
        wall_s: seconds for the whole set, prefill included, warm-up excluded.
        decode_wall_s: of it, calls of the loop that neither started nor committed a step with
            prompt rows.
        num_decode_tokens: tokens emitted in those calls.
        full_wall_s: of them, calls whose steps, the started and the committed one, took every place
            of the batch; None without such a call, too.
        num_full_tokens: tokens emitted in those; None likewise.
        num_steps: steps of the loop.
        rows_per_step: mean packed rows of a target step.
        device_s: seconds from begin to end on the GPU's clock; None on a CPU.
        peak_memory_bytes: of the device; None on a CPU and with several passes, which hold the
            pools of all conditions of a group.
        num_warm_ups: uncounted decodings before it.
        capture_s: seconds of compiling and capturing steps before it; None without captured ones.
        parts: where the time of the steps without prompt rows went; None where it was not measured.
            A results file has the sum over the passes alone, which is read back into the first.
        is_resumed: it was interrupted, and finished by a later process.
        num_texts_equal: of a later pass, prompts with the first pass's token ids.
    """

    wall_s: float | None
    decode_wall_s: float | None = None
    num_decode_tokens: int | None = None
    full_wall_s: float | None = None
    num_full_tokens: int | None = None
    num_steps: int | None = None
    rows_per_step: float | None = None
    device_s: float | None = None
    peak_memory_bytes: int | None = None
    num_warm_ups: int = 0
    capture_s: float | None = None
    parts: StepParts | None = None
    is_resumed: bool = False
    num_texts_equal: int | None = None


@dataclass(frozen=True)
class ConditionResult:
    """One condition, as the loop left it.

    Attributes:
        label: unique column title, such as `eagle`.
        policy: hidden-state policy; None for the baseline.
        num_speculative_tokens: K; 0 makes this the baseline.
        records: one per prompt, of the first pass.
        passes: at least one, in their order.
        lossless: verdict on the outputs, such as `identical 153/153` (tables show 24 characters).
        audit: of the first pass, slots by finding (WRONG, MIXED, HOLE, PROVISIONAL) and `slots`,
            the number looked at; None if the auditor was off.
        head: name of the heads, `oracle`, or None.
        max_num_requests: batch size; None if unknown, like the next three.
        temperature: of the target's sampling.
        verify: verification rule.
        draft_sampling: how drafts were chosen.
    """

    label: str
    policy: str | None
    num_speculative_tokens: int
    records: tuple[RequestRecord, ...]
    passes: tuple[PassRecord, ...]
    lossless: str
    audit: dict[str, int] | None = None
    head: str | None = None
    max_num_requests: int | None = None
    temperature: float | None = None
    verify: str | None = None
    draft_sampling: str | None = None

    @property
    def first(self) -> PassRecord:
        """The pass that `records` are of."""
        return self.passes[0]

    @property
    def repeats(self) -> tuple[PassRecord, ...]:
        """The later passes."""
        return self.passes[1:]

    @property
    def group(self) -> tuple[int | None, float | None]:
        """Batch size and temperature: conditions that share them share a baseline."""
        return self.max_num_requests, self.temperature

    @property
    def parts(self) -> StepParts | None:
        """Sums over the passes whose steps were timed by part; None without one."""
        known = [one.parts for one in self.passes if one.parts is not None]
        if not known:
            return None
        return StepParts(
            num_steps=sum(parts.num_steps for parts in known),
            target_s=sum(parts.target_s for parts in known),
            verify_s=sum(parts.verify_s for parts in known),
            draft_s=sum(parts.draft_s for parts in known),
            host_s=sum(parts.host_s for parts in known),
        )

    @property
    def is_resumed(self) -> bool:
        """The first pass was interrupted."""
        return self.first.is_resumed

    @property
    def num_warm_ups(self) -> int:
        """Before the first pass."""
        return self.first.num_warm_ups

    @property
    def capture_s(self) -> float | None:
        """Before the first pass."""
        return self.first.capture_s
