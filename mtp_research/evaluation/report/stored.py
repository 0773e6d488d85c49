"""The report of an evaluation, and `results.json`, which keeps it.

Fourth stage of the flow: prompts -> decode loop -> statistics -> report. `results.json` holds the
per-round counters and token ids of every generation and the hash of every prompt, so that
`recompute` gives every published figure again; `read_checked` refuses a file whose stored figures
are others. A *run* is one such file with a name. No prompt text is stored.
"""

import json
import lzma
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mtp_research.evaluation.stats.agreement import Agreement, agreements
from mtp_research.evaluation.stats.bootstrap import LEVEL, NUM_DRAWS
from mtp_research.evaluation.stats.outcome import ConditionResult, PromptEntry
from mtp_research.evaluation.stats.statistics import ACCEPTED_WARNING, FORMULAS
from mtp_research.evaluation.stats.summary import (
    ConditionSummary,
    PairedComparison,
    baseline_of,
    check_types,
    compare_to_reference,
    plain,
    read_condition,
    summarise,
)
from mtp_research.evaluation.stats.text_figures import Thinking
from mtp_research.runtime.errors import ConfigError, IntegrityError, escaped
from mtp_research.runtime.files import require_file, write_atomically

SCHEMA_VERSION = 2
RESULTS_FILE = "results.json"
PACKED_FILE = f"{RESULTS_FILE}.xz"  # the same, packed by xz, for results that are kept
GENERATIONS_FILE = "generations.jsonl"  # texts beside the results
TOLERANCE = 1e-9  # of a stored figure to the one that the counters give
MAX_NAME_CHARACTERS = 24
_NUM_LISTED = 5
_MAX_DEPTH = 64
_REPORT_TYPES = {"config": dict, "run": dict, "dtype": str, "seed": int, "skipped_prompts": list}
_PROMPT_TYPES = {"question_id": str, "category": str, "format": str, "sha256": str}


@dataclass(frozen=True)
class Report:
    """One evaluation: what was asked, what was generated, and the figures."""

    dtype: str  # of the target, such as `float32`
    seed: int  # of the bootstrap
    prompts: tuple[PromptEntry, ...]  # the ids are the request ids
    conditions: tuple[ConditionResult, ...]  # with unique labels
    summaries: tuple[ConditionSummary, ...]  # of each condition, in the same order
    paired: tuple[PairedComparison, ...]  # to the reference of equal K and group
    agreements: tuple[Agreement, ...]  # of other engines with our loop; empty without any
    config: Mapping[str, object]  # resolved
    run: Mapping[str, object]  # `provenance.run_record`
    skipped_prompts: tuple[str, ...] = ()  # ids; they fill the context


@dataclass(frozen=True)
class Run:
    """One results file; `name` is unique among the runs of a page."""

    name: str
    report: Report


def build_report(
    conditions: Sequence[ConditionResult],
    *,
    prompts: Sequence[PromptEntry],
    dtype: str,
    seed: int = 0,
    config: Mapping[str, object],
    run: Mapping[str, object],
    skipped_prompts: Sequence[str] = (),
) -> Report:
    """Compute every figure; the arguments are the attributes of `Report`."""
    labels = [condition.label for condition in conditions]
    assert len(set(labels)) == len(labels), f"condition labels must be unique, got {labels}"
    reference = config.get("reference")
    domains = {prompt.question_id: prompt.category for prompt in prompts}
    thinking = _thinking(run, prompts)
    return Report(
        dtype=dtype,
        seed=seed,
        prompts=tuple(prompts),
        conditions=tuple(conditions),
        summaries=tuple(
            summarise(
                one,
                baseline=baseline_of(one, conditions),
                domains=domains,
                seed=seed,
                thinking=thinking,
            )
            for one in conditions
        ),
        paired=compare_to_reference(
            conditions, reference=None if reference is None else str(reference), seed=seed
        ),
        agreements=agreements(conditions),
        config=config,
        run=run,
        skipped_prompts=tuple(skipped_prompts),
    )


def _thinking(run: Mapping[str, object], prompts: Sequence[PromptEntry]) -> Thinking | None:
    """How the thinking part of an answer is told; older files do not say it."""
    token_ids = run.get("thinking_token_ids")
    if not isinstance(token_ids, list | tuple):
        return None
    begin, end = token_ids
    opened = frozenset(prompt.question_id for prompt in prompts if prompt.opens_thinking)
    return Thinking(begin, end, opened)


def last_line(report: Report, *, folder: Path | None = None) -> str:
    """The main figures as one line of JSON, for scripts that read only the last line."""
    line = {
        "num_prompts": len(report.prompts),
        "num_skipped_prompts": len(report.skipped_prompts),
        "dtype": report.dtype,
        "conditions": {one.result.label: _main_figures(one) for one in report.summaries},
        "results": None if folder is None else str(folder),
    }
    return json.dumps(line, allow_nan=False, separators=(",", ":"))


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
        "summary": {
            "conditions": plain(report.summaries),
            "paired": plain(report.paired),
            # Files of our loop alone have none, as those from before there were others.
            **({"agreements": plain(report.agreements)} if report.agreements else {}),
        },
        "prompts": plain(report.prompts),
        "skipped_prompts": plain(report.skipped_prompts),
        "conditions": plain(report.conditions),
    }


def write_results(folder: Path, report: Report) -> Path:
    """Write `results.json`, whole or not at all; return its path."""
    write_json(folder / RESULTS_FILE, to_json(report))
    return folder / RESULTS_FILE


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a results file on one line, whole or not at all; NaN is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    write_atomically(path, text + "\n")


def recompute(path: Path) -> Report:
    """Read a `results.json`, and compute its figures again.

    Raises:
        ConfigError: there is no such file, or it is no evaluation's.
        IntegrityError: it cannot be read.
    """
    stored = _load(path)
    if not isinstance(stored, dict) or "schema_version" not in stored:
        raise ConfigError(f"{path} must be the results.json of an evaluation, got another file.")
    version = stored["schema_version"]
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


def _load(path: Path) -> object:
    require_file(path, kind="results file")
    try:
        return json.loads(_text(path), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError, lzma.LZMAError, EOFError) as error:
        raise IntegrityError(f"{path} is not a readable results file: {error}.") from None


def stored_config(path: Path) -> Mapping[str, object]:
    """The resolved configuration in a results file; empty if it has none."""
    stored = _load(path)
    return mapping(stored, "config") if isinstance(stored, dict) else {}


def results_file(folder: Path) -> Path:
    """The results of a folder: `results.json`, or the packed file where only that is there.

    A file stands for itself.
    """
    if folder.is_file():
        return folder
    plain_file, packed = folder / RESULTS_FILE, folder / PACKED_FILE
    return packed if packed.is_file() and not plain_file.is_file() else plain_file


def _text(path: Path) -> str:
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf8") as file:
        return file.read()


def read_runs(paths: Sequence[Path], *, on_read: Callable[[], object] = lambda: None) -> list[Run]:
    """`read_checked` of results files, or of folders that hold a `results.json`, with names.

    `on_read` is called after each: computing the figures again takes seconds.
    """
    runs: list[Run] = []
    for path in paths:
        file = results_file(path) if path.is_dir() else path
        is_named = file.name in (RESULTS_FILE, PACKED_FILE)
        title = file.resolve().parent.name if is_named else file.stem
        name = printable(title or "run")
        taken = {run.name for run in runs}
        numbered = (f"{name}-{number}" for number in range(2, len(paths) + 2))
        unique = name if name not in taken else next(n for n in numbered if n not in taken)
        runs.append(Run(unique, read_checked(file)))
        on_read()
    return runs


def read_checked(path: Path) -> Report:
    """The figures of a results file from its counters, which must give the figures it stores.

    Raises:
        ConfigError: there is no such file.
        IntegrityError: not a results file, other formulas, or stored figures that its counters do
            not give; the message names the first of them.
    """
    report = recompute(path)
    stored = json.loads(_text(path))
    formulas = stored.get("formulas")
    if formulas != FORMULAS:
        theirs = formulas if isinstance(formulas, Mapping) else {}
        keys = theirs.keys() | FORMULAS.keys()
        others = sorted(printable(str(k)) for k in keys if theirs.get(k) != FORMULAS.get(k))
        raise IntegrityError(
            f"{path}: expected the formulas of this version, got others for "
            f"{', '.join(others)}; evaluate again."
        )
    computed = json.loads(json.dumps(to_json(report)["summary"]))
    _refuse(path, list(_differences(stored.get("summary"), computed, "summary")))
    return report


def require_stored_figures(path: Path, stored: object, computed: object) -> None:
    """Hold a file's figures against those of its counters; it may lack some, as older files do."""
    expected = json.loads(json.dumps(computed))
    _refuse(path, list(_differences(stored, expected, "summary", may_lack=True)))


def longest(report: Report) -> ConditionSummary | None:
    """The condition that drafts with the greatest acceptance length (micro); see `ranked`."""
    lengths = [
        (length, summary)
        for summary in ranked(report)
        if summary.result.num_speculative_tokens > 0
        and (length := summary.acceptance.acceptance_length_micro.value) is not None
    ]
    return max(lengths, key=lambda pair: pair[0])[1] if lengths else None


def ranked(report: Report) -> list[ConditionSummary]:
    """Conditions that acceptance lengths may rank: always K drafts, where there are such.

    Rules make none in some steps, which are no rounds then.
    """
    found = [one for one in report.summaries if rule_of(one.result, report) == "fixed"]
    is_fixed = any(one.result.num_speculative_tokens > 0 for one in found)
    return found if is_fixed else list(report.summaries)


def rule_of(condition: ConditionResult, report: Report) -> str:
    """Its rule for the number of drafts; the run's for K = 0 and in files that tell no other."""
    usual = mapping(report.config, "spec").get("draft_length", "fixed")
    return condition.draft_length or str(usual)


def has_engines(report: Report) -> bool:
    """Whether several engines decoded the prompts."""
    return any(condition.first.backend is not None for condition in report.conditions)


def mapping(parent: Mapping[str, object], key: str) -> Mapping[str, object]:
    """A nested mapping of a configuration or run record; empty if it is absent or no mapping."""
    value = parent.get(key) if isinstance(parent, Mapping) else None
    return cast(Mapping[str, object], value) if isinstance(value, Mapping) else {}


def printable(text: str, *, limit: int = MAX_NAME_CHARACTERS) -> str:
    """A name from a file or an override: control characters escaped, at most `limit` characters."""
    shown = escaped(text)
    return shown[: limit - 3] + "..." if len(shown) > limit else shown


def _main_figures(summary: ConditionSummary) -> dict[str, object]:
    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 4)

    acceptance, speed = summary.acceptance, summary.speed
    return {
        "num_speculative_tokens": summary.result.num_speculative_tokens,
        "acceptance_length": [rounded(x) for x in acceptance.acceptance_length_micro],
        "acceptance_rate": rounded(acceptance.acceptance_rate.value),
        "tokens_per_s": rounded(speed.end_to_end.value),
        "ratio_to_baseline": rounded(speed.ratio_end_to_end),
        "audit": summary.result.audit,
        "lossless": summary.result.lossless,
    }


def _refuse_constant(name: str) -> float:
    """JSON has no NaN and no Infinity, and every figure computed from one would be lost."""
    raise ValueError(f"{name} is no number")


def _refuse(path: Path, found: Sequence[str]) -> None:
    if found:
        listed = "; ".join(found[:_NUM_LISTED])
        raise IntegrityError(
            f"{path}: {len(found)} stored figures are not what the counters give ({listed}); the "
            "file was edited or written by another version, evaluate again."
        )


def _differences(
    stored: object, expected: object, where: str, *, may_lack: bool = False, depth: int = 0
) -> Iterable[str]:
    """Places where the stored summary says something else than the computed one."""
    if depth <= _MAX_DEPTH and isinstance(stored, dict) and isinstance(expected, dict):
        keys = stored.keys() if may_lack else stored.keys() | expected.keys()
        inner = [(f"{where}.{printable(k)}", stored.get(k), expected.get(k)) for k in sorted(keys)]
    elif depth <= _MAX_DEPTH and isinstance(stored, list) and isinstance(expected, list):
        if len(stored) != len(expected):
            yield f"{where} has {len(stored)} entries for {len(expected)}"
        pairs = zip(stored, expected, strict=False)
        inner = [(f"{where}[{i}]", ours, theirs) for i, (ours, theirs) in enumerate(pairs)]
    else:
        if not _is_close(stored, expected):
            yield f"{where} {_shown(stored)} for {_shown(expected)}"
        return
    for place, ours, theirs in inner:
        yield from _differences(ours, theirs, place, may_lack=may_lack, depth=depth + 1)


def _is_close(stored: object, expected: object) -> bool:
    if isinstance(stored, int | float) and isinstance(expected, int | float):
        return math.isclose(stored, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return stored == expected


def _shown(value: object) -> str:
    return printable(repr(value) if isinstance(value, str | int | float) else type(value).__name__)
