"""Rules between `model.tp_plan`, `model.device_map` and the keys that do not go with them."""

from collections.abc import Iterator

from mtp_research.config import EvalConfig, TrainConfig
from mtp_research.runtime.errors import rule_line


def placing_faults(config: TrainConfig | EvalConfig) -> Iterator[str]:
    """Fault lines of a configuration, one per key."""
    model = config.model
    if model.tp_plan != "none" and model.device_map != "none":
        expected = f"must be none for model.tp_plan={model.tp_plan}"
        yield rule_line("model.device_map", expected, model.device_map, "model.device_map=none")
    if isinstance(config, TrainConfig):
        yield from _train_faults(config)
    else:
        yield from _eval_faults(config)


def _train_faults(config: TrainConfig) -> Iterator[str]:
    model, trainer = config.model, config.trainer
    if model.tp_plan != "none":
        expected = "must be none for train.py, which spreads a target by trainer.shard_target"
        fix = "model.tp_plan=none trainer.shard_target=true"
        yield rule_line("model.tp_plan", expected, model.tp_plan, fix)
    if model.device_map == "none":
        return
    for key, is_set in {
        "trainer.shard_target": trainer.shard_target,
        "trainer.compile": trainer.compile,
    }.items():
        if is_set:  # hooks that move inputs break the graph, and ranks need the whole device
            expected = f"must be false for model.device_map={model.device_map}"
            yield rule_line(key, expected, "true", f"{key}=false")


def _eval_faults(config: EvalConfig) -> Iterator[str]:
    model, engine, spec = config.model, config.engine, config.spec
    if model.device_map != "none" and engine.cuda_graphs:  # weights move during a step
        expected = f"must be false for model.device_map={model.device_map}"
        key = "engine.cuda_graphs"
        yield rule_line(key, expected, "true", "engine.cuda_graphs=false engine.compile=false")
    if model.tp_plan == "none":
        return
    if engine.compile:
        expected = f"must be false for model.tp_plan={model.tp_plan}"
        yield rule_line("engine.compile", expected, "true", "engine.compile=false")
    if spec.draft_length == "expected_gain" and spec.draft_cost_ratio is None:
        # A clock would let ranks take different decisions, and wait for each other for ever.
        expected = f"must be set for model.tp_plan={model.tp_plan}, whose ranks cannot use a clock"
        yield rule_line("spec.draft_cost_ratio", expected, "null", "spec.draft_cost_ratio=0.1")
