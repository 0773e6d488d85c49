"""The jobs of tools/gpu_study.py: for each model, what prepares and what is timed."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HEADS = ("chain_n3", "chain_n1", "ttt_n1")  # priced; the speed sweep takes the first
NUM_PRICED_REQUESTS = 120  # all prompts at a time: steps are host-bound
# Trained in bfloat16, in which transformers has a grouped product of experts, decoded in float32,
# in which the loop equals the walk. On a GPU the walk of target_roll goes row by row: left out.
MATRIX = (
    "matrix.max_differing_share=0.1",
    "model.dtype=bfloat16",
    "matrix.dtype=float32",
    "trainer.max_steps=250",
    "trainer.batch_size=32",
    "matrix.policies=[training,eagle]",
    "matrix.unrolls=[chain,ttt]",
    "matrix.num_mtp_modules=[3,1]",
    "matrix.seeds=[0]",
    "matrix.num_workers=3",
)
# Conversations of the corpus whose questions the target answers.
QUESTIONS = ("arith", "math", "code_instruct", "howto", "qa", "dialog", "roleplay")
_DOMAINS = "math arith python code_instruct howto prose docs qa roleplay rag"  # left out of a trial
TINY = {
    "target": (
        *(
            f"model.pretrain.{word}"
            for word in ("max_steps=2", "warmup_steps=0", "compile=false", "batch_size=2")
        ),
        "model.pretrain.seq_len=64",
        *(f"model.pretrain.domain_weights.{name}=0" for name in _DOMAINS.split()),
    ),
    "answers": (
        *("--self-chat", "12", "--self-text", "12", "--max-prompts", "4"),
        *("--max-new-tokens", "16"),
    ),
    "matrix": (
        *("trainer.max_steps=2", "trainer.batch_size=2", "data.eval_documents=6"),
        *("data.max_documents=24", "matrix.num_prompts=4", "matrix.max_new_tokens=12"),
    ),
    "prices": ("prompts.max_prompts=4", "sampling.max_new_tokens=12", "spec.k=3"),
    "speed": ("--tiny",),
}


class Job(NamedTuple):
    """A command. Those of `needs` must have ended, well or not, before it begins."""

    name: str
    words: list[str]
    needs: tuple[str, ...] = ()
    nice: int = 0
    is_timed: bool = False
    model: int = 0  # whose it is; models share the GPUs out


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Every job, those of one model behind each other; the timed ones last."""
    prepared: list[Job] = []
    for number, (name, seconds) in enumerate(args.models):
        prepared += [job._replace(model=number) for job in _prepare(name, seconds, args)]
    needs = tuple(job.name for job in prepared)
    timed: list[Job] = []
    for number, (name, _) in enumerate(args.models):
        turns = ["--turns", str(args.work / "turns")]  # of all models: one part decodes at a time
        words = _sweep(name, args, "speed", [*turns, *_tiny("speed", args)])
        words += [f"model.path={_target(name, args)}", f"spec.head={_head(name, HEADS[0], args)}"]
        timed.append(Job(f"speed_{name}", words, needs, is_timed=True, model=number))
    return prepared + timed


def _prepare(name: str, seconds: int | None, args: argparse.Namespace) -> list[Job]:
    work, jobs = args.work / name, []
    if args.engine == "h200":
        words = ["tools/untrained.py", "--model", name, "--out", str(work / "untrained")]
        jobs.append(Job(f"untrained_{name}", words))
        words = _sweep(name, args, "compiled", ["--compile-only"])
        words += [f"model.path={work}/untrained/target", f"spec.head={work}/untrained/head"]
        jobs.append(Job(f"compile_{name}", words, (f"untrained_{name}",), nice=10))
    if args.target is None:
        words = ["train.py", "task=target", f"model={name}", f"output_dir={work}/target"]
        words += [f"model.pretrain.max_seconds={seconds}"] if seconds else []
        words += [f"model.pretrain.corpus_dir={args.corpus}"] if args.corpus else []
        jobs.append(Job(f"target_{name}", [*words, *_tiny("target", args)]))
    if args.answers is None:
        words = ["-m", "mtp_research.studies.regenerate", "--temperature", "0"]
        words += ["--target", _target(name, args), "--output", _answers(name, args)]
        # All at once: while requests join, steps are not the captured ones.
        words += ["--batch", "4096", "--max-model-len", "512"]
        words += ["--graphs"] if args.engine == "h200" else []
        words += ["--self-chat", "700", "--self-text", "700", "--max-prompts", "300"]
        for source in QUESTIONS if args.corpus else ():
            words += ["--source", f"{args.corpus}/{source}.train.jsonl.xz"]
        needs = (f"target_{name}",)
        jobs.append(Job(f"answers_{name}", [*words, *_tiny("answers", args)], needs))
    words = ["train.py", "experiment=policy_matrix", *_trained(name, args)]
    words += [f"data.path={_answers(name, args)}", f"output_dir={work}/matrix", *MATRIX]
    needs = (f"target_{name}", f"answers_{name}")
    jobs.append(Job(f"matrix_{name}", [*words, *args.matrix_words, *_tiny("matrix", args)], needs))
    if args.no_prices:
        return jobs
    for head in HEADS:
        words = ["eval.py", "experiment=fault_price", *_trained(name, args)]
        words += [f"spec.head=[{_head(name, head, args)}]", "model.dtype=float32"]
        words += [f"engine.max_num_requests={NUM_PRICED_REQUESTS}", f"output_dir={work}/{head}"]
        words += ["engine.max_num_batched_tokens=2048", *_tiny("prices", args)]
        jobs.append(Job(f"price_{name}_{head}", words, (f"matrix_{name}",), nice=3))
    words = ["-m", "mtp_research.evaluation.fault_table", *(f"{work}/{head}" for head in HEADS)]
    needs = tuple(f"price_{name}_{head}" for head in HEADS)
    jobs.append(Job(f"prices_{name}", [*words, "--out", f"{work}/prices"], needs))
    return jobs


def _sweep(name: str, args: argparse.Namespace, folder: str, flags: Sequence[str]) -> list[str]:
    """The sweep up to its first overrides; all flags stand before them."""
    words = ["tools/gpu_batch_sweep.py", "--out", str(args.work / name / folder)]
    words += ["--workers", str(args.workers), *flags]
    return [*words, f"engine={args.engine}", f"model={name}"]


def _trained(name: str, args: argparse.Namespace) -> list[str]:
    return [f"model={name}", f"model.path={_target(name, args)}"]


def _target(name: str, args: argparse.Namespace) -> str:
    return str(args.target or args.work / name / "target" / "target")


def _answers(name: str, args: argparse.Namespace) -> str:
    return str(args.answers or args.work / name / "answers.jsonl")


def _head(name: str, head: str, args: argparse.Namespace) -> Path:
    return args.work / name / "matrix" / f"{head}_s0" / "head"


def _tiny(kind: str, args: argparse.Namespace) -> Sequence[str]:
    return TINY[kind] if args.tiny else ()
