"""One GPU call: a lab target, its text, heads of three seeds, the matrix, the batch sweep, prices.

    python tools/gpu_study.py --out $OUT --model lab_base --engine h200 \
        --corpus .carry/corpus --wheels .carry/wheels
    python tools/gpu_study.py --out /tmp/out --target assets/lab_tiny/target \
        --answers assets/lab_tiny/regenerated.jsonl.xz --limit-s 300 --tiny      a CPU, to try it

Stages run one after the other, each in its own process: target, answers, matrix, batch, prices.
`--target` and `--answers` take the place of the first two. A stage has until the end of its own
box and those before it, so that what one leaves over the next may use; at its end it is told to
stop, and the next stage takes what is there. The same command with the same `--work` goes on: a
finished stage is not run again, and a stopped one continues with its files, with the boxes of the
finished ones added to its own. Small results go to `--out` after every stage: at most eight files,
`study.json` with the time and exit code of every stage among them. `batch.tar` holds one results
folder for each part of tools/gpu_batch_sweep.py that was finished.

`--wheels` holds packages that the machine lacks (hydra-core, omegaconf, antlr4): no index is asked.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Seconds of each stage on one H200: more than one call. Measured with lab_base and lab_small side
# by side: matrix 263; prices had 23 and 31 of 42 conditions after 139.
BOXES = {"target": 170, "answers": 40, "matrix": 270, "batch": 330, "prices": 280}
GRACE_S = 15  # between asking a stage to stop and killing it; the trainer saves in between
# Trained in bfloat16, in which transformers has a grouped product of experts, decoded in float32,
# in which the loop equals the walk. In float32 the 18 heads of lab_base were not done in 650 s.
# The walk of target_roll goes row by row, which a GPU does slowly: --policies adds it.
MATRIX = [
    "matrix.max_differing_share=0.1",
    "model.dtype=bfloat16",
    "matrix.dtype=float32",
    "trainer.max_steps=250",
    "trainer.batch_size=32",
    "matrix.policies=[training,eagle]",
    "matrix.num_mtp_modules=[3,1]",  # the batch sweep wants the first one
]
# Conversations of the corpus whose questions the target answers.
QUESTIONS = ("arith", "math", "code_instruct", "howto", "qa", "dialog", "roleplay")
_DOMAINS = "math arith python code_instruct howto prose docs qa roleplay rag"  # left out of a trial
TINY = {
    "target": [
        f"model.pretrain.{word}"
        for word in ("max_steps=2", "warmup_steps=0", "compile=false", "batch_size=2", "seq_len=64")
    ]
    + [f"model.pretrain.domain_weights.{name}=0" for name in _DOMAINS.split()],
    "answers": [
        "--self-chat",
        "12",
        "--self-text",
        "12",
        "--max-prompts",
        "4",
        "--max-new-tokens",
        "16",
    ],
    "matrix": [
        "trainer.max_steps=2",
        "trainer.batch_size=2",
        "data.eval_documents=6",
        "data.max_documents=24",
        *("matrix.seeds=[0,1]", "matrix.num_prompts=4", "matrix.max_new_tokens=12"),
    ],
    "prices": ["prompts.max_prompts=4", "sampling.max_new_tokens=12", "spec.k=3"],
    "batch": ["--tiny"],
}


class Study:
    """Time, folders and what became of each stage."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Start the clock."""
        self.args = args
        self.work: Path = args.work
        self.scale = args.limit_s / sum(BOXES[stage] for stage in args.stages)
        self.started = time.perf_counter()
        self.end_s = 0.0  # of the boxes so far
        self.stages: dict[str, dict[str, object]] = {}

    def run(self, stage: str, words: list[str]) -> None:
        """Run one stage until it ends or its box does, if it is asked for."""
        if stage not in self.args.stages:
            return
        self.end_s += BOXES[stage] * self.scale
        mark, began = self.work / f"{stage}.done", time.perf_counter()
        if mark.is_file():
            self.stages[stage] = {"code": 0, "seconds": 0.0, "note": "done before"}
            return
        words = [*words, *(TINY[stage] if self.args.tiny else [])]
        left = self.end_s - (began - self.started)
        with (self.work / "log.txt").open("a") as log:
            print(f"== {stage}, {left:.0f} s: {' '.join(words)}", file=log, flush=True)
            process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=log, stderr=log)
            code = wait(process, seconds=max(left, 1.0))
        if code == 0:
            mark.touch()
        seconds = round(time.perf_counter() - began, 1)
        self.stages[stage] = {"code": code, "seconds": seconds, "command": " ".join(words)}
        collect(self)
        print(f"{stage}: exit {code}, {seconds} s of {left:.0f}", flush=True)


def main() -> int:
    """Run the stages; the exit code is 1 if any of them did not end well."""
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    study = Study(args)
    if args.wheels is not None:
        pip = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([sys.executable, *pip, *map(str, args.wheels.glob("*.whl"))], check=True)
    target, answers = prepare(study)
    if not Path(target, "config.json").exists() or not Path(answers).exists():
        collect(study)
        print("error: no target or no text of it; see log.txt", file=sys.stderr)
        return 1
    model = [f"model={args.model}", f"model.path={target}"]
    matrix = args.work / "matrix"
    words = [f"data.path={answers}", f"output_dir={matrix}", *MATRIX]
    words += [f"matrix.policies=[{args.policies}]"] if args.policies else []
    words += [f"matrix.num_workers={args.workers}"]
    study.run("matrix", ["train.py", "experiment=policy_matrix", *model, *words])
    names = ("chain_n3_s0", "chain_n1_s0", "ttt_n1_s0")
    heads = [matrix / name / "head" for name in names]
    heads = [str(head) for head in heads if (head / "head.json").is_file()]
    if heads:
        words = ["--out", str(args.work / "batch"), "--workers", str(args.workers)]
        words += ["--turns", str(args.turns or args.work / "turns"), *model]
        words += [f"spec.head={heads[0]}", f"engine={args.engine}", *args.sweep_words]
        study.run("batch", ["tools/gpu_batch_sweep.py", *words])
        listed = f"spec.head=[{','.join(heads)}]"
        words = [listed, "model.dtype=float32", f"output_dir={args.work / 'prices'}"]
        # All prompts at a time: steps are host-bound.
        words += ["engine.max_num_requests=120", "engine.max_num_batched_tokens=2048"]
        study.run("prices", ["eval.py", "experiment=fault_price", *model, *words])
    collect(study)
    print_tables(args.out)
    codes = {stage: facts["code"] for stage, facts in study.stages.items()}
    print(json.dumps({"stages": codes, "out": str(args.out)}))
    return int(any(codes.values()) or not heads)


def prepare(study: Study) -> tuple[str, str]:
    """Target and answers: those given, or made here."""
    args = study.args
    target, answers = args.target, args.answers
    if target is None:
        seconds = max(BOXES["target"] * study.scale - args.margin_s, 5)
        words = ["train.py", "task=target", f"model={args.model}"]
        words += [f"model.pretrain.max_seconds={seconds:.0f}"]
        words += [f"output_dir={args.work / 'target'}"]
        words += [f"model.pretrain.corpus_dir={args.corpus}"] if args.corpus else []
        study.run("target", words)
        target = args.work / "target" / "target"
    if answers is None:
        answers = args.work / "answers.jsonl"
        words = ["-m", "mtp_research.evaluation.regenerate", "--target", str(target)]
        # All at once: while requests join, steps are not the captured ones.
        words += ["--output", str(answers), "--temperature", "0", "--batch", "4096"]
        words += ["--max-model-len", "512", *(["--graphs"] if args.engine == "h200" else [])]
        words += ["--self-chat", "700", "--self-text", "700", "--max-prompts", "300"]
        for name in QUESTIONS if args.corpus else ():
            words += ["--source", f"{args.corpus}/{name}.train.jsonl.xz"]
        if Path(target, "config.json").exists():
            study.run("answers", words)
    return str(target), str(answers)


def wait(process: subprocess.Popen[bytes], *, seconds: float) -> int:
    """Exit code; asks the process to stop after `seconds`, then makes it."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def collect(study: Study) -> None:
    """Copy the results that there are, and write what each stage took."""
    work, out = study.work, study.args.out
    pairs = {
        "matrix/matrix.json": "matrix.json",
        "prices/fault_price.json": "fault_price.json",
        "log.txt": "log.txt",
    }
    for source, name in pairs.items():
        if (work / source).is_file():
            shutil.copyfile(work / source, out / name)
    done = sorted((work / "batch").glob("*/results.json"))
    if done:
        with tarfile.open(out / "batch.tar", "w") as archive:
            for path in (file for one in done for file in (one, one.with_name("table.txt"))):
                archive.add(path, path.relative_to(work))
    facts = {"model": study.args.model, "argv": sys.argv[1:], "stages": study.stages}
    (out / "study.json").write_text(json.dumps(facts, indent=1) + "\n")


def print_tables(out: Path) -> None:
    """Compute the tables again from the results; those of an unfinished matrix may not exist."""
    tables = {"matrix": "seed_figures", "fault_price": "fault_table"}
    for name, module in tables.items():
        if (out / f"{name}.json").is_file():
            words = ["-m", f"mtp_research.evaluation.{module}", str(out)]
            done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True)
            (out / f"{name}.md").write_bytes(done.stdout)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="small results")
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu_study"), help="everything else")
    parser.add_argument("--model", default="lab_tiny", help="of conf/model")
    parser.add_argument("--target", type=Path, help="a trained target, in place of training one")
    parser.add_argument("--answers", type=Path, help="its own text, in place of making some")
    parser.add_argument("--corpus", help="text for the target, and questions for its answers")
    parser.add_argument("--wheels", type=Path, help="folder of packages to install first")
    parser.add_argument("--engine", default="auto", help="of conf/engine, for the batch sweep")
    parser.add_argument("--policies", help="of the matrix, such as training,eagle,target_roll")
    parser.add_argument("--stages", nargs="+", choices=list(BOXES), default=list(BOXES))
    parser.add_argument("--workers", type=int, default=1, help="heads, and parts, at a time")
    parser.add_argument(
        "--sweep-words", nargs="*", default=[], help="overrides of every part of the batch sweep"
    )
    parser.add_argument("--turns", type=Path, help="lock file that batch sweeps of one GPU share")
    parser.add_argument("--limit-s", type=float, default=sum(BOXES.values()))
    parser.add_argument(
        "--margin-s",
        type=float,
        default=50,
        help="of the target's box for what is not training; 28 s were measured on an H200",
    )
    parser.add_argument("--tiny", action="store_true", help="limits for a trial on a CPU")
    args = parser.parse_args()
    given = {"target": args.target, "answers": args.answers}  # take no time
    args.stages = [stage for stage in args.stages if given.get(stage) is None]
    return args


if __name__ == "__main__":
    sys.exit(main())
