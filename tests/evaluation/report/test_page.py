"""`mtp report`: the page, its tables and charts, and what it refuses."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from pandas.api.types import is_numeric_dtype

from mtp_research.evaluation.report.comparable import entries
from mtp_research.evaluation.report.frame import figures_csv, frame_of, grid_latex, run_tables
from mtp_research.evaluation.report.grids import Grid, report_grids
from mtp_research.evaluation.report.page import Section, clean, render_page
from mtp_research.evaluation.report.stored import (
    Report,
    Run,
    build_report,
    recompute,
    write_results,
)
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.studies.draw_report import main
from tests.evaluation.generations import generation, some_prompts, three_conditions, timed

BAD = "<img src=x onerror=alert(1)>\x1b\u202e&"
VOID = {"meta", "br", "wbr"}
CHART_KINDS = ("svg", "pdf", "png")


class Outline(HTMLParser):
    """Tags with their attributes, text, and whether every tag closes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scrolling: list[bool] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            box, found = self.tags[-2]
            wanted = {"class": "scroll", "tabindex": "0", "role": "region"}
            is_named = (found.get("aria-label") or "").strip() != ""
            self.scrolling.append(box == "div" and wanted.items() <= found.items() and is_named)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert not parser.open, f"not closed: {parser.open}"
    return parser


def report(num_prompts: int, *, head: str = "chain", batch: int = 16) -> Report:
    return build_report(
        three_conditions(num_prompts),
        prompts=some_prompts(num_prompts),
        dtype="float32",
        config={
            "engine": {"max_num_requests": batch},
            "spec": {"head": f"heads/{head}", "verify": "greedy"},
            "sampling": {"temperature": 0.0},
        },
        run={
            "command": f"python eval.py model.name={BAD}",
            "head": {"unroll": head, "num_mtp_modules": 1},
        },
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of three runs: two heads at one batch size, one head at another."""
    root = tmp_path_factory.mktemp("report")
    runs = {"one": report(12), "two": report(12, head="ttt"), "three": report(12, batch=4)}
    for name, made in runs.items():
        write_results(root / name, made)
    assert main([*(str(root / name) for name in runs), "--out", str(root / "out")]) == 0
    return root / "out"


def test_page_is_well_formed_and_every_table_scrolls_in_its_box(folder: Path) -> None:
    seen = outline((folder / "report.html").read_text(encoding="utf8"))
    assert len(seen.scrolling) >= 3 * 6
    assert all(seen.scrolling)
    assert ("meta", {"name": "viewport", "content": "width=device-width,initial-scale=1"}) in (
        seen.tags
    )


def test_page_requests_nothing(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf8")
    seen = outline(page)
    names = {tag for tag, _ in seen.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "image"}
    attributes = {key for _, found in seen.tags for key in found}
    assert not attributes & {"src", "srcset", "action", "background"}
    links = [found[key] or "" for _, found in seen.tags for key in ("href", "xlink:href")
             if key in found]  # fmt: skip
    assert links
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"url\((?!#)|@import|https?:", page)
    assert "default-src 'none'" in page


def test_page_shows_figures_warnings_and_hostile_text_as_text(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf8")
    seen = outline(page)
    assert "warning: only 12 prompts" in seen.text
    assert "model.name=<img src=x onerror=alert(1)>&" in seen.text
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", page)
    (headline, *_) = [text for text in page.splitlines() if 'class="headline"' in text]
    assert "one: training" in headline
    assert "tokens a round, +" in headline
    assert "over eagle at K\u00a0=\u00a03; texts identical 12/12." in headline
    for title in ("Acceptance by draft position", "by domain",
                  "Rounds by number of accepted", "by context length",
                  "Audit of the draft KV", "head and decode policy", "by batch size",
                  "Wall time by kind of step"):  # fmt: skip
        assert title in seen.text, title


def test_wide_content_cannot_widen_the_page(folder: Path) -> None:
    """400 pixels: every chart shrinks or lies in a scrolling box, and long words break."""
    page = (folder / "report.html").read_text(encoding="utf8")
    seen = outline(page)
    boxes = {"chart", "chart wide"}
    charts = [number for number, (tag, _) in enumerate(seen.tags) if tag == "svg"]
    assert len(charts) > 15
    assert all(seen.tags[number - 1][1]["class"] in boxes for number in charts)
    assert ".scroll{overflow-x:auto;max-width:100%}" in page
    assert "border-radius:4px;overflow-x:auto;max-width:100%" in page
    assert "overflow-wrap:anywhere" in page


def test_every_chart_is_whole_in_three_kinds_with_literal_colours(folder: Path) -> None:
    stems = {path.stem for path in (folder / "charts").iterdir()}
    page = (folder / "report.html").read_text(encoding="utf8")
    assert len(stems) == page.count("<svg ")
    starts = dict(zip(CHART_KINDS, (b"<?xml", b"%PDF", b"\x89PNG"), strict=True))
    for stem in stems:
        for kind, start in starts.items():
            data = (folder / "charts" / f"{stem}.{kind}").read_bytes()
            assert data.startswith(start), stem
            assert len(data) > 2000
        svg = (folder / "charts" / f"{stem}.svg").read_text(encoding="utf8")
        root = ET.fromstring(svg)
        assert "var(" not in svg
        assert not list(root.iter("{http://www.w3.org/2000/svg}image"))
        assert "model.name=" in svg  # the command
    shown = outline(page)
    assert "eagle, 1: 0." in shown.text  # under the mouse


def test_contents_lead_to_every_section(folder: Path) -> None:
    seen = outline((folder / "report.html").read_text(encoding="utf8"))
    links = [found["href"] for tag, found in seen.tags if tag == "a"]
    sections = [f"#{found['id']}" for tag, found in seen.tags if tag == "section"]
    assert links == sections
    assert len(set(links)) == 4  # all runs, and each


def test_narrow_table_can_part_intervals_and_aligns_names() -> None:
    rows = (("runs/a" * 3, "eagle", "-", "2.000 [1.500, 2.500]*"), ("b", "-", "-0.5", "-"))
    grid = Grid("Lengths (K=3, one <setting>)", ("", "policy", "lost %", "length"), rows)
    page = render_page([Section("s", "s", [], [grid])], {})
    assert '<td class="with">2.000 <span>[1.500, 2.500]*</span></td>' in page
    assert page.count('class="words"') == 4  # heads of both columns of names, two cells
    assert "<b>Table 1. Lengths (K=3, one &lt;setting&gt;).</b></p>" in page
    assert "lost\u00a0%" in page
    assert outline(page).text.count("[1.500, 2.500]*") == 1


def test_page_defines_its_letters_and_names(folder: Path) -> None:
    page = outline((folder / "report.html").read_text(encoding="utf8")).text
    _, _, definitions = page.partition("How the numbers are defined")
    for words in ("K = drafts per step", "WRONG = ", "target_roll_rerun", "shared_context",
                  "rate = sum(accepted)/sum(drafted)"):  # fmt: skip
        assert words in definitions, words
    assert "Whiskers: 95\u00a0% bootstrap over prompts" in page


def test_figures_are_numbers_and_equal_the_stored_summary(folder: Path) -> None:
    stored = json.loads((folder.parent / "two" / "results.json").read_text())
    frame = pd.read_csv(folder / "figures.csv")
    assert list(frame.columns) == [
        "run", "head", "condition", "policy", "K", "batch", "temperature", "lossless",
        "domain", "figure", "reference", "value", "low", "high", "n",
    ]  # fmt: skip
    assert all(is_numeric_dtype(frame[name]) for name in ("value", "low", "high", "n", "K"))
    rows = frame[(frame["run"] == "two") & (frame["domain"] == "all")]
    for summary in stored["summary"]["conditions"]:
        own = rows[rows["condition"] == summary["label"]].set_index("figure")
        figures = summary["acceptance"]
        for name in ("acceptance_length_micro", "acceptance_length_macro", "acceptance_rate"):
            for part in ("value", "low", "high"):
                cell = own.loc[name, part]
                assert (None if pd.isna(cell) else cell) == figures[name][part]
        assert own.loc["tokens_per_s", "value"] == summary["speed"]["tokens_per_s_end_to_end"]
        if summary["num_speculative_tokens"]:
            positions = own.loc[["p_1", "p_2", "p_3"], "value"]
            length = own.loc["acceptance_length_micro", "value"]
            assert abs(length - 1 - positions.sum()) < 1e-9
            assert own.loc["p_1", "n"] == 12
            assert own.loc["ratio", "reference"] == "baseline"
    (pair,) = stored["summary"]["paired"]
    row = rows[rows["figure"] == "acceptance_length_micro_difference"].iloc[0]
    assert (row["condition"], row["reference"]) == ("training", "eagle")
    wanted = pair["differences"]["acceptance_length_micro"]
    assert {part: row[part] for part in wanted} == wanted


def test_every_table_has_latex_and_markdown_with_the_cells_of_the_page(folder: Path) -> None:
    made = recompute(folder.parent / "one" / "results.json")
    grids = [*report_grids(made), *run_tables(frame_of(entries([Run("one", made)])))]
    names = sorted(path.stem for path in (folder / "tables").glob("one-*.tex"))
    assert len(names) == len(grids)
    markdown = (folder / "tables.md").read_text(encoding="utf8")
    for grid, name in zip(grids, names, strict=True):
        latex = (folder / "tables" / f"{name}.tex").read_text()
        assert all(word in latex for word in (r"\toprule", r"\midrule", r"\bottomrule"))
        assert r"\caption{" in latex
        assert latex.count(r" \\") == len(grid.rows) + 1
        assert all(line.count(" & ") == len(grid.header) - 1
                   for line in latex.splitlines() if line.endswith(r"\\"))  # fmt: skip
        assert all(f"| {' | '.join(row)} |" in markdown for row in grid.rows)


def test_names_are_no_formulas_and_no_latex() -> None:
    grid = Grid("50% of $x_1$", ("a", "b"), (("=cmd()", "-0.5 [-1, 0]"), ("-", "50% & $x_1$ \\")))
    latex = grid_latex(grid, source="a\nb")
    assert latex.startswith("% ab\n")
    assert r"50\% \& \$x\_1\$ \textbackslash{}" in latex
    assert r"\caption{50\% of \$x\_1\$}" in latex
    frame = frame_of(entries([Run("=cmd()", report(2))]))
    lines = figures_csv(frame).splitlines()[1:]
    assert all(line.startswith("'=cmd(),") for line in lines)


def test_strings_are_bounded() -> None:
    assert len(clean("x" * 50_000_000)) == 400
    assert clean("a\x00\r\n\tb<") == "ab<"
    assert clean("\x07" * 900 + "a").endswith("...")


def test_nothing_finished_writes_dashes_and_exits_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = dataclasses.replace(
        timed(three_conditions(1)[1], wall_s=0.0, decode_wall_s=None),
        records=(generation("q0", [1], finish_reason="abort"),),
        audit=None,
    )
    made = build_report([condition], prompts=some_prompts(1), dtype="f", config={}, run={})
    path = write_results(tmp_path, made)
    assert made.summaries[0].acceptance.acceptance_length_micro == Estimate(None)
    assert main([str(path), "--out", str(tmp_path / "out")]) == 3
    assert "got none for" in capsys.readouterr().err
    page = (tmp_path / "out" / "report.html").read_text()
    assert "no generation finished: every figure is undefined" in outline(page).text
    assert "nan" not in page.lower().replace("finance", "")
    assert (tmp_path / "out" / "figures.csv").read_text().count(",,,0\n") >= 5


def test_enough_prompts_give_no_warning(tmp_path: Path) -> None:
    write_results(tmp_path, report(80))
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert "warning:" not in (tmp_path / "out" / "report.html").read_text()


def test_faults_are_one_line_with_their_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "gone.json"), "--out", str(tmp_path)]) == 2
    write_results(tmp_path, report(2))
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path), "--out", str(tmp_path / "file" / "out")]) == 4
    errors = capsys.readouterr().err.splitlines()
    assert [error.split()[0] for error in errors] == ["error:", "error:"]
