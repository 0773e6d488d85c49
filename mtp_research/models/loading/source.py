"""Where a target comes from: a folder, a GGUF file, the hub's cache, or the hub; without torch.

`check_source` runs before anything heavy is imported, so that a mistyped path costs a second.
Neither torch nor transformers is imported here, and huggingface_hub only for hub ids.
"""

import hashlib
import importlib.util
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.runtime.files import user_cache

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
GGUF_FACTS = "gguf.json"  # in the folder of a target that was unpacked from a GGUF file
_GGUF_FORM = 2  # of an unpacked folder; 2: the tokenizer puts the begin token before a text
_HUB_TIMEOUT_S = 3.0
_NUM_HUB_ID_PARTS = 2  # ORGANISATION/NAME
_NUM_LISTED = 3
_HASHED_PIECE, _NUM_HASHED_PIECES = 1 << 18, 256  # bytes, and about so many pieces of a model
# Fields of every family, and values that no published model is outside of.
_RANGES = {
    "head_dim": (1, 1 << 16),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (0, 1 << 24),
    "max_position_embeddings": (1, 1 << 24),
    "num_attention_heads": (1, 1 << 16),
    "num_hidden_layers": (1, 1 << 14),
    "num_key_value_heads": (1, 1 << 16),
    "vocab_size": (1, 1 << 26),
}
_GGUF_MAGIC = b"GGUF"
_SINGLE_FILE = "model.safetensors"
_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")
_MAX_INDEX_BYTES = 1 << 26
_MAX_INDEX_ENTRIES = 400_000  # of the largest published model, 140,000


class HubId(NamedTuple):
    """A model on the hub: ORGANISATION/NAME, or ORGANISATION/NAME@REVISION to pin it."""

    name: str
    revision: str | None  # branch, tag or commit; None for the main branch


class ModelSizes(NamedTuple):
    """Sizes of the text model that heads must share."""

    hidden_size: int
    vocab_size: int


def check_source(path: str, *, key: str = "model.path") -> Path | None:
    """Fail fast when `path` is neither a model folder, nor a cached hub id, nor reachable.

    Args:
        path: folder in Hugging Face format, a `.gguf` file, or a hub id (`HubId`).
        key: that the path was set by, for the message.

    Returns:
        The model's `config.json`; None for a hub id that is still to be downloaded and for a file
        that is still to be unpacked.
    """
    if is_gguf(path):
        return _check_gguf(Path(path), key)
    folder = Path(path)
    if folder.exists():
        if not (folder / CONFIG_FILE).is_file():
            raise ConfigError(
                f"{key} must be a folder with a {CONFIG_FILE}, or a .gguf file, got {path!r}; "
                f"set {key} to a model folder."
            )
        _check_ranges(folder / CONFIG_FILE)
        return folder / CONFIG_FILE
    cached = local_file(path, CONFIG_FILE)
    if cached is None and not looks_like_hub_id(path):
        raise ConfigError(
            f"{key} must be a local folder or a hub id ORGANISATION/NAME[@REVISION], {path!r} does "
            f"not exist (from {Path.cwd()}); set {key}=PATH."
        )
    if cached is None and not _hub_answers():
        raise ConfigError(
            f"{key} {path!r} is no local path (from {Path.cwd()}), is not in the hub cache, and "
            "the hub is offline or out of reach; download the model where there is a network and "
            f"set {key} to its folder."
        )
    if cached is not None:
        _check_ranges(cached)
    return cached


def is_gguf(path: str) -> bool:
    """Whether a path names a GGUF file, there or not."""
    return path.endswith(".gguf") and not Path(path).is_dir()


def gguf_folder(path: str) -> Path:
    """Where a GGUF file is unpacked: in the user's cache, by its place, size and time."""
    file = Path(path).resolve()
    facts = file.stat()
    name = f"{file}:{facts.st_size}:{facts.st_mtime_ns}:{_GGUF_FORM}"
    return user_cache("gguf") / f"{file.stem}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _check_gguf(file: Path, key: str) -> Path | None:
    if not file.is_file():
        raise ConfigError(
            f"{key} must be a file that exists, {str(file)!r} does not (from {Path.cwd()}); "
            f"set {key}=PATH."
        )
    with file.open("rb") as start:
        magic = start.read(len(_GGUF_MAGIC))
    if magic != _GGUF_MAGIC:
        raise IntegrityError(
            f"{key} {str(file)!r} must begin with {_GGUF_MAGIC!r}, got {magic!r}; fetch it again."
        )
    if importlib.util.find_spec("gguf") is None:
        raise EnvironmentFault(
            f"{key} {str(file)!r} needs the package gguf; install mtp-research[gguf]."
        )
    return local_file(str(file), CONFIG_FILE)


def _check_ranges(config_file: Path) -> None:
    """Refuse sizes that no model has, before anything is built from them."""
    for name, value in _text_fields(config_file).items():
        low, high = _RANGES.get(name, (None, None))
        if low is None or high is None or not isinstance(value, bool | float | int | str):
            continue  # lists hold a value for each layer
        if type(value) is not int or not low <= value <= high:
            raise IntegrityError(
                f"{config_file} must have {name} in {low}..{high}, got {value!r}; fetch the model "
                "again."
            )


def _text_fields(config_file: Path) -> Mapping[str, object]:
    """Fields of the text model in a `config.json`."""
    try:
        config = json.loads(config_file.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise IntegrityError(
            f"{config_file} must be a model's configuration in JSON, got {fault}; "
            "set model.path to a model folder."
        ) from None
    text = config.get("text_config", config) if isinstance(config, Mapping) else {}
    return text if isinstance(text, Mapping) else {}


def read_sizes(config_file: Path) -> ModelSizes:
    """Hidden size and vocabulary of the text model that a `config.json` describes."""
    text = _text_fields(config_file)
    sizes = [text.get(name) for name in ModelSizes._fields]
    hidden_size, vocab_size = sizes
    if not isinstance(hidden_size, int) or not isinstance(vocab_size, int):
        raise IntegrityError(
            f"{config_file} must hold {' and '.join(ModelSizes._fields)}, got {sizes}; "
            "set model.path to a model folder."
        )
    return ModelSizes(hidden_size, vocab_size)


def local_file(path: str, name: str) -> Path | None:
    """A model's file in its folder or in the hub's cache; None where it is in neither."""
    folder = gguf_folder(path) if is_gguf(path) and Path(path).is_file() else Path(path)
    file = folder / name
    if file.is_file():
        return file
    if Path(path).exists() or not looks_like_hub_id(path):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    hub_id = split_hub_id(path)
    try:
        found = try_to_load_from_cache(hub_id.name, name, revision=hub_id.revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def weights_sha256(path: str) -> str | None:
    """Hash of pieces all over a model's weight files, by which one is told from its fine-tuned kin.

    A model of some tens of megabytes is read whole. None without a file, as for drawn weights.
    """
    config_file = local_file(path, CONFIG_FILE)
    files = [] if config_file is None else sorted(config_file.parent.glob("*.safetensors"))
    digest, sizes = hashlib.sha256(), [file.stat().st_size for file in files]
    step = max(_HASHED_PIECE, sum(sizes) // _NUM_HASHED_PIECES)
    for file, size in zip(files, sizes, strict=True):
        digest.update(f"{size} ".encode())
        with file.open("rb") as weights:
            for start in range(0, size, step):
                weights.seek(start)
                digest.update(weights.read(_HASHED_PIECE))
    return digest.hexdigest() if files else None


def split_hub_id(path: str) -> HubId:
    """Name and revision of a hub id; a local path, which may hold an @, is a name alone."""
    if Path(path).exists():
        return HubId(path, None)
    name, _, revision = path.partition("@")
    return HubId(name, revision or None)


def source_facts(path: str) -> dict[str, object]:
    """For records: the commit that a hub id stood for, or the GGUF file of an unpacked folder."""
    facts = local_file(path, GGUF_FACTS)
    if facts is not None:
        return {"gguf": json.loads(facts.read_text(encoding="utf8"))}
    file = None if Path(path).exists() else local_file(path, CONFIG_FILE)
    return {} if file is None else {"hub_id": path, "hub_commit": file.parent.name}


def looks_like_hub_id(path: str) -> bool:
    """Whether a path that does not exist may be the name of a model on the hub."""
    parts = path.split("/")
    return len(parts) == _NUM_HUB_ID_PARTS and all(parts) and path[0] not in ".~"


def _hub_answers() -> bool:
    """Whether the hub, or the mirror and proxy that the environment names, answers in time."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass  # an error page is an answer
        except (OSError, ValueError):
            return
        answered.set()

    # A thread, because looking a name up can take far longer than the timeout of the connection.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_HUB_TIMEOUT_S)
    return answered.is_set()


def may_hold_modules(folder: Path) -> bool:
    """Whether a checkpoint folder may hold MTP modules, by the names of its tensors.

    A look that needs no torch, before `heads.native` reads the family's own names: a name with
    `mtp` in it, or of a layer behind the last that `config.json` counts. Files that cannot be read
    hold none here, and are refused where they are loaded.
    """
    try:
        names = read_weight_map(folder) or _header_names(folder / _SINGLE_FILE)
    except (OSError, ValueError):
        return False
    count = _text_fields(folder / CONFIG_FILE).get("num_hidden_layers")
    num_layers = count if isinstance(count, int) else _MAX_INDEX_ENTRIES
    layers = (match for match in map(_LAYER_NUMBER.search, names) if match)
    return any("mtp" in name for name in names) or any(
        int(match[1]) >= num_layers for match in layers
    )


def _header_names(path: Path) -> list[str]:
    """Names in a safetensors file, whose JSON header follows its length in eight bytes."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(num_bytes)) if num_bytes <= _MAX_INDEX_BYTES else {}
    return list(header)


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """File name of every tensor of a checkpoint, by its index; None for a folder without one."""
    path = folder / INDEX_FILE
    if not path.is_file():
        return None
    try:
        num_bytes = path.stat().st_size
        content = path.read_bytes() if num_bytes <= _MAX_INDEX_BYTES else b""
        if not content or content.count(b'":') > _MAX_INDEX_ENTRIES:
            raise IntegrityError(
                f"{path} must be an index of at most {_MAX_INDEX_ENTRIES:,} tensors in "
                f"{_MAX_INDEX_BYTES:,} bytes, got more in {num_bytes:,}; fetch the model again."
            )
        files = json.loads(content)["weight_map"]
    except IntegrityError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise IntegrityError(
            f"{path} must be an index with a weight_map, got {fault!r}."
        ) from fault
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise IntegrityError(f"{path}: weight_map must give a file name for each tensor.")
    outside = sorted({name for name in files.values() if "/" in name or name in ("", ".", "..")})
    if outside:
        raise IntegrityError(
            f"{path} must name files of its own folder, got {outside[:_NUM_LISTED]}; refused."
        )
    return files
