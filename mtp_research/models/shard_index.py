"""Which file of a checkpoint folder holds which tensor, checked before anything opens a file."""

import json
from pathlib import Path

from mtp_research.errors import IntegrityError

INDEX_FILE = "model.safetensors.index.json"
_NUM_LISTED = 3


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """File name of every tensor, by the folder's index; None for a folder without one.

    Raises:
        IntegrityError: the index is damaged or names files outside the folder.
    """
    path = folder / INDEX_FILE
    if not path.is_file():
        return None
    try:
        files = json.loads(path.read_text(encoding="utf8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise IntegrityError(
            f"{path} must be an index with a weight_map, got {fault!r}."
        ) from fault
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise IntegrityError(f"{path}: weight_map must give a file name for each tensor.")
    outside = sorted({file for file in files.values() if Path(file).name != file})
    if outside:
        raise IntegrityError(
            f"{path} must name files of its own folder, got {outside[:_NUM_LISTED]}; refused."
        )
    return files
