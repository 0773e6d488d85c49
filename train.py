"""Train MTP heads on a frozen target, or (`task=target`) the small target itself.

python train.py                             heads for the shipped lab target
python train.py task=target model=lab_tiny  the lab target from text
python train.py --help                      groups, keys and legal values
"""

import json
import sys
from pathlib import Path

from mtp_research.cli import run_entry
from mtp_research.config import TrainConfig


def run(config: TrainConfig, output_dir: Path) -> None:
    """Train, then print one JSON line; torch is imported here so that --help does without."""
    if config.task == "target":
        from mtp_research.training.pretrain import pretrain_target

        result = pretrain_target(config.model, output_dir=output_dir, seed=config.seed)
    else:
        from mtp_research.training.loop import train_heads

        result = train_heads(config, output_dir)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_entry(TrainConfig, run))
