"""What happens inside a step: a crash between micro-batches, and a loss that is not finite."""

import copy
import math

import pytest
from safetensors.torch import load_file

from mtp_research.config.schema import TrainConfig
from mtp_research.training.loop import train_heads
from mtp_research.training.losses.losses import HeadObjective
from tests.training.tiny import save_lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> TrainConfig:
    config = save_lab(tmp_path_factory.mktemp("lab"))
    trainer = config.trainer
    trainer.gradient_accumulation_steps, trainer.save_every, trainer.keep_last = 2, 3, 9
    return config


def at_call(monkeypatch, *, numbers, action):
    """Let `action(result)` replace what the objective gives at these calls, counted from 1."""
    forward, count = HeadObjective.forward, [0]

    def wrapped(self, *arguments):
        count[0] += 1
        result = forward(self, *arguments)
        return action(result) if count[0] in numbers else result

    monkeypatch.setattr(HeadObjective, "forward", wrapped)


def last_step(folder):
    """Content of the tensor files of step 6."""
    names = ("head.safetensors", "optimizer.safetensors")
    return [(folder / "step_000006" / name).read_bytes() for name in names]


def test_crash_between_micro_batches_resumes_bit_identical_with_random_inputs(
    lab, tmp_path, monkeypatch, capsys
):
    config = copy.deepcopy(lab)
    config.objective.unroll = "mixed"  # draws the source of every token: noise as dropout makes it

    def crash(result):
        raise ZeroDivisionError

    train_heads(config, tmp_path / "straight")
    with monkeypatch.context() as patch:
        at_call(patch, numbers={10}, action=crash)  # the second micro-batch of step 5
        with pytest.raises(ZeroDivisionError):
            train_heads(config, tmp_path / "resumed")
    assert (tmp_path / "resumed" / "latest").read_text() == "step_000003\n"
    assert "resumed from" not in capsys.readouterr().err
    train_heads(config, tmp_path / "resumed")
    assert "resumed from step_000003\n" in capsys.readouterr().err
    assert last_step(tmp_path / "resumed") == last_step(tmp_path / "straight")

    config.seed = 1
    train_heads(config, tmp_path / "other")
    assert last_step(tmp_path / "other") != last_step(tmp_path / "straight")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite_skips_the_step_although_gradients_are(
    lab, tmp_path, monkeypatch, value
):
    def spoilt(result):
        return result._replace(loss=result.loss + value)

    # One micro-batch of two: the other one's gradients are finite, and so are this one's.
    at_call(monkeypatch, numbers={3}, action=spoilt)
    result = train_heads(lab, tmp_path)
    assert (result["num_skipped"], result["num_steps"]) == (1, 6)
    for name in ("head", "optimizer"):
        tensors = load_file(tmp_path / "step_000006" / f"{name}.safetensors")
        assert all(tensor.isfinite().all() for tensor in tensors.values())
    steps = load_file(tmp_path / "step_000006" / "optimizer.safetensors")
    assert {int(tensor) for name, tensor in steps.items() if name.startswith("step.")} == {5}
