"""The target's hidden states of packed rows on disk, so that training can skip its forward pass.

    folder/index.json                  header, and size and sha256 of every shard written so far
    folder/shard_000000.safetensors    tensors [rows of the shard, S, D] by name

The header says what the numbers depend on: another target, tokenizer, chat template, dtype, norm
convention, row length or set of documents is refused by name, because nothing else would show it.
A shard is written beside its place, synced and renamed, and then entered in the index, which is
replaced as a whole; a stopped writer goes on with the shards that are missing.

Letters: S row length, D hidden.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.files import sha256_of, sync_to_disk, write_atomically, write_tensors

SCHEMA = 1
SHARD_ROWS = 64
_INDEX = "index.json"


@dataclass(frozen=True)
class CacheHeader:
    """What cached hidden states depend on."""

    target_sha256: str  # of the target's weight files
    tokenizer_sha256: str  # of `tokenizer.json`; `none` without one
    chat_template_sha256: str  # of the template's text; `none` without one
    dtype: str  # of the tensors, such as `torch.float32`
    hidden_source: str  # `post_norm` (one tensor) or `pre_norm` (both sides of the final norm)
    seq_len: int  # S
    num_rows: int  # packed rows
    documents_sha256: str  # of the packed tokens and their documents
    schema: int = SCHEMA  # of the files
    # of the libraries that computed the numbers; recorded, and not compared
    versions: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def num_shards(self) -> int:
        """Shards of `SHARD_ROWS` rows, the last one shorter."""
        return -(-self.num_rows // SHARD_ROWS)


def cached_bytes_per_token(hidden_size: int, *, dtype: torch.dtype, hidden_source: str) -> int:
    """Bytes of a token's cached hidden states; `hidden_source` as in `CacheHeader`."""
    return hidden_size * dtype.itemsize * (1 if hidden_source == "post_norm" else 2)


class HiddenCacheWriter:
    """Writes the shards that the cache in `folder` (made if missing) still lacks."""

    def __init__(self, folder: Path, *, header: CacheHeader) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._header = folder, header
        self._shards: dict[str, dict[str, object]] = {}
        if (folder / _INDEX).exists():
            saved, self._shards = _read_index(folder)
            _check_header(saved, expected=header, folder=folder)
            origins = [one.versions.get("imported_from") for one in (saved, header)]
            if origins[0] != origins[1]:  # what is there would be kept, whatever it is
                raise IntegrityError(
                    f"{folder}: cached hidden states were imported from {origins[0]}, this run "
                    f"imports from {origins[1]}; set data.hidden_cache to another folder."
                )

    def missing(self) -> list[int]:
        """Numbers of the shards that are not written yet, or whose file has gone."""
        return _missing(self._folder, header=self._header, entered=self._shards)

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write one shard, `[rows of the shard, S, D]` by name, and enter it in the index."""
        name = shard_name(number)
        path, unfinished = self._folder / name, self._folder / f".{name}.writing"
        content = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        write_tensors(content, unfinished)
        sync_to_disk(unfinished)
        facts = {"bytes": unfinished.stat().st_size, "sha256": sha256_of(unfinished)}
        unfinished.replace(path)
        self._shards[name] = facts
        index = {"header": dataclasses.asdict(self._header), "shards": self._shards}
        write_atomically(self._folder / _INDEX, json.dumps(index, indent=1))
        sync_to_disk(self._folder)


class HiddenCache:
    """A whole cache, read row by row; a shard is checked by its sha256 when it is first used."""

    def __init__(self, folder: Path, *, header: CacheHeader) -> None:
        if not (folder / _INDEX).is_file():
            raise ConfigError(
                f"data.hidden_cache must be a folder of cached hidden states, {str(folder)!r} has "
                f"no {_INDEX}; write it with the same command and task=cache."
            )
        saved, self._shards = _read_index(folder)
        _check_header(saved, expected=header, folder=folder)
        if lacking := _missing(folder, header=header, entered=self._shards):
            raise IntegrityError(
                f"{folder}: {len(lacking)} of {header.num_shards} shards are missing, the first "
                f"{shard_name(lacking[0])}; go on with task=cache."
            )
        self._folder = folder
        self._open: dict[int, safe_open] = {}

    def rows(self, name: str, indices: Sequence[int]) -> Tensor:
        """Rows `[len(indices), S, D]` of a tensor, on the CPU."""
        parts = [
            self._shard(index // SHARD_ROWS).get_slice(name)[index % SHARD_ROWS]
            for index in indices
        ]
        return torch.stack(parts)

    def open_shard(self, index: int) -> bool:
        """Check and open the shard that holds row `index`; whether it was closed before."""
        was_closed = index // SHARD_ROWS not in self._open
        self._shard(index // SHARD_ROWS)
        return was_closed

    def _shard(self, number: int) -> safe_open:
        if number not in self._open:
            path = self._folder / shard_name(number)
            facts = self._shards[path.name]
            if path.stat().st_size != facts["bytes"] or sha256_of(path) != facts["sha256"]:
                raise IntegrityError(
                    f"{path}: size or content differs from the index; remove it and run task=cache."
                )
            try:
                self._open[number] = safe_open(path, framework="pt")
            except SafetensorError as fault:
                raise IntegrityError(f"cannot read {path}: {fault}") from fault
        return self._open[number]


def _missing(folder: Path, *, header: CacheHeader, entered: Mapping[str, object]) -> list[int]:
    names = [shard_name(number) for number in range(header.num_shards)]
    is_there = [name in entered and (folder / name).is_file() for name in names]
    return [number for number, found in enumerate(is_there) if not found]


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard_{number:06d}.safetensors"


def files_sha256(paths: Sequence[Path]) -> str:
    """One sha256 over the names and contents of files, `none` without any."""
    if not paths:
        return "none"
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def _read_index(folder: Path) -> tuple[CacheHeader, dict[str, dict[str, object]]]:
    path = folder / _INDEX
    try:
        index = json.loads(path.read_text(encoding="utf8"))
        return CacheHeader(**index["header"]), dict(index["shards"])
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise IntegrityError(
            f"{path}: not an index of cached hidden states ({fault}); remove the folder and run "
            "task=cache."
        ) from fault


def _check_header(saved: CacheHeader, *, expected: CacheHeader, folder: Path) -> None:
    for item in dataclasses.fields(CacheHeader):
        old, new = getattr(saved, item.name), getattr(expected, item.name)
        if item.compare and old != new:
            raise IntegrityError(
                f"{folder}: cached hidden states have {item.name} {old!r}, this run has {new!r}; "
                "set data.hidden_cache to another folder and run task=cache."
            )
