"""`trainer.parallel=ddp`: everything on every rank, gradients summed by torch's own DDP."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from accelerate import Accelerator
from torch import Tensor, nn

from mtp_research.config import TrainerConfig
from mtp_research.training.objective import HeadObjective
from mtp_research.training.optim import MasterWeights
from mtp_research.training.state import MOMENTS, check_optimizer_tensors, moment_tensors


class ReplicatedEngine:
    """See `parallel.Engine`; one rank runs unwrapped.

    Args:
        objective: holds the heads.
        trainer: optimizer settings.
        ranks: processes and device.
    """

    def __init__(
        self, objective: HeadObjective, *, trainer: TrainerConfig, ranks: Accelerator
    ) -> None:
        """Wrap the objective and copy the trained parameters to fp32 masters."""
        self._heads = objective.heads
        self._ranks = ranks
        named = [(name, p) for name, p in self._heads.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._optimizer = MasterWeights(
            [parameter for _, parameter in named],
            learning_rate=trainer.learning_rate,
            betas=(trainer.betas[0], trainer.betas[1]),
            weight_decay=trainer.weight_decay,
            grad_clip=trainer.grad_clip,
        )
        self.objective: nn.Module = ranks.prepare_model(objective, device_placement=False)

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """See `Engine.micro_batch`."""
        if is_last:
            yield
            return
        with self._ranks.no_sync(self.objective):
            yield

    def backward(self, loss: Tensor) -> None:
        """See `Engine.backward`; ranks average their gradients, which are to be summed."""
        (loss * self._ranks.num_processes).backward()

    def step(self, *, learning_rate: float) -> Tensor:
        """See `Engine.step`."""
        return self._optimizer.step(learning_rate=learning_rate)

    def head_tensors(self) -> dict[str, Tensor]:
        """See `Engine.head_tensors`."""
        return self._heads.state_dict()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """See `Engine.optimizer_tensors`."""
        optimizer = self._optimizer
        tensors: dict[str, Tensor] = {}
        for name, master in zip(self._names, optimizer.masters, strict=True):
            tensors |= moment_tensors(
                name, master=master, moments=optimizer.optimizer.state[master]
            )
        return tensors

    def restore(self, optimizer: Mapping[str, Tensor]) -> None:
        """See `Engine.restore`."""
        masters = self._optimizer.masters
        shapes = {n: m.shape for n, m in zip(self._names, masters, strict=True)}
        check_optimizer_tensors(optimizer, shapes=shapes)
        for name, master in zip(self._names, masters, strict=True):
            master.copy_(optimizer[f"master.{name}"])
            self._optimizer.optimizer.state[master] = {
                moment: optimizer[f"{moment}.{name}"].to(master.device) for moment in MOMENTS
            }
        for parameter, master in zip(self._optimizer.parameters, masters, strict=True):
            parameter.data.copy_(master)
