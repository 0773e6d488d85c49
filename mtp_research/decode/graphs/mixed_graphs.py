"""Captured steps with prompt rows: one CUDA graph per number of rows.

A request that arrives while others decode brings prompt rows into their step. Without a graph such
a step takes as long as its launches, in which nobody else decodes. Steps of few rows are padded to
a bucket: padding requests in the spare slot take the rows that are left over. Larger steps keep the
device busy without a graph; how large depends on the target. They are padded as well, to one of the
few sizes of `large_sizes`: kernels are compiled anew for other numbers of rows, requests and blocks
(Triton looks at each), so that a step of a shape that was never run would wait for its compiler.
`prepare` runs every shape once. All parts of a step run the code that was compiled for decode
steps, so that a bucket is captured in about a second; where layers are no regions, or ranks share
experts, passes in which requests have different numbers of rows are not compiled. Latent attention
of prompts behind a long context is a reason to go without a graph, too: only there are latents
expanded, as no graph can depend on how many there are.

Letters: R requests, T packed rows, M blocks per table, K drafts per step, P padding requests.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from mtp_research.decode.draft.drafter import MTPDrafter
from mtp_research.decode.graphs.capture import (
    Kind,
    StaticParams,
    StepShape,
    first_requests,
)
from mtp_research.decode.sampling.sampling import SamplingTensors
from mtp_research.decode.schedule.batch import (
    BlockTables,
    PartCompiler,
    StepRows,
    facts_of,
    prompts_of,
)
from mtp_research.decode.schedule.request import Scheduled
from mtp_research.decode.slot_state import write_to_device
from mtp_research.decode.step import DeviceStep, StepResult
from mtp_research.kernels.latent.expanded_attention import (
    LatentDims,
    Prompts,
    Span,
    products_saved,
)
from mtp_research.models.attention.paged import expansion_of, latent_dims
from mtp_research.models.rewrites.regions import mark_any_size
from mtp_research.policy.plan import BaseRows
from mtp_research.runtime.ahead import PassSize
from mtp_research.runtime.captures import Captured, capture_call, seconds_of

MIXED_ROWS = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)  # T of the buckets, ascending
# The largest of them for every target; above it a row keeps a large one busier than a launch takes.
_ALWAYS_ROWS = 1024
# Multiplications (rows times parameters, say) up to which the launches of a step take longer: 8e12
# operations are about 15 ms of an H200.
_LAUNCH_BOUND = 4e12
_SIZES_AN_OCTAVE = 8  # of larger steps: at most an eighth of the rows is padding
_NUM_FACTS = 7  # those of `facts_of`, then the most base rows of a draft pass
_SLOT = 0  # the first of them


class MixedShape(NamedTuple):
    """What a bucket's tensors and launches are sized by."""

    num_rows: int  # T
    num_requests: int  # R, padding requests included
    longest: int  # rows that one request has at most
    num_base_rows: int  # base rows of a draft pass
    longest_base: int  # of one request

    @classmethod
    def of(cls, num_rows: int, *, max_requests: int, max_text: int, num_rerun: int) -> "MixedShape":
        """Room for any batch of `num_rows` rows."""
        most = max_text - num_rerun  # draft rows lie behind a request's own
        num_padding = -(-num_rows // most)
        max_requests = min(max_requests, num_rows)
        spare = num_rerun * (max_requests + num_padding)
        return cls(
            num_rows=num_rows,
            num_requests=max_requests + num_padding,
            longest=min(num_rows, most),
            num_base_rows=num_rows + spare,
            # The last padding request takes what others leave, one row of a decoding one included.
            longest_base=min(num_rows, most) + spare + max_requests,
        )


class MixedGraphs:
    """Graphs of the steps of a `DeviceStep` that have prompt rows."""

    def __init__(
        self,
        step: DeviceStep,
        *,
        max_requests: int,
        max_rows: int,
        tables: BlockTables,
        pool: Any,
        compiler: PartCompiler | None,
    ) -> None:
        self._step, self._pool = step, pool
        self._compiler = compiler
        self._max_requests, self._tables = max_requests, tables
        self._spare_slot = step.slot_state.spare_slot
        num_rerun = step.plan.num_speculative_tokens
        self._rows_each = num_rerun + 1  # of a request that decodes
        self._latents = latent_heads(step.target.model)
        num_parameters = sum(weight.numel() for weight in step.target.model.parameters())
        captured = row_buckets(max_rows, num_parameters=num_parameters)
        large = large_sizes(captured[-1], most=max_rows)
        self._captured_rows = captured[-1]  # most rows of a step that is captured
        self._shapes = [
            MixedShape.of(
                num_rows,
                max_requests=max_requests,
                max_text=tables.width * step.cache.block_size,
                num_rerun=num_rerun,
            )
            for num_rows in (*captured, *large)
        ]
        self._first_large = self._shapes[len(captured)] if large else None
        device = step.slot_state.text.device
        most = max(shape.num_requests for shape in self._shapes)
        most += most % 2  # compiled code wants rows of `_facts` at multiples of 16 bytes
        self._facts = torch.zeros(_NUM_FACTS, most, dtype=torch.int64, device=device)
        self._params = StaticParams(most, device=device)
        self._graphs: dict[Hashable, Captured[StepResult]] = {}
        self.capture_s = 0.0
        # by rows and number of drafts, where `prepare` timed them
        self.step_seconds: dict[int, dict[int, float]] = {}

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    @property
    def captured_rows(self) -> list[int]:
        """Rows of the steps that are captured, ascending; larger ones are padded alone."""
        sizes = (shape.num_rows for shape in self._shapes)
        return [num_rows for num_rows in sizes if num_rows <= self._captured_rows]

    def passes(self, draft_limits: Sequence[int]) -> Iterator[PassSize]:
        """Passes of the steps of these shapes, and rows whose logits are read."""
        plan = self._step.plan
        for num_rows, num_requests, longest, num_base_rows, longest_base in self._shapes:
            yield PassSize(num_rows, num_requests, longest)
            yield PassSize(num_requests, num_requests, 1)  # a draft's logits
            for limit in draft_limits:
                yield PassSize(num_requests * (limit + 1), num_requests, limit + 1)
                for draft_step in range(plan.num_speculative_tokens):
                    above = plan.num_draft_rows(draft_step, makes_draft=draft_step < limit)
                    total = num_requests * above
                    if plan.has_base(draft_step):
                        yield PassSize(num_base_rows + total, num_requests, longest_base + above)
                    else:
                        yield PassSize(total, num_requests, above)

    def has(self, kind: Kind, key: Hashable) -> bool:
        """Whether a kind is captured for requests of a sampling key (`StaticParams.key_of`)."""
        return (kind.size, kind.draft_limit, key) in self._graphs

    def num_rows_for(self, entries: Sequence[Scheduled]) -> int:
        """Rows of the shape that a step of these entries takes; 0 where none holds it."""
        num_rows = sum(entry.num_scheduled_tokens for entry in entries)
        if num_rows > self._shapes[-1].num_rows or len(entries) > self._max_requests:
            return 0
        shape = next(shape for shape in self._shapes if num_rows <= shape.num_rows)
        if self._first_large is not None and self._saves_by_expanding(entries):
            shape = max(shape, self._first_large)
        return shape.num_rows

    def run(
        self, shape: StepShape, entries: Sequence[Scheduled], params: SamplingTensors
    ) -> StepResult:
        """Run the step in a shape of at least `num_rows_for` rows; without entries all is padding.

        The next replay of the same bucket overwrites the result.
        """
        num_rows, draft_limit, missing = shape.num_mixed_rows, shape.draft_limit, shape.missing
        mixed = next(one for one in self._shapes if one.num_rows == num_rows)
        if num_rows > self._captured_rows:
            result = self._run_large(mixed, entries, params, draft_limit)
            return first_requests(result, len(entries))
        captured = self._captured(mixed, params, draft_limit, missing=missing)
        self._upload(mixed, entries)
        captured.graph.replay()
        return first_requests(captured.result, len(entries))

    def prepare(
        self,
        params: SamplingTensors,
        *,
        draft_limits: Sequence[int],
        missing: Collection[Kind],
        is_timed: bool = False,
    ) -> None:
        """Capture every bucket for requests sampled like `params`, and run every larger shape.

        Their rows are all padding, in the spare slot and the spare block. `missing` is captured
        anew; with `is_timed` what is captured is timed.
        """
        for shape, draft_limit in itertools.product(reversed(self._shapes), draft_limits):
            if shape.num_rows <= self._captured_rows:
                captured = self._captured(shape, params, draft_limit, missing=missing)
                if is_timed:
                    self._upload(shape, [])
                    seconds = seconds_of([captured.graph.replay], device=self._facts.device)
                    self.step_seconds.setdefault(shape.num_rows, {})[draft_limit] = seconds
                continue
            started = time.perf_counter()
            for expands in (False, True)[: 1 + bool(self._latents)]:
                self._run_large(shape, [], params, draft_limit, expands=expands)
            if self._facts.is_cuda:
                torch.cuda.synchronize()
            self.capture_s += time.perf_counter() - started

    def _run_large(
        self,
        shape: MixedShape,
        entries: Sequence[Scheduled],
        params: SamplingTensors,
        draft_limit: int,
        *,
        expands: bool = True,
    ) -> StepResult:
        """The step as it is, padded to `shape`; latents of prompts are expanded where it pays."""
        self._params.upload(params)
        left = self._upload(shape, entries)
        prompts = self._prompts(shape, entries, left) if expands and self._latents else None
        return self._device_part(shape, params, draft_limit, prompts)()

    def _saves_by_expanding(self, entries: Sequence[Scheduled]) -> bool:
        """Whether expanding the prompts' latents saves more than the launches of a step take."""
        prompts = prompts_of(entries) if self._latents else None
        if prompts is None:
            return False
        saved = (heads * products_saved(prompts.spans, d) for d, heads in self._latents.items())
        return sum(saved) > _LAUNCH_BOUND

    def _prompts(
        self, shape: MixedShape, entries: Sequence[Scheduled], left: Sequence[int]
    ) -> Prompts | None:
        """The prompts of a large step, padding requests behind them included."""
        found = prompts_of(entries)
        if found is None and entries:
            return None  # somebody else decodes behind them
        spans = () if found is None else found.spans
        _, num_others, longest, _ = found or Prompts((), 0, 0, 0)
        return Prompts(
            (*spans, *(Span(0, num_rows) for num_rows in left)),
            num_others,
            longest_other=max(longest, self._rows_each),
            num_launched=max(num_others, min(shape.num_rows, shape.num_requests * self._rows_each)),
        )

    def _captured(
        self,
        shape: MixedShape,
        params: SamplingTensors,
        draft_limit: int,
        *,
        missing: Collection[Kind],
    ) -> Captured[StepResult]:
        key = (shape.num_rows, draft_limit, self._params.upload(params))
        if key not in self._graphs or Kind(True, shape.num_rows, draft_limit) in missing:
            started = time.perf_counter()
            self._upload(shape, [])  # warming up must change no request
            call = self._device_part(shape, params, draft_limit)
            self._graphs[key] = capture_call(call, pool=self._pool)
            self.capture_s += time.perf_counter() - started
        return self._graphs[key]

    def _device_part(
        self,
        shape: MixedShape,
        params: SamplingTensors,
        draft_limit: int,
        prompts: Prompts | None = None,
    ) -> Callable[[], StepResult]:
        num_requests = shape.num_requests
        static, step = self._params.view(params, num_requests), self._step

        def run() -> StepResult:
            *facts, base_counts = self._facts[:, :num_requests]
            block_table = self._tables.read(facts[_SLOT])
            if self._compiler is not None:
                mark_any_size(block_table, dim=1)
            inputs = step.captured_inputs(
                StepRows.of_facts(facts, total=shape.num_rows, longest=shape.longest),
                block_table,
                num_drafts=step.plan.num_speculative_tokens,
                compiler=self._compiler,
            )
            base_rows = BaseRows(
                base_counts,
                total=shape.num_base_rows,
                longest=shape.longest_base,
            )
            inputs = replace(inputs, base_rows=base_rows, prompts=prompts)
            return step.run(inputs, static, draft_limit=draft_limit)

        return run

    def _upload(self, shape: MixedShape, entries: Sequence[Scheduled]) -> list[int]:
        """Tell the device of the entries; returns the rows of the padding requests."""
        num_requests = shape.num_requests
        slots, first_rows, counts, is_prefill, *ends = facts_of(entries)
        left = padding_rows(
            shape.num_rows - sum(counts), num_requests - len(entries), most=shape.longest
        )
        nothing = [0] * len(left)
        slots += [self._spare_slot] * len(left)
        counts, is_prefill = counts + left, is_prefill + [1] * len(left)
        base = self._base_rows(counts, is_prefill)
        base[-1] += shape.num_base_rows - sum(base)
        columns = [slots, first_rows + nothing, counts, is_prefill]
        columns += [*(flags + nothing for flags in ends), base]
        unused = [0] * (self._facts.shape[1] - num_requests)
        write_to_device([column + unused for column in columns], self._facts)
        self._tables.update(entry.request for entry in entries)
        return left

    def _base_rows(self, counts: list[int], is_prefill: list[int]) -> list[int]:
        drafter = self._step.drafter
        if not isinstance(drafter, MTPDrafter):
            return [0] * len(counts)
        return drafter.plan.max_base_rows(counts, is_prefill=is_prefill)


def latent_heads(model: nn.Module) -> Counter[LatentDims]:
    """Heads of the latent attentions in `model`, over all layers, by their sizes."""
    heads: Counter[LatentDims] = Counter()
    for module in model.modules():
        if hasattr(module, "qk_nope_head_dim"):
            heads[latent_dims(module)] += len(expansion_of(module))
    return heads


def pays_captured(num_rows: int, *, num_parameters: int) -> bool:
    """Whether a step of so many rows ends sooner as a graph, padding included."""
    return num_rows <= _ALWAYS_ROWS or num_rows * num_parameters <= _LAUNCH_BOUND


def row_buckets(max_rows: int, *, num_parameters: int) -> list[int]:
    """Rows of the buckets that steps of at most `max_rows` rows need and that pay, ascending."""
    return [
        num_rows
        for smaller, num_rows in itertools.pairwise((0, *MIXED_ROWS))
        if smaller < max_rows and pays_captured(num_rows, num_parameters=num_parameters)
    ]


def large_sizes(captured: int, *, most: int) -> list[int]:
    """Rows that steps above `captured` rows are padded to, ascending; the last is `most`.

    For example above 1,024 and up to 2,500 rows: 1152, 1280, 1408, ..., 1920, 2048, 2304, 2500.
    """
    sizes, size = [], captured
    while size < most:
        size += max(1, (1 << (size.bit_length() - 1)) // _SIZES_AN_OCTAVE)
        sizes.append(min(size, most))
    return sizes


def padding_rows(num_rows: int, num_requests: int, *, most: int) -> list[int]:
    """Rows of each padding request, at most `most`; the last ones take them.

    For example 70 rows for 3 requests of at most 64 give 0, 6, 64.
    """
    rows = [0] * num_requests
    for index in reversed(range(num_requests)):
        rows[index] = min(num_rows, most)
        num_rows -= rows[index]
    assert num_rows == 0, "a bucket has padding requests for all of its rows"
    return rows
