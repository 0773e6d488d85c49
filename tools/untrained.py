"""A lab target and heads with random weights, so that steps compile before trained ones exist.

    python tools/untrained.py --model lab_base --num-mtp-modules 3 --out /tmp/untrained
    python tools/gpu_batch_sweep.py --out /tmp/compiled --compile-only \
        engine=h200 model=lab_base model.path=/tmp/untrained/target spec.head=/tmp/untrained/head

Inductor's disk cache goes by code, shapes and settings and not by weights, so that the sweep of the
trained models finds its steps compiled. The tokenizer is the one of assets/lab_tiny: prompts become
valid ids of another model, which is all that compiling needs.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from mtp_research.cli import compose_config
from mtp_research.config import TrainConfig
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.heads.weights import save_heads
from mtp_research.models.fresh import new_target
from mtp_research.models.target import load_target

TOKENIZER = ROOT / "assets" / "lab_tiny" / "target"


def main(argv: list[str] | None = None) -> int:
    """Write `OUT/target` and `OUT/head`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="of conf/model, one with an architecture")
    parser.add_argument("--num-mtp-modules", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", help="in which the trained one is stored")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    model = compose_config(TrainConfig, ["task=target", f"model={args.model}"]).model
    sizes = dict(model.architecture, vocab_size=model.pretrain.vocab_size)
    dtype = getattr(torch, args.dtype)
    device = torch.device("cpu")
    made = new_target(model.family, sizes, dtype=dtype, device=device, seed=0)
    made.save_pretrained(args.out / "target")
    for file in TOKENIZER.glob("tokenizer*"):
        shutil.copyfile(file, args.out / "target" / file.name)
    target = load_target(args.out / "target", device="cpu")
    heads = MTPHeads(target, spec=HeadSpec(num_mtp_modules=args.num_mtp_modules))
    save_heads(heads, args.out / "head", dtype=dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
