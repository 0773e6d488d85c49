"""Made-up generations with consistent counters, and conditions made of them."""

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.run.prompt_files import Prompt
from mtp_research.evaluation.run.prompts import EncodedPrompts
from mtp_research.evaluation.stats.outcome import ConditionResult, PassRecord, PromptEntry


def asked_file(path: Path, questions: Sequence[str]) -> str:
    """Write questions as a prompt file; returns the override that asks them."""
    lines = (
        json.dumps({"question_id": f"q{i}", "category": "x", "turns": [text]})
        for i, text in enumerate(questions)
    )
    path.write_text("\n".join(lines))
    return f"prompts.path={path}"


def generation(
    name: str,
    accepted: list[int],
    *,
    drafted: list[int] | None = None,
    num_plain_steps: int = 0,
    finish_reason: str = "length",
) -> RequestRecord:
    """One record: a first token, a round per entry of `accepted`, then steps without drafts."""
    drafted = [3] * len(accepted) if drafted is None else drafted
    num_steps = len(accepted) + num_plain_steps
    return RequestRecord(
        request_id=name,
        num_prompt_tokens=5,
        output_token_ids=tuple(range(1 + num_steps + sum(accepted))),
        finish_reason=finish_reason,
        num_accepted_per_round=tuple(accepted),
        num_drafted_per_round=tuple(drafted),
        num_target_forwards=num_steps,
        ttft_s=0.25,
        decode_s=0.5 * num_steps,
    )


def random_generations(num_prompts: int, *, probability: float, seed: int) -> list[RequestRecord]:
    """20 rounds a prompt with K = 3; each draft is kept with `probability` until the first miss."""
    generator = random.Random(seed)
    records = []
    for index in range(num_prompts):
        rounds = [[generator.random() < probability for _ in range(3)] for _ in range(20)]
        accepted = [(*kept, False).index(False) for kept in rounds]
        records.append(generation(f"q{index}", accepted))
    return records


def some_prompts(num_prompts: int) -> list[PromptEntry]:
    """Prompts q0, q1, ... alternating between two categories."""
    asked = tuple(
        Prompt(f"q{i}", ("arith", "howto")[i % 2], (f"question {i}",), "chat")
        for i in range(num_prompts)
    )
    return list(EncodedPrompts(asked, (), ()).entries)


def first_pass(records: list[RequestRecord], *, wall_s: float, has_tail: bool) -> PassRecord:
    """Half of the time decodes; with a tail, a quarter of that in full batches."""
    return PassRecord(
        wall_s=wall_s,
        decode_wall_s=wall_s / 2,
        num_decode_tokens=sum(len(record.output_token_ids) - 2 for record in records),
        full_wall_s=wall_s / 8 if has_tail else wall_s / 2,
        num_full_tokens=sum(
            len(record.output_token_ids) - (12 if has_tail else 2) for record in records
        ),
        num_steps=100,
        rows_per_step=8.5,
        num_warm_ups=1,
    )


def timed(condition: ConditionResult, **changes: Any) -> ConditionResult:
    """The condition with other figures of its first pass, see `PassRecord`."""
    first = dataclasses.replace(condition.first, **changes)
    return dataclasses.replace(condition, passes=(first, *condition.repeats))


def repeated(condition: ConditionResult, *later: PassRecord) -> ConditionResult:
    """The condition with these passes after its first."""
    return dataclasses.replace(condition, passes=(condition.first, *later))


def three_conditions(num_prompts: int) -> list[ConditionResult]:
    """Baseline, eagle and training over q0 .. q(num_prompts - 1)."""
    baseline = [generation(f"q{i}", [], num_plain_steps=19) for i in range(num_prompts)]
    eagle = random_generations(num_prompts, probability=0.5, seed=1)
    training = random_generations(num_prompts, probability=0.7, seed=2)
    audit = {"WRONG": 0, "MIXED": 0, "HOLE": 0, "PROVISIONAL": 7}
    return [
        ConditionResult(
            label=label,
            policy=policy,
            num_speculative_tokens=num_drafts,
            records=tuple(records),
            passes=(first_pass(records, wall_s=wall_s, has_tail=num_drafts > 0),),
            lossless=f"identical {num_prompts}/{num_prompts}",
            audit=audit,
        )
        for label, policy, num_drafts, records, wall_s in (
            ("baseline", None, 0, baseline, 8.0),
            ("eagle", "eagle", 3, eagle, 5.0),
            ("training", "training", 3, training, 4.0),
        )
    ]
