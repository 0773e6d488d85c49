"""The decode loop as the training loop calls it, on the shipped target and heads."""

from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import TrainConfig
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import load_target
from mtp_research.studies import matrix_cell
from mtp_research.studies.matrix_cell import decode_probe

LAB_TINY = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny"


def test_no_prompts_means_no_probe() -> None:
    assert decode_probe(compose_config(TrainConfig, [])) is None


def test_probe_decodes_with_the_heads_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_cell, "PROBE_NEW_TOKENS", 12)
    probe = decode_probe(
        compose_config(TrainConfig, ["model=lab_tiny", "trainer.decode_eval_prompts=2"])
    )
    assert probe is not None
    target = load_target(LAB_TINY / "target", device="cpu")
    heads = load_heads(LAB_TINY / "heads" / "chain_n3", target)
    trained = probe(heads)
    assert trained["num_prompts"] == 2
    assert 1.0 < trained["acceptance_length"] <= 4.0
    assert trained["acceptance_length"] == pytest.approx(
        1 + trained["num_accepted"] / trained["num_rounds"]
    )
    for module in heads.mtp_modules:  # heads that draft nothing useful
        module.shared_head.norm.weight.zero_()
    assert probe(heads)["acceptance_length"] < trained["acceptance_length"]
