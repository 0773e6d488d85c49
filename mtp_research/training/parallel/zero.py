"""`trainer.parallel=zero1|zero2|zero3`: DeepSpeed shards moments, then gradients, then weights.

DeepSpeed keeps fp32 masters of low-precision weights, clips, and skips a step whose gradients are
not finite. Our checkpoints gather its shards into whole tensors, so they hold no pickle and a run
may go on under another `trainer.parallel` (`trainer.allow_drift`).

Source: Rajbhandari et al. 2020, "ZeRO"; deepspeed.utils.safe_get_full_fp32_param and its kin.
"""
# ruff: noqa: D102 - the methods of engines are documented in `Engine`

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mtp_research.config.launched import deepspeed_entries, merge_deepspeed, read_deepspeed
from mtp_research.config.training_schema import TrainerConfig
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from mtp_research.training.losses.losses import HeadObjective
from mtp_research.training.optim import (
    NamedTensors,
    check_optimizer_tensors,
    make_adamw,
    moment_tensors,
    trained_parameters,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

_SHARDED_MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroEngine:
    """An `Engine` over DeepSpeed's; stage 3 shards the parameters of `objective.heads` in place."""

    def __init__(
        self, objective: HeadObjective, *, trainer: TrainerConfig, ranks: Accelerator
    ) -> None:
        if ranks.num_processes < 2:
            raise ConfigError(
                f"trainer.parallel={trainer.parallel} needs at least 2 ranks, got 1; start it with "
                "`torchrun --nproc-per-node 2 train.py ...` or set trainer.parallel=ddp."
            )
        self._heads = objective.heads
        self._num_micro = trainer.gradient_accumulation_steps
        self._stage = int(trainer.parallel[-1])
        self._ranks = ranks
        self._named = trained_parameters(self._heads)
        self._shapes = {name: parameter.shape for name, parameter in self._named.items()}
        buffers = {name: buffer.clone() for name, buffer in self._heads.named_buffers()}
        self._engine = self._start(objective, trainer=trainer)
        for name, buffer in self._heads.named_buffers():
            buffer.data = buffers[name]  # DeepSpeed casts them with the weights
        self._zero = cast("ZeROOptimizer", self._engine.optimizer)
        self.objective: nn.Module = self._engine

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(is_last)
        yield

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks and micro-batches.
        self._engine.backward(loss * self._ranks.num_processes * self._num_micro)

    def step(self, *, learning_rate: float) -> Tensor:
        # DeepSpeed reads the norm on the host, so this waits for the device.
        for group in self._zero.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self._ranks.device)

    def head_tensors(self) -> NamedTensors:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        parameters = list(self._heads.parameters()) if self._stage == 3 else []
        with GatheredParameters(parameters, enabled=self._stage == 3):
            return {name: t.detach().clone() for name, t in self._heads.state_dict().items()}

    def optimizer_tensors(self) -> NamedTensors:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        self._link_moments()
        num_steps = next(iter(self._zero.optimizer.state.values()))["step"]
        tensors: NamedTensors = {}
        for name, parameter in self._named.items():
            moments = {
                moment: cast(Tensor, safe_get_full_optimizer_state(parameter, moment))
                for moment in _SHARDED_MOMENTS
            }
            tensors |= moment_tensors(
                name,
                master=cast(Tensor, safe_get_full_fp32_param(parameter)),
                moments={**moments, "step": num_steps.clone()},
            )
        return tensors

    def restore(self, optimizer: Mapping[str, Tensor]) -> None:
        check_optimizer_tensors(optimizer, shapes=self._shapes)
        num_steps = next(t for name, t in optimizer.items() if name.startswith("step."))
        for master in self._flat_masters():
            moments = {moment: torch.zeros_like(master) for moment in _SHARDED_MOMENTS}
            num_done = num_steps.to(master.device, copy=True)
            self._zero.optimizer.state[master] = {"step": num_done, **moments}
        self._link_moments()
        for name, parameter in self._named.items():
            self._set(parameter, optimizer[f"master.{name}"], moment=None)
            for moment in _SHARDED_MOMENTS:
                self._set(parameter, optimizer[f"{moment}.{name}"], moment=moment)

    def _link_moments(self) -> None:
        """Let DeepSpeed's getters and setters find the moments of every parameter group.

        It links them itself while it steps through the groups, before the later groups have any.
        """
        if self._stage < 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _flat_masters(self) -> list[Tensor]:
        """This rank's fp32 masters, one flat tensor per parameter group."""
        if self._stage == 3:
            return self._zero.fp32_partitioned_groups_flat
        return self._zero.single_partition_of_fp32_groups

    def _set(self, parameter: nn.Parameter, whole: Tensor, *, moment: str | None) -> None:
        """Put this rank's part of a whole master or moment in place."""
        from deepspeed import utils

        whole = whole.to(self._ranks.device)
        if self._stage < 3:
            if moment is None:
                utils.safe_set_full_fp32_param(parameter, whole)
            else:
                utils.safe_set_full_optimizer_state(parameter, whole, moment)
            return
        size, world = parameter.ds_tensor.ds_numel, self._ranks.num_processes
        padded = whole.new_zeros(size * world)
        padded[: whole.numel()] = whole.flatten()
        part = padded.view(world, size)[self._ranks.process_index]
        if moment is None:
            utils.safe_set_local_fp32_param(parameter, part)
        else:
            utils.safe_set_local_optimizer_state(parameter, part, moment)

    def _start(self, objective: HeadObjective, *, trainer: TrainerConfig) -> "DeepSpeedEngine":
        try:
            import deepspeed
        except ImportError as fault:
            raise EnvironmentFault(
                f"trainer.parallel={trainer.parallel} needs DeepSpeed ({fault}); install "
                "mtp-research[deepspeed] or set trainer.parallel=fsdp2."
            ) from fault
        if self._ranks.device.type == "cpu":
            # A shared-memory reduction that takes a compiler and a minute; gloo reduces as well.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        trained = list(self._named.values())
        optimizer = make_adamw(
            trained,
            learning_rate=trainer.learning_rate,
            betas=(trainer.betas[0], trainer.betas[1]),
            weight_decay=trainer.weight_decay,
        )
        engine, *_ = deepspeed.initialize(
            model=objective,
            model_parameters=cast(nn.Module, trained),  # a list is what it documents
            optimizer=optimizer,
            config=self._settings(trainer),
            dist_init_required=False,
        )
        return engine

    def _settings(self, trainer: TrainerConfig) -> dict[str, object]:
        is_bf16 = self._heads.target.dtype is torch.bfloat16
        own = deepspeed_entries(trainer, num_processes=self._ranks.num_processes) | {
            "bf16": {"enabled": is_bf16},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
        }
        path = trainer.deepspeed_config
        return own if path is None else merge_deepspeed(read_deepspeed(path), own)
