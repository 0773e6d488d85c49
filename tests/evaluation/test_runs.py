import dataclasses
import json
from pathlib import Path

import pytest

from mtp_research.evaluation.entries import drafting, entries
from mtp_research.evaluation.policy_matrix import policy_matrices
from mtp_research.evaluation.report import Report, build_report
from mtp_research.evaluation.results import write_results
from mtp_research.evaluation.runs import Run, read_checked, read_runs
from mtp_research.runtime.errors import IntegrityError
from tests.evaluation.generations import some_prompts, three_conditions


def report(*, head: str = "chain", num_modules: int = 3, batch: int = 16) -> Report:
    facts = {"name": head, "unroll": head, "num_mtp_modules": num_modules}
    return build_report(
        three_conditions(8),
        prompts=some_prompts(8),
        dtype="float32",
        config={"engine": {"max_num_requests": batch}, "spec": {"head": f"heads/{head}"}},
        run={"head": facts},
    )


@pytest.fixture(scope="module")
def chain() -> Report:
    return report()


def test_every_stored_figure_is_checked_against_the_counters(tmp_path: Path, chain: Report) -> None:
    path = write_results(tmp_path, chain)
    assert read_checked(path) == chain
    stored = json.loads(path.read_text())
    figure = stored["summary"]["conditions"][1]["acceptance"]["acceptance_length_micro"]
    figure["value"] += 1e-6
    path.write_text(json.dumps(stored))
    with pytest.raises(IntegrityError, match="1 stored figures are not what the counters give"):
        read_checked(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("summary", "conditions"), []),
        (("summary",), None),
        (("summary", "conditions", 1, "acceptance", "num_accepted"), "many"),
        (("summary", "conditions", 1, "acceptance", "acceptance_rate"), None),
        (("summary", "paired", 0, "differences", "p_1", "low"), 0.5),
    ],
    ids=["no conditions", "no summary", "text", "null", "paired"],
)
def test_changed_summary_is_refused(
    tmp_path: Path, chain: Report, place: tuple[str | int, ...], value: object
) -> None:
    path = write_results(tmp_path, chain)
    stored = json.loads(path.read_text())
    node = stored
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    path.write_text(json.dumps(stored))
    with pytest.raises(IntegrityError, match="stored figures"):
        read_checked(path)


def test_other_formula_is_refused_by_name(tmp_path: Path, chain: Report) -> None:
    path = write_results(tmp_path, chain)
    stored = json.loads(path.read_text())
    stored["formulas"]["acceptance_rate"] = "accepted / rounds"
    path.write_text(json.dumps(stored))
    with pytest.raises(IntegrityError, match="got others for acceptance_rate"):
        read_checked(path)


def test_not_a_number_is_refused(tmp_path: Path, chain: Report) -> None:
    path = write_results(tmp_path, chain)
    path.write_text(path.read_text().replace('"wall_s":8.0', '"wall_s":NaN'))
    with pytest.raises(IntegrityError, match="NaN is no number"):
        read_checked(path)


def test_names_are_unique_and_come_from_the_folder(tmp_path: Path, chain: Report) -> None:
    for name in ("a/same", "b/same"):
        write_results(tmp_path / name, chain)
    alone = tmp_path / "kept.json"
    alone.write_bytes((tmp_path / "a/same/results.json").read_bytes())
    runs = read_runs([tmp_path / "a/same", tmp_path / "b/same/results.json", alone])
    assert [run.name for run in runs] == ["same", "same-2", "kept"]


def test_head_label_names_unroll_or_folder(chain: Report) -> None:
    def label(**changes: object) -> str:
        run = Run("r", dataclasses.replace(chain, **changes))
        return drafting(entries([run]))[0].head_label

    assert label() == "chain N=3"
    assert label(run={}) == "chain"
    assert label(run={}, config={}) == "no head"


def test_matrix_has_runs_as_rows_and_never_mixes_settings(chain: Report) -> None:
    ttt = report(head="ttt", num_modules=1)
    larger = report(head="independent", batch=32)
    found = entries([Run("a", chain), Run("b", ttt), Run("c", larger)])
    (matrix,) = policy_matrices(found)
    assert matrix.rows == ("chain N=3", "ttt N=1")
    assert matrix.columns == ("eagle", "training")
    length = chain.summaries[1].acceptance.acceptance_length_micro.value
    assert matrix.values[0][0].value == length
    assert "batch 16" in matrix.note
    assert matrix.matches == {(0, 1), (1, 0)}


def test_matrix_tells_two_heads_of_one_kind_apart_by_run(chain: Report) -> None:
    (matrix,) = policy_matrices(entries([Run("seed0", chain), Run("seed1", chain)]))
    assert matrix.rows == ("chain N=3, seed0", "chain N=3, seed1")
