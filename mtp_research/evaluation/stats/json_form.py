"""The JSON form of generations, passes and figures: the one place that knows the stored keys.

`results.json` keeps the times of a condition flat: those of the first pass among the condition's
own keys, those of later ones in `repeats`, and the parts of a step summed over all passes. The
figures in its `summary` repeat what a reader wants beside them. The journal of a running evaluation
keeps a `PassRecord` as it is.
"""

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.outcome import ConditionResult, PassRecord, StepParts
from mtp_research.evaluation.stats.speed import Speed
from mtp_research.evaluation.stats.summary import ConditionSummary

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
_OF_ALL_PASSES = (*_TIMES, "device_s")
_SUMMARISED = ("num_steps", "rows_per_step", "peak_memory_bytes", "is_resumed")
_OF_FIRST_PASS = (*_OF_ALL_PASSES, *_SUMMARISED, "num_warm_ups", "capture_s")


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
    """A condition as `results.json` holds it; files from before a time was taken lack its key.

    Raises:
        KeyError: a field is missing.
        TypeError: a field is of another type, or one too many.
    """
    own = {"num_warm_ups": 1, **stored}
    first = {name: own.pop(name) for name in _OF_FIRST_PASS if name in own}
    first["parts"] = own.pop("parts")
    records = tuple(read_record(one) for one in own.pop("records"))
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
                 "max_num_requests", "temperature", "verify", "draft_sampling")  # fmt: skip
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
