"""The held-out walk of a run, its documents shared over ranks."""

import math

from accelerate import Accelerator
from accelerate.utils import gather_object

from mtp_research.training.replay import WalkReport, held_out_drafts, walk_report
from mtp_research.training.setup import RunParts


def measure_held_out(parts: RunParts, *, ranks: Accelerator, batch_size: int) -> WalkReport:
    """Replay walk on all held-out documents; all ranks call it and get the same report.

    Args:
        parts: of the run.
        ranks: processes.
        batch_size: packed rows per forward.
    """
    num_rows = len(parts.held_out_rows)
    mine = list(range(num_rows))[ranks.process_index :: ranks.num_processes]
    num_batches = math.ceil(num_rows / (ranks.num_processes * batch_size))
    batches = [mine[index * batch_size : (index + 1) * batch_size] for index in range(num_batches)]
    parts.heads.eval()
    drafts = held_out_drafts(
        parts.heads,
        parts.held_out_rows,
        spec=parts.unroll_spec,
        # Row 0 again for a rank that has run out: sharded modules run on all ranks or on none.
        row_batches=[batch or [0] for batch in batches],
    )
    parts.heads.train()
    return walk_report(
        dict(gather_object(list(drafts.items()))),
        documents=parts.documents.held_out,
        num_depths=parts.unroll_spec.num_depths,
    )
