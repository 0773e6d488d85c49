"""The table policy x (rows per step, audit, acceptance), from the results of some evaluations.

    python eval.py experiment=eval_policy_table spec.k=3 output_dir=results/k3
    python -m mtp_research.evaluation.policy_table results/k3 results/k5

Every figure is computed again from the stored counters. Letters: K drafts per step, N MTP modules.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from mtp_research.evaluation.markdown import markdown_table
from mtp_research.evaluation.report import Report
from mtp_research.evaluation.results import RESULTS_FILE, recompute
from mtp_research.evaluation.stats.summary import ConditionSummary, paired
from mtp_research.evaluation.tables import UNDEFINED, interval, number
from mtp_research.heads.record import read_head_record
from mtp_research.policy.audit import Verdict
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan
from mtp_research.runtime.errors import ConfigError, IntegrityError

_REFERENCE = "training"  # differences are to it, prompt by prompt
_FAULTS = (Verdict.WRONG, Verdict.MIXED, Verdict.HOLE)
_HEADER = (
    "head",
    "N",
    "K",
    "policy",
    "module rows per step",
    *(f"{fault} %" for fault in _FAULTS),
    "acceptance length [95 %]",
    f"minus {_REFERENCE} [95 %]",
    "p_1 .. p_K",
)


def table_rows(report: Report) -> list[tuple[str, ...]]:
    """One row per policy of an evaluation, cells in the order of the header.

    Raises:
        ConfigError: the head folder that the results name is not there.
    """
    spec = cast(Mapping[str, object], report.config["spec"])
    head = Path(str(spec["head"]))
    num_modules = int(read_head_record(head)["spec"]["num_mtp_modules"])
    return [
        (
            head.name,
            str(num_modules),
            str(summary.num_speculative_tokens),
            str(summary.policy),
            str(_num_module_rows(summary, num_modules)),
            *_fault_percentages(summary.audit),
            interval(summary.acceptance.acceptance_length_micro),
            _difference(report, summary.label),
            " ".join(
                number(rate.value, ".3f")
                for rate in summary.acceptance.acceptance_rate_per_position
            ),
        )
        for summary in report.summaries
        if summary.policy in POLICIES
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m mtp_research.evaluation.policy_table`."""
    parser = argparse.ArgumentParser(
        prog="python -m mtp_research.evaluation.policy_table",
        description="Print the policy table of some result folders as Markdown.",
    )
    parser.add_argument("folders", nargs="+", type=Path)
    try:
        reports = [recompute(path / RESULTS_FILE) for path in parser.parse_args(argv).folders]
        rows = [row for report in reports for row in table_rows(report)]
        sys.stdout.write(markdown_table(_HEADER, rows) + "\n")
    except (ConfigError, IntegrityError) as fault:
        sys.stderr.write(f"error: {fault}\n")
        return fault.exit_code
    return 0


def _difference(report: Report, label: str) -> str:
    """Acceptance length minus the reference's, a dash where there is none."""
    by_label = {condition.label: condition for condition in report.conditions}
    if label == _REFERENCE or _REFERENCE not in by_label:
        return UNDEFINED
    pair = paired(by_label[label], by_label[_REFERENCE], seed=report.seed)
    return interval(pair.differences["acceptance_length_micro"], "+.3f")


def _num_module_rows(summary: ConditionSummary, num_modules: int) -> int:
    policy = POLICIES[str(summary.policy)]
    return DraftPlan(policy, summary.num_speculative_tokens, num_modules).num_rows_per_step


def _fault_percentages(audit: Mapping[str, int] | None) -> tuple[str, ...]:
    """Share of each fault among the slots looked at."""
    if audit is None or not audit.get("slots"):
        return (UNDEFINED,) * len(_FAULTS)
    return tuple(f"{100 * audit[fault] / audit['slots']:.2f}" for fault in _FAULTS)


if __name__ == "__main__":
    raise SystemExit(main())
