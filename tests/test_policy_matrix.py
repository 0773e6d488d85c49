"""The train-unroll x decode-policy matrix on a tiny target: all cells, and the checks in them."""

import dataclasses

import pytest

from mtp_research import matrix_cell
from mtp_research.cli import compose_config
from mtp_research.config import MatrixConfig, TrainConfig
from mtp_research.errors import ConfigError, NumericFault
from mtp_research.policy import MATCHING_POLICY
from mtp_research.policy_matrix import run_policy_matrix, unrolls_of
from tests.training.tiny import save_lab


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = save_lab(tmp_path_factory.mktemp("lab"), num_documents=24)
    config.matrix = MatrixConfig(num_mtp_modules=[1, 2], num_prompts=4, max_new_tokens=32)
    config.trainer = dataclasses.replace(config.trainer, max_steps=4)
    config.task = "matrix"
    return config


def test_matrix_walk_equals_loop_in_every_cell(config, tmp_path, capsys):
    result = run_policy_matrix(config, tmp_path)
    cells = {(c["unroll"], c["num_mtp_modules"], c["policy"]): c for c in result["cells"]}
    heads = [("chain", 1), ("ttt", 1), ("independent", 1)]
    heads += [("chain", 2), ("shared_context", 2), ("independent", 2)]
    policies = ["training", "eagle", "target_roll"]
    assert list(cells) == [(*head, policy) for head in heads for policy in policies]
    for (unroll, _, policy), cell in cells.items():
        assert cell["is_match"] == (MATCHING_POLICY[unroll] == policy)
        assert cell["num_rounds"] >= 30
        if policy != "target_roll":
            assert cell["acceptance_length"] == cell["clean_length"]
    rolled = [cell for cell in result["cells"] if cell["policy"] == "target_roll"]
    assert any(cell["acceptance_length"] != cell["clean_length"] for cell in rolled)
    assert "shared_context N=2" in capsys.readouterr().err


def test_matrix_cell_whose_walk_differs_is_a_fault(config, tmp_path, monkeypatch):
    config = dataclasses.replace(config)
    config.matrix = MatrixConfig(
        num_mtp_modules=[2], unrolls=["chain"], policies=["eagle"], num_prompts=3
    )
    # The walk of another policy stands for any error in either of the two.
    monkeypatch.setitem(matrix_cell.WALK_UNROLL, "eagle", "independent")
    with pytest.raises(NumericFault, match=r"chain N=2 under eagle"):
        run_policy_matrix(config, tmp_path)


@pytest.mark.parametrize(
    ("num_mtp_modules", "expected"),
    [(1, ["chain", "ttt", "independent"]), (3, ["chain", "shared_context", "independent"])],
)
def test_unrolls_of_leaves_out_the_twin(num_mtp_modules, expected):
    wanted = ["chain", "ttt", "shared_context", "independent"]
    assert unrolls_of(num_mtp_modules, wanted=wanted) == expected


@pytest.mark.parametrize("words", [["matrix.num_mtp_modules=[0]"], ["objective.num_depths=2"]])
def test_matrix_of_impossible_heads_is_refused(words):
    with pytest.raises(ConfigError, match=r"must (lie in|be at least)"):
        compose_config(TrainConfig, ["experiment=policy_matrix_tiny", *words])
