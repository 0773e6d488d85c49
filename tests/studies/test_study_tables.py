"""A seed matrix: matching cells against each other, positions, verdicts, checks on reading."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mtp_research.evaluation.report.charts import Chart, Missing
from mtp_research.evaluation.stats import bootstrap
from mtp_research.evaluation.stats.matrix_seeds import (
    MATRIX_FILE,
    GroupKey,
    MatrixCell,
    MatrixPrompt,
    SeedMatrix,
    group_figures,
    match_pairs,
    read_matrix,
)
from mtp_research.runtime.errors import IntegrityError
from mtp_research.studies.study_pages import matrix_section
from mtp_research.studies.study_tables import (
    matrix_conventions,
    matrix_grids,
    matrix_markdown,
    matrix_summary,
    matrix_warnings,
    read_checked_matrix,
    write_matrix,
)
from mtp_research.studies.tables import main
from tests import oracle

# Accepted drafts of the rounds of two prompts, by unroll and policy, at seed 0; seed 1 has one more
# round, of all K, for the first prompt.
ROUNDS = {
    ("chain", "training"): ((3, 2), (1,)),
    ("chain", "eagle"): ((1, 1), (0,)),
    ("shared_context", "training"): ((1, 0), (0,)),
    ("shared_context", "eagle"): ((2, 2), (1,)),
}
MATCHES = {"chain": "training", "shared_context": "eagle"}


def matrix(**changes: object) -> SeedMatrix:
    cells = [
        MatrixCell(
            key=GroupKey(unroll, 3, "post_norm", policy, "post_norm"),
            seed=seed,
            num_speculative_tokens=3,
            is_match=MATCHES[unroll] == policy,
            head_sha256="0" * 64,
            accepted_per_round=((*rounds[0], *[3] * seed), rounds[1]),
            clean_per_round=None,
            num_other_texts=0,
            num_other_rounds=0,
        )
        for seed in (0, 1)
        for (unroll, policy), rounds in ROUNDS.items()
    ]
    fields = {
        "seeds": (0, 1),
        "num_cells_per_seed": 4,
        "prompts": (MatrixPrompt("p0", "math", "1" * 64), MatrixPrompt("p1", "chat", "2" * 64)),
        "cells": tuple(cells),
        "bootstrap_seed": 0,
        "settings": {"dtype": "float32"},
        "run": {},
    }
    return SeedMatrix(**{**fields, **changes})


def test_conventions_of_the_heads_are_known_where_the_configuration_is() -> None:
    config = {"head": {"hidden_source": "pre_norm", "num_mtp_modules": 1}}
    known = matrix(settings={"dtype": "float32", "config": config})
    phrase = "3 modules, reads pre_norm, recycles post_norm, embedding_first, position 0 kept"
    assert matrix_conventions(known) == [phrase]
    assert matrix_conventions(matrix()) == []


def test_matching_cells_are_paired_by_hand() -> None:
    (pair,) = match_pairs(matrix())
    # lengths by seed: chain 1 + 6/3 and 1 + 9/4, shared_context 1 + 5/3 and 1 + 8/4
    assert pair.by_seed == pytest.approx((1 / 3, 1 / 4))
    assert pair.difference.value == pytest.approx((1 / 3 + 1 / 4) / 2)
    assert pair.ours_length.value == pytest.approx(1 + (2 + 9 / 4) / 2)
    assert pair.difference.low is not None
    assert pair.difference.low >= 0.0  # chain is at least as long on every prompt of every seed
    (chat,) = match_pairs(matrix(), domain="chat")
    assert chat.difference == (0.0, 0.0, 0.0)
    grid = matrix_grids(matrix())[1]
    assert grid.title.startswith("Matching cells")
    assert [row[:3] for row in grid.rows] == [
        ("chain - shared_context N=3", domain, num)
        for domain, num in (("all", "2"), ("chat", "1"), ("math", "1"))
    ]
    assert grid.rows[0][5] == "+0.333 +0.250"


def charts_of(folder: Path, made: SeedMatrix) -> list[Chart | Missing]:
    write_matrix(folder, made, figures=True)
    return list(matrix_section(folder, name="m").charts)


def test_chart_of_matching_cells_has_the_interval_and_every_seed(tmp_path: Path) -> None:
    charts = charts_of(tmp_path, matrix())
    (chart,) = [one for one in charts if "minus heads for eagle" in one.title]
    assert isinstance(chart, Chart)
    (legend,) = chart.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "mean over seeds",
        "seed 0",
        "seed 1",
    ]
    (axes,) = chart.figure.axes
    (tick,) = axes.get_xticklabels()
    assert tick.get_text() == "N=3 shared_context"
    assert "seed 0, N=3 shared_context: 0.3333" in chart.hover.values()
    assert "n = 2 prompts. Above 0: training is ahead." in chart.note


@pytest.mark.parametrize("domain", [None, "math", "chat"])
def test_paired_differences_equal_a_loop_over_draws(
    domain: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(5)
    prompts = [MatrixPrompt(f"p{i}", ("math", "chat")[i % 3 == 0], f"{i}" * 64) for i in range(12)]
    made = {
        (unroll, policy, seed): [
            [generator.choice((0, 1, 1, 3)) for _ in range(generator.randint(1, 6))]
            for _ in prompts
        ]
        for unroll, policy in ROUNDS
        for seed in (4, 9, 2)
    }
    cells = [
        replace(matrix().cells[0], key=GroupKey(unroll, 3, "post_norm", policy, "post_norm"),
                seed=seed, is_match=MATCHES[unroll] == policy,
                accepted_per_round=tuple(map(tuple, rounds)))
        for (unroll, policy, seed), rounds in made.items()
    ]  # fmt: skip
    generator.shuffle(cells)
    monkeypatch.setattr(bootstrap.make_draws, "__kwdefaults__", {"num_draws": 200})
    found = matrix(seeds=(4, 9, 2), prompts=tuple(prompts), cells=tuple(cells), bootstrap_seed=3)

    def expected(ours: tuple[str, str], theirs: tuple[str, str]) -> oracle.NaiveDifference:
        chosen = [i for i, prompt in enumerate(prompts) if domain in (None, prompt.domain)]
        sides = [[[made[*of, s][i] for i in chosen] for s in (4, 9, 2)] for of in (ours, theirs)]
        return oracle.paired_length_difference(*sides, seed=3, num_draws=200)

    (pair,) = match_pairs(found, domain=domain)
    match = ("chain", "training"), ("shared_context", "eagle")
    assert pair.difference == pytest.approx(expected(*match))
    others = {
        (g.key.unroll, g.key.policy): g.minus_match for g in group_figures(found, domain=domain)
    }
    for unroll, policy in ROUNDS:
        minus_match = others[unroll, policy]
        if policy == MATCHES[unroll]:
            assert minus_match is None
        else:
            own = (unroll, MATCHES[unroll])
            assert minus_match == pytest.approx(expected((unroll, policy), own))


def test_only_cells_of_equal_n_and_norm_are_paired(tmp_path: Path) -> None:
    cells = [
        MatrixCell(**{**vars(c), "key": c.key._replace(num_mtp_modules=1)})
        if c.key.unroll == "chain"
        else c
        for c in matrix().cells
    ]
    other = matrix(cells=tuple(cells))
    assert match_pairs(other) == []
    assert not any(grid.title.startswith("Matching cells") for grid in matrix_grids(other))
    titles = [chart.title for chart in charts_of(tmp_path, other)]
    assert [t for t in titles if "position" in t] == [
        f"Acceptance by draft position of the matching cells, N={n}" for n in (1, 3)
    ]


def test_positions_are_shares_of_rounds_and_sum_to_the_length() -> None:
    groups = group_figures(matrix())
    for one in groups:
        total = sum(figure.value or 0.0 for figure in one.positions)
        assert one.length.value == pytest.approx(1 + total, abs=1e-12)
        assert all(f.low <= f.value <= f.high for f in one.positions)  # type: ignore[operator]
    chain = groups[0].positions
    assert [f.value for f in chain] == pytest.approx([1, (2 / 3 + 3 / 4) / 2, (1 / 3 + 2 / 4) / 2])
    grid = matrix_grids(matrix())[3]
    others = ("the same at fixed anchors", "repeated rounds")  # these cells are of an older file
    assert grid.header == ("heads", "policy", "p_1", "p_2", "p_3", *others)
    assert grid.rows[0][:3] == ("chain N=3", "training*", "1.000 [1.000, 1.000]")
    assert len(grid.rows) == 4


def test_other_texts_and_rounds_are_counted_on_every_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = matrix()
    line = "16 of 16 texts are plain decoding's; 16 of 16 lists of rounds are the replay walk's"
    assert line in matrix_markdown(good)
    first = MatrixCell(**{**vars(good.cells[0]), "num_other_texts": 1, "num_other_rounds": 2})
    bad = matrix(cells=(first, *good.cells[1:]))
    wanted = (
        "15 of 16 texts are plain decoding's; 14 of 16 lists of rounds are the replay walk's; "
        "others in chain N=3 seed 0 under training (1 texts, 2 lists of rounds)"
    )
    assert wanted in matrix_warnings(bad)
    write_matrix(tmp_path, bad, figures=True)
    assert main(["seeds", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    few = "intervals over fewer than 80 prompts are too narrow"
    assert shown[0] == f"warning: only 2 prompts: {few}"
    assert shown[2] == f"warning: {wanted}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["prompts"].append(s["prompts"][0]), "has rounds of 2 prompts for 3"),
        (lambda s: s["cells"][0]["accepted_per_round"].pop(), "has rounds of 1 prompts for 2"),
        (lambda s: s["cells"][0].update(clean_per_round=[[1]]), "has rounds of 1 prompts for 2"),
        (lambda s: s["cells"].append(s["cells"][0]), "is there twice"),
        (lambda s: s["cells"][0].update(seed=7), "is of no seed asked for"),
    ],
)
def test_cells_that_do_not_fit_their_prompts_are_refused(
    tmp_path: Path, change: Callable[[dict], object], message: str
) -> None:
    write_matrix(tmp_path, matrix(), figures=True)
    stored = json.loads((tmp_path / MATRIX_FILE).read_text())
    change(stored)
    (tmp_path / MATRIX_FILE).write_text(json.dumps(stored))
    with pytest.raises(IntegrityError, match=message):
        read_matrix(tmp_path)


def test_stored_figures_are_held_against_the_counters(tmp_path: Path) -> None:
    write_matrix(tmp_path, matrix(), figures=True)
    path = tmp_path / MATRIX_FILE
    stored = json.loads(path.read_text())
    for one in stored["summary"]["groups"]:
        del one["positions"]  # as files were written before there were any
    del stored["summary"]["match_pairs"]
    path.write_text(json.dumps(stored))
    assert read_checked_matrix(tmp_path) == matrix()
    stored["summary"]["groups"][0]["length"][1] += 1e-3  # the lower end of an interval
    path.write_text(json.dumps(stored))
    with pytest.raises(
        IntegrityError, match=r"1 stored figures .*\(summary.groups\[0\].length\[1\]"
    ):
        read_checked_matrix(tmp_path)
    assert main(["seeds", str(tmp_path)]) == 3


def test_seed_without_rounds_has_no_figure_and_the_file_can_be_written(tmp_path: Path) -> None:
    cells = [
        MatrixCell(**{**vars(c), "accepted_per_round": ((), ())}) if c.seed else c
        for c in matrix().cells
    ]
    empty = matrix(cells=tuple(cells))
    write_matrix(tmp_path, empty, figures=True)
    assert json.loads((tmp_path / MATRIX_FILE).read_text())["summary"] == json.loads(
        json.dumps(matrix_summary(empty))
    )
    (pair,) = match_pairs(empty)
    assert pair.by_seed == (pytest.approx(1 / 3), None)
    assert pair.difference.value is None
    assert matrix_grids(empty)[1].rows[0][5:] == ("+0.333 -", "-")


@pytest.mark.parametrize("command", ["compare", "context", "policy", "fault", "seeds"])
def test_a_table_of_nothing_is_a_fault_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    paths = [str(tmp_path / name) for name in ("gone", "gone_as_well")]
    assert main([command, *paths[: 2 if command == "compare" else 1]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: there is no ")
    assert line.endswith("; name one, or a folder that holds one.")
    assert paths[0] in line
