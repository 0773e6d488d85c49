"""MTP modules of a checkpoint on the hub: its config, its index, and the shards that hold modules.

The other shards are the target's, which is loaded elsewhere or not at all.
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from mtp_research.errors import ConfigError
from mtp_research.heads.native_names import native_keys
from mtp_research.heads.tensor_index import INDEX_FILE, SINGLE_FILE, read_index
from mtp_research.models.source import CONFIG_FILE, looks_like_hub_id
from mtp_research.models.target import Target


def native_folder(path: str | Path, target: Target) -> Path:
    """The folder with the MTP modules of `path`; those of a hub id are fetched into its cache.

    Args:
        path: a folder, which is handed back, or a hub id.
        target: the model they belong to, whose family says which tensors are modules.

    Raises:
        ConfigError: a hub id that can be neither fetched nor found in the cache.
        IntegrityError: its index is damaged.
    """
    name = str(path)
    if Path(path).exists() or not looks_like_hub_id(name):
        return Path(path)
    folder = _fetch(name, [CONFIG_FILE, INDEX_FILE])
    if not (folder / INDEX_FILE).is_file():
        return _fetch(name, [CONFIG_FILE, SINGLE_FILE])
    index, layout = read_index(folder), target.family.native
    keys = native_keys(index.files, layout, num_layers=target.config.num_hidden_layers)
    shards = sorted({index.files[key] for key in keys})
    return _fetch(name, shards, required=shards) if shards else folder


def _fetch(name: str, files: list[str], *, required: list[str] | None = None) -> Path:
    """Folder of a snapshot with these files, of which the required ones must be there."""
    reason = "the hub is offline or out of reach"
    try:
        folder = Path(snapshot_download(name, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, OSError) as fault:
        reason = next(iter(str(fault).splitlines()), type(fault).__name__)
    else:
        missing = [file for file in required or [] if not (folder / file).is_file()]
        if not missing:
            return folder
        reason = f"the cache lacks {missing} and {reason}"
    raise ConfigError(
        f"MTP modules of {name!r} (no local path from {Path.cwd()}) cannot be fetched from the "
        f"hub: {reason}; download the model where there is a network and set the path to its "
        "folder."
    )
