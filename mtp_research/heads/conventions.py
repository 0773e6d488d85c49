"""`head.init=native` without typing how a family runs its modules: the settings from its files.

Between command line and model: nothing but the configuration and the index of a checkpoint is read.
What was typed stays as it is, and `init.init_heads` refuses what contradicts the family.

Letter: N MTP modules.
"""

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path

from mtp_research.config import HeadConfig
from mtp_research.heads.native_names import native_keys, num_native_modules
from mtp_research.heads.tensor_index import read_index
from mtp_research.models.families import FAMILIES
from mtp_research.models.loading import loading, read_config
from mtp_research.models.source import CONFIG_FILE

CONVENTIONS = ("hidden_source", "recycle_norm", "concat_order")


def adopt_conventions(head: HeadConfig, *, path: str, typed: Collection[str]) -> dict[str, object]:
    """Set what a checkpoint's own modules need, in place, where nobody has set it.

    Args:
        head: with `init=native`; a value other than the default counts as set.
        path: `model.path`. What is no folder here, such as a hub id, is left to `init_heads`.
        typed: keys of `head` that the command line names.

    Returns:
        The keys that were changed, with their new values.

    Raises:
        ConfigError: the model's type is not supported.
        IntegrityError: its configuration or index is damaged.
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

    `num_mtp_modules` (N) is left out where the folder holds none.

    Raises:
        ConfigError: the model's type is not supported.
        IntegrityError: its configuration or index is damaged.
    """
    with loading(str(folder)):
        published = read_config(str(folder))
    family = FAMILIES[published.family_name]
    found: dict[str, object] = {name: getattr(family, name) for name in CONVENTIONS}
    num_layers = published.config.get_text_config().num_hidden_layers
    keys = native_keys(read_index(folder).files, family.native, num_layers=num_layers)
    num_modules = num_native_modules(keys, family.native)
    return found | ({"num_mtp_modules": num_modules} if num_modules else {})
