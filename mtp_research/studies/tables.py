"""Tables of stored results: one command with a subcommand for each.

    mtp tables compare ours/results.json theirs/results.json
    mtp tables context results/context
    mtp tables policy results/k3 results/k5
    mtp tables fault results/fault_price
    mtp tables seeds runs/matrix

`compare` prints paired differences ours - theirs; results that measure different things are refused
with every prompt whose hash differs. `context` prints acceptance and speed by context length: every
round falls into the bucket [2^n, 2^(n+1)) of the text before its first draft; every request falls,
whole, into that of the text in the middle of its output, with tokens/s = tokens after the first /
seconds from the first to the last; in a batch those seconds would be shared, so that batches are
refused. `policy` prints rows per step, audit and acceptance by policy, `fault` the prices of faulty
draft slots, `seeds` a policy matrix over training seeds. All figures are computed again from the
stored counters. Exit code 2: the results do not fit the question; 3: a file is damaged, of other
formulas, or holds figures that its own counters do not give. Letters: K drafts per step, N MTP
modules.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import cast

import numpy as np

from mtp_research.config.schema import VERIFY_RULES, SamplingConfig, SpecConfig, VerifyOptions
from mtp_research.decode.stats import RequestRecord
from mtp_research.decode.verify.verify_rules import is_lossless
from mtp_research.evaluation.report.grids import paired_grid
from mtp_research.evaluation.report.notes import UNDEFINED, interval, number
from mtp_research.evaluation.report.stored import (
    Report,
    mapping,
    printable,
    read_runs,
    recompute,
    results_file,
    rule_of,
)
from mtp_research.evaluation.report.terminal import markdown_table, plain_text
from mtp_research.evaluation.stats.bootstrap import Estimate, Ratio, estimate
from mtp_research.evaluation.stats.statistics import (
    FINISHED,
    MIN_PROMPTS,
    ContextBucket,
    acceptance_by_context,
)
from mtp_research.evaluation.stats.summary import (
    ConditionResult,
    PairedComparison,
    paired,
)
from mtp_research.heads.record import conventions_phrase, head_name, read_head_record
from mtp_research.policy.audit import Verdict
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan
from mtp_research.runtime.errors import ConfigError, IntegrityError, escaped
from mtp_research.runtime.options import OptionParser
from mtp_research.runtime.provenance import write_error
from mtp_research.studies import study_tables

_Speed = tuple[int, Estimate]  # requests, and their tokens/s
_NUM_LISTED = 5
_REFERENCE = "training"  # differences of the policy table are to it, prompt by prompt
logger = logging.getLogger(__name__)

_FAULTS = (Verdict.WRONG, Verdict.MIXED, Verdict.HOLE)
_LENGTH = "acceptance length [95 %]"
_CONTEXT_HEADER = ("context", "condition", "rounds", "their prompts", _LENGTH, "requests",
                   "tokens/s [95 %]", "ratio to K = 0")  # fmt: skip
# A round counts where it was, a request where its answer's middle token is.
_SMALL = ("their prompts", "requests")
_POLICY_HEADER = ("head", "N", "K", "T", "policy", "module rows per step",
                  *(f"{x} %" for x in _FAULTS), _LENGTH, f"minus {_REFERENCE} [95 %]",
                  "p_1 .. p_K")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `mtp tables`; returns the exit code."""
    parser = OptionParser(prog="mtp tables", description="Print a table of stored results.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (number_of_paths, _, told, read) in _COMMANDS.items():
        command = commands.add_parser(name, help=told, description=f"Print {told}.")
        command.add_argument(
            "paths",
            nargs=number_of_paths,
            type=Path,
            metavar="RESULTS",
            help=f"{read}, or its folder",
        )
    options = parser.parse_args(argv)
    try:
        sys.stdout.write(_COMMANDS[options.command][1](options.paths) + "\n")
    except (ConfigError, IntegrityError) as fault:
        write_error(str(fault))
        return fault.exit_code
    return 0


def _compare_text(paths: Sequence[Path]) -> str:
    runs = read_runs(paths)
    ours, theirs = (run.report for run in runs)
    try:
        pairs = compare(ours, theirs)
    except ConfigError as fault:
        lines = [str(fault)]
        for name, hashes in differing_prompts(ours, theirs).items():
            sides = " and ".join((digest or "no such prompt")[:16] for digest in hashes)
            lines.append(f"  {printable(name)}: {sides}")
        raise ConfigError("\n".join(lines)) from None
    grids = [plain_text(paired_grid(pair)) for pair in pairs.values()]
    known = (w for s in (*ours.summaries, *theirs.summaries) for w in s.acceptance.warnings)
    warnings = dict.fromkeys(
        [*_policy_differences(ours, theirs), *_rule_differences(ours, theirs), *known]
    )
    grids += [f"warning: {warning}" for warning in warnings]
    title = f"{runs[0].name} - {runs[1].name}, {len(ours.prompts)} prompts"
    return "\n\n".join([title, *grids])


def _context_text(paths: Sequence[Path]) -> str:
    report = recompute(results_file(paths[0]))
    rows = context_rows(report)
    notes = context_notes(report, rows)
    return "\n\n".join([markdown_table(_CONTEXT_HEADER, rows), *notes])


def _policy_text(paths: Sequence[Path]) -> str:
    reports = [recompute(results_file(path)) for path in paths]
    rows = [row for report in reports for row in policy_rows(report)]
    heads = dict.fromkeys(map(_head_folder, reports))
    lines = [
        f"heads {head_name(folder)}: {conventions_phrase(read_head_record(folder)['spec'])}"
        for folder in heads
    ]
    return "\n".join([markdown_table(_POLICY_HEADER, rows), "", *lines])


def _fault_text(paths: Sequence[Path]) -> str:
    return study_tables.price_markdown(study_tables.read_checked_study(paths[0]))


def _seeds_text(paths: Sequence[Path]) -> str:
    return study_tables.matrix_markdown(study_tables.read_checked_matrix(paths[0]))


_EVALUATION = "results.json of eval.py"
# By name: how many results it reads, what makes its text of them, what this is, and of which files.
_COMMANDS: dict[str, tuple[int | str, Callable[[Sequence[Path]], str], str, str]] = {
    "compare": (2, _compare_text, "paired differences, first results minus second", _EVALUATION),
    "context": (1, _context_text, "acceptance and speed by length of the text", _EVALUATION),
    "policy": ("+", _policy_text, "acceptance and faults of each policy", _EVALUATION),
    "fault": (1, _fault_text, "what each fault costs", "fault_price.json of a study"),
    "seeds": (1, _seeds_text, "heads by policy and unroll", "matrix.json of a study"),
}


def compare(ours: Report, theirs: Report) -> dict[str, PairedComparison]:
    """Paired differences ours - theirs of every condition that both hold and that drafts."""
    require_comparable(ours, theirs)
    pairs = ((one, other) for one, other in _shared(ours, theirs) if one.num_speculative_tokens)
    return {one.label: paired(one, other, seed=ours.seed) for one, other in pairs}


def _shared(ours: Report, theirs: Report) -> list[tuple[ConditionResult, ConditionResult]]:
    """The conditions whose label both hold, and those of one setting.

    A label names only what differs within its own run.
    """
    references = {one.label: one for one in theirs.conditions}
    mine, other = _by_setting(ours), _by_setting(theirs)
    for setting in mine.keys() & other.keys():
        references.setdefault(mine[setting].label, other[setting])
    return [(one, references[one.label]) for one in ours.conditions if one.label in references]


def _by_setting(report: Report) -> dict[tuple[object, ...], ConditionResult]:
    """The conditions whose setting no other of the run has."""
    counts = Counter(map(_setting, report.conditions))
    return {_setting(one): one for one in report.conditions if counts[_setting(one)] == 1}


def _setting(one: ConditionResult) -> tuple[object, ...]:
    """What a condition decodes with, apart from its heads."""
    drafts = (one.policy, one.num_speculative_tokens, one.draft_sampling, one.draft_length)
    return (*drafts, one.temperature, one.verify, one.max_num_requests)


def require_comparable(ours: Report, theirs: Report) -> None:
    """Refuse two results of other prompts, target, dtype, K or law of the text; see `compare`."""
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
    keeps_text = rule == "auto" or is_lossless(str(rule))
    law["spec.verify"] = "a lossless rule" if keeps_text else rule
    if not keeps_text:
        options = [option.name for option in fields(VerifyOptions)]
        if rule in VERIFY_RULES:  # a rule of one's own may read them all
            options = [name for name in options if name.startswith(f"{rule}_")]
        law |= {f"spec.{name}": spec[name] for name in options}
    return law


def differing_prompts(ours: Report, theirs: Report) -> dict[str, tuple[str | None, str | None]]:
    """Our and their hash by id, where they differ; None where a side lacks the prompt.

    Texts can differ under one id, such as code that was cut from another Python.
    """
    mine, other = ({p.question_id: p.sha256 for p in one.prompts} for one in (ours, theirs))
    names = sorted(mine.keys() | other.keys())
    pairs = {name: (mine.get(name), other.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _policy_differences(ours: Report, theirs: Report) -> list[str]:
    """Policies of one name and other fields; files of before 0.2.0 do not hold the fields."""
    mine, other = (mapping(mapping(one.run, "inputs"), "policies") for one in (ours, theirs))
    return [
        f"policy {printable(name)} is not the same in both: "
        f"{escaped(str(mine[name]))} and {escaped(str(other[name]))}"
        for name in sorted(mine.keys() & other.keys())
        if mine[name] != other[name]
    ]


def _rule_differences(ours: Report, theirs: Report) -> list[str]:
    """Conditions of one name and other rules for the number of drafts."""
    rules = {
        one.label: (rule_of(one, ours), rule_of(other, theirs))
        for one, other in _shared(ours, theirs)
        if one.num_speculative_tokens > 0
    }
    return [
        f"{printable(label)} makes drafts by spec.draft_length={printable(mine)} and "
        f"{printable(other)}; compare target forwards per token, not acceptance lengths"
        for label, (mine, other) in sorted(rules.items())
        if mine != other
    ]


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
    shared = {
        one.label: (one.num_speculative_tokens, other.num_speculative_tokens)
        for one, other in _shared(ours, theirs)
    }
    if not any(mine for mine, _ in shared.values()):
        labels = (", ".join(one.label for one in run.conditions) for run in (ours, theirs))
        return [f"no common condition that drafts ({escaped(' and '.join(labels))})"]
    return [f"K = {a} and {b} for {label}" for label, (a, b) in shared.items() if a != b]


def _with_defaults(
    defaults: SamplingConfig | SpecConfig, stored: Mapping[str, object]
) -> dict[str, object]:
    return {key: stored.get(key, value) for key, value in asdict(defaults).items()}


def _law_differences(ours: Report, theirs: Report) -> list[str]:
    found: dict[str, list[str]] = {}
    for condition, reference in _shared(ours, theirs):
        if condition.num_speculative_tokens == 0:
            continue
        mine, other = law_of_text(condition, ours.config), law_of_text(reference, theirs.config)
        for key in sorted(mine.keys() | other.keys()):
            if mine.get(key) != other.get(key):
                values = [printable(str(law.get(key, "unused"))) for law in (mine, other)]
                text = f"{key} {' and '.join(values)}"
                found.setdefault(text, []).append(printable(condition.label))
    return [f"{text} for {', '.join(labels[:_NUM_LISTED])}" for text, labels in found.items()]


def context_rows(report: Report) -> list[tuple[str, ...]]:
    """One row per bucket and condition, from short to long; refuses a batch above 1."""
    batch = cast(Mapping[str, object], report.config["engine"])["max_num_requests"]
    if batch != 1:
        raise ConfigError(
            f"engine.max_num_requests must be 1 for speed by context, got {batch}; "
            "set engine.max_num_requests=1."
        )
    speeds = {c.label: speed_by_context(c.records, seed=report.seed) for c in report.conditions}
    lengths = {
        one.label: {
            part.low: part
            for part in acceptance_by_context(
                one.records, seed=report.seed, prompt_of=one.prompt_of
            )
        }
        for one in report.conditions
    }
    baseline = next((c.label for c in report.conditions if c.num_speculative_tokens == 0), None)
    plain = speeds.get(baseline or "", {})
    found = [*speeds.values(), *lengths.values()]
    return [
        _context_row(low, label, lengths[label].get(low), speeds[label].get(low), plain.get(low))
        for low in sorted({low for one in found for low in one})
        for label in speeds
        if low in speeds[label] or low in lengths[label]
    ]


def speed_by_context(records: Sequence[RequestRecord], *, seed: int) -> dict[int, _Speed]:
    """Requests and tokens/s with its interval over requests, by the low end of the bucket."""
    groups: dict[int, list[RequestRecord]] = {}
    for record in records:
        if record.finish_reason in FINISHED and len(record.output_token_ids) > 1:
            middle = record.num_prompt_tokens + len(record.output_token_ids) // 2
            groups.setdefault(1 << (middle.bit_length() - 1), []).append(record)
    return {
        low: (len(group), estimate({"rate": _rate(group)}, seed=seed)["rate"])
        for low, group in groups.items()
    }


def context_notes(report: Report, rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Warnings that belong under the rows: too few prompts in all, or in a bucket."""
    warnings = [w for summary in report.summaries for w in summary.acceptance.warnings]
    counts = [[row[_CONTEXT_HEADER.index(name)] for name in _SMALL] for row in rows]
    num_small = sum(any(n != UNDEFINED and int(n) < MIN_PROMPTS for n in one) for one in counts)
    if num_small:
        warnings.append(
            f"{num_small} of {len(rows)} rows have fewer than {MIN_PROMPTS} prompts or requests: "
            "their intervals are too narrow"
        )
    return [f"warning: {text}" for text in dict.fromkeys(warnings)]


def _context_row(
    low: int, label: str, bucket: ContextBucket | None, speed: _Speed | None, plain: _Speed | None
) -> tuple[str, ...]:
    own, theirs = (one[1].value if one else None for one in (speed, plain))
    of_rounds, of_requests = (UNDEFINED,) * 3, (UNDEFINED,) * 2
    if bucket is not None:
        length = interval(bucket.acceptance_length)
        of_rounds = (str(bucket.num_rounds), str(bucket.num_prompts), length)
    if speed is not None:
        of_requests = (str(speed[0]), interval(speed[1], ".1f"))
    ratio = number(own / theirs if own and theirs else None, ".2f")
    return (f"{low} to {2 * low - 1}", label, *of_rounds, *of_requests, ratio)


def _rate(records: Sequence[RequestRecord]) -> Ratio:
    tokens = [len(record.output_token_ids) - 1 for record in records]
    seconds = [record.decode_s for record in records]
    return Ratio(np.array(tokens, dtype=np.float64), np.array(seconds, dtype=np.float64))


def policy_rows(report: Report) -> list[tuple[str, ...]]:
    """One row per policy of an evaluation, cells in the order of the header."""
    head = _head_folder(report)
    num_modules = int(read_head_record(head)["spec"]["num_mtp_modules"])
    rows = []
    for summary in report.summaries:
        one, figures = summary.result, summary.acceptance
        if one.policy not in POLICIES:
            if one.policy is not None:
                logger.warning(
                    "no policy of this checkout is %s: %s is left out", one.policy, one.label
                )
            continue
        plan = DraftPlan(POLICIES[one.policy], one.num_speculative_tokens, num_modules)
        rates = figures.acceptance_rate_per_position
        rows.append((
            *(head_name(head), str(num_modules), str(one.num_speculative_tokens)),
            *(number(one.temperature, "g"), _policy_and_rule(one)),
            str(plan.num_rows_per_step),
            *_fault_percentages(one.audit),
            interval(figures.acceptance_length_micro),
            _difference(report, one),
            " ".join(number(rate.value, ".3f") for rate in rates),
        ))  # fmt: skip
    return rows


def _policy_and_rule(one: ConditionResult) -> str:
    rule = "" if one.draft_length in (None, "fixed") else f" {one.draft_length}"
    return f"{one.policy}{rule}"


def _head_folder(report: Report) -> Path:
    return Path(str(cast(Mapping[str, object], report.config["spec"])["head"]))


def _difference(report: Report, one: ConditionResult) -> str:
    """Acceptance length minus that of the reference in the same setting; a dash without one."""
    wanted = one.head, _REFERENCE, *_setting(one)[1:]
    found = [other for other in report.conditions if (other.head, *_setting(other)) == wanted]
    if one.policy == _REFERENCE or len(found) != 1:
        return UNDEFINED
    pair = paired(one, found[0], seed=report.seed)
    return interval(pair.differences["acceptance_length_micro"], "+.3f")


def _fault_percentages(audit: Mapping[str, int] | None) -> tuple[str, ...]:
    if audit is None or not audit.get("slots"):
        return (UNDEFINED,) * len(_FAULTS)
    return tuple(f"{100 * audit[fault] / audit['slots']:.2f}" for fault in _FAULTS)
