"""Train MTP heads on a frozen target, or (`task=target`) the small target itself.

python train.py                             heads for the shipped lab target
python train.py task=target model=lab_tiny  the lab target from text
python train.py task=cache data=cached      the target's hidden states, for heads to train from
python train.py --help                      groups, keys and legal values
"""

import json
import os
import sys
from pathlib import Path

from mtp_research.cli import run_entry
from mtp_research.config import TrainConfig


def run(config: TrainConfig, output_dir: Path) -> None:
    """Train, then print one JSON line; torch is imported here so that --help does without."""
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


if __name__ == "__main__":
    sys.exit(run_entry(TrainConfig, run))
