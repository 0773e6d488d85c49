"""Captured decode steps: one CUDA graph per batch bucket replays the whole step.

A step in which every request decodes needs nothing from the host but slots, block tables and
sampling parameters: texts, lengths and drafts are on the device. So target pass, verification, row
plan, module passes and the next inputs are one graph; the host copies a few integers in, launches
it, and reads the tokens while the next one runs. Batches are padded to a bucket with requests that
live in the spare slot and the pool's spare block.

What logit processors and log-probabilities need is in tensors at fixed addresses; each set of them
that a batch uses has graphs of its own. Masks of grammars come from the host, which makes them of
the step before while the target pass runs: such a step is two graphs, cut behind the target pass.

Steps with few prompt rows can have graphs of their own; those with many run without one in a few
padded shapes (`mixed_graphs`). Everything else (prompt rows beside grammars or more requests beside
them than a bucket holds, positions by axis) runs the same `DeviceStep` as it comes.

Where ranks share experts (`Target.exchange`) a step is replayed by all ranks or by none, in one
shape (`capture.Wish`), and grammars always run as they come.

Letters: R requests, B bucket, M blocks per table, K drafts per step.
"""

import functools
import itertools
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.draft.drafter import MTPDrafter
from mtp_research.decode.graphs.capture import (
    CompiledParts,
    Kind,
    SharedSteps,
    StaticParams,
    StepShape,
    Wish,
    bucket_of,
    captured_sizes,
    first_requests,
    require_capturable,
    split_batch,
)
from mtp_research.decode.graphs.mixed_graphs import MixedGraphs
from mtp_research.decode.pool_size import blocks_per_request
from mtp_research.decode.sampling.sampling import SamplingTensors, batch_tensors
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.batch import (
    BlockTables,
    StepInputs,
    StepRows,
    have_axis_positions,
)
from mtp_research.decode.schedule.request import Scheduled
from mtp_research.decode.slot_state import map_tensors, write_to_device
from mtp_research.decode.step import DeviceStep, StepResult, TargetRows
from mtp_research.models.rewrites.apply_rewrites import apply_rewrites, options_of
from mtp_research.models.rewrites.regions import (
    LEAST_ROWS,
    CompileOptions,
    are_regions,
    mark_any_size,
)
from mtp_research.runtime.ahead import PassSize, programs_ahead
from mtp_research.runtime.captures import Captured, Result, capture_call, seconds_of
from mtp_research.runtime.compiling import (
    count_kernels,
    num_compilations,
    old_objects_kept,
    share_assembler,
)


def build_graphs(
    steps: Sequence[DeviceStep], *, engine: EngineConfig, max_model_len: int
) -> list["StepGraphs"]:
    """Captured steps; with `engine.compile` the modules are rewritten in place.

    Steps after the first one run fewer passes of the same round (`DeviceStep.of_first_passes`).
    """
    step = steps[0]
    require_capturable(step, engine=engine)
    if step.target.exchange is not None:
        step.target.exchange.num_rows = None  # rewrites try layers on as many rows on all ranks
    count_kernels()
    if engine.compile:
        share_assembler()
    # What an oracle or nobody drafts is not planned on the device.
    has_modules = step.drafter is None or isinstance(step.drafter, MTPDrafter)
    captures_mixed = engine.capture_mixed and has_modules
    apply_rewrites(step.target, step.heads, engine)
    step.cache.runs_regions = engine.compile and engine.layer_regions
    make = functools.partial(
        StepGraphs,
        batch_sizes=captured_sizes(
            engine.max_num_requests,
            wanted=engine.graph_batch_sizes,
            least=LEAST_ROWS if engine.deterministic else 1,
        ),
        num_table_blocks=blocks_per_request(
            step.drafter, plan=step.plan, engine=engine, max_model_len=max_model_len
        ),
        options=options_of(engine) if engine.compile else None,
        max_mixed_rows=engine.max_num_batched_tokens if captures_mixed else 0,
    )
    first = make(step)
    return [first, *(make(one, pool=first.pool) for one in steps[1:])]


class _Ran(NamedTuple):
    """A target pass, and what it ran on."""

    inputs: StepInputs
    target: TargetRows


class StepGraphs:
    """Graphs of a `DeviceStep`, captured when a bucket is first needed."""

    # Tensors made here are of the kind that steps make: code compiled for one kind serves no other.
    @torch.inference_mode()
    def __init__(
        self,
        step: DeviceStep,
        *,
        batch_sizes: Sequence[int],
        num_table_blocks: int,
        pool: Any = None,
        options: CompileOptions | None = None,
        max_mixed_rows: int = 0,
    ) -> None:
        self._step, self._batch_sizes = step, batch_sizes
        self._spare_slot, self._spare_block = step.slot_state.spare_slot, step.cache.num_blocks - 1
        device = step.slot_state.text.device
        self._slots = torch.full((batch_sizes[-1],), self._spare_slot, device=device)
        self._block_table = torch.full(
            (batch_sizes[-1], num_table_blocks), self._spare_block, dtype=torch.int32, device=device
        )
        self._tables = BlockTables(
            self._spare_slot,
            num_table_blocks=num_table_blocks,
            spare_block=self._spare_block,
            device=device,
        )
        self._params = StaticParams(batch_sizes[-1], device=device)
        self._uploaded_slots: list[int] = []  # of a bucket, padding included
        self._graphs: dict[Hashable, Captured[StepResult]] = {}
        self._targets: dict[Hashable, Captured[_Ran]] = {}  # target passes by themselves
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool  # of their memory
        self._rows: dict[tuple[int, int], StepRows] = {}
        self._compiler: CompiledParts | None = None
        if options is not None:
            self._compiler = CompiledParts.on(
                device,
                options,
                num_drafts=step.plan.num_speculative_tokens,
                serves_uneven_rows=_serves_uneven_rows(step),
            )
            _mark_state(step)
        self._mixed: MixedGraphs | None = None
        if max_mixed_rows > 0:
            self._mixed = MixedGraphs(
                step,
                max_requests=batch_sizes[-1],
                max_rows=max_mixed_rows,
                tables=self._tables,
                pool=self.pool,
                compiler=self._compiler,
            )
        self._exchange, self._runs_regions = step.target.exchange, step.cache.runs_regions
        limits = range(step.plan.num_speculative_tokens + 1)
        kinds = [Kind(False, *how) for how in itertools.product(batch_sizes, limits)]
        if self._mixed is not None:
            mixed = itertools.product(self._mixed.captured_rows, limits)
            kinds += [Kind(True, *how) for how in mixed]
        self._shared = SharedSteps(kinds)
        self._newest = self._params_of(SamplingParams(), 1)  # of the step that ran last
        self._capture_s = 0.0
        # by bucket and number of drafts, where `prepare` timed them
        self.step_seconds: dict[int, dict[int, float]] = {}

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        num_mixed = self._mixed.num_graphs if self._mixed is not None else 0
        return len(self._graphs) + len(self._targets) + num_mixed

    @property
    def num_builds(self) -> int:
        """Graphs captured so far, and compilations of the process; constant once all is ready."""
        return self.num_graphs + num_compilations()

    @property
    def capture_s(self) -> float:
        """Seconds of compiling and capturing so far."""
        return self._capture_s + (self._mixed.capture_s if self._mixed is not None else 0.0)

    @property
    def mixed_step_seconds(self) -> dict[int, dict[int, float]]:
        """`step_seconds` of captured steps with prompt rows, by their rows."""
        return {} if self._mixed is None else self._mixed.step_seconds

    @property
    def newest(self) -> Captured[StepResult]:
        """The decode step that was captured last, for a look at it alone; see `bench_split`.

        Of one with grammars, the part behind the target pass.
        """
        return list(self._graphs.values())[-1]

    def wish(
        self, entries: Sequence[Scheduled], params: SamplingTensors | None, *, draft_limit: int
    ) -> Wish:
        """What these entries would replay; none, and no `params`, where a rank has nothing to do.

        Where ranks share experts the rows of the entries hold for every draft limit.
        """
        has_prompts, is_shared = _has_prompt_rows(entries), self._exchange is not None
        is_unknown = have_axis_positions(entries)
        if params is not None and params.bitmask is not None:
            # The next part's requests may have ended with its masks.
            has_parts = len(entries) > len(self._slots)
            is_unknown |= has_prompts or has_parts or is_shared
        num_mixed_rows = 0
        if self._mixed is not None and (has_prompts or is_shared):
            num_mixed_rows = self._mixed.num_rows_for(entries)
        cannot_mix = num_mixed_rows == 0
        return Wish(len(entries), has_prompts, num_mixed_rows, draft_limit, is_unknown, cannot_mix)

    def say(self, wish: Wish, params: SamplingTensors | None) -> list[int]:
        """A wish and what is not captured for requests sampled so, as numbers for `agreed`."""
        return self._shared.say(wish, self._lacks(self._newest if params is None else params))

    def agreed(self, most: Sequence[int]) -> StepShape | None:
        """The shape in which all ranks replay a step, of the most that any of them has said.

        Layers of a step that runs as it comes are not called as regions: these are compiled for
        ranks that have equal numbers of rows.
        """
        shape = self._shared.agreed(most)
        self._step.cache.runs_regions = self._runs_regions and shape is not None
        return shape

    def run(
        self,
        shape: StepShape,
        entries: list[Scheduled],
        params: SamplingTensors | None,
        *,
        make_bitmask: Callable[[], Tensor],
    ) -> StepResult:
        """Replay the step in a shape that holds it.

        The result is overwritten by the next replay of the same graph. A batch above the largest
        bucket is replayed in parts, whose results are copied. `make_bitmask` is called where
        requests have grammars, once the target pass is launched. Without entries every place is
        padding, sampled as the step before.
        """
        self._newest = params = self._newest if params is None else params
        if shape.num_mixed_rows > 0:
            assert self._mixed is not None, "nothing was captured for prompt rows"
            self._uploaded_slots = []  # it takes news of the tables, which ours must have too
            self._shared.note_replay(Kind(True, shape.num_mixed_rows, shape.draft_limit))
            return self._mixed.run(shape, entries, params)
        if shape.num_requests <= len(self._slots):
            return self._replay(entries, params, shape, make_bitmask)
        results = []
        for part in split_batch(shape.num_requests, len(self._slots)):
            cut = map_tensors(itemgetter(part), params)
            one = shape._replace(num_requests=part.stop - part.start)
            result = self._replay(entries[part], cut, one, make_bitmask)
            results.append(map_tensors(Tensor.clone, result))
        return map_tensors(lambda *parts: torch.cat(parts), *results)

    def _replay(
        self,
        entries: list[Scheduled],
        params: SamplingTensors,
        shape: StepShape,
        make_bitmask: Callable[[], Tensor],
    ) -> StepResult:
        bucket = bucket_of(shape.num_requests, self._batch_sizes)
        self._upload(entries, bucket)
        target, captured = self._captured(bucket, params, shape.draft_limit, missing=shape.missing)
        if target is not None:
            before = torch.cuda.Event() if self._slots.is_cuda else None
            if before is not None:
                before.record()
            target.graph.replay()
            self._params.write_bitmask(make_bitmask(), after=before)
        captured.graph.replay()
        self._shared.note_replay(Kind(False, bucket, shape.draft_limit))
        return first_requests(captured.result, len(entries))

    def prepare(
        self,
        sampling: SamplingParams,
        *,
        draft_limits: Sequence[int],
        num_requests: int | None = None,
        is_timed: bool = False,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Capture every bucket for requests sampled like this, before a clock starts.

        Only those that `num_requests` requests can fill, the largest and first needed one first.
        Each is captured for all `draft_limits`; with `is_timed` their steps are timed.
        Ranks that share experts all call it, and capture what one of them needs.
        """
        first_s, most = self.capture_s, self._batch_sizes[-1]
        missing: frozenset[Kind] = frozenset()
        num_requests = min(num_requests or most, most)
        if self._exchange is not None:
            sampling = replace(sampling, grammar=None)  # steps with one run as they come
            self._newest = self._params_of(sampling, 1)
            num_requests, *lacks = self._exchange.most([num_requests, *self._lacks(self._newest)])
            missing = self._shared.missing(lacks)
            self._exchange.num_rows = None
            self._step.cache.runs_regions = self._runs_regions
        largest = bucket_of(num_requests, self._batch_sizes)
        sizes = [size for size in reversed(self._batch_sizes) if size <= largest]
        passes = self._passes(sizes, draft_limits) if self._compiler is not None else ()
        with old_objects_kept(), programs_ahead(passes, self._slots.device):
            for number, bucket in enumerate(sizes, start=1):
                before_s = self.capture_s
                params = self._params_of(sampling, bucket)
                for draft_limit in draft_limits:
                    self._captured(bucket, params, draft_limit, missing=missing)
                if is_timed:
                    self.step_seconds[bucket] = self._timed(bucket, params, draft_limits)
                if log is not None:
                    log(
                        f"captured {number} of {len(sizes)}: batch {bucket}, "
                        f"{self.capture_s - before_s:.1f} s, "
                        f"{self.capture_s - first_s:.0f} s so far"
                    )
            if self._mixed is not None:
                before_s = self.capture_s
                params = self._params_of(sampling, 1)
                self._mixed.prepare(
                    params, draft_limits=draft_limits, missing=missing, is_timed=is_timed
                )
                if log is not None:
                    log(f"captured steps with prompt rows in {self.capture_s - before_s:.1f} s")

    def _passes(self, sizes: Sequence[int], draft_limits: Sequence[int]) -> set[PassSize]:
        """Passes of the steps of these buckets and with prompt rows, and rows with logits."""
        plan, counts = self._step.plan, {1}  # rows of a request: of a draft's logits
        for limit in draft_limits:
            counts.add(limit + 1)
            counts |= {
                plan.num_static_rows(step, num_fresh=limit + 1, makes_draft=step < limit)
                for step in range(plan.num_speculative_tokens)
            }
        found = {PassSize(size * rows, size, rows) for size in sizes for rows in counts}
        return found if self._mixed is None else found.union(self._mixed.passes(draft_limits))

    def _params_of(self, sampling: SamplingParams, num_requests: int) -> SamplingTensors:
        return batch_tensors(
            [sampling] * num_requests,
            num_prompt_tokens=[1] * num_requests,
            # K of the requests' masks, of which steps of fewer passes read the first
            num_speculative_tokens=self._step.slot_state.draft_token_ids.shape[1],
            vocab_size=self._step.target.config.vocab_size,
            device=self._slots.device,
        )

    def _lacks(self, params: SamplingTensors) -> list[int]:
        """For each kind, whether it is not captured for requests sampled so."""
        key = self._params.key_of(params)
        return self._shared.lacks(lambda kind: self._has(kind, key), key=(key, self.num_graphs))

    def _has(self, kind: Kind, key: Hashable) -> bool:
        if kind.is_mixed:
            return self._mixed is not None and self._mixed.has(kind, key)
        return (kind.size, kind.draft_limit, key) in self._graphs

    def _captured(
        self,
        bucket: int,
        params: SamplingTensors,
        draft_limit: int,
        *,
        missing: Collection[Kind] = (),
    ) -> tuple[Captured[_Ran] | None, Captured[StepResult]]:
        """Graphs of a step: of its target pass where masks come after it, and of the rest."""
        key = (bucket, draft_limit, self._params.upload(params))
        target = None if params.bitmask is None else self._captured_target(bucket, draft_limit)
        if key not in self._graphs or Kind(False, bucket, draft_limit) in missing:
            view = self._params.view(params, bucket)
            if target is None:
                part = functools.partial(self._run_step, view, draft_limit)
            else:
                part = functools.partial(self._run_behind_target, view)
            self._graphs[key] = self._capture(bucket, part, target)
        return target, self._graphs[key]

    def _captured_target(self, bucket: int, draft_limit: int) -> Captured[_Ran]:
        key = (bucket, draft_limit)
        if key not in self._targets:
            part = functools.partial(self._run_target, draft_limit)
            self._targets[key] = self._capture(bucket, part)
        return self._targets[key]

    def _timed(
        self, bucket: int, params: SamplingTensors, draft_limits: Sequence[int]
    ) -> dict[int, float]:
        """Seconds of a step by its number of drafts, of requests whose texts are short."""
        self._slots[:bucket], self._block_table[:bucket] = self._spare_slot, self._spare_block
        self._uploaded_slots = []
        seconds = {}
        for draft_limit in draft_limits:
            target, captured = self._captured(bucket, params, draft_limit)
            replays = [part.graph.replay for part in (target, captured) if part is not None]
            seconds[draft_limit] = seconds_of(replays, device=self._slots.device)
        return seconds

    def _upload(self, entries: list[Scheduled], bucket: int) -> None:
        """Slots and block tables of the batch; nothing when they are there already."""
        requests = [entry.request for entry in entries]
        slots = [cast(int, request.slot) for request in requests]
        slots += [self._spare_slot] * (bucket - len(slots))
        have_changed = self._tables.update(requests)
        if slots != self._uploaded_slots:
            write_to_device(slots, self._slots[:bucket])
            self._uploaded_slots = slots
        elif not have_changed:
            return
        self._tables.read(self._slots[:bucket], out=self._block_table[:bucket])

    def _capture(
        self,
        bucket: int,
        part: Callable[..., Result],
        target: Captured[_Ran] | None = None,
    ) -> Captured[Result]:
        """Warm up and capture a part of a step behind `target`, on the slots of a bucket.

        Its requests must not be in the spare slot.
        """
        started = time.perf_counter()
        inputs = self._slots[:bucket], self._block_table[:bucket]
        slots, table = (tensor.clone() for tensor in inputs)
        # Warming up must change no request: every row is padding for the time being.
        self._slots[:bucket] = self._spare_slot
        self._block_table[:bucket] = self._spare_block
        if self._compiler is not None:
            mark_any_size(inputs[1], dim=1)
        if target is not None:  # a capture computes nothing: its result is what lay in memory
            target.graph.replay()
        captured = capture_call(
            lambda: part(*inputs) if target is None else part(target.result),
            pool=self.pool,
        )
        self._slots[:bucket], self._block_table[:bucket] = slots, table
        self._capture_s += time.perf_counter() - started
        return captured

    def _run_step(
        self, params: SamplingTensors, num_drafts: int, slots: Tensor, block_table: Tensor
    ) -> StepResult:
        target = self._run_target(num_drafts, slots, block_table)
        return self._run_behind_target(params, target)

    def _run_target(self, num_drafts: int, slots: Tensor, block_table: Tensor) -> _Ran:
        rows = self._rows_of(slots, num_drafts)
        inputs = self._step.captured_inputs(
            rows, block_table, num_drafts=num_drafts, compiler=self._compiler
        )
        return _Ran(inputs, self._step.parts.target(inputs))

    def _run_behind_target(self, params: SamplingTensors, ran: _Ran) -> StepResult:
        draft_limit = ran.inputs.max_query_len - 1
        return self._step.finish(ran.inputs, ran.target, params, draft_limit=draft_limit)

    def _rows_of(self, slots: Tensor, num_drafts: int) -> StepRows:
        """What no step of a bucket changes: made before its first graph is captured."""
        key = (len(slots), num_drafts)
        if key not in self._rows:
            self._rows[key] = StepRows.decoding(slots, num_drafts=num_drafts)
        return self._rows[key]


def _serves_uneven_rows(step: DeviceStep) -> bool:
    """Whether code of a pass can serve prompt rows as well.

    Layers must be regions, which ask for the pass that is running, and of this process alone.
    """
    is_alone = step.target.exchange is None
    return is_alone and step.cache.runs_regions and are_regions(step.target, step.heads)


def _mark_state(step: DeviceStep) -> None:
    """Code compiled for this state holds for longer texts, more requests, other K, other pools."""
    state = step.slot_state
    by_slot = (state.text, state.num_tokens, state.first_row, state.hidden)
    by_draft = (state.draft_token_ids, *(() if state.draft_probs is None else (state.draft_probs,)))
    mark_any_size(*by_slot, *by_draft, dim=0)
    mark_any_size(state.text, *by_draft, dim=1)
    for layer, stack in enumerate(step.cache.stacks):
        mark_any_size(stack.keys, stack.values, dim=0)
        mark_any_size(stack.keys, stack.values, dim=1)
        pages = step.cache.pages(layer)
        mark_any_size(pages.keys, pages.values, dim=0)


def _has_prompt_rows(entries: Sequence[Scheduled]) -> bool:
    return any(entry.is_prefill for entry in entries)
