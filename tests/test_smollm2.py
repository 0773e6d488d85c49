"""The heads for SmolLM2-135M-Instruct: their table is computed again, their recipe is their own."""

import dataclasses
import json
import lzma
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
    stored = json.loads((RESULTS / "speed.json").read_text())
    rows: dict[int, list[dict]] = defaultdict(list)  # by batch: K = 0 and 3, and again if chosen
    for row in stored["rows"]:
        rows[row["batch"]].append(row)
    end_to_end = "tokens_per_s_end_to_end"
    for plain, ours, plain_again, chosen in rows.values():
        assert (plain["condition"], ours["condition"]) == ("baseline", "training")
        assert (ours["draft_length"], chosen["draft_length"]) == ("fixed", "expected_gain")
        cells = [f"{ours['batch']}", f"{ours['num_prompts']}", f"{ours['acceptance_length']:.2f}"]
        for what in ("tokens_per_s_full", end_to_end):
            cells += [f"{plain[what]:,.0f}", f"{ours[what]:,.0f}", _ratio(ours[what], plain[what])]
        cells.append(_ratio(chosen[end_to_end], plain_again[end_to_end]))
        assert f"| {' | '.join(cells)} |\n" in PAGE
    share = rows[128][1]["share_of_time_in_steps_with_prompt_rows"]
    assert f"and {share:.2f} of the time".replace("0.", ".") in PAGE
    newest = stored["h200"]["rows"]
    assert [row["batch"] for row in newest] == [32, 32, 128, 128]
    for plain, ours in (newest[:2], newest[2:]):
        assert (plain["condition"], ours["condition"]) == ("baseline", "training")
        cells = [f"{ours['batch']}", f"{ours['acceptance_length']:.2f}"]
        for what in ("tokens_per_s_full", end_to_end):
            cells += [f"{plain[what]:,.0f}", f"{ours[what]:,.0f}", _ratio(ours[what], plain[what])]
        assert f"| {' | '.join(cells)} |\n" in PAGE
    low, high = (newest[2][f"{end_to_end}_{end}"] for end in ("low", "high"))
    assert f"passes of K = 0 made {low:,.0f} and {high:,.0f}," in PAGE
    assert low < newest[3][end_to_end] < high


def _ratio(ours: float, plain: float) -> str:
    return f"{ours / plain:.2f}".removeprefix("0")


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
