"""One evaluation: decode a prompt set under every condition, in one process, and report.

The flow itself: prompts -> decode loop (same prompts, same order for each condition) -> statistics
-> report. Letter: K drafts per step.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import cast

from mtp_research.config.rules import expand
from mtp_research.config.schema import OWN, RULES, VERIFY_RULES, EvalConfig
from mtp_research.decode.build import Heads
from mtp_research.decode.verify.verify_rules import is_lossless
from mtp_research.evaluation.backends.exports import (
    EXPORT_FOLDER,
    EngineHeads,
    check_engines,
    export_heads_for,
)
from mtp_research.evaluation.backends.protocol import HeadsKey, Workload, token_ids_sha256
from mtp_research.evaluation.report.profile import write_profile
from mtp_research.evaluation.report.stored import (
    Report,
    build_report,
    last_line,
    results_file,
    write_results,
)
from mtp_research.evaluation.report.terminal import print_report, write_table
from mtp_research.evaluation.report.wandb_log import ReportRun, publish_report
from mtp_research.evaluation.run.conditions import Condition, conditions_of
from mtp_research.evaluation.run.conversations import (
    AnswerTokenizer,
    Conversations,
    write_generations,
)
from mtp_research.evaluation.run.decoders import (
    check_backend,
    head_facts,
    ranking_sha256,
    reference_note,
)
from mtp_research.evaluation.run.journal import (
    JOURNAL_FILE,
    clear_folder,
    finished_report,
    open_journal,
    prompts_sha256,
)
from mtp_research.evaluation.run.passes import run_group
from mtp_research.evaluation.run.prompt_files import Prompt
from mtp_research.evaluation.run.prompts import (
    EncodedPrompts,
    encode_prompts,
    first_turns,
    load_prompts,
)
from mtp_research.evaluation.run.scoring import Scorer
from mtp_research.evaluation.stats.agreement import without_last_round
from mtp_research.evaluation.stats.outcome import ConditionResult, turns_by_prompt
from mtp_research.evaluation.stats.summary import num_equal_texts
from mtp_research.heads.weights import load_heads
from mtp_research.models.loading.source import source_facts
from mtp_research.models.target import (
    Target,
    load_target,
    load_tokenizer,
    target_hashes,
    warn_of_family,
)
from mtp_research.policy.fields import POLICIES
from mtp_research.runtime.compiling import start_compilers
from mtp_research.runtime.errors import ConfigError, IntegrityError, stopped_by_signals
from mtp_research.runtime.files import is_held_by_others, sha256_of
from mtp_research.runtime.progress import WorkProgress
from mtp_research.runtime.provenance import is_first_rank, redact_tree, run_record
from mtp_research.runtime.threads import one_thread_if_small


def evaluate(
    config: EvalConfig, output_dir: Path, *, on_start: Callable[[], object] | None = None
) -> dict[str, object]:
    """Run an evaluation, print its tables and write `results.json`, its profile and `table.txt`.

    An evaluation that was killed in `output_dir` goes on, one that is finished there is shown
    again. `on_start` is called when the folder is known to take this one. Returns the main figures,
    as printed on the last line.
    """
    with ReportRun(config.logger) as wandb_run:

        def begin() -> None:
            if on_start is not None:
                on_start()
            wandb_run.open(output_dir, config=dataclasses.asdict(config))

        return _evaluate(config, output_dir, on_start=begin, wandb_run=wandb_run)


def _evaluate(
    config: EvalConfig,
    output_dir: Path,
    *,
    on_start: Callable[[], object],
    wandb_run: ReportRun,
) -> dict[str, object]:
    conditions = conditions_of(config)
    if config.engine.compile:
        start_compilers()
    prompts = load_prompts(
        config.prompts.path,
        domains=config.prompts.domains,
        max_prompts=config.prompts.max_prompts,
        seed=config.seed,
    )
    if config.backend != [OWN]:
        _check_compared(config, prompts)
    target = load_target(
        config.model.path,
        dtype=config.model.dtype,
        device=config.model.device,
        tp_plan=config.model.tp_plan,
        device_map=config.model.device_map,
        experts=config.model.experts,
        weights=config.model.weights_form,
    )
    warn_of_family(target, family=config.model.family)
    check_backend(config.engine.backend, target.device)
    conversations = _conversations(config, prompts, target)
    encoded, asked = conversations.encoded, config.prompts
    scorer = Scorer(conversations, score=asked.score, run_code=asked.run_code)
    unfinished = _heads_in_training(conditions)
    inputs = _inputs(conditions, encoded, target)
    if config.backend != [OWN]:
        inputs["prompt_token_ids"] = token_ids_sha256(encoded.token_ids)
    if finished := finished_report(output_dir, config, inputs=inputs):
        _show(finished, config, stored_at=results_file(output_dir))
        sys.stderr.write("already finished in this folder; overwrite=true runs it anew\n")
        return _last_line(finished, output_dir)
    heads = cast(dict[str, object], inputs["heads"])
    decoded = _decode(
        config, conditions, conversations, target, inputs, output_dir, on_start=on_start
    )
    if config.backend != [OWN]:
        decoded = [_comparable(one) for one in decoded]
    report = build_report(
        _scored(decoded, scorer),
        prompts=encoded.entries,
        dtype=str(target.dtype).removeprefix("torch."),
        seed=config.seed,
        config=cast(dict[str, object], redact_tree(dataclasses.asdict(config))),
        run=run_record()
        | {
            "head": next(iter(heads.values())) if len(heads) == 1 else None,
            "heads": heads,
            "target": inputs["target"],
            "thinking_token_ids": encoded.thinking_token_ids,
            "inputs": {key: inputs[key] for key in inputs.keys() - {"prompts", "heads", "target"}},
            "skipped_conditions": list(expand(config).skipped),
            **({"heads_in_training": unfinished} if unfinished else {}),
        },
        skipped_prompts=encoded.skipped,
    )
    write_generations(output_dir, report.conditions, conversations)
    write_profile(output_dir, report)
    path = write_results(output_dir, report)
    write_table(output_dir, report)
    (output_dir / JOURNAL_FILE).unlink()  # the results hold all of it
    _show(report, config, stored_at=path)
    publish_report(report, output_dir=output_dir, run=wandb_run)
    return _last_line(report, output_dir)


def _check_compared(config: EvalConfig, prompts: Sequence[Prompt]) -> None:
    """What several engines need: their files in a folder, and prompts that hold no answers."""
    shown, folder = f"backend=[{','.join(config.backend)}]", config.model.path
    if not Path(folder).is_dir():
        raise ConfigError(
            f"model.path must be a folder for {shown}, got {folder}; download it and set "
            "model.path=FOLDER."
        )
    several = sum(len(prompt.turns) > 1 for prompt in prompts)
    if several and config.prompts.turns == "all":
        raise ConfigError(
            f"prompts.turns must be first for {shown}, as later turns hold an engine's own "
            f"answers, got all ({several} prompts have several turns); set prompts.turns=first."
        )


def _conversations(config: EvalConfig, prompts: Sequence[Prompt], target: Target) -> Conversations:
    asked, tokenizer = config.prompts, load_tokenizer(config.model.path)
    tokenizer = cast(AnswerTokenizer, tokenizer)  # fields set at run time
    encoded = encode_prompts(
        prompts if asked.turns == "all" else first_turns(prompts),
        tokenizer,
        max_model_len=_context_length(config, target),
        thinking=asked.thinking,
        thinking_markers=asked.thinking_markers,
    )
    return Conversations(encoded, tokenizer, asked.thinking, target.stop_token_ids)


def _scored(results: Sequence[ConditionResult], scorer: Scorer) -> list[ConditionResult]:
    if scorer.runs_code:
        sys.stderr.write(
            "note: running code that the model wrote, with limits and with this user's rights "
            "(prompts.run_code=true)\n"
        )
    return [dataclasses.replace(one, scores=scorer.scores(one.records)) for one in results]


def _show(report: Report, config: EvalConfig, *, stored_at: Path) -> None:
    if is_first_rank():
        print_report(report, verbose=config.verbose, stored_at=stored_at)


def _last_line(report: Report, output_dir: Path) -> dict[str, object]:
    _require_outputs(report, output_dir)
    _require_equal_passes(report, output_dir)
    return json.loads(last_line(report, folder=output_dir))


def _decode(
    config: EvalConfig,
    conditions: Sequence[Condition],
    conversations: Conversations,
    target: Target,
    inputs: Mapping[str, object],
    output_dir: Path,
    *,
    on_start: Callable[[], object],
) -> list[ConditionResult]:
    heads = _load_heads(conditions, target)
    entries = check_engines(conditions, heads, target)
    clear_folder(output_dir, config, inputs=inputs)
    on_start()
    exported = export_heads_for(entries, heads, out=output_dir / EXPORT_FOLDER)
    twins = {key: one.heads for key, one in exported.items()}
    checkpoints = {key: one.checkpoint for key, one in exported.items()}
    conditions = [_with_policy(one, exported) for one in conditions]
    if config.model.tp_plan != "none":  # ranks must decode alike, and were not killed alike
        (output_dir / JOURNAL_FILE).unlink(missing_ok=True)
    asked = conversations.request_ids
    journal = open_journal(output_dir, config, inputs=inputs, prompt_ids=asked)
    if note := reference_note(config.engine, config.model.device):
        sys.stderr.write(f"{note}\n")
    labels, num_passes = [condition.label for condition in conditions], config.timing.passes
    progress = WorkProgress(
        "decoding",
        total=len(asked) * len(labels) * num_passes,
        unit="prompts",
        first=sum(len(journal.stored(x, n).records) for x in labels for n in range(num_passes)),
        is_shown=is_first_rank(),
    )
    on_cpu = target.device.type == "cpu"
    threads = one_thread_if_small(target.model.num_parameters()) if on_cpu else nullcontext()
    goes_on = f"the same command with output_dir={output_dir} goes on. The pass that was stopped "
    goes_on += "will have no times."
    is_alone = config.model.tp_plan == "none"  # ranks that decode together begin anew
    stops = stopped_by_signals(goes_on) if is_alone else nullcontext()
    try:
        with progress, threads, stops:
            workload = Workload(
                target, heads | twins, conversations, journal, progress, checkpoints
            )
            results: list[ConditionResult] = []
            for group in dict.fromkeys(condition.group for condition in conditions):
                members = [condition for condition in conditions if condition.group == group]
                own = [condition for condition in members if condition.backend == OWN]
                made = run_group(own, workload, num_passes=num_passes)
                for other in members[len(own) :]:  # engines would not share a GPU
                    made += run_group([other], workload, num_passes=num_passes)
                results += [_with_verdict(result, made) for result in made]
    finally:
        journal.close()
    return results


def _load_heads(conditions: Sequence[Condition], target: Target) -> dict[HeadsKey, Heads]:
    heads: dict[HeadsKey, Heads] = {(None, None): "null", ("oracle", None): "oracle"}
    for condition in conditions:
        folder = condition.config.spec.head
        is_drafting = condition.num_speculative_tokens > 0
        if is_drafting and folder is not None and (folder, None) not in heads:
            heads[folder, None] = load_heads(folder, target)
    return heads


def _heads_in_training(conditions: Sequence[Condition]) -> list[str]:
    """Names of heads whose run goes on: it writes its best ones from its first walk on."""
    folders = {c.head: c.config.spec.head for c in conditions if c.head not in (None, "oracle")}
    return [name for name, folder in folders.items() if is_held_by_others(Path(str(folder)).parent)]


def _with_policy(condition: Condition, exported: Mapping[HeadsKey, EngineHeads]) -> Condition:
    """Our loop run by an engine's conventions has its policy, too."""
    found = exported.get((condition.config.spec.head, condition.conventions))
    return condition if found is None else dataclasses.replace(condition, policy=found.policy)


def _inputs(
    conditions: Sequence[Condition], encoded: EncodedPrompts, target: Target
) -> dict[str, object]:
    """Hashes of everything that the configuration only points to; facts of the heads."""
    folders = {c.head: c.config.spec for c in conditions if c.head is not None}
    rankings = {
        name: ranking_sha256(spec.head)
        for name, spec in folders.items()
        if spec.draft_vocabulary_size is not None
    }
    policies = {c.policy: POLICIES[c.policy].procedure for c in conditions if c.policy in POLICIES}
    verify = {c.config.spec.verify for c in conditions} - {"auto", *VERIFY_RULES}
    profiles = {path for c in conditions if (path := c.config.spec.synthetic_profile) is not None}
    return {
        "prompts": prompts_sha256(encoded.entries),
        "heads": {name: head_facts(spec.head) for name, spec in folders.items()},
        "target": target_hashes(target) | source_facts(target.path),
        "dtype": str(target.dtype),
        "device": target.device.type,
        "policies": policies,  # by name alone, an edited one would go on with rounds of the old
        **({"rules": {name: RULES[name][1:] for name in sorted(verify)}} if verify else {}),
        **({"token_rankings": rankings} if rankings else {}),
        **({"profiles": [sha256_of(Path(p)) for p in sorted(profiles)]} if profiles else {}),
    }


def _context_length(config: EvalConfig, target: Target) -> int:
    limit = target.config.max_position_embeddings
    wanted = config.engine.max_model_len
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"engine.max_model_len must be at most {limit}, the target's max_position_embeddings, "
            f"got {wanted}; set engine.max_model_len=null."
        )
    return wanted or limit


def _comparable(result: ConditionResult) -> ConditionResult:
    """Without the rounds that engines report in different ways."""
    records = tuple(without_last_round(record) for record in result.records)
    return dataclasses.replace(result, records=records)


def _with_verdict(result: ConditionResult, group: Sequence[ConditionResult]) -> ConditionResult:
    """Texts of our own K = 0 are what all others are held against; without it our first answers."""
    own = [other for other in group if other.engine_name == OWN]
    baseline = next((other for other in own if other.num_speculative_tokens == 0), None)
    if result is baseline:
        return dataclasses.replace(result, lossless="is the baseline")
    if not is_lossless(result.verify):
        return dataclasses.replace(result, lossless=f"lossy rule: {result.verify}")
    if baseline is None and result.engine_name != OWN:
        baseline = own[0]
    if baseline is None or baseline.temperature:
        return result
    equal = num_equal_texts(result.records, baseline.records, prompt_of=result.prompt_of)
    total = _num_prompts(result)
    word = "identical" if equal == total else "DIFFERS, same"
    return dataclasses.replace(result, lossless=f"{word} {equal}/{total}")


def _num_prompts(result: ConditionResult) -> int:
    return len(turns_by_prompt(result.records, result.prompt_of))


def _require_outputs(report: Report, output_dir: Path) -> None:
    empty = [item.result.label for item in report.summaries if not item.acceptance.num_prompts]
    if empty:
        reasons = {
            r.finish_reason for c in report.conditions if c.label in empty for r in c.records
        }
        raise IntegrityError(
            f"expected finished generations, got none for {', '.join(empty)} (ended by "
            f"{', '.join(sorted(reasons))}): the target's logits are not finite; check "
            f"model.path and model.dtype. Results: {output_dir}"
        )


def _require_equal_passes(report: Report, output_dir: Path) -> None:
    """Refuse other texts than in the first pass, unless the clock chose the number of drafts."""
    differing = []
    for condition in report.conditions:
        if condition.draft_length == "expected_gain":
            continue
        equal = [one.num_texts_equal for one in condition.repeats]
        total = _num_prompts(condition)
        numbers = [total - number for number in equal if number is not None]
        differing += [f"{condition.label} ({number} texts)" for number in numbers if number]
    if differing:
        raise IntegrityError(
            f"expected the same texts in every pass, got others for {', '.join(differing)}; "
            f"decode with model.dtype=float32 or timing.passes=1. Results: {output_dir}"
        )
