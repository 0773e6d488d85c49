"""What `train.py` and `eval.py` do with a checked configuration.

torch is imported by the task that needs it, so that `--help` and refusals do without.
"""

import json
import os
from pathlib import Path

from mtp_research.app.cli import run_entry
from mtp_research.config.schema import EvalConfig, TrainConfig


def train() -> int:
    """`train.py`: heads, a small target, cached hidden states or a matrix, by `task`."""
    return run_entry(TrainConfig, run_training)


def evaluate() -> int:
    """`eval.py`: decode the prompts under each condition, or price faulty slots, by `task`."""
    return run_entry(EvalConfig, run_evaluation)


def run_training(config: TrainConfig, output_dir: Path) -> None:
    """Train, then print one JSON line."""
    if config.task == "target":
        from mtp_research.pretrain.pretrain import pretrain_target

        result = pretrain_target(config.model, output_dir=output_dir, seed=config.seed)
    elif config.task == "cache":
        from mtp_research.training.setup import cache_hidden

        result = cache_hidden(config)
    elif config.task == "matrix":
        from mtp_research.studies.policy_matrix import run_policy_matrix

        result = run_policy_matrix(config, output_dir)
    else:
        from mtp_research.studies.training_probe import decode_probe
        from mtp_research.training.loop import train_heads

        result = train_heads(config, output_dir, decode_eval=decode_probe(config))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result))


def run_evaluation(config: EvalConfig, output_dir: Path) -> None:
    """Evaluate; the last printed line is one JSON object."""
    if config.task == "fault_price":
        from mtp_research.studies.fault_price import price_faults

        result = price_faults(config, output_dir)
    else:
        from mtp_research.evaluation.run.evaluate import evaluate as measure

        result = measure(config, output_dir)
    print(json.dumps(result))
