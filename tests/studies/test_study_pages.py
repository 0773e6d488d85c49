"""The page of a seed matrix and of a price study, from made-up counters."""

import dataclasses
import json
from pathlib import Path

import pytest

from mtp_research.evaluation.report.charts import Chart, Missing
from mtp_research.evaluation.report.page import write_report
from mtp_research.evaluation.report.stored import PromptEntry
from mtp_research.evaluation.stats.fault_study import FaultCondition, FaultStudy, study_warnings
from mtp_research.evaluation.stats.matrix_seeds import (
    GroupKey,
    MatrixCell,
    MatrixPrompt,
    SeedMatrix,
)
from mtp_research.studies.draw_report import main
from mtp_research.studies.study_pages import fault_section, matrix_section, training_section
from mtp_research.studies.study_tables import price_markdown, write_matrix, write_study
from mtp_research.studies.tables import main as tables_main
from tests.evaluation.report.test_page import outline

ROUNDS = {"training": ((3, 2), (1,)), "eagle": ((1, 1), (0,))}
RUN = {"command": "python train.py task=matrix", "hardware": {"cpu": "some", "num_cores": 2}}


def matrix(*, num_done: int) -> SeedMatrix:
    """Chain heads of `num_done` of two seeds under two policies, two prompts of two domains."""
    cells = [
        MatrixCell(
            key=GroupKey("chain", 3, "post_norm", policy, "post_norm"),
            seed=seed,
            num_speculative_tokens=3,
            is_match=policy == "training",
            head_sha256="0" * 64,
            accepted_per_round=rounds,
            clean_per_round=None,
            num_other_texts=0,
            num_other_rounds=0,
        )
        for seed in range(num_done)
        for policy, rounds in ROUNDS.items()
    ]
    return SeedMatrix(
        seeds=(0, 1),
        num_cells_per_seed=2,
        prompts=(MatrixPrompt("p0", "math", "1" * 64), MatrixPrompt("p1", "chat", "2" * 64)),
        cells=tuple(cells),
        bootstrap_seed=0,
        settings={"dtype": "float32"},
        run=RUN,
    )


def condition(policy: str, reference: str | None, wrong: int, accepted: int) -> FaultCondition:
    return FaultCondition(
        head="chain_n3",
        num_mtp_modules=3,
        num_speculative_tokens=3,
        policy=policy,
        reference=reference,
        audit={"WRONG": wrong, "MIXED": 0, "HOLE": 0, "slots": 200},
        accepted_per_round=((accepted, accepted), (accepted,)),
        text_sha256=("a", "b"),
    )


def study() -> FaultStudy:
    return FaultStudy(
        heads=({"name": "chain_n3"},),
        prompts=(PromptEntry("p0", "math", "chat", "1"), PromptEntry("p1", "chat", "chat", "2")),
        conditions=(
            condition("training", None, 0, 2),
            condition("training_norefresh", "training", 20, 1),
        ),
        dtype="float32",
        max_new_tokens=8,
        seed=0,
        run=RUN,
    )


def test_heat_map_holds_the_lengths_of_the_counters_by_domain(tmp_path: Path) -> None:
    write_matrix(tmp_path, matrix(num_done=2), figures=True)
    section = matrix_section(tmp_path, name="m")
    maps = [figure for figure in section.charts if "unroll and decode policy" in figure.title]
    assert [figure.title.rpartition(", ")[2] for figure in maps[1:]] == ["chat", "math"]
    shown = []
    for chart in maps:
        assert isinstance(chart, Chart)
        (axes,) = chart.figure.axes
        texts = [text.get_text() for text in axes.texts]
        shown.append([text for text in texts if len(text) == 5 and text[1] == "."])
        assert [patch.get_center().tolist() for patch in axes.patches] == [pytest.approx([0, 0])]
    # 1 + accepted / rounds: all prompts, the chat prompt, the math prompt
    assert shown == [["3.000", "1.667"], ["2.000", "1.000"], ["3.500", "2.000"]]
    rows = section.frame[section.frame["figure"] == "acceptance_length_micro"]
    assert rows["value"].tolist() == pytest.approx([3, 5 / 3, 2, 1, 3.5, 2])
    assert maps[1] in section.drawn
    assert "n = 1 prompts" in section.drawn[-1].note
    assert section.caption.startswith("2 of 2 training seeds, float32")
    assert (
        section.grids[-1].title == "Acceptance length, math, 2 of 2 seeds, 1 prompts; * the match"
    )
    assert not any(note.startswith("if rerun") for note in section.notes)  # no such column


def test_unfinished_seeds_are_a_warning_and_none_finished_a_reason(tmp_path: Path) -> None:
    write_matrix(tmp_path / "half", matrix(num_done=1), figures=False)
    half = matrix_section(tmp_path / "half", name="m")
    assert half.warnings[0].startswith("warning: 1 of 2 seeds have all their cells")
    write_matrix(tmp_path / "none", matrix(num_done=0), figures=False)
    none = matrix_section(tmp_path / "none", name="m")
    assert [type(chart) for chart in none.charts] == [Missing]
    assert not none.grids


def test_price_is_loss_over_share(tmp_path: Path) -> None:
    write_study(tmp_path, study())
    section = fault_section(tmp_path, name="f")
    row = dict(zip(section.grids[0].header, section.grids[0].rows[1], strict=True))
    assert row["WRONG %"] == "10.00"
    assert row["acceptance length"] == "2.000 [2.000, 2.000]"
    assert row["lost"] == "+1.000 [+1.000, +1.000]"
    assert row["lost per 1 %"].startswith("+0.1000 ")
    (figure,) = section.drawn
    assert figure.title == "Acceptance length lost to faulty slots"


def test_one_page_holds_both_studies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_matrix(tmp_path / "m", matrix(num_done=2), figures=True)
    write_study(tmp_path / "f", study())
    assert main([str(tmp_path / "m"), str(tmp_path / "f" / "fault_price.json")]) == 0
    page = tmp_path / "m" / "report" / "report.html"  # the default: beside the first file
    assert capsys.readouterr().out == f"report: {page}\n"
    text = page.read_text(encoding="utf8")
    assert text.count("<svg ") == 5
    assert "python train.py task=matrix" in text
    assert len(list((tmp_path / "m" / "report" / "tables").glob("*.tex"))) == 6
    write_study(tmp_path / "m", study())
    assert main([str(tmp_path / "m")]) == 0  # a folder with both files
    assert page.read_text(encoding="utf8").count("<h2>") == 3
    (tmp_path / "m" / "matrix.json").write_text("{}")
    assert main([str(tmp_path / "m")]) == 3


def test_pages_say_what_was_done_and_define_their_figures(tmp_path: Path) -> None:
    config = {
        "model": {"name": "lab", "path": "/t", "dtype": "bfloat16"},
        "trainer": {"max_steps": 250, "batch_size": 32},
        "matrix": {"max_new_tokens": 64},
    }
    made = dataclasses.replace(
        matrix(num_done=2), settings={"dtype": "float32", "config": config},
        run=RUN | {"target": {"weights_sha256": "1"}},
    )  # fmt: skip
    write_matrix(tmp_path, made, figures=True)
    section = matrix_section(tmp_path, name="m")
    wanted = {
        "target": "lab /t",
        "drafts K": "3",
        "prompts": "2: 1 chat, 1 math",
        "new tokens": "at most 64 a prompt",
        "training": "max_steps 250, batch_size 32",
        "dtype": "decoded in float32, trained in bfloat16",
        "lossless": "8 of 8 texts are plain decoding's; 8 of 8 lists of rounds are the replay "
        "walk's",
    }
    assert {name: section.facts[name] for name in wanted} == wanted
    assert len(section.facts["target hash"]) == 12
    argv = ["eval.py", "model.path=/t", "spec.k=3"]
    write_study(tmp_path, dataclasses.replace(study(), run=RUN | {"argv": argv}))
    faults = fault_section(tmp_path, name="f")
    wanted = {"target": "model.path=/t", "heads": "chain_n3", "drafts K": "3", "prompts": "2",
              "new tokens": "at most 8 a prompt", "conditions": "2 of 2",
              "lossless": "4 of 4 texts are those of the first condition"}  # fmt: skip
    assert {name: faults.facts[name] for name in wanted} == wanted
    page = write_report(tmp_path / "out", [section, faults]).read_text(encoding="utf8")
    page = outline(page).text.replace("\u00a0", " ")
    _, _, definitions = page.partition("How the numbers are defined")
    for words in ("1 + sum(accepted)/rounds", "two-level bootstrap, 10000 draws",
                  "exclude the bonus", "lost per 1 %", "clean form ="):  # fmt: skip
        assert words in definitions, words


def test_unfinished_study_says_so_before_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three heads of two policies: by the record, or by the heads that the file names."""
    half = dataclasses.replace(study(), heads=({"name": "a"}, {"name": "b"}, {"name": "c"}))
    write_study(tmp_path, half)
    assert tables_main(["fault", str(tmp_path)]) == 0
    wanted = "warning: unfinished: 2 of 6 conditions were decoded, the others are in no table"
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == wanted
    assert "| chain_n3 | 3 | 3 | training_norefresh |" in shown
    section = fault_section(tmp_path, name="f")
    assert section.warnings[0] == wanted
    assert len(section.grids[0].rows) == 2
    known = dataclasses.replace(half, run=RUN | {"num_conditions": 42})
    assert study_warnings(known)[0].startswith("unfinished: 2 of 42 ")
    assert not any("unfinished" in text for text in study_warnings(study()))
    empty = dataclasses.replace(known, conditions=())
    write_study(tmp_path, empty)
    assert fault_section(tmp_path, name="f").warnings[0].startswith("warning: unfinished: 0 of 42")


def test_few_prompts_and_other_texts_are_warned_of_in_the_price_table() -> None:
    last = dataclasses.replace(study().conditions[1], text_sha256=("a", "other"))
    lines = price_markdown(
        dataclasses.replace(study(), conditions=(study().conditions[0], last))
    ).splitlines()
    few = "intervals over fewer than 80 prompts are too narrow"
    assert lines[0] == f"warning: only 2 prompts: {few}"
    assert lines[2].startswith("warning: 3 of 4 texts are those of the first condition: ")


def test_edited_price_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_study(tmp_path, study())
    path = tmp_path / "fault_price.json"
    stored = json.loads(path.read_text())
    stored["summary"]["rows"][1]["lost"][0] = 0.0
    path.write_text(json.dumps(stored))
    assert tables_main(["fault", str(tmp_path)]) == 3
    assert main([str(path)]) == 3
    assert capsys.readouterr().err.count("(summary.rows[1].lost[0] 0.0 for 1.0)") == 2


@pytest.mark.parametrize("name", ["matrix", "prices"])
def test_condition_without_a_round_makes_the_report_fail(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "matrix":
        made = matrix(num_done=2)
        none = dataclasses.replace(made.cells[0], accepted_per_round=((), ()))
        cells = (none, *made.cells[1:])
        write_matrix(tmp_path, dataclasses.replace(made, cells=cells), figures=True)
    else:
        first, last = study().conditions
        none = dataclasses.replace(last, accepted_per_round=((), ()))
        write_study(tmp_path, dataclasses.replace(study(), conditions=(first, none)))
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 3
    label = {"matrix": "chain N=3 seed 0 under training", "prices": "chain_n3 K=3 training_norefr"}
    error = capsys.readouterr().err
    assert "expected finished generations, got none for " in error
    assert label[name] in error
    assert "nan" not in (tmp_path / "out" / "report.html").read_text().lower()


def test_long_command_is_shown_whole(tmp_path: Path) -> None:
    command = "python eval.py spec.head=[" + ",".join(f"runs/head_{i}" for i in range(150)) + "]<b>"
    assert 1900 < len(command) < 4000
    write_study(tmp_path, dataclasses.replace(study(), run=RUN | {"command": command}))
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    page = outline((tmp_path / "out" / "report.html").read_text())
    assert command in page.text
    (first, *_) = sorted((tmp_path / "out" / "tables").glob("*.tex"))
    assert command in first.read_text()
    (first, *_) = sorted((tmp_path / "out" / "charts").glob("*.svg"))
    assert command.replace("<b>", "&lt;b&gt;") in first.read_text()


def test_training_folder_gives_its_curves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    walk = {"num_documents": 5, "standard_error": 0.1, "length_by_domain": {"math": 1.5}}
    lines = [
        {"kind": "eval", "step": 0, "acceptance_length": 1.25, **walk},
        {"kind": "train", "step": 1, "loss": 3.5, "accuracy": [0.25, 0.125]},
        {"kind": "train", "step": 2, "loss": None, "accuracy": [0.5, 0.5]},
        {"kind": "eval", "step": 2, "acceptance_length": 1.75, **walk},
    ]
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = training_section(file, name="run")
    assert section.headline == ("replay walk: acceptance length 1.250 at step 0, 1.750 at step 2")
    assert section.warnings == ["warning: the run has not finished, its last lines are shown"]
    curves = {
        chart.title: [line.get_xydata().tolist() for line in chart.figure.axes[0].lines]
        for chart in section.drawn
    }
    assert curves == {
        "Training loss": [[[1, 3.5]]],  # step 2 was skipped
        "Training accuracy by depth": [[[1, 0.25]], [[1, 0.125]]],
        "Acceptance length of the replay walk": [[[0, 1.25], [2, 1.75]], [[0, 1.5], [2, 1.5]]],
    }
    assert section.frame["low"].tolist() == pytest.approx([1.25 - 0.196, 1.75 - 0.196])
    with file.open("a") as opened:
        opened.write(json.dumps({"kind": "result", "step": 2, "unroll": "chain"}) + "\n")
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    page = outline((tmp_path / "out" / "report.html").read_text()).text
    assert "run: training" in page
    assert "has not finished" not in page
    file.write_text("{\n")
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 3
