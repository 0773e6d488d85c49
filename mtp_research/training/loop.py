"""Train MTP heads on a frozen target: the loop behind `python train.py`.

    documents -> packed rows -> target hidden states (no gradient) -> unroll -> loss -> AdamW
    every eval_every steps: replay walk on held-out documents; every save_every: a checkpoint

Written for one process or many: rows, label counts and the stop request are shared over ranks
through accelerate, and only the main process writes. `head/` holds the heads of the longest
held-out walk, not the last ones: past its best a head's loss goes on falling while its drafts get
worse.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from mtp_research.config.schema import TrainConfig
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import save_heads
from mtp_research.models.loading.source import source_facts
from mtp_research.runtime.errors import EnvironmentFault, IntegrityError, Interrupted
from mtp_research.training.checkpoint import (
    Checkpoint,
    clear_leftovers,
    save_checkpoint,
    step_seed,
)
from mtp_research.training.losses.losses import batch_labels, label_counts
from mtp_research.training.optim import cosine_learning_rate, merged_tensors
from mtp_research.training.packed_rows import row_indices
from mtp_research.training.parallel.peers import watched_peers
from mtp_research.training.setup import (
    RunParts,
    build_run,
    export_note,
    find_checkpoint,
    graphs_note,
    make_accelerator,
    schedule_note,
)
from mtp_research.training.tracking import (
    FigureQueue,
    ProgressView,
    SkippedSteps,
    StepFigures,
    StepStats,
    StopRequest,
    Tracker,
    jsonable,
)
from mtp_research.training.walk.replay import BestWalk, WalkReport, measure_held_out

DecodeEval = Callable[[MTPHeads], Mapping[str, object]]
_OF_STEPS = ("seconds", "train_tokens_per_s", "speed")  # in a result, of the steps that it made


def train_heads(
    config: TrainConfig,
    output_dir: Path,
    *,
    decode_eval: DecodeEval | None = None,
    on_start: Callable[[], object] | None = None,
) -> dict[str, object]:
    """Train heads, or go on where `output_dir` stopped, and write the best to `output_dir/head`.

    One run a folder: `mtp_research.runtime.files` keeps a second one out; the entries hold it.

    Args:
        config: checked configuration.
        output_dir: run folder: step folders, `metrics.jsonl`, `head/`. Rank 0's is everyone's.
        decode_eval: runs the real decode loop on the heads and returns its figures; called on the
            main process at each evaluation.
        on_start: called on the main process when nothing of the folder speaks against the run; a
            run that is refused has written nothing.

    Returns:
        JSON-serialisable result: acceptance length before and at best, per depth and domain, time.

    Raises:
        ConfigError: settings that do not fit.
        IntegrityError: damaged data or checkpoint.
        NumericFault: ten steps in a row with a non-finite loss or gradient.
        Interrupted: SIGTERM or SIGINT; the state is saved.
    """
    accelerator = make_accelerator(config)
    is_main = accelerator.is_main_process
    output_dir = Path(broadcast_object_list([str(output_dir)])[0])
    if is_main:
        output_dir.mkdir(parents=True, exist_ok=True)
    with StopRequest() as stop, watched_peers(accelerator):
        run = TrainingRun(config, output_dir=output_dir, accelerator=accelerator, stop=stop)
        if is_main:
            clear_leftovers(output_dir)
            if on_start is not None:
                on_start()
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
            return run.train(tracker, view, decode_eval=decode_eval)


class TrainingRun:
    """State of a run: parts, steps done, skipped steps, held-out reports.

    A checkpoint in `output_dir` is restored, see `find_checkpoint`.
    """

    def __init__(
        self, config: TrainConfig, *, output_dir: Path, accelerator: Accelerator, stop: StopRequest
    ) -> None:
        self.config = config
        self.output_dir = output_dir
        self.accelerator = accelerator
        self.stop = stop
        self.step = 0
        self.num_tokens = 0
        self.skips = SkippedSteps()
        self.is_stop_requested = False
        self.figures = FigureQueue()
        self.speed: dict[str, object] = {}  # of the last steps, see `StepCosts.figures`
        self.first_walk: WalkReport | None = None
        self.best = BestWalk()
        checkpoint = find_checkpoint(config, output_dir=output_dir)
        if checkpoint is not None:
            self._restore(checkpoint)
        self.parts: RunParts = build_run(config, accelerator=accelerator, checkpoint=checkpoint)
        accelerator.wait_for_everyone()

    def _restore(self, checkpoint: Checkpoint) -> None:
        state, self.step = checkpoint.state, checkpoint.step
        try:
            state["settings"].keys()  # compared when the parts are built
            self.skips = SkippedSteps(**state["skips"])
            self.first_walk = WalkReport(**state["first_walk"])
            self.best = BestWalk.from_state(state["best"])
        except (AttributeError, KeyError, TypeError, ValueError) as fault:
            raise IntegrityError(
                f"{checkpoint.folder / 'state.json'} must hold settings, skips, first_walk and "
                f"best as this version writes them, got {fault!r}; set another output_dir."
            ) from fault

    @property
    def is_finished(self) -> bool:
        """All steps are done, or the walk has not grown for too long."""
        trainer = self.config.trainer
        return self.step >= trainer.max_steps or self.best.is_stale(trainer.early_stopping_patience)

    def train(
        self, tracker: Tracker, view: ProgressView, *, decode_eval: DecodeEval | None
    ) -> dict[str, object]:
        """Steps until the run is finished, then the final report and checkpoint."""
        trainer, started_s = self.config.trainer, time.perf_counter()
        self._introduce(view)
        if self.first_walk is None:
            self.first_walk = self._measure(tracker, view, decode_eval=decode_eval)
        self._announce_rows()
        first_step = self.step
        while not self.is_finished:
            with self._saving_faults(tracker, view):
                self._train_step()
            self._report(self.figures.ready(), tracker=tracker, view=view)
            if self.step == first_step + 1:  # it compiled, and made the moments
                self._report(self.figures.drain(), tracker=tracker, view=view)
                self.parts.costs.end_warm_up()
            is_last = self.step == trainer.max_steps
            is_measured = is_last or self.step % trainer.eval_every == 0
            is_saved = is_last or self.step % trainer.save_every == 0
            if is_measured or is_saved or self.is_stop_requested:
                self._report(self.figures.drain(), tracker=tracker, view=view)
                self._report_speed(tracker)
            if is_measured:
                self._measure(tracker, view, decode_eval=decode_eval)
            if is_saved or self.is_finished or self.is_stop_requested:
                self._save()
            if self.is_stop_requested and not self.is_finished:
                raise Interrupted(
                    f"stopped by {self.stop.name or 'a signal on another rank'} after step "
                    f"{self.step}; the same command with output_dir={self.output_dir} goes on."
                )
        seconds = time.perf_counter() - started_s
        view.table(self.first_walk, self.best.report)
        if self.best.step == 0 and self.step:
            view.note(
                "warning: the held-out length never grew, so head/ holds the heads as they "
                "started; docs/troubleshooting.md says what to look at"
            )
        result = self._result() | {
            "seconds": round(seconds, 1),
            "train_tokens_per_s": round(self.num_tokens / seconds),
            "speed": self.speed,
        }
        if self.step == first_step:  # it had ended before: the figures of its steps stay
            result |= {name: tracker.last_result.get(name, result[name]) for name in _OF_STEPS}
        tracker.result(step=self.step, values=result, head=self.output_dir / "head")
        return jsonable(result)

    def _introduce(self, view: ProgressView) -> None:
        """Lines on what is trained, and on what."""
        if self.step:
            view.note(f"resumed from step_{self.step:06d}")
        view.note(self.parts.documents.line())
        if self.parts.loaded:
            view.note(self.parts.loaded)
        view.note(f"modules start from {self.parts.heads.provenance['started_from']}")
        if note := export_note(self.parts.heads):
            view.note(note)
        if note := schedule_note(
            self.config,
            num_parameters=sum(one.numel() for one in self.parts.heads.target.model.parameters()),
            num_processes=self.accelerator.num_processes,
        ):
            view.note(note)
        ranks = self.accelerator
        if note := graphs_note(self.config, device=ranks.device, num_processes=ranks.num_processes):
            view.note(note)

    @contextmanager
    def _saving_faults(self, tracker: Tracker, view: ProgressView) -> Iterator[None]:
        """Save the steps that were done, if any, when a server of hidden states has gone."""
        try:
            yield
        except EnvironmentFault:
            if self.step and self.accelerator.num_processes == 1:  # ranks would wait for each other
                self._report(self.figures.drain(), tracker=tracker, view=view)
                self._save()
            raise

    def _announce_rows(self) -> None:
        """Tell the rows what the steps to come will read."""
        config = self.config
        micros = range(config.trainer.gradient_accumulation_steps)
        self.parts.rows.follow(
            index
            for step in range(self.step, config.trainer.max_steps)
            for micro in micros
            for index in _rows_of(
                micro, parts=self.parts, config=config, ranks=self.accelerator, step=step
            )
        )

    def _train_step(self) -> None:
        """Queue one optimizer step on the device; nothing here waits for it."""
        trainer, parts = self.config.trainer, self.parts
        learning_rate = cosine_learning_rate(
            self.step / trainer.max_steps,
            step=self.step,
            peak=trainer.learning_rate,
            warmup_steps=round(trainer.warmup_fraction * trainer.max_steps),
            min_ratio=0.0,
        )
        stats = accumulate_gradients(
            parts, config=self.config, ranks=self.accelerator, step=self.step, stop=self.stop
        )
        grad_norm = parts.engine.step(learning_rate=learning_rate)
        self.step += 1
        self.figures.push(stats, step=self.step, learning_rate=learning_rate, grad_norm=grad_norm)

    def _report(
        self, finished: Iterable[StepFigures], *, tracker: Tracker, view: ProgressView
    ) -> None:
        """Log steps whose figures have arrived, and count those that were skipped."""
        for figures in finished:
            values = {
                "loss": figures.loss,
                "accuracy": figures.accuracy,
                "acceptance": figures.acceptance,
                "grad_norm": figures.grad_norm,
                "learning_rate": figures.learning_rate,
                "num_tokens": figures.num_tokens,
                **figures.expert_loads,
                **self.parts.rows.served_times(),
            }
            tracker.log("train", step=figures.step, values=values)
            view.step(figures.step, loss=figures.loss, accuracy=figures.accuracy)
            self.num_tokens += figures.num_tokens
            self.parts.costs.count(figures.num_tokens)
            self.is_stop_requested |= figures.is_stop_requested
            if self.skips.add(figures):
                view.note(f"step {figures.step} skipped: {figures.diagnosis}")

    def _report_speed(self, tracker: Tracker) -> None:
        """Log the speed of the steps since the last report, where there were any."""
        if found := self.parts.costs.figures():
            self.speed = found
            tracker.log("speed", step=self.step, values=found)

    def _measure(
        self, tracker: Tracker, view: ProgressView, *, decode_eval: DecodeEval | None
    ) -> WalkReport:
        """Replay walk on held-out documents, shared over ranks; a longer walk is the new best."""
        parts, ranks = self.parts, self.accelerator
        report = measure_held_out(parts, ranks=ranks, batch_size=self.config.trainer.batch_size)
        tracker.log("eval", step=self.step, values=dataclasses.asdict(report))
        view.walk(self.step, report)
        if decode_eval is not None and ranks.is_main_process:
            parts.heads.eval()
            tracker.log("decode", step=self.step, values=decode_eval(parts.heads))
            parts.heads.train()
        if self.best.add(report, step=self.step):
            tensors = parts.engine.head_tensors()
            if ranks.is_main_process:
                self._write_best(tensors)
        self.parts.costs.start()
        return report

    def _write_best(self, tensors: Mapping[str, Tensor]) -> None:
        """Write `head/`, which `spec.head=` takes; updates of `head.lora_rank` are added up.

        Files are replaced one by one, each at once, so that a crash leaves heads that can be read.
        """
        config = dataclasses.asdict(self.config)
        # Settings of other runs: `pretrain` would speak of a target that was made elsewhere.
        del config["model"]["pretrain"], config["matrix"], config["launcher"]
        provenance = {
            "config": config,
            "data_sha256": self.parts.documents.data_sha256,
            "data_kind": self.config.data.kind,
            "data": self.parts.documents.facts(),
            **source_facts(self.config.model.path),
            **self.parts.heads.provenance,
            "step": self.best.step,
            "held_out_walk": dataclasses.asdict(self.best.report),
        }
        save_heads(
            self.parts.heads,
            self.output_dir / "head",
            provenance=jsonable(provenance),
            tensors=merged_tensors(tensors),
        )

    def _save(self) -> None:
        """Write a step folder (main process); all ranks gather what is sharded."""
        engine = self.parts.engine
        tensors = {"head": engine.head_tensors(), "optimizer": engine.optimizer_tensors()}
        if self.accelerator.is_main_process:
            assert self.first_walk is not None, "a run is measured before its first step"
            save_checkpoint(
                self.output_dir,
                step=self.step,
                tensors=tensors,
                state={
                    "settings": self.parts.settings,
                    "skips": dataclasses.asdict(self.skips),
                    "first_walk": dataclasses.asdict(self.first_walk),
                    "best": self.best.state(),
                },
                keep_last=self.config.trainer.keep_last,
            )
        self.accelerator.wait_for_everyone()
        self.parts.costs.start()

    def _result(self) -> dict[str, object]:
        """Figures of the finished run; those of the walk belong to the best heads."""
        assert self.first_walk is not None, "a run is measured before its first step"
        return {
            "head": str(self.output_dir / "head"),
            "unroll": self.config.objective.unroll,
            "num_mtp_modules": self.config.head.num_mtp_modules,
            "num_steps": self.step,
            "num_skipped": self.skips.total,
            "num_short_documents": self.parts.documents.num_short,
            **self.parts.documents.facts(),
            "best_step": self.best.step,
            "acceptance_length_before": self.first_walk.acceptance_length,
            "acceptance_length_last": self.best.newest_length,
            **dataclasses.asdict(self.best.report),
        }


def accumulate_gradients(
    parts: RunParts, *, config: TrainConfig, ranks: Accelerator, step: int, stop: StopRequest
) -> StepStats:
    """Forward and backward of all micro-batches of step `step`, counted from 0.

    Labels are counted over the whole step first, so that each token weighs the same however the
    step is cut into micro-batches and ranks. Gradients are left in the parameters of `parts.heads`;
    `stop` is read after the last backward.
    """
    num_micro = config.trainer.gradient_accumulation_steps
    chosen = [
        _rows_of(micro, parts=parts, config=config, ranks=ranks, step=step)
        for micro in range(num_micro)
    ]
    batches = [parts.rows.batch(indices) for indices in chosen]
    labels = [batch_labels(batch, num_depths=parts.unroll_spec.num_depths) for batch in batches]
    counts = _sum_over(ranks, torch.stack([label_counts(micro) for micro in labels]).sum(dim=0))

    loss, num_correct = torch.zeros((), device=counts.device), torch.zeros_like(counts[:-1])
    sum_acceptance = torch.zeros_like(num_correct, dtype=torch.float32)
    for micro, (indices, batch) in enumerate(zip(chosen, batches, strict=True)):
        hidden = parts.rows.hidden(indices)
        rank = ranks.process_index
        torch.manual_seed(step_seed(config.seed, step=step, micro_batch=micro, rank=rank))
        with parts.engine.micro_batch(is_last=micro == num_micro - 1):
            part = parts.engine.objective(batch, hidden, labels[micro], counts)
            parts.engine.backward(part.loss * _poison(part.loss))
        loss += part.loss.detach()
        num_correct += part.num_correct
        sum_acceptance += part.sum_acceptance
    num_tokens = torch.stack([(batch.document_index >= 0).sum() for batch in batches]).sum()
    num_stops = num_tokens.new_full((), int(stop.name is not None))
    totals = _sum_over(ranks, torch.cat([num_correct, torch.stack([num_tokens, num_stops])]))
    loads = parts.expert_loads
    return StepStats(
        loss=_sum_over(ranks, loss),
        num_correct=totals[:-2],
        sum_acceptance=_sum_over(ranks, sum_acceptance),
        num_labels=counts[:-1],
        num_tokens=totals[-2],
        num_stops=totals[-1],
        expert_loads=loads and loads.spread(_sum_over(ranks, loads.take())),
    )


def _poison(loss: Tensor) -> Tensor:
    """1, or NaN for a loss that is not finite, which may have finite gradients.

    So a bad loss on one rank shows in the gradient norm of all, which alone decides on the update.
    """
    return torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


@contextmanager
def repeatable_sums(device: torch.device) -> Iterator[None]:
    """Make a step give the same bits each time it runs, which bit-exact resume needs.

    On a CPU with several threads the backward of a row gather adds duplicates in any order; the
    ordered form is as fast. GPU kernels are left as they are, and are not bit-exact.
    """
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        if device.type == "cpu":
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def _sum_over(ranks: Accelerator, tensor: Tensor) -> Tensor:
    return cast(Tensor, ranks.reduce(tensor, reduction="sum"))


def _rows_of(
    micro_batch: int, *, parts: RunParts, config: TrainConfig, ranks: Accelerator, step: int
) -> list[int]:
    """Rows of this rank's micro-batch: a function of seed and step only."""
    index = step * config.trainer.gradient_accumulation_steps + micro_batch
    slot = index * ranks.num_processes + ranks.process_index
    batch_size = config.trainer.batch_size
    return row_indices(
        slot * batch_size, count=batch_size, num_rows=len(parts.rows), seed=config.seed
    )
