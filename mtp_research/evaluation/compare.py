"""Two stored results side by side; results that measure different things are refused.

How to run: `compare(recompute(path_a), recompute(path_b))`. Both sides are computed by the
formulas of this version; files of another schema version do not load.
"""

from mtp_research.errors import ConfigError
from mtp_research.evaluation.report import Report
from mtp_research.evaluation.summary import PairedComparison, paired

_NUM_LISTED = 5


def compare(ours: Report, theirs: Report) -> dict[str, PairedComparison]:
    """Paired differences ours - theirs of every condition label that both hold and that drafts.

    Raises:
        ConfigError: the results differ in prompts, dtype or K, or share no such label; the message
            lists every difference.
    """
    require_comparable(ours, theirs)
    references = {condition.label: condition for condition in theirs.conditions}
    return {
        condition.label: paired(condition, references[condition.label], seed=ours.seed)
        for condition in ours.conditions
        if condition.label in references and condition.num_speculative_tokens > 0
    }


def require_comparable(ours: Report, theirs: Report) -> None:
    """Refuse two results that differ in prompts, dtype or K; see `compare`.

    Raises:
        ConfigError: lists every difference.
    """
    found = [*_prompt_differences(ours, theirs), *_draft_differences(ours, theirs)]
    if ours.dtype != theirs.dtype:
        found.append(f"dtype {ours.dtype} and {theirs.dtype}")
    if found:
        raise ConfigError(
            f"expected results of the same prompts, dtype and K, got {'; '.join(found)}; "
            "evaluate both with the same prompts.path, prompts.max_prompts, model.dtype and spec.k."
        )


def _prompt_differences(ours: Report, theirs: Report) -> list[str]:
    """Ids that one side lacks, and ids whose text differs (such as code of another Python)."""
    our_hashes = {prompt.question_id: prompt.sha256 for prompt in ours.prompts}
    their_hashes = {prompt.question_id: prompt.sha256 for prompt in theirs.prompts}
    differing = sorted(
        name
        for name in our_hashes.keys() | their_hashes.keys()
        if our_hashes.get(name) != their_hashes.get(name)
    )
    if not differing:
        return []
    listed = ", ".join(differing[:_NUM_LISTED])
    more = f" and {len(differing) - _NUM_LISTED} more" if len(differing) > _NUM_LISTED else ""
    return [f"{len(differing)} prompts with other hashes ({listed}{more})"]


def _draft_differences(ours: Report, theirs: Report) -> list[str]:
    references = {c.label: c.num_speculative_tokens for c in theirs.conditions}
    shared = {c.label: c.num_speculative_tokens for c in ours.conditions if c.label in references}
    if not any(shared.values()):
        return [f"no common condition that drafts ({sorted(shared)} in both)"]
    return [
        f"K = {num_drafts} and {references[label]} for {label}"
        for label, num_drafts in shared.items()
        if num_drafts != references[label]
    ]
