"""Drafts against a target's FP8 copy: what acceptance the same heads have, and heads trained on it.

    python -m mtp_research.studies.fp8_acceptance --out OUT       lab_deep, 153 prompts, 200 steps
    python -m mtp_research.studies.fp8_acceptance --out OUT --model lab_tiny --prompts 8 --steps 4

Copies the target with its matrices in FP8 (e4m3; a scale per 128 x 128 block, or per row), the
largest number of each at 448. The shipped heads are trained on for as many steps beside either
form, on the same text, and all three are evaluated against both. Written to `fp8_acceptance.json`:
acceptance lengths with 95 % intervals, differences paired by prompt, and how many texts the FP8
copy changes. Runs on a CPU, where products are of the very numbers that the FP8 ones stand for.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from mtp_research.evaluation.report.stored import RESULTS_FILE, recompute
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.outcome import ConditionResult
from mtp_research.evaluation.stats.statistics import acceptance_statistics, paired_differences
from mtp_research.kernels.products.scaled_weights import FP8
from mtp_research.runtime.files import write_tensors
from mtp_research.runtime.options import OptionParser
from mtp_research.runtime.provenance import REPOSITORY_ROOT as ROOT

LENGTH = "acceptance_length_micro"
BLOCK, LARGEST = 128, 448.0
SETTINGS = {
    "blocks": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    "rows": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            }
        },
    },
}
Tensors = Mapping[str, torch.Tensor]


def main() -> int:
    """Copy, train, evaluate, compare."""
    parser = OptionParser(usage="python -m mtp_research.studies.fp8_acceptance --out FOLDER")
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--model", default="lab_deep", help="of conf/model, with shipped chain_n3 heads")
    add("--layout", default="blocks", choices=list(SETTINGS))
    add("--prompts", type=int, default=153)
    add("--steps", type=int, default=200, help="that heads are trained on")
    args = parser.parse_args()
    source = ROOT / "assets" / args.model
    folders = {"bf16": source / "target", "fp8": args.out / "target_fp8"}
    error = copy_as_fp8(folders["bf16"], folders["fp8"], layout=args.layout)
    heads = {"shipped": source / "heads" / "chain_n3"}
    forms = {form: words_of(folder, args, form=form) for form, folder in folders.items()}
    for form, words in forms.items():
        run = args.out / f"train_{form}"
        more = [f"head.path={heads['shipped']}", f"trainer.max_steps={args.steps}"]
        more += ["trainer.learning_rate=1e-3", f"trainer.eval_every={args.steps}"]
        start("train.py", *words, *more, "head=chain_n3", "objective=chain", f"output_dir={run}")
        heads[f"trained_on_{form}"] = run / "head"
    found: dict[tuple[str, str], ConditionResult] = {}
    plain: dict[str, ConditionResult] = {}
    for form, words in forms.items():
        for name, head in heads.items():
            run = args.out / f"eval_{form}_{name}"
            more = ["spec.k=3", "spec.policy=training", f"spec.head={head}"]
            more += [f"prompts.max_prompts={args.prompts}", "timing.passes=1", f"output_dir={run}"]
            start("eval.py", *words, *more)
            conditions = recompute(run / RESULTS_FILE).conditions
            plain[form], found[form, name] = conditions[0], conditions[-1]
    report = {
        "model": args.model, "layout": args.layout, "steps": args.steps, "prompts": args.prompts,
        "relative_error_of_weights": error, **compared(found, plain),
    }  # fmt: skip
    (args.out / "fp8_acceptance.json").write_text(json.dumps(report, indent=1))
    for row in report["lengths"] + report["differences"]:
        sys.stdout.write("  ".join(str(value) for value in row.values()) + "\n")
    sys.stdout.write(f"{report['equal_texts']} of {args.prompts} texts are equal on both forms\n")
    return 0


def copy_as_fp8(source: Path, folder: Path, *, layout: str) -> float:
    """Store the matrices of decoder layers as FP8; gives the mean relative error of a matrix."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    file, errors = folder / "model.safetensors", []
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        is_matrix = ".layers." in name and name.endswith("proj.weight") and tensor.dim() == 2
        if not is_matrix:
            stored[name] = tensor
            continue
        numbers, scale, meant = quantise(tensor.float(), layout=layout)
        stored[name] = numbers
        stored[f"{name}_scale_inv" if layout == "blocks" else f"{name}_scale"] = scale
        errors.append(float((meant - tensor.float()).norm() / tensor.float().norm()))
    write_tensors(stored, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = SETTINGS[layout]
    (folder / "config.json").write_text(json.dumps(config))
    return sum(errors) / len(errors)


def quantise(weight: torch.Tensor, *, layout: str) -> tuple[torch.Tensor, ...]:
    """FP8 numbers of a matrix, their scales, and what both stand for."""
    rows, columns = weight.shape
    height, width = (BLOCK, BLOCK) if layout == "blocks" else (1, columns)
    padded = torch.zeros(-(-rows // height) * height, -(-columns // width) * width)
    padded[:rows, :columns] = weight.abs()
    largest = padded.view(padded.shape[0] // height, height, -1, width).amax((1, 3))
    scale = largest.clamp(min=1e-12) / LARGEST
    full = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
    numbers = (weight / full).to(FP8)
    return numbers, scale, numbers.float() * full


def words_of(folder: Path, args: argparse.Namespace, *, form: str) -> list[str]:
    """The target of a command."""
    words = [f"model={args.model}", f"model.path={folder}"]
    return [*words, "model.keep_fp8=true"] if form == "fp8" else words


def start(script: str, *words: str) -> None:
    """Run a command of the project; its failure is ours."""
    subprocess.run([sys.executable, str(ROOT / script), *words], check=True, cwd=ROOT)


def compared(
    found: Mapping[tuple[str, str], ConditionResult], plain: Mapping[str, ConditionResult]
) -> dict:
    """Lengths, paired differences, and texts that both forms give."""
    lengths = []
    for (form, head), one in found.items():
        statistics = acceptance_statistics(one.records, num_speculative_tokens=3)
        length: Estimate = getattr(statistics, LENGTH)
        lengths.append({"target": form, "head": head, "lossless": one.lossless} | length._asdict())
    pairs = [
        (("fp8", "shipped"), ("bf16", "shipped")),
        (("fp8", "trained_on_fp8"), ("fp8", "trained_on_bf16")),
        (("bf16", "trained_on_fp8"), ("bf16", "trained_on_bf16")),
    ]
    differences = []
    for ours, theirs in pairs:
        records = (found[ours].records, found[theirs].records)
        gap = paired_differences(*records, num_speculative_tokens=3)[LENGTH]
        names = {"of": " ".join(reversed(ours)), "minus": " ".join(reversed(theirs))}
        differences.append(names | gap._asdict())
    texts = [{r.request_id: r.output_token_ids for r in one.records} for one in plain.values()]
    equal = sum(texts[0][name] == text for name, text in texts[1].items())
    return {"lengths": lengths, "differences": differences, "equal_texts": equal}


if __name__ == "__main__":
    sys.exit(main())
