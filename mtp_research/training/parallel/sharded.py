"""`trainer.parallel=fsdp2`: each rank owns a shard of every weight, gradient and moment.

torch's `fully_shard` gathers a module's weights just before it runs and scatters its gradients
after its backward. The shards are fp32 and are themselves the masters; modules compute in the
target's dtype.

Source: Zhao et al. 2023, "PyTorch FSDP"; torch.distributed.fsdp.fully_shard.
"""
# ruff: noqa: D102 - the methods of engines are documented in `Engine`

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from mtp_research.config.training_schema import TrainerConfig
from mtp_research.runtime.errors import ConfigError
from mtp_research.training.losses.losses import HeadObjective
from mtp_research.training.optim import (
    MOMENTS,
    NamedTensors,
    check_optimizer_tensors,
    guarded_update,
    make_adamw,
    moment_tensors,
    trained_parameters,
)


class ShardedEngine:
    """An `Engine` that shards the modules of `objective.heads` in place; needs 2 ranks."""

    def __init__(
        self, objective: HeadObjective, *, trainer: TrainerConfig, ranks: Accelerator
    ) -> None:
        if ranks.num_processes < 2:
            raise ConfigError(
                "trainer.parallel=fsdp2 needs at least 2 ranks, got 1; start it with `torchrun "
                "--nproc-per-node 2 train.py ...` or set trainer.parallel=ddp."
            )
        self.objective: nn.Module = objective
        self._heads = objective.heads
        self._grad_clip = trainer.grad_clip
        dtype = self._heads.target.dtype
        mesh = init_device_mesh(ranks.device.type, (ranks.num_processes,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        # Ranks may have initialised from files: rank 0's values are everyone's, as DDP does it.
        for tensor in self._heads.state_dict().values():
            dist.broadcast(tensor, src=0)
        for parameter in self._heads.parameters():
            parameter.data = parameter.data.float()
        for module in self._heads.mtp_modules:
            # Each is a root of its own, which would stay whole until its backward.
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        trained = trained_parameters(self._heads)
        self._names = list(trained)
        self._parameters = [cast(DTensor, parameter) for parameter in trained.values()]
        self._masters = [parameter.to_local().detach() for parameter in self._parameters]
        self._optimizer = make_adamw(
            self._masters,
            learning_rate=trainer.learning_rate,
            betas=(trainer.betas[0], trainer.betas[1]),
            weight_decay=trainer.weight_decay,
        )

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        # Gradients are scattered each time, which holds less memory.
        yield

    def backward(self, loss: Tensor) -> None:
        # Ranks average their gradients, which are to be summed.
        (loss * dist.get_world_size()).backward()

    @torch.no_grad()
    def step(self, *, learning_rate: float) -> Tensor:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            assert parameter.grad is not None, "a trained parameter took no part in the loss"
            master.grad = cast(DTensor, parameter.grad).to_local()
        grads = [cast(Tensor, master.grad) for master in self._masters]
        squares = torch.stack(torch._foreach_norm(grads)).square().sum()
        dist.all_reduce(squares)
        grad_norm = squares.sqrt()
        guarded_update(
            self._optimizer,
            grad_norm=grad_norm,
            grad_clip=self._grad_clip,
            learning_rate=learning_rate,
        )
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.grad = master.grad = None
        return grad_norm

    def head_tensors(self) -> NamedTensors:
        # Buffers keep their dtype.
        dtype = self._heads.target.dtype
        tensors = {name: _whole(tensor) for name, tensor in self._heads.state_dict().items()}
        for name, _ in self._heads.named_parameters():
            tensors[name] = tensors[name].to(dtype)
        return tensors

    def optimizer_tensors(self) -> NamedTensors:
        tensors: NamedTensors = {}
        for name, parameter, master in self._trained():
            moments = {
                moment: _whole(_like(parameter, state)) if state.ndim else state
                for moment in MOMENTS
                for state in [self._optimizer.state[master][moment]]
            }
            tensors |= moment_tensors(name, master=_whole(parameter).detach(), moments=moments)
        return tensors

    @torch.no_grad()
    def restore(self, optimizer: Mapping[str, Tensor]) -> None:
        shapes = {n: p.shape for n, p in zip(self._names, self._parameters, strict=True)}
        check_optimizer_tensors(optimizer, shapes=shapes)
        for name, parameter, master in self._trained():
            master.copy_(_shard(parameter, optimizer[f"master.{name}"].to(master.device)))
            state: dict[str, Tensor] = {}
            for moment in MOMENTS:
                saved = optimizer[f"{moment}.{name}"].to(master.device)
                state[moment] = _shard(parameter, saved).clone() if saved.ndim else saved
            self._optimizer.state[master] = state

    def _trained(self) -> Iterator[tuple[str, DTensor, Tensor]]:
        """Name, sharded parameter and this rank's part of each."""
        return zip(self._names, self._parameters, self._masters, strict=True)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(parameter: DTensor, local: Tensor) -> DTensor:
    """A rank's part `local`, seen as a part of a tensor laid out like `parameter`."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _shard(parameter: DTensor, whole: Tensor) -> Tensor:
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements).to_local()
