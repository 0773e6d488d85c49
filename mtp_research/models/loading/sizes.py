"""Sizes of a model's configuration, held against its shards before memory is asked for.

transformers draws at random what the shards lack or hold in another shape, and we refuse the model
afterwards: with a wrong size in `config.json` that would be gigabytes later. Only headers are read.
"""

import math
import re
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from mtp_research.models.loading.source import CONFIG_FILE, read_weight_map
from mtp_research.runtime.errors import IntegrityError

_SLACK = 2  # tensors that are merely missing are refused by name, after loading
_SMALL = 1 << 20  # elements that nobody minds
_NUMBER = re.compile(r"\.(\d+)\.")  # of a layer or an expert in a tensor's name
_NUM_LISTED = 3


def check_sizes(folder: Path, config: PreTrainedConfig) -> None:
    """Refuse (`IntegrityError`) a configuration of a far larger model than the shards hold.

    Layers are counted first: building 20,000 of them takes minutes even without memory.
    """
    elements = _stored_elements(folder)
    numbers = [int(number) for name in elements for number in _NUMBER.findall(name)]
    num_layers = config.get_text_config().num_hidden_layers
    if num_layers > max(numbers, default=-1) + 1:
        raise IntegrityError(
            f"{folder / CONFIG_FILE} must have as many layers as the shards, got "
            f"num_hidden_layers={num_layers} for {max(numbers, default=-1) + 1} at most; fetch the "
            "model again."
        )
    with torch.device("meta"):
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
    expected = {name: math.prod(tensor.shape) for name, tensor in model.named_parameters()}
    if sum(expected.values()) > _SLACK * sum(elements.values()) + _SMALL:
        largest = max(expected, key=lambda name: expected[name])
        raise IntegrityError(
            f"{folder / CONFIG_FILE} must have the sizes of the shards, which hold "
            f"{sum(elements.values()):,} numbers, got sizes that ask for {sum(expected.values()):,}"
            f" ({largest}: {expected[largest]:,}); fetch the model again."
        )


def _stored_elements(folder: Path) -> dict[str, int]:
    """How many numbers each tensor of a checkpoint folder has, from the headers of its shards."""
    present = {path.name for path in folder.glob("*.safetensors")}
    index = read_weight_map(folder)
    files = present if index is None else set(index.values())
    if missing := sorted(files - present):
        raise IntegrityError(
            f"{folder} must hold the {len(files)} files of its index, {len(missing)} are missing "
            f"{missing[:_NUM_LISTED]}; fetch the model again."
        )
    if not files:
        pickled = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:_NUM_LISTED])
        raise IntegrityError(
            f"model.path {str(folder)!r} must hold weights as .safetensors, got "
            f"{pickled or 'none'}; pickled files are not read, convert them to safetensors."
        )
    elements: dict[str, int] = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118, it is no mapping
                elements[name] = math.prod(shard.get_slice(name).get_shape())
    return elements
