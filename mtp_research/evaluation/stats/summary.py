"""From the generations of a condition to its published figures, and from two to their differences.

Third stage of the flow: prompts -> decode loop -> statistics -> report. Letter: K drafts per round.

The stored keys are known here alone. `results.json` keeps the times of a condition flat: those of
the first pass among its own keys, those of later ones in `repeats`, the parts of a step summed over
all passes. The journal of a running evaluation keeps a `PassRecord` as it is.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.stats.agreement import partner_of
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.outcome import (
    ConditionResult,
    PassRecord,
    StepParts,
    turns_by_prompt,
)
from mtp_research.evaluation.stats.speed import Speed, StepCost, cost_of, speed_of
from mtp_research.evaluation.stats.statistics import (
    AcceptanceStatistics,
    acceptance_statistics,
    paired_differences,
    statistics_per_domain,
)
from mtp_research.evaluation.stats.text_figures import (
    TaskScore,
    Thinking,
    ThinkingSplit,
    task_score,
    thinking_split,
)

_RECORD_TYPES = {
    "request_id": str,
    "num_prompt_tokens": int,
    "finish_reason": str,
    "num_target_forwards": int,
    "ttft_s": float | int,
    "decode_s": float | int,
}
_RECORD_LISTS = ("output_token_ids", "num_accepted_per_round", "num_drafted_per_round")
_TIMES = ("wall_s", "decode_wall_s", "num_decode_tokens", "full_wall_s", "num_full_tokens")
_OF_ALL_PASSES = (*_TIMES, "device_s", "num_late_builds")
_SUMMARISED = ("num_steps", "rows_per_step", "peak_memory_bytes", "is_resumed", "backend")
_OF_FIRST_PASS = (
    *(*_OF_ALL_PASSES, *_SUMMARISED),
    *("num_warm_ups", "capture_s", "engine_counters"),
)


@dataclass(frozen=True)
class ConditionSummary:
    """A condition and every published figure of it; the properties are those of `result`."""

    result: ConditionResult  # what was decoded
    acceptance: AcceptanceStatistics  # over all prompts
    per_domain: dict[str, AcceptanceStatistics]  # the same by domain
    speed: Speed  # rates and latencies
    # Mean step by part and the acceptance model; None where it was not measured
    cost: StepCost | None
    # Prompts with the baseline's token ids; None without baseline
    num_outputs_equal_to_baseline: int | None
    # Acceptance inside and outside of thinking; None without drafts or thinking
    thinking: ThinkingSplit | None = None
    score: TaskScore | None = None  # right answers; None where nothing was scored

    @property
    def num_prompts(self) -> int:
        """Prompts asked, finished or not."""
        return self.acceptance.num_prompts + self.acceptance.num_unfinished


def summarise(
    condition: ConditionResult,
    *,
    baseline: ConditionResult | None,
    domains: Mapping[str, str],
    seed: int,
    thinking: Thinking | None = None,
) -> ConditionSummary:
    """Every published figure of one condition.

    `baseline` is the K = 0 decoding of the same prompts at the same batch size and temperature, if
    there is one; `domains` are by prompt's id; `seed` is of the bootstrap; `thinking` tells the
    thinking part of an answer, None where it has none.
    """
    num_drafts, prompt_of = condition.num_speculative_tokens, condition.prompt_of
    acceptance = acceptance_statistics(
        condition.records, num_speculative_tokens=num_drafts, seed=seed, prompt_of=prompt_of
    )
    return ConditionSummary(
        result=condition,
        acceptance=acceptance,
        per_domain=statistics_per_domain(
            condition.records,
            domains,
            num_speculative_tokens=num_drafts,
            seed=seed,
            prompt_of=prompt_of,
        ),
        speed=speed_of(condition, baseline=baseline),
        cost=cost_of(
            condition.parts,
            baseline and baseline.parts,
            num_speculative_tokens=num_drafts,
            acceptance_length=acceptance.acceptance_length_micro.value,
        ),
        num_outputs_equal_to_baseline=(
            None
            if baseline is None
            else num_equal_texts(condition.records, baseline.records, prompt_of=prompt_of)
        ),
        thinking=thinking_split(condition, thinking=thinking, seed=seed),
        score=task_score(condition, baseline, seed=seed),
    )


def baseline_of(
    condition: ConditionResult, conditions: Sequence[ConditionResult]
) -> ConditionResult | None:
    """The K = 0 condition of the same engine, batch size and temperature."""
    place = (condition.engine_name, condition.group)
    plain = (one for one in conditions if one.num_speculative_tokens == 0)
    return next((one for one in plain if (one.engine_name, one.group) == place), None)


def num_equal_texts(
    ours: Sequence[RequestRecord],
    theirs: Sequence[RequestRecord],
    *,
    prompt_of: Mapping[str, str],
) -> int:
    """Prompts of `ours` with equal token ids in `theirs`, turn by turn."""
    texts, expected = (
        {
            name: [record.output_token_ids for record in turns]
            for name, turns in turns_by_prompt(side, prompt_of).items()
        }
        for side in (ours, theirs)
    )
    return sum(expected.get(name) == text for name, text in texts.items())


@dataclass(frozen=True)
class PairedComparison:
    """Statistics of `condition` minus those of `reference`, over the same resampled prompts."""

    condition: str
    reference: str
    differences: dict[str, Estimate]


def compare_to_reference(
    conditions: Sequence[ConditionResult], *, reference: str | None, seed: int
) -> tuple[PairedComparison, ...]:
    """Paired differences to the reference of every condition that drafts.

    Only conditions of equal K, rule for the number of drafts, batch size and temperature are
    compared. Their reference is the one with the label `reference`, else the first with that
    policy, else the first of them. Another engine is also compared with our loop run by its
    conventions.
    """
    drafting = [condition for condition in conditions if condition.num_speculative_tokens > 0]
    alike: dict[object, list[ConditionResult]] = {}
    for condition in drafting:
        key = (condition.num_speculative_tokens, condition.draft_length, condition.group)
        alike.setdefault(key, []).append(condition)
    pairs = []
    for members in alike.values():
        wanted = [c for c in members if c.label == reference]
        wanted += [c for c in members if c.policy == reference] if reference else []
        first = [*wanted, *members][0]
        pairs += [paired(c, first, seed=seed) for c in members if c is not first]
        partners = ((c, partner_of(c, members)) for c in members)
        pairs += [paired(c, p, seed=seed) for c, p in partners if p is not None and p is not first]
    return tuple(pairs)


def paired(
    condition: ConditionResult, reference: ConditionResult, *, seed: int
) -> PairedComparison:
    """`condition` minus `reference`; both asked the same prompts."""
    differences = paired_differences(
        condition.records,
        reference.records,
        num_speculative_tokens=max(
            condition.num_speculative_tokens, reference.num_speculative_tokens
        ),
        seed=seed,
        prompt_of={**reference.prompt_of, **condition.prompt_of},
    )
    return PairedComparison(condition.label, reference.label, differences)


def plain(value: object) -> object:
    """JSON values of dataclasses, estimates and tuples; of conditions and speeds as stored."""
    if isinstance(value, Estimate):
        return value._asdict()
    if isinstance(value, ConditionResult):
        return _result_fields(value)
    if isinstance(value, ConditionSummary):
        return _summary_fields(value)
    if isinstance(value, Speed):
        return _speed_fields(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(vars(value)[field.name]) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items()}
    return [plain(member) for member in value] if isinstance(value, list | tuple) else value


def read_condition(stored: Mapping[str, Any]) -> ConditionResult:  # Any: as json.loads returns it
    """A condition as `results.json` holds it; files from before a time was taken lack its key."""
    own = {"num_warm_ups": 1, **stored}
    first = {name: own.pop(name) for name in _OF_FIRST_PASS if name in own}
    first["parts"] = own.pop("parts")
    records = tuple(read_record(one) for one in own.pop("records"))
    own["cut_prompts"] = tuple(own.get("cut_prompts", ()))
    later = [PassRecord(**one) for one in own.pop("repeats")]
    return ConditionResult(records=records, passes=(read_pass(first), *later), **own)


def read_pass(stored: Mapping[str, Any]) -> PassRecord:  # Any: as json.loads returns it
    """A pass with the parts of its steps, as the journal holds it; raises as `read_condition`."""
    parts = stored["parts"]
    return PassRecord(**{**stored, "parts": None if parts is None else StepParts(**parts)})


def read_record(stored: Mapping[str, Any]) -> RequestRecord:  # Any: as json.loads returns it
    """A generation as `results.json` holds it; raises as `read_condition`."""
    check_types(stored, _RECORD_TYPES)
    counts = [stored[name] for name, kind in _RECORD_TYPES.items() if kind is int]
    counts += [number for name in _RECORD_LISTS for number in stored[name]]
    if not all(isinstance(number, int) and number >= 0 for number in counts):
        raise TypeError(f"{', '.join(_RECORD_LISTS)} must be lists of whole numbers >= 0")
    lists = {key: tuple(value) for key, value in stored.items() if isinstance(value, list)}
    return RequestRecord(**{**stored, **lists})


def check_types(fields: Mapping[str, object], expected: Mapping[str, type | UnionType]) -> None:
    """Raise a TypeError for the first field of another type, a KeyError for a missing one."""
    for name, kind in expected.items():
        if not isinstance(fields[name], kind):
            raise TypeError(f"{name} must be {kind}, got {type(fields[name])}")


def _result_fields(result: ConditionResult) -> dict[str, object]:
    fields = {name: plain(value) for name, value in vars(result).items() if name != "passes"}
    later = [_some(one, (*_OF_ALL_PASSES, "num_texts_equal")) for one in result.repeats]
    return {
        **fields,
        **_some(result.first, _OF_FIRST_PASS),
        "repeats": later,
        "parts": plain(result.parts),
    }


def _summary_fields(summary: ConditionSummary) -> dict[str, object]:
    of_result = ("label", "policy", "num_speculative_tokens", "lossless", "audit", "head",
                 "max_num_requests", "temperature", "verify", "draft_sampling",
                 "draft_length", "conventions")  # fmt: skip
    return {
        **_some(summary.result, of_result),
        **_some(summary.result.first, _SUMMARISED),
        **{name: plain(value) for name, value in vars(summary).items() if name != "result"},
        "num_prompts": summary.num_prompts,
    }


def _speed_fields(speed: Speed) -> dict[str, object]:
    rates = {"end_to_end": speed.end_to_end, "decode": speed.decode, "full": speed.full}
    fields = {name: value for name, value in vars(speed).items() if name not in ("first", *rates)}
    for name, rate in rates.items():
        for end, value in zip(("", "_low", "_high"), rate, strict=True):
            fields[f"tokens_per_s_{name}{end}"] = value
    return _some(speed.first, ("wall_s", "decode_wall_s", "full_wall_s")) | fields


def _some(record: object, names: tuple[str, ...]) -> dict[str, object]:
    return {name: vars(record)[name] for name in names}
