"""Figures and tables of a grid of conditions, every number computed again from results.json."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from mtp_research.evaluation.report.charts import Chart, Missing
from mtp_research.evaluation.report.comparable import entries, policy_matrices, sweeps
from mtp_research.evaluation.report.frame import frame_of, overview
from mtp_research.evaluation.report.notes import headline, interval
from mtp_research.evaluation.report.page import results_sections
from mtp_research.evaluation.report.run_charts import matrix_cells, run_charts, sweep_charts
from mtp_research.evaluation.report.stored import (
    Report,
    Run,
    build_report,
    read_runs,
    write_results,
)
from mtp_research.evaluation.stats.speed import StepParts
from mtp_research.evaluation.stats.summary import ConditionResult
from tests.evaluation.generations import generation, some_prompts, three_conditions, timed

HEADS = {
    "a": {"unroll": "chain", "num_mtp_modules": 3},
    "b": {"unroll": "ttt", "num_mtp_modules": 1},
}


def at(condition: ConditionResult, head: str, batch: int, slow: float) -> ConditionResult:
    """The same generations under another name, head and batch size, `slow` times as long."""
    drafts = condition.num_speculative_tokens > 0
    has_full = batch <= len(condition.records)
    first = condition.first
    condition = timed(
        condition,
        wall_s=slow * (first.wall_s or 0.0),
        decode_wall_s=slow * (first.decode_wall_s or 0.0),
        full_wall_s=slow * (first.full_wall_s or 0.0) if has_full else None,
        num_full_tokens=first.num_full_tokens if has_full else None,
        parts=StepParts(num_steps=50, target_s=1.0 * slow, verify_s=0.1, draft_s=0.5, host_s=0.2),
    )
    return dataclasses.replace(
        condition,
        label=f"{condition.label} {head} R={batch}" if drafts else f"baseline R={batch}",
        head=head if drafts else None,
        max_num_requests=batch,
        temperature=0.0,
        verify="greedy",
        draft_sampling="greedy",
        audit=(condition.audit or {}) | {"slots": 1000, "WRONG": 25} if drafts else None,
    )


@pytest.fixture(scope="module")
def report() -> Report:
    baseline, eagle, training = three_conditions(8)
    conditions = []
    for batch, slow in ((4, 3.0), (16, 1.0)):
        conditions.append(at(baseline, "a", batch, slow))
        conditions += [at(c, h, batch, slow) for h in ("a", "b") for c in (eagle, training)]
    run = {"heads": HEADS, "command": "python eval.py", "hardware": {"cpu": "some", "num_cores": 2}}
    config = {"grid": {"max_num_requests": [4, 16], "head": ["a", "b"]}}
    return build_report(
        conditions, prompts=some_prompts(8), dtype="float32", config=config, run=run
    )


@pytest.fixture(scope="module")
def run(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("figures") / "grid"
    write_results(folder, report)
    (made,) = read_runs([folder])
    return made


@pytest.fixture(scope="module")
def stored(report: Report, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Conditions of results.json by label."""
    path = write_results(tmp_path_factory.mktemp("stored"), report)
    return {one["label"]: one for one in json.loads(path.read_text())["conditions"]}


def charts_of(report: Report) -> list[Chart | Missing]:
    return run_charts(frame_of(entries([Run("r", report)])))


def all_sweeps(run: Run) -> list[Chart | Missing]:
    return sweep_charts(frame_of(entries([run])), entries([run]))


def texts_of(chart: Chart) -> list[str]:
    return [text.get_text() for axes in chart.figure.axes for text in axes.texts]


def length(condition: dict) -> float:
    accepted = [a for record in condition["records"] for a in record["num_accepted_per_round"]]
    return 1 + sum(accepted) / len(accepted)


def first_number(cell: str) -> float:
    return float(cell.split()[0])


def test_overview_is_recomputed_from_the_counters(run: Run, stored: dict[str, dict]) -> None:
    grid = overview(frame_of(entries([run])))
    at_label = {row[2]: dict(zip(grid.header, row, strict=True)) for row in grid.rows}
    assert set(at_label) == set(stored)
    for label, condition in stored.items():
        row, records = at_label[label], condition["records"]
        tokens = sum(len(record["output_token_ids"]) for record in records)
        baseline = stored[f"baseline R={condition['max_num_requests']}"]["wall_s"]
        plain = sum(len(r["output_token_ids"]) for r in stored["baseline R=4"]["records"])
        rate = tokens / condition["wall_s"]
        assert first_number(row["tokens/s"]) == pytest.approx(rate, abs=0.06)
        assert first_number(row["to baseline"]) == pytest.approx(rate * baseline / plain, abs=6e-4)
        if condition["num_speculative_tokens"]:
            assert first_number(row["acceptance length"]) == pytest.approx(
                length(condition), abs=6e-4
            )


def test_sweep_over_batch_sizes_has_every_head_policy_and_the_baseline(
    run: Run, stored: dict[str, dict]
) -> None:
    (sweep,) = sweeps(entries([run]), "batch_size")
    assert sweep.values == (4.0, 16.0)
    assert set(sweep.rows) == {
        f"{h} {p}" for h in ("chain N=3", "ttt N=1") for p in ("eagle", "training")
    }
    for name, row in sweep.rows.items():
        head = "a" if "chain" in name else "b"
        for batch, entry in zip((4, 16), row, strict=True):
            assert entry is not None
            condition = stored[f"{entry.summary.result.policy} {head} R={batch}"]
            value = entry.summary.acceptance.acceptance_length_micro.value
            assert value == pytest.approx(length(condition), abs=1e-9)
            tokens = sum(len(record["output_token_ids"]) for record in condition["records"])
            rate = entry.summary.speed.end_to_end.value
            assert rate == pytest.approx(tokens / condition["wall_s"])
    titles = [chart.title for chart in all_sweeps(run) if isinstance(chart, Chart)]
    assert titles[-3:] == [
        "Acceptance length by batch size",
        "Tokens per second by batch size",
        "Speed-up over K = 0 by batch size",
    ]
    speeds = all_sweeps(run)[-4]
    assert isinstance(speeds, Chart)
    (legend,) = speeds.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [*sweep.rows, "K = 0"]
    plain = stored["baseline R=4"]
    tokens = sum(len(record["output_token_ids"]) for record in plain["records"])
    assert f"K = 0, 4: {tokens / plain['wall_s']:.4g}" in [
        text.partition(" [")[0] for text in speeds.hover.values()
    ]


def test_heat_map_frames_the_policy_of_each_head(run: Run) -> None:
    first, second, *_ = all_sweeps(run)
    for figure, batch in ((first, 4), (second, 16)):
        assert isinstance(figure, Chart)
        assert f"batch {batch}, 64 new tokens, some (2 cores)." in figure.note
        assert figure.title == f"Acceptance length by head and decode policy, batch {batch}"
        assert "Below each value: 95 % bootstrap over prompts." in figure.note
        (axes,) = figure.figure.axes
        names = [[label.get_text() for label in side] for side in
                 (axes.get_yticklabels(), axes.get_xticklabels())]  # fmt: skip
        assert names == [["chain N=3", "ttt N=1"], ["eagle", "training"]]
        frames = sorted(patch.get_center().tolist() for patch in axes.patches)
        assert frames == [pytest.approx([0, 1]), pytest.approx([1, 0])]


def test_oracle_has_no_policy_and_no_place_in_a_matrix(report: Report) -> None:
    oracle = dataclasses.replace(
        report.conditions[1], label="oracle", policy=None, head="oracle", num_speculative_tokens=3
    )
    made = build_report(
        [*report.conditions, oracle], prompts=some_prompts(8), dtype="float32", config={},
        run=report.run,
    )  # fmt: skip
    found = entries([Run("r", made)])
    (matrix, _) = policy_matrices(found)
    cells = matrix_cells(frame_of(found), matrix)
    assert set(cells["row"]) == {"chain N=3", "ttt N=1"}
    assert set(cells["column"]) == {"eagle", "training"}


def test_step_parts_are_mean_milliseconds(run: Run) -> None:
    (chart,) = [one for one in charts_of(run.report) if one.title == "Mean decode step by part"]
    assert isinstance(chart, Chart)
    texts = texts_of(chart)
    assert "76.0 ms" in texts  # (3.0 + 0.1 + 0.5 + 0.2) s / 50 steps
    assert "36.0 ms" in texts


def test_what_cannot_be_drawn_says_why(run: Run) -> None:
    reasons = {f.title: f.reason for f in all_sweeps(run) if isinstance(f, Missing)}
    assert reasons == {
        "Acceptance and speed by number of drafts":
            "all comparable conditions ran at one number of drafts",
        "Acceptance and speed by temperature": "all comparable conditions ran at one temperature",
    }  # fmt: skip
    baseline = timed(three_conditions(1)[0], decode_wall_s=None)
    alone = build_report([baseline], prompts=some_prompts(1), dtype="f", config={}, run={})
    missing = charts_of(alone)
    assert all(isinstance(chart, Missing) for chart in missing)
    assert len(missing) == 6
    few = dataclasses.replace(three_conditions(1)[1], records=(generation("q0", [1, 2]),))
    short = build_report([few], prompts=some_prompts(1), dtype="f", config={}, run={})
    reason = next(f.reason for f in charts_of(short) if isinstance(f, Missing))
    assert reason == "no range of context lengths is reached by 5 prompts"


def test_many_conditions_get_a_chart_for_each_number_of_drafts_and_temperature() -> None:
    eagle = three_conditions(6)[1]
    conditions = [
        dataclasses.replace(
            eagle, label=f"{name} K={k} T={t}", num_speculative_tokens=k, temperature=t
        )
        for k in (3, 5)
        for t in (0.0, 0.6)
        for name in "ab"
    ]
    made = build_report(conditions, prompts=some_prompts(6), dtype="f", config={}, run={})
    titles = [f.title.partition(", ")[2] for f in charts_of(made) if "position" in f.title]
    assert titles == ["K=3, T=0", "K=3, T=0.6", "K=5, T=0", "K=5, T=0.6"]


def test_captions_name_prompts_dtype_machine_and_section_the_command(run: Run) -> None:
    (section,) = results_sections([run])
    assert section.caption == "n = 8 prompts, float32, some (2 cores)"
    assert section.facts["command"] == section.command == "python eval.py"
    assert section.facts["heads"] == "a, b"
    assert section.facts["batch"] == "4, 16"
    assert [re.sub(r"[^a-z]", "", note[:7]) for note in section.warnings] == ["warning"]


def test_two_runs_share_a_section_that_keeps_settings_apart(run: Run, tmp_path: Path) -> None:
    other = dataclasses.replace(run.report, dtype="bfloat16")
    shared, *_ = results_sections([run, Run("other", other)])
    matrices = [figure for figure in shared.drawn if "head and decode policy" in figure.title]
    assert len(matrices) == 4  # batch sizes x dtypes
    assert {"float32", "bfloat16"} == {
        n for f in matrices for n in ("float32", "bfloat16") if n in f.note
    }


def test_point_of_two_runs_is_shown_twice(run: Run) -> None:
    (sweep,) = sweeps(entries([run, Run("again", run.report)]), "batch_size")
    assert {name for name in sweep.rows if "again" in name} == {
        f"{head} {policy}, again"
        for head in ("chain N=3", "ttt N=1")
        for policy in ("eagle", "training")
    }


def test_bars_of_accepted_drafts_are_shares_of_rounds(report: Report) -> None:
    (chart,) = [one for one in charts_of(report) if one.title.startswith("Rounds by number")]
    assert isinstance(chart, Chart)
    (axes,) = chart.figure.axes
    rounds = [a for record in report.conditions[1].records for a in record.num_accepted_per_round]
    shares = [rounds.count(number) / len(rounds) for number in range(4)]
    heights = [bar.get_height() for bar in axes.containers[0]]
    assert heights == pytest.approx(shares)
    assert sum(heights) == pytest.approx(1.0)


def test_headline_is_the_largest_difference_with_its_interval_and_verdict() -> None:
    made = build_report(three_conditions(8), prompts=some_prompts(8), dtype="f", config={}, run={})
    (pair,) = made.paired
    figure = pair.differences["acceptance_length_micro"]
    length = interval(made.summaries[2].acceptance.acceptance_length_micro)
    assert headline(made) == (
        f"training: {length} tokens a round, {figure.value:+.3f} "
        f"[{figure.low:+.3f}, {figure.high:+.3f}] over eagle at K = 3; texts identical 8/8"
    )
    alone = dataclasses.replace(made, paired=())
    assert headline(alone).startswith("training: ")
    assert "tokens a round at K = 3, " in headline(alone)
    baseline = dataclasses.replace(alone, summaries=made.summaries[:1])
    assert headline(baseline) == ""


def test_rules_that_make_fewer_drafts_are_ranked_among_themselves() -> None:
    """A step without drafts is no round, so that they look longer than they are."""
    baseline, eagle, training = three_conditions(8)
    chosen = dataclasses.replace(training, label="chosen", draft_length="expected_gain")
    fixed = dataclasses.replace(eagle, draft_length="fixed")

    def built(*conditions: ConditionResult) -> Report:
        return build_report(conditions, prompts=some_prompts(8), dtype="f", config={}, run={})

    made = built(baseline, fixed, chosen)
    assert made.paired == (), "no pair across rules"
    assert headline(made).startswith("eagle: ")
    assert headline(built(baseline, chosen)).startswith("chosen: ")
    other = dataclasses.replace(eagle, label="other", draft_length="expected_gain")
    made = built(baseline, fixed, chosen, other)
    assert [(pair.condition, pair.reference) for pair in made.paired] == [("other", "chosen")]
    assert headline(made).startswith("eagle: ")
