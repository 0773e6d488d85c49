"""Which model a head belongs to, in hashes that survive a change of dtype, files or quantisation.

Sizes alone do not tell a model from its fine-tuned sibling, on which heads still run and merely
draft badly. Seen are other embedding or lm_head weights; a model whose training left both alone
(LoRA on the attention, say) has the same hashes.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from mtp_research.models.loading.source import local_file
from mtp_research.models.target import Target
from mtp_research.runtime.errors import IntegrityError

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
_NUM_ROWS = 1024  # of each matrix; all of a large vocabulary would cost seconds
# Sizes that every version of transformers calls the same. No rotary settings: a longer context
# changes them, and the head stays the model's.
_CONFIG_FIELDS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "rms_norm_eps",
)


def target_hashes(target: Target) -> dict[str, str | None]:
    """sha256 of the target's config, weights and tokenizer, by the names that `head.json` has.

    Args:
        target: whole embedding and lm_head, on any device and in any dtype.

    Returns:
        `config_sha256`, `weights_sha256` and `tokenizer_sha256`; None for a tokenizer that is in
        none of the files at hand.
    """
    sizes = {name: _size(target.config, name) for name in _CONFIG_FIELDS}
    return {
        "config_sha256": _hash_json(sizes),
        "weights_sha256": _hash_signs(
            cast(Tensor, target.embed_tokens.weight), target.lm_head_weight
        ),
        "tokenizer_sha256": hash_tokenizer(target.path),
    }


def _size(config: PreTrainedConfig, name: str) -> object:
    """A config field; a list where layers differ, and the library gives no single value."""
    if config.is_heterogeneous:
        return [getattr(layer, name, None) for layer in config.per_layer_config]
    return getattr(config, name, None)


def warn_of_family(target: Target, *, family: str) -> None:
    """Warn of a run whose record will name another family than the one that was loaded.

    Args:
        target: what was loaded.
        family: `model.family`.
    """
    if target.family_name != family:
        logger.warning(
            "model.path holds a %s model and the run is recorded as model.family=%s; "
            "set model=NAME",
            target.family_name,
            family,
        )


def _hash_signs(*matrices: Tensor) -> str:
    """Hash of evenly spread rows' signs: rounding to another dtype keeps them, training does not.

    Args:
        matrices: each `[V, D]`.
    """
    digest = hashlib.sha256()
    for matrix in matrices:
        step = -(-matrix.shape[0] // _NUM_ROWS)
        signs = torch.signbit(matrix.detach()[::step]).cpu()
        digest.update(signs.numpy().tobytes())
    return digest.hexdigest()


def hash_tokenizer(path: str) -> str | None:
    """Hash of which token has which id; how a library version writes the file does not matter.

    Args:
        path: of the model, folder or hub id; None is given for one without a tokenizer at hand.

    Raises:
        IntegrityError: the tokenizer's file cannot be read.
    """
    file = local_file(path, TOKENIZER_FILE) if path else None
    if file is None:
        return None
    content = _read(file)
    try:
        added = [(token["id"], token["content"]) for token in content.get("added_tokens", [])]
        return _hash_json([content["model"]["vocab"], sorted(added)])
    except (KeyError, TypeError, AttributeError) as fault:
        raise IntegrityError(
            f"{file} must hold model.vocab and added_tokens, got {fault!r}; fetch the model again."
        ) from fault


def _read(file: Path) -> Mapping:
    try:
        return json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError) as fault:
        raise IntegrityError(
            f"{file} must be a tokenizer in JSON, got {fault}; fetch the model again."
        ) from fault


def _hash_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
