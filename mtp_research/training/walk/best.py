"""Which heads of a run are the best: those of the longest held-out walk, and when to stop.

The loss does not choose: it goes on falling while the accepted length has begun to shrink.
Source: the project's training page, section 3.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mtp_research.config.schema import TrainConfig
from mtp_research.heads.weights import save_heads
from mtp_research.training.optim import merged_tensors
from mtp_research.training.setup import RunParts
from mtp_research.training.tracking import jsonable
from mtp_research.training.walk.replay import WalkReport


class BestWalk:
    """The longest held-out walk so far.

    Attributes:
        step: optimizer steps done when it was measured.
        num_evals_since: evaluations after it.
        newest_length: acceptance length of the last evaluation.
    """

    def __init__(self) -> None:
        """Nothing measured yet."""
        self._report: WalkReport | None = None
        self.step = 0
        self.num_evals_since = 0
        self.newest_length = float("nan")

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> "BestWalk":
        """What `state` wrote."""
        best = cls()
        best._report = WalkReport(**state["report"])
        best.step = state["step"]
        best.num_evals_since = state["num_evals_since"]
        best.newest_length = state["newest_length"]
        return best

    @property
    def report(self) -> WalkReport:
        """The measurement itself."""
        assert self._report is not None, "a run is measured before its first step"
        return self._report

    def add(self, report: WalkReport, *, step: int) -> bool:
        """Count an evaluation; whether it is the new best."""
        self.newest_length = report.acceptance_length
        is_best = self._report is None or report.acceptance_length > self._report.acceptance_length
        self.num_evals_since = 0 if is_best else self.num_evals_since + 1
        if is_best:
            self._report, self.step = report, step
        return is_best

    def is_stale(self, patience: int | None) -> bool:
        """Whether `patience` evaluations in a row were no better; None never is."""
        return patience is not None and self.num_evals_since >= patience

    def state(self) -> dict[str, object]:
        """JSON-serialisable, for `from_state`."""
        return {
            "report": dataclasses.asdict(self.report),
            "step": self.step,
            "num_evals_since": self.num_evals_since,
            "newest_length": self.newest_length,
        }


def write_best_head(
    parts: RunParts,
    folder: Path,
    *,
    tensors: Mapping[str, Tensor],
    config: TrainConfig,
    best: BestWalk,
) -> None:
    """Write the head folder that `spec.head=` takes.

    Args:
        parts: of the run.
        folder: replaced file by file, each at once, so that a crash leaves one that can be read.
        tensors: whole tensors of the heads; updates of `head.lora_rank` are added up.
        config: of the run, recorded.
        best: where and how well they were measured, recorded.
    """
    provenance = {
        "config": dataclasses.asdict(config),
        "data_sha256": parts.documents.data_sha256,
        "data_kind": config.data.kind,
        "step": best.step,
        "held_out_walk": dataclasses.asdict(best.report),
    }
    plain = merged_tensors(tensors)
    save_heads(parts.heads, folder, provenance=jsonable(provenance), tensors=plain)
