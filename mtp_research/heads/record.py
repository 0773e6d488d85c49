"""What head files say of themselves, read without weights, so that misfits show early.

`read_head_record` reads `head.json` of a head folder, and `check_head_fits` compares it with a
target. What a published checkpoint says of its own modules is `native.published_conventions`.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from mtp_research.config.training_schema import MAX_SPECULATIVE_TOKENS, HeadConfig
from mtp_research.policy.fields import ModuleSchedule
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.files import sha256_of

logger = logging.getLogger(__name__)

HEAD_FORMAT = 1
RECORD_FILE = "head.json"
DEFAULT_SCHEDULE: ModuleSchedule = "cycle"  # of heads whose record does not name one
CONVENTIONS = ("hidden_source", "recycle_norm", "concat_order")
HOLDS_FP8 = "holds_fp8"  # of the target that heads were trained on, where true
WEIGHTS_HASH = "weights_sha256"  # of the weights file beside `head.json`
_HASH = "_sha256"  # ending of facts that folders of older versions lack
_SWITCHES = ("zero_position_0", "owns_lm_head")
_UNKNOWN = {"module_schedule": (None,)}  # legal beside the choices of the configuration
_NUM_DIGITS = 12  # of a hash in a message


def head_name(folder: str | Path) -> str:
    """What tables and charts call the heads in a folder: its name, that of the run for `RUN/head`.

    Every training run calls the folder of its heads `head`.
    """
    folder = Path(folder)
    run = folder.parent.name
    return run if folder.name == "head" and run not in ("", "..") else folder.name


def refuse_run_folder(folder: Path, *, key: str = "spec.head") -> None:
    """Refuse the folder of a training run, whose heads lie in its folder `head`."""
    inside = folder / "head"
    if not (folder / RECORD_FILE).exists() and (inside / RECORD_FILE).is_file():
        raise ConfigError(
            f"{key} must be a folder of heads, got that of a run, {str(folder)!r}; "
            f"set {key}={inside}."
        )


def read_head_record(folder: Path, *, key: str = "spec.head") -> dict:
    """The parsed `head.json` with its mappings `spec`, `target` and `provenance`.

    Messages name the folder by the configuration key `key`.
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
    _check_spec(record["spec"], path=path)
    return record


def _check_spec(spec: Mapping[str, object], *, path: Path) -> None:
    """Refuse a value that is none of its field's: it would silently mean another convention."""
    choices = {
        item.name: item.metadata["choices"]
        for item in fields(HeadConfig)
        if "choices" in item.metadata
    }
    for name, value in {"num_mtp_modules": None, **spec}.items():
        expected = None
        if name in choices and value not in (*choices[name], *_UNKNOWN.get(name, ())):
            expected = f"one of {', '.join(choices[name])}"
        elif name in _SWITCHES and not isinstance(value, bool):
            expected = "true or false"
        elif name == "num_mtp_modules" and (
            type(value) is not int or not 1 <= value <= MAX_SPECULATIVE_TOKENS
        ):
            expected = f"an integer in 1..{MAX_SPECULATIVE_TOKENS}"
        if expected is not None:
            raise IntegrityError(
                f"{path}: spec.{name} must be {expected}, got {json.dumps(value)}; correct it, or "
                "write the head again."
            )


def check_weights(folder: Path, record: Mapping[str, object], *, file: str) -> None:
    """Compare the weights `file` of a head folder with the hash that its record holds.

    Heads of other projects and older versions have none: one line says that nothing was compared.
    """
    expected = record.get(WEIGHTS_HASH)
    if expected is None:
        line = "%s lacks %s; a changed weight would not be noticed"
        logger.warning(line, folder / RECORD_FILE, WEIGHTS_HASH)
    elif (got := sha256_of(folder / file)) != expected:
        raise IntegrityError(
            f"{folder / file} must have the sha256 {str(expected)[:_NUM_DIGITS]} of its "
            f"{RECORD_FILE}, got {got[:_NUM_DIGITS]}: the weights were changed or damaged; copy "
            "the head again."
        )


def conventions_phrase(spec: Mapping[str, object]) -> str:
    """How modules of this `spec` are to be run, as every table that names a head says it.

    For example `3 modules, reads post_norm, recycles post_norm, embedding_first, position 0 kept`.
    What the spec of an older file lacks has its default.
    """
    known = {item.name: item.default for item in fields(HeadConfig)} | dict(spec)
    count = known["num_mtp_modules"]
    return (
        f"{count} module{'s' * (count != 1)}, reads {known['hidden_source']}, "
        f"recycles {known['recycle_norm']}, {known['concat_order']}, "
        f"position 0 {'zeroed' if known['zero_position_0'] else 'kept'}"
    )


def check_head_fits(
    record: Mapping[str, Mapping[str, object]],
    *,
    folder: Path,
    target: Mapping[str, object],
    key: str = "spec.head",
) -> None:
    """Refuse a head that was trained for another target; `key` names `folder` in messages.

    `target` is what is known of it: `family`, `hidden_size`, `vocab_size`, and hashes
    (`..._sha256`), which are compared where both sides have them.
    """
    trained_for = record["target"]
    differences = [
        f"{name} {trained_for.get(name)!r} (this target: {value!r})"
        for name, value in target.items()
        if not name.endswith(_HASH) and trained_for.get(name) != value
    ]
    if differences:
        raise ConfigError(
            f"{key} must be a head of this target, {str(folder)!r} was trained for "
            f"{', '.join(differences)}; set {key} to a head trained on this model."
        )
    hashes = {name: trained_for[name] for name in target if name in trained_for}
    changed = [
        f"target.{name} {str(hashes[name])[:_NUM_DIGITS]} (this target: {str(now)[:_NUM_DIGITS]})"
        for name, now in target.items()
        if now is not None and hashes.get(name) not in (None, now)
    ]
    if changed:
        raise IntegrityError(
            f"{key} must be a head of this target, {folder / RECORD_FILE} has "
            f"{', '.join(changed)}: another model of the same sizes; set {key} to a head of this "
            "model, or start from this one in training, with head.path."
        )


def warn_of_rounding(record: Mapping[str, Mapping], *, folder: Path, holds_fp8: bool) -> None:
    """Warn of heads for a target of the same hashes whose weights were rounded otherwise.

    The hashes see no rounding, so that heads stay usable on a smaller copy of their target.
    """
    trained_on = bool(record["target"].get(HOLDS_FP8, False))
    if trained_on != holds_fp8:
        forms = ("plain weights", "FP8 weights")
        logger.warning(
            "%s was trained on a target with %s, this one has %s: texts stay the target's own, "
            "acceptance may differ",
            folder,
            forms[trained_on],
            forms[holds_fp8],
        )


def recorded_schedule(record: Mapping) -> ModuleSchedule | None:
    """The order of modules in training; None where its writer did not know it.

    Older files have it among the settings of the training, or nowhere, and count as `cycle`.
    """
    with suppress(KeyError, TypeError):
        return record["spec"]["module_schedule"]
    with suppress(KeyError, TypeError):
        return record["provenance"]["config"]["head"]["module_schedule"]
    return DEFAULT_SCHEDULE


def decoded_schedule(
    asked: ModuleSchedule | None, *, recorded: ModuleSchedule | None
) -> ModuleSchedule:
    """The order of modules that a head is decoded in: that of its training, where it is known.

    `asked` is `spec.module_schedule`; another order than the recorded one changes no text and costs
    acceptance, so it is refused.
    """
    if asked is not None and recorded is not None and asked != recorded:
        raise ConfigError(
            f"spec.module_schedule must be {recorded}, by the head's {RECORD_FILE}, got "
            f"{asked}: an order that it was not trained in; set spec.module_schedule=null."
        )
    return asked or recorded or DEFAULT_SCHEDULE
