"""Training text for heads: the target's own answers, through our decode loop.

    python -m mtp_research.evaluation.regenerate --target assets/lab_tiny/target \
        --output answers.jsonl --source ../shared/data/corpus/arith.train.jsonl.xz \
        --max-prompts 800 --self-chat 2000 --self-text 800 --temperature 0

Heads trained on anything but the target's own output learn a distribution they are never asked for.
Questions come from data sets (`data.questions` lists the forms), or from the target itself:
`--self-chat` lets it invent a user message and then answers it, `--self-text` lets it begin a
document and then goes on. A line holds token ids, so that encoding again cannot change the
trajectory. Killed runs resume: ids that the output already has are not made again, and
`OUTPUT.settings.json` keeps a run with other settings from mixing its answers in.

Lives in `evaluation` because it drives the decode loop, which `data` and `training` must not
import.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from mtp_research.config import EngineConfig
from mtp_research.data.questions import Question, read_questions
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.evaluation.answers import answer, write_xz
from mtp_research.evaluation.tasks import (
    SpecialTokenizer,
    question_tasks,
    self_chat_tasks,
    self_text_tasks,
)
from mtp_research.models.fingerprint import target_hashes
from mtp_research.models.target import Target, load_target, load_tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the module; see its docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m mtp_research.evaluation.regenerate",
        description="Answers of the target as training text.",
    )
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file, appended to")
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        help="questions: a JSONL file, or a folder or name that `datasets` reads; may be repeated",
    )
    parser.add_argument("--field", help="of the conversation in a row; left out: the first known")
    parser.add_argument("--split", default="train", help="of a `datasets` source")
    parser.add_argument("--max-prompts", type=int, default=None, help="per source")
    parser.add_argument(
        "--self-chat", type=int, default=0, help="user messages that the target invents"
    )
    parser.add_argument("--self-text", type=int, default=0, help="documents that the target begins")
    parser.add_argument("--temperature", type=float, default=0.6, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=0.95, help="not read at temperature 0")
    parser.add_argument("--top-k", type=int, default=20, help="not read at temperature 0")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=32, help="requests decoded at once")
    parser.add_argument(
        "--max-model-len",
        type=int,
        help="tokens of prompt and answer; default: what the target can",
    )
    parser.add_argument(
        "--graphs", action="store_true", help="replay decode steps as CUDA graphs; a GPU"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--xz", action="store_true", help="also write OUTPUT.xz, lines sorted by id"
    )
    args = parser.parse_args(argv)
    try:
        _run(args)
    except (ConfigError, IntegrityError, EnvironmentFault) as fault:
        sys.stderr.write(f"error: {fault}\n")
        return fault.exit_code
    return 0


def _run(args: argparse.Namespace) -> None:
    is_greedy = args.temperature == 0
    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=0 if is_greedy else args.top_k,
        top_p=1.0 if is_greedy else args.top_p,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
    )
    questions: list[Question] = []
    for source in args.source:
        found = read_questions(source, field=args.field, split=args.split)
        questions += found[: args.max_prompts]
    target = load_target(args.target, dtype=args.dtype, device=args.device)
    tokenizer = cast(SpecialTokenizer, load_tokenizer(args.target))  # fields set at run time
    _check_settings(args.output, target=target, sampling=sampling)
    engine = EngineConfig(
        max_num_requests=args.batch,
        max_num_batched_tokens=max(512, 4 * args.batch),
        max_model_len=args.max_model_len,
        deferred_output=args.graphs,
        cuda_graphs=args.graphs,
        audit=False,
    )
    tasks = question_tasks(questions, tokenizer) if questions else []
    tasks += self_chat_tasks(target, tokenizer, count=args.self_chat, seed=args.seed, engine=engine)
    tasks += self_text_tasks(target, tokenizer, count=args.self_text, seed=args.seed, engine=engine)
    if not tasks:
        raise ConfigError("nothing is asked; set --source, --self-chat or --self-text.")
    sampling = replace(sampling, stop_token_ids=target.stop_token_ids)
    answered = answer(target, tasks, output=args.output, sampling=sampling, engine=engine)
    if args.xz:
        write_xz(args.output)
    print(
        f"{answered.num_written} of {len(tasks)} documents written to {args.output}, "
        f"{answered.num_there} were there, {answered.num_too_long} prompts fill the context"
    )


def _check_settings(output: Path, *, target: Target, sampling: SamplingParams) -> None:
    """Refuse to go on with answers of another target or of other settings; else record them.

    Raises:
        ConfigError: names what differs.
        IntegrityError: the record is damaged.
    """
    path = output.with_name(f"{output.name}.settings.json")
    settings = target_hashes(target) | {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "max_new_tokens": sampling.max_new_tokens,
    }
    if output.is_file() and path.is_file():
        try:
            saved = json.loads(path.read_text(encoding="utf8"))
        except ValueError as fault:
            raise IntegrityError(f"{path}: damaged ({fault}); remove it and {output}.") from fault
        changed = [
            f"{key} {saved.get(key)}, now {value}"
            for key, value in settings.items()
            if saved.get(key) != value
        ]
        if changed:
            raise ConfigError(
                f"--output {output} holds answers with other settings ({'; '.join(changed)}); "
                "choose another --output or set them back."
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    raise SystemExit(main())
