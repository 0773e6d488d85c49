"""Every table of a page, cell by cell, against plain arithmetic on the counters of results.json.

Nothing of `mtp_research.evaluation` computes the expected values. Interval ends are checked by
their own tests (`test_bootstrap.py`); here the value before the bracket is.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_research.evaluation.report.comparable import entries
from mtp_research.evaluation.report.frame import frame_of, run_tables
from mtp_research.evaluation.report.grids import Grid, report_grids
from mtp_research.evaluation.report.stored import Report, Run, recompute, write_results
from tests.evaluation.report.test_run_charts import length, report

__all__ = ["report"]  # a fixture
Stored = dict[str, dict]
FINDINGS = ("WRONG", "MIXED", "HOLE", "PROVISIONAL")


@pytest.fixture(scope="module")
def file(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_results(tmp_path_factory.mktemp("tables"), report)


def rounds(one: dict) -> list[tuple[int, int]]:
    """(accepted, drafted) of every round."""
    return [
        pair
        for record in one["records"]
        for pair in zip(
            record["num_accepted_per_round"], record["num_drafted_per_round"], strict=True
        )
    ]


def rate(one: dict) -> float:
    return sum(a for a, _ in rounds(one)) / sum(d for _, d in rounds(one))


def speed(one: dict) -> float:
    return sum(len(record["output_token_ids"]) for record in one["records"]) / one["wall_s"]


def baseline(stored: Stored, one: dict) -> dict:
    return stored[f"baseline R={one['max_num_requests']}"]


def overview(one: dict, stored: Stored) -> list[object]:
    drafts = one["num_speculative_tokens"] > 0
    ratio = speed(one) / speed(baseline(stored, one))
    figures = [length(one), rate(one)] if drafts else [1.0, "-"]
    return [*figures, speed(one), ratio, one["lossless"]]


def decoding(one: dict, stored: Stored) -> list[object]:
    """8 prompts never fill 16 places."""
    decode = rates(one, stored, "num_decode_tokens", "decode_wall_s")
    if one["max_num_requests"] > len(one["records"]):
        return [*decode, "-", "-"]
    return [*decode, *rates(one, stored, "num_full_tokens", "full_wall_s")]


def rates(one: dict, stored: Stored, tokens: str, seconds: str) -> list[float]:
    """Tokens per second, and their ratio to the baseline's."""
    ours, plain = (x[tokens] / x[seconds] for x in (one, baseline(stored, one)))
    return [ours, ours / plain]


def positions(one: dict, stored: Stored) -> list[object]:
    pairs = rounds(one)
    kept = [sum(a >= i for a, _ in pairs) / len(pairs) for i in (1, 2, 3)]
    faults = " / ".join(str(one["audit"][name]) for name in FINDINGS[:3])
    return [*kept, sum(d - a >= 2 for a, d in pairs), faults]


def domains(one: dict, stored: Stored) -> list[object]:
    """Prompts alternate between `arith` and `howto`."""
    halves = [
        {"records": [r for r in one["records"] if int(r["request_id"][1:]) % 2 == odd]}
        for odd in (0, 1)
    ]
    return [length(half) for half in halves]


def differences(one: dict, stored: Stored) -> list[object]:
    reference = stored[f"eagle a R={one['max_num_requests']}"]
    return [None, length(one) - length(reference), rate(one) - rate(reference)]


def steps(one: dict, stored: Stored) -> list[object]:
    parts, num_drafts = one["parts"], one["num_speculative_tokens"]
    mean = [
        parts[f"{name}_s"] / parts["num_steps"] for name in ("target", "verify", "draft", "host")
    ]
    shown: list[object] = [1e3 * value for value in mean]
    if not num_drafts:
        return [*shown, *"----"]
    plain = baseline(stored, one)
    unit = (plain["parts"]["target_s"] + plain["parts"]["verify_s"]) / plain["parts"]["num_steps"]
    c, v = mean[2] / num_drafts / unit, (mean[0] + mean[1]) / unit - 1
    _, ratio = rates(one, stored, "num_decode_tokens", "decode_wall_s")
    return [*shown, c, v, length(one) / (1 + num_drafts * c + v), ratio]


def contexts(one: dict, stored: Stored) -> list[object]:
    sums: dict[int, list[int]] = {}
    for record in one["records"]:
        context = record["num_prompt_tokens"] + 1
        for accepted in record["num_accepted_per_round"]:
            sums.setdefault(context.bit_length(), []).append(accepted)
            context += accepted + 1
    return [1 + sum(sums[key]) / len(sums[key]) for key in sorted(sums)]


def audit(one: dict, stored: Stored) -> list[object]:
    found, slots = one["audit"], one["audit"]["slots"]
    return [slots, *(f"{found[name]} ({100 * found[name] / slots:.2f} %)" for name in FINDINGS)]


def times(one: dict, stored: Stored) -> list[object]:
    full = "-" if one["full_wall_s"] is None else one["full_wall_s"]
    return [one["wall_s"] - one["decode_wall_s"], one["decode_wall_s"], full, one["wall_s"]]


ROWS: dict[str, Callable[[dict, Stored], list[object]]] = {
    "Acceptance and speed, 8 prompts, float32": overview,
    "Tokens/s of steps without prompt rows": decoding,
    "Acceptance by draft position, and audit": positions,
    "Acceptance length (micro) by domain": domains,
    "Paired difference over the same prompts": differences,
    "Step without prompt rows [ms], and speed-up = tau / (1 + K c + v)": steps,
    "Acceptance length (micro) by context length [tokens]": contexts,
    "Audit of the draft KV": audit,
    "Wall time by kind of step": times,
}


def check(grid: Grid, stored: Stored) -> None:
    assert grid.rows
    for label, *cells in grid.rows:
        expected = ROWS[grid.title](stored[label], stored)
        assert len(cells) == len(expected) == len(grid.header) - 1
        for name, cell, value in zip(grid.header[1:], cells, expected, strict=True):
            where = f"{grid.title}: {label}, {name}"
            if isinstance(value, float):
                decimals = len(cell.split()[0].partition(".")[2])
                assert float(cell.split()[0]) == pytest.approx(value, abs=0.51 * 10**-decimals), (
                    where
                )
            elif value is not None:
                assert cell == str(value), where


def test_every_cell_of_every_table_follows_from_the_counters(file: Path) -> None:
    stored = {one["label"]: one for one in json.loads(file.read_text())["conditions"]}
    made = recompute(file)
    grids = [*report_grids(made), *run_tables(frame_of(entries([Run("r", made)])))]
    assert [grid.title for grid in grids] == list(ROWS), "a new table needs a recomputation here"
    for grid in grids:
        check(grid, stored)
