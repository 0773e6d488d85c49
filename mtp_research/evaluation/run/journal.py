"""Finished prompts of a running evaluation on disk, so that a killed one goes on where it was.

`finished.jsonl` in the run folder: a header line with everything that the figures depend on, then
one line per group of finished prompts and one per finished pass. Lines are appended and forced to
disk about once a second, between steps and outside the clock. When `results.json` is written the
file is deleted: it holds nothing more. A line that a kill cut off is dropped; its prompts are
decoded again.

A pass that was interrupted has no times, because they would be of two processes.
"""

import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from mtp_research.config.schema import EvalConfig
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.report.stored import plain
from mtp_research.evaluation.stats.outcome import PassRecord
from mtp_research.evaluation.stats.summary import read_pass, read_record
from mtp_research.runtime.errors import ConfigError, IntegrityError

JOURNAL_FILE = "finished.jsonl"
SYNC_EVERY_S = 1.0
_NOT_COMPARED = ("output_dir", "logger")
_NUM_LISTED = 8


class StoredPass(NamedTuple):
    """What is known of a pass: its finished prompts, their audit, and its times once it ended."""

    records: tuple[RequestRecord, ...] = ()
    audit: dict[str, int] | None = None
    times: PassRecord | None = None


class Journal:
    """The file, opened at its end; `open_journal` makes it."""

    def __init__(self, file: IO[str], passes: Mapping[tuple[str, int], StoredPass]) -> None:
        self._file = file
        self._passes = dict(passes)
        self._last_sync = time.monotonic()

    def stored(self, label: str, number: int) -> StoredPass:
        """What an earlier process left of pass `number` of a condition."""
        return self._passes.get((label, number), StoredPass())

    def add(
        self,
        label: str,
        number: int,
        *,
        records: Sequence[RequestRecord],
        audit: Mapping[str, int] | None,
    ) -> None:
        """Append finished prompts with the slots that the auditor found in them, and sync."""
        self._write(
            {"condition": label, "pass": number, "records": plain(records), "audit": plain(audit)}
        )
        self.sync()

    def end_pass(self, label: str, number: int, times: PassRecord) -> None:
        """Append the end of a pass, and sync."""
        self._write({"condition": label, "pass": number, "outcome": plain(times)})
        self.sync()

    @property
    def is_sync_due(self) -> bool:
        """Whether the last time that lines were forced to disk is long enough ago."""
        return time.monotonic() - self._last_sync >= SYNC_EVERY_S

    def sync(self) -> None:
        """Force all lines to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._last_sync = time.monotonic()

    def close(self) -> None:
        """Force all lines to disk and close the file."""
        self.sync()
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")


def check_resumable(folder: Path, config: EvalConfig) -> None:
    """Refuse a folder with an unfinished evaluation of another configuration; names the keys."""
    path = folder / JOURNAL_FILE
    if path.is_file():
        lines = _whole_lines(path)
        if len(lines) > 1:
            _require_equal(path, _header(path, lines).get("settings"), _settings(config), "keys")


def open_journal(folder: Path, config: EvalConfig, *, inputs: Mapping[str, object]) -> Journal:
    """Open the journal of a run folder, new or left by a process that was killed.

    `inputs` are hashes of what the configuration only points to. Other settings or inputs than
    those of the journal are refused, by name.
    """
    path = folder / JOURNAL_FILE
    folder.mkdir(parents=True, exist_ok=True)
    lines = _whole_lines(path) if path.is_file() else []
    settings = _settings(config)
    if len(lines) < 2:  # nothing was decoded
        journal = Journal(path.open("w", encoding="utf8"), {})
        journal._write({"schema": 1, "settings": settings, "inputs": inputs})
        journal.sync()
        return journal
    header = _header(path, lines)
    _require_equal(path, header.get("settings"), settings, "keys")
    _require_equal(path, header.get("inputs"), json.loads(json.dumps(inputs)), "inputs")
    passes = _read_passes(path, lines[1:])
    file = path.open("r+", encoding="utf8")
    file.truncate(sum(len(line) + 1 for line in lines))  # without what a kill cut off
    file.seek(0, os.SEEK_END)
    return Journal(file, passes)


def _settings(config: EvalConfig) -> dict[str, object]:
    """Dotted keys and values, as JSON gives them back."""
    fields: dict[str, object] = json.loads(json.dumps(dataclasses.asdict(config)))
    return {
        key: value
        for key, value in _flat(fields, "")
        if key not in _NOT_COMPARED and key.partition(".")[0] not in _NOT_COMPARED
    }


def _flat(value: Mapping[str, object], prefix: str) -> Iterable[tuple[str, object]]:
    for key, member in value.items():
        if isinstance(member, Mapping) and member:
            yield from _flat(member, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", member


def _whole_lines(path: Path) -> list[bytes]:
    """Lines that end with a line break: a kill may have cut off the last."""
    return path.read_bytes().split(b"\n")[:-1]


def _header(path: Path, lines: Sequence[bytes]) -> Mapping[str, object]:
    header = _parse(path, 1, lines[0])
    if header.get("schema") != 1:
        raise IntegrityError(
            f"{path}: expected schema 1, got {header.get('schema')!r}; delete it or set "
            "output_dir=FOLDER."
        )
    return header


def _require_equal(path: Path, stored: object, ours: Mapping[str, object], what: str) -> None:
    theirs = stored if isinstance(stored, Mapping) else {}
    keys = sorted(k for k in theirs.keys() | ours.keys() if theirs.get(k) != ours.get(k))
    if keys:
        shown = "; ".join(f"{k} {theirs.get(k)} -> {ours.get(k)}" for k in keys[:_NUM_LISTED])
        more = f"; {len(keys) - _NUM_LISTED} more" if len(keys) > _NUM_LISTED else ""
        raise ConfigError(
            f"output_dir {str(path.parent)!r} holds an unfinished evaluation with other {what}: "
            f"{shown}{more}; repeat its command with the version that began it, or set "
            "output_dir=FOLDER. A key that is None there is newer than the evaluation."
        )


def _read_passes(path: Path, lines: Sequence[bytes]) -> dict[tuple[str, int], StoredPass]:
    passes: dict[tuple[str, int], StoredPass] = {}
    for number, line in enumerate(lines, start=2):
        fields = _parse(path, number, line)
        try:
            key = (fields["condition"], fields["pass"])
            known = passes.get(key, StoredPass())
            if "outcome" in fields:
                passes[key] = known._replace(times=read_pass(fields["outcome"]))
                continue
            records = tuple(read_record(stored) for stored in fields["records"])
            passes[key] = known._replace(
                records=(*known.records, *records), audit=add_audits(known.audit, fields["audit"])
            )
        except (KeyError, TypeError, AttributeError) as fault:
            raise IntegrityError(
                f"{path}, line {number}: not a line of this evaluation ({fault}); delete the file "
                "or set output_dir=FOLDER."
            ) from None
    return passes


def add_audits(
    ours: Mapping[str, int] | None, theirs: Mapping[str, int] | None
) -> dict[str, int] | None:
    """Slots by finding, added up; None if neither side was audited."""
    if ours is None or theirs is None:
        return dict(ours or theirs or {}) or None
    total = Counter(ours)
    total.update(theirs)
    return {name: total[name] for name in theirs}


def _parse(path: Path, number: int, line: bytes) -> dict:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise IntegrityError(
            f"{path}, line {number}: not a JSON object; delete the file or set output_dir=FOLDER."
        )
    return fields
