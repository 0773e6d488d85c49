"""What an evaluation leaves behind: prompts by hash, passes with their clocks, and generations.

Between the second and the third stage of the flow: prompts -> decode loop -> statistics -> report.
A *condition* is one way of decoding the prompt set; the one with K = 0 is the baseline. A *pass* is
one decoding of the whole set by one condition. `summary` writes and reads all of it.

A prompt of several turns is a *conversation*: each turn is a request of its own, whose prompt holds
the answers before it. The first has the prompt's id, later ones `ID/2`, `ID/3`, ...
Letter: K drafts per step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mtp_research.config.schema import OWN
from mtp_research.decode.stats import RequestRecord

Turns = tuple[RequestRecord, ...]  # of one prompt, in the order in which they were asked


@dataclass(frozen=True)
class PromptEntry:
    """A prompt as a report names it: by hash, without its text."""

    question_id: str
    category: str
    format: str
    sha256: str
    num_turns: int = 1  # messages of the user that are asked
    opens_thinking: bool = False  # its chat template begins the answer's thinking part


@dataclass(frozen=True)
class StepParts:
    """Seconds of the steps without prompt rows."""

    num_steps: int  # how many there were
    target_s: float  # target forward and logits
    verify_s: float  # logit processors, verification, new frontier
    draft_s: float  # all draft passes
    host_s: float  # the rest of the steps' wall time


@dataclass(frozen=True)
class PassRecord:
    """Times and counts of one pass, without the writing of the journal.

    A pass that was interrupted and resumed has neither times nor steps: they would be of two
    processes.
    """

    wall_s: float | None  # seconds for the whole set, prefill included, warm-up excluded
    # Of it, calls of the loop that neither started nor committed a step with prompt rows
    decode_wall_s: float | None = None
    num_decode_tokens: int | None = None  # tokens emitted in those calls
    # Of them, calls whose steps, the started and the committed one, took every place of the batch;
    # None without such a call, too
    full_wall_s: float | None = None
    num_full_tokens: int | None = None  # tokens emitted in those; None likewise
    num_steps: int | None = None  # steps of the loop
    rows_per_step: float | None = None  # mean packed rows of a target step
    device_s: float | None = None  # seconds from begin to end on the GPU's clock; None on a CPU
    # Of the device; None on a CPU and with several passes, which hold the pools of all conditions
    # of a group
    peak_memory_bytes: int | None = None
    num_warm_ups: int = 0  # uncounted decodings before it
    # Seconds of compiling and capturing steps before it; None without captured ones
    capture_s: float | None = None
    # Captures and compilations while its clock ran, of which there should be none; None likewise
    num_late_builds: int | None = None
    # Where the time of the steps without prompt rows went; None where it was not measured. A
    # results file has the sum over the passes alone, which is read back into the first.
    parts: StepParts | None = None
    is_resumed: bool = False  # it was interrupted, and finished by a later process
    # Engine and version, such as `vllm 0.24.0`; None where ours alone was asked for
    backend: str | None = None
    # What the engine counted by itself in this pass, by its own names; None where it counts nothing
    engine_counters: Mapping[str, int] | None = None
    num_texts_equal: int | None = None  # of a later pass, prompts with the first pass's token ids


@dataclass(frozen=True)
class ConditionResult:
    """One condition, as the loop left it."""

    label: str  # unique column title, such as `eagle`
    policy: str | None  # hidden-state policy; None for the baseline
    num_speculative_tokens: int  # K; 0 makes this the baseline
    records: tuple[RequestRecord, ...]  # one per prompt and turn, of the first pass
    passes: tuple[PassRecord, ...]  # at least one, in their order
    lossless: str  # verdict on the outputs, such as `identical 153/153` (tables show 24 characters)
    # Of the first pass, slots by finding (WRONG, MIXED, HOLE, PROVISIONAL) and `slots`, the number
    # looked at; None if the auditor was off
    audit: dict[str, int] | None = None
    head: str | None = None  # name of the heads, `oracle`, or None
    max_num_requests: int | None = None  # batch size; None if unknown, like the next three
    temperature: float | None = None  # of the target's sampling
    verify: str | None = None  # verification rule
    draft_sampling: str | None = None  # how drafts were chosen
    draft_length: str | None = None  # rule for their number; None in older files, too
    prompt_of: Mapping[str, str] = field(default_factory=dict)  # later turn's id -> prompt's id
    cut_prompts: tuple[str, ...] = ()  # ids of prompts whose next turn did not fit the context
    # 1 for a right answer and 0 for a wrong one, by prompt's id; None where nothing was scored
    scores: Mapping[str, int] | None = None
    # Engine whose conventions our loop ran the heads by; None for their own
    conventions: str | None = None

    @property
    def first(self) -> PassRecord:
        """The pass that `records` are of."""
        return self.passes[0]

    @property
    def repeats(self) -> tuple[PassRecord, ...]:
        """The later passes."""
        return self.passes[1:]

    @property
    def engine_name(self) -> str:
        """Which engine decoded it, without its version."""
        return (self.first.backend or OWN).split()[0]

    def prompt_id(self, record: RequestRecord) -> str:
        """Id of the prompt that a record is a turn of."""
        return self.prompt_of.get(record.request_id, record.request_id)

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


def turn_id(question_id: str, turn: int) -> str:
    """Request id of turn 0, 1, ... of a prompt."""
    return question_id if turn == 0 else f"{question_id}/{turn + 1}"


def turns_by_prompt(
    records: Iterable[RequestRecord], prompt_of: Mapping[str, str]
) -> dict[str, Turns]:
    """The turns of each prompt by its id; `prompt_of` is that of a `ConditionResult`.

    Raises:
        ValueError: one request id occurs twice.
    """
    found: dict[str, dict[str, RequestRecord]] = {}
    for record in records:
        turns = found.setdefault(prompt_of.get(record.request_id, record.request_id), {})
        if record.request_id in turns:
            raise ValueError(f"expected one record per prompt, got two of {record.request_id}.")
        turns[record.request_id] = record
    # Records come in the order of their ids, in which `ID/10` stands before `ID/2`.
    return {
        name: tuple(turns[one] for one in sorted(turns, key=lambda text: (len(text), text)))
        for name, turns in found.items()
    }
