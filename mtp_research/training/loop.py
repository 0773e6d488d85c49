"""Train MTP heads on a frozen target: the loop behind `python train.py`.

    documents -> packed rows -> target hidden states (no gradient) -> unroll -> loss -> AdamW
    every eval_every steps: replay walk on held-out documents; every save_every: a checkpoint

Written for one process or many: rows, label counts and the stop request are shared over ranks
through accelerate, and only the main process writes.

Letters: k depths, B batch rows.
"""

import dataclasses
import math
import time
from contextlib import nullcontext
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from mtp_research.config import TrainConfig
from mtp_research.errors import Interrupted, NumericFault
from mtp_research.heads.weights import save_heads
from mtp_research.training.checkpoint import run_lock, save_checkpoint
from mtp_research.training.optim import cosine_learning_rate
from mtp_research.training.progress import ProgressView
from mtp_research.training.replay import WalkReport, held_out_hits, walk_report
from mtp_research.training.setup import (
    RunParts,
    build_run,
    find_checkpoint,
    make_accelerator,
    restore_run,
)
from mtp_research.training.signals import StopRequest
from mtp_research.training.state import optimizer_tensors
from mtp_research.training.step import StepStats, accumulate_gradients, repeatable_sums
from mtp_research.training.tracking import Tracker, jsonable

MAX_SKIPPED_IN_A_ROW = 10


def train_heads(config: TrainConfig, output_dir: Path) -> dict[str, object]:
    """Train heads, or go on where `output_dir` stopped, and write them to `output_dir/head`.

    Args:
        config: checked configuration.
        output_dir: run folder: step folders, `metrics.jsonl`, `head/`.

    Returns:
        JSON-serialisable result: acceptance length before and after, per depth and domain, time.

    Raises:
        ConfigError: settings that do not fit; a folder that another run uses.
        IntegrityError: damaged data or checkpoint.
        NumericFault: ten steps in a row with a non-finite loss or gradient.
        Interrupted: SIGTERM or SIGINT; the state is saved.
    """
    accelerator = make_accelerator(config)
    is_main = accelerator.is_main_process
    with run_lock(output_dir) if is_main else nullcontext(), StopRequest() as stop:
        run = HeadRun(config, output_dir=output_dir, accelerator=accelerator, stop=stop)
        tracker = Tracker(
            output_dir,
            settings=config.logger,
            config=dataclasses.asdict(config),
            first_step=run.step,
            is_writer=is_main,
        )
        max_steps = config.trainer.max_steps
        view = ProgressView(num_steps=max_steps, first_step=run.step, is_shown=is_main)
        with tracker, view, repeatable_sums(accelerator.device):
            return run.train(tracker, view)


class HeadRun:
    """State of a run: parts, steps done, skipped steps, held-out reports.

    Args:
        config: checked configuration.
        output_dir: run folder.
        accelerator: ranks and device.
        stop: set by a signal.
    """

    def __init__(
        self, config: TrainConfig, *, output_dir: Path, accelerator: Accelerator, stop: StopRequest
    ) -> None:
        """Build everything and restore the checkpoint, if there is one."""
        self.config = config
        self.output_dir = output_dir
        self.accelerator = accelerator
        self.stop = stop
        self.step = 0
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self.walks: list[WalkReport] = []  # before training, and the newest
        checkpoint = find_checkpoint(config, output_dir=output_dir)
        self.parts: RunParts = build_run(config, accelerator=accelerator)
        if checkpoint is not None:
            restore_run(self.parts, checkpoint)
            self.step = checkpoint.step
            self.num_skipped = checkpoint.state["num_skipped"]
            self.num_skipped_in_a_row = checkpoint.state["num_skipped_in_a_row"]
            self.walks = [WalkReport(**walk) for walk in checkpoint.state["walks"]]
        accelerator.wait_for_everyone()

    def train(self, tracker: Tracker, view: ProgressView) -> dict[str, object]:
        """Steps up to `trainer.max_steps`, then the final report, checkpoint and head folder."""
        trainer, started_s = self.config.trainer, time.perf_counter()
        if not self.walks:
            self.walks = [self._measure(tracker, view)] * 2
        num_tokens = 0
        while self.step < trainer.max_steps:
            stats = self._train_step(tracker, view)
            num_tokens += stats.num_tokens
            is_last = self.step == trainer.max_steps
            if is_last or self.step % trainer.eval_every == 0:
                self.walks[1] = self._measure(tracker, view)
            if is_last or stats.is_stop_requested or self.step % trainer.save_every == 0:
                self._save()
            if stats.is_stop_requested and not is_last:
                raise Interrupted(
                    f"stopped by {self.stop.name or 'a signal on another rank'} after step "
                    f"{self.step}; the same command with output_dir={self.output_dir} goes on."
                )
        seconds = time.perf_counter() - started_s
        view.table(*self.walks)
        result = self._result() | {
            "seconds": round(seconds, 1),
            "train_tokens_per_s": round(num_tokens / seconds),
        }
        tracker.log("result", step=self.step, values=result)
        self._write_head(result)
        return jsonable(result)

    def _train_step(self, tracker: Tracker, view: ProgressView) -> StepStats:
        """One optimizer step: gradients of all micro-batches, then the update, or a skip."""
        trainer = self.config.trainer
        learning_rate = cosine_learning_rate(
            self.step / trainer.max_steps,
            step=self.step,
            peak=trainer.learning_rate,
            warmup_steps=round(trainer.warmup_fraction * trainer.max_steps),
            min_ratio=0.0,
        )
        stats = accumulate_gradients(
            self.parts, config=self.config, ranks=self.accelerator, step=self.step, stop=self.stop
        )
        grad_norm = math.nan
        if math.isfinite(stats.loss):
            grad_norm = float(self.parts.optimizer.step(learning_rate=learning_rate))
        else:
            self.parts.heads.zero_grad(set_to_none=True)
        self.step += 1
        values = {
            "loss": stats.loss,
            "accuracy": stats.accuracy,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "num_tokens": stats.num_tokens,
        }
        tracker.log("train", step=self.step, values=values)
        self._count_skips(is_skipped=not math.isfinite(grad_norm), values=values, view=view)
        view.step(self.step, loss=stats.loss, accuracy=stats.accuracy)
        return stats

    def _count_skips(
        self, *, is_skipped: bool, values: dict[str, object], view: ProgressView
    ) -> None:
        """Count a skipped step; ten in a row end the run."""
        self.num_skipped += is_skipped
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if is_skipped else 0
        if not is_skipped:
            return
        figures = f"loss {values['loss']}, gradient norm {values['grad_norm']}"
        view.note(f"step {self.step} skipped: {figures}")
        if self.num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NumericFault(
                f"{self.num_skipped_in_a_row} steps in a row were not finite, the last at step "
                f"{self.step} ({figures}); lower trainer.learning_rate or look at the data."
            )

    def _measure(self, tracker: Tracker, view: ProgressView) -> WalkReport:
        """Replay walk on held-out documents; rows are shared over ranks."""
        parts, ranks = self.parts, self.accelerator
        mine = list(range(len(parts.held_out_rows)))[ranks.process_index :: ranks.num_processes]
        size = self.config.trainer.batch_size
        parts.heads.eval()
        hits = held_out_hits(
            parts.heads,
            parts.held_out_rows,
            spec=parts.unroll_spec,
            row_batches=[mine[start : start + size] for start in range(0, len(mine), size)],
        )
        parts.heads.train()
        report = walk_report(
            dict(gather_object(list(hits.items()))),
            documents=parts.documents.held_out,
            num_depths=parts.unroll_spec.num_depths,
        )
        tracker.log("eval", step=self.step, values=dataclasses.asdict(report))
        view.walk(self.step, report)
        return report

    def _save(self) -> None:
        """Write a step folder (main process)."""
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        parts = self.parts
        save_checkpoint(
            self.output_dir,
            step=self.step,
            tensors={
                "head": parts.heads.state_dict(),
                "optimizer": optimizer_tensors(parts.optimizer, names=parts.names),
            },
            state={
                "settings": parts.settings,
                "num_skipped": self.num_skipped,
                "num_skipped_in_a_row": self.num_skipped_in_a_row,
                "walks": [dataclasses.asdict(walk) for walk in self.walks],
            },
            keep_last=self.config.trainer.keep_last,
        )

    def _result(self) -> dict[str, object]:
        """Figures of the finished run."""
        before, after = self.walks
        return {
            "head": str(self.output_dir / "head"),
            "unroll": self.config.objective.unroll,
            "num_mtp_modules": self.config.head.num_mtp_modules,
            "num_steps": self.step,
            "num_skipped": self.num_skipped,
            "acceptance_length_before": before.acceptance_length,
            **dataclasses.asdict(after),
        }

    def _write_head(self, result: dict[str, object]) -> None:
        """The head folder that `spec.head=` takes (main process)."""
        if self.accelerator.is_main_process:
            provenance = {
                "config": dataclasses.asdict(self.config),
                "data_sha256": self.parts.documents.data_sha256,
                "result": result,
            }
            folder = self.output_dir / "head"
            save_heads(self.parts.heads, folder, provenance=jsonable(provenance))
