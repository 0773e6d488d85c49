"""`generations.jsonl`: what every condition wrote, to be read; figures come from `results.json`.

Last stage of the flow: prompts -> decode loop -> statistics -> report. One line a condition and
prompt. This file holds texts, those of the prompts too, and stays beside the results on this
machine (and on W&B, where that is asked for); `results.json` holds none.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from mtp_research.evaluation.report.stored import GENERATIONS_FILE
from mtp_research.evaluation.run.conversations import Conversations
from mtp_research.evaluation.stats.outcome import ConditionResult, turns_by_prompt
from mtp_research.runtime.files import write_atomically


def write_generations(
    folder: Path, conditions: Sequence[ConditionResult], conversations: Conversations
) -> Path:
    """Write the texts of all conditions, whole or not at all; return the file's path.

    They are made from the records, so that a run which was killed and went on has all of them.
    """
    lines = (json.dumps(line) for one in conditions for line in _lines(one, conversations))
    path = folder / GENERATIONS_FILE
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    return path


def _lines(condition: ConditionResult, conversations: Conversations) -> Iterator[dict[str, object]]:
    found = turns_by_prompt(condition.records, condition.prompt_of)
    for prompt in conversations.encoded.prompts:
        turns = found[prompt.question_id]
        yield {
            "condition": condition.label,
            "id": prompt.question_id,
            "category": prompt.category,
            "score": (condition.scores or {}).get(prompt.question_id),
            "is_cut": prompt.question_id in condition.cut_prompts,
            "turns": [
                {
                    "asked": asked,
                    "text": conversations.text(record),
                    "accepted": record.num_accepted_per_round,
                    "drafted": record.num_drafted_per_round,
                    "finish_reason": record.finish_reason,
                }
                for asked, record in zip(prompt.turns, turns, strict=False)
            ],
        }
