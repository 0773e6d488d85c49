"""The part of a target that this process holds: layers left out, or spread over ranks.

Either is done while the model is built, before it has weights, and the library then reads what is
in it. What is left out, for heads that train from cached hidden states, stays on the meta device:
such a training runs the embedding, the final norm, the rotary embedding and lm_head. The layers
keep the classes and sizes that the block of an MTP module is built from, take no memory, and none
of their tensors is read; they are put back after loading.

Of layers that ranks share each tensor says, on the meta device, which part of it this rank keeps,
and the library's loader asks the files for that part alone, as it does under `model.tp_plan`.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, cast

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from mtp_research.models.block import layers_like_block
from mtp_research.models.family import Family
from mtp_research.models.loading.placement import EXPERTS_DIM, LAYER_MESH, num_ranks
from mtp_research.models.rank_parts import peers_needed
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError

# last: those that the block of a module can start from; sharded: all, spread over ranks
Layers = Literal["all", "last", "none", "sharded"]
# Ranks that read far more slowly than others are waited for; one that ends is noticed at once.
_READING_TIMEOUT = timedelta(hours=2)
_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")


@dataclass
class LayerFilter:
    """Takes layers out of a model while the library builds it."""

    family: Family
    layers: Layers  # `last` or `none`
    left_out: dict[int, nn.Module] = field(default_factory=dict)  # filled by loading

    def take_out(self, model: PreTrainedModel) -> None:
        """Replace the layers of a model that is being built, in place."""
        layers = cast(nn.ModuleList, model.base_model.layers)
        kept = layers_like_block(model, self.family) if self.layers == "last" else []
        self.left_out = {n: layer for n, layer in enumerate(layers) if n not in kept}
        for number in self.left_out:
            layers[number] = nn.Identity()

    def put_back(self, model: PreTrainedModel) -> PreTrainedModel:
        """The loaded model, whose layers that were left out are on the meta device, in place."""
        layers = cast(nn.ModuleList, model.base_model.layers)
        for number, layer in self.left_out.items():
            layers[number] = layer.to("meta")
        return model

    def is_left_out(self, name: str) -> bool:
        """Whether a tensor of the checkpoint belongs to a layer that was left out."""
        match = _LAYER_NUMBER.search(name)
        return match is not None and int(match[1]) in self.left_out


def layer_mesh(device: torch.device) -> DeviceMesh:
    """The ranks that share decoder layers: all of them."""
    return init_device_mesh(device.type, (num_ranks(),), mesh_dim_names=(LAYER_MESH,))


def cut_layers(model: PreTrainedModel, *, mesh: DeviceMesh) -> None:
    """Spread the decoder layers of a model without weights over the ranks, in place.

    Embedding, final norm and lm_head stay whole on each rank: modules and losses read them.
    """
    layers = cast(nn.ModuleList, model.base_model.layers)
    stacks = [len(p) for p in layers.parameters() if p.dim() == EXPERTS_DIM]
    if stacks and min(stacks) < mesh.size():
        raise ConfigError(
            f"trainer.shard_target needs no more ranks than experts, got {mesh.size()} for "
            f"{min(stacks)}; launch torchrun with another --nproc-per-node."
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # The root: all layers gather on its streams, and a GPU keeps a pool of memory for each stream.
    stack = model.base_model
    fully_shard(stack, mesh=mesh, ignored_params={*stack.parameters()} - {*layers.parameters()})


def own_device(device: torch.device, *, is_split: bool) -> torch.device:
    """`device` with the number of its GPU: always this rank's, where ranks split a target.

    Weights are read by threads, each of which begins with the first GPU as its current one.
    """
    if device.type != "cuda":
        return device
    if is_split:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # set by torchrun
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def join_ranks(device: torch.device) -> None:
    """Join the process group of torchrun, on a GPU of this rank's own, unless it is joined."""
    if distributed.is_initialized():
        return
    place = None
    if device.type == "cuda":
        place = own_device(device, is_split=True)
        torch.cuda.set_device(place)
    backend = "gloo" if place is None else "nccl"
    distributed.init_process_group(backend, device_id=place, timeout=_READING_TIMEOUT)


@contextmanager
def fail_together(*, is_split: bool) -> Iterator[None]:
    """End the block on all ranks with a fault of our own, if it ends so on one.

    The others would wait for it in their next collective call. No rank may meet others inside.
    """
    if not is_split:
        yield
        return
    fault: Exception | None = None
    try:
        yield
    except Exception as met:  # out of memory, too
        fault = met
    found: list[tuple[type, str] | None] = [None] * distributed.get_world_size()
    with peers_needed():
        distributed.all_gather_object(found, None if fault is None else _named(fault))
    if fault is not None:
        raise fault
    for rank, other in enumerate(found):
        if other is not None:
            kind, text = other
            raise kind(f"rank {rank} could not load its part of the target: {text}")


def _named(fault: Exception) -> tuple[type, str]:
    kinds = (ConfigError, IntegrityError, EnvironmentFault)
    kind = type(fault) if isinstance(fault, kinds) else EnvironmentFault
    return kind, str(fault) or type(fault).__name__
