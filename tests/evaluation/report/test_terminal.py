import builtins
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_research.evaluation.report import page
from mtp_research.evaluation.report.grids import report_grids
from mtp_research.evaluation.report.notes import (
    head_conventions,
    headline,
    interval,
    note_paragraphs,
)
from mtp_research.evaluation.report.stored import Report, build_report, last_line
from mtp_research.evaluation.report.terminal import (
    print_report,
    render_short,
    render_text,
    rich_table,
)
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from tests.evaluation.generations import generation, some_prompts, three_conditions, timed


@pytest.fixture(scope="module")
def report() -> Report:
    return build_report(
        three_conditions(90), prompts=some_prompts(90), dtype="float32", config={}, run={}
    )


def _row(text: str, name: str) -> list[str]:
    """Cells of the first row with that title; cells are separated by at least two spaces."""
    line = next(line for line in text.splitlines() if line.strip().startswith(name))
    return [cell.strip() for cell in line.strip().split("  ") if cell.strip()][1:]


def test_text_fits_120_columns_and_is_ascii(report: Report):
    lines = render_text(report).splitlines()
    assert max(len(line) for line in lines) <= 120
    assert all(line.isascii() for line in lines)


def test_table_shows_every_figure_the_honesty_rules_ask_for(report: Report):
    text = render_text(report)
    eagle = report.summaries[1]
    length = eagle.acceptance.acceptance_length_micro
    assert _row(text, "acceptance length (micro)")[1] == (
        f"{length.value:.3f} [{length.low:.3f}, {length.high:.3f}]"
    )
    assert _row(text, "p_3/p_2")[0] == "-"
    assert _row(text, "audit WRONG/MIXED/HOLE") == ["0 / 0 / 0"] * 3
    assert _row(text, "rounds with r >= 2")[0] == "0"
    assert _row(text, "lossless") == ["identical 90/90"] * 3
    for name in ("acceptance length (macro)", "acceptance rate", "p_1", "tokens/s, end to end",
                 "target forwards per token", "arith", "howto"):  # fmt: skip
        assert _row(text, name)


def test_speed_is_tokens_over_wall_seconds_and_ratio_to_baseline(report: Report):
    baseline, eagle, _ = report.summaries
    num_tokens = sum(len(record.output_token_ids) for record in report.conditions[1].records)
    assert baseline.speed.end_to_end.value == pytest.approx(90 * 20 / 8.0)
    assert baseline.speed.decode.value == pytest.approx(90 * 18 / 4.0)
    assert eagle.speed.end_to_end.value == pytest.approx(num_tokens / 5.0)
    assert baseline.speed.full.value == baseline.speed.decode.value
    assert eagle.speed.full.value == pytest.approx((num_tokens - 90 * 12) / (5.0 / 8))
    assert eagle.speed.ratio_end_to_end == pytest.approx(num_tokens / 5.0 / (90 * 20 / 8.0))
    assert baseline.speed.ratio_end_to_end == 1.0
    assert baseline.speed.ttft_s_median == 0.25
    assert baseline.speed.inter_token_s_p95 == 0.5


def test_unmeasured_speed_is_left_out_of_the_table():
    conditions = [
        timed(
            condition,
            decode_wall_s=None,
            num_decode_tokens=None,
            full_wall_s=None,
            num_full_tokens=None,
        )
        for condition in three_conditions(90)
    ]
    built = build_report(conditions, prompts=some_prompts(90), dtype="float32", config={}, run={})
    assert built.summaries[1].speed.decode.value is None
    assert "decode only" not in render_text(built)
    assert "batch full" not in render_text(built)
    assert "peak memory" not in render_text(built)


def test_outputs_equal_to_baseline_are_counted():
    conditions = three_conditions(90)
    copied = dataclasses.replace(conditions[1], records=conditions[0].records)
    built = build_report(
        [conditions[0], copied], prompts=some_prompts(90), dtype="float32", config={}, run={}
    )
    assert built.summaries[1].num_outputs_equal_to_baseline == 90


def test_paired_difference_is_reported_against_the_first_that_drafts(report: Report):
    (pair,) = report.paired
    assert (pair.condition, pair.reference) == ("training", "eagle")
    assert pair.differences["acceptance_length_micro"].low > 0  # 0.7 against 0.5 a draft
    assert "training - eagle" in render_text(report)


def test_notes_name_formulas_and_the_accepted_warning(report: Report):
    notes = " ".join(note_paragraphs(report))
    assert "1 + sum(accepted)/rounds = 1 + sum_i p_i" in notes
    assert '"accepted" differs by project' in notes
    assert "warning" not in notes


def test_few_prompts_are_warned_about_in_the_table():
    built = build_report(
        three_conditions(10), prompts=some_prompts(10), dtype="float32", config={}, run={}
    )
    assert "warning: only 10 prompts" in render_text(built)


def test_skipped_prompts_are_counted_and_named(report: Report):
    names = [f"long-{index}" for index in range(7)]
    skipping = dataclasses.replace(report, skipped_prompts=tuple(names))
    notes = " ".join(note_paragraphs(skipping))
    assert "skipped: 7 of 97 prompts leave no room in the context" in notes
    assert "long-4, ..." in notes
    assert json.loads(last_line(skipping))["num_skipped_prompts"] == 7
    assert "skipped" not in render_text(report)


def test_packed_weights_are_named_and_told_from_the_release(report: Report):
    facts = {"file": "m.Q4_1.gguf", "num_tensors_by_type": {"Q4_1": 210, "F32": 61}}
    run = {**report.run, "target": {"gguf": facts | {"stored_as": "bfloat16"}}}
    notes = " ".join(render_short(dataclasses.replace(report, run=run)).split())
    assert "weights: de-quantised from m.Q4_1.gguf (210 tensors Q4_1, 61 tensors F32)" in notes
    assert "rounded to bfloat16; figures are of this file, not of the original release" in notes
    assert "de-quantised" not in render_short(report)


def test_last_line_is_one_line_of_json(report: Report):
    line = last_line(report)
    assert "\n" not in line
    figures = json.loads(line)["conditions"]
    assert list(figures) == ["baseline", "eagle", "training"]
    assert figures["baseline"]["acceptance_length"] == [1.0, 1.0, 1.0]
    assert figures["eagle"]["audit"]["WRONG"] == 0


def test_nothing_finished_still_renders():
    condition = dataclasses.replace(
        timed(three_conditions(1)[1], wall_s=0.0),
        records=(generation("q0", [1], finish_reason="abort"),),
    )
    built = build_report([condition], prompts=some_prompts(1), dtype="float32", config={}, run={})
    assert "no generation finished" in render_text(built)
    assert json.loads(last_line(built))["conditions"]["eagle"]["acceptance_length"] == [None] * 3


def test_names_from_files_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]):
    prompts = [
        dataclasses.replace(prompt, category="\x1b[31m[bold]red\r" + "x" * 100)
        for prompt in some_prompts(5)
    ]
    built = build_report(three_conditions(5), prompts=prompts, dtype="f", config={}, run={})
    print_report(built)
    shown = capsys.readouterr().out + render_text(built)
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert "\\x1b[31m[bold]red" in shown


def test_rich_tables_have_the_same_cells_as_the_text(report: Report):
    pytest.importorskip("rich")
    table = rich_table(report_grids(report)[0])
    assert table.row_count > 15
    assert [str(column.header) for column in table.columns][1:] == [
        "baseline (K=0)", "eagle (K=3)", "training (K=3)",
    ]  # fmt: skip


def test_print_falls_back_to_text_without_rich(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real_import = builtins.__import__

    def without_rich(name: str, *arguments: object, **options: object) -> object:
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    print_report(report, verbose=True)
    assert capsys.readouterr().out == render_text(report) + "\n"
    print_report(report)
    assert capsys.readouterr().out == render_short(report) + "\n"


def test_notes_and_page_say_how_heads_are_run_where_the_file_knows():
    phrase = "2 modules, reads pre_norm, recycles post_norm, embedding_first, position 0 kept"
    found = {}
    for kind, facts in (("new", {"conventions": phrase}), ("old", {})):
        made = build_report(
            three_conditions(4),
            prompts=some_prompts(4),
            dtype="float32",
            config={},
            run={"heads": {"mine": {"name": "mine", "num_mtp_modules": 2} | facts, "x": None}},
        )
        found[kind] = " ".join(note_paragraphs(made))
        assert (page._settings(made).get("head conventions") == f"mine: {phrase}") == bool(facts)
    assert f"heads mine: {phrase}" in found["new"]
    assert "heads mine" not in found["old"]


def test_conventions_of_two_heads_in_folders_of_one_name_are_both_told():
    heads = {f"{run}/head": {"name": "head", "conventions": run} for run in ("first", "second")}
    told = head_conventions({"heads": heads})
    assert told == {"first/head": "first", "second/head": "second"}


def test_length_rule_is_named_in_the_notes_and_a_fixed_number_is_not():
    def notes(spec: dict[str, object]) -> str:
        made = build_report(
            three_conditions(4),
            prompts=some_prompts(4),
            dtype="float32",
            config={"spec": spec},
            run={},
        )
        return " ".join(note_paragraphs(made))

    assert "spec.draft_length=confidence: steps without" in notes({"draft_length": "confidence"})
    assert "draft_length" not in notes({"draft_length": "fixed"})
    assert "draft_length" not in notes({})


@pytest.mark.parametrize("width", [60, 80, 120])
def test_narrow_terminal_gets_fewer_columns_and_every_figure(
    report: Report, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    pytest.importorskip("rich")
    print_report(report, width=width, verbose=True)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert "..." not in shown
    assert shown.count("acceptance length (macro)") == {60: 3, 80: 2, 120: 1}[width] + 2
    for summary in report.summaries:
        assert interval(summary.acceptance.acceptance_length_micro) in shown


@pytest.mark.parametrize("width", [50, 60, 80, 120])
@pytest.mark.parametrize("is_grid", [False, True], ids=["columns", "rows"])
def test_short_table_fits_whatever_the_width(
    report: Report, capsys: pytest.CaptureFixture[str], width: int, is_grid: bool
) -> None:
    config = {"grid": {"num_speculative_tokens": [1, 3]}} if is_grid else {}
    report = dataclasses.replace(report, config=config)
    print_report(report, width=width, stored_at=Path("results.json"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    shown = "\n".join(lines)
    for summary in report.summaries:
        assert interval(summary.acceptance.acceptance_length_micro) in shown


def test_answer_comes_first_and_definitions_only_where_asked(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(report, stored_at=Path("r.json"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == headline(report)
    length = report.summaries[2].acceptance.acceptance_length_micro
    difference = report.paired[0].differences["acceptance_length_micro"]
    assert lines[0].startswith(f"training: {interval(length)} tokens a round, ")
    assert f"{interval(difference, '+.3f')} over eagle at K = 3; texts identical 90/90" in lines[0]
    assert len(lines) < 25
    assert "cluster bootstrap" not in "".join(lines)
    assert "verbose=true" in lines[-1]
    print_report(report, verbose=True)
    shown = capsys.readouterr().out
    assert "cluster bootstrap" in shown
    assert shown.startswith(lines[0])


@pytest.mark.parametrize("verbose", [False, True])
def test_warnings_come_before_the_answer_and_the_tables(
    verbose: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    built = build_report(
        three_conditions(10), prompts=some_prompts(10), dtype="f", config={}, run={}
    )
    print_report(built, verbose=verbose)
    shown = capsys.readouterr().out
    warned = shown.index("warning: only 10 prompts")
    assert warned < shown.index("tokens a round") < shown.index("acceptance length (micro)")
    assert shown.count("warning: only 10 prompts") == 1


def test_several_differences_are_listed_under_the_short_table() -> None:
    conditions = three_conditions(10)
    other = dataclasses.replace(conditions[2], label="window", policy="window")
    built = build_report(
        [*conditions, other], prompts=some_prompts(10), dtype="f", config={}, run={}
    )
    text = render_short(built)
    assert "the largest of 2 differences" in " ".join(text.split())
    rows = text[text.index("Paired difference over the same prompts") :].splitlines()
    assert [row.split()[0] for row in rows[4:6]] == ["training", "window"]


def test_printing_needs_no_library_of_the_page() -> None:
    probe = (
        "import sys\n"
        "for name in ('pandas', 'matplotlib', 'jinja2', 'wandb'): sys.modules[name] = None\n"
        "import mtp_research.evaluation.report.wandb_log\n"
        "from mtp_research.evaluation.report.stored import build_report\n"
        "from mtp_research.evaluation.report.terminal import print_report\n"
        "from tests.evaluation.generations import some_prompts, three_conditions\n"
        "print_report(build_report(three_conditions(4), prompts=some_prompts(4), dtype='f', "
        "config={}, run={}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=REPOSITORY_ROOT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "acceptance length (micro)" in done.stdout
