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

Each is a ratio of two sums over prompts; `bootstrap.py` puts the intervals around them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mtp_research.evaluation.bootstrap import (
    NUM_DRAWS,
    Estimate,
    estimate,
    estimate_difference,
)
from mtp_research.evaluation.rounds import (
    FINISHED,
    Rounds,
    acceptance_ratios,
    num_rounds_two_rejected,
)

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
    """The acceptance figures of one condition; the formulas are those of the module docstring.

    Attributes:
        num_prompts: finished generations, over which everything is computed.
        num_unfinished: generations left out (non-finite target, abort).
        num_rounds: verify rounds that had drafts.
        num_rounds_two_rejected: rounds with r >= 2 rejected drafts; policies differ only
            after such a round.
        num_accepted: accepted drafts, bonus not counted.
        num_drafted: verified drafts.
        num_output_tokens: generated tokens, each prompt's first included.
        num_target_forwards: decode steps summed over requests.
        acceptance_length_micro: tokens per round, in [1, K+1]; 1 exactly if nothing was drafted.
        acceptance_length_macro: the same as a mean over prompts.
        acceptance_rate: in [0, 1].
        acceptance_rate_per_position: p_1 .. p_K.
        conditional_acceptance_rate_per_position: p_i/p_{i-1} for i = 1 .. K, over
            the rounds that made draft i.
        target_forwards_per_token: 1 without drafts, below 1 is the gain.
        warnings: what a reader of these figures has to know.
    """

    num_prompts: int
    num_unfinished: int
    num_rounds: int
    num_rounds_two_rejected: int
    num_accepted: int
    num_drafted: int
    num_output_tokens: int
    num_target_forwards: int
    acceptance_length_micro: Estimate
    acceptance_length_macro: Estimate
    acceptance_rate: Estimate
    acceptance_rate_per_position: tuple[Estimate, ...]
    conditional_acceptance_rate_per_position: tuple[Estimate, ...]
    target_forwards_per_token: Estimate
    warnings: tuple[str, ...]


def acceptance_statistics(
    records: Iterable[Rounds],
    *,
    num_speculative_tokens: int,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
) -> AcceptanceStatistics:
    """Every acceptance figure of one condition with a 95 % cluster-bootstrap interval over prompts.

    Args:
        records: one per prompt; those that did not finish are counted and left out.
        num_speculative_tokens: K, >= the drafts of any round; 0 for the baseline.
        seed: of the resampling; equal seeds and data give equal intervals.
        num_draws: resamplings.

    Returns:
        The figures; None instead of a number wherever the denominator is 0.

    Raises:
        IntegrityError: a record drafts more than K, accepts more than it drafts or has two lengths.
    """
    everything = list(records)
    finished = [record for record in everything if record.finish_reason in FINISHED]
    ratios = acceptance_ratios(finished, num_speculative_tokens=num_speculative_tokens)
    estimates = estimate(ratios, seed=seed, num_draws=num_draws)
    positions = range(1, num_speculative_tokens + 1)
    statistics = AcceptanceStatistics(
        num_prompts=len(finished),
        num_unfinished=len(everything) - len(finished),
        num_rounds=sum(len(record.num_accepted_per_round) for record in finished),
        num_rounds_two_rejected=sum(num_rounds_two_rejected(record) for record in finished),
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
        warnings=_warnings(len(finished), len(everything)),
    )
    _check_identity(statistics)
    return statistics


def statistics_per_domain(
    records: Iterable[Rounds],
    domains: Mapping[str, str],
    *,
    num_speculative_tokens: int,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
) -> dict[str, AcceptanceStatistics]:
    """`acceptance_statistics` by domain, sorted by name; `domains` maps request_id to domain."""
    by_domain: dict[str, list[Rounds]] = {}
    for record in records:
        by_domain.setdefault(domains[record.request_id], []).append(record)
    return {
        domain: acceptance_statistics(
            members,
            num_speculative_tokens=num_speculative_tokens,
            seed=seed,
            num_draws=num_draws,
        )
        for domain, members in sorted(by_domain.items())
    }


def paired_differences(
    records: Iterable[Rounds],
    reference: Iterable[Rounds],
    *,
    num_speculative_tokens: int,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
) -> dict[str, Estimate]:
    """Each statistic of `records` minus that of `reference`, over the same resampled prompts.

    The prompts are the larger source of variation; pairing takes it out of the comparison.

    Args:
        records: one condition.
        reference: the other condition; the same request ids in any order.
        num_speculative_tokens: K, the larger one if they differ.
        seed: of the resampling.
        num_draws: resamplings.

    Returns:
        Difference by statistic (`acceptance_length_micro`, ..., `p_1`, `p_2/p_1`), over the prompts
        that finished in both.

    Raises:
        ValueError: the two hold different request ids, or one id twice.
    """
    ours, theirs = _by_id(records), _by_id(reference)
    if ours.keys() != theirs.keys():
        differing = sorted(ours.keys() ^ theirs.keys())
        raise ValueError(
            f"expected the same prompts on both sides, got {len(differing)} on one side only "
            f"(such as {differing[:3]}); evaluate both conditions on one prompt set."
        )
    both = [
        name
        for name in ours
        if ours[name].finish_reason in FINISHED and theirs[name].finish_reason in FINISHED
    ]
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


def _check_identity(statistics: AcceptanceStatistics) -> None:
    """Acceptance length (micro) == 1 + sum_i p_i; a break means that the counting is wrong."""
    positions = [estimate.value for estimate in statistics.acceptance_rate_per_position]
    length = statistics.acceptance_length_micro.value
    if length is not None and statistics.num_rounds:
        expected = 1.0 + sum(p for p in positions if p is not None)
        assert abs(length - expected) < 1e-9, (
            f"acceptance length {length} != 1 + sum p_i {expected}"
        )


def _by_id(records: Iterable[Rounds]) -> dict[str, Rounds]:
    by_id: dict[str, Rounds] = {}
    for record in records:
        if record.request_id in by_id:
            raise ValueError(f"expected one record per prompt, got two of {record.request_id}.")
        by_id[record.request_id] = record
    return by_id


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
