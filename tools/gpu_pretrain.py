"""Train lab targets on a GPU machine that lacks Hydra: several at a time, one process each.

    python tools/gpu_pretrain.py --corpus .carry/corpus --out $OUT lab_tiny lab_small

Where Hydra is installed, `python train.py task=target model=NAME` does the same. Reads
`conf/model/NAME.yaml`; `--set key=value` overrides a key of its `pretrain` block.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> int:
    """Start a process per name and wait for all; the worst exit status is returned."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--here", action="store_true", help="run in this process (one name)")
    args = parser.parse_args()
    if args.here:
        return train(args)
    options = [word for word in sys.argv[1:] if word not in args.names]
    processes = []
    for name in args.names:
        log = (args.out / f"{name}.log").open("w")
        command = [sys.executable, "-u", __file__, "--here", *options, name]
        processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        time.sleep(1)
    return max(process.wait() for process in processes)


def train(args: argparse.Namespace) -> int:
    """Train one target into /tmp/targets/NAME."""
    from mtp_research.config.schema import ModelConfig
    from mtp_research.config.training_schema import PretrainConfig
    from mtp_research.pretrain.pretrain import pretrain_target

    fields = yaml.safe_load((ROOT / "conf" / "model" / f"{args.names[0]}.yaml").read_text())
    pretrain = fields.pop("pretrain") | {"corpus_dir": str(Path(args.corpus).resolve())}
    for item in args.set:
        key, _, value = item.partition("=")
        pretrain[key] = yaml.safe_load(value)
    model = ModelConfig(**fields, pretrain=PretrainConfig(**pretrain))
    pretrain_target(model, output_dir=Path("/tmp/targets") / args.names[0], seed=args.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
