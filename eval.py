"""Decode the prompts with each hidden-state policy and with K = 0; compare speed and acceptance.

python eval.py spec.k=3              both policies on the shipped prompts
python eval.py spec.head=RUN/head    heads that train.py wrote to the folder RUN
python eval.py --help                groups, keys and legal values
"""

import json
import sys
from pathlib import Path

from mtp_research.cli import run_entry
from mtp_research.config import EvalConfig


def run(config: EvalConfig, output_dir: Path) -> None:
    """Evaluate; the last printed line is one JSON object. Imports torch, which --help does not."""
    if config.task == "fault_price":
        from mtp_research.studies.fault_price import price_faults

        result = price_faults(config, output_dir)
    else:
        from mtp_research.evaluation.run.evaluate import evaluate

        result = evaluate(config, output_dir)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_entry(EvalConfig, run))
