"""The page of a seed matrix and of a price study, from made-up counters."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from mtp_research.evaluation.fault_study import FaultCondition, FaultStudy
from mtp_research.evaluation.fault_table import write_study
from mtp_research.evaluation.figures import Figure, Missing
from mtp_research.evaluation.report import PromptEntry
from mtp_research.evaluation.seed_figures import write_matrix
from mtp_research.evaluation.seed_matrix import GroupKey, MatrixCell, MatrixPrompt, SeedMatrix
from mtp_research.evaluation.study_sections import fault_section, matrix_section
from mtp_research.report import main

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
    titles = [figure.title.rpartition(", ")[2] for figure in section.figures]
    assert titles[1:] == ["chat", "math"]
    shown = []
    for figure in section.figures:
        assert isinstance(figure, Figure)
        root = ET.fromstring(figure.markup)
        texts = [e.text or "" for e in root.iter("text")]
        shown.append([text for text in texts if len(text) == 5 and text[1] == "."])
        assert [("--ink" in e.attrib["style"]) for e in root.iter("rect")] == [True, False]
    # 1 + accepted / rounds: all prompts, the chat prompt, the math prompt
    assert shown == [["3.000", "1.667"], ["2.000", "1.000"], ["3.500", "2.000"]]
    assert "n = 1 prompts" in section.charts[1].note
    assert section.caption.startswith("2 of 2 training seeds, float32")


def test_unfinished_seeds_are_a_warning_and_none_finished_a_reason(tmp_path: Path) -> None:
    write_matrix(tmp_path / "half", matrix(num_done=1), figures=False)
    half = matrix_section(tmp_path / "half", name="m")
    assert "warning: 1 of 2 seeds have all their cells" in half.warnings
    write_matrix(tmp_path / "none", matrix(num_done=0), figures=False)
    none = matrix_section(tmp_path / "none", name="m")
    assert [type(figure) for figure in none.figures] == [Missing]
    assert not none.grids


def test_price_is_loss_over_share(tmp_path: Path) -> None:
    write_study(tmp_path, study())
    section = fault_section(tmp_path, name="f")
    row = dict(zip(section.grids[0].header, section.grids[0].rows[1], strict=True))
    assert row["WRONG %"] == "10.00"
    assert row["acceptance length"] == "2.000 [2.000, 2.000]"
    assert row["lost"] == "+1.000 [+1.000, +1.000]"
    assert row["lost per 1 %"].startswith("+0.1000 ")
    (figure,) = section.charts
    assert figure.title == "Acceptance length lost to faulty slots"


def test_one_page_holds_both_studies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_matrix(tmp_path / "m", matrix(num_done=2), figures=True)
    write_study(tmp_path / "f", study())
    assert main([str(tmp_path / "m"), str(tmp_path / "f" / "fault_price.json")]) == 0
    page = tmp_path / "m" / "report" / "report.html"  # the default: beside the first file
    assert capsys.readouterr().out == f"report: {page}\n"
    text = page.read_text(encoding="utf8")
    assert text.count("<svg") == 4
    assert "python train.py task=matrix" in text
    assert len(list((tmp_path / "m" / "report" / "tables").glob("*.tex"))) == 5
    write_study(tmp_path / "m", study())
    assert main([str(tmp_path / "m")]) == 0  # a folder with both files
    assert page.read_text(encoding="utf8").count("<h2>") == 3
    (tmp_path / "m" / "matrix.json").write_text("{}")
    assert main([str(tmp_path / "m")]) == 3
