"""What an engine's conventions cost a head: the same weights decoded both ways with our loop.

Greedy decoding gives the same text whatever is drafted, so only the acceptance differs, and it is
compared prompt by prompt. Letter: K drafts per step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.statistics import acceptance_statistics, paired_differences
from mtp_research.heads.engines import HeadRun, differences, run_as
from mtp_research.heads.stack import MTPHeads

LENGTH = "acceptance_length_micro"


class DecodeTask(NamedTuple):
    """What is decoded."""

    prompts: Sequence[Sequence[int]]  # token ids of each, at least one
    spec: SpecSettings  # with K; the policy is that of a run
    max_new_tokens: int


class Effects(NamedTuple):
    """Acceptance length as trained and as the engine runs the head, with 95 % intervals."""

    trained: Estimate
    engine: Estimate
    total: Estimate  # engine - trained, paired by prompt
    single: Mapping[str, Estimate]  # the same where one convention alone is the engine's


def measure_effects(
    heads: MTPHeads, *, trained: HeadRun, engine: HeadRun, task: DecodeTask
) -> Effects:
    """Decode with the head's own conventions, with each differing one, and with all of them.

    What one side does not know is taken from the other.
    """
    names = differences(trained, engine, num_modules=heads.spec.num_mtp_modules)
    own = _completed(trained, engine)
    records = decode_as(heads, own, task)
    single: dict[str, Estimate] = {}
    total, changed = Estimate(0.0, 0.0, 0.0), records
    for name in names:
        one = replace(own, **{name: getattr(engine, name)})
        changed = decode_as(heads, one, task)
        single[name] = total = _difference(changed, records, task)
    if len(names) > 1:
        changed = decode_as(heads, _completed(engine, own), task)
        total = _difference(changed, records, task)
    return Effects(_length(records, task), _length(changed, task), total, single)


def decode_as(heads: MTPHeads, run: HeadRun, task: DecodeTask) -> list[RequestRecord]:
    """Greedy outputs for the prompts in their order, with the heads run as `run` says."""
    assert run.policy is not None, "a loop needs a policy"
    longest = max(len(prompt) for prompt in task.prompts) + task.max_new_tokens
    limit = heads.target.config.max_position_embeddings
    decoder = SpecDecoder(
        heads.target,
        run_as(heads, run),
        spec=replace(task.spec, policy=run.policy),
        engine=EngineConfig(max_model_len=min(longest, limit)),
    )
    done = decoder.generate(task.prompts, max_new_tokens=task.max_new_tokens)
    return sorted(done, key=lambda record: int(record.request_id))


def _completed(run: HeadRun, other: HeadRun) -> HeadRun:
    """`run`, with what it does not know from `other`; a loop nobody knows is the engines'."""
    unknown = {name: vars(other)[name] for name, value in vars(run).items() if value is None}
    full = replace(run, **unknown)
    return full if full.policy is not None else replace(full, policy="eagle")


def _length(records: list[RequestRecord], task: DecodeTask) -> Estimate:
    drafts = task.spec.num_speculative_tokens
    return acceptance_statistics(records, num_speculative_tokens=drafts).acceptance_length_micro


def _difference(
    ours: list[RequestRecord], theirs: list[RequestRecord], task: DecodeTask
) -> Estimate:
    drafts = task.spec.num_speculative_tokens
    return paired_differences(ours, theirs, num_speculative_tokens=drafts)[LENGTH]
