"""The policy table: shares, rows per step and intervals, from files written by an evaluation."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from mtp_research.evaluation.report.stored import RESULTS_FILE, Report, build_report, write_results
from mtp_research.policy.fields import POLICIES
from mtp_research.studies.tables import main
from mtp_research.studies.tables import policy_rows as table_rows
from tests.evaluation.generations import some_prompts, three_conditions

HEAD = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny" / "heads" / "chain_n3"
CONVENTIONS = "3 modules, reads post_norm, recycles post_norm, embedding_first, position 0 kept"
AUDIT = {"WRONG": 3, "MIXED": 1, "HOLE": 0, "PROVISIONAL": 7, "slots": 400}


def report(*, audit: dict[str, int] | None, head: Path = HEAD) -> Report:
    conditions = [dataclasses.replace(one, audit=audit) for one in three_conditions(20)]
    config = {"spec": {"head": str(head), "num_speculative_tokens": 3}}
    return build_report(
        conditions, prompts=some_prompts(20), dtype="float32", config=config, run={}
    )


def test_row_has_module_rows_shares_and_the_reports_figures() -> None:
    made = report(audit=AUDIT)
    eagle, training = table_rows(made)
    assert eagle[:9] == ("chain_n3", "3", "3", "-", "eagle", "15", "0.75", "0.25", "0.00")
    assert training[:6] == ("chain_n3", "3", "3", "-", "training", "12")
    figure = made.summaries[2].acceptance.acceptance_length_micro
    assert training[9] == f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]"
    assert sum(map(float, training[11].split())) == pytest.approx(figure.value - 1, abs=2e-3)
    assert training[10] == "-"
    lengths = [float(row[9].split()[0]) for row in (eagle, training)]
    assert float(eagle[10].split()[0]) == pytest.approx(lengths[0] - lengths[1], abs=2e-3)


def test_rows_of_a_grid_name_their_setting_and_differ_from_the_reference_in_it() -> None:
    plain, eagle, training = three_conditions(20)
    grid = [plain]
    for temperature in (0.0, 0.6):
        for one in (eagle, training):
            label, rule = f"{one.label} T={temperature}", "expected_gain"
            changes = {"label": label, "temperature": temperature}
            grid.append(dataclasses.replace(one, draft_length="fixed", **changes))
            if temperature:
                changes["label"] += f" {rule}"
                grid.append(dataclasses.replace(one, draft_length=rule, **changes))
    config = {"spec": {"head": str(HEAD), "num_speculative_tokens": 3}}
    made = build_report(grid, prompts=some_prompts(20), dtype="float32", config=config, run={})
    rows = table_rows(made)
    assert [row[3:5] for row in rows] == [
        ("0", "eagle"),
        ("0", "training"),
        *[("0.6", "eagle"), ("0.6", "eagle expected_gain")],
        *[("0.6", "training"), ("0.6", "training expected_gain")],
    ]
    alone = table_rows(report(audit=None))[0][10]
    assert [row[10] for row in rows] == [alone, "-", alone, alone, "-", "-"]


def test_policy_that_the_checkout_lacks_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = report(audit=AUDIT)
    monkeypatch.delitem(POLICIES, "eagle")
    assert [row[4] for row in table_rows(made)] == ["training"]
    (record,) = caplog.records  # none for plain decoding
    assert "no policy of this checkout is eagle: " in record.getMessage()


def test_results_file_stands_for_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path, report(audit=AUDIT))
    printed = []
    for path in (tmp_path, tmp_path / RESULTS_FILE):
        assert main(["policy", str(path)]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_evaluation_without_auditor_shows_dashes() -> None:
    assert table_rows(report(audit=None))[0][6:9] == ("-", "-", "-")


def test_main_prints_one_table_of_all_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        write_results(tmp_path / name, report(audit=AUDIT))
    assert main(["policy", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4 + 2
    assert {line.count("|") for line in lines[:6]} == {lines[0].count("|")}
    assert lines[6:] == ["", f"heads chain_n3: {CONVENTIONS}"]


def test_heads_of_two_runs_are_called_by_their_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        head = tmp_path / name / "head"
        shutil.copytree(HEAD, head)
        write_results(tmp_path / name, report(audit=AUDIT, head=head))
    assert main(["policy", str(tmp_path / "first"), str(tmp_path / "second")]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("|")[1].strip() for line in lines[2:6]]
    assert rows == ["first", "first", "second", "second"]
    assert lines[7:] == [f"heads first: {CONVENTIONS}", f"heads second: {CONVENTIONS}"]


def test_help_says_what_each_table_is_and_reads(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        ([], "compare paired differences, first results minus second"),
        (["seeds"], "RESULTS matrix.json of a study, or its folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0
        assert told in " ".join(capsys.readouterr().out.split())


def test_main_refuses_missing_results_and_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", str(tmp_path)]) == 2
    write_results(tmp_path, report(audit=AUDIT, head=tmp_path / "gone"))
    assert main(["policy", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.startswith("error: ") for line in errors] == [True, True]
    assert json.loads((tmp_path / "results.json").read_text())["schema_version"] == 2
