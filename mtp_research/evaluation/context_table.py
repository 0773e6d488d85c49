"""Acceptance and speed by context length, from results decoded one request at a time.

    python eval.py experiment=context_sweep output_dir=results/context
    python -m mtp_research.evaluation.context_table results/context

Acceptance: every round falls into the bucket [2^n, 2^(n+1)) of the text before its first draft.
Speed: every request falls, whole, into the bucket of the text in the middle of its output;
tokens/s = tokens after the first / seconds from the first to the last. In a batch those seconds
would be shared with other contexts, so that batches are refused. Letter: P prompts.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.markdown import markdown_table
from mtp_research.evaluation.report import Report
from mtp_research.evaluation.results import RESULTS_FILE, recompute
from mtp_research.evaluation.stats.bootstrap import Estimate, Ratio, estimate
from mtp_research.evaluation.stats.outcome import ConditionResult
from mtp_research.evaluation.stats.statistics import (
    FINISHED,
    MIN_PROMPTS,
    ContextBucket,
    acceptance_by_context,
)
from mtp_research.evaluation.tables import UNDEFINED, interval, number
from mtp_research.runtime.errors import ConfigError, IntegrityError

_HEADER = (
    "context",
    "condition",
    "rounds",
    "acceptance length [95 %]",
    "requests",
    "tokens/s [95 %]",
    "ratio to K = 0",
)


def context_rows(report: Report) -> list[tuple[str, ...]]:
    """One row per bucket and condition, from short to long, cells in the order of the header.

    Raises:
        ConfigError: several requests were decoded at a time.
    """
    batch = cast(Mapping[str, object], report.config["engine"])["max_num_requests"]
    if batch != 1:
        raise ConfigError(
            f"engine.max_num_requests must be 1 for speed by context, got {batch}; "
            "set engine.max_num_requests=1."
        )
    speeds = {c.label: speed_by_context(c.records, seed=report.seed) for c in report.conditions}
    lengths = {c.label: _lengths(c, seed=report.seed) for c in report.conditions}
    baseline = next((c.label for c in report.conditions if c.num_speculative_tokens == 0), None)
    plain = speeds.get(baseline or "", {})
    lows = sorted({low for found in speeds.values() for low in found})
    return [
        _row(low, label, lengths[label].get(low), speeds[label][low], plain.get(low))
        for low in lows
        for label in speeds
        if low in speeds[label]
    ]


def speed_by_context(
    records: Sequence[RequestRecord], *, seed: int
) -> dict[int, tuple[int, Estimate]]:
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
    num_small = sum(int(row[_HEADER.index("requests")]) < MIN_PROMPTS for row in rows)
    if num_small:
        warnings.append(
            f"{num_small} of {len(rows)} rows have fewer than {MIN_PROMPTS} requests: their "
            "intervals are too narrow"
        )
    return [f"warning: {text}" for text in dict.fromkeys(warnings)]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m mtp_research.evaluation.context_table`."""
    parser = argparse.ArgumentParser(
        prog="python -m mtp_research.evaluation.context_table",
        description="Print acceptance and speed by context length as Markdown.",
    )
    parser.add_argument("folder", type=Path)
    try:
        report = recompute(parser.parse_args(argv).folder / RESULTS_FILE)
        rows = context_rows(report)
    except (ConfigError, IntegrityError) as fault:
        sys.stderr.write(f"error: {fault}\n")
        return fault.exit_code
    sys.stdout.write(
        "\n\n".join([markdown_table(_HEADER, rows), *context_notes(report, rows)]) + "\n"
    )
    return 0


def _row(
    low: int,
    label: str,
    bucket: ContextBucket | None,
    speed: tuple[int, Estimate],
    plain: tuple[int, Estimate] | None,
) -> tuple[str, ...]:
    own, theirs = speed[1].value, plain[1].value if plain else None
    return (
        f"{low} to {2 * low - 1}",
        label,
        str(bucket.num_rounds) if bucket else UNDEFINED,
        interval(bucket.acceptance_length) if bucket else UNDEFINED,
        str(speed[0]),
        interval(speed[1], ".1f"),
        number(own / theirs if own and theirs else None, ".2f"),
    )


def _lengths(condition: ConditionResult, *, seed: int) -> dict[int, ContextBucket]:
    return {one.low: one for one in acceptance_by_context(condition.records, seed=seed)}


def _rate(records: Sequence[RequestRecord]) -> Ratio:
    return Ratio(
        np.array([len(record.output_token_ids) - 1 for record in records], dtype=np.float64),
        np.array([record.decode_s for record in records], dtype=np.float64),
    )


if __name__ == "__main__":
    raise SystemExit(main())
