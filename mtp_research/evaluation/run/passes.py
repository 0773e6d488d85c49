"""The conditions of a group decode the prompt set in turns, each with a decoder that is warm.

Second stage of the flow: prompts -> decode loop -> statistics -> report. With several passes the
conditions run in the order A B C, C B A, A B C, ...: a machine that slows down evenly slows all of
them alike, and K = 0, which stands first, is measured first and last. What decodes is behind the
protocol of `backends`.
Letter: K drafts per step.
"""

from collections.abc import Sequence
from dataclasses import replace

from mtp_research.config.schema import OWN
from mtp_research.decode.pool_size import NUM_SPARE_BLOCKS, free_for_pool, plan_side_by_side
from mtp_research.evaluation.backends.own_backend import OwnBackend
from mtp_research.evaluation.backends.protocol import Backend, Pass, Workload
from mtp_research.evaluation.backends.sglang_backend import SglangBackend
from mtp_research.evaluation.backends.transformers_backend import TransformersBackend
from mtp_research.evaluation.backends.vllm_backend import VllmBackend
from mtp_research.evaluation.run.conditions import Condition
from mtp_research.evaluation.run.conversations import Conversations
from mtp_research.evaluation.run.decoders import needs_of
from mtp_research.evaluation.run.journal import add_audits
from mtp_research.evaluation.stats.outcome import ConditionResult, PassRecord
from mtp_research.evaluation.stats.summary import num_equal_texts
from mtp_research.runtime.errors import ConfigError


def run_group(
    conditions: Sequence[Condition], workload: Workload, *, num_passes: int
) -> list[ConditionResult]:
    """Decode the prompts with every condition, `num_passes` times.

    Args:
        conditions: of one engine, batch size and temperature; K = 0 first, if it is there.
        workload: prompts, models and journal.
        num_passes: 1 or even. With 1, one decoder exists at a time; with more, every condition
            keeps its own, pool included, until its last pass, and all pools are equal.
    """
    conditions = [_with_room(one, workload) for one in conditions]
    is_own = conditions[0].backend == OWN
    num_blocks = _equal_pools(conditions, workload) if num_passes > 1 and is_own else None
    runners = [
        _Runner(c, workload, num_passes=num_passes, num_blocks=num_blocks) for c in conditions
    ]
    if num_passes > 1:  # all of them first, so that nobody compiles between two passes
        for runner in runners:
            runner.prepare()
    for number in range(num_passes):
        for runner in runners if number % 2 == 0 else runners[::-1]:
            runner.prepare()
            runner.run_pass(number)
            if number + 1 == num_passes:
                runner.end()
    return [_result(one.condition, one.passes, workload.conversations) for one in runners]


def _with_room(condition: Condition, workload: Workload) -> Condition:
    """The condition with room for the texts of its prompts, where no length is asked for.

    A pool for texts as long as the target's positions would take gigabytes for a few short prompts.
    """
    config, target = condition.config, workload.target
    if config.engine.max_model_len is not None:
        return condition
    longest = workload.conversations.longest_text(config.sampling.max_new_tokens)
    limit = min(longest, target.config.max_position_embeddings)
    engine = replace(config.engine, max_model_len=limit)
    return replace(condition, config=replace(config, engine=engine))


class _Runner:
    """A condition with its passes so far and its engine."""

    def __init__(
        self, condition: Condition, workload: Workload, *, num_passes: int, num_blocks: int | None
    ) -> None:
        self.condition = condition
        self.passes: list[Pass] = []
        self._journal = workload.journal
        self._num_passes = num_passes
        self._backend = _backend(condition, workload, num_passes=num_passes, num_blocks=num_blocks)

    def prepare(self) -> None:
        """Make the engine ready, unless the journal has all passes."""
        journal, label = self._journal, self.condition.label
        if not all(journal.stored(label, n).times for n in range(self._num_passes)):
            self._backend.prepare()

    def end(self) -> None:
        """Give back the engine's memory."""
        self._backend.close()

    def run_pass(self, number: int) -> None:
        """Decode what the journal does not have."""
        journal, label = self._journal, self.condition.label
        records, audit, times = journal.stored(label, number)
        if times is None:
            fresh, is_resumed = self._backend.decode(number, records), bool(records)
            records, audit = (*records, *fresh.records), add_audits(audit, fresh.audit)
            times = fresh.times
            if is_resumed:
                times = PassRecord(wall_s=None, is_resumed=True, backend=times.backend)
            journal.end_pass(label, number, times, num_records=len(records))
        self.passes.append(Pass(tuple(sorted(records, key=lambda r: r.request_id)), audit, times))


def _backend(
    condition: Condition, workload: Workload, *, num_passes: int, num_blocks: int | None
) -> Backend:
    if condition.backend == "sglang":
        return SglangBackend(condition, workload)
    if condition.backend == "vllm":
        return VllmBackend(condition, workload)
    if condition.backend == "transformers":
        return TransformersBackend(condition, workload)
    assert condition.backend == OWN, f"validation let through {condition.backend}"
    return OwnBackend(condition, workload, num_passes=num_passes, num_blocks=num_blocks)


def _result(
    condition: Condition, passes: Sequence[Pass], conversations: Conversations
) -> ConditionResult:
    first, *later = passes
    prompt_of = conversations.prompt_of
    is_drafting = condition.num_speculative_tokens > 0
    return ConditionResult(
        label=condition.label,
        policy=condition.policy,
        num_speculative_tokens=condition.num_speculative_tokens,
        records=first.records,
        passes=(
            first.times,
            *(
                replace(
                    one.times,
                    num_texts_equal=num_equal_texts(
                        one.records, first.records, prompt_of=prompt_of
                    ),
                )
                for one in later
            ),
        ),
        lossless="not checked",
        audit=first.audit,
        head=condition.head,
        max_num_requests=condition.group.max_num_requests,
        temperature=condition.group.temperature,
        verify=condition.config.spec.verify,
        draft_sampling=condition.config.spec.draft_sampling if is_drafting else None,
        draft_length=condition.config.spec.draft_length if is_drafting else None,
        prompt_of=prompt_of,
        cut_prompts=conversations.cut_prompts(first.records),
        conventions=condition.conventions,
    )


def _equal_pools(conditions: Sequence[Condition], workload: Workload) -> int | None:
    """Blocks, without the spare one, for each decoder of a group whose decoders all live at once.

    None where `engine.num_blocks` says it, or memory sets no limit.
    """
    target = workload.target
    engine, free = conditions[0].config.engine, free_for_pool(target)
    if engine.num_blocks is not None or free is None:
        return None
    needs = [needs_of(c, target, workload.heads_of(c)) for c in conditions]
    try:
        planned = plan_side_by_side(needs, free=free, memory_fraction=engine.memory_fraction)
    except ConfigError as fault:
        raise ConfigError(
            f"with timing.passes > 1 the pools of {len(needs)} conditions live at once: {fault} "
            "With timing.passes=1 there is one at a time."
        ) from None
    return None if planned is None else planned - NUM_SPARE_BLOCKS
