"""One evaluation: decode a prompt set with K = 0 and with each policy, in one process, and report.

The flow itself: prompts -> decode loop (a fresh decoder per condition, same prompts, same order) ->
statistics -> report. Letter: K drafts per step.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from mtp_research.config import EvalConfig
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.decode.verify_rules import LOSSLESS_RULES
from mtp_research.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.evaluation.conditions import conditions_of, run_condition
from mtp_research.evaluation.head_facts import head_facts
from mtp_research.evaluation.prompts import ChatTokenizer, encode_prompts, load_prompts
from mtp_research.evaluation.report import Report, build_report, last_line, print_report
from mtp_research.evaluation.results import write_results
from mtp_research.evaluation.settings import sampling_params
from mtp_research.evaluation.summary import ConditionResult
from mtp_research.models.target import Target, load_target, load_tokenizer
from mtp_research.provenance import run_record


def evaluate(config: EvalConfig, output_dir: Path) -> dict[str, object]:
    """Run an evaluation, print its tables and write `results.json` and `table.txt`.

    Args:
        config: checked configuration.
        output_dir: folder of the results.

    Returns:
        The main figures, as printed on the last line.

    Raises:
        ConfigError: model, head or prompts are missing or do not fit each other.
        EnvironmentFault: the device or the kernels asked for cannot be used here.
        IntegrityError: a prompt file is damaged, no prompt fits the context, or no generation of a
            condition finished (the results are written all the same).
    """
    target = load_target(config.model.path, dtype=config.model.dtype, device=config.model.device)
    _check_backend(config.engine.backend, target)
    tokenizer = cast(ChatTokenizer, load_tokenizer(config.model.path))  # fields set at run time
    prompts = load_prompts(
        config.prompts.path, max_prompts=config.prompts.max_prompts, seed=config.seed
    )
    encoded = encode_prompts(prompts, tokenizer, max_model_len=_context_length(config, target))
    sampling = _sampling(config, target, num_prompts=len(encoded.prompts))
    conditions: list[ConditionResult] = []
    for condition in conditions_of(config, target):
        result = run_condition(
            condition, target=target, config=config, encoded=encoded, sampling=sampling
        )
        conditions.append(_with_verdict(result, conditions, sampling, rule=config.spec.verify))
    report = build_report(
        conditions,
        prompts=encoded.prompts,
        dtype=str(target.dtype).removeprefix("torch."),
        seed=config.seed,
        config=dataclasses.asdict(config),
        run=run_record() | {"head": head_facts(config.spec.head)},
        skipped_prompts=encoded.skipped,
    )
    path = write_results(output_dir, report)
    print_report(report, stored_at=path)
    _require_outputs(report, output_dir)
    return json.loads(last_line(report, folder=output_dir))


def _check_backend(backend: str, target: Target) -> None:
    """Refuse Triton kernels on a CPU, unless Triton's own interpreter is on.

    Raises:
        EnvironmentFault: `backend` is `triton` and cannot run.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and target.device.type != "cuda" and not is_interpreted:
        raise EnvironmentFault(
            f"engine.backend=triton needs a CUDA GPU, the target is on {target.device}; "
            "set engine.backend=auto, or TRITON_INTERPRET=1 to run Triton's interpreter."
        )


def _context_length(config: EvalConfig, target: Target) -> int:
    """Most tokens of a text, prompt included.

    Raises:
        ConfigError: `engine.max_model_len` lies beyond what the target was made for.
    """
    limit = target.config.max_position_embeddings
    wanted = config.engine.max_model_len
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"engine.max_model_len must be at most {limit}, the target's max_position_embeddings, "
            f"got {wanted}; set engine.max_model_len=null."
        )
    return wanted or limit


def _sampling(config: EvalConfig, target: Target, *, num_prompts: int) -> list[SamplingParams]:
    """Parameters of each prompt; seeds differ per prompt and agree across conditions."""
    return [
        sampling_params(
            config.sampling,
            seed=config.seed * 1_000_003 + index,
            stop_token_ids=target.stop_token_ids,
        )
        for index in range(num_prompts)
    ]


def _with_verdict(
    result: ConditionResult,
    earlier: Sequence[ConditionResult],
    sampling: Sequence[SamplingParams],
    *,
    rule: str,
) -> ConditionResult:
    """Add the lossless verdict: greedy outputs must equal the baseline's, token for token."""
    if result.num_speculative_tokens == 0:
        return dataclasses.replace(result, lossless="is the baseline")
    if rule not in LOSSLESS_RULES:
        return dataclasses.replace(result, lossless=f"lossy rule: {rule}")
    baseline = next((other for other in earlier if other.num_speculative_tokens == 0), None)
    if baseline is None or any(params.temperature > 0 for params in sampling):
        return result
    expected = {record.request_id: record.output_token_ids for record in baseline.records}
    equal = sum(expected[record.request_id] == record.output_token_ids for record in result.records)
    word = "identical" if equal == len(result.records) else "DIFFERS"
    return dataclasses.replace(result, lossless=f"{word} {equal}/{len(result.records)}")


def _require_outputs(report: Report, output_dir: Path) -> None:
    """Refuse to call an evaluation done in which a condition has no figure at all.

    Raises:
        IntegrityError: names the conditions.
    """
    empty = [item.label for item in report.summaries if not item.acceptance.num_prompts]
    if empty:
        reasons = {
            r.finish_reason for c in report.conditions if c.label in empty for r in c.records
        }
        raise IntegrityError(
            f"expected finished generations, got none for {', '.join(empty)} (ended by "
            f"{', '.join(sorted(reasons))}): the target's logits are not finite; check "
            f"model.path and model.dtype. Results: {output_dir}"
        )
