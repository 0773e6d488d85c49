"""What head files say of themselves, read without weights, so that misfits show early.

`read_head_record` reads `head.json` of a head folder, and `check_head_fits` compares it with a
target. `published_conventions` takes the same from a checkpoint with modules of its own: from its
configuration and index alone, so that `head.init=native` needs no typing. What was typed stays as
it is, and `init.init_heads` refuses what contradicts the family.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path

from mtp_research.config.training_schema import HeadConfig
from mtp_research.models.loading.source import CONFIG_FILE
from mtp_research.runtime.errors import ConfigError, IntegrityError

HEAD_FORMAT = 1
RECORD_FILE = "head.json"
CONVENTIONS = ("hidden_source", "recycle_norm", "concat_order")
_HASH = "_sha256"  # ending of facts that folders of older versions lack
_NUM_DIGITS = 12  # of a hash in a message


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
    return record


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


def adopt_conventions(head: HeadConfig, *, path: str, typed: Collection[str]) -> dict[str, object]:
    """Set what a checkpoint's own modules need, in place, where nobody has set it.

    `head` has `init=native`; what is not its default or is among the `typed` keys counts as set. A
    `path` (`model.path`) that is no folder here, such as a hub id, is left to `init_heads`. Returns
    the keys that were changed, with their new values.
    """
    folder = Path(path)
    if not (folder / CONFIG_FILE).is_file():
        return {}
    plain = {item.name: item.default for item in fields(HeadConfig)}
    changed = {
        name: value
        for name, value in published_conventions(folder).items()
        if name not in typed and getattr(head, name) == plain[name] and value != plain[name]
    }
    for name, value in changed.items():
        setattr(head, name, value)
    return changed


def published_conventions(folder: Path) -> dict[str, object]:
    """Keys of `head` and their values for the modules in a checkpoint folder.

    `num_mtp_modules` is left out where the folder holds none.
    """
    # Here, not above: they import torch, which `head.json` does not need.
    from mtp_research.heads.native import native_keys, num_native_modules, read_index
    from mtp_research.models.families import FAMILIES
    from mtp_research.models.loading.load_weights import loading, read_config

    with loading(str(folder)):
        published = read_config(str(folder))
    family = FAMILIES[published.family_name]
    found: dict[str, object] = {name: getattr(family, name) for name in CONVENTIONS}
    num_layers = published.config.get_text_config().num_hidden_layers
    keys = native_keys(read_index(folder).files, family.native, num_layers=num_layers)
    num_modules = num_native_modules(keys, family.native)
    return found | ({"num_mtp_modules": num_modules} if num_modules else {})
