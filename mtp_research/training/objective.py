"""Unroll and loss of one micro-batch as one module, which is what data parallelism wraps.

Letters: B batch rows, S row length, D hidden, k depths.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from mtp_research.heads.stack import MTPHeads
from mtp_research.policy import ModuleSchedule
from mtp_research.training.loss_terms import LossSpec
from mtp_research.training.losses import DepthLoss, multi_depth_loss
from mtp_research.training.rows import Batch, BatchHidden
from mtp_research.training.unroll import DepthOutput, RowInputs, unroll


@dataclass(frozen=True)
class UnrollSpec:
    """How heads are run over a batch: depths, unroll (see `unroll.UNROLLS`) and module order."""

    num_depths: int
    kind: str
    schedule: ModuleSchedule = "cycle"


def run_heads(
    heads: MTPHeads, batch: Batch, *, hidden: BatchHidden, spec: UnrollSpec
) -> list[DepthOutput]:
    """`unroll` of a batch."""
    inputs = RowInputs(
        input_ids=batch.input_ids,
        hidden=hidden.source,
        position_ids=batch.position_ids,
        document_index=batch.document_index,
        cu_seqlens=batch.cu_seqlens,
    )
    return unroll(
        heads,
        inputs,
        num_depths=spec.num_depths,
        kind=spec.kind,
        schedule=spec.schedule,
    )


class HeadObjective(nn.Module):
    """Loss of a micro-batch; its parameters are those of the heads.

    Args:
        heads: the modules that are trained.
        unroll_spec: how they are run.
        loss_spec: what is minimised.
    """

    def __init__(self, heads: MTPHeads, *, unroll_spec: UnrollSpec, loss_spec: LossSpec) -> None:
        """Keep the heads as a submodule."""
        super().__init__()
        self.heads = heads
        self.unroll_spec = unroll_spec
        self.loss_spec = loss_spec

    def forward(
        self, batch: Batch, hidden: BatchHidden, labels: list[Tensor], num_step_labels: Tensor
    ) -> DepthLoss:
        """See `losses.multi_depth_loss`."""
        return multi_depth_loss(
            run_heads(self.heads, batch, hidden=hidden, spec=self.unroll_spec),
            labels=labels,
            num_step_labels=num_step_labels,
            lm_head=self.heads.target.lm_head_weight,
            spec=self.loss_spec,
            target_post_norm=hidden.post_norm,
            num_positions=batch.num_labels,
        )
