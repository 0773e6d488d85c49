"""The study of docs/results.md on one GPU: target, answers, heads x policies, fault prices, speed.

    python tools/gpu_study.py --model lab_base --corpus DIR --out OUT --engine h200
    python tools/gpu_study.py --model lab_tiny --out OUT --tiny      every stage, small, on a CPU

Stages run one after the other, each as a command that is printed and that can be run by hand. The
same call goes on after a stop: a stage whose result exists is left out, and commands resume.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HEADS = ("chain_n3", "chain_n1", "ttt_n1")  # priced; the first one is timed
# Conversations of the corpus whose questions the target answers.
QUESTIONS = ("arith", "math", "code_instruct", "howto", "qa", "dialog", "roleplay")
# Trained in bfloat16, decoded in float32, in which the loop's rounds are those of the walk.
MATRIX = [
    *("model.dtype=bfloat16", "matrix.dtype=float32", "matrix.max_differing_share=0.1"),
    *("trainer.max_steps=250", "trainer.batch_size=32", "matrix.policies=[training,eagle]"),
    *("matrix.unrolls=[chain,ttt]", "matrix.num_mtp_modules=[3,1]", "matrix.seeds=[0]"),
]
NUM_PROMPTS = {1: 16, 8: 32, 32: 64, 64: 128}  # by batch size
# With `--tiny`: so little of everything that a CPU runs all stages in minutes.
_UNUSED = ["math", "arith", "python", "code_instruct", "howto", "prose", "docs", "qa"]
_UNUSED += ["roleplay", "rag"]
TINY = {
    "target": [
        *(f"model.pretrain.{word}" for word in ("max_steps=2", "warmup_steps=0", "batch_size=2")),
        *("model.pretrain.compile=false", "model.pretrain.seq_len=64"),
        *(f"model.pretrain.domain_weights.{name}=0" for name in _UNUSED),
    ],
    "answers": ["--self-chat=12", "--self-text=12", "--max-prompts=4", "--max-new-tokens=16"],
    "matrix": [
        *("trainer.max_steps=2", "trainer.batch_size=2", "data.eval_documents=6"),
        *("data.max_documents=24", "matrix.num_prompts=4", "matrix.max_new_tokens=12"),
    ],
    "prices": ["prompts.max_prompts=4", "sampling.max_new_tokens=12", "spec.k=3"],
    "speed": ["prompts.max_prompts=4", "sampling.max_new_tokens=6", "timing.passes=2"],
}


class Stage(NamedTuple):
    """A command, and the file that says that it has ended well."""

    name: str
    words: list[str]
    result: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages that have no result yet; returns the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="name in conf/model, such as lab_base")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", help="folder of training texts for the target")
    parser.add_argument("--seconds", type=int, help="time limit of the target's training")
    parser.add_argument("--engine", default="auto", help="of the timed stage; h200 on a GPU")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--stages", nargs="+", help="of target answers matrix prices speed")
    options = parser.parse_args(argv)
    for stage in stages_of(options):
        if options.stages and stage.name.split("_")[0] not in options.stages:
            continue
        if stage.result.is_file():
            print(f"{stage.name}: there already ({stage.result})", flush=True)
            continue
        print(f"{stage.name}: {shlex.join(['python', *stage.words])}", flush=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        code = subprocess.run([sys.executable, *stage.words], env=environment, check=False)
        if code.returncode:
            return code.returncode if code.returncode > 0 else 128 - code.returncode
    return 0


def stages_of(options: argparse.Namespace) -> list[Stage]:
    """Every stage in order; paths of earlier results stand in the words of later ones."""
    out, model = options.out.resolve(), f"model={options.model}"
    train, evaluate = str(ROOT / "train.py"), str(ROOT / "eval.py")
    target, answers = out / "target" / "target", out / "answers.jsonl"

    def tiny(name: str) -> list[str]:
        return TINY[name] if options.tiny else []

    words = [train, "task=target", model, f"output_dir={out}/target"]
    words += [f"model.pretrain.max_seconds={options.seconds}"] if options.seconds else []
    words += [f"model.pretrain.corpus_dir={options.corpus}"] if options.corpus else []
    stages = [Stage("target", [*words, *tiny("target")], target / "config.json")]

    words = ["-m", "mtp_research", "regenerate", "--temperature", "0"]
    words += ["--target", str(target), "--output", str(answers)]
    words += ["--self-chat", "700", "--self-text", "700", "--max-prompts", "300"]
    for name in QUESTIONS if options.corpus else ():
        words += ["--source", f"{options.corpus}/{name}.train.jsonl.xz"]
    stages.append(Stage("answers", [*words, *tiny("answers")], answers))

    trained = [model, f"model.path={target}"]
    words = [train, "experiment=policy_matrix", *trained, f"data.path={answers}", *MATRIX]
    if options.corpus:  # questions that neither the target nor the heads have seen
        files = [f"{options.corpus}/{name}.dev.jsonl.xz" for name in QUESTIONS]
        words.append(f"matrix.prompts=[{','.join(files)}]")
    words += [f"output_dir={out}/matrix", *tiny("matrix")]
    stages.append(Stage("matrix", words, out / "matrix" / "matrix.json"))

    heads = [out / "matrix" / f"{name}_s0" / "head" for name in HEADS]
    words = [evaluate, "experiment=fault_price", *trained, "model.dtype=float32"]
    words += [f"spec.head=[{','.join(map(str, heads))}]", f"output_dir={out}/prices"]
    words += ["engine.max_num_requests=120", "engine.max_num_batched_tokens=2048"]
    stages.append(Stage("prices", [*words, *tiny("prices")], out / "prices" / "fault_price.json"))

    for batch, num_prompts in NUM_PROMPTS.items():
        folder = out / "speed" / f"batch_{batch}"
        words = [evaluate, "experiment=batch_sweep", *trained, f"spec.head={heads[0]}"]
        words += [f"engine={options.engine}", "spec.k=[1,2,3,4,5]", "timing.passes=8"]
        words += [f"engine.max_num_requests=[{batch}]", f"prompts.max_prompts={num_prompts}"]
        words += ["sampling.max_new_tokens=128", f"output_dir={folder}", *tiny("speed")]
        stages.append(Stage(f"speed_{batch}", words, folder / "results.json"))
    return stages


if __name__ == "__main__":
    sys.exit(main())
