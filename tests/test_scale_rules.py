"""Rules between the keys of training at scale, checked before a model is loaded."""

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import TrainConfig
from mtp_research.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("schema", "words", "message"),
    [
        (TrainConfig, ["head.init=replicate"], "set head.path=PATH."),
        (
            TrainConfig,
            ["trainer=zero3", "trainer.decode_eval_prompts=4"],
            "set trainer.decode_eval_prompts=0.",
        ),
        (
            TrainConfig,
            ["trainer.shard_target=true", "trainer.decode_eval_prompts=4"],
            "set trainer.decode_eval_prompts=0.",
        ),
        (TrainConfig, ["trainer=fsdp2", "trainer.compile=true"], "set trainer.compile=false."),
        (TrainConfig, ["head.lora_rank=4", "trainer=zero2"], "set head.lora_rank=0."),
        (
            TrainConfig,
            ["trainer=one_gpu", "trainer.parallel=zero1"],
            "set trainer.cuda_graphs=false.",
        ),
        (
            TrainConfig,
            ["trainer=one_gpu", "trainer.activation_checkpointing=true"],
            "set trainer.cuda_graphs=false.",
        ),
        (
            TrainConfig,
            ["trainer=one_gpu", "trainer.decode_eval_prompts=4"],
            "set trainer.cuda_graphs=false.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_exclude_each_other_give_one_line(
    schema: type, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as fault:
        compose_config(schema, words)
    assert message in str(fault.value)
    assert len(str(fault.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_trainer_presets_choose_how_ranks_share(name: str) -> None:
    assert compose_config(TrainConfig, [f"trainer={name}"]).trainer.parallel == name
