"""`results.json` and `table.txt`: a report on disk, and back.

`results.json` holds the per-round counters and token ids of every generation and the hash of every
prompt, so that `recompute` gives every published figure again. Both files are written whole or not
at all.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.report import PromptEntry, Report, build_report, render_text
from mtp_research.evaluation.stats.bootstrap import LEVEL, NUM_DRAWS, Estimate
from mtp_research.evaluation.stats.speed import PassTiming, StepParts
from mtp_research.evaluation.stats.statistics import ACCEPTED_WARNING, FORMULAS
from mtp_research.evaluation.stats.summary import ConditionResult
from mtp_research.runtime.errors import IntegrityError
from mtp_research.runtime.files import write_atomically

SCHEMA_VERSION = 2
RESULTS_FILE = "results.json"
TABLE_FILE = "table.txt"
_REPORT_TYPES = {"config": dict, "run": dict, "dtype": str, "seed": int, "skipped_prompts": list}
_PROMPT_TYPES = {"question_id": str, "category": str, "format": str, "sha256": str}
_RECORD_TYPES = {
    "request_id": str,
    "num_prompt_tokens": int,
    "finish_reason": str,
    "num_target_forwards": int,
    "ttft_s": float | int,
    "decode_s": float | int,
}
_RECORD_LISTS = ("output_token_ids", "num_accepted_per_round", "num_drafted_per_round")


def to_json(report: Report) -> dict[str, object]:
    """The content of `results.json`; an estimate is `{value, low, high}`, null where undefined."""
    return {
        "schema_version": SCHEMA_VERSION,
        "dtype": report.dtype,
        "seed": report.seed,
        "bootstrap": {"num_draws": NUM_DRAWS, "level": LEVEL, "unit": "prompt"},
        "formulas": FORMULAS,
        "accepted_warning": ACCEPTED_WARNING,
        "config": report.config,
        "run": report.run,
        "summary": {"conditions": plain(report.summaries), "paired": plain(report.paired)},
        "prompts": plain(report.prompts),
        "skipped_prompts": plain(report.skipped_prompts),
        "conditions": plain(report.conditions),
    }


def recompute(path: Path) -> Report:
    """Read a `results.json` and compute its figures again from the counters of its generations.

    Raises:
        IntegrityError: missing, no JSON, of another schema version, or with wrong fields.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is not a readable results file: {error}.") from None
    version = stored.get("schema_version") if isinstance(stored, dict) else None
    if version != SCHEMA_VERSION:
        raise IntegrityError(
            f"{path}: expected schema_version {SCHEMA_VERSION}, got {version!r}; evaluate again."
        )
    try:
        _check_types(stored, _REPORT_TYPES)
        for prompt in stored["prompts"]:
            _check_types(prompt, _PROMPT_TYPES)
        return build_report(
            [_condition(fields) for fields in stored["conditions"]],
            prompts=[PromptEntry(**prompt) for prompt in stored["prompts"]],
            dtype=stored["dtype"],
            seed=stored["seed"],
            config=stored["config"],
            run=stored["run"],
            skipped_prompts=stored["skipped_prompts"],
        )
    except IntegrityError:  # is a ValueError, and says more than the line below
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise IntegrityError(f"{path} lacks or misnames a field: {error}.") from None


def write_results(folder: Path, report: Report) -> Path:
    """Write `table.txt` and `results.json`, each whole or not at all; return the latter's path."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(to_json(report), allow_nan=False, separators=(",", ":"))
    write_atomically(folder / TABLE_FILE, render_text(report))
    write_atomically(folder / RESULTS_FILE, content + "\n")
    return folder / RESULTS_FILE


def read_record(stored: Mapping[str, Any]) -> RequestRecord:  # Any: as json.loads returns it
    """A generation as `results.json` holds it.

    Raises:
        KeyError: a field is missing.
        TypeError: a field is of another type, or one too many.
    """
    _check_types(stored, _RECORD_TYPES)
    counts = [stored[name] for name, kind in _RECORD_TYPES.items() if kind is int]
    counts += [number for name in _RECORD_LISTS for number in stored[name]]
    if not all(isinstance(number, int) and number >= 0 for number in counts):
        raise TypeError(f"{', '.join(_RECORD_LISTS)} must be lists of whole numbers >= 0")
    lists = {key: tuple(value) for key, value in stored.items() if isinstance(value, list)}
    return RequestRecord(**{**stored, **lists})


def plain(value: object) -> object:
    """JSON values of dataclasses, estimates and tuples."""
    if isinstance(value, Estimate):
        return value._asdict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items()}
    return [plain(member) for member in value] if isinstance(value, list | tuple) else value


def _condition(fields: dict[str, Any]) -> ConditionResult:  # Any: as json.loads returns it
    parts = fields.pop("parts")
    return ConditionResult(
        records=tuple(read_record(stored) for stored in fields.pop("records")),
        repeats=tuple(PassTiming(**stored) for stored in fields.pop("repeats")),
        parts=None if parts is None else StepParts(**parts),
        **fields,
    )


def _check_types(fields: Mapping[str, object], expected: Mapping[str, type | UnionType]) -> None:
    """Raise a TypeError for the first field of another type, a KeyError for a missing one."""
    for name, kind in expected.items():
        if not isinstance(fields[name], kind):
            raise TypeError(f"{name} must be {kind}, got {type(fields[name])}")


def _refuse_constant(name: str) -> float:
    """JSON has no NaN and no Infinity, and every figure computed from one would be lost."""
    raise ValueError(f"{name} is no number")
