"""Shapes of lab targets are those that `train.py task=target` makes."""

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.bench.shapes import SHAPES
from mtp_research.config.schema import TrainConfig


@pytest.mark.parametrize("name", ["lab_base", "lab_small"])
def test_lab_shapes_are_the_configured_ones(name: str) -> None:
    model = compose_config(TrainConfig, ["task=target", f"model={name}"]).model
    sizes = dict(model.architecture, vocab_size=model.pretrain.vocab_size)
    assert SHAPES[name].arguments == sizes
