"""Results files as a report page reads them: named, and checked against their counters.

A *run* is one results file. What its conditions can be compared with: `entries.py`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mtp_research.evaluation.report import Report
from mtp_research.evaluation.results import RESULTS_FILE, recompute, to_json
from mtp_research.evaluation.stats.statistics import FORMULAS
from mtp_research.evaluation.tables import printable
from mtp_research.runtime.errors import IntegrityError

TOLERANCE = 1e-9  # of a stored figure to the one that the counters give
_NUM_LISTED = 5
_MAX_DEPTH = 64


@dataclass(frozen=True)
class Run:
    """One results file; `name` is unique among the runs of a page."""

    name: str
    report: Report


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read results files, or folders that hold a `results.json`.

    Raises:
        IntegrityError: see `read_checked`.
    """
    runs: list[Run] = []
    for path in paths:
        file = path / RESULTS_FILE if path.is_dir() else path
        title = file.resolve().parent.name if file.name == RESULTS_FILE else file.stem
        name = printable(title or "run")
        taken = {run.name for run in runs}
        numbered = (f"{name}-{number}" for number in range(2, len(paths) + 2))
        unique = name if name not in taken else next(n for n in numbered if n not in taken)
        runs.append(Run(unique, read_checked(file)))
    return runs


def read_checked(path: Path) -> Report:
    """The figures of a results file from its counters, which must give the figures it stores.

    Raises:
        IntegrityError: not a results file, other formulas, or stored figures that its counters do
            not give; the message names the first of them.
    """
    report = recompute(path)
    stored = json.loads(path.read_text(encoding="utf8"))
    formulas = stored.get("formulas")
    if formulas != FORMULAS:
        raise IntegrityError(
            f"{path}: expected the formulas of this version, got others for "
            f"{', '.join(_other_keys(formulas, FORMULAS))}; evaluate again."
        )
    _refuse(path, list(_differences(stored.get("summary"), _plain_summary(report), "summary")))
    return report


def require_stored_figures(path: Path, stored: object, computed: object) -> None:
    """Hold the figures in a file against those that its counters give.

    Args:
        path: of the file, for the message.
        stored: its summary; keys that it lacks, as an older file does, are not looked at.
        computed: the same from the counters.

    Raises:
        IntegrityError: names the first that differ.
    """
    expected = json.loads(json.dumps(computed))
    _refuse(path, list(_differences(stored, _only_stored(expected, stored), "summary")))


def _refuse(path: Path, found: Sequence[str]) -> None:
    if found:
        listed = "; ".join(found[:_NUM_LISTED])
        raise IntegrityError(
            f"{path}: {len(found)} stored figures are not what the counters give ({listed}); the "
            "file was edited or written by another version, evaluate again."
        )


def _only_stored(expected: object, stored: object, depth: int = 0) -> object:
    """`expected` without the keys that `stored` lacks."""
    if depth > _MAX_DEPTH:
        return expected
    if isinstance(expected, dict) and isinstance(stored, dict):
        return {
            key: _only_stored(value, stored[key], depth + 1)
            for key, value in expected.items()
            if key in stored
        }
    if isinstance(expected, list) and isinstance(stored, list) and len(expected) == len(stored):
        return [_only_stored(e, s, depth + 1) for e, s in zip(expected, stored, strict=True)]
    return expected


def mapping(parent: Mapping[str, object], key: str) -> Mapping[str, object]:
    """A nested mapping of a configuration or run record; empty if it is absent or no mapping."""
    value = parent.get(key) if isinstance(parent, Mapping) else None
    return cast(Mapping[str, object], value) if isinstance(value, Mapping) else {}


def _plain_summary(report: Report) -> object:
    return json.loads(json.dumps(to_json(report)["summary"]))


def _other_keys(stored: object, expected: Mapping[str, str]) -> list[str]:
    if not isinstance(stored, Mapping):
        return sorted(expected)
    keys = stored.keys() | expected.keys()
    return sorted(printable(str(k)) for k in keys if stored.get(k) != expected.get(k))


def _differences(stored: object, expected: object, where: str, depth: int = 0) -> Iterable[str]:
    """Places where the stored summary says something else than the computed one."""
    if depth > _MAX_DEPTH or type(stored) is not type(expected):
        if not _is_close(stored, expected):
            yield f"{where} {_shown(stored)} for {_shown(expected)}"
    elif isinstance(stored, dict) and isinstance(expected, dict):
        for key in sorted(stored.keys() | expected.keys()):
            place = f"{where}.{printable(key)}"
            yield from _differences(stored.get(key), expected.get(key), place, depth + 1)
    elif isinstance(stored, list) and isinstance(expected, list):
        if len(stored) != len(expected):
            yield f"{where} has {len(stored)} entries for {len(expected)}"
        for index, (ours, theirs) in enumerate(zip(stored, expected, strict=False)):
            yield from _differences(ours, theirs, f"{where}[{index}]", depth + 1)
    elif not _is_close(stored, expected):
        yield f"{where} {_shown(stored)} for {_shown(expected)}"


def _is_close(stored: object, expected: object) -> bool:
    if isinstance(stored, int | float) and isinstance(expected, int | float):
        return math.isclose(stored, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return stored == expected


def _shown(value: object) -> str:
    return printable(repr(value) if isinstance(value, str | int | float) else type(value).__name__)
