"""How weights, gradients and moments are spread over ranks: one interface, three ways.

    ddp            everything on every rank, gradients summed by torch   here
    fsdp2          shards of all three, gathered module by module        sharded.py
    zero1..zero3   DeepSpeed: shards of moments, + gradients, + weights  zero.py

Whatever the way, masters and moments are fp32, a checkpoint holds whole tensors by name, and the
frozen target is not wrapped: `trainer.shard_target` spreads its layers while they are loaded.
"""
# ruff: noqa: D102 - the methods of engines are documented in `Engine`

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtp_research.config.training_schema import TrainerConfig
from mtp_research.heads.stack import MTPHeads, MTPModule
from mtp_research.models.rewrites.products import merge_projections
from mtp_research.models.target import Target
from mtp_research.runtime.captures import CapturedModule
from mtp_research.runtime.errors import ConfigError
from mtp_research.training.losses.losses import HeadObjective
from mtp_research.training.optim import MasterWeights, NamedTensors, trained_parameters


class Engine(Protocol):
    """Forward, backward and update; `objective` is the wrapped `HeadObjective`, called alike."""

    objective: nn.Module

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; ranks meet in the last one."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add gradients of this rank's loss; the global gradient is the sum over ranks."""
        ...

    def step(self, *, learning_rate: float) -> Tensor:
        """Clip, update, clear the gradients; 0-dim global gradient norm before clipping.

        A norm that is not finite leaves weights and moments as they were, on every rank.
        """
        ...

    def head_tensors(self) -> NamedTensors:
        """Whole tensors of the heads' `state_dict`, in the dtype of the target; all ranks call."""
        ...

    def optimizer_tensors(self) -> NamedTensors:
        """Whole masters and moments as `<what>.<parameter>`; after one step; all ranks call."""
        ...

    def restore(self, optimizer: Mapping[str, Tensor]) -> None:
        """Put whole masters and moments back in place, of heads that already hold the weights."""
        ...


def make_engine(objective: HeadObjective, *, trainer: TrainerConfig, ranks: Accelerator) -> Engine:
    """The engine of `trainer.parallel`, over the parameters that require gradients."""
    if trainer.cuda_graphs:
        require_one_gpu(ranks)
    prepare_modules(objective.heads, trainer=trainer)
    if trainer.parallel == "ddp":
        return ReplicatedEngine(objective, trainer=trainer, ranks=ranks)
    if trainer.parallel == "fsdp2":
        from mtp_research.training.parallel.sharded import ShardedEngine

        return ShardedEngine(objective, trainer=trainer, ranks=ranks)
    from mtp_research.training.parallel.zero import ZeroEngine

    return ZeroEngine(objective, trainer=trainer, ranks=ranks)


def require_one_gpu(ranks: Accelerator) -> None:
    """Refuse `trainer.cuda_graphs` elsewhere."""
    if ranks.num_processes > 1 or ranks.device.type != "cuda":
        raise ConfigError(
            f"trainer.cuda_graphs=true needs one process on a GPU, got {ranks.num_processes} on "
            f"{ranks.device.type}; set trainer.cuda_graphs=false."
        )


def prepare_modules(heads: MTPHeads, *, trainer: TrainerConfig) -> None:
    """Apply `activation_checkpointing` and `compile` to the modules, in place.

    What is recomputed is the feed-forward part: the attention context of some unrolls collects keys
    as it runs, so running it twice would change them, and the fused attention stores little.
    """
    for module in cast(Iterable[MTPModule], heads.mtp_modules):
        if trainer.activation_checkpointing:
            _recompute(module.block.get_submodule("mlp"))
        if trainer.compile:
            module.compile(dynamic=False)


def prepare_target(target: Target, *, trainer: TrainerConfig) -> None:
    """Apply `compile` to the frozen target's layers, in place; shared ones are left."""
    if trainer.compile and not trainer.shard_target and target.num_left_out == 0:
        for layer in cast(nn.ModuleList, target.model.base_model.layers):
            merge_projections(layer)  # one read of the layer's input, not three
            layer.compile(dynamic=False)


def _recompute(part: nn.Module) -> None:
    forward = part.forward

    def recomputed(*inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        return cast(Tensor, checkpoint(forward, *inputs, use_reentrant=False))

    part.forward = recomputed


class ReplicatedEngine:
    """`ddp`: torch's own wrapper over fp32 masters; one rank runs unwrapped."""

    def __init__(
        self, objective: HeadObjective, *, trainer: TrainerConfig, ranks: Accelerator
    ) -> None:
        self._heads = objective.heads
        self._ranks = ranks
        trained = trained_parameters(self._heads)
        self._names = list(trained)
        self._optimizer = MasterWeights(
            trained.values(),
            learning_rate=trainer.learning_rate,
            betas=(trainer.betas[0], trainer.betas[1]),
            weight_decay=trainer.weight_decay,
            grad_clip=trainer.grad_clip,
        )
        self._is_captured = trainer.cuda_graphs
        if trainer.cuda_graphs:
            objective.run = CapturedModule(self._heads, objective.run, key="trainer.cuda_graphs")
        self.objective: nn.Module = ranks.prepare_model(objective, device_placement=False)

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        if is_last:
            yield
            return
        with self._ranks.no_sync(self.objective):
            yield
        if self._is_captured:  # the next backward pass writes where these lie
            for parameter in self._optimizer.parameters:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()

    def backward(self, loss: Tensor) -> None:
        # Ranks average their gradients, which are to be summed.
        (loss * self._ranks.num_processes).backward()

    def step(self, *, learning_rate: float) -> Tensor:
        return self._optimizer.step(learning_rate=learning_rate)

    def head_tensors(self) -> NamedTensors:
        return self._heads.state_dict()

    def optimizer_tensors(self) -> NamedTensors:
        return self._optimizer.tensors(self._names)

    def restore(self, optimizer: Mapping[str, Tensor]) -> None:
        self._optimizer.restore(optimizer, names=self._names)
