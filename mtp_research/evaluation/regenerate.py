"""Training text for heads: the target's own answers, through our decode loop.

    python -m mtp_research.evaluation.regenerate --target assets/lab_tiny/target --output answers.jsonl \
        --source ../shared/data/corpus/arith.train.jsonl.xz --max-prompts 800 --self-chat 2000 --self-text 800

Heads trained on anything but the target's own output learn a distribution they are never asked for. Prompts come from the
user turns of a document file, or from the target itself: `--self-chat` lets it invent a user message and then answers it,
`--self-text` lets it begin a document and then goes on. A line holds token ids, so that encoding again cannot change the
trajectory. Killed runs resume: ids that the output already has are not made again.

Lives in `evaluation` because it drives the decode loop, which `data` and `training` must not import.
"""

import argparse
import json
import lzma
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_research.config import EngineConfig
from mtp_research.data.sources import read_documents
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.request import SamplingParams
from mtp_research.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.models.target import Target, load_target, load_tokenizer

_BEGINNINGS = ("def ", "class ", "import ", "from ", '"""', "#", "The ", "A ", "In ", "I ", "He ")
_MESSAGE_TOKENS, _BEGINNING_TOKENS = 96, 24


@dataclass(frozen=True)
class Task:
    """One line to make: the prompt and how it is called."""

    doc_id: str
    domain: str
    prompt: tuple[int, ...]


def answer(
    target: Target,
    tasks: Sequence[Task],
    *,
    output: Path,
    sampling: SamplingParams,
    engine: EngineConfig | None = None,
) -> int:
    """Append the target's continuation of every task that `output` does not hold yet.

    Args:
        target: the model whose output is wanted.
        tasks: prompts; those as long as the context are left out.
        output: JSONL file; lines are `id`, `domain`, `token_ids`, `num_prompt_tokens`.
        sampling: of the continuation; its seed is shifted by the task's index.
        engine: batch settings.

    Returns:
        Number of lines written.
    """
    done = _existing_ids(output)
    decoder = SpecDecoder(target, num_speculative_tokens=0, engine=engine)
    by_id = {task.doc_id: task for task in tasks}
    for index, task in enumerate(tasks):
        if task.doc_id not in done and len(task.prompt) < decoder.max_model_len:
            params = _reseed(sampling, index)
            decoder.add_request(task.prompt, sampling=params, request_id=task.doc_id)
    num_written = 0
    with output.open("a", encoding="utf8") as file:
        while decoder.scheduler.has_work:
            decoder.step()
            for record in decoder.stats.records[num_written:]:
                task = by_id[record.request_id]
                line = {
                    "id": task.doc_id,
                    "domain": task.domain,
                    "token_ids": [*task.prompt, *record.output_token_ids],
                    "num_prompt_tokens": len(task.prompt),
                }
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                num_written += 1
            file.flush()
    return num_written


def document_tasks(path: Path, tokenizer: object, *, max_prompts: int) -> list[Task]:
    """Prompts of a document file: each conversation up to its first user turn."""
    tasks = []
    for document in read_documents(path):
        if document.messages is None or len(tasks) == max_prompts:
            continue
        first = [{"role": "user", "content": document.messages[0][1]}]
        token_ids = tokenizer.apply_chat_template(first, add_generation_prompt=True, tokenize=True, return_dict=False)
        tasks.append(Task(document.doc_id, document.domain, tuple(token_ids)))
    return tasks


def self_chat_tasks(target: Target, tokenizer: object, *, count: int, seed: int, engine: EngineConfig) -> list[Task]:
    """Prompts whose user message the target invents, sampled at temperature 1 and top-p 0.95."""
    user, assistant, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|end|>"])
    opening = (tokenizer.bos_token_id, user)
    sampling = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=_MESSAGE_TOKENS, stop_token_ids=(end,))
    messages = _sample(target, [opening] * count, sampling=sampling, seed=seed, engine=engine)
    return [
        Task(f"self-chat:{seed}:{index}", "chat", (*opening, *message, assistant))
        for index, message in enumerate(messages)
        if len(message) > 1 and message[-1] == end
    ]


def self_text_tasks(target: Target, tokenizer: object, *, count: int, seed: int, engine: EngineConfig) -> list[Task]:
    """Beginnings of documents that the target continues from one of a few first words."""
    openings = [
        (tokenizer.bos_token_id, *tokenizer.encode(_BEGINNINGS[index % len(_BEGINNINGS)], add_special_tokens=False))
        for index in range(count)
    ]
    sampling = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=_BEGINNING_TOKENS)
    beginnings = _sample(target, openings, sampling=sampling, seed=seed, engine=engine)
    special = set(tokenizer.all_special_ids)
    return [
        Task(f"self-text:{seed}:{index}", "text", (*opening, *beginning))
        for index, (opening, beginning) in enumerate(zip(openings, beginnings, strict=True))
        if not special & set(beginning)
    ]


def _sample(
    target: Target, prompts: Sequence[tuple[int, ...]], *, sampling: SamplingParams, seed: int, engine: EngineConfig
) -> list[tuple[int, ...]]:
    decoder = SpecDecoder(target, num_speculative_tokens=0, engine=engine)
    for index, prompt in enumerate(prompts):
        decoder.add_request(prompt, sampling=_reseed(sampling, seed * 1_000_003 + index), request_id=str(index))
    while decoder.scheduler.has_work:
        decoder.step()
    records = sorted(decoder.stats.records, key=lambda record: int(record.request_id))
    return [record.output_token_ids for record in records]


def _reseed(sampling: SamplingParams, offset: int) -> SamplingParams:
    return SamplingParams(**{**vars(sampling), "seed": sampling.seed + offset})


def _existing_ids(output: Path) -> set[str]:
    """Ids in the file; a last line cut off by a kill is removed.

    Raises:
        IntegrityError: another line is not valid.
    """
    if not output.is_file():
        return set()
    lines = output.read_text(encoding="utf8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        output.write_text("".join(lines), encoding="utf8")
    return {record["id"] for record in _parse(lines, output)}


def _parse(lines: Sequence[str], path: Path) -> Iterator[dict]:
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as fault:
            raise IntegrityError(f"{path}:{number}: invalid JSON ({fault.msg}); remove the line or the file.") from fault


def _compress(output: Path) -> None:
    """Write `OUTPUT.xz` with its lines in the order of their ids: the same bytes whatever order requests finished in."""
    lines = output.read_text(encoding="utf8").splitlines(keepends=True)
    ordered = sorted(lines, key=lambda line: json.loads(line)["id"])
    output.with_name(f"{output.name}.xz").write_bytes(lzma.compress("".join(ordered).encode(), preset=9))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the module; see its docstring."""
    parser = argparse.ArgumentParser(prog="python -m mtp_research.evaluation.regenerate", description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file, appended to")
    parser.add_argument("--source", type=Path, action="append", default=[], help="document file(s) whose user turns are asked")
    parser.add_argument("--max-prompts", type=int, default=1 << 30, help="per source")
    parser.add_argument("--self-chat", type=int, default=0, help="user messages that the target invents")
    parser.add_argument("--self-text", type=int, default=0, help="documents that the target begins")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answers; 0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=32, help="requests decoded at once")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--xz", action="store_true", help="also write OUTPUT.xz, lines sorted by id")
    args = parser.parse_args(argv)
    try:
        _run(args)
    except (ConfigError, IntegrityError, EnvironmentFault) as fault:
        sys.stderr.write(f"error: {fault}\n")
        return fault.exit_code
    return 0


def _run(args: argparse.Namespace) -> None:
    target = load_target(args.target, dtype=args.dtype, device=args.device)
    tokenizer = load_tokenizer(args.target)
    engine = EngineConfig(max_num_requests=args.batch, max_num_batched_tokens=max(512, 4 * args.batch), audit=False)
    tasks = [
        task for path in args.source for task in document_tasks(path, tokenizer, max_prompts=args.max_prompts)
    ]
    tasks += self_chat_tasks(target, tokenizer, count=args.self_chat, seed=args.seed, engine=engine)
    tasks += self_text_tasks(target, tokenizer, count=args.self_text, seed=args.seed, engine=engine)
    eos = target.model.generation_config.eos_token_id or ()
    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
        stop_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
    )
    num_written = answer(target, tasks, output=args.output, sampling=sampling, engine=engine)
    if args.xz:
        _compress(args.output)
    print(f"{num_written} of {len(tasks)} documents written to {args.output}, the others were there already")


if __name__ == "__main__":
    raise SystemExit(main())
