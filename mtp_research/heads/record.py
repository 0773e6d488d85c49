"""`head.json`, the description of a head folder; read without torch, so that misfits show early."""

import json
from collections.abc import Mapping
from pathlib import Path

from mtp_research.errors import ConfigError, IntegrityError

HEAD_FORMAT = 1
RECORD_FILE = "head.json"


def read_head_record(folder: Path, *, key: str = "spec.head") -> dict:
    """The parsed `head.json` with its mappings `spec`, `target` and `provenance`.

    Args:
        folder: head folder.
        key: the configuration key that names it, for messages.

    Raises:
        ConfigError: the folder or the file is missing.
        IntegrityError: the file is not valid JSON, has another format number or lacks a part.
    """
    path = folder / RECORD_FILE
    if not path.is_file():
        raise ConfigError(
            f"{key} must be a folder of trained heads, {str(folder)!r} has no {RECORD_FILE}; "
            f"set {key}=PATH."
        )
    try:
        record = json.loads(path.read_text(encoding="utf8"))
    except json.JSONDecodeError as fault:
        raise IntegrityError(
            f"{path}, line {fault.lineno}: invalid JSON ({fault.msg}); write the head again."
        ) from None
    except (OSError, ValueError) as fault:
        raise IntegrityError(f"{path} cannot be read: {fault}.") from None
    if not isinstance(record, dict) or record.get("format") != HEAD_FORMAT:
        got = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise IntegrityError(f"{path}: head format must be {HEAD_FORMAT}, got {got!r}.")
    lacking = [part for part in ("spec", "target") if not isinstance(record.get(part), dict)]
    if lacking:
        raise IntegrityError(f"{path} must hold the mappings spec and target, lacks {lacking}.")
    return record


def check_head_fits(
    record: Mapping[str, Mapping[str, object]],
    *,
    folder: Path,
    target: Mapping[str, object],
    key: str = "spec.head",
) -> None:
    """Refuse a head that was trained for another target.

    Args:
        record: of `read_head_record`.
        folder: head folder, for the message.
        target: what is known of the target: `family`, `hidden_size`, `vocab_size`.
        key: the configuration key that names the folder.

    Raises:
        ConfigError: names every differing fact with both values.
    """
    trained_for = record["target"]
    differences = [
        f"{name} {trained_for.get(name)!r} (this target: {value!r})"
        for name, value in target.items()
        if trained_for.get(name) != value
    ]
    if differences:
        raise ConfigError(
            f"{key} must be a head of this target, {str(folder)!r} was trained for "
            f"{', '.join(differences)}; set {key} to a head trained on this model."
        )
