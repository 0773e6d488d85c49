"""The command on the sample results of docs/results: the page, its numbers, and a planted fault."""

import json
import lzma
from pathlib import Path

import pandas as pd
import pytest

from mtp_research.evaluation.report.stored import read_checked
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from mtp_research.studies.draw_report import main
from mtp_research.studies.study_pages import matrix_section
from tests.evaluation.report.test_page import outline

RESULTS = REPOSITORY_ROOT / "docs" / "results"
SPEED = RESULTS / "lab_small_speed" / "batch_8_k3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of an evaluation and a price study."""
    out = tmp_path_factory.mktemp("sample")
    files = [SPEED, RESULTS / "fault_price" / "fault_price.json"]
    assert main([*map(str, files), "--out", str(out)]) == 0
    return out


def test_page_opens_with_the_answers_and_keeps_the_verdicts(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf8")
    text = outline(page).text.replace("\u00a0", " ")
    top = text.partition("Left out")[0]
    report = read_checked(SPEED / "results.json.xz")
    (pair,) = report.paired
    figure = pair.differences["acceptance_length_micro"]
    wanted = f"tokens a round, {figure.value:+.3f} [{figure.low:+.3f}, {figure.high:+.3f}]"
    assert f"{wanted} over {pair.reference} at K = 3" in top
    assert "texts are those of the first condition" in top
    assert "Left out: Policy matrix, because fewer than two heads" in text
    assert "http:" not in page
    assert "https:" not in page
    assert "<script" not in page


def test_figures_are_those_of_the_counters(folder: Path) -> None:
    frame = pd.read_csv(folder / "figures.csv")
    report = read_checked(SPEED / "results.json.xz")
    rows = frame[(frame["run"] == SPEED.name) & (frame["domain"] == "all")]
    for summary in report.summaries:
        own = rows[rows["condition"] == summary.result.label].set_index("figure")
        length = summary.acceptance.acceptance_length_micro
        assert tuple(own.loc["acceptance_length_micro", ["value", "low", "high"]]) == length
        assert own.loc["tokens_per_s", "value"] == summary.speed.end_to_end.value


def test_figures_of_a_matrix_are_the_stored_ones() -> None:
    section = matrix_section(RESULTS / "recycle_norm", name="m")
    assert "texts are plain decoding's" in section.headline
    assert "lists of rounds are the replay walk's" in section.headline
    stored = json.loads((RESULTS / "recycle_norm" / "matrix.json").read_text())["summary"]
    cells = section.frame[section.frame["domain"] == "all"]
    lengths = cells[cells["figure"] == "acceptance_length_micro"]
    assert lengths[["value", "low", "high"]].to_numpy().tolist() == [
        pytest.approx(group["length"]) for group in stored["groups"]
    ]


@pytest.mark.parametrize(
    ("source", "place"),
    [
        (SPEED / "results.json.xz", ("conditions", 1, "acceptance", "acceptance_rate", "low")),
        (RESULTS / "recycle_norm" / "matrix.json", ("groups", 0, "length", 0)),
        (RESULTS / "fault_price" / "fault_price.json", ("rows", 0, "length", 0)),
    ],
    ids=["results", "matrix", "prices"],
)
def test_planted_number_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: Path,
    place: tuple[str | int, ...],
) -> None:
    packed = source.suffix == ".xz"
    copy = tmp_path / source.name.removesuffix(".xz")
    stored = json.loads(lzma.decompress(source.read_bytes()) if packed else source.read_text())
    node = stored["summary"]
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] += 0.001
    copy.write_text(json.dumps(stored))
    assert main([str(copy), "--out", str(tmp_path / "out")]) == 3
    assert "1 stored figures are not what the counters give" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
