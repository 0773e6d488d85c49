"""Acceptance figures of finished generations, with intervals over prompts.

Third stage of the flow: prompts -> decode loop -> statistics -> report. numpy only. A *round* is
one verify step of one request that had drafts. Letters: P prompts, K drafts per round.

- acceptance length (micro) = 1 + sum(accepted)/rounds = 1 + sum_i p_i
- acceptance length (macro) = mean over prompts of the prompt's own micro length
- acceptance rate = sum(accepted)/sum(drafted)
- p_i (unconditional) = rounds with at least i accepted drafts / rounds
- p_i/p_{i-1} (conditional, p_0 = 1) over the rounds that made draft i: a round that a draft-length
  rule or the context limit stopped before it says nothing about it
- target forwards per token = decode steps / tokens after the first (which the prefill gives)

Each is a ratio of two sums over prompts; `bootstrap` puts the intervals around them. A prompt of
several turns is one unit: the rounds of its turns are pooled, because they depend on each other as
those of one text do. It counts once all of its turns that were asked have ended.

A round stands at context c when c tokens come before its first draft: the prompt and all tokens
emitted so far. It falls into the bucket [2^n, 2^(n+1)) that holds c. A step without drafts leaves
no round behind, so under a draft-length rule c is a lower bound.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.stats.bootstrap import (
    NUM_DRAWS,
    Estimate,
    Floats,
    Ratio,
    estimate,
    estimate_difference,
)
from mtp_research.evaluation.stats.outcome import Turns, turns_by_prompt
from mtp_research.runtime.errors import IntegrityError

ONE_TURN: Mapping[str, str] = {}  # what `prompt_of` is where every prompt has one turn
FINISHED = ("stop", "length")  # the finish reasons of a generation that ran to its end
ACCEPTED_WARNING = (
    '"accepted" differs by project: here, as in vLLM\'s metrics, accepted drafts exclude the bonus '
    "token and the acceptance length includes it. TensorRT-LLM's num_accepted_tokens and ssd's "
    "accepted_suffix_lens_with_recovery include it; EAGLE's accept_length excludes it."
)
FORMULAS = {
    "acceptance_length_micro": "1 + sum(accepted)/rounds = 1 + sum_i p_i",
    "acceptance_length_macro": "mean over prompts of 1 + sum(accepted)/rounds of the prompt",
    "acceptance_rate": "sum(accepted)/sum(drafted)",
    "acceptance_rate_per_position": "p_i = rounds with >= i accepted drafts / rounds",
    "conditional_acceptance_rate_per_position": "rounds with >= i accepted drafts / "
    "rounds that made draft i and accepted all before it; p_i/p_{i-1} for a fixed number of drafts",
    "target_forwards_per_token": "decode steps / (tokens after the first of each prompt)",
}
MIN_PROMPTS = 80


@dataclass(frozen=True)
class AcceptanceStatistics:
    """The acceptance figures of one condition; the formulas are those of the module docstring."""

    num_prompts: int  # finished prompts, over which everything is computed
    num_unfinished: int  # prompts left out (non-finite target, abort)
    num_rounds: int  # verify rounds that had drafts
    # Rounds with r >= 2 rejected drafts; policies differ only after such a round
    num_rounds_two_rejected: int
    num_accepted: int  # accepted drafts, bonus not counted
    num_drafted: int  # verified drafts
    num_output_tokens: int  # generated tokens, each prompt's first included
    num_target_forwards: int  # decode steps summed over requests
    # Tokens per round, in [1, K+1]; 1 exactly if nothing was drafted
    acceptance_length_micro: Estimate
    acceptance_length_macro: Estimate  # the same as a mean over prompts
    acceptance_rate: Estimate  # in [0, 1]
    acceptance_rate_per_position: tuple[Estimate, ...]  # p_1 .. p_K.
    # p_i/p_{i-1} for i = 1 .. K, over the rounds that made draft i.
    conditional_acceptance_rate_per_position: tuple[Estimate, ...]
    target_forwards_per_token: Estimate  # 1 without drafts, below 1 is the gain
    warnings: tuple[str, ...]  # what a reader of these figures has to know


def acceptance_statistics(
    records: Iterable[RequestRecord],
    *,
    num_speculative_tokens: int,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
    prompt_of: Mapping[str, str] = ONE_TURN,
) -> AcceptanceStatistics:
    """Every acceptance figure of one condition with a 95 % cluster-bootstrap interval over prompts.

    Args:
        records: one per prompt and turn; prompts that did not finish are counted and left out.
        num_speculative_tokens: K, >= the drafts of any round; 0 for the baseline.
        seed: of the resampling; equal seeds and data give equal intervals.
        num_draws: resamplings.
        prompt_of: see `ConditionResult`.
    """
    everything = prompts_of(records, prompt_of)
    prompts = [turns for turns in everything if is_finished(turns)]
    ratios = acceptance_ratios(prompts, num_speculative_tokens=num_speculative_tokens)
    finished = [record for turns in prompts for record in turns]
    estimates = estimate(ratios, seed=seed, num_draws=num_draws)
    positions = range(1, num_speculative_tokens + 1)
    statistics = AcceptanceStatistics(
        num_prompts=len(prompts),
        num_unfinished=len(everything) - len(prompts),
        num_rounds=sum(len(record.num_accepted_per_round) for record in finished),
        num_rounds_two_rejected=sum(_two_rejected(record) for record in finished),
        num_accepted=sum(sum(record.num_accepted_per_round) for record in finished),
        num_drafted=sum(sum(record.num_drafted_per_round) for record in finished),
        num_output_tokens=sum(len(record.output_token_ids) for record in finished),
        num_target_forwards=sum(record.num_target_forwards for record in finished),
        acceptance_length_micro=estimates["acceptance_length_micro"],
        acceptance_length_macro=estimates["acceptance_length_macro"],
        acceptance_rate=estimates["acceptance_rate"],
        acceptance_rate_per_position=tuple(estimates[f"p_{i}"] for i in positions),
        conditional_acceptance_rate_per_position=tuple(
            estimates[f"p_{i}/p_{i - 1}"] for i in positions
        ),
        target_forwards_per_token=estimates["target_forwards_per_token"],
        warnings=_warnings(len(prompts), len(everything)),
    )
    _check_identity(statistics)
    return statistics


def statistics_per_domain(
    records: Iterable[RequestRecord],
    domains: Mapping[str, str],
    *,
    num_speculative_tokens: int,
    seed: int = 0,
    prompt_of: Mapping[str, str] = ONE_TURN,
) -> dict[str, AcceptanceStatistics]:
    """`acceptance_statistics` by domain, sorted by name; `domains` maps prompts' ids to domains."""
    by_domain: dict[str, list[RequestRecord]] = {}
    for record in records:
        domain = domains[prompt_of.get(record.request_id, record.request_id)]
        by_domain.setdefault(domain, []).append(record)
    return {
        domain: acceptance_statistics(
            members, num_speculative_tokens=num_speculative_tokens, seed=seed, prompt_of=prompt_of
        )
        for domain, members in sorted(by_domain.items())
    }


def paired_differences(
    records: Iterable[RequestRecord],
    reference: Iterable[RequestRecord],
    *,
    num_speculative_tokens: int,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
    prompt_of: Mapping[str, str] = ONE_TURN,
) -> dict[str, Estimate]:
    """Each statistic of `records` minus that of `reference`, over the same resampled prompts.

    The prompts are the larger source of variation; pairing takes it out of the comparison. Only
    prompts that finished in both count; `num_speculative_tokens` is the larger K. A later turn
    may have been asked on one side only, where the answers before it differ in length.

    Raises:
        ValueError: the two hold different prompts, or one request id twice.
    """
    ours, theirs = (turns_by_prompt(side, prompt_of) for side in (records, reference))
    if ours.keys() != theirs.keys():
        differing = sorted(ours.keys() ^ theirs.keys())
        raise ValueError(
            f"expected the same prompts on both sides, got {len(differing)} on one side only "
            f"(such as {differing[:3]}); evaluate both conditions on one prompt set."
        )
    both = [name for name in ours if is_finished(ours[name]) and is_finished(theirs[name])]
    sides = [
        acceptance_ratios(
            [side[name] for name in both], num_speculative_tokens=num_speculative_tokens
        )
        for side in (ours, theirs)
    ]
    return estimate_difference(*sides, seed=seed, num_draws=num_draws)


def few_prompts(num_prompts: int) -> list[str]:
    """A sentence on intervals over few prompts, or nothing."""
    why = f"intervals over fewer than {MIN_PROMPTS} prompts are too narrow"
    return [] if num_prompts >= MIN_PROMPTS else [f"only {num_prompts} prompts: {why}"]


def prompts_of(records: Iterable[RequestRecord], prompt_of: Mapping[str, str]) -> list[Turns]:
    """The turns of each prompt; without later turns one record a prompt, in their order."""
    if not prompt_of:
        return [(record,) for record in records]
    return list(turns_by_prompt(records, prompt_of).values())


def is_finished(turns: Turns) -> bool:
    """Whether every turn that was asked ran to its end."""
    return all(record.finish_reason in FINISHED for record in turns)


def acceptance_ratios(prompts: Sequence[Turns], *, num_speculative_tokens: int) -> dict[str, Ratio]:
    """Every acceptance statistic as a ratio of two sums over P finished prompts, in order.

    Returns:
        `acceptance_length_micro`, `acceptance_length_macro`, `acceptance_rate`,
        `target_forwards_per_token`, and `p_1`, `p_1/p_0`, ..., `p_K`, `p_K/p_{K-1}`.
    """
    for record in (record for turns in prompts for record in turns):
        _check_record(record, num_speculative_tokens)

    def column(count: Callable[[RequestRecord], int]) -> Floats:
        return _column(sum(map(count, turns)) for turns in prompts)

    rounds = column(lambda record: len(record.num_accepted_per_round))
    accepted = column(lambda record: sum(record.num_accepted_per_round))
    drafted = column(lambda record: sum(record.num_drafted_per_round))
    forwards = column(lambda record: record.num_target_forwards)
    later_tokens = column(lambda record: max(len(record.output_token_ids) - 1, 0))
    # Where nothing was ever drafted, each decode step is a round that gave its one token.
    rounds_or_steps = rounds if rounds.any() else forwards
    has_rounds = (rounds_or_steps > 0).astype(np.float64)
    own_length = has_rounds + accepted / np.maximum(rounds_or_steps, 1.0)
    ratios = {
        "acceptance_length_micro": Ratio(rounds_or_steps + accepted, rounds_or_steps),
        "acceptance_length_macro": Ratio(own_length, has_rounds),
        "acceptance_rate": Ratio(accepted, drafted),
        "target_forwards_per_token": Ratio(forwards, later_tokens),
    }
    for i in range(1, num_speculative_tokens + 1):
        kept = column(lambda record, i=i: sum(a >= i for a in record.num_accepted_per_round))
        ratios[f"p_{i}"] = Ratio(kept, rounds)
        ratios[f"p_{i}/p_{i - 1}"] = Ratio(kept, column(lambda record, i=i: _reached(record, i)))
    return ratios


def _reached(record: RequestRecord, position: int) -> int:
    """Rounds that made the draft of this position and accepted all before it."""
    pairs = zip(record.num_accepted_per_round, record.num_drafted_per_round, strict=True)
    return sum(a >= position - 1 and d >= position for a, d in pairs)


def _column(values: Iterable[int]) -> Floats:
    return np.fromiter(values, dtype=np.float64)


def _two_rejected(record: RequestRecord) -> int:
    pairs = zip(record.num_accepted_per_round, record.num_drafted_per_round, strict=True)
    return sum(drafted - accepted >= 2 for accepted, drafted in pairs)


def _check_record(record: RequestRecord, num_speculative_tokens: int) -> None:
    accepted, drafted = record.num_accepted_per_round, record.num_drafted_per_round
    if len(accepted) != len(drafted):
        raise IntegrityError(
            f"record {record.request_id}: expected one drafted count per round, got {len(drafted)} "
            f"for {len(accepted)} rounds; the record was not written by this decode loop."
        )
    pairs = zip(accepted, drafted, strict=True)
    if not all(0 <= a <= d and 1 <= d <= num_speculative_tokens for a, d in pairs):
        raise IntegrityError(
            f"record {record.request_id}: expected 0 <= accepted <= drafted and 1 <= drafted <= K "
            f"= {num_speculative_tokens} in every round, got accepted {tuple(accepted)[:8]} of "
            f"{tuple(drafted)[:8]}; pass the K that the records were decoded with."
        )


def _check_identity(statistics: AcceptanceStatistics) -> None:
    """Acceptance length (micro) == 1 + sum_i p_i; a break means that the counting is wrong."""
    positions = [estimate.value for estimate in statistics.acceptance_rate_per_position]
    length = statistics.acceptance_length_micro.value
    if length is not None and statistics.num_rounds:
        expected = 1.0 + sum(p for p in positions if p is not None)
        assert abs(length - expected) < 1e-9, (
            f"acceptance length {length} != 1 + sum p_i {expected}"
        )


def _warnings(num_finished: int, num_prompts: int) -> tuple[str, ...]:
    warnings = []
    if num_finished < num_prompts:
        warnings.append(
            f"{num_prompts - num_finished} of {num_prompts} generations did not finish and are "
            "left out of every figure"
        )
    if num_finished == 0:
        warnings.append("no generation finished: every figure is undefined")
    else:
        advice = "; raise prompts.max_prompts or add prompts"
        warnings += [text + advice for text in few_prompts(num_finished)]
    return tuple(warnings)


@dataclass(frozen=True)
class ContextBucket:
    """Acceptance over the rounds at a context of [low, high) tokens."""

    low: int  # fewest tokens
    high: int  # one more than the most tokens
    num_prompts: int  # prompts with a round here
    num_rounds: int  # rounds here
    acceptance_length: Estimate  # 1 + accepted / rounds, with its interval over prompts


def acceptance_by_context(
    records: Iterable[RequestRecord], *, seed: int, prompt_of: Mapping[str, str] = ONE_TURN
) -> tuple[ContextBucket, ...]:
    """Buckets that hold at least one round of a finished prompt, from short to long."""
    prompts = [turns for turns in prompts_of(records, prompt_of) if is_finished(turns)]
    sums = [_sums_by_bucket(turns) for turns in prompts]
    buckets = sorted({low for one in sums for low in one})
    ratios = {}
    for low in buckets:
        rounds = _column(one.get(low, (0, 0))[0] for one in sums)
        accepted = _column(one.get(low, (0, 0))[1] for one in sums)
        ratios[str(low)] = Ratio(rounds + accepted, rounds)
    estimates = estimate(ratios, seed=seed) if ratios else {}
    return tuple(
        ContextBucket(
            low=low,
            high=2 * low,
            num_prompts=sum(low in one for one in sums),
            num_rounds=sum(one[low][0] for one in sums if low in one),
            acceptance_length=estimates[str(low)],
        )
        for low in buckets
    )


def _sums_by_bucket(turns: Turns) -> dict[int, tuple[int, int]]:
    sums: dict[int, tuple[int, int]] = {}
    for record in turns:
        context = record.num_prompt_tokens + 1  # the prefill gave the first token
        for accepted in record.num_accepted_per_round:
            low = 1 << (context.bit_length() - 1)
            rounds, kept = sums.get(low, (0, 0))
            sums[low] = (rounds + 1, kept + accepted)
            context += accepted + 1
    return sums
