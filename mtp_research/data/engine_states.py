"""Hidden states that an inference engine wrote to disk, found by the tokens they belong to.

vLLM's `ExampleHiddenStatesConnector` (speculative method `extract_hidden_states`) writes one file a
request, and vLLM's project speculators keeps them as `hs_NUMBER.safetensors`. Both hold:

    token_ids       [T] integers: the prompt of the request, so a document is sent as a prompt
    hidden_states   [T, L, D] in the model's dtype, layers in the order that was asked for

Nothing in a file says which layers these are, or which model wrote it. The last of the L has to be
the output of the last decoder layer, id `num_hidden_layers` in vLLM, which is taken **before** the
final norm; speculators asks for it by default. What the engine computed it with is not recorded.

Letters: T tokens of a file, L layers, D hidden.

Source: vLLM `docs/features/speculative_decoding/extract_hidden_states.md`; speculators
`train/data.py`.
"""

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.progress import WorkProgress

_STATES, _TOKENS = "hidden_states", "token_ids"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NUM_DIMS = 3  # of `[T, L, D]`


class EngineStates:
    """The files of a folder and its folders; all are checked when it is opened."""

    def __init__(self, folder: Path, *, form: "StatesForm", lengths: Collection[int]) -> None:
        """Look through the files.

        Args:
            folder: may hold further folders.
            form: what the target's states are like.
            lengths: a file is also found by its first tokens, this many, as rows cut documents.

        Raises:
            ConfigError: there are no files, or of another dtype.
            IntegrityError: a file is damaged, or its shapes do not fit.
        """
        self.folder = folder
        self._paths: dict[bytes, Path] = {}
        paths = sorted(folder.rglob("*.safetensors"))
        if not paths:
            raise ConfigError(
                f"{form.key} must be a folder of .safetensors files with `{_TOKENS}` and "
                f"`{_STATES}`, {str(folder)!r} has none; set {form.key}."
            )
        with WorkProgress("files of hidden states", total=len(paths), unit="files") as progress:
            for number, path in enumerate(paths, start=1):
                token_ids = read_token_ids(path, form=form)
                for length in {len(token_ids), *lengths}:
                    if length <= len(token_ids):
                        self._paths.setdefault(_key(token_ids[:length]), path)
                progress.done(number)

    def has(self, token_ids: np.ndarray) -> bool:
        """Whether a file holds the states of `[n]` tokens from the beginning of a document."""
        return _key(token_ids) in self._paths

    def states(self, token_ids: np.ndarray) -> Tensor:
        """States `[n, D]` of `[n]` tokens, see `read_last_states`."""
        return read_last_states(self._paths[_key(token_ids)], length=len(token_ids))


class StatesForm(NamedTuple):
    """What the files of a target have to hold, and the setting that names them in messages."""

    key: str  # such as `data.import_hidden`
    hidden_size: int  # D
    dtype: torch.dtype


def read_token_ids(path: Path, *, form: StatesForm) -> np.ndarray:
    """Token ids `[T]` of a file, whose states fit them and the target.

    Raises:
        ConfigError: the states are of another dtype.
        IntegrityError: the file is damaged, or its shapes do not fit.
    """
    try:
        with safe_open(path, framework="pt") as file:
            lacking = sorted({_STATES, _TOKENS} - set(file.keys()))
            if lacking:
                raise IntegrityError(
                    f"{path}: expected tensors {_STATES} and {_TOKENS}, got {file.keys()}; "
                    f"set {form.key} to what writes an engine's hidden states."
                )
            token_ids = file.get_tensor(_TOKENS)
            found = file.get_slice(_STATES)
            shape, dtype = found.get_shape(), found.get_dtype()
    except (SafetensorError, OSError) as fault:
        raise IntegrityError(
            f"{path}: cut off or damaged ({fault}); remove it and let the engine write it again."
        ) from fault
    fits = len(shape) == _NUM_DIMS and shape[0] == len(token_ids) and shape[1] > 0
    if token_ids.dim() != 1 or token_ids.is_floating_point() or not fits:
        raise IntegrityError(
            f"{path}: expected {_STATES} [T, L, D] of {_TOKENS} [T], got {shape} of "
            f"{[*token_ids.shape]} {token_ids.dtype}; let the engine write it again."
        )
    if shape[2] != form.hidden_size:
        raise IntegrityError(
            f"{path}: expected states of the target's hidden size {form.hidden_size}, got "
            f"{shape[2]}: another model wrote them; set {form.key} or model.path."
        )
    if _DTYPES.get(dtype) != form.dtype:
        name = str(_DTYPES.get(dtype, dtype)).removeprefix("torch.")
        raise ConfigError(
            f"{form.key} must give states of the target's dtype {form.dtype}, {path} has {name}; "
            f"set model.dtype={name}."
        )
    return token_ids.numpy().astype(np.int64)


def read_last_states(path: Path, *, length: int) -> Tensor:
    """States `[length, D]` of a checked file's first tokens, before the final norm, on the CPU.

    Raises:
        IntegrityError: some are not finite.
    """
    with safe_open(path, framework="pt") as file:
        found = file.get_slice(_STATES)
        last = found.get_shape()[1] - 1
        states = found[:length, last : last + 1][:, 0]
    # A sum is finite only where all numbers are, and costs a twentieth of looking at each.
    if not states.sum(dtype=torch.float32).isfinite() and not states.isfinite().all():
        raise IntegrityError(
            f"{path}: hidden states must be finite, got others; remove the file and let the "
            "engine write it again."
        )
    return states


def _key(token_ids: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(token_ids, dtype=np.int64).tobytes()).digest()
