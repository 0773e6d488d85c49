"""What an evaluation measured, in a form that travels: rates by position, and counts by round.

Beside `results.json`: `speculation_profile.json` holds the acceptance of every condition that
drafts, over all prompts and by domain; `decode.verify.profile_reader` reads it for
`spec.verify=synthetic`, and vLLM takes its rates as they are. `golden_acceptance.jsonl` holds the
accepted drafts of every round, a line a condition and prompt, for another engine to be held
against.

Letter: K drafts per step.
Source: vLLM 0.24.0, `SpeculativeConfig.synthetic_acceptance_rates`: K unconditional rates, falling.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from mtp_research.decode.stats import RequestRecord, count_acceptance
from mtp_research.decode.verify.profile_reader import PROFILE_FILE, PROFILE_SCHEMA_VERSION
from mtp_research.evaluation.report.stored import Report, mapping, write_json
from mtp_research.evaluation.stats.outcome import ConditionResult
from mtp_research.evaluation.stats.statistics import FINISHED
from mtp_research.runtime.files import write_atomically

GOLDEN_FILE = "golden_acceptance.jsonl"
_VLLM_VERSION = "0.24.0"  # whose sources say what `vllm_speculative_config` has to hold


def write_profile(folder: Path, report: Report) -> None:
    """Write the profile and the counts by round, each whole or not at all."""
    write_json(folder / PROFILE_FILE, profile_of(report))
    lines = (json.dumps(line, separators=(",", ":")) for line in _golden(report))
    write_atomically(folder / GOLDEN_FILE, "".join(f"{line}\n" for line in lines))


def profile_of(report: Report) -> dict[str, object]:
    """The content of `speculation_profile.json`."""
    sampling = mapping(report.config, "sampling")
    return {
        "schema_version": PROFILE_SCHEMA_VERSION,
        "vllm_version": _VLLM_VERSION,
        "dtype": report.dtype,
        "target": report.run.get("target"),
        "commit": mapping(report.run, "git").get("sha"),
        # Lists of a grid: each condition has its own temperature.
        "sampling": {key: value for key, value in sampling.items() if key != "temperature"},
        "conditions": [_condition(one, report) for one in _drafting(report)],
    }


def _drafting(report: Report) -> list[ConditionResult]:
    return [one for one in report.conditions if one.num_speculative_tokens > 0]


def _finished(condition: ConditionResult) -> list[RequestRecord]:
    return [record for record in condition.records if record.finish_reason in FINISHED]


def _condition(condition: ConditionResult, report: Report) -> dict[str, object]:
    num_drafts, records = condition.num_speculative_tokens, _finished(condition)
    by_domain: dict[str, list[RequestRecord]] = {}
    domains = {prompt.question_id: prompt.category for prompt in report.prompts}
    for record in records:
        by_domain.setdefault(domains[condition.prompt_id(record)], []).append(record)
    head = mapping(mapping(report.run, "heads"), condition.head or "")
    return {
        "label": condition.label,
        "policy": condition.policy,
        "num_speculative_tokens": num_drafts,
        "temperature": condition.temperature,
        "verify": condition.verify,
        "draft_sampling": condition.draft_sampling,
        "draft_length": condition.draft_length,
        "head": condition.head,
        "head_sha256": head.get("sha256"),
        **_measured(records, num_drafts),
        "per_domain": {
            domain: _measured(members, num_drafts) for domain, members in sorted(by_domain.items())
        },
    }


def _measured(records: Sequence[RequestRecord], num_drafts: int) -> dict[str, object]:
    """Counts and rates of some generations; position i is at index i - 1, no rounds give no rates.

    Rounds that a length rule cut short count as rejecting what they did not draft.
    """
    counts = count_acceptance(records)
    drafted, reached, accepted = (
        [*counted, *[0] * (num_drafts - len(counted))]
        for counted in (counts.num_drafted, counts.num_reached, counts.num_accepted)
    )
    num_rounds = counts.num_rounds
    rates = [count / num_rounds for count in accepted] if num_rounds else []
    return {
        "num_requests": len(records),
        "num_rounds": num_rounds,
        "num_drafted_per_position": drafted,
        "num_reached_per_position": reached,
        "num_accepted_per_position": accepted,
        "acceptance_length": 1 + sum(accepted) / num_rounds if num_rounds else None,
        "acceptance_rate_per_position": rates,
        "conditional_acceptance_rate_per_position": [
            count / tried if tried else None for count, tried in zip(accepted, reached, strict=True)
        ],
        "vllm_speculative_config": {
            "num_speculative_tokens": num_drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": rates,
        }
        if rates
        else None,
    }


def _golden(report: Report) -> list[dict[str, object]]:
    hashes = {prompt.question_id: prompt.sha256 for prompt in report.prompts}
    return [
        {
            "condition": condition.label,
            "id": record.request_id,
            "sha256": hashes[condition.prompt_id(record)],
            "accepted": record.num_accepted_per_round,
        }
        for condition in _drafting(report)
        for record in _finished(condition)
    ]
