"""`results.json` and `table.txt`: a report on disk, and back.

`results.json` holds the per-round counters and token ids of every generation and the hash of every
prompt, so that `recompute` gives every published figure again. Both files are written whole or not
at all.
"""

import json
from pathlib import Path

from mtp_research.evaluation.report import Report, build_report, render_text
from mtp_research.evaluation.stats.bootstrap import LEVEL, NUM_DRAWS
from mtp_research.evaluation.stats.json_form import check_types, plain, read_condition
from mtp_research.evaluation.stats.outcome import PromptEntry
from mtp_research.evaluation.stats.statistics import ACCEPTED_WARNING, FORMULAS
from mtp_research.runtime.errors import IntegrityError
from mtp_research.runtime.files import write_atomically

SCHEMA_VERSION = 2
RESULTS_FILE = "results.json"
TABLE_FILE = "table.txt"
_REPORT_TYPES = {"config": dict, "run": dict, "dtype": str, "seed": int, "skipped_prompts": list}
_PROMPT_TYPES = {"question_id": str, "category": str, "format": str, "sha256": str}


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
        check_types(stored, _REPORT_TYPES)
        for prompt in stored["prompts"]:
            check_types(prompt, _PROMPT_TYPES)
        return build_report(
            [read_condition(fields) for fields in stored["conditions"]],
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


def _refuse_constant(name: str) -> float:
    """JSON has no NaN and no Infinity, and every figure computed from one would be lost."""
    raise ValueError(f"{name} is no number")
