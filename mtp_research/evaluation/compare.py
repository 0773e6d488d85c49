"""Two stored results side by side; results that measure different things are refused.

    python -m mtp_research.evaluation.compare ours/results.json theirs/results.json

prints the paired differences ours - theirs, or exits with 2 and every prompt whose hash differs. A
file with other formulas, or with figures that its own counters do not give, is refused (exit 3).
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mtp_research.config.schema import SamplingConfig, SpecConfig
from mtp_research.decode.verify.verify_rules import LOSSLESS_RULES
from mtp_research.evaluation.report import Report
from mtp_research.evaluation.runs import mapping, read_runs
from mtp_research.evaluation.stats.outcome import ConditionResult
from mtp_research.evaluation.stats.summary import PairedComparison, paired
from mtp_research.evaluation.tables import paired_grid, plain_text, printable
from mtp_research.runtime.errors import ConfigError, IntegrityError

_NUM_LISTED = 5


def compare(ours: Report, theirs: Report) -> dict[str, PairedComparison]:
    """Paired differences ours - theirs of every condition label that both hold and that drafts.

    Raises:
        ConfigError: the results differ in prompts, target, dtype, K or the law of the text, or
            share no such label; the message lists every difference.
    """
    require_comparable(ours, theirs)
    references = {condition.label: condition for condition in theirs.conditions}
    return {
        condition.label: paired(condition, references[condition.label], seed=ours.seed)
        for condition in ours.conditions
        if condition.label in references and condition.num_speculative_tokens > 0
    }


def require_comparable(ours: Report, theirs: Report) -> None:
    """Refuse two results of other prompts, target, dtype, K or law of the text; see `compare`.

    Raises:
        ConfigError: lists every difference.
    """
    found = [*_prompt_differences(ours, theirs), *_draft_differences(ours, theirs)]
    found += _target_differences(ours, theirs)
    if ours.dtype != theirs.dtype:
        found.append(f"dtype {ours.dtype} and {theirs.dtype}")
    found += _law_differences(ours, theirs)
    if found:
        raise ConfigError(
            "expected results of the same prompts, target, dtype, K and sampling, got "
            f"{'; '.join(found)}; evaluate both with the same prompts.path, prompts.max_prompts, "
            "model.path, model.dtype, spec.k, spec.verify and sampling.*."
        )


def law_of_text(condition: ConditionResult, config: Mapping[str, object]) -> dict[str, object]:
    """Settings that decide how the text of a condition is distributed, by key.

    Those that do nothing are left out: truncation at temperature 0, the rest of DRY without its
    multiplier. All lossless rules have one law. A setting that an old file lacks has its default.

    Args:
        condition: of a results file.
        config: the configuration in that file.
    """
    stored = _with_defaults(SamplingConfig(), mapping(config, "sampling"))
    if condition.temperature is not None:  # the file may hold a list of them
        stored["temperature"] = condition.temperature
    idle = set() if stored["temperature"] else {"top_k", "top_p", "min_p"}
    if not stored["dry_multiplier"]:
        idle |= {"dry_base", "dry_allowed_length"}
    law = {f"sampling.{key}": value for key, value in stored.items() if key not in idle}
    spec = _with_defaults(SpecConfig(), mapping(config, "spec"))
    rule = condition.verify or spec["verify"]
    is_lossless = rule in LOSSLESS_RULES or rule == "auto"
    law["spec.verify"] = "a lossless rule" if is_lossless else rule
    if not is_lossless:
        own = {key: value for key, value in spec.items() if key.startswith(f"{rule}_")}
        law |= {f"spec.{key}": value for key, value in own.items()}
    return law


def differing_prompts(ours: Report, theirs: Report) -> dict[str, tuple[str | None, str | None]]:
    """Our and their hash by id, where they differ; None where a side lacks the prompt.

    Texts can differ under one id, such as code that was cut from another Python.
    """
    our_hashes = {prompt.question_id: prompt.sha256 for prompt in ours.prompts}
    their_hashes = {prompt.question_id: prompt.sha256 for prompt in theirs.prompts}
    pairs = {
        name: (our_hashes.get(name), their_hashes.get(name))
        for name in sorted(our_hashes.keys() | their_hashes.keys())
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m mtp_research.evaluation.compare`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mtp_research.evaluation.compare",
        description="Paired differences of two results over the same prompts.",
    )
    parser.add_argument("ours", type=Path, help="results.json, or its folder")
    parser.add_argument("theirs", type=Path)
    options = parser.parse_args(argv)
    try:
        runs = read_runs([options.ours, options.theirs])
    except IntegrityError as fault:
        sys.stderr.write(f"error: {fault}\n")
        return fault.exit_code
    ours, theirs = (run.report for run in runs)
    try:
        pairs = compare(ours, theirs)
    except ConfigError as fault:
        sys.stderr.write(f"error: {fault}\n")
        for name, hashes in differing_prompts(ours, theirs).items():
            sides = " and ".join((digest or "no such prompt")[:16] for digest in hashes)
            sys.stderr.write(f"  {printable(name)}: {sides}\n")
        return fault.exit_code
    grids = [plain_text(paired_grid(pair)) for pair in pairs.values()]
    known = (w for s in (*ours.summaries, *theirs.summaries) for w in s.acceptance.warnings)
    grids += [f"warning: {warning}" for warning in dict.fromkeys(known)]
    title = f"{runs[0].name} - {runs[1].name}, {len(ours.prompts)} prompts"
    sys.stdout.write("\n\n".join([title, *grids]) + "\n")
    return 0


def _prompt_differences(ours: Report, theirs: Report) -> list[str]:
    differing = [printable(name) for name in differing_prompts(ours, theirs)]
    if not differing:
        return []
    listed = ", ".join(differing[:_NUM_LISTED])
    more = f" and {len(differing) - _NUM_LISTED} more" if len(differing) > _NUM_LISTED else ""
    return [f"{len(differing)} prompts with other hashes ({listed}{more})"]


def _target_differences(ours: Report, theirs: Report) -> list[str]:
    """Hashes that differ; the path where a file holds none, as before hashes were recorded."""
    mine, other = (mapping(report.run, "target") for report in (ours, theirs))
    if not mine or not other:
        paths = [str(mapping(r.config, "model").get("path") or "") for r in (ours, theirs)]
        return [f"model.path {' and '.join(map(printable, paths))}"] if len(set(paths)) > 1 else []
    return [
        f"target {key} {' and '.join(str(hashes.get(key))[:16] for hashes in (mine, other))}"
        for key in sorted(mine.keys() | other.keys())
        if mine.get(key) != other.get(key)
    ]


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


def _with_defaults(
    defaults: SamplingConfig | SpecConfig, stored: Mapping[str, object]
) -> dict[str, object]:
    """The stored values of the keys that this version knows."""
    return {key: stored.get(key, value) for key, value in asdict(defaults).items()}


def _law_differences(ours: Report, theirs: Report) -> list[str]:
    """Each differing setting with both values, and the shared conditions that it is of."""
    references = {condition.label: condition for condition in theirs.conditions}
    found: dict[str, list[str]] = {}
    for condition in ours.conditions:
        if condition.label not in references or condition.num_speculative_tokens == 0:
            continue
        mine = law_of_text(condition, ours.config)
        other = law_of_text(references[condition.label], theirs.config)
        for key in sorted(mine.keys() | other.keys()):
            if mine.get(key) != other.get(key):
                values = [printable(str(law.get(key, "unused"))) for law in (mine, other)]
                text = f"{key} {' and '.join(values)}"
                found.setdefault(text, []).append(printable(condition.label))
    return [f"{text} for {', '.join(labels[:_NUM_LISTED])}" for text, labels in found.items()]


if __name__ == "__main__":
    raise SystemExit(main())
