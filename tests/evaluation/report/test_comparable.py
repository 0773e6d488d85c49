"""What conditions may share a chart: heads, policies, settings."""

import dataclasses

import pytest

from mtp_research.evaluation.report.comparable import drafting, entries, policy_matrices
from mtp_research.evaluation.report.frame import frame_of
from mtp_research.evaluation.report.run_charts import matrix_cells
from mtp_research.evaluation.report.stored import Report, Run, build_report
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


def test_head_label_names_unroll_or_folder(chain: Report) -> None:
    def label(**changes: object) -> str:
        run = Run("r", dataclasses.replace(chain, **changes))
        return drafting(entries([run]))[0].head_label

    assert label() == "chain N=3"
    assert label(run={}) == "chain"
    assert label(run={}, config={"spec": {"head": "runs/long/head"}}) == "long"
    assert label(run={}, config={}) == "no head"


def test_matrix_has_runs_as_rows_and_never_mixes_settings(chain: Report) -> None:
    ttt = report(head="ttt", num_modules=1)
    larger = report(head="independent", batch=32)
    found = entries([Run("a", chain), Run("b", ttt), Run("c", larger)])
    (matrix,) = policy_matrices(found)
    cells = matrix_cells(frame_of(found), matrix)
    assert list(dict.fromkeys(cells["row"])) == ["chain N=3", "ttt N=1"]
    assert list(dict.fromkeys(cells["column"])) == ["eagle", "training"]
    length = chain.summaries[1].acceptance.acceptance_length_micro.value
    assert cells["value"].iloc[0] == length
    assert matrix.setting.batch_size == "16"
    matches = {(one["row"], one["column"]) for _, one in cells.iterrows() if one["is_match"]}
    assert matches == {("chain N=3", "training"), ("ttt N=1", "eagle")}


def test_matrix_tells_two_heads_of_one_kind_apart_by_run(chain: Report) -> None:
    (matrix,) = policy_matrices(entries([Run("seed0", chain), Run("seed1", chain)]))
    assert list(dict.fromkeys(row for row, _ in matrix.cells)) == [
        "chain N=3, seed0",
        "chain N=3, seed1",
    ]


def test_matrix_tells_two_heads_of_one_kind_and_run_apart_by_their_names(chain: Report) -> None:
    others = [
        dataclasses.replace(one, result=dataclasses.replace(one.result, head="second/head"))
        for one in chain.summaries
    ]
    both = dataclasses.replace(chain, summaries=[*chain.summaries, *others[1:]])
    (matrix,) = policy_matrices(entries([Run("grid", both)]))
    first = chain.summaries[1].result.head
    rows = [f"chain N=3, {name}" for name in (first, "second/head")]
    assert list(dict.fromkeys(row for row, _ in matrix.cells)) == rows
    assert len(matrix.cells) == 4
