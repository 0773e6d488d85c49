"""The heads for SmolLM2-135M-Instruct: their table is computed again, their recipe is their own."""

import dataclasses
import json
import lzma
import statistics
from collections import defaultdict
from functools import cache

import numpy as np
import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import TrainConfig
from mtp_research.evaluation.stats.bootstrap import Estimate, Ratio, estimate
from mtp_research.runtime.files import sha256_of
from mtp_research.runtime.provenance import REPOSITORY_ROOT

HEADS = REPOSITORY_ROOT / "assets" / "smollm2" / "heads"
RESULTS = REPOSITORY_ROOT / "docs" / "results" / "smollm2"
PAGE = (REPOSITORY_ROOT / "docs" / "results.md").read_text(encoding="utf8")
SETS = ("mt_bench", "gsm8k", "humaneval")
STORED = json.loads((RESULTS / "heads.json").read_text())
HEAD = json.loads((HEADS / "head.json").read_text())
END_TO_END, FULL = "tokens_per_s_end_to_end", "tokens_per_s_full"


@cache
def length(questions: str, head: str, num_drafts: int) -> Estimate:
    """Acceptance length over the 80 questions of a set, greedy."""
    return length_of(questions, f"training {head}/head K={num_drafts}")


def length_of(file: str, condition: str) -> Estimate:
    lines = lzma.decompress((RESULTS / f"{file}.jsonl.xz").read_bytes()).splitlines()
    rounds = [one["accepted"] for one in map(json.loads, lines) if one["condition"] == condition]
    assert len(rounds) == 80
    steps = np.array([len(one) for one in rounds], dtype=np.float64)
    accepted = np.array([sum(one) for one in rounds], dtype=np.float64)
    return estimate({"length": Ratio(steps + accepted, steps)}, seed=0)["length"]


def as_text(one: Estimate) -> str:
    return f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"


@pytest.mark.parametrize("num_drafts", [3, 5])
@pytest.mark.parametrize(("head", "name"), [("n1", "one module"), ("n3", "three modules")])
def test_row_of_the_table_is_computed_again(head: str, name: str, num_drafts: int) -> None:
    found = [length(questions, head, num_drafts) for questions in SETS]
    mean = sum(one.value or 0.0 for one in found) / len(SETS)
    cells = " | ".join(map(as_text, found))
    assert f"| {name} | {num_drafts} | 0 | greedy | {cells} | {mean:.2f} |\n" in PAGE


@pytest.mark.parametrize("num_drafts", [3, 5])
@pytest.mark.parametrize("drafts", ["greedy", "sample"])
def test_row_at_temperature_1_is_computed_again(drafts: str, num_drafts: int) -> None:
    condition = f"training K={num_drafts} {drafts}"
    found = [length_of(f"{one}_t1", condition) for one in SETS]
    mean = sum(one.value or 0.0 for one in found) / len(SETS)
    cells = " | ".join(map(as_text, found))
    assert f"| one module | {num_drafts} | 1 | {drafts} | {cells} | {mean:.2f} |\n" in PAGE


def test_table_of_speeds_is_the_stored_one() -> None:
    best, spreads, lengths = {}, {}, defaultdict(list)
    passes = {}
    for batch, rows in speeds_by_batch().items():
        plain, *drafting = rows
        (passes[batch],) = {row["num_passes"] for row in rows}
        assert [row["num_drafts"] for row in rows] == [0, 1, 2, 3, 3]
        assert [row["draft_length"] for row in rows] == [None] + ["fixed"] * 3 + ["expected_gain"]
        low, high = (plain[f"{END_TO_END}_{end}"] for end in ("low", "high"))
        cells = [f"{batch}", f"{plain['num_prompts']}"]
        cells += [f"{plain[END_TO_END]:,.0f} ({low:,.0f} to {high:,.0f})"]
        for row in drafting:
            cells += [f"{row[END_TO_END]:,.0f}, {row[END_TO_END] / plain[END_TO_END]:.2f}"]
            if row["draft_length"] == "fixed":
                cells[-1] += f" ({row[FULL] / plain[FULL]:.2f})"
                lengths[row["num_drafts"]].append(row["acceptance_length"])
        assert f"| {' | '.join(cells)} |\n" in PAGE
        best[batch] = max(drafting[:3], key=lambda row: row[END_TO_END])
        spreads[batch] = [_spread(row) for row in rows]
    assert passes == {1: 4, 8: 4, 32: 8, 128: 12}
    assert "median of four passes (batch 32: eight, 128: twelve)" in PAGE
    assert [row["num_drafts"] for row in best.values()] == [3, 2, 2, 1]
    assert "is 3 at batch 1, 2 at batches 8 and 32, and 1 at batch 128" in PAGE
    plain, one, two, three, _ = speeds_by_batch()[128]
    behind = [
        100 - 100 * rows[4][END_TO_END] / best[batch][END_TO_END]
        for batch, rows in speeds_by_batch().items()
    ]
    assert max(behind) < 2.0
    words = (
        "It is {:.1f} % behind the best K at batch 1, {:.1f} % at 8, {:.1f} % at 32 and {:.1f} %"
    )
    assert words.format(*behind) in PAGE
    shares, mixed, others = (
        "{}, {}, {} and {}".format(*(form(row[name]) for row in (plain, one, two, three)))
        for name, form in (
            ("share_of_time_in_steps_with_prompt_rows", "{:.2f}".format),
            ("tokens_per_s_with_prompt_rows", "{:,.0f}".format),
            ("tokens_per_s_without_prompt_rows", "{:,.0f}".format),
        )
    )
    taken = f"take {shares} of the time".replace("0.", ".")
    assert f"{taken} and make {mixed} tokens/s, the others {others}." in PAGE
    equal = [
        row["num_equal_texts"] / row["num_prompts"]
        for rows in speeds_by_batch().values()
        for row in rows
        if row["num_drafts"]
    ]
    assert f"{100 * min(equal):.0f} to {100 * max(equal):.0f} % are those of K = 0" in PAGE
    words = "up to {:.0%} of the median at batch 32, {:.0%} at batch 128, and {:.0%} at batches 1"
    found = words.format(*(max(spreads[size]) for size in (32, 128)), max(spreads[1] + spreads[8]))
    assert found.replace("%", " %") in PAGE
    words = (
        "accepted with {:.2f} to {:.2f}, rounds give {:.2f} to {:.2f} tokens at K = 2 and {:.2f} to"
    )
    ends = [end for n in (1, 2, 3) for end in (min(lengths[n]), max(lengths[n]))]
    text = words.format(ends[0] - 1, ends[1] - 1, *ends[2:5]).replace("0.", ".")
    assert f"{text} {ends[5]:.2f} at K = 3" in PAGE


def test_what_the_chosen_number_made_is_the_stored_one() -> None:
    log = (REPOSITORY_ROOT / "docs" / "log.md").read_text(encoding="utf8")
    runs: dict[tuple[str, int], list[dict]] = defaultdict(list)
    for row in json.loads((RESULTS / "chosen.json").read_text())["rows"]:
        runs[row["commit"], row["batch"]].append(row)
    assert len(runs) == 14
    behind = {}
    for (commit, batch), rows in runs.items():
        plain, *fixed, chosen = (statistics.median(row["pass_seconds"]) for row in rows)
        assert [row["draft_length"] for row in rows[-2:]] == ["fixed", "expected_gain"]
        by_number = dict(zip((row["num_drafts"] for row in rows[1:]), fixed, strict=False))
        cells = [f"{plain / by_number[n]:.2f}" if n in by_number else "" for n in (1, 2, 3)]
        cells += [f"{plain / chosen:.2f}", f"{min(fixed) / chosen:.2f}"]
        row = f"| {commit} | {batch} | {' | '.join(cells)} |\n".replace("|  |", "| |")
        assert row in log
        behind[commit, batch] = 100 - 100 * min(fixed) / chosen
    latest = {batch: rows for (commit, batch), rows in runs.items() if commit == "ad08c01"}
    for batch, rows in latest.items():
        speeds = [row[END_TO_END] for row in speeds_by_batch()[batch]]
        medians = [statistics.median(row["pass_seconds"]) for row in rows]
        for speed, seconds in zip(speeds, medians, strict=True):
            assert speed / speeds[0] == pytest.approx(medians[0] / seconds, rel=2e-3)
    earlier = [found for (commit, _), found in behind.items() if commit != "ad08c01"]
    assert f"{min(earlier):.1f} to {max(earlier):.1f} % behind at batches 8, 32 and 128" in PAGE


def speeds_by_batch() -> dict[int, list[dict]]:
    """K = 0, 1, 2 and 3, then K = 3 where the number is chosen."""
    rows: dict[int, list[dict]] = defaultdict(list)
    for row in json.loads((RESULTS / "speed.json").read_text())["rows"]:
        rows[row["batch"]].append(row)
    return rows


def _spread(row: dict) -> float:
    return (row[f"{END_TO_END}_high"] - row[f"{END_TO_END}_low"]) / row[END_TO_END]


def test_speed_on_a_cpu_is_the_stored_one() -> None:
    plain, ours = json.loads((RESULTS / "cpu.json").read_text())["conditions"].values()
    rates = [one["tokens_per_s_end_to_end"] for one in (ours, plain)]
    spreads = " and ".join(
        f"{one['tokens_per_s_end_to_end_low']:.1f} to {one['tokens_per_s_end_to_end_high']:.1f}"
        for one in (ours, plain)
    )
    assert ours["num_equal"] == ours["num_prompts"] == 8
    for fact in (
        f"{ours['num_passes']} alternating passes",
        f"makes {rates[0]:.1f} tokens/s where K = 0 makes {rates[1]:.1f}: "
        f"{rates[0] / rates[1]:.2f} times, at {ours['acceptance_length']:.2f} tokens a round",
        f"fastest pass: {spreads}.",
    ):
        assert fact in PAGE


def test_facts_of_the_training_are_the_stored_ones() -> None:
    n1, n3 = (STORED["curve"][name][-1] for name in ("n1", "n3"))
    seconds = STORED["training_seconds"]
    asked = STORED["answers_to_corpus_questions"]
    for fact in (
        f"from {STORED['answers']:,} greedy answers ({STORED['answer_tokens'] / 1e6:.1f} M tokens)",
        f"to {asked:,} questions of",
        f"to {STORED['answers'] - asked:,} that it invented",
        f"`mixed`, {n1['step']:,} steps, {seconds['n1']:.0f} s on an H200",
        f"({n3['step']:,} steps, {seconds['n3']:.0f} s)",
    ):
        assert fact in PAGE
    later = [one["length"] for one in STORED["curve"]["n1"] if one["step"] >= 7000]
    assert max(later) - min(later) < 0.02  # "stands still"


def test_shipped_heads_are_those_of_the_table() -> None:
    assert HEAD["weights_sha256"] == STORED["head_sha256"]["n1"]
    assert sha256_of(HEADS / "model.safetensors") == HEAD["weights_sha256"]


def test_experiment_trains_what_the_shipped_heads_were_trained_by() -> None:
    recorded = HEAD["provenance"]["config"]
    config = compose_config(TrainConfig, ["experiment=smollm2_n1", "data.path=answers"])
    composed = json.loads(json.dumps(dataclasses.asdict(config)))
    assert composed["head"] | {"init": "target_last_layer"} == recorded["head"]  # what `auto` meant
    later = {"trainer": {"cuda_graphs": True}}  # replays the same kernels
    for part in ("objective", "trainer", "seed"):
        expected = recorded[part] | later[part] if part in later else recorded[part]
        assert composed[part] == expected, part
    for part in ("data", "model"):  # keys that came later have their defaults
        for key in recorded[part].keys() - {"path", "name"}:
            assert composed[part][key] == recorded[part][key], key
