"""A batch sweep in parts: other prompts at every size, K = 0 in each, on one page."""

import dataclasses
from pathlib import Path

import pytest

from mtp_research.evaluation.report.charts import Chart
from mtp_research.evaluation.report.comparable import (
    Entry,
    drafting,
    drift_warnings,
    entries,
    sweeps,
)
from mtp_research.evaluation.report.frame import frame_of
from mtp_research.evaluation.report.grids import Grid
from mtp_research.evaluation.report.page import results_sections, speed_grids
from mtp_research.evaluation.report.run_charts import sweep_charts
from mtp_research.evaluation.report.stored import (
    Report,
    Run,
    build_report,
    read_runs,
    write_results,
)
from mtp_research.evaluation.stats.outcome import ConditionResult, PassRecord
from mtp_research.studies.draw_report import main
from tests.evaluation.generations import some_prompts, three_conditions

NUM_PROMPTS = {1: 4, 8: 6, 32: 10}
CONFIG = {"model": {"path": "/t"}, "sampling": {"temperature": 0.0, "max_new_tokens": 64}}
RECORD = {"head": {"unroll": "chain", "num_mtp_modules": 3}, "hardware": {"gpus": ["H200"]}}


def two_passes(
    condition: ConditionResult, *, has_full: bool, again: float
) -> tuple[PassRecord, PassRecord]:
    """The first pass of the condition, and one that takes `again` as long."""
    none = {} if has_full else {"full_wall_s": None, "num_full_tokens": None}
    first = dataclasses.replace(condition.first, **none)
    second = dataclasses.replace(
        first,
        wall_s=again * (first.wall_s or 0.0),
        full_wall_s=again * (first.full_wall_s or 0.0) if has_full else None,
        num_texts_equal=len(condition.records),
    )
    return first, second


def part(batch: int, *, config: dict = CONFIG, record: dict = RECORD, again: float = 1.0) -> Report:
    """Three conditions of two passes at one batch size; `again` is how long the second takes."""
    conditions = [
        dataclasses.replace(
            one,
            max_num_requests=batch,
            temperature=0.0,
            verify="greedy",
            passes=two_passes(one, has_full=batch <= NUM_PROMPTS[batch], again=again),
        )
        for one in three_conditions(NUM_PROMPTS[batch])
    ]
    prompts = some_prompts(NUM_PROMPTS[batch])
    return build_report(conditions, prompts=prompts, dtype="bfloat16", config=config, run=record)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sweep")
    for batch in NUM_PROMPTS:
        write_results(root / f"batch_{batch}_k3", part(batch, again=1.0 if batch > 1 else 2.0))
    return root


@pytest.fixture(scope="module")
def parts(folder: Path) -> list[Run]:
    return read_runs([folder / f"batch_{batch}_k3" for batch in NUM_PROMPTS])


def batch_grids(found: list[Entry]) -> list[Grid]:
    return speed_grids(frame_of(found), found)


def test_parts_with_other_prompts_share_a_chart_of_speeds_alone(parts: list[Run]) -> None:
    (sweep,) = sweeps(entries(parts), "batch_size")
    assert sweep.values == (1.0, 8.0, 32.0)
    assert set(sweep.rows) == {"chain N=3 eagle", "chain N=3 training"}
    charts = sweep_charts(frame_of(entries(parts)), entries(parts))
    figures = [chart for chart in charts if isinstance(chart, Chart)]
    titles = ["Tokens per second by batch size", "Speed-up over K = 0 by batch size"]
    assert [figure.title for figure in figures] == titles
    for figure in figures:
        assert "4 at batch size 1, 6 at batch size 8, 10 at batch size 32" in figure.note
        assert "10 prompts " not in figure.note  # the prompts of no part are those of all


def test_table_divides_by_plain_decoding_of_the_same_run(parts: list[Run]) -> None:
    found = entries(parts)
    grids = batch_grids(found)
    assert [grid.title.partition(" (")[0] for grid in grids] == [
        f"Speed by batch size and K, {full}chain N=3 {policy}"
        for policy in ("eagle", "training")
        for full in ("", "batch full, ")
    ]
    rows = [dict(zip(grids[0].header, row, strict=True)) for row in grids[0].rows]
    places = [(row["batch"], row["K"], row["prompts"]) for row in rows]
    assert places == [("1", "3", "4"), ("8", "3", "6"), ("32", "3", "10")]
    assert len(set(grids[0].header)) == len(grids[0].header)  # W&B wants different names
    for row, run in zip(rows, parts, strict=True):
        plain, eagle, _ = run.report.conditions
        tokens, plain_tokens = (
            sum(len(record.output_token_ids) for record in one.records) for one in (eagle, plain)
        )
        # 5 s against 8 s; the second pass of batch 1 takes twice as long
        ratio = tokens / 5.0 / (plain_tokens / 8.0)
        shown = f"{ratio:.3f}" if run is not parts[0] else f"{ratio:.3f} [{ratio / 2:.3f}, "
        assert row["ratio, end to end"].startswith(shown)
        decode = (eagle.first.num_decode_tokens or 0) / 2.5
        decode /= (plain.first.num_decode_tokens or 0) / 4.0
        assert row["ratio, decode only"] == f"{decode:.3f}"
        assert row["run"] == run.name
    assert rows[0]["drift of K = 0"] == "-50.0%"
    assert drift_warnings(found) == [
        "warning: K = 0 drifted by more than 5% between the halves of its passes in batch_1_k3 "
        "(-50.0%): no speed and no ratio of these runs can be relied on"
    ]
    (section, *_) = results_sections(parts)
    assert section.warnings == drift_warnings(found)
    assert sum("fastest of K = 0" in note for note in section.notes) == 1


def test_table_of_full_batches_has_dashes_where_prompts_were_fewer_than_places(
    parts: list[Run],
) -> None:
    grid = batch_grids(entries(parts))[1]
    rows = [dict(zip(grid.header, row, strict=True)) for row in grid.rows]
    plain, eagle, _ = parts[0].report.conditions
    rates = [
        (one.num_full_tokens or 0) / (one.full_wall_s or 0) for one in (eagle.first, plain.first)
    ]
    median, ratio = 0.75 * rates[0], rates[0] / rates[1]  # the second pass takes twice as long
    assert rows[0]["batch full [tokens/s]"] == f"{median:.1f} [{rates[0] / 2:.1f}, {rates[0]:.1f}]"
    assert rows[0]["K = 0, batch full [tokens/s]"].startswith(f"{0.75 * rates[1]:.1f} [")
    assert rows[0]["ratio, batch full"] == f"{ratio:.3f} [{ratio / 2:.3f}, {2 * ratio:.3f}]"
    assert [row["batch full [tokens/s]"] for row in rows[1:]] == ["-", "-"]
    assert [row["ratio, batch full"] for row in rows[1:]] == ["-", "-"]
    assert len(batch_grids(entries(parts[1:]))) == 2  # none of them had a full batch


def test_one_line_is_no_table_and_no_plain_decoding_no_ratio(parts: list[Run]) -> None:
    assert not batch_grids(entries(parts[:1]))
    report = parts[0].report
    alone = dataclasses.replace(report, summaries=report.summaries[1:])
    found = drafting(entries([Run("alone", alone)]))
    assert [entry.baseline for entry in found] == [None, None]
    assert not set(frame_of(found)["figure"]) & {"ratio", "baseline_tokens_per_s"}


@pytest.mark.parametrize(
    ("config", "record"),
    [
        (CONFIG | {"model": {"path": "/other"}}, {}),
        (CONFIG, {"target": {"weights_sha256": "1"}}),
        (CONFIG, {"hardware": {"gpus": ["L40S"]}}),
        (CONFIG, {"hardware": {"gpus": ["H200"], "cpu": "another", "num_cores": 2}}),
        (CONFIG | {"sampling": {"temperature": 0.0, "max_new_tokens": 128}}, {}),
        (CONFIG | {"sampling": CONFIG["sampling"] | {"ignore_eos": True}}, {}),
    ],
    ids=["path", "hash", "gpu", "cpu", "length", "ignore_eos"],
)
def test_another_target_machine_or_text_is_no_sweep(config: dict, record: dict) -> None:
    runs = [Run("a", part(1)), Run("b", part(8, config=config, record=RECORD | record))]
    assert not sweeps(entries(runs), "batch_size")
    assert not batch_grids(entries(runs))
    (first, second) = (_setting(run) for run in runs)
    assert first != second


def test_hash_tells_targets_of_one_path_apart_and_finds_a_moved_one_again() -> None:
    moved = CONFIG | {"model": {"path": "/moved"}}
    hashed = [RECORD | {"target": {"weights_sha256": digit}} for digit in "123"]
    same = [Run("a", part(1, record=hashed[0])), Run("b", part(8, config=moved, record=hashed[0]))]
    assert len(sweeps(entries(same), "batch_size")) == 1
    other = [Run("a", part(1, record=hashed[0])), Run("b", part(8, record=hashed[1]))]
    assert not sweeps(entries(other), "batch_size")


def test_parent_folder_stands_for_its_parts_in_order(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf8")
    assert "All runs, batch_1_k3, batch_8_k3, batch_32_k3" in page
    (tmp_path / "empty" / "inside").mkdir(parents=True)
    assert main([str(tmp_path / "empty"), "--out", str(tmp_path / "out")]) == 2
    assert "empty/results.json" in capsys.readouterr().err


def _setting(run: Run) -> object:
    entry: Entry = drafting(entries([run]))[0]
    return entry.setting._replace(batch_size="", num_prompts=0, prompts_sha256="")
