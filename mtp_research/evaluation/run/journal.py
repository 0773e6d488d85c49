"""What the folder of an evaluation holds: finished prompts while it runs, its results at the end.

`finished.jsonl` in the run folder: a header line with everything that the figures depend on, then
one line per group of finished prompts and one per finished pass. Lines are appended and forced to
disk about once a second, between steps and outside the clock. When `results.json` is written the
file is deleted: it holds nothing more. Each line ends with its checksum; a line that a kill cut
off, that was changed or that is there twice is dropped, and its prompts are decoded again.

A pass that was interrupted has no times, because they would be of two processes.

An evaluation of other settings or inputs, finished or not, is refused; `overwrite=true` removes it,
`results.json` and journal first, so that no kill leaves results beside the record of another run.
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

from mtp_research.config.schema import EvalConfig
from mtp_research.decode.stats import RequestRecord
from mtp_research.decode.verify.profile_reader import PROFILE_FILE
from mtp_research.evaluation.report.profile import GOLDEN_FILE
from mtp_research.evaluation.report.stored import (
    GENERATIONS_FILE,
    PACKED_FILE,
    RESULTS_FILE,
    Report,
    plain,
    read_checked,
    results_file,
    stored_config,
)
from mtp_research.evaluation.report.terminal import TABLE_FILE
from mtp_research.evaluation.stats.outcome import PassRecord, PromptEntry
from mtp_research.evaluation.stats.summary import read_pass, read_record
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.files import write_atomically
from mtp_research.runtime.provenance import RUN_FILES, redact_tree

logger = logging.getLogger(__name__)

JOURNAL_FILE = "finished.jsonl"
SYNC_EVERY_S = 1.0
_SCHEMA = 2  # lines of 1 have no checksum
_CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"\}$')
_NOT_COMPARED = ("output_dir", "overwrite", "verbose", "logger")
_GONE = {"prompts.name"}  # keys that only an earlier version's evaluations have
_NUM_LISTED = 8
_OTHER = "set output_dir=FOLDER, or overwrite=true to replace it"


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

    def end_pass(
        self, label: str, number: int, times: PassRecord, *, num_records: int | None = None
    ) -> None:
        """Append the end of a pass, and sync; `num_records`: how many turns it has in all."""
        end = {"condition": label, "pass": number, "outcome": plain(times)}
        self._write(end | ({} if num_records is None else {"num_records": num_records}))
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
        text = json.dumps(line, allow_nan=False, separators=(",", ":"))
        self._file.write(f'{text[:-1]},"crc32":"{zlib.crc32(text.encode()):08x}"}}\n')


def check_resumable(folder: Path, config: EvalConfig) -> None:
    """Refuse a folder with an evaluation of another configuration; names the keys."""
    lines = _whole_lines(folder)
    if config.overwrite:
        return
    if len(lines) > 1:
        _require_equal(folder, _header(folder, lines).get("settings"), _settings(config), "keys")
    elif results_file(folder).is_file():
        theirs = _compared(stored_config(results_file(folder)))
        _require_equal(folder, theirs, _settings(config), "keys", state="a finished")


def finished_report(
    folder: Path, config: EvalConfig, *, inputs: Mapping[str, object]
) -> Report | None:
    """The results that the same command left in the folder, None if there is work to do.

    `inputs` are hashes of what the configuration only points to. An evaluation of other settings or
    inputs is refused, by name, unless it is to be replaced. Changes nothing.
    """
    check_resumable(folder, config)
    if config.overwrite:
        return None
    lines = _whole_lines(folder)
    if len(lines) > 1:
        _require_equal(folder, _header(folder, lines).get("inputs"), inputs, "inputs")
        return None
    if not results_file(folder).is_file():
        return None
    report = read_checked(results_file(folder))
    theirs = {
        "prompts": prompts_sha256(report.prompts),
        "heads": report.run.get("heads"),
        "target": report.run.get("target"),
        **cast(Mapping[str, object], report.run.get("inputs") or {}),
    }
    _require_equal(folder, theirs, inputs, "inputs", state="a finished")
    if config.model.tp_plan != "none":  # a rank that has no results would wait for this one
        raise ConfigError(
            f"output_dir {str(folder)!r} holds this evaluation, finished; set output_dir=FOLDER, "
            "or overwrite=true to run it anew."
        )
    return report


def clear_folder(folder: Path, config: EvalConfig, *, inputs: Mapping[str, object]) -> None:
    """Remove what `overwrite` replaces; an unfinished evaluation of this very kind is kept."""
    if not config.overwrite:
        return
    try:
        kept = dataclasses.replace(config, overwrite=False)
        is_begun = len(_whole_lines(folder)) > 1
        if is_begun and finished_report(folder, kept, inputs=inputs) is None:
            return
    except (ConfigError, IntegrityError):
        pass
    ours = (RESULTS_FILE, PACKED_FILE, JOURNAL_FILE, GENERATIONS_FILE, TABLE_FILE)
    for name in (*ours, PROFILE_FILE, GOLDEN_FILE, *RUN_FILES):
        (folder / name).unlink(missing_ok=True)


def prompts_sha256(prompts: Iterable[PromptEntry]) -> str:
    """Hash of what is asked, in order."""
    asked = [(prompt.question_id, prompt.sha256) for prompt in prompts]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def open_journal(
    folder: Path,
    config: EvalConfig,
    *,
    inputs: Mapping[str, object],
    prompt_ids: Collection[str] | None = None,
) -> Journal:
    """Open the journal of a run folder, new or left by a process that was killed.

    Other settings or inputs (see `finished_report`) than those of the journal are refused, by name,
    and so are records of turns whose request ids are not among `prompt_ids`.
    """
    path = folder / JOURNAL_FILE
    folder.mkdir(parents=True, exist_ok=True)
    lines = _whole_lines(folder)
    settings = _settings(config)
    if len(lines) < 2:  # nothing was decoded
        journal = Journal(path.open("w", encoding="utf8"), {})
        journal._write({"schema": _SCHEMA, "settings": settings, "inputs": inputs})
        journal.sync()
        return journal
    header = _header(folder, lines)
    _require_equal(folder, header.get("settings"), settings, "keys")
    _require_equal(folder, header.get("inputs"), inputs, "inputs")
    rows = _read_rows(path, lines, is_checked=header["schema"] == _SCHEMA)
    kept = _complete(rows, None if prompt_ids is None else frozenset(prompt_ids), path=path)
    if len(kept) < len(lines) - 1:
        logger.warning(
            "%s: %d lines, changed or doubled, are dropped; what they held is decoded again",
            path,
            len(lines) - 1 - len(kept),
        )
    # Without what a kill cut off, too.
    write_atomically(path, "".join(f"{one.decode()}\n" for one in (lines[0], *kept)))
    return Journal(path.open("a", encoding="utf8"), _passes(kept.values()))


def _settings(config: EvalConfig) -> dict[str, object]:
    return _compared(dataclasses.asdict(config))


def _compared(config: Mapping[str, object]) -> dict[str, object]:
    """Dotted keys and values, as JSON gives them back, without secrets."""
    fields: dict[str, object] = json.loads(json.dumps(redact_tree(dict(config))))
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


def _whole_lines(folder: Path) -> list[bytes]:
    """Lines of the journal that end with a line break: a kill may have cut off the last."""
    path = folder / JOURNAL_FILE
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def _header(folder: Path, lines: Sequence[bytes]) -> Mapping[str, object]:
    path = folder / JOURNAL_FILE
    header = _parse(path, 1, lines[0])
    if header.get("schema") not in (1, _SCHEMA):
        raise IntegrityError(
            f"{path}: expected schema {_SCHEMA}, got {header.get('schema')!r}; {_OTHER}."
        )
    if header["schema"] == _SCHEMA and not _is_whole(lines[0]):
        raise IntegrityError(f"{path}, line 1: not as it was written (checksum); {_OTHER}.")
    return header


def _is_whole(line: bytes) -> bool:
    """Whether a line is what `Journal` wrote, by its checksum."""
    found = _CHECKSUM.search(line)
    return found is not None and int(found[1], 16) == zlib.crc32(line[: found.start()] + b"}")


def _require_equal(
    folder: Path,
    stored: object,
    ours: Mapping[str, object],
    what: str,
    *,
    state: str = "an unfinished",
) -> None:
    theirs = redact_tree(stored) if isinstance(stored, Mapping) else {}
    assert isinstance(theirs, dict), "a copy of a mapping is one"
    ours = json.loads(json.dumps(ours))
    known = (theirs.keys() | ours.keys()) - _GONE
    keys = sorted(k for k in known if theirs.get(k) != ours.get(k))
    if keys:
        shown = "; ".join(f"{k} {theirs.get(k)} -> {ours.get(k)}" for k in keys[:_NUM_LISTED])
        more = f"; {len(keys) - _NUM_LISTED} more" if len(keys) > _NUM_LISTED else ""
        is_newer = any(key not in theirs for key in keys)
        newer = (
            " with the version that began it, which has not all of these keys" if is_newer else ""
        )
        raise ConfigError(
            f"output_dir {str(folder)!r} holds {state} evaluation with other {what}: "
            f"{shown}{more}; repeat its command{newer}, or {_OTHER}."
        )


class _Row(NamedTuple):
    """A line of the journal: its pass, and either finished prompts or the pass's end."""

    key: tuple[str, int]
    records: tuple[RequestRecord, ...]
    audit: dict[str, int] | None
    times: PassRecord | None
    num_records: int | None = None  # of the whole pass; None in lines from before it was kept


def _read_rows(path: Path, lines: Sequence[bytes], *, is_checked: bool) -> dict[bytes, _Row]:
    """The rows behind the header, by line, but for those that are damaged."""
    rows: dict[bytes, _Row] = {}
    for number, line in enumerate(lines[1:], start=2):
        if is_checked and not _is_whole(line):
            continue
        fields = _parse(path, number, line)
        try:
            is_end = "outcome" in fields
            records = () if is_end else map(read_record, fields["records"])
            rows[line] = _Row(
                key=(fields["condition"], fields["pass"]),
                records=tuple(records),
                audit=None if is_end else fields["audit"],
                times=read_pass(fields["outcome"]) if is_end else None,
                num_records=fields.get("num_records"),
            )
        except (KeyError, TypeError, AttributeError) as fault:
            raise IntegrityError(
                f"{path}, line {number}: not a line of this evaluation ({fault}); {_OTHER}."
            ) from None
    return rows


def _complete(
    rows: Mapping[bytes, _Row], prompt_ids: frozenset[str] | None, *, path: Path
) -> dict[bytes, _Row]:
    """The rows that say something new; no pass has ended that lacks one of its turns."""
    known: dict[tuple[str, int], set[str]] = {}
    ended: set[tuple[str, int]] = set()
    kept: dict[bytes, _Row] = {}
    for line, row in rows.items():
        ids = [record.request_id for record in row.records]
        unknown = [] if prompt_ids is None else sorted(set(ids) - prompt_ids)
        if unknown:
            raise IntegrityError(
                f"{path}: holds prompt {unknown[0]!r}, which is not asked here; {_OTHER}."
            )
        seen = known.setdefault(row.key, set())
        if len({*ids, *seen}) < len(ids) + len(seen) or (row.times and row.key in ended):
            continue
        seen.update(ids)
        if row.times:
            ended.add(row.key)
        kept[line] = row

    def is_lacking(row: _Row) -> bool:
        if row.times is None or prompt_ids is None:
            return False
        ids = known[row.key]
        # Not every turn of a conversation is asked; older lines are of prompts of one turn.
        return ids != prompt_ids if row.num_records is None else len(ids) != row.num_records

    return {line: row for line, row in kept.items() if not is_lacking(row)}


def _passes(rows: Iterable[_Row]) -> dict[tuple[str, int], StoredPass]:
    passes: dict[tuple[str, int], StoredPass] = {}
    for row in rows:
        known = passes.get(row.key, StoredPass())
        passes[row.key] = StoredPass(
            (*known.records, *row.records),
            add_audits(known.audit, row.audit),
            row.times or known.times,
        )
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
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise IntegrityError(f"{path}, line {number}: not a JSON object; {_OTHER}.")
    return fields
