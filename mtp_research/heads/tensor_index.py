"""Tensors of a checkpoint folder by name, read from the shards that hold them and no others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtp_research.errors import IntegrityError
from mtp_research.models.shard_index import INDEX_FILE, read_weight_map

SINGLE_FILE = "model.safetensors"
_NUM_LISTED = 3


@dataclass(frozen=True)
class TensorIndex:
    """Which file of a folder holds which tensor.

    Attributes:
        folder: checkpoint folder.
        files: file name of every tensor.
    """

    folder: Path
    files: Mapping[str, str]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors on the CPU as they are stored; every shard that is needed is opened once.

        Raises:
            IntegrityError: a shard is missing or damaged, or lacks a tensor that the index names.
        """
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        tensors: dict[str, Tensor] = {}
        for file, wanted in sorted(by_file.items()):
            path = self.folder / file
            if not path.is_file():
                raise IntegrityError(
                    f"{self.folder} must hold {file}, which its index names for {wanted[0]} and "
                    f"{len(wanted) - 1} more tensors; fetch the model again."
                )
            try:
                with safe_open(path, framework="pt") as shard:
                    lacking = sorted(set(wanted) - set(shard.keys()))
                    if lacking:
                        raise IntegrityError(
                            f"{path} must hold the tensors that the index names for it, lacks "
                            f"{lacking[:_NUM_LISTED]}; fetch the model again."
                        )
                    tensors |= {name: shard.get_tensor(name) for name in wanted}
            except (OSError, SafetensorError) as fault:
                raise IntegrityError(f"cannot read {path}: {fault}") from fault
        return tensors


def read_index(folder: Path) -> TensorIndex:
    """The tensors that a checkpoint folder promises, without reading one.

    Raises:
        IntegrityError: no weights, an invalid index, or one that names files outside the folder.
    """
    files = read_weight_map(folder)
    if files is None:
        return TensorIndex(folder, dict.fromkeys(_names_in(folder / SINGLE_FILE), SINGLE_FILE))
    return TensorIndex(folder, files)


def _names_in(path: Path) -> list[str]:
    if not path.is_file():
        raise IntegrityError(
            f"{path.parent} must be a model folder, with {INDEX_FILE} or {SINGLE_FILE}."
        )
    try:
        with safe_open(path, framework="pt") as shard:
            return list(shard.keys())
    except (OSError, SafetensorError) as fault:
        raise IntegrityError(f"cannot read {path}: {fault}") from fault
