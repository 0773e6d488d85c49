"""accelerate's YAML, through accelerate's own launcher, and DeepSpeed's JSON: taken or refused."""

import json
import os
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

from mtp_research.app.cli import compose_config, run_entry
from mtp_research.config.launched import (
    adopt_launch,
    deepspeed_entries,
    merge_deepspeed,
    read_deepspeed,
)
from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.config.training_schema import TrainerConfig
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.training.setup import make_accelerator

PLACE = {"num_processes": 2, "num_machines": 1, "machine_rank": 0, "use_cpu": False}
ZERO = {"distributed_type": "DEEPSPEED"}
FSDP = {"distributed_type": "FSDP"}


def variables(folder: Path, settings: dict) -> dict[str, str]:
    """What `accelerate launch --config_file` hands to a process for these settings of its YAML."""
    path = folder / "accelerate.yaml"
    local = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no"}
    local |= {"distributed_type": "NO"}
    path.write_text(yaml.safe_dump(local | PLACE | settings))
    args = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, *_ = _validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = ""
    if args.use_deepspeed:
        found = prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp:
        found = prepare_multi_gpu_env(args)
    else:
        found = prepare_simple_launcher_cmd_env(args)[1]
    names = ("ACCELERATE_", "FSDP_", "XLA_")
    return {name: value for name, value in found.items() if name.startswith(names)}


def adopted(environ: dict[str, str], *typed: str) -> tuple[TrainConfig, list[str]]:
    config = compose_config(TrainConfig, list(typed))
    return config, adopt_launch(config, typed=typed, environ=environ)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (ZERO | {"deepspeed_config": {"zero_stage": 2}}, {"parallel": "zero2"}),
        (
            ZERO
            | {
                "deepspeed_config": {
                    "zero_stage": 3,
                    "gradient_accumulation_steps": 4,
                    "gradient_clipping": 0.5,
                    "zero3_init_flag": False,
                    "offload_param_device": "none",
                    "zero3_save_16bit_model": True,
                },
                "mixed_precision": "bf16",
            },
            {
                "parallel": "zero3",
                "gradient_accumulation_steps": 4,
                "grad_clip": 0.5,
                "precision": "bfloat16",
            },
        ),
        (
            FSDP
            | {
                "fsdp_config": {
                    "fsdp_version": 2,
                    "fsdp_reshard_after_forward": True,
                    "fsdp_activation_checkpointing": True,
                    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                }
            },
            {"parallel": "fsdp2", "activation_checkpointing": True},
        ),
        (FSDP | {"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, {"parallel": "ddp"}),
        ({"mixed_precision": "bf16"}, {"precision": "bfloat16"}),
        ({}, {}),
    ],
    ids=["zero2", "zero3", "fsdp2", "no shards", "bf16", "nothing"],
)
def test_file_of_accelerate_sets_our_keys(tmp_path: Path, settings: dict, wanted: dict) -> None:
    config, lines = adopted(variables(tmp_path, settings))
    plain = compose_config(TrainConfig, [])
    expected = {**vars(plain.trainer), **wanted}
    assert vars(config.trainer) == expected
    assert config.model.device == plain.model.device
    assert len(lines) == bool(wanted)
    for key, value in wanted.items():
        assert f"trainer.{key}={value}" in lines[0]


def test_layout_settings_without_effect_are_named(tmp_path: Path) -> None:
    settings = FSDP | {
        "fsdp_config": {"fsdp_version": 2, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    }
    (line,) = adopted(variables(tmp_path, settings))[1]
    assert "decided by the program" in line
    assert "fsdp_state_dict_type=SHARDED_STATE_DICT" in line


@pytest.mark.parametrize(
    ("settings", "name", "fix"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision", "trainer.precision=bfloat16"),
        (
            {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
            "dynamo_backend",
            "trainer.compile=true",
        ),
        (
            ZERO | {"deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}},
            "offload_optimizer_device",
            "trainer.parallel=zero3",
        ),
        (
            ZERO | {"deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True}},
            "zero3_init_flag",
            "must be false",
        ),
        (
            FSDP | {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}},
            "fsdp_offload_params",
            "must be false",
        ),
        (
            FSDP | {"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
            "fsdp_sharding_strategy",
            "trainer.parallel=zero2",
        ),
    ],
)  # fmt: skip
def test_setting_without_an_equivalent_is_refused_by_name(
    tmp_path: Path, settings: dict, name: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as fault:
        adopted(variables(tmp_path, settings))
    (line,) = str(fault.value).splitlines()
    assert f"accelerate's {name} " in line
    assert fix in line


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        (["trainer.parallel=ddp"], "trainer.parallel"),
        (["trainer=ddp"], "trainer.parallel"),
        (["trainer=fsdp2"], "trainer.parallel"),
        (["trainer.gradient_accumulation_steps=2"], "trainer.gradient_accumulation_steps"),
    ],
)
def test_key_that_contradicts_the_file_is_refused(
    tmp_path: Path, typed: list[str], key: str
) -> None:
    more = {"zero_stage": 2, "gradient_accumulation_steps": 4}
    environ = variables(tmp_path, ZERO | {"deepspeed_config": more})
    with pytest.raises(ConfigError, match=rf"^{key} must be .* as accelerate's"):
        adopted(environ, *typed)
    config, _ = adopted(environ, "trainer=zero2", "trainer.gradient_accumulation_steps=4")
    assert config.trainer.parallel == "zero2"


def test_file_of_deepspeed_in_that_of_accelerate_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    settings = ZERO | {"deepspeed_config": {"deepspeed_config_file": str(file)}}
    config, _ = adopted(variables(tmp_path, settings))
    assert (config.trainer.parallel, config.trainer.deepspeed_config) == ("zero1", str(file))


def test_train_py_obeys_the_launcher_and_eval_py_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    settings = ZERO | {"deepspeed_config": {"zero_stage": 1}}
    for name, value in variables(tmp_path, settings).items():
        monkeypatch.setenv(name, value)
    argv = [f"output_dir={tmp_path / 'run'}"]
    code = run_entry(TrainConfig, lambda config, _: seen.append(config.trainer.parallel), argv=argv)
    assert (code, seen) == (0, ["zero1"])
    assert "accelerate: zero_stage=1: trainer.parallel=zero1" in capsys.readouterr().err
    assert run_entry(EvalConfig, lambda *_: seen.append("eval"), argv=argv) == 2
    assert "eval.py takes no settings of accelerate, got zero_stage=1" in capsys.readouterr().err
    assert len(seen) == 1


def test_accelerate_wraps_nothing_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, str]] = []

    def accelerator(**_: object) -> None:
        made.append(dict(os.environ))

    monkeypatch.setattr("mtp_research.training.setup.Accelerator", accelerator)
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, "bf16")
    make_accelerator(compose_config(TrainConfig, ["model.device=cpu"]))
    assert not {"ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION"} & set(made[0])
    assert os.environ["ACCELERATE_USE_FSDP"] == "bf16"  # as it was


TRAINER = TrainerConfig(batch_size=4, gradient_accumulation_steps=2, parallel="zero2")
OURS = deepspeed_entries(TRAINER, num_processes=2) | {"bf16": {"enabled": True}}


def test_entries_of_the_user_are_kept_and_auto_is_filled() -> None:
    theirs = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": "auto",
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "none"},
        },
        "wall_clock_breakdown": True,
    }
    merged = merge_deepspeed(theirs, OURS)
    assert merged == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 16,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "bf16": {"enabled": True},
        "wall_clock_breakdown": True,
    }
    assert merge_deepspeed({}, OURS) == OURS


@pytest.mark.parametrize(
    ("theirs", "name", "fix"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "trainer.parallel=zero3"),
        ({"gradient_clipping": 0.3}, "gradient_clipping", "trainer.grad_clip=0.3"),
        ({"train_batch_size": 8}, "train_batch_size must be 16 or auto", "trainer.batch_size"),
        ({"bf16": {"enabled": False}}, "bf16.enabled", "trainer.precision"),
        ({"fp16": {"enabled": True}}, "fp16 is not taken", "trainer.precision=bfloat16"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer is not taken", "trainer.learning_rate"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler", "trainer.warmup_fraction"),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param is not taken",
            "trainer.parallel=zero3",
        ),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning is not", "remove it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_entry_that_contradicts_a_key_is_refused_by_name(theirs: dict, name: str, fix: str) -> None:
    with pytest.raises(ConfigError) as fault:
        merge_deepspeed(theirs, OURS)
    (line,) = str(fault.value).splitlines()
    assert line.startswith("trainer.deepspeed_config: ")
    assert name in line
    assert fix in line


def test_file_is_read_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    words = ["trainer=zero2", f"trainer.deepspeed_config={file}", f"output_dir={tmp_path / 'run'}"]
    never = lambda *_: pytest.fail("the run must not start")  # noqa: E731
    for text, code, said in [
        (None, 2, "must be a DeepSpeed JSON file"),
        ("[1]", 3, "expected a JSON object, got a list"),
        ('{"zero_optimization": {"stage": 1}}', 2, "set trainer.parallel=zero1"),
    ]:
        if text is not None:
            file.write_text(text)
        assert run_entry(TrainConfig, never, argv=words) == code
        assert said in capsys.readouterr().err
    file.write_text("{")
    with pytest.raises(IntegrityError, match="JSON"):
        read_deepspeed(str(file))
