"""The target's answers as lines of a file: decoded, appended, and not made twice.

Second stage of `regenerate.py`, which asks what `tasks` made. A line holds token ids; a run that
was killed goes on behind the last whole line.
"""

import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mtp_research.config import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.errors import IntegrityError
from mtp_research.evaluation.tasks import Task, reseed
from mtp_research.models.target import Target


class Answered(NamedTuple):
    """What became of the tasks of one call.

    Attributes:
        num_written: lines appended.
        num_there: tasks that the output held before.
        num_too_long: prompts that leave no room for a token.
    """

    num_written: int
    num_there: int
    num_too_long: int


def answer(
    target: Target,
    tasks: Sequence[Task],
    *,
    output: Path,
    sampling: SamplingParams,
    engine: EngineConfig | None = None,
) -> Answered:
    """Append the target's continuation of every task that `output` does not hold yet.

    Args:
        target: the model whose output is wanted.
        tasks: prompts; those as long as the context are left out and counted.
        output: JSONL file; lines are `id`, `domain`, `token_ids`, `num_prompt_tokens`.
        sampling: of the continuation; its seed is shifted by the task's index.
        engine: batch settings.
    """
    done = _existing_ids(output)
    decoder = SpecDecoder(target, num_speculative_tokens=0, engine=engine)
    by_id = {task.doc_id: task for task in tasks}
    num_there = num_too_long = num_written = 0
    for index, task in enumerate(tasks):
        if task.doc_id in done:
            num_there += 1
        elif len(task.prompt) >= decoder.max_model_len:
            num_too_long += 1
        else:
            params = reseed(sampling, index)
            decoder.add_request(task.prompt, sampling=params, request_id=task.doc_id)
    with output.open("a", encoding="utf8") as file:
        while decoder.scheduler.has_work:
            decoder.step()
            for record in decoder.stats.records[num_written:]:
                task = by_id[record.request_id]
                line = {
                    "id": task.doc_id,
                    "domain": task.domain,
                    "token_ids": [*task.prompt, *record.output_token_ids],
                    "num_prompt_tokens": len(task.prompt),
                }
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                num_written += 1
            file.flush()
    return Answered(num_written, num_there, num_too_long)


def write_xz(output: Path) -> None:
    """Write `OUTPUT.xz`, ordered by id: the same bytes in whatever order requests finished."""
    lines = output.read_text(encoding="utf8").splitlines(keepends=True)
    ordered = sorted(lines, key=lambda line: json.loads(line)["id"])
    output.with_name(f"{output.name}.xz").write_bytes(
        lzma.compress("".join(ordered).encode(), preset=9)
    )


def _existing_ids(output: Path) -> set[str]:
    """Ids in the file; a last line cut off by a kill is removed.

    Raises:
        IntegrityError: another line is not valid.
    """
    if not output.is_file():
        return set()
    lines = output.read_text(encoding="utf8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        output.write_text("".join(lines), encoding="utf8")
    return {record["id"] for record in _parse(lines, output)}


def _parse(lines: Sequence[str], path: Path) -> Iterator[dict]:
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as fault:
            raise IntegrityError(
                f"{path}:{number}: invalid JSON ({fault.msg}); remove the line or the file."
            ) from fault
