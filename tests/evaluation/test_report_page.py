"""`python -m mtp_research.report`: the page, its tables and charts, and what it refuses."""

import csv
import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mtp_research.evaluation import html_page
from mtp_research.evaluation.html_page import clean
from mtp_research.evaluation.report import Report, build_report
from mtp_research.evaluation.report_tables import run_grids
from mtp_research.evaluation.results import recompute, write_results
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.table_files import grid_csv, grid_latex
from mtp_research.evaluation.tables import Grid
from mtp_research.report import main
from tests.evaluation.generations import generation, some_prompts, three_conditions, timed

BAD = "<img src=x onerror=alert(1)>\x1b\u202e&"
VOID = {"meta", "br", "wbr"}


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
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "image", "use"}
    attributes = {key for _, found in seen.tags for key in found}
    assert not attributes & {"src", "xlink:href", "srcset", "action", "background"}
    assert all((found["href"] or "").startswith("#") for _, found in seen.tags if "href" in found)
    assert not re.search(r"url\(|@import|https?:", page)
    assert "default-src 'none'" in page


def test_page_shows_figures_warnings_and_hostile_text_as_text(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf8")
    seen = outline(page)
    assert "warning: only 12 prompts" in seen.text
    assert "model.name=<img src=x onerror=alert(1)>&" in seen.text
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", page)
    for title in ("Acceptance by draft position", "by domain", "by context length",
                  "Audit of the draft KV", "head and decode policy", "by batch size",
                  "Wall time by kind of step"):  # fmt: skip
        assert title in seen.text, title


def test_wide_content_cannot_widen_the_page(folder: Path) -> None:
    """400 pixels: every chart shrinks or lies in a scrolling box, and long words break."""
    page = (folder / "report.html").read_text(encoding="utf8")
    seen = outline(page)
    for number, (tag, found) in enumerate(seen.tags):
        if tag == "svg":
            assert seen.tags[number - 1] == ("div", {"class": "scroll"}), found
    assert ".scroll{overflow-x:auto;max-width:100%" in page
    assert "overflow-wrap:anywhere" in page


def test_contents_lead_to_every_section(folder: Path) -> None:
    seen = outline((folder / "report.html").read_text(encoding="utf8"))
    links = [found["href"] for tag, found in seen.tags if tag == "a"]
    sections = [f"#{found['id']}" for tag, found in seen.tags if tag == "section"]
    assert links == sections
    assert len(set(links)) == 4  # all runs, and each


def test_narrow_table_can_part_intervals_and_aligns_names() -> None:
    rows = (("runs/a" * 3, "eagle", "-", "2.000 [1.500, 2.500]*"), ("b", "-", "-0.5", "-"))
    grid = Grid("Lengths (K=3, one <setting>)", ("", "policy", "lost %", "length"), rows)
    markup = html_page._table(grid, "Table 1. ")
    assert '<td class="with">2.000 <span>[1.500, 2.500]*</span></td>' in markup
    assert markup.count('class="words"') == 4  # heads of both columns of names, two cells
    assert "<b>Table 1. Lengths</b> (K=3, one &lt;setting&gt;).</p>" in markup
    assert '<table class="long">' in markup
    assert "<b>Lengths (micro) by domain.</b></p>" in html_page._table(
        Grid("Lengths (micro) by domain", ("a",), (("b",),))
    )
    assert "lost\u00a0%" in markup
    assert outline(markup).text.count("[1.500, 2.500]*") == 1


def test_page_defines_its_letters_and_names(folder: Path) -> None:
    page = outline((folder / "report.html").read_text(encoding="utf8")).text
    _, _, definitions = page.partition("How the numbers are defined")
    for words in ("K = drafts per step", "WRONG = ", "target_roll_rerun", "shared_context",
                  "rate = sum(accepted)/sum(drafted)"):  # fmt: skip
        assert words in definitions, words
    assert "Whiskers: 95\u00a0% bootstrap over prompts" in page


def test_tables_are_recomputed_from_the_counters_and_equal_the_stored_summary(
    folder: Path,
) -> None:
    stored = json.loads((folder.parent / "two" / "results.json").read_text())
    with (folder / "figures.csv").open(encoding="utf8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == "two" and not row["domain"]]
    for summary in stored["summary"]["conditions"]:
        own = {row["figure"]: row for row in rows if row["condition"] == summary["label"]}
        figures = summary["acceptance"]
        for name in ("acceptance_length_micro", "acceptance_length_macro", "acceptance_rate"):
            for part in ("value", "low", "high"):
                cell = own[name][part]
                assert (float(cell) if cell else None) == figures[name][part]
        positions = [float(row["value"]) for name, row in own.items() if name[2:].isdigit()]
        if summary["num_speculative_tokens"]:
            length = float(own["acceptance_length_micro"]["value"])
            assert len(positions) == 3
            assert abs(length - 1 - sum(positions)) < 1e-9


def test_every_table_has_csv_and_latex_with_the_cells_of_the_page(folder: Path) -> None:
    made = recompute(folder.parent / "one" / "results.json")
    grids = run_grids(made)
    names = sorted(path.stem for path in (folder / "tables").glob("one-*.csv"))
    assert names == sorted(path.stem for path in (folder / "tables").glob("one-*.tex"))
    assert len(names) == len(grids)
    for grid, name in zip(grids, names, strict=True):
        rows = list(csv.reader(io.StringIO((folder / "tables" / f"{name}.csv").read_text())))
        assert [tuple(row) for row in rows] == [grid.header, *grid.rows]
        latex = (folder / "tables" / f"{name}.tex").read_text()
        assert latex.count(r" \\") == len(grid.rows) + 1
        assert all(line.count(" & ") == len(grid.header) - 1
                   for line in latex.splitlines() if line.endswith(r"\\"))  # fmt: skip


def test_names_are_no_formulas_and_no_latex() -> None:
    grid = Grid("t", ("a", "b"), (("=cmd()", "-0.5 [-1, 0]"), ("-", "50% & $x_1$ \\")))
    assert grid_csv(grid).splitlines()[1:] == ['\'=cmd(),"-0.5 [-1, 0]"', "-,50% & $x_1$ \\"]
    assert r"50\% \& \$x\_1\$ \textbackslash{}" in grid_latex(grid)


def test_strings_are_bounded() -> None:
    assert len(clean("x" * 50_000_000)) == 400
    assert clean("a\x00\r\n\tb<") == "ab&lt;"
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
    assert (tmp_path / "out" / "figures.csv").read_text().count(",,,\n") >= 5


def test_enough_prompts_give_no_warning(tmp_path: Path) -> None:
    write_results(tmp_path, report(80))
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert "warning:" not in (tmp_path / "out" / "report.html").read_text()


def test_faults_are_one_line_with_their_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "gone.json"), "--out", str(tmp_path)]) == 3
    write_results(tmp_path, report(2))
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path), "--out", str(tmp_path / "file" / "out")]) == 4
    errors = capsys.readouterr().err.splitlines()
    assert [error.split()[0] for error in errors] == ["error:", "error:"]
