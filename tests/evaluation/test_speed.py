"""Rates over passes, drift, and the acceptance model."""

import dataclasses
from typing import Any

import pytest

from mtp_research.evaluation.report.stored import Report, build_report
from mtp_research.evaluation.report.terminal import render_text
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.outcome import PassRecord
from mtp_research.evaluation.stats.speed import StepParts, cost_of
from mtp_research.evaluation.stats.summary import ConditionResult
from tests.evaluation.generations import repeated, some_prompts, three_conditions, timed

BASE = StepParts(num_steps=10, target_s=0.9, verify_s=0.1, draft_s=0.0, host_s=0.2)
DRAFTING = StepParts(num_steps=5, target_s=0.55, verify_s=0.05, draft_s=0.3, host_s=0.25)


def report(conditions: list[ConditionResult], **config: object) -> Report:
    return build_report(
        conditions, prompts=some_prompts(90), dtype="float32", config=config, run={}
    )


def timing(wall_s: float | None, *, num_texts_equal: int = 90) -> PassRecord:
    times: dict[str, Any] = {"decode_wall_s": 1.0, "num_decode_tokens": 50}
    return PassRecord(wall_s, **times if wall_s else {}, num_texts_equal=num_texts_equal)


def test_cost_is_in_units_of_the_baselines_target_and_verification() -> None:
    cost = cost_of(DRAFTING, BASE, num_speculative_tokens=3, acceptance_length=2.0)
    assert cost is not None
    # One unit is 0.1 s; a step drafts for 0.06 s in 3 passes and spends 0.12 s on the target side.
    assert cost.draft_cost == pytest.approx(0.2)
    assert cost.verify_cost == pytest.approx(0.2)
    assert cost.host_cost == pytest.approx(0.5)
    assert cost.predicted_ratio == pytest.approx(2.0 / (1 + 3 * 0.2 + 0.2))
    assert (cost.target_s, cost.host_s) == pytest.approx((0.11, 0.05))


def test_cost_of_the_baseline_itself_predicts_one() -> None:
    cost = cost_of(BASE, BASE, num_speculative_tokens=0, acceptance_length=1.0)
    assert cost is not None
    assert (cost.draft_cost, cost.verify_cost) == pytest.approx((0.0, 0.0))
    assert cost.predicted_ratio == pytest.approx(1.0)


def test_cost_without_parts_or_baseline_is_undefined() -> None:
    assert cost_of(None, BASE, num_speculative_tokens=3, acceptance_length=2.0) is None
    empty = dataclasses.replace(BASE, num_steps=0)
    assert cost_of(empty, BASE, num_speculative_tokens=3, acceptance_length=2.0) is None
    alone = cost_of(DRAFTING, None, num_speculative_tokens=3, acceptance_length=2.0)
    assert alone is not None
    assert (alone.draft_cost, alone.predicted_ratio) == (None, None)
    nothing = cost_of(DRAFTING, BASE, num_speculative_tokens=3, acceptance_length=None)
    assert nothing is not None
    assert nothing.predicted_ratio is None


def test_rate_is_the_median_of_the_passes_and_drift_of_their_halves() -> None:
    baseline, eagle, _ = three_conditions(90)  # the baseline takes 8 s for 1800 tokens
    repeats = (timing(7.5), timing(8.5), timing(10.0))
    built = report([repeated(baseline, *repeats), eagle])
    speed = built.summaries[0].speed
    assert speed.num_passes == 4
    assert speed.end_to_end.value == pytest.approx((1800 / 8 + 1800 / 8.5) / 2)
    assert speed.end_to_end.low == pytest.approx(180.0)
    assert speed.end_to_end.high == pytest.approx(240.0)
    halves = (1800 / 8 + 1800 / 7.5) / 2, (1800 / 8.5 + 1800 / 10) / 2
    assert speed.drift == pytest.approx(halves[1] / halves[0] - 1)
    assert built.summaries[1].speed.drift is None
    text = " ".join(render_text(built).split())
    assert "baseline drifted by -15.7% from the first half of its passes to the second" in text
    assert "least / most of a pass" in text


def test_one_disturbed_pass_is_not_a_drift() -> None:
    baseline, eagle, _ = three_conditions(90)
    repeats = tuple(timing(seconds) for seconds in (8.0, 8.0, 16.0, 8.0, 8.0))
    built = report([repeated(timed(baseline, wall_s=16.0), *repeats), eagle])
    assert built.summaries[0].speed.drift == 0.0


def test_rate_of_a_full_batch_is_the_median_of_the_passes_that_had_one() -> None:
    baseline, eagle, _ = three_conditions(90)
    whole = (dataclasses.replace(timing(5.0), full_wall_s=2.0, num_full_tokens=n) for n in (60, 90))
    made = timed(eagle, full_wall_s=None, num_full_tokens=None)
    made = repeated(made, *whole, timing(5.0))
    speed = report([baseline, made]).summaries[1].speed
    assert speed.full == Estimate(37.5, 30.0, 45.0)
    assert speed.ratio_full == pytest.approx(37.5 / (90 * 18 / 4.0))
    assert speed.ratio_decode != speed.ratio_full
    shown = render_text(report([baseline, made]))
    assert "tokens/s, batch full" in shown
    assert "batch full = of the steps without prompt rows" in shown


def test_batch_that_was_never_full_has_no_rate_and_no_row() -> None:
    never = [timed(one, full_wall_s=None, num_full_tokens=None) for one in three_conditions(90)]
    assert [s.speed.ratio_full for s in report(never).summaries] == [None] * 3
    assert "batch full" not in render_text(report(never))
    assert "batch full" not in render_text(report(never, grid={"num_speculative_tokens": [1, 3]}))
    half = report([three_conditions(90)[0], never[1]])
    assert half.summaries[1].speed.ratio_full is None
    row = next(line for line in render_text(half).splitlines() if "tokens/s, batch full" in line)
    assert row.split()[-2:] == ["405.0", "-"]


def test_one_pass_says_that_order_and_drift_were_not_checked() -> None:
    built = report(three_conditions(90))
    assert built.summaries[0].speed.drift is None
    text = " ".join(render_text(built).split())
    assert "no ABBA order and no drift check" in text
    assert "least / most" not in text


def test_device_time_stands_beside_the_wall_time_where_there_is_a_gpu() -> None:
    baseline, eagle, _ = three_conditions(90)
    shown = render_text(report([baseline, timed(eagle, device_s=4.5)]))
    row = next(line for line in shown.splitlines() if line.startswith("device / wall"))
    assert row.split()[-4:] == ["-", "4.50", "/", "5.00"]
    assert "device / wall" not in render_text(report([baseline, eagle]))


def test_interrupted_pass_has_no_times_and_is_marked() -> None:
    baseline, eagle, _ = three_conditions(90)
    cut = timed(
        eagle, wall_s=None, decode_wall_s=None, num_decode_tokens=None, full_wall_s=None,
        num_full_tokens=None, num_steps=None, rows_per_step=None, is_resumed=True,
    )  # fmt: skip
    built = report([baseline, cut])
    speed = built.summaries[1].speed
    assert speed.end_to_end.value is None
    assert speed.ratio_end_to_end is None
    assert speed.full.value is None
    assert speed.ttft_s_median is None
    assert built.summaries[1].acceptance.num_prompts == 90
    assert "warning: interrupted and resumed: eagle" in render_text(built)
    again = report([baseline, repeated(cut, timing(5.0))])
    assert again.summaries[1].speed.end_to_end.value is not None


def test_ratio_is_to_the_baseline_of_the_same_batch_and_temperature() -> None:
    baseline, eagle, _ = three_conditions(90)
    made = [
        dataclasses.replace(timed(one, wall_s=(one.first.wall_s or 0.0) / batch),
                            label=f"{one.label} R={batch}", max_num_requests=batch, temperature=0.0)
        for batch in (1, 8)
        for one in (baseline, eagle)
    ]  # fmt: skip
    ratios = [s.speed.ratio_end_to_end for s in report(made).summaries]
    assert ratios[0] == ratios[2] == 1.0
    assert ratios[1] == pytest.approx(ratios[3])
    alone = report([made[0], made[3]])
    assert alone.summaries[1].speed.ratio_end_to_end is None


def test_each_ratio_is_of_two_rates_of_one_kind() -> None:
    plain, speed, _ = (item.speed for item in report(three_conditions(90)).summaries)
    for ratio, ours, theirs in (
        (speed.ratio_end_to_end, speed.end_to_end, plain.end_to_end),
        (speed.ratio_decode, speed.decode, plain.decode),
        (speed.ratio_full, speed.full, plain.full),
    ):
        assert ours.value is not None
        assert theirs.value is not None
        assert ratio == pytest.approx(ours.value / theirs.value)
    rates = {plain.end_to_end.value, plain.decode.value, plain.full.value}
    assert len(rates) > 1  # a mixed ratio would differ


def test_pairs_join_equal_k_batch_and_temperature_only() -> None:
    _, eagle, training = three_conditions(90)
    other = dataclasses.replace(training, label="training R=8", max_num_requests=8)
    assert report([eagle, other]).paired == ()
    pairs = report([eagle, training, other], reference="training").paired
    assert [(p.condition, p.reference) for p in pairs] == [("eagle", "training")]


def test_grid_is_shown_with_one_row_a_condition() -> None:
    conditions = [
        dataclasses.replace(timed(one, parts=DRAFTING), label=f"{one.label} K=3 T=0.6 R=8")
        for one in three_conditions(90)
    ]
    text = render_text(report(conditions, grid={"num_speculative_tokens": [1, 3]}))
    assert "training K=3 T=0.6 R=8" in text
    title = next(n for n, x in enumerate(text.splitlines()) if x.startswith("Acceptance and speed"))
    assert text.splitlines()[title + 2].startswith("condition")
    assert max(map(len, text.splitlines())) <= 120
    assert "predicted" in text
    lines = text.splitlines()
    pairs = lines[lines.index("Paired difference over the same prompts") :]
    row = next(line for line in pairs if line.startswith("training K=3"))
    assert row.split()[4] == "eagle"  # named by what differs
